"""Plain XLA, fast on CPU: gathered key blocks, a tile at a time, with an online softmax.

One unit is the work of one list: its bq x G queries against its key blocks. XLA on CPU splits an operation over its
threads, well only where it is large, so a tile holds as many keys as the scores of ``SCORES`` numbers allow; a step of
the loop computes a few units side by side, whose operations fill each other's gaps. A step runs as many tiles as its
longest list needs: short lists and the upper triangle cost nothing. Lists of one tile need no loop over tiles. Only the
blocks of which a query misses a key (of a causal list those on the diagonal) are masked, in place: a mask over all
scores costs as much as their exponential. The group axis lies inside the query axis, so that the first axis of every
array splits evenly.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxmeth.kernels.block_attention.shapes import Static, near, used

SCORES = 384 * 1024
"""Scores of a unit in a tile."""
UNITS = 6
"""Units in a step, at most; fewer where a tile is larger than ``SCORES``."""


class _Units:
    """The work of all lists, query block outermost so that the units of a step have lists of similar length."""

    def __init__(self, static: Static, q: Array, k: Array, idx: Array, count: Array, valid: Array | None, span: Array):
        batch, heads = q.shape[:2]
        kv_heads, slots = k.shape[1:3]
        lists, rows, width = idx.shape[1:]
        self.static, self.span = static, span
        self.exact = jnp.promote_types(q.dtype, jnp.float32)
        self.group, self.heads = heads // lists, batch * lists
        unit = self.group * static.bq
        self.blocks_per_tile = max(1, min(width, SCORES // (unit * static.bk)))
        self.keys = self.blocks_per_tile * static.bk
        number = self.heads * rows
        most = max(1, min(UNITS, UNITS * SCORES // (unit * self.keys)))
        self.per_step = max(n for n in range(1, most + 1) if number % n == 0)
        self.steps = number // self.per_step
        head = jnp.arange(self.heads, dtype=jnp.int32).reshape(batch, lists)
        base = (head // lists * kv_heads + head % lists * kv_heads // lists) * (slots // static.bk)
        self.tiles_of_list = -(-width // self.blocks_per_tile)
        padding = self.tiles_of_list * self.blocks_per_tile - width
        idx = jnp.pad(idx, ((0, 0), (0, 0), (0, 0), (0, padding)), mode="edge")
        row = jnp.broadcast_to(jnp.arange(rows, dtype=jnp.int32), (batch, lists, rows))
        self.valid = None
        if valid is not None:
            self.valid = jnp.repeat(valid, kv_heads, axis=0).reshape(-1, static.bk)
        self.items = {
            "block": self.split(idx),
            "gather": self.split(idx + base[:, :, None, None]),
            "count": self.split(count),
            "row": self.split(row),
            "head": self.split(jnp.broadcast_to(head[:, :, None], row.shape)),
        }
        self.items |= self.masked_blocks()

    def masked_blocks(self) -> dict:
        """How many blocks of each tile hide a key from a query, and the places in the tile, theirs first."""
        block, count, row = (self.items[name] for name in ("block", "count", "row"))
        bq, bk = self.static.bq, self.static.bk
        q_slot, k_slot = (self.span[0] + row * bq)[..., None], block * bk
        whole = used(count, block.shape[-1])
        # The least distance and the largest.
        for first, last in ((q_slot, k_slot + bk - 1), (q_slot + bq - 1, k_slot)):
            whole &= near(self.static, first, last, self.span[1])
        if self.valid is not None:
            whole &= jnp.all(self.valid, axis=-1)[self.items["gather"]]
        whole = whole.reshape(*count.shape, self.tiles_of_list, self.blocks_per_tile)
        order = jnp.argsort(whole, axis=-1, stable=True)
        return {"masked": order.astype(jnp.int32), "number": jnp.sum(~whole, axis=-1, dtype=jnp.int32)}

    def split(self, x: Array) -> Array:
        """``[B, Hs, nq, ...] -> [steps, units, ...]``."""
        x = jnp.moveaxis(x, 2, 0)
        return x.reshape(self.steps, self.per_step, *x.shape[3:])

    def by_list(self, x: Array) -> Array:
        """``[B, H, T, ...] -> [lists, G, T, ...]``."""
        return x.reshape(self.heads, self.group, *x.shape[2:])

    def at(self, item: dict, unit: int, rank: int) -> tuple:
        """Where a unit's rows begin in an array by list."""
        zero = jnp.zeros((), jnp.int32)
        return (item["head"][unit], zero, item["row"][unit] * self.static.bq, *(zero,) * (rank - 3))

    def rows(self, item: dict, unit: int, x: Array) -> Array:
        """A unit's rows ``[bq, G, ...]`` of an array by list, in the dtype of the sums."""
        size = (1, self.group, self.static.bq, *x.shape[3:])
        return jnp.swapaxes(jax.lax.dynamic_slice(x, self.at(item, unit, x.ndim), size)[0], 0, 1).astype(self.exact)

    def put(self, item: dict, unit: int, x: Array, rows: Array) -> Array:
        """The inverse of ``rows``."""
        rows = jnp.swapaxes(rows, 0, 1)[None].astype(x.dtype)
        return jax.lax.dynamic_update_slice(x, rows, self.at(item, unit, x.ndim))

    def blocks(self, x: Array) -> Array:
        """``[B, Hkv, S, D] -> [all blocks, bk, D]``."""
        return x.reshape(-1, self.static.bk, x.shape[-1])

    def tile(self, item: dict, unit: int, tile: Array, *sources: Array) -> tuple[Array, list[Array]]:
        """Block numbers of one tile of a unit, and its rows of each source in the dtype of the sums."""
        at = tile * self.blocks_per_tile
        take = jax.lax.dynamic_slice_in_dim(item["gather"][unit], at, self.blocks_per_tile)
        return take, [x[take].reshape(self.keys, -1).astype(self.exact) for x in sources]

    def scores(self, item: dict, unit: int, tile: Array, take: Array, q: Array, keys: Array) -> tuple[Array, Array]:
        """Scores ``[bq, G, keys]`` of a tile, -inf where not seen, and the derivative of the soft cap."""
        bq, bk = self.static.bq, self.static.bk
        s = _dot(q, keys, (2,), (1,))
        slope = jnp.ones((), s.dtype)
        if self.static.softcap is not None:
            soft = jnp.tanh(s / self.static.softcap)
            s, slope = soft * self.static.softcap, 1 - soft * soft
        q_slot = self.span[0] + item["row"][unit] * bq + jnp.arange(bq, dtype=jnp.int32)

        def hide(n, s):
            place = item["masked"][unit, tile, n]
            at = tile * self.blocks_per_tile + place
            k_slot = item["block"][unit, at] * bk + jnp.arange(bk, dtype=jnp.int32)
            seen = near(self.static, q_slot[:, None], k_slot[None], self.span[1]) & (at < item["count"][unit])
            if self.valid is not None:
                seen &= self.valid[take[place]][None]
            part = jax.lax.dynamic_slice_in_dim(s, place * bk, bk, axis=2)
            part = jnp.where(seen[:, None], part, -jnp.inf)
            return jax.lax.dynamic_update_slice_in_dim(s, part, place * bk, axis=2)

        return jax.lax.fori_loop(0, item["number"][unit, tile], hide, s), slope

    def over_tiles(self, item: dict, step, carry):
        """``step(tile, carry)`` over the tiles that the longest list of a step needs."""
        if self.tiles_of_list == 1:
            return step(jnp.zeros((), jnp.int32), carry)
        tiles = (jnp.max(item["count"]) + self.blocks_per_tile - 1) // self.blocks_per_tile
        return jax.lax.fori_loop(0, tiles, step, carry)


