"""Plain XLA, fast on CPU: gathered key blocks, a tile at a time, with an online softmax.

One unit is the work of one list: its G x bq queries against its key blocks. A step of the loop computes several
independent units, written out one after the other, because XLA on CPU runs independent operations at once on its
threads but splits a single product of this size over them poorly. A step runs as many tiles as its longest list needs,
so short lists and the upper triangle cost nothing.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxmeth.kernels.block_attention.shapes import Static, near

TILE = 512
"""Keys in a tile; the scores of one unit then fit the second-level cache of most processors."""
UNITS = 6
"""Units in a step."""


class _Units:
    """The work of all lists, query block outermost so that the units of a step have lists of similar length."""

    def __init__(self, static: Static, q: Array, k: Array, idx: Array, count: Array, valid: Array | None, span: Array):
        batch, heads = q.shape[:2]
        kv_heads, slots = k.shape[1:3]
        lists, rows, width = idx.shape[1:]
        self.static, self.span = static, span
        self.exact = jnp.promote_types(q.dtype, jnp.float32)
        self.shape = (batch, lists, heads // lists, rows, static.bq)
        self.count_all = batch * lists * rows
        self.per_step = min(UNITS, self.count_all)
        self.steps = -(-self.count_all // self.per_step)
        self.blocks_per_tile = max(1, min(width, TILE // static.bk))
        self.keys = self.blocks_per_tile * static.bk
        blocks = slots // static.bk
        head = jnp.arange(batch * lists, dtype=jnp.int32).reshape(batch, lists)
        base = head // lists * kv_heads + head % lists * kv_heads // lists
        tiles = -(-width // self.blocks_per_tile)
        idx = jnp.pad(idx, ((0, 0), (0, 0), (0, 0), (0, tiles * self.blocks_per_tile - width)), mode="edge")
        row = jnp.broadcast_to(jnp.arange(rows, dtype=jnp.int32), (batch, lists, rows))
        self.items = {
            "block": self.split(jnp.moveaxis(idx, 2, 0)),
            "gather": self.split(jnp.moveaxis(idx + base[:, :, None, None] * blocks, 2, 0)),
            "count": self.split(jnp.moveaxis(count, 2, 0)),
            "row": self.split(jnp.moveaxis(row, 2, 0)),
        }
        self.valid = None
        if valid is not None:
            self.valid = jnp.repeat(valid, kv_heads, axis=0).reshape(-1, static.bk)

    def split(self, x: Array) -> Array:
        """``[nq, B, Hs, ...] -> [steps, units, ...]``, filled with zeros (lists of no block)."""
        x = x.reshape(self.count_all, *x.shape[3:])
        x = jnp.pad(x, ((0, self.steps * self.per_step - self.count_all), *((0, 0),) * (x.ndim - 1)))
        return x.reshape(self.steps, self.per_step, *x.shape[1:])

    def queries(self, x: Array) -> Array:
        """``[B, H, T, ...] -> [steps, units, G * bq, ...]``."""
        batch, lists, group, rows, bq = self.shape
        x = jnp.moveaxis(x.reshape(batch, lists, group, rows, bq, *x.shape[3:]), 3, 0)
        x = self.split(x)
        return x.reshape(*x.shape[:2], group * bq, *x.shape[4:])

    def back(self, x: Array) -> Array:
        """The inverse of ``queries``."""
        batch, lists, group, rows, bq = self.shape
        x = x.reshape(self.steps * self.per_step, *x.shape[2:])[: self.count_all]
        x = jnp.moveaxis(x.reshape(rows, batch, lists, group, bq, *x.shape[2:]), 0, 3)
        return x.reshape(batch, lists * group, rows * bq, *x.shape[5:])

    def blocks(self, x: Array) -> Array:
        """``[B, Hkv, S, D] -> [all blocks, bk, D]``."""
        return x.reshape(-1, self.static.bk, x.shape[-1])

    def tiles(self, item: dict) -> Array:
        """How many tiles the longest list of a step needs."""
        return (jnp.max(item["count"]) + self.blocks_per_tile - 1) // self.blocks_per_tile

    def tile(self, item: dict, unit: int, tile: Array, *sources: Array) -> tuple[Array, list[Array]]:
        """Block numbers of one tile of a unit, and its rows of each source in the dtype of the sums."""
        at = tile * self.blocks_per_tile
        take = jax.lax.dynamic_slice_in_dim(item["gather"][unit], at, self.blocks_per_tile)
        return take, [x[take].reshape(self.keys, -1).astype(self.exact) for x in sources]

    def mask(self, item: dict, unit: int, tile: Array, take: Array) -> Array:
        """Which keys of a tile each of the bq queries sees, ``[1, bq, keys]``."""
        at = tile * self.blocks_per_tile
        block = jax.lax.dynamic_slice_in_dim(item["block"][unit], at, self.blocks_per_tile)
        used = at + jnp.arange(self.blocks_per_tile, dtype=jnp.int32) < item["count"][unit]
        slot = block[:, None] * self.static.bk + jnp.arange(self.static.bk, dtype=jnp.int32)[None]
        seen = jnp.broadcast_to(used[:, None], slot.shape)
        if self.valid is not None:
            seen &= self.valid[take]
        q_slot = self.span[0] + item["row"][unit] * self.static.bq + jnp.arange(self.static.bq, dtype=jnp.int32)
        return (near(self.static, q_slot[:, None], slot.reshape(1, -1), self.span[1]) & seen.reshape(1, -1))[None]

    def scores(self, q: Array, keys: Array, mask: Array) -> tuple[Array, Array]:
        """Masked scores ``[G, bq, keys]``, -inf where not seen, and the derivative of the soft cap."""
        s = _dot(q, keys, 1, 1).reshape(-1, self.static.bq, self.keys)
        slope = jnp.ones((), s.dtype)
        if self.static.softcap is not None:
            soft = jnp.tanh(s / self.static.softcap)
            s, slope = soft * self.static.softcap, 1 - soft * soft
        return jnp.where(mask, s, -jnp.inf), slope


def _dot(a: Array, b: Array, i: int, j: int) -> Array:
    return jax.lax.dot_general(a, b, (((i,), (j,)), ((), ())))


def forward(static: Static, q, k, v, idx, count, valid, span) -> tuple[Array, Array]:
    work = _Units(static, q, k, idx, count, valid, span)
    keys, values = work.blocks(k), work.blocks(v)
    queries = work.queries(q.astype(work.exact) * static.scale)
    rows, dim = queries.shape[2], v.shape[-1]

    def step(item):
        def one(unit: int, tile, carry):
            top, total, out = carry
            take, (kt, vt) = work.tile(item, unit, tile, keys, values)
            s, _ = work.scores(item["q"][unit], kt, work.mask(item, unit, tile, take))
            s = s.reshape(rows, work.keys)
            new = jnp.maximum(top, jnp.max(s, axis=-1))
            shift = jnp.where(jnp.isneginf(new), 0, new)
            p = jnp.exp(s - shift[:, None])
            old = jnp.exp(top - shift)
            return new, total * old + jnp.sum(p, axis=-1), out * old[:, None] + _dot(p, vt, 1, 0)

        start = (
            jnp.full((rows,), -jnp.inf, work.exact),
            jnp.zeros((rows,), work.exact),
            jnp.zeros((rows, dim), work.exact),
        )
        carry = jax.lax.fori_loop(
            0,
            work.tiles(item),
            lambda tile, carry: [one(u, tile, c) for u, c in enumerate(carry)],
            [start] * work.per_step,
        )
        outs, sums = [], []
        for top, total, out in carry:
            some = total > 0
            safe = jnp.where(some, total, 1)
            outs.append(out * (1 / safe)[:, None])
            sums.append(jnp.where(some, jnp.log(safe) + top, -jnp.inf))
        return jnp.stack(outs), jnp.stack(sums)

    out, lse = jax.lax.map(step, work.items | {"q": queries})
    return work.back(out).astype(q.dtype), work.back(lse)


def backward(static: Static, q, k, v, idx, count, valid, span, d_out, lse, delta) -> tuple[Array, Array, Array]:
    work = _Units(static, q, k, idx, count, valid, span)
    keys, values = work.blocks(k), work.blocks(v)
    items = work.items | {
        "q": work.queries(q.astype(work.exact) * static.scale),
        "d_out": work.queries(d_out.astype(work.exact)),
        "lse": work.queries(lse),
        "delta": work.queries(delta),
    }
    rows = items["q"].shape[2]

    def step(carry, item):
        def one(unit: int, tile, dq):
            take, (kt, vt) = work.tile(item, unit, tile, keys, values)
            mask = work.mask(item, unit, tile, take)
            s, slope = work.scores(item["q"][unit], kt, mask)
            grouped = (-1, static.bq, 1)
            p = jnp.exp(s - item["lse"][unit].reshape(grouped))
            dp = _dot(item["d_out"][unit], vt, 1, 1).reshape(s.shape)
            ds = jnp.where(mask, p * (dp - item["delta"][unit].reshape(grouped)) * slope, 0).reshape(rows, work.keys)
            dv = _dot(p.reshape(rows, work.keys), item["d_out"][unit], 0, 0)
            dk = _dot(ds, item["q"][unit], 0, 0)
            return take, dq + _dot(ds, kt, 1, 0), dk, dv

        def tile_step(tile, carry):
            dqs, dk, dv = carry
            done = [one(u, tile, dq) for u, dq in enumerate(dqs)]
            take = jnp.concatenate([d[0] for d in done])
            more_k, more_v = (jnp.concatenate([d[i].reshape(-1, *dk.shape[1:]) for d in done]) for i in (2, 3))
            return [d[1] for d in done], dk.at[take].add(more_k), dv.at[take].add(more_v)

        dqs = [jnp.zeros((rows, q.shape[-1]), work.exact)] * work.per_step
        dqs, dk, dv = jax.lax.fori_loop(0, work.tiles(item), tile_step, (dqs, *carry))
        return (dk, dv), jnp.stack(dqs)

    zero = tuple(jnp.zeros(x.shape, work.exact) for x in (keys, values))
    (dk, dv), dq = jax.lax.scan(step, zero, items)
    return work.back(dq) * static.scale, dk.reshape(k.shape), dv.reshape(v.shape)
