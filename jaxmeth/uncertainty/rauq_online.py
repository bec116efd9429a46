"""RAUQ while a model generates: one step a token, O(L H), for one answer; ``vmap`` over a batch.

The head of a layer is known only when the answer ends, so the recurrence is kept for all heads and
:func:`rauq_finalize` picks. The result is that of ``rauq`` to rounding, at any token of the answer so far. With
``generate`` and ``rauq_tap``, whose slice is [L, B, H]::

    step = jax.vmap(partial(rauq_step, config=config), in_axes=(0, 0, 1, 0))

    def observe(carry, info):
        _, own = info.state
        return step(carry, info.logprob, own, info.active), jnp.zeros_like(info.active)

    carry = jax.tree.map(lambda x: jnp.broadcast_to(x, (B, *x.shape)), rauq_init(L, H))
    ...
    scores = jax.vmap(partial(rauq_finalize, config=config))(carry).score

Reference: arXiv 2505.20045 (the recurrence). Reconstruction: keeping every head; the paper's alternative is one head a
layer, chosen beforehand on a few answers.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, DTypeLike, Float, Int, Num

from jaxmeth.types import ConfigError
from jaxmeth.uncertainty.rauq import RAUQConfig, RAUQResult, check_layers, check_signal, finish
from jaxmeth.uncertainty.recurrence import log_mix, signal_from_entropy

_DEFAULT = RAUQConfig()
_AGGREGATIONS = ("meanlog", "sumlog", "mean")


class RAUQState(NamedTuple):
    """Of one answer so far: log c, the sums of log c, of c and of the attention for every head, and the tokens seen."""

    log_c: Float[Array, "*B L H"]
    sum_log_c: Float[Array, "*B L H"]
    sum_c: Float[Array, "*B L H"]
    sum_attn: Float[Array, "*B L H"]
    n: Int[Array, "*B"]


def _check(config: RAUQConfig) -> None:
    if config.recurrence != "full":
        raise ConfigError(f"recurrence: found {config.recurrence!r}, expected 'full' in the online form")
    if config.token_agg not in _AGGREGATIONS:
        expected = ", ".join(_AGGREGATIONS)
        raise ConfigError(f"token_agg: found {config.token_agg!r}, expected one of {expected} in the online form")


def rauq_init(num_layers: int, num_heads: int, dtype: DTypeLike = jnp.float32) -> RAUQState:
    """The state before the first token: zeros [L, H]."""
    zeros = jnp.zeros((num_layers, num_heads), dtype)
    return RAUQState(zeros, zeros, zeros, zeros, jnp.zeros((), jnp.int32))


def rauq_step(
    state: RAUQState,
    logp_t: Float[Array, ""],
    prev_attn_t: Float[Array, "L2 H2"],
    active: Bool[Array, ""],
    *,
    entropy_t: Float[Array, ""] | None = None,
    vocab_size: Num[ArrayLike, ""] | None = None,
    config: RAUQConfig = _DEFAULT,
) -> RAUQState:
    """Take in one generated token: ``c = alpha s + (1 - alpha) a c`` in every head, on logarithms.

    Args:
      logp_t: log-probability of the token, nats.
      prev_attn_t: attention of the query that generated it on the token before. What comes with the first token is
        ignored, NaN included: it looks at the prompt.
      active: False (the answer has ended) leaves the state as it is, whatever the rest holds.
      entropy_t: of the token's distribution, nats; with ``vocab_size`` needed by the entropy signal only.

    Raises:
      ConfigError: a recurrence but ``full``, a token aggregation but meanlog, sumlog or mean, or what does not fit.
    """
    _check(config)
    check_signal(entropy_t, vocab_size, (), config)
    if prev_attn_t.shape != state.log_c.shape:
        raise ConfigError(f"prev_attn_t: found shape {prev_attn_t.shape}, expected {state.log_c.shape}")
    dtype, first = state.log_c.dtype, state.n == 0
    if config.signal == "prob":
        log_s = jnp.where(active, logp_t.astype(dtype), 0)
    else:
        log_s = signal_from_entropy(jnp.where(active, entropy_t.astype(dtype), 0), vocab_size)
    a = jnp.where(first | ~active, 0, prev_attn_t.astype(dtype))
    log_c = jnp.where(first, log_s, log_mix(log_s, state.log_c, a, config.alpha))
    new = RAUQState(log_c, state.sum_log_c + log_c, state.sum_c + jnp.exp(log_c), state.sum_attn + a, state.n + 1)
    return jax.tree.map(lambda new, old: jnp.where(active, new, old), new, state)


def rauq_finalize(
    state: RAUQState, *, layers: tuple[int, ...] | None = None, config: RAUQConfig = _DEFAULT
) -> RAUQResult:
    """Choose each layer's head by its mean attention and score the answer so far; ``confidence`` is None.

    Args:
      layers: static; indices into the state's L axis, None: ``middle_layers(L)``.

    Returns:
      ``RAUQResult`` without a batch axis; ``empty_score`` before the first token.

    Raises:
      ConfigError: layers out of range, or a configuration that :func:`rauq_step` refuses.
    """
    _check(config)
    return _finalize(state, check_layers(layers, state.log_c.shape[0]), config)


@partial(jax.jit, static_argnames=("layers", "config"))
def _finalize(state: RAUQState, layers: tuple[int, ...], config: RAUQConfig) -> RAUQResult:
    chosen = jnp.asarray(layers)
    heads = jnp.argmax(state.sum_attn[chosen], axis=-1).astype(jnp.int32)
    sums = state.sum_c if config.token_agg == "mean" else state.sum_log_c
    total = -jnp.take_along_axis(sums[chosen], heads[:, None], axis=-1)[:, 0]
    layer_scores = total if config.token_agg == "sumlog" else total / jnp.maximum(state.n, 1)
    return RAUQResult(*finish(layer_scores, state.n, config), heads, None)
