"""What the scores read: signals of the tokens, and thin slices of the attention, from maps or while generating.

A tap wraps an ``Attend``. Its state is ``(inner state, slice)`` inside the layer scan, with a leading layer axis
outside; the slice belongs to the newest query of the call. Taps nest: ``answer_attention_tap(rauq_tap(attend))``.
"""

from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int

from jaxmeth.types import Attend, AttendContext, ConfigError, State, is_concrete
from jaxmeth.uncertainty.baselines import check_lengths

_READINGS = ("generating_query", "next_query")


def token_signals(
    logits: Float[Array, "B N V"], tokens: Int[Array, "B N"]
) -> tuple[Float[Array, "B N"], Float[Array, "B N"]]:
    """Log-probability of each token and entropy of the distribution it comes from, in nats, from teacher-forced logits.

    Args:
      logits: [b, i] are those from which token i is drawn; -inf excludes a token. Softmax in float32 or better.
      tokens: a negative one is padding: log-probability 0.

    Returns:
      ``(logp, entropy)``.

    Raises:
      ConfigError: a readable token of V or above (under ``jit`` its log-probability is NaN).
    """
    vocab_size = logits.shape[-1]
    if is_concrete(tokens) and tokens.size and np.asarray(tokens).max() >= vocab_size:
        raise ConfigError(f"tokens: found {np.asarray(tokens).max()}, expected below the vocabulary of {vocab_size}")
    return _token_signals(logits, tokens)


@jax.jit
def _token_signals(logits: Array, tokens: Array) -> tuple[Array, Array]:
    log_p = jax.nn.log_softmax(logits.astype(jnp.result_type(jnp.float32, logits.dtype)))
    chosen = jnp.take_along_axis(log_p, jnp.maximum(tokens, 0)[..., None], axis=-1, mode="fill", fill_value=jnp.nan)
    # 0 log 0 is 0, also in the gradient.
    possible = jnp.isfinite(log_p)
    p_log_p = jnp.exp(log_p) * jnp.where(possible, log_p, 0)
    return jnp.where(tokens < 0, 0, chosen[..., 0]), -p_log_p.sum(-1)


def previous_token_attention(
    attn: Float[Array, "B L H T T"],
    prompt_len: Int[Array, " B"],
    gen_len: Int[Array, " B"],
    max_gen: int,
    reading: str = "generating_query",
) -> Float[Array, "B L H P"]:
    """Attention on the previous token for the tokens i = 2..N, out of full maps: P = max_gen - 1, 0 past the end.

    Args:
      attn: after softmax; rows start at position 0 of the prompt (right-padded).
      reading: which entry, with 0-based positions over prompt (M) and answer. ``generating_query``: ``[q, q]`` with
        q = M + i - 2, the main diagonal: the query that generates token i stands on token i-1. ``next_query``:
        ``[q + 1, q]``, the subdiagonal: the weight that token i itself gives to token i-1; needs token N fed as well.

    Raises:
      ConfigError: an unknown reading, readable lengths that exceed max_gen or the map (under ``jit`` entries outside
        the map are NaN).

    Reference: arXiv 2505.20045; both public implementations take the diagonal, the wording of the paper
    suggests the subdiagonal, its theory fits the diagonal.
    """
    if reading not in _READINGS:
        raise ConfigError(f"reading: found {reading!r}, expected one of {', '.join(_READINGS)}")
    check_lengths(gen_len, max_gen)
    below = 1 if reading == "next_query" else 0
    if is_concrete(prompt_len) and is_concrete(gen_len):
        total = np.asarray(prompt_len) + np.asarray(gen_len)
        needed = total[np.asarray(gen_len) > 1].max(initial=0) - 1 + below
        if attn.shape[-1] < needed:
            raise ConfigError(f"attn: found T = {attn.shape[-1]}, expected at least {needed} with reading {reading!r}")
    return _entries(attn, prompt_len, gen_len, max_gen, below)


@partial(jax.jit, static_argnames=("max_gen", "below"))
def _entries(attn: Array, prompt_len: Array, gen_len: Array, max_gen: int, below: int) -> Array:
    entries = jnp.diagonal(attn, offset=-below, axis1=-2, axis2=-1)
    steps = jnp.arange(max(max_gen - 1, 0), dtype=prompt_len.dtype)[None]
    inside = steps < gen_len[:, None] - 1
    index = jnp.where(inside, prompt_len[:, None] + steps, 0)
    taken = jnp.take_along_axis(entries, index[:, None, None], axis=-1, mode="fill", fill_value=jnp.nan)
    return jnp.where(inside[:, None, None], taken, 0)


