"""Generation: one compiled loop with a key/value cache, for left-padded batches."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxmeth.attention.dense import dense
from jaxmeth.models.config import DecoderConfig
from jaxmeth.models.decoder import build, check_tokens, init_cache
from jaxmeth.models.layers import compute_dtype
from jaxmeth.types import Attend, Cache, ConfigError, Generation, Observe, Params, State, StepInfo


def truncate(
    logits: Float[Array, "B V"], top_k: int | None = None, top_p: float | Float[Array, ""] | None = None
) -> Float[Array, "B V"]:
    """Set to -inf all but the ``top_k`` largest logits, then all outside the nucleus of mass ``top_p``.

    The nucleus is the smallest set of most likely tokens whose probabilities sum to at least ``top_p``; the likeliest
    token always stays. Ties at the k-th logit all stay.

    Reference: Holtzman et al., The Curious Case of Neural Text Degeneration, arXiv 1904.09751, equation 2.
    """
    if top_k is not None:
        kth = jax.lax.top_k(logits, top_k)[0][:, -1:]
        logits = jnp.where(logits < kth, -jnp.inf, logits)
    if top_p is not None:
        order = jnp.argsort(-logits, axis=-1)
        probs = jax.nn.softmax(jnp.take_along_axis(logits, order, axis=-1), axis=-1)
        keep = jnp.cumsum(probs, axis=-1) - probs < top_p
        keep = jnp.take_along_axis(keep.at[:, 0].set(True), jnp.argsort(order, axis=-1), axis=-1)
        logits = jnp.where(keep, logits, -jnp.inf)
    return logits


class _Loop(NamedTuple):
    """What the loop carries; ``token``, ``logprob`` and ``entropy`` are of the last token made."""

    step: Array
    token: Array
    active: Array
    tokens: Array
    logprobs: Array
    entropy: Array
    lengths: Array
    cache: Cache
    state: State
    carry: Any


_STATIC = ("cfg", "max_new_tokens", "greedy", "top_k", "attend", "observe")


@functools.partial(jax.jit, static_argnames=_STATIC)
def _generate(
    params,
    tokens,
    mask,
    key,
    temperature,
    top_p,
    stop,
    state,
    carry,
    *,
    cfg,
    max_new_tokens,
    greedy,
    top_k,
    attend,
    observe,
) -> Generation:
    batch, length = tokens.shape
    model = build(cfg, params)

    def pick(step: Array, logits: Float[Array, "B V"]) -> tuple[Array, Array, Array]:
        """The next token, its log-probability and the entropy under the model's own distribution."""
        # Without the barrier XLA may compute the head's product inside what reads it, far slower than on its own.
        logits = jax.lax.optimization_barrier(logits)
        logp = jax.nn.log_softmax(logits, axis=-1)
        entropy = -jnp.sum(jnp.where(jnp.isneginf(logp), 0, jnp.exp(logp) * logp), axis=-1)
        if greedy:
            token = jnp.argmax(logits, axis=-1)
        else:
            token = jax.random.categorical(
                jax.random.fold_in(key, step), truncate(logits / temperature, top_k, top_p), axis=-1
            )
        token = token.astype(tokens.dtype)
        return token, jnp.take_along_axis(logp, token[:, None], axis=-1)[:, 0], entropy

    def record(loop: _Loop, logits: Float[Array, "B V"]) -> _Loop:
        """Choose a token from the logits, show it to the observer, write it down."""
        token, logprob, entropy = pick(loop.step, logits)
        info = StepInfo(token, logprob.astype(jnp.float32), entropy.astype(jnp.float32), loop.state, loop.active)
        carry, halt = (loop.carry, jnp.zeros((batch,), bool)) if observe is None else observe(loop.carry, info)
        halt = halt | jnp.any(token[:, None] == stop[None, :], axis=-1)

        def put(buffer: Array, value: Array) -> Array:
            return buffer.at[:, loop.step].set(jnp.where(loop.active, value, 0).astype(buffer.dtype))

        return loop._replace(
            step=loop.step + 1,
            token=jnp.where(loop.active, token, 0),
            active=loop.active & ~halt,
            tokens=put(loop.tokens, token),
            logprobs=put(loop.logprobs, info.logprob),
            entropy=put(loop.entropy, info.entropy),
            lengths=loop.lengths + loop.active,
            carry=carry,
        )

    def body(loop: _Loop) -> _Loop:
        hidden, cache, state = model.trunk(loop.token[:, None], None, None, loop.cache, attend, loop.state)
        return record(loop._replace(cache=cache, state=state), model.logits(hidden)[:, 0])

    cache = init_cache(cfg, batch, length + max_new_tokens, compute_dtype(params["norm"]["scale"].dtype))
    hidden, cache, state = model.trunk(tokens, mask, None, cache, attend, state)
    loop = _Loop(
        step=jnp.zeros((), jnp.int32),
        token=jnp.zeros((batch,), tokens.dtype),
        active=jnp.ones((batch,), bool),
        tokens=jnp.zeros((batch, max_new_tokens), tokens.dtype),
        logprobs=jnp.zeros((batch, max_new_tokens), jnp.float32),
        entropy=jnp.zeros((batch, max_new_tokens), jnp.float32),
        lengths=jnp.zeros((batch,), jnp.int32),
        cache=cache,
        state=state,
        carry=carry,
    )
    loop = record(loop, model.logits(hidden[:, -1:])[:, 0])
    loop = jax.lax.while_loop(lambda s: (s.step < max_new_tokens) & jnp.any(s.active), body, loop)
    return Generation(loop.tokens, loop.logprobs, loop.entropy, loop.lengths, loop.state, loop.carry)


