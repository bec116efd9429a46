"""Chunks of variable length (the paper's front end of DHSA): boundaries and representations.

Reference: Long-Context Modeling with Dynamic Hierarchical Sparse Attention for Memory-Constrained LLM Inference,
arXiv 2510.24606, section 3; details from the authors' public code where marked.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxmeth.types import ConfigError, is_concrete


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


def ascending(idx: Int[Array, "*R W"], count: Int[Array, "*R"]) -> Int[Array, "*R W"]:
    """Sort the first ``count`` entries of each list and repeat the last of them after."""
    place = jax.lax.broadcasted_iota(jnp.int32, idx.shape, idx.ndim - 1)
    idx = jnp.sort(jnp.where(place < count[..., None], idx, jnp.iinfo(jnp.int32).max), axis=-1)
    last = jnp.take_along_axis(idx, jnp.maximum(count - 1, 0)[..., None], axis=-1)
    return jnp.where(place < count[..., None], idx, jnp.where(count[..., None] > 0, last, 0))


def check_queries(q: Array, k: Array, kv_mask: Array | None, start: int | Array) -> None:
    """Raises: ConfigError where queries from slot ``start`` and keys do not fit each other or the mask."""
    (batch, heads, length, _), (rows, kv_heads, slots, _) = q.shape, k.shape
    if 0 in q.shape or 0 in k.shape or batch != rows or q.shape[3] != k.shape[3] or heads % kv_heads:
        expected = "nothing empty, one batch and width, H a multiple of Hkv"
        raise ConfigError(f"q, k: found shapes {q.shape}, {k.shape}, expected {expected}")
    if kv_mask is not None and kv_mask.shape != (batch, slots):
        raise ConfigError(f"kv_mask: found shape {kv_mask.shape}, expected {(batch, slots)}")
    last = length + (int(start) if is_concrete(start) else 0)
    if last > slots or last < length:
        found = f"queries up to slot {last - 1} over {slots} keys"
        raise ConfigError(f"q, start: found {found}, expected slots from 0 to {slots - 1}")