def _newest_row(q: Array, k: Array, ctx: AttendContext) -> Array:
    """Softmax row [B, H, S] of the last query, in float32 or better; zeros where it may attend nothing.

    The products are written as ``attention.dense`` writes them: with one query they are the same operation, which XLA
    then carries out once for both.
    """
    batch, heads, _, dim = q.shape
    kv_heads = k.shape[1]
    exact = jnp.promote_types(q.dtype, jnp.float32)
    grouped = (q[:, :, -1:] * ctx.scale).reshape(batch, kv_heads, heads // kv_heads, dim)
    scores = jnp.einsum("bktd,bksd->bkts", grouped, k, preferred_element_type=exact)
    if ctx.softcap is not None:
        scores = jnp.tanh(scores / ctx.softcap) * ctx.softcap
    scores = scores.reshape(batch, heads, 1, -1)
    mask = ctx.replace(q_pos=ctx.q_pos[:, -1:], q_slot=ctx.q_slot[-1:]).mask()
    scores = jnp.where(mask, scores, jnp.finfo(exact).min)
    top = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    weights = jnp.where(mask, jnp.exp(scores - top), 0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return (weights / jnp.where(total == 0, 1, total))[:, :, 0]


@lru_cache(maxsize=256)
def rauq_tap(attend: Attend) -> Attend:
    """``attend``, unchanged in what it returns, that also emits the weight of the newest query on its own key.

    That weight, ``softmax_s(q k_s)`` at the query's own slot, is recomputed from the last query alone, O(S) a layer: no
    [T, S] array is made, and ``attend`` may be sparse (the tap reads what dense attention would do). It is the
    ``generating_query`` reading of :func:`previous_token_attention` for the token generated next; the slice that comes
    with the prompt belongs to the first token, which has none, and ``rauq_step`` ignores it.

    State: ``(inner state, f32[B, H])`` in a layer, ``(inner, f32[L, B, H])`` outside (:func:`rauq_tap_init`); a row
    whose newest query is padding gets 0. The same ``attend`` gives the same object, as it is a static argument of
    ``jit``.
    """

    def tapped(q: Array, k: Array, v: Array, ctx: AttendContext, state: State) -> tuple[Array, State]:
        out, inner = attend(q, k, v, ctx, state[0])
        own = jax.lax.dynamic_index_in_dim(_newest_row(q, k, ctx), ctx.q_slot[-1], axis=-1, keepdims=False)
        return out, (inner, own.astype(jnp.float32))

    return tapped


def rauq_tap_init(
    state: State, num_layers: int, batch: int, num_heads: int
) -> tuple[State, Float32[Array, "{num_layers} {batch} {num_heads}"]]:
    """The state of :func:`rauq_tap` around ``state``, the one that the wrapped attend needs (None for dense)."""
    return state, jnp.zeros((num_layers, batch, num_heads), jnp.float32)


@lru_cache(maxsize=256)
def answer_attention_tap(attend: Attend) -> Attend:
    """``attend`` that also emits the newest query's weights on all key slots, the largest over the heads.

    For ``simple_focus``: the maximum over layers at the slots of the answer is one row of ``answer_attn``, that of the
    token generated next. More expensive than :func:`rauq_tap`: S numbers a layer and row are kept, not H, and the
    caller stores N of them; meant for comparisons.

    State: ``(inner state, f32[B, S])`` in a layer, ``(inner, f32[L, B, S])`` outside
    (:func:`answer_attention_tap_init`) with S the slots of the cache; slots that may not be attended hold 0.
    """

    def tapped(q: Array, k: Array, v: Array, ctx: AttendContext, state: State) -> tuple[Array, State]:
        out, inner = attend(q, k, v, ctx, state[0])
        return out, (inner, _newest_row(q, k, ctx).max(1).astype(jnp.float32))

    return tapped


def answer_attention_tap_init(
    state: State, num_layers: int, batch: int, slots: int
) -> tuple[State, Float32[Array, "{num_layers} {batch} {slots}"]]:
    """The state of :func:`answer_attention_tap` around ``state``, the one that the wrapped attend needs."""
    return state, jnp.zeros((num_layers, batch, slots), jnp.float32)
