"""Which key blocks each block of queries sees: the fixed-block front end of DHSA, five rules.

Reference: arXiv 2510.24606 and the authors' public code (rules topk, ashape, vs, vsb); rule "chunk" is this library's.
"""

import dataclasses
import math
import numbers
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxmeth.attention.dhsa_chunks import ascending, check_queries, chunk_of_token, chunk_repr, finite
from jaxmeth.types import ConfigError, whole_number

RULES = ("topk", "ashape", "vs", "vsb", "chunk")
NONCAUSAL_RULES = ("vs", "vsb")


@dataclasses.dataclass(frozen=True)
class DHSAConfig:
    """How DHSA selects; static.

    Args:
      bq: queries in a block.
      bk: keys in a block.
      density: share of all key blocks that a row keeps, in (0, 1]; T = max(1, floor(density * nk)), nk blocks up to
        that of the last query's slot: padding of the prompt counts, the empty rest of a cache does not. Relative to
        causal dense attention the cost is about twice it.
      rule: "chunk" (default), "topk" (future blocks compete too; for parity), "ashape" (sink and last block forced),
        "vs" and "vsb" (vertical-slash, from the last queries: not causal).
      boundaries: of rule "chunk" inside a model: "fixed" (every bk tokens), "similarity" or "predicted" (not causal).
      pooling: "avgpool_norm" or "avgpool".
      group_select: "kv" (the query heads of a key/value head share a list) or "head" (the public code).
      sink_blocks: first blocks that rule "chunk" forces.
      local: "band" forces all diagonal blocks of a row under rule "chunk", "last" only the last.
      vs_ratio: share of the budget for vertical lines.
      dense_last: last queries of a prompt that attend densely in ``prefill``.
      nms: least distance of boundaries, minus one.
      theta: threshold of boundary scores.
      chunk_beta: boundaries at most, for each bk tokens.
      decode_budget: key tokens a decoding step attends to, in whole blocks; -1 = all.
      noncausal_training: let gradients through rules that choose by looking at later tokens.

    Raises: ConfigError for a field out of range.
    """

    bq: int = 128
    bk: int = 64
    density: float = 0.125
    rule: str = "chunk"
    boundaries: str = "fixed"
    pooling: str = "avgpool_norm"
    group_select: str = "kv"
    sink_blocks: int = 1
    local: str = "band"
    vs_ratio: float = 0.5
    dense_last: int = 64
    nms: int = 8
    theta: float = 1.1
    chunk_beta: int = 8
    decode_budget: int = -1
    noncausal_training: bool = False

    def __post_init__(self):
        choices = {
            "rule": RULES,
            "boundaries": ("fixed", "similarity", "predicted"),
            "pooling": ("avgpool_norm", "avgpool"),
            "group_select": ("kv", "head"),
            "local": ("band", "last"),
        }
        for name, expected in choices.items():
            if getattr(self, name) not in expected:
                raise ConfigError(f"{name}: found {getattr(self, name)!r}, expected one of {', '.join(expected)}")
        ranges = {
            "density": (lambda x: 0 < x <= 1, "in (0, 1]"),
            "vs_ratio": (lambda x: 0 <= x <= 1, "in [0, 1]"),
            "theta": (math.isfinite, "that is finite"),
        }
        for name, (inside, expected) in ranges.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, numbers.Real) or not inside(value):
                raise ConfigError(f"{name}: found {value!r}, expected a number {expected}")
        least = {"bq": 1, "bk": 1, "sink_blocks": 0, "dense_last": 0, "nms": 0, "chunk_beta": 1, "decode_budget": -1}
        for name, low in least.items():
            object.__setattr__(self, name, whole_number(name, getattr(self, name), low))
        if self.decode_budget == 0:
            raise ConfigError("decode_budget: found 0, expected -1 (all) or at least 1")
        if self.boundaries == "fixed" and self.rule == "chunk" and self.bq % self.bk and self.bk % self.bq:
            raise ConfigError(f"bq, bk: found {self.bq}, {self.bk}, expected one to divide the other")

    @property
    def causal(self) -> bool:
        """Whether row i is chosen by tokens before the end of block i alone."""
        divides = self.bq % self.bk == 0
        if self.rule == "chunk":
            return self.boundaries == "fixed" and divides
        return self.rule == "ashape" and divides


class BlockList(NamedTuple):
    """Key blocks of each block of queries, ascending, the last one repeated after the count; Hs is H or Hkv."""

    idx: Int[Array, "B Hs nq W"]
    count: Int[Array, "B Hs nq"]


