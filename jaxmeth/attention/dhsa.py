"""DHSA: dynamic hierarchical sparse attention. A namespace: ``from jaxmeth.attention import dhsa``.

A prompt attends to a small, input-dependent choice of key blocks: chunks of keys are scored against blocks of queries
by pooled vectors, the best within a budget are kept, and attention is exact among them. The model is not retrained.

    cfg = dhsa.DHSAConfig(density=1 / 8)
    models.apply(params, model, tokens, attend=dhsa.attend(cfg))
    models.generate(params, model, tokens, mask, attend=dhsa.attend(cfg), state=dhsa.init_state(...), ...)

Reference: Long-Context Modeling with Dynamic Hierarchical Sparse Attention for Memory-Constrained LLM Inference,
arXiv 2510.24606.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxmeth.attention.dense import blocked, dense
from jaxmeth.attention.dhsa_blocks import BlockList, DHSAConfig, dense_from_blocks, refuse_gradient, select_blocks
from jaxmeth.attention.dhsa_chunks import (
    ascending,
    at_ends,
    boundary_labels,
    chunk_of_token,
    chunk_repr,
    finite,
    fixed_boundaries,
    select_boundaries,
    similarity_scores,
    upsample,
)
from jaxmeth.attention.dhsa_predictor import (
    Encoder,
    PredictorTraining,
    boundary_logits,
    boundary_loss,
    boundary_predictor_init,
    boundary_targets,
    encoder_of,
    train_boundary_predictor,
)
from jaxmeth.attention.dhsa_tokens import query_repr, select_tokens, token_attention
from jaxmeth.kernels import block_attention, decode_attention
from jaxmeth.types import Attend, AttendContext, ConfigError, Params, State

__all__ = [
    "BlockList",
    "DHSAConfig",
    "DHSAState",
    "Encoder",
    "PredictorTraining",
    "at_ends",
    "attend",
    "block_sparse_attention",
    "boundary_labels",
    "boundary_logits",
    "boundary_loss",
    "boundary_predictor_init",
    "boundary_targets",
    "chunk_of_token",
    "chunk_repr",
    "decode",
    "dense_from_blocks",
    "find_boundaries",
    "fixed_boundaries",
    "init_state",
    "prefill",
    "query_repr",
    "select_blocks",
    "select_boundaries",
    "select_tokens",
    "similarity_scores",
    "token_attention",
    "train_boundary_predictor",
    "upsample",
]


class DHSAState(NamedTuple):
    """What decoding needs of the keys in a cache: their sum in each block of bk slots, and how many are real.

    Leaves get a leading layer axis in ``init_state``, as the decoder scans them with the layers.
    """

    total: Float[Array, "*L B Hkv nk D"]
    count: Int[Array, "*L B nk"]


def init_state(cfg: DHSAConfig, layers: int, batch: int, kv_heads: int, slots: int, dim: int) -> DHSAState:
    """The empty state of all layers for a cache of ``slots`` (prompt and new tokens together)."""
    blocks = -(-slots // cfg.bk)
    shape = (layers, batch, kv_heads, blocks, dim)
    return DHSAState(jnp.zeros(shape), jnp.zeros((layers, batch, blocks), jnp.int32))


def block_sparse_attention(q, k, v, blocks: BlockList, *, bq: int, bk: int, **options):
    """``kernels.block_attention`` over a ``BlockList``."""
    return block_attention(q, k, v, blocks.idx, blocks.count, bq=bq, bk=bk, **options)


def find_boundaries(
    k: Float[Array, "B Hkv S D"], cfg: DHSAConfig, predictor: Params | None = None
) -> tuple[Int[Array, "B N"], Int[Array, " B"]]:
    """Chunk edges of one layer's keys by ``cfg.boundaries``: "fixed", "similarity" (theta 0) or "predicted".

    Two choices of the paper go by parts: pass ``select_blocks`` those of ``select_boundaries(boundary_labels(...))``
    for the oracle's, or those of layer 0 for boundaries that all layers share (an ``attend`` sees one layer at a time).
    A NaN in a key of any head removes the boundaries within its window, for all heads.

    Raises: ConfigError for "predicted" without a predictor.
    """
    batch, _, slots, _ = k.shape
    if cfg.boundaries == "fixed":
        return fixed_boundaries(batch, slots, cfg.bk)
    keys = jnp.moveaxis(k, 1, 2).reshape(batch, slots, -1)
    most = max(1, slots // cfg.bk * cfg.chunk_beta)
    if cfg.boundaries == "similarity":
        return select_boundaries(similarity_scores(keys), most, 0.0, cfg.nms)
    if predictor is None:
        raise ConfigError("predictor: found none, expected parameters for boundaries='predicted'")
    score = at_ends(boundary_logits(predictor, keys), encoder_of(predictor).w)
    return select_boundaries(score, most, cfg.theta, cfg.nms)


def prefill(
    q: Float[Array, "B H T D"],
    k: Float[Array, "B Hkv S D"],
    v: Float[Array, "B Hkv S D"],
    cfg: DHSAConfig,
    state: DHSAState | None = None,
    *,
    predictor: Params | None = None,
    kv_mask: Bool[Array, "B S"] | None = None,
    start: int | Int[Array, ""] = 0,
    window: int | Int[Array, ""] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    backend: str = "auto",
) -> tuple[Float[Array, "B H T D"], DHSAState]:
    """Sparse attention of a prompt; its last ``cfg.dense_last`` queries attend densely.

    Query t attends exactly to the keys up to its own slot that lie in the blocks ``select_blocks`` keeps for its row.
    Memory is bounded by the blocks, never by T x S. Returns the output and what ``decode`` needs, made from all of k;
    a ``state`` handed in is not read. Lists carry no gradient.

    Raises: ConfigError for shapes that do not fit, and under a gradient with respect to q, k or v where the rule
      chooses by later tokens (see ``DHSAConfig.causal``), unless ``cfg.noncausal_training``. Training only what comes
      after the last attention goes unnoticed.

    Reference: arXiv 2510.24606, section 3.
    """
    if not cfg.causal and not cfg.noncausal_training:
        v = refuse_gradient(v)  # select_blocks refuses q and k
    boundaries = None
    if cfg.rule == "chunk" and cfg.boundaries != "fixed":
        boundaries = find_boundaries(jax.lax.stop_gradient(k), cfg, predictor)
    blocks = select_blocks(q, k, cfg, boundaries, kv_mask, start, window)
    options = {"kv_valid": kv_mask, "window": window, "scale": scale, "softcap": softcap, "backend": backend}
    length = q.shape[2]
    tail = min(cfg.dense_last, length)
    out = block_sparse_attention(q, k, v, blocks, bq=cfg.bq, bk=cfg.bk, start=start, **options)
    if tail:
        last, _ = blocked(q[:, :, length - tail :], k, v, start=start + length - tail, **options)
        out = jnp.concatenate([out[:, :, : length - tail], last], axis=2)
    return out, _summarise(k, cfg, kv_mask, start + length)


def _summarise(k: Array, cfg: DHSAConfig, valid: Array | None, end: int | Array) -> DHSAState:
    """Sums of the keys in each block, over real slots before ``end``."""
    batch, kv_heads, slots, dim = k.shape
    blocks = -(-slots // cfg.bk)
    real = jnp.ones((batch, slots), bool) if valid is None else valid
    real = real & (jnp.arange(slots) < end)[None]
    exact = jnp.promote_types(k.dtype, jnp.float32)
    pad = blocks * cfg.bk - slots
    x = jnp.where(real[:, None, :, None], k.astype(exact), 0)
    x = jnp.pad(x, ((0, 0), (0, 0), (0, pad), (0, 0))).reshape(batch, kv_heads, blocks, cfg.bk, dim)
    number = jnp.sum(jnp.pad(real, ((0, 0), (0, pad))).reshape(batch, blocks, cfg.bk), -1, dtype=jnp.int32)
    return DHSAState(jax.lax.stop_gradient(jnp.sum(x, axis=3)), number)


def decode(
    q: Float[Array, "B H 1 D"],
    k: Float[Array, "B Hkv S D"],
    v: Float[Array, "B Hkv S D"],
    state: DHSAState,
    cfg: DHSAConfig,
    *,
    slot: Int[Array, ""],
    kv_mask: Bool[Array, "B S"] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    backend: str = "auto",
) -> tuple[Float[Array, "B H 1 D"], DHSAState]:
    """One token over the cache, which holds its key at ``slot``: sink, tail and the best blocks up to the budget.

    The block that ``slot`` lies in is the growing tail chunk; it closes when full. Blocks are scored by the token's
    query (with ``cfg.group_select`` "kv" averaged over the heads of a key/value head, which then share a list) against
    sqrt(count) times their mean key, or the mean key with pooling "avgpool"; only ``bk`` slots of each kept block are
    read. Blocks of which ``kv_mask`` shows nothing are left out, and the sink is the first it shows: with a window in
    the mask, a budget of at least the window is dense. The cache is never evicted. Reconstruction: the public code
    decodes densely; here chunks are blocks of ``cfg.bk`` slots, also where the prompt's chunks were of variable length.

    Args:
      q: one query a row.
      k: the cache's keys, the token's own included.
      v: its values.
      state: of this layer, before this token.
      cfg: static; whole blocks are kept while they show at most ``decode_budget`` tokens, sink and tail in any case
        (-1 = all: dense attention).
      slot: where the token's key lies.
      kv_mask: True = a real slot that the token may see; slots after ``slot`` must be False. None = all up to
        ``slot``.
    """
    batch, kv_heads, slots, dim = k.shape
    own = jax.lax.dynamic_slice_in_dim(k, slot, 1, axis=2).astype(state.total.dtype)
    here = slot // cfg.bk
    valid = (jnp.arange(slots) <= slot)[None] if kv_mask is None else kv_mask
    valid = jnp.broadcast_to(valid, (batch, slots))
    real = jax.lax.dynamic_slice_in_dim(valid, slot, 1, axis=1).astype(jnp.int32)
    total = state.total.at[:, :, here].add(jnp.where(real[:, None] > 0, own[:, :, 0], 0))
    state = DHSAState(total, state.count.at[:, here].add(real[:, 0]))
    options = {"kv_valid": valid, "scale": scale, "softcap": softcap, "backend": backend}
    if cfg.decode_budget < 0:
        return decode_attention(q, k, v, **options), state
    blocks = state.count.shape[-1]
    # So many consecutive tokens touch at most this many blocks.
    width = min(blocks, max(cfg.sink_blocks + 1, -(-(cfg.decode_budget - 1) // cfg.bk) + 1))
    shown = jnp.pad(valid, ((0, 0), (0, blocks * cfg.bk - slots))).reshape(batch, 1, blocks, cfg.bk)
    shown = jnp.sum(shown, axis=-1, dtype=jnp.int32)
    number = jnp.maximum(state.count[:, None], 1).astype(total.dtype)
    query = q.reshape(batch, kv_heads, -1, dim).astype(total.dtype)
    if cfg.group_select == "kv":
        query = jnp.mean(query, axis=2, keepdims=True)
    weight = 1 / number if cfg.pooling == "avgpool" else jax.lax.rsqrt(number)
    score = finite(jnp.einsum("bkgd,bknd->bkgn", query, total).reshape(batch, -1, blocks) * weight)
    block = jnp.arange(blocks, dtype=jnp.int32)[None, None]
    sink = jnp.argmax(shown > 0, axis=-1)[..., None]
    forced = (block == here) | ((block >= sink) & (block < sink + cfg.sink_blocks))
    forced &= shown > 0
    value = jnp.where(shown > 0, jnp.where(forced, jnp.inf, score), -jnp.inf)
    _, idx = jax.lax.top_k(value, width)
    size = jnp.take_along_axis(jnp.broadcast_to(shown, value.shape), idx, axis=-1)
    fits = (size > 0) & (jnp.cumsum(size, axis=-1) <= cfg.decode_budget)
    count = jnp.maximum(jnp.sum(fits, -1, dtype=jnp.int32), jnp.sum(forced, -1, dtype=jnp.int32))
    idx = ascending(idx.astype(jnp.int32), count)
    return decode_attention(q, k, v, idx=idx, count=count, bk=cfg.bk, **options), state


def _attend(q, k, v, ctx: AttendContext, state: State, *, cfg: DHSAConfig, predictor: Params | None):
    if not ctx.causal:
        raise ConfigError("causal: found a bidirectional model, expected a causal one for DHSA")
    if q.shape[2] == 1:
        if state is None:
            return dense(q, k, v, ctx, state)
        slots = jnp.arange(k.shape[2], dtype=jnp.int32)
        seen = (slots <= ctx.q_slot[0]) & (slots > ctx.q_slot[0] - ctx.window)
        return decode(
            q, k, v, state, cfg, slot=ctx.q_slot[0], kv_mask=ctx.kv_valid & seen[None], scale=ctx.scale,
            softcap=ctx.softcap,
        )  # fmt: skip
    out, new = prefill(
        q, k, v, cfg, predictor=predictor, kv_mask=ctx.kv_valid, start=ctx.q_slot[0], window=ctx.window,
        scale=ctx.scale, softcap=ctx.softcap,
    )  # fmt: skip
    return out, None if state is None else new


def attend(cfg: DHSAConfig, predictor: Params | None = None) -> Attend:
    """DHSA as the attention of any decoder: prompts by ``prefill``, single tokens by ``decode``.

    Make it once: a new one recompiles. Without a state single tokens attend densely; with ``init_state`` they keep
    ``cfg.decode_budget``. Layers with a window stay within it. Blocks are counted from slot 0 of the batch: left
    padding by other than a multiple of ``bq`` shifts a prompt against them, which changes its lists, and the result as
    much as sparsity itself does.
    """
    if cfg.rule == "chunk" and cfg.boundaries == "predicted" and predictor is None:
        raise ConfigError("predictor: found none, expected parameters for boundaries='predicted'")
    return functools.partial(_attend, cfg=cfg, predictor=predictor)
