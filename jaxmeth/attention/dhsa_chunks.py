"""Chunks of variable length (the paper's front end of DHSA): boundaries, representations, token lists.

Reference: Long-Context Modeling with Dynamic Hierarchical Sparse Attention for Memory-Constrained LLM Inference,
arXiv 2510.24606, section 3; details from the authors' public code where marked.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int

from jaxmeth.types import ConfigError

POOLINGS = ("avgpool_norm", "avgpool", "maxpool")


def finite(score: Float[Array, "*S"]) -> Float[Array, "*S"]:
    """Scores with NaN as the lowest number and infinities as the outermost: none ties with what is forced or barred."""
    least, most = jnp.finfo(score.dtype).min, jnp.finfo(score.dtype).max
    return jnp.clip(jnp.where(jnp.isnan(score), least, score), least, most)


def fixed_boundaries(batch: int, length: int, size: int) -> tuple[Int[Array, "B N"], Int[Array, " B"]]:
    """Boundaries every ``size`` tokens, 0 and ``length`` included, and the number of chunks of each row."""
    if size < 1 or length < 1:
        raise ConfigError(f"size, length: found {size}, {length}, expected at least 1")
    edges = jnp.asarray([*range(0, length, size), length], jnp.int32)
    return jnp.broadcast_to(edges, (batch, edges.size)), jnp.full(batch, edges.size - 1, jnp.int32)


def boundary_labels(attn: Float[Array, "L L"], w: int = 4, window: int | None = None) -> Float[Array, " L"]:
    r"""How differently later queries treat the w tokens on the two sides of each gap: the predictor's target.

    .. math:: \mathrm{ratio}(p) = \frac{\max(P_p, F_p) + \epsilon}{\min(P_p, F_p) + \epsilon}, \quad
              P_p = \sum_{r \ge p+w} \sum_{c=p-w+1}^{p} A_{rc}, \quad F_p = \sum_{r \ge p+w} \sum_{c=p+1}^{p+w} A_{rc}

    with epsilon 1e-6. ``window`` bounds the rows to p+w .. p+w+window-1. Valid for 2w-1 <= p < L-2w, else 0.

    Args:
      attn: causal attention averaged over heads, [L, L].
      w: tokens on each side.
      window: rows looked at on a sliding layer; None = all later ones.
    """
    length = attn.shape[0]
    # Column sums first: adding, never subtracting, keeps single precision.
    padded = jnp.pad(attn, ((0, 0), (w - 1, w)))
    sides = sum(padded[:, i : i + length + 1] for i in range(w))
    past, future = sides[:, :length], jnp.pad(sides, ((0, 0), (0, w)))[:, w : w + length]
    row, gap = jnp.arange(length)[:, None], jnp.arange(length)[None, :]
    later = row >= gap + w
    if window is not None:
        later &= row < gap + w + window
    sums = [jnp.sum(jnp.where(later, x, 0), axis=0) for x in (past, future)]
    eps = 1e-6
    ratio = (jnp.maximum(*sums) + eps) / (jnp.minimum(*sums) + eps)
    place = jnp.arange(length)
    return jnp.where((place >= 2 * w - 1) & (place < length - 2 * w), ratio, 0)


def similarity_scores(keys: Float[Array, "B L C"], w: int = 4) -> Float[Array, "B L"]:
    """``1 - cos`` of the mean keys of the w tokens on the two sides of each gap: boundaries without training.

    Higher = more of a boundary, in [0, 2]; -100 where a side does not fit (select with theta 0). Keys are
    head-concatenated. Reconstruction: the paper names a training-free fallback without its formula; the alternative
    is Euclidean distance.
    """
    length = keys.shape[1]
    keys = keys.astype(jnp.promote_types(keys.dtype, jnp.float32))
    padded = jnp.pad(keys, ((0, 0), (w - 1, w), (0, 0)))
    means = sum(padded[:, i : i + length + 1] for i in range(w)) / w
    left = means[:, :length]
    right = jnp.pad(means, ((0, 0), (0, w), (0, 0)))[:, w : w + length]
    norm = jnp.sqrt(jnp.maximum(jnp.sum(left * left, -1) * jnp.sum(right * right, -1), 1e-12))
    return at_ends(1 - jnp.sum(left * right, -1) / norm, w)


def at_ends(score: Float[Array, "B L"], w: int = 4) -> Float[Array, "B L"]:
    """The scores with -100 at gaps where one side has fewer than w tokens."""
    place = jnp.arange(score.shape[1])
    return jnp.where(((place >= w - 1) & (place < score.shape[1] - w))[None], score, -100.0)


def select_boundaries(
    score: Float[Array, "B L"], num_chunks: int, theta: float = 1.1, nms: int = 8, instr: int | None = None
) -> tuple[Int[Array, "B N"], Int[Array, " B"]]:
    """Greedy one-dimensional non-maximum suppression of boundary scores.

    By falling score (equal ones: lower position first) a position p with score > theta is accepted if every accepted
    one is more than ``nms`` away, up to ``num_chunks`` of them; the boundary is p + 1. With ``instr`` the position
    L - instr is accepted first, whatever its score, and later positions are skipped.

    Returns:
      Boundaries ``int32[B, num_chunks + 2]``, ascending from 0, L after the last, and the number of real chunks. If
      nothing passes, [0, L]. NaN scores never pass.
    """
    if num_chunks < 1 or nms < 0 or (instr is not None and not 0 < instr < score.shape[1]):
        found = f"{num_chunks}, {nms}, {instr}"
        raise ConfigError(f"num_chunks, nms, instr: found {found}, expected >= 1, >= 0, None or 1 to L - 1")
    return jax.vmap(functools.partial(_select, num_chunks=num_chunks, theta=theta, nms=nms, instr=instr))(score)


def _select(score, *, num_chunks: int, theta: float, nms: int, instr: int | None):
    length = score.shape[0]
    order = jnp.argsort(jnp.where(jnp.isnan(score), -jnp.inf, score), descending=True, stable=True)
    passed = score > theta
    # Position p lies at p + nms, so that a window never leaves the array.
    blocked = jnp.zeros(length + 2 * nms, bool)
    edges = jnp.full(num_chunks, length, jnp.int32)
    number = jnp.zeros((), jnp.int32)
    shadow = jnp.ones(2 * nms + 1, bool)
    if instr is not None:
        first = length - instr
        blocked = blocked.at[first:].set(True)
        edges, number = edges.at[0].set(first + 1), number + 1

    def visit(carry, p):
        blocked, edges, number = carry
        accept = passed[p] & ~blocked[p + nms] & (number < num_chunks)
        near = jax.lax.dynamic_slice(blocked, (p,), (2 * nms + 1,))
        blocked = jax.lax.dynamic_update_slice(blocked, near | (shadow & accept), (p,))
        edges = edges.at[number].set(jnp.where(accept, p.astype(jnp.int32) + 1, edges[number]), mode="drop")
        return (blocked, edges, number + accept), None

    (_, edges, _), _ = jax.lax.scan(visit, (blocked, edges, number), order)
    edges = jnp.sort(jnp.concatenate([jnp.zeros(1, jnp.int32), edges, jnp.full(1, length, jnp.int32)]))
    return edges, jnp.sum(edges < length, dtype=jnp.int32)


def chunk_repr(
    x: Float[Array, "B H L D"],
    boundaries: Int[Array, "B N"],
    n_valid: Int[Array, " B"],
    pooling: str = "avgpool_norm",
    valid: Bool[Array, "B L"] | None = None,
    heads: str = "mean",
) -> Float[Array, "B N1 D"] | Float[Array, "B H N1 D"]:
    r"""The vector of each chunk: ``sqrt(|C|)`` times the mean of its tokens (mode "avgpool_norm").

    Sums come from one prefix sum. "avgpool" leaves out the root, which keeps the norm of independent keys from falling
    with the chunk's length. Only ``valid`` tokens without a NaN or an infinity (in their head) count; a chunk without
    one, and padding chunks, give 0. ``heads``: "mean" averages over heads first, "each" keeps them. Float32 or better;
    N1 is N - 1.
    """
    if pooling not in ("avgpool_norm", "avgpool"):
        raise ConfigError(f"pooling: found {pooling!r}, expected avgpool_norm or avgpool for chunks of keys")
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    x = jnp.mean(x, axis=1, keepdims=True) if heads == "mean" else x
    real = jnp.all(jnp.isfinite(x), axis=-1)
    real = real if valid is None else real & valid[:, None]
    x = jnp.where(real[..., None], x, 0)
    # Subtracting the overall mean first keeps the prefix sums small, and their differences exact.
    centre = jnp.sum(x, 2, keepdims=True) / jnp.maximum(jnp.sum(real, 2), 1)[..., None, None]
    sums = jnp.cumsum(jnp.where(real[..., None], x - centre, 0), axis=2)
    sums = jnp.pad(sums, ((0, 0), (0, 0), (1, 0), (0, 0)))
    ends = jnp.take_along_axis(sums, boundaries[:, None, :, None], axis=2)
    counts = jnp.pad(jnp.cumsum(real, axis=2, dtype=jnp.int32), ((0, 0), (0, 0), (1, 0)))
    size = jnp.diff(jnp.take_along_axis(counts, boundaries[:, None], axis=2), axis=2)
    size = jnp.where((jnp.arange(size.shape[2])[None] < n_valid[:, None])[:, None], size, 0)[..., None]
    mean = jnp.where(size > 0, jnp.diff(ends, axis=2) / jnp.maximum(size, 1) + centre, 0)
    out = mean * jnp.sqrt(size.astype(mean.dtype)) if pooling == "avgpool_norm" else mean
    return out[:, 0] if heads == "mean" else out


def chunk_of_token(boundaries: Int[Array, "B N"], length: int) -> Int[Array, "B L"]:
    """The number of the chunk that each token lies in."""
    place = jnp.arange(length, dtype=jnp.int32)
    find = functools.partial(jnp.searchsorted, side="right")
    return jax.vmap(lambda edges: jnp.minimum(find(edges, place) - 1, edges.size - 2))(boundaries).astype(jnp.int32)


def upsample(scores: Float[Array, "B nq Nc"], boundaries: Int[Array, "B N"], length: int) -> Float[Array, "B nq L"]:
    """Each token takes the score of its chunk."""
    return jnp.take_along_axis(scores, chunk_of_token(boundaries, length)[:, None, :], axis=2)


def query_repr(
    q: Float[Array, "B H L D"], size: int, pooling: str = "avgpool_norm", legacy_pad_mean: bool = False
) -> Float32[Array, "B nq D"] | Float[Array, "B nq D"]:
    """The vector of each block of queries, heads averaged; the mean runs over real tokens.

    ``legacy_pad_mean``: as the public code, over the zero-padded last block (the root takes its real length).
    """
    if pooling not in POOLINGS:
        raise ConfigError(f"pooling: found {pooling!r}, expected one of {', '.join(POOLINGS)}")
    length = q.shape[2]
    rows = -(-length // size)
    x = jnp.mean(q.astype(jnp.promote_types(q.dtype, jnp.float32)), axis=1)
    fill = -jnp.inf if pooling == "maxpool" and not legacy_pad_mean else 0
    x = jnp.pad(x, ((0, 0), (0, rows * size - length), (0, 0)), constant_values=fill).reshape(
        -1, rows, size, x.shape[2]
    )
    if pooling == "maxpool":
        return jnp.max(x, axis=2)
    real = jnp.minimum(size, length - jnp.arange(rows) * size).astype(x.dtype)[None, :, None]
    mean = jnp.sum(x, axis=2) / (size if legacy_pad_mean else real)
    return mean * jnp.sqrt(real) if pooling == "avgpool_norm" else mean


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
) -> tuple[Int[Array, "B nq W"], Int[Array, "B nq"]]:
    """For each block of queries the ``budget`` key tokens that all heads share (the paper's selection).

    Score of a token = block vector . chunk vector of its chunk. Always kept: the last ``local_tokens`` of the tokens
    the block may see, then the first ``global_tokens`` (of the window, if there is one); the rest go by score, equal
    scores to the lower token. A set: each token once, sinks and locals within the budget. A NaN in a key changes its
    own chunk's score, a NaN in a query the list of its block. Reconstruction: the public code overwrites list entries
    by the sinks, so that a token can count twice.

    Args:
      q: queries, or the first Lq of them where the last ones attend densely.
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

    Returns:
      ``(int32[B, nq, min(budget, L)], int32[B, nq])``: tokens ascending, the last one repeated after the count.
    """
    if block_size < 1 or budget < 1:
        raise ConfigError(f"block_size, budget: found {block_size}, {budget}, expected at least 1")
    length = k.shape[2]
    width = min(budget, length)
    chunks = chunk_repr(k, boundaries, n_valid, "avgpool" if pooling == "maxpool" else pooling)
    rows = query_repr(q, block_size, pooling, legacy_pad_mean)
    scores = jnp.einsum("bid,bcd->bic", rows, chunks, precision="highest")
    scores = finite(scores)
    end = ((jnp.arange(rows.shape[1], dtype=jnp.int32) + 1) * block_size)[:, None]
    token = jnp.arange(length, dtype=jnp.int32)[None]
    allowed = token < jnp.minimum(end, length)
    begin = jnp.zeros_like(end)
    if window is not None:
        allowed &= token >= end - window
        begin = jnp.maximum(end - block_size - window, 0)
    last = jnp.minimum(end, length)
    sink = (token >= begin) & (token < jnp.minimum(begin + global_tokens, last))
    local = allowed & (token >= last - min(local_tokens, budget))
    allowed |= sink
    value = upsample(scores, boundaries, length)
    high = jnp.finfo(value.dtype).max
    value = jnp.where(local[None], jnp.inf, jnp.where(sink[None], high, jnp.minimum(value, high)))
    value = jnp.where(allowed[None], value, -jnp.inf)
    _, idx = jax.lax.top_k(value, width)
    count = jnp.broadcast_to(jnp.minimum(jnp.sum(allowed, -1, dtype=jnp.int32), width)[None], idx.shape[:2])
    return jax.lax.stop_gradient((ascending(idx.astype(jnp.int32), count), count))


def ascending(idx: Int[Array, "*R W"], count: Int[Array, "*R"]) -> Int[Array, "*R W"]:
    """Sort the first ``count`` entries of each list and repeat the last of them after."""
    place = jax.lax.broadcasted_iota(jnp.int32, idx.shape, idx.ndim - 1)
    idx = jnp.sort(jnp.where(place < count[..., None], idx, jnp.iinfo(jnp.int32).max), axis=-1)
    last = jnp.take_along_axis(idx, jnp.maximum(count - 1, 0)[..., None], axis=-1)
    return jnp.where(place < count[..., None], idx, jnp.where(count[..., None] > 0, last, 0))


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
) -> Float[Array, "B H Lq D"]:
    """Exact causal attention of each block of queries over its listed tokens, all heads sharing the list.

    Blocks go one after the other, so memory is bounded by one block's W tokens. An entry listed twice counts twice. A
    query that sees nothing gives 0.
    """
    batch, heads, length, dim = q.shape
    rows, group = idx.shape[1], heads // k.shape[1]
    exact = jnp.promote_types(q.dtype, jnp.float32)
    scaled = q.astype(exact) * (dim**-0.5 if scale is None else scale)
    blocks = jnp.pad(scaled, ((0, 0), (0, 0), (0, rows * block_size - length), (0, 0)))
    blocks = blocks.reshape(batch, k.shape[1], group, rows, block_size, dim)

    def one(item):
        block, tokens, number, first = item
        keys, values = (jax.vmap(lambda a, t: a[:, t])(x, tokens).astype(exact) for x in (k, v))  # [B, Hkv, W, D]
        s = jnp.einsum("bkgtd,bkwd->bkgtw", block, keys)
        distance = (first + jnp.arange(block_size))[None, :, None] - tokens[:, None, :]
        seen = (distance >= 0) & (jnp.arange(tokens.shape[1])[None] < number[:, None])[:, None]
        seen = seen if window is None else seen & (distance < window)
        seen = seen[:, None, None]
        s = jnp.where(seen, s, jnp.finfo(exact).min)
        p = jnp.where(seen, jnp.exp(s - jax.lax.stop_gradient(jnp.max(s, -1, keepdims=True))), 0)
        total = jnp.sum(p, -1, keepdims=True)
        return jnp.einsum("bkgtw,bkwd->bkgtd", p / jnp.where(total > 0, total, 1), values)

    first = jnp.arange(rows, dtype=jnp.int32) * block_size
    items = (jnp.moveaxis(blocks, 3, 0), jnp.moveaxis(idx, 1, 0), jnp.moveaxis(count, 1, 0), first)
    out = jnp.moveaxis(jax.lax.map(one, items), 0, 3)
    return out.reshape(batch, heads, rows * block_size, -1)[:, :, :length].astype(q.dtype)