class _Rows(NamedTuple):
    """What a row of blocks is made from, each [B or 1, 1, nq, nk] or [B or 1, 1, nq]."""

    rec: Array
    first: Array
    real: Array
    sink: Array
    last_row: Array


def budget_blocks(density: float, blocks: int) -> int:
    """T: the blocks a row keeps."""
    return max(1, int(density * blocks))


@jax.custom_vjp
def refuse_gradient(x: Array) -> Array:
    """x; under a gradient a ConfigError, for rules that choose by later tokens."""
    return x


def _refuse(x):
    raise ConfigError(
        "rule: found one that chooses by later tokens under a gradient, expected a causal one "
        "(ashape, or chunk with fixed boundaries, bk dividing bq), or noncausal_training=True"
    )


refuse_gradient.defvjp(_refuse, lambda residual, x: (x,))


def select_blocks(
    q: Float[Array, "B H T D"],
    k: Float[Array, "B Hkv S D"],
    cfg: DHSAConfig,
    boundaries: tuple[Int[Array, "B N"], Int[Array, " B"]] | None = None,
    kv_mask: Bool[Array, "B S"] | None = None,
    start: int | Int[Array, ""] = 0,
    window: int | Int[Array, ""] | None = None,
) -> BlockList:
    """The key blocks each block of queries sees, from pooled queries and keys.

    Block scores are products of block means (float32), ties go to the lower block. Rows that have no more than T
    blocks before them are dense, except under "topk". "chunk": sink and diagonal blocks, then the best earlier blocks
    to T in all, scored by the largest score of the chunks that reach into them. Shapes depend on (T, S, cfg) alone.
    Tokens with a NaN or an infinity take no part in the means of their head (rule "vs": nor in the attention of the
    last queries), so that they change no list but through their absence.

    Args:
      q: queries after rotation; the first lies on slot ``start``.
      k: keys after rotation.
      cfg: static.
      boundaries: ``(edges, n_valid)`` of the chunks, rule "chunk" only; None = blocks are the chunks.
      kv_mask: True = a real token. Blocks without one never enter a list, the sink is the first with one, and the
        last row ends at the last one.
      start: slot of the first query; may be traced.
      window: of the layer, may be traced; blocks that no query of a row can see are left out.

    Returns:
      ``BlockList``, without gradient; W is T ("topk"), min(nk, max(T, most)) ("ashape", "chunk") or nk ("vs", "vsb"),
      with T and nk of all S slots; ``most`` bounds what is forced wherever a row starts: 2 ("ashape"), or sink_blocks
      and ceil(bq / bk) + 1 (1 for local "last").

    Raises: ConfigError for shapes that do not fit, and under a gradient with respect to q or k where the rule chooses
      by later tokens (see ``DHSAConfig.causal``), unless ``cfg.noncausal_training``.
    """
    check_queries(q, k, kv_mask, start)
    if not cfg.causal and not cfg.noncausal_training:
        q, k = refuse_gradient(q), refuse_gradient(k)
    q, k = jax.lax.stop_gradient((q, k))
    exact = jnp.promote_types(q.dtype, jnp.float32)
    q, k = q.astype(exact), k.astype(exact)
    group = q.shape[1] // k.shape[1]
    if cfg.group_select == "head":
        k, group = jnp.repeat(k, group, axis=1), 1
    slots = k.shape[2]
    valid = jnp.ones((k.shape[0], slots), bool) if kv_mask is None else kv_mask
    start = jnp.asarray(start, jnp.int32)
    rows = _rows(cfg, valid, q.shape[2], start)
    blocks = -(-slots // cfg.bk)
    # Lists are as wide as all slots ask for; the count is that of the slots up to the last query's.
    sizes = [budget_blocks(cfg.density, n) for n in range(1, blocks + 1)]
    most, budget = sizes[-1], jnp.asarray(sizes, jnp.int32)[(start + q.shape[2] - 1) // cfg.bk]
    block = jnp.arange(blocks, dtype=jnp.int32)[None, None, None]
    seen = rows.real & (block <= rows.rec[..., None])
    if window is not None:
        first_slot = (start + jnp.arange(rows.rec.shape[-1], dtype=jnp.int32) * cfg.bq)[None, None, :, None]
        seen &= (block + 1) * cfg.bk > first_slot - jnp.asarray(window, jnp.int32) + 1
    if cfg.rule in NONCAUSAL_RULES:
        from jaxmeth.attention.dhsa_slash import vertical_slash

        score = vertical_slash(_mean_of_groups(q, group), k, cfg, valid, start, rows, seen, budget)
        return _with_dense_rows(cfg, rows, seen, score, budget, most, slots)
    if cfg.rule == "chunk" and boundaries is not None:
        score = _chunk_scores(q, k, group, cfg, boundaries, valid, start)
    else:
        score = _mean_scores(q, k, group, cfg, valid, start, pooled=cfg.rule == "chunk")
    forced, width = jnp.zeros_like(seen), most
    eligible = seen
    if cfg.rule == "topk":
        eligible = rows.real
    elif cfg.rule == "ashape":
        forced, width = (block == rows.sink[..., None]) | (block == rows.rec[..., None]), max(most, 2)
    else:
        low = rows.first if cfg.local == "band" else rows.rec
        sinks = (block >= rows.sink[..., None]) & (block < rows.sink[..., None] + cfg.sink_blocks)
        forced = sinks | ((block >= low[..., None]) & (block <= rows.rec[..., None]))
        # bq queries touch at most this many blocks, wherever they start.
        width = max(most, cfg.sink_blocks + (-(-cfg.bq // cfg.bk) + 1 if cfg.local == "band" else 1))
    forced &= seen
    value = jnp.where(forced, jnp.inf, jnp.where(eligible, score, -jnp.inf))
    _, idx = jax.lax.top_k(value, min(width, blocks))
    kept = jnp.maximum(jnp.sum(forced, -1, dtype=jnp.int32), budget)
    count = jnp.minimum(jnp.sum(eligible, -1, dtype=jnp.int32), kept)
    count = jnp.broadcast_to(count, idx.shape[:-1])
    return BlockList(ascending(idx.astype(jnp.int32), count), count)


def dense_from_blocks(blocks: BlockList, number: int) -> Bool[Array, "B Hs nq nk"]:
    """The lists as a mask over ``number`` key blocks."""
    from jaxmeth.kernels import block_mask

    return block_mask(blocks.idx, blocks.count, number)


def _rows(cfg: DHSAConfig, valid: Array, length: int, start: Array) -> _Rows:
    slots = valid.shape[1]
    blocks, count = -(-slots // cfg.bk), -(-length // cfg.bq)
    place = jnp.arange(slots, dtype=jnp.int32)[None]
    final = jnp.max(jnp.where(valid, place, 0), axis=1)
    final = jnp.minimum(final, start + length - 1)[:, None, None]
    i = jnp.arange(count, dtype=jnp.int32)[None, None]
    rec = jnp.minimum(start + (i + 1) * cfg.bq - 1, final) // cfg.bk
    first = jnp.minimum((start + i * cfg.bq) // cfg.bk, rec)
    padded = jnp.pad(valid, ((0, 0), (0, blocks * cfg.bk - slots)))
    real = jnp.any(padded.reshape(-1, 1, 1, blocks, cfg.bk), axis=-1)
    sink = jnp.argmax(real, axis=-1).astype(jnp.int32)
    return _Rows(rec, first, real, sink, (final - start) // cfg.bq)


def _block_means(x: Array, size: int, valid: Array) -> tuple[Array, Array]:
    """Means ``[B, H, n, D]`` of the real, finite tokens of each block, and how many there are ``[B, H, n, 1]``."""
    length = x.shape[2]
    blocks = -(-length // size)

    def by_block(x: Array) -> Array:
        x = jnp.pad(x, ((0, 0), (0, 0), (0, blocks * size - length), *((0, 0),) * (x.ndim - 3)))
        return x.reshape(*x.shape[:2], blocks, size, *x.shape[3:])

    def chosen() -> tuple[Array, Array]:
        kept = valid[:, None] & jnp.all(jnp.isfinite(x), axis=-1)
        number = jnp.sum(by_block(kept), axis=-1, dtype=jnp.int32)
        return jnp.sum(by_block(jnp.where(kept[..., None], x, 0)), axis=3), number

    def whole() -> tuple[Array, Array]:
        number = jnp.minimum(size, length - size * jnp.arange(blocks, dtype=jnp.int32))
        return total, jnp.broadcast_to(number, total.shape[:3])

    # A copy of x without what takes no part costs more than the rest of the selection: only where it is needed.
    total = jnp.sum(by_block(x), axis=3)
    total, number = jax.lax.cond(jnp.all(valid) & jnp.all(jnp.isfinite(total)), whole, chosen)
    return total / jnp.maximum(number, 1)[..., None], number[..., None]


def _mean_of_groups(x: Array, group: int) -> Array:
    """The mean over each run of ``group`` heads; written out, as a reduction over a middle axis is slow on CPU."""
    x = x.reshape(x.shape[0], -1, group, *x.shape[2:])
    return sum(x[:, :, i] for i in range(group)) / group


def _query_means(q: Array, group: int, cfg: DHSAConfig, valid: Array, start: Array) -> Array:
    """Means ``[B, Hs, nq, D]`` of the queries of each block: over tokens first, which leaves little to average."""
    rows, _ = _block_means(q, cfg.bq, _of_queries(valid, q.shape[2], start))
    return _mean_of_groups(rows, group)


def _of_queries(valid: Array, length: int, start: Array) -> Array:
    """Which queries are real tokens."""
    return jax.lax.dynamic_slice_in_dim(valid, start, length, axis=1)


def block_products(q: Array, k: Array) -> Array:
    """Scores of all pairs; NaN counts as the lowest, so that it never displaces other blocks."""
    return finite(jnp.einsum("bhid,bhjd->bhij", q, k, precision="highest"))


def _mean_scores(q, k, group: int, cfg: DHSAConfig, valid, start, pooled: bool) -> Array:
    rows = _query_means(q, group, cfg, valid, start)
    keys, number = _block_means(k, cfg.bk, valid)
    if pooled and cfg.pooling == "avgpool_norm":
        keys = keys * jnp.sqrt(number.astype(keys.dtype))
    return block_products(rows, keys)


def _chunk_scores(q, k, group: int, cfg: DHSAConfig, boundaries, valid, start) -> Array:
    """The largest chunk score among the real tokens of each block, a row at a time: memory is linear in S."""
    edges, n_valid = boundaries
    slots = k.shape[2]
    blocks = -(-slots // cfg.bk)
    rows = _query_means(q, group, cfg, valid, start)
    score = block_products(rows, chunk_repr(k, edges, n_valid, cfg.pooling, valid, heads="each"))
    chunk = jnp.broadcast_to(chunk_of_token(edges, slots)[:, None], (*score.shape[:2], slots))

    def row(s: Array) -> Array:
        token = jnp.where(valid[:, None], jnp.take_along_axis(s, chunk, axis=-1), -jnp.inf)
        token = jnp.pad(token, ((0, 0), (0, 0), (0, blocks * cfg.bk - slots)), constant_values=-jnp.inf)
        return jnp.max(token.reshape(*s.shape[:2], blocks, cfg.bk), axis=-1)

    return jnp.moveaxis(jax.lax.map(row, jnp.moveaxis(score, 2, 0)), 0, 2)


def _with_dense_rows(cfg: DHSAConfig, rows: _Rows, seen, score, budget: Array, most: int, slots: int) -> BlockList:
    """Lists of "vs" and "vsb": forced blocks, the best of those between sink and rec, and some dense rows."""
    blocks = seen.shape[-1]
    block = jnp.arange(blocks, dtype=jnp.int32)[None, None, None]
    rec, first, sink = (x[..., None] for x in (rows.rec, rows.first, rows.sink))
    forced = (block == sink) | (block == rec)
    number = 1 + (rows.rec != rows.sink)
    if cfg.rule == "vsb":
        forced |= (block >= first) & (block <= rec)
        number = rows.rec - rows.first + 1 + (rows.first > rows.sink)
    candidate = seen & (block > sink) & (block < rec)
    value, idx = jax.lax.top_k(jnp.where(candidate, score, -jnp.inf), most)
    fill = jnp.arange(idx.shape[-1])[None, None, None] < jnp.maximum(budget - number, 0)[..., None]
    chosen = jnp.where(fill & (value > -jnp.inf), idx, blocks)
    flat = jax.vmap(lambda row: jnp.zeros(blocks, bool).at[row].set(True, mode="drop"))
    picked = flat(chosen.reshape(-1, chosen.shape[-1])).reshape(*chosen.shape[:-1], blocks)
    i = jnp.arange(rows.rec.shape[-1])[None, None]
    available = jnp.sum(seen, -1, dtype=jnp.int32)
    tokens = jnp.minimum(slots, budget * cfg.bk)
    dense = (available <= budget) | (i < -(-tokens // cfg.bq)) | (i >= rows.last_row)
    mask = (forced | picked | dense[..., None]) & seen
    count = jnp.sum(mask, -1, dtype=jnp.int32)
    order = jnp.where(mask, jnp.broadcast_to(block, mask.shape), jnp.iinfo(jnp.int32).max)
    return BlockList(ascending(jnp.sort(order, -1), count), count)