def _dot(a: Array, b: Array, i: tuple, j: tuple) -> Array:
    return jax.lax.dot_general(a, b, ((i, j), ((), ())))


def _item(work: _Units, step: Array) -> dict:
    return {name: x[step] for name, x in work.items.items()}


def forward(static: Static, q, k, v, idx, count, valid, span) -> tuple[Array, Array]:
    work = _Units(static, q, k, idx, count, valid, span)
    keys, values, queries = work.blocks(k), work.blocks(v), work.by_list(q)
    shape = (static.bq, work.group)

    def one(item, unit: int, query, tile, carry):
        top, total, out = carry
        take, (kt, vt) = work.tile(item, unit, tile, keys, values)
        s, _ = work.scores(item, unit, tile, take, query, kt)
        new = jnp.maximum(top, jnp.max(s, axis=-1))
        shift = jnp.where(jnp.isneginf(new), 0, new)
        p = jnp.exp(s - shift[..., None])
        old = jnp.exp(top - shift)
        return new, total * old + jnp.sum(p, axis=-1), out * old[..., None] + _dot(p, vt, (2,), (0,))

    def step(n, done):
        item = _item(work, n)
        query = [work.rows(item, u, queries) * static.scale for u in range(work.per_step)]
        start = (
            jnp.full(shape, -jnp.inf, work.exact),
            jnp.zeros(shape, work.exact),
            jnp.zeros((*shape, v.shape[-1]), work.exact),
        )
        carry = work.over_tiles(
            item,
            lambda tile, carry: [one(item, u, query[u], tile, c) for u, c in enumerate(carry)],
            [start] * work.per_step,
        )
        outs, sums = done
        for unit, (top, total, out) in enumerate(carry):
            some = total != 0
            safe = jnp.where(some, total, 1)
            outs = work.put(item, unit, outs, jnp.where(some[..., None], out * (1 / safe)[..., None], 0))
            sums = work.put(item, unit, sums, jnp.where(some, jnp.log(safe) + top, -jnp.inf))
        return outs, sums

    length = q.shape[2]
    outs = jnp.zeros((work.heads, work.group, length, v.shape[-1]), q.dtype)
    sums = jnp.zeros((work.heads, work.group, length), work.exact)
    outs, sums = jax.lax.fori_loop(0, work.steps, step, (outs, sums))
    return outs.reshape(*q.shape[:3], -1), sums.reshape(q.shape[:3])


