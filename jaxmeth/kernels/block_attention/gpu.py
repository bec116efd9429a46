"""Pallas on Triton: one program a block of queries (or of keys, for their gradients) walks its list.

Blocks must be powers of two of at least 16; the head dimension is padded to one. Lists come as ordinary arrays, padded
to a power of two. Not yet run on a GPU: interpreted and lowered only.

Reference: Dao, FlashAttention-2, arXiv 2307.08691.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array

from jaxmeth.kernels.block_attention.reference import block_mask
from jaxmeth.kernels.block_attention.shapes import Static, near, transpose_lists
from jaxmeth.types import ConfigError


def power_of_two(n: int) -> int:
    """The smallest power of two of at least n and 16."""
    return max(16, 1 << (n - 1).bit_length())


def _dot(a, b, i: int, j: int):
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(a, b, (((i,), (j,)), ((), ())), precision=precision, preferred_element_type=jnp.float32)


def _tile(static: Static, q, k, valid, q_block, k_block, span):
    s = _dot(q, k, 1, 1) * static.scale
    slope = jnp.ones_like(s)
    if static.softcap is not None:
        soft = jnp.tanh(s / static.softcap)
        s, slope = soft * static.softcap, 1 - soft * soft
    q_slot = span[0] + q_block * static.bq + jax.lax.broadcasted_iota(jnp.int32, s.shape, 0)
    k_slot = k_block * static.bk + jax.lax.broadcasted_iota(jnp.int32, s.shape, 1)
    mask = near(static, q_slot, k_slot, span[1]) & (valid[None, :] > 0)
    return jnp.where(mask, s, jnp.finfo(s.dtype).min), mask, slope


def _forward_kernel(static, q, k, v, valid, idx, count, span, out, lse):
    i, here = pl.program_id(2), (span[0], span[1])
    queries = q[...]

    def body(j, carry):
        top, total, acc = carry
        block = idx[j]
        at = pl.ds(block * static.bk, static.bk)
        s, mask, _ = _tile(static, queries, k[at, :], valid[at], i, block, here)
        new = jnp.maximum(top, jnp.max(s, axis=1))
        p = jnp.where(mask, jnp.exp(s - new[:, None]), 0)
        keep = jnp.exp(top - new)
        acc = acc * keep[:, None] + _dot(p.astype(v.dtype), v[at, :], 1, 0)
        return new, total * keep + jnp.sum(p, axis=1), acc

    rows, dim = queries.shape
    start = (
        jnp.full((rows,), jnp.finfo(jnp.float32).min),
        jnp.zeros((rows,), jnp.float32),
        jnp.zeros((rows, dim), jnp.float32),
    )
    top, total, acc = jax.lax.fori_loop(0, count[0], body, start)
    some = total != 0
    safe = jnp.where(some, total, 1)
    out[...] = jnp.where(some[:, None], acc / safe[:, None], 0).astype(out.dtype)
    lse[...] = jnp.where(some, jnp.log(safe) + top, -jnp.inf)


def _dq_kernel(static, q, k, v, valid, idx, count, span, d_out, lse, delta, dq):
    i, here = pl.program_id(2), (span[0], span[1])
    queries, cotangent, row_lse, row_delta = q[...], d_out[...], lse[...], delta[...]

    def body(j, acc):
        block = idx[j]
        at = pl.ds(block * static.bk, static.bk)
        keys = k[at, :]
        s, mask, slope = _tile(static, queries, keys, valid[at], i, block, here)
        p = jnp.where(mask, jnp.exp(s - row_lse[:, None]), 0)
        ds = jnp.where(mask, p * (_dot(cotangent, v[at, :], 1, 1) - row_delta[:, None]) * slope, 0)
        return acc + _dot(ds.astype(keys.dtype), keys, 1, 0)

    acc = jax.lax.fori_loop(0, count[0], body, jnp.zeros(queries.shape, jnp.float32))
    dq[...] = (acc * static.scale).astype(dq.dtype)


def _dkv_kernel(static, lists, q, k, v, valid, idx, count, span, d_out, lse, delta, dk, dv):
    """The list of query blocks of one key block, for each query head of its key/value head in turn."""
    i, here = pl.program_id(2), (span[0], span[1])
    keys, values, seen = k[...], v[...], valid[...]
    group = q.shape[0]
    acc = (jnp.zeros(keys.shape, jnp.float32), jnp.zeros(values.shape, jnp.float32))
    for g in range(group):
        which = g * lists // group

        def body(j, acc, g=g, which=which):
            block = idx[which, j]
            at = pl.ds(block * static.bq, static.bq)
            queries, cotangent = q[g, at, :], d_out[g, at, :]
            s, mask, slope = _tile(static, queries, keys, seen, block, i, here)
            p = jnp.where(mask, jnp.exp(s - lse[g, at][:, None]), 0)
            ds = jnp.where(mask, p * (_dot(cotangent, values, 1, 1) - delta[g, at][:, None]) * slope, 0)
            return (
                acc[0] + _dot(ds.astype(queries.dtype), queries, 0, 0),
                acc[1] + _dot(p.astype(cotangent.dtype), cotangent, 0, 0),
            )

        acc = jax.lax.fori_loop(0, count[which, 0], body, acc)
    dk[...] = (acc[0] * static.scale).astype(dk.dtype)
    dv[...] = acc[1].astype(dv.dtype)


def _prepare(static: Static, k, idx, valid):
    if any(b != power_of_two(b) for b in (static.bq, static.bk)):
        raise ConfigError(f"bq, bk: found {static.bq}, {static.bk}, expected powers of two of at least 16 on a GPU")
    if valid is None:
        valid = jnp.ones((k.shape[0], k.shape[2]), bool)
    return _widen(idx), valid.astype(jnp.int32)


def _widen(x: Array) -> Array:
    """Pad the last axis to a power of two."""
    return jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, power_of_two(x.shape[-1]) - x.shape[-1]),))


def _specs(static: Static, dim: int, slots: int, width: int, per_list: int, group: int):
    """Block specs on the grid (B, H, nq): q-like, row-like, whole keys, whole validity, a list, its count, the span."""
    return {
        "q": pl.BlockSpec((None, None, static.bq, dim), lambda b, h, i: (b, h, i, 0)),
        "row": pl.BlockSpec((None, None, static.bq), lambda b, h, i: (b, h, i)),
        "k": pl.BlockSpec((None, None, slots, dim), lambda b, h, i: (b, jax.lax.div(h, group), 0, 0)),
        "valid": pl.BlockSpec((None, slots), lambda b, h, i: (b, 0)),
        "idx": pl.BlockSpec((None, None, None, width), lambda b, h, i: (b, jax.lax.div(h, per_list), i, 0)),
        "count": pl.BlockSpec((None, None, None, 1), lambda b, h, i: (b, jax.lax.div(h, per_list), i, 0)),
        "span": pl.BlockSpec((2,), lambda b, h, i: (0,)),
    }


def _call(kernel, static: Static, **kwargs):
    return pl.pallas_call(
        kernel,
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
        interpret=bool(static.interpret),
        **kwargs,
    )


def forward(static: Static, q, k, v, idx, count, valid, span) -> tuple[Array, Array]:
    batch, heads, length, dim = q.shape
    per_list, group = heads // idx.shape[1], heads // k.shape[1]
    idx, valid = _prepare(static, k, idx, valid)
    q, k, v = (_widen(x) for x in (q, k, v))
    spec = _specs(static, q.shape[-1], k.shape[2], idx.shape[-1], per_list, group)
    out, lse = _call(
        functools.partial(_forward_kernel, static),
        static,
        grid=(batch, heads, length // static.bq),
        in_specs=[spec[n] for n in ("q", "k", "k", "valid", "idx", "count", "span")],
        out_specs=[spec["q"], spec["row"]],
        out_shape=[jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct(q.shape[:3], jnp.float32)],
    )(q, k, v, valid, idx, count[..., None], span)
    return out[..., :dim], lse


def backward(static: Static, q, k, v, idx, count, valid, span, d_out, lse, delta) -> tuple[Array, Array, Array]:
    batch, heads, length, dim = q.shape
    per_list, group = heads // idx.shape[1], heads // k.shape[1]
    blocks = k.shape[2] // static.bk
    turned, number = transpose_lists(block_mask(idx, count, blocks))
    idx, valid = _prepare(static, k, idx, valid)
    q, k, v, d_out = (_widen(x) for x in (q, k, v, d_out.astype(q.dtype)))
    wide = q.shape[-1]
    spec = _specs(static, wide, k.shape[2], idx.shape[-1], per_list, group)
    dq = _call(
        functools.partial(_dq_kernel, static),
        static,
        grid=(batch, heads, length // static.bq),
        in_specs=[spec[n] for n in ("q", "k", "k", "valid", "idx", "count", "span", "q", "row", "row")],
        out_specs=spec["q"],
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
    )(q, k, v, valid, idx, count[..., None], span, d_out, lse, delta)

    # By key/value head: the query heads of one, and the lists they use (one, or one each).
    turned, kv_heads = _widen(turned), k.shape[1]
    lists = turned.shape[1] // kv_heads
    whole = pl.BlockSpec((None, group, length, wide), lambda b, h, i: (b, h, 0, 0))
    row = pl.BlockSpec((None, group, length), lambda b, h, i: (b, h, 0))
    block = pl.BlockSpec((None, None, static.bk, wide), lambda b, h, i: (b, h, i, 0))
    valid_spec = pl.BlockSpec((None, static.bk), lambda b, h, i: (b, i))
    list_spec = pl.BlockSpec((None, lists, None, turned.shape[-1]), lambda b, h, i: (b, h, i, 0))
    count_spec = pl.BlockSpec((None, lists, None, 1), lambda b, h, i: (b, h, i, 0))
    dk, dv = _call(
        functools.partial(_dkv_kernel, static, lists),
        static,
        grid=(batch, kv_heads, blocks),
        in_specs=[whole, block, block, valid_spec, list_spec, count_spec, spec["span"], whole, row, row],
        out_specs=[block, block],
        out_shape=[jax.ShapeDtypeStruct(k.shape, k.dtype), jax.ShapeDtypeStruct(v.shape, v.dtype)],
    )(q, k, v, valid, turned, number[..., None], span, d_out, lse, delta)
    return dq[..., :dim], dk[..., :dim], dv[..., :dim]