def generate(
    params: Params,
    cfg: DecoderConfig,
    tokens: Int[Array, "B T"] | np.ndarray,
    mask: Bool[Array, "B T"] | Int[Array, "B T"] | np.ndarray,
    *,
    key: Array,
    max_new_tokens: int,
    temperature: float | Float[Array, ""] = 0.0,
    top_k: int | None = None,
    top_p: float | Float[Array, ""] | None = None,
    stop: tuple[int, ...] | Int[Array, " S"] | np.ndarray = (),
    attend: Attend | None = None,
    state: State = None,
    observe: Observe | None = None,
    carry: Any = None,
) -> Generation:
    """Continue each row by up to ``max_new_tokens`` tokens; compiled once a shape, one loop on the device.

    Token i is ``argmax`` at temperature 0, else a draw from ``softmax(logits / temperature)`` truncated by ``top_k``
    and ``top_p``, with key ``fold_in(key, i)``: the same key gives the same tokens. Rows end at a stop token (which
    counts), when ``observe`` says so, or at the limit.

    Args:
      params: parameters of ``cfg``.
      cfg: static.
      tokens: prompts, padded on the left.
      mask: True = a real token; the last column must be real in each row.
      key: consumed (unused at temperature 0).
      max_new_tokens: N, static.
      temperature: at least 0; whether it is 0 is static, its value is not.
      top_k: static.
      top_p: in (0, 1].
      stop: ids that end a row; any number of them compiles once.
      attend: static, as in ``apply``; sees T prompt tokens once, then one token a step.
      state: its initial state.
      observe: static ``(carry, StepInfo) -> (carry, stop bool[B])``, called after each token inside the loop;
        ``StepInfo.state`` is the attend state of the forward pass that gave this token.
      carry: its initial carry; returned.

    Returns:
      ``Generation``, 0 past ``lengths``. Logprobs and entropy are of the model's own distribution, in nats.

    Raises:
      ConfigError: ids outside the vocabulary, an empty prompt, more tokens than positions, a row whose last token is
        padding, or an argument out of range.
    """
    if not isinstance(max_new_tokens, int | np.integer) or isinstance(max_new_tokens, bool) or max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens: found {max_new_tokens!r}, expected a whole number of at least 1")
    if not isinstance(stop, tuple | jax.Array | np.ndarray):
        raise ConfigError(f"stop: found {stop!r}, expected a tuple or an array of token ids")
    check_tokens(cfg, tokens, max_new_tokens)
    tokens = jnp.asarray(tokens)
    if tuple(mask.shape) != tuple(tokens.shape):
        raise ConfigError(f"mask: found shape {tuple(mask.shape)}, expected that of tokens {tuple(tokens.shape)}")
    if not isinstance(mask, jax.core.Tracer) and not np.all(np.asarray(mask)[:, -1]):
        row = int(np.argmin(np.asarray(mask)[:, -1].astype(bool)))
        raise ConfigError(f"mask: found padding at the end of row {row}, expected prompts padded on the left")
    greedy = not isinstance(temperature, jax.core.Tracer) and float(temperature) == 0.0
    if not isinstance(temperature, jax.core.Tracer) and not 0 <= float(temperature) < np.inf:
        raise ConfigError(f"temperature: found {temperature}, expected a finite number of at least 0")
    if top_k is not None and not 1 <= top_k <= cfg.vocab_size:
        raise ConfigError(f"top_k: found {top_k}, expected 1 to {cfg.vocab_size}")
    if top_p is not None and not isinstance(top_p, jax.core.Tracer) and not 0 < float(top_p) <= 1:
        raise ConfigError(f"top_p: found {top_p}, expected a number in (0, 1]")
    # -1 equals no token; four slots or more share one compilation.
    stop_ids = np.full(max(4, len(stop)), -1, np.int32) if isinstance(stop, tuple) else stop
    if isinstance(stop, tuple):
        stop_ids[: len(stop)] = stop
    return _generate(
        params,
        tokens,
        mask,
        key,
        jnp.asarray(1.0 if greedy else temperature, jnp.float32),
        None if top_p is None else jnp.asarray(top_p, jnp.float32),
        jnp.asarray(stop_ids),
        state,
        carry,
        cfg=cfg,
        max_new_tokens=max_new_tokens,
        greedy=greedy,
        top_k=top_k,
        attend=attend or dense,
        observe=observe,
    )
