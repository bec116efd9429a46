"""Token lists (the paper's front end of DHSA): which key tokens each block of queries sees, and attention over them.

Reference: Long-Context Modeling with Dynamic Hierarchical Sparse Attention for Memory-Constrained LLM Inference,
arXiv 2510.24606, section 3; details from the authors' public code where marked.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxmeth.attention.dhsa_chunks import ascending, check_queries, chunk_repr, finite, upsample
from jaxmeth.types import ConfigError, whole_number

POOLINGS = ("avgpool_norm", "avgpool", "maxpool")


def query_repr(
    q: Float[Array, "B H L D"],
    size: int,
    pooling: str = "avgpool_norm",
    legacy_pad_mean: bool = False,
    valid: Bool[Array, "B L"] | None = None,
) -> Float[Array, "B nq D"]:
    """The vector of each block of queries, heads averaged; mean and root run over real tokens, and none gives 0.

    ``valid``: True = a real token; None = all. ``legacy_pad_mean``: as the public code, the mean runs over the whole
    block, what is not real as 0 (the root takes the real length). Float32 or better.
    """
    if pooling not in POOLINGS:
        raise ConfigError(f"pooling: found {pooling!r}, expected one of {', '.join(POOLINGS)}")
    batch, _, length, dim = q.shape
    rows = -(-length // size)
    x = jnp.mean(q.astype(jnp.promote_types(q.dtype, jnp.float32)), axis=1)
    real = jnp.ones((batch, length), bool) if valid is None else valid
    rest = (0, rows * size - length)
    x = jnp.pad(x, ((0, 0), rest, (0, 0))).reshape(batch, rows, size, dim)
    real = jnp.pad(real, ((0, 0), rest)).reshape(batch, rows, size)
    some = jnp.any(real, axis=2)[..., None]
    if pooling == "maxpool":
        fill = 0 if legacy_pad_mean else -jnp.inf
        return jnp.where(some, jnp.max(jnp.where(real[..., None], x, fill), axis=2), 0)
    number = jnp.maximum(jnp.sum(real, axis=2), 1).astype(x.dtype)[..., None]
    mean = jnp.sum(jnp.where(real[..., None], x, 0), axis=2) / (size if legacy_pad_mean else number)
    return mean * jnp.sqrt(number) if pooling == "avgpool_norm" else mean


def select_tokens(
    q: Float[Array, "B H Lq D"],
    k: Float[Array, "B Hkv L D"],
    boundaries: Int[Array, "B N"],
    n_valid: Int[Array, " B"],
    *,
    block_size: int,
    budget: int = 2048,
    local_tokens: int = 64,
    global_tokens: int = 128,
    window: int | None = None,
    pooling: str = "avgpool_norm",
    legacy_pad_mean: bool = False,
    kv_mask: Bool[Array, "B L"] | None = None,
    start: int | Int[Array, ""] = 0,
) -> tuple[Int[Array, "B nq W"], Int[Array, "B nq"]]:
    """For each block of queries the ``budget`` key tokens that all heads share (the paper's selection).

    Score of a token = block vector . chunk vector of its chunk. Always kept: the last ``local_tokens`` of the tokens
    the block may see, then the first ``global_tokens`` (of the window, if there is one); the rest go by score, equal
    scores to the lower token. A set: each token once, sinks and locals within the budget. A NaN in a key changes its
    own chunk's score, a NaN in a query the list of its block. Reconstruction: the public code overwrites list entries
    by the sinks, so that a token can count twice, and knows no padding.

    Args:
      q: queries, or the first Lq of them where the last ones attend densely; the first lies on slot ``start``.
      k: keys; queries and keys are of the same tokens.
      boundaries: chunk edges, see ``select_boundaries``.
      n_valid: real chunks.
      block_size: queries in a block, static.
      budget: tokens a block keeps, static.
      local_tokens: the most recent ones always kept.
      global_tokens: the first ones always kept.
      window: sliding window of the layer; None = none.
      pooling: of keys and queries; "maxpool" applies to queries, keys then take "avgpool".
      legacy_pad_mean: see ``query_repr``.
      kv_mask: True = a real token. Others enter no list and no mean; sinks and locals are counted among the real ones.
      start: slot of the first query; may be traced.

    Returns:
      ``(int32[B, nq, min(budget, L)], int32[B, nq])``: tokens ascending, the last one repeated after the count.

    Raises: ConfigError for shapes and numbers that do not fit.
    """
    check_queries(q, k, kv_mask, start)
    for name, value in {"block_size": block_size, "budget": budget}.items():
        whole_number(name, value, 1)
    for name, value in {"local_tokens": local_tokens, "global_tokens": global_tokens}.items():
        whole_number(name, value, 0)
    length, start = k.shape[2], jnp.asarray(start, jnp.int32)
    real = jnp.ones((1, length), bool) if kv_mask is None else kv_mask
    of_queries = None if kv_mask is None else jax.lax.dynamic_slice_in_dim(kv_mask, start, q.shape[2], axis=1)
    chunks = chunk_repr(k, boundaries, n_valid, "avgpool" if pooling == "maxpool" else pooling, kv_mask)
    rows = query_repr(q, block_size, pooling, legacy_pad_mean, of_queries)
    scores = finite(jnp.einsum("bid,bcd->bic", rows, chunks, precision="highest"))
    end = (start + (jnp.arange(rows.shape[1], dtype=jnp.int32) + 1) * block_size)[:, None]
    token = jnp.arange(length, dtype=jnp.int32)[None]
    first, begin = jnp.zeros_like(end), jnp.zeros_like(end)
    if window is not None:
        first, begin = end - window, jnp.maximum(end - block_size - window, 0)
    last = jnp.minimum(end, length)
    # Real tokens before each slot.
    before = jnp.pad(jnp.cumsum(real, axis=1, dtype=jnp.int32), ((0, 0), (1, 0)))
    until = before[:, :-1][:, None]
    real, seen = real[:, None], (token < last)[None]
    sink = real & seen & (token >= begin)[None] & (until < before[:, begin] + global_tokens)
    allowed = real & seen & (token >= first)[None]
    local = allowed & (until >= before[:, last] - min(local_tokens, budget))
    allowed |= sink
    value = upsample(scores, boundaries, length)
    high = jnp.finfo(value.dtype).max
    value = jnp.where(local, jnp.inf, jnp.where(sink, high, jnp.minimum(value, high)))
    value = jnp.where(allowed, value, -jnp.inf)
    width = min(budget, length)
    _, idx = jax.lax.top_k(value, width)
    count = jnp.minimum(jnp.sum(allowed, -1, dtype=jnp.int32), width)
    count = jnp.broadcast_to(count, idx.shape[:2])
    return jax.lax.stop_gradient((ascending(idx.astype(jnp.int32), count), count))


def token_attention(
    q: Float[Array, "B H Lq D"],
    k: Float[Array, "B Hkv L D"],
    v: Float[Array, "B Hkv L D"],
    idx: Int[Array, "B nq W"],
    count: Int[Array, "B nq"],
    *,
    block_size: int,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    start: int | Int[Array, ""] = 0,
) -> Float[Array, "B H Lq D"]:
    """Exact causal attention of each block of queries over its listed tokens, all heads sharing the list.

    Blocks go one after the other, so memory is bounded by one block's W tokens. An entry listed twice counts twice. A
    query that sees nothing gives 0. The first query lies on slot ``start``; ``softcap`` is c of ``c tanh(score / c)``.
    A NaN in the value of a listed token reaches its whole block of queries.

    Raises: ConfigError for shapes that do not fit.
    """
    check_queries(q, k, None, start)
    batch, heads, length, dim = q.shape
    rows, group = idx.shape[1], heads // k.shape[1]
    if rows != -(-length // block_size):
        found = f"{rows} lists for {length} queries in blocks of {block_size}"
        raise ConfigError(f"idx, block_size: found {found}, expected {-(-length // block_size)}")
    exact = jnp.promote_types(q.dtype, jnp.float32)
    scaled = q.astype(exact) * (dim**-0.5 if scale is None else scale)
    blocks = jnp.pad(scaled, ((0, 0), (0, 0), (0, rows * block_size - length), (0, 0)))
    blocks = blocks.reshape(batch, k.shape[1], group, rows, block_size, dim)

    def one(item):
        block, tokens, number, first = item
        keys, values = (jax.vmap(lambda a, t: a[:, t])(x, tokens).astype(exact) for x in (k, v))  # [B, Hkv, W, D]
        s = jnp.einsum("bkgtd,bkwd->bkgtw", block, keys)
        if softcap is not None:
            s = softcap * jnp.tanh(s / softcap)
        distance = (first + jnp.arange(block_size))[None, :, None] - tokens[:, None, :]
        seen = (distance >= 0) & (jnp.arange(tokens.shape[1])[None] < number[:, None])[:, None]
        seen = seen if window is None else seen & (distance < window)
        seen = seen[:, None, None]
        s = jnp.where(seen, s, jnp.finfo(exact).min)
        p = jnp.where(seen, jnp.exp(s - jax.lax.stop_gradient(jnp.max(s, -1, keepdims=True))), 0)
        total = jnp.sum(p, -1, keepdims=True)
        return jnp.einsum("bkgtw,bkwd->bkgtd", p / jnp.where(total > 0, total, 1), values)

    first = jnp.asarray(start, jnp.int32) + jnp.arange(rows, dtype=jnp.int32) * block_size
    items = (jnp.moveaxis(blocks, 3, 0), jnp.moveaxis(idx, 1, 0), jnp.moveaxis(count, 1, 0), first)
    out = jnp.moveaxis(jax.lax.map(one, items), 0, 3)
    return out.reshape(batch, heads, rows * block_size, -1)[:, :, :length].astype(q.dtype)