def backward(static: Static, q, k, v, idx, count, valid, span, d_out, lse, delta) -> tuple[Array, Array, Array]:
    work = _Units(static, q, k, idx, count, valid, span)
    keys, values = work.blocks(k), work.blocks(v)
    sources = [work.by_list(x) for x in (q, d_out, lse, delta)]

    def step(n, carry):
        item = _item(work, n)
        # A list of none takes part in its step's tiles, where 0 * NaN is NaN.
        some = [item["count"][u] > 0 for u in range(work.per_step)]
        rows = [[jnp.where(some[u], work.rows(item, u, x), 0) for x in sources] for u in range(work.per_step)]

        def one(unit: int, tile, dq):
            query, d_o, own_lse, own_delta = rows[unit]
            query = query * static.scale
            take, (kt, vt) = work.tile(item, unit, tile, keys, values)
            s, slope = work.scores(item, unit, tile, take, query, kt)
            p = jnp.exp(s - own_lse[..., None])
            dp = _dot(d_o, vt, (2,), (1,))
            # Where p is zero, dp may be NaN.
            ds = jnp.where(p == 0, 0, p * (dp - own_delta[..., None]) * slope)
            dv = _dot(p, d_o, (0, 1), (0, 1))
            dk = _dot(ds, query, (0, 1), (0, 1))
            return take, dq + _dot(ds, kt, (2,), (0,)), dk, dv

        def tile_step(tile, carry):
            dqs, dk, dv = carry
            done = [one(u, tile, dq) for u, dq in enumerate(dqs)]
            take = jnp.concatenate([d[0] for d in done])
            more_k, more_v = (jnp.concatenate([d[i].reshape(-1, *dk.shape[1:]) for d in done]) for i in (2, 3))
            return [d[1] for d in done], dk.at[take].add(more_k), dv.at[take].add(more_v)

        dq, dk, dv = carry
        dqs = [jnp.zeros((static.bq, work.group, q.shape[-1]), work.exact)] * work.per_step
        dqs, dk, dv = work.over_tiles(item, tile_step, (dqs, dk, dv))
        for unit, x in enumerate(dqs):
            dq = work.put(item, unit, dq, jnp.where(some[unit], x * static.scale, 0))
        return dq, dk, dv

    zeros = [jnp.zeros(x.shape, work.exact) for x in (sources[0], keys, values)]
    dq, dk, dv = jax.lax.fori_loop(0, work.steps, step, tuple(zeros))
    return dq.reshape(q.shape), dk.reshape(k.shape), dv.reshape(v.shape)
