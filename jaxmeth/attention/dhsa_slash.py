"""Vertical-slash scores of key blocks, from the last queries of the prompt (rules "vs" and "vsb" of DHSA).

Both look at the end of the prompt to choose for all rows: not causal, so for prefill of a fixed prompt only.

Reference: the public code of arXiv 2510.24606; Jiang et al., MInference 1.0, arXiv 2407.02490, section 3.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxmeth.attention.dhsa_blocks import _block_means, _of_queries, block_products, budget_blocks
from jaxmeth.attention.dhsa_chunks import finite


def vertical_slash(q, k, cfg, valid, start, rows, seen, budget: int | Array) -> Array:
    """Scores ``[B, Hs, nq, nk]``; q and k in float32 with as many heads as there are lists, ``budget`` in blocks."""
    rule = _by_tokens if cfg.rule == "vs" else _by_blocks
    budgets = range(budget_blocks(cfg.density, seen.shape[-1]) + 1)
    return rule(q, k, cfg, valid, start, rows, seen, budget, budgets)


def _keep_best(values: Array, budget: int | Array, numbers: list[int]) -> Array:
    """The values with all but the ``numbers[budget]`` largest set to 0; equal ones: lower index first."""
    most = min(max(numbers), values.shape[-1])
    if most == 0:
        return jnp.zeros_like(values)
    best, where = jax.lax.top_k(values, most)
    best = jnp.where((jnp.arange(most) < jnp.asarray(numbers, jnp.int32)[budget])[None, None], best, 0)
    flat = jax.vmap(lambda at, v: jnp.zeros(values.shape[-1], values.dtype).at[at].set(v))
    return flat(where.reshape(-1, where.shape[-1]), best.reshape(-1, best.shape[-1])).reshape(values.shape)


def _by_tokens(q, k, cfg, valid, start, rows, seen, budget: int | Array, budgets: range) -> Array:
    slots, length = k.shape[2], q.shape[2]
    blocks = seen.shape[-1]
    tail = min(cfg.bq, length)
    place = jnp.arange(slots, dtype=jnp.int32)
    final = jnp.minimum(jnp.max(jnp.where(valid, place[None], 0), axis=1), start + length - 1)
    begin = jnp.clip(final - start - tail + 1, 0, length - tail)
    last = jax.vmap(lambda x, at: jax.lax.dynamic_slice_in_dim(x, at, tail, axis=1))(q, begin)
    slot = (start + begin)[:, None] + jnp.arange(tail, dtype=jnp.int32)[None]
    distance = slot[:, :, None] - place[None, None]
    real = jnp.take_along_axis(valid, slot, axis=1) & (slot <= final[:, None])
    mask = ((distance >= 0) & valid[:, None, :] & real[..., None])[:, None]
    mask = mask & jnp.all(jnp.isfinite(last), -1)[..., None] & jnp.all(jnp.isfinite(k), -1)[:, :, None]
    s = finite(jnp.einsum("bhtd,bhsd->bhts", last, k, precision="highest") * cfg_scale(q))
    s = jnp.where(mask, s, jnp.finfo(s.dtype).min)
    p = jnp.where(mask, jnp.exp(s - jnp.max(s, axis=-1, keepdims=True)), 0)
    p = p / jnp.maximum(jnp.sum(p, axis=-1, keepdims=True), jnp.finfo(s.dtype).tiny)

    tokens = [min(slots, n * cfg.bk) for n in budgets]
    vertical = [int(n * cfg.vs_ratio) for n in tokens]
    column = _keep_best(jnp.sum(p, axis=2), budget, vertical)
    column = jnp.pad(column, ((0, 0), (0, 0), (0, blocks * cfg.bk - slots)))
    column = jnp.sum(column.reshape(*column.shape[:2], blocks, cfg.bk), axis=-1)

    # Mass by distance d: P[t, slot_t - d].
    key = slot[:, :, None] - place[None, None]
    at = jnp.broadcast_to(jnp.maximum(key, 0)[:, None], p.shape)
    slash = jnp.sum(jnp.where((key >= 0)[:, None], jnp.take_along_axis(p, at, axis=-1), 0), axis=2)
    slash = _keep_best(slash, budget, [n - v for n, v in zip(tokens, vertical, strict=True)])
    # Row i touches block j at the distances from low to high: a difference of prefix sums.
    sums = jnp.pad(jnp.cumsum(slash, axis=-1), ((0, 0), (0, 0), (1, 0)))
    i, j = jnp.arange(seen.shape[2], dtype=jnp.int32)[:, None], jnp.arange(blocks, dtype=jnp.int32)[None]
    low = jnp.clip(start + i * cfg.bq - (j + 1) * cfg.bk + 1, 0, slots)
    high = jnp.clip(start + (i + 1) * cfg.bq - j * cfg.bk, 0, slots)
    touched = jnp.take(sums, high, axis=-1) - jnp.take(sums, low, axis=-1)
    return column[:, :, None, :] + jnp.maximum(touched, 0)


def cfg_scale(q: Array) -> float:
    """1 / sqrt(D)."""
    return q.shape[-1] ** -0.5


def _by_blocks(q, k, cfg, valid, start, rows, seen, budget: int | Array, budgets: range) -> Array:
    blocks = seen.shape[-1]
    means, _ = _block_means(q, cfg.bq, _of_queries(valid, q.shape[2], start))
    keys, _ = _block_means(k, cfg.bk, valid)
    row = jnp.broadcast_to(rows.last_row[..., None], (means.shape[0], 1, 1, 1))
    last = jnp.take_along_axis(means, row, axis=2)
    score = block_products(last, keys)[:, :, 0] * cfg_scale(q)
    rec = jnp.take_along_axis(jnp.broadcast_to(rows.rec, (means.shape[0], 1, rows.rec.shape[-1])), row[..., 0], axis=2)
    j = jnp.arange(blocks, dtype=jnp.int32)
    usable = rows.real[:, :, 0] & (j[None, None] <= rec)
    low = jnp.finfo(score.dtype).min
    score = jnp.where(usable, score, low)
    vertical = [int(n * cfg.vs_ratio) for n in budgets]
    column = _keep_best(score, budget, vertical)
    column = jnp.where(column <= low, 0, column)
    by_block = _keep_best(score, budget, [n - v for n, v in zip(budgets, vertical, strict=True)])
    by_block = jnp.where(by_block <= low, 0, by_block)
    # by_distance[d] is the weight of the block d before the last row's.
    back = rec - j[None, None]
    by_distance = jnp.where(back >= 0, jnp.take_along_axis(by_block, jnp.broadcast_to(
        jnp.maximum(back, 0), by_block.shape), axis=-1), 0)  # fmt: skip
    touched = jnp.zeros((*score.shape[:2], *seen.shape[2:]), score.dtype)
    for step in range(-(-cfg.bq // cfg.bk) + 1):
        d = rows.first[..., None] + step - j[None, None, None]
        inside = (d >= 0) & (d < blocks) & (rows.first[..., None] + step <= rows.rec[..., None])
        flat = jnp.broadcast_to(jnp.clip(d, 0, blocks - 1), (*touched.shape[:1], 1, *touched.shape[2:]))
        flat = jnp.broadcast_to(flat, touched.shape).reshape(*score.shape[:2], -1)
        taken = jnp.take_along_axis(by_distance, flat, axis=-1).reshape(touched.shape)
        touched = touched + jnp.where(inside, taken, 0)
    return column[:, :, None, :] + touched
