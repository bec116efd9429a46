"""Pallas for TPU: lists and counts prefetched to scalar memory choose which key block each grid step copies.

The grid is (B, H, nq, W), the last axis sequential: a list entry past the count repeats the last block, which is not
copied again, and its arithmetic is skipped. The lists of a call must fit the scalar memory (about 1 MB): B Hs nq W
numbers of 4 bytes, for gradients B Hs nk nq; beyond that call a batch row or a head at a time. Not yet run on a TPU:
interpreted and lowered only.

Reference: Dao, FlashAttention-2, arXiv 2307.08691.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from jaxmeth.kernels.block_attention.reference import block_mask
from jaxmeth.kernels.block_attention.shapes import Static, near, transpose_lists
from jaxmeth.types import ConfigError

LANES = 128


def _dot(a, b, i: int, j: int):
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(a, b, (((i,), (j,)), ((), ())), precision=precision, preferred_element_type=jnp.float32)


def _tile(static: Static, q, k, valid, q_block, k_block, span_ref):
    """Masked scores of one tile, the mask, and the derivative of the soft cap."""
    s = _dot(q, k, 1, 1) * static.scale
    slope = jnp.ones_like(s)
    if static.softcap is not None:
        soft = jnp.tanh(s / static.softcap)
        s, slope = soft * static.softcap, 1 - soft * soft
    shape = (static.bq, static.bk)
    q_slot = span_ref[0] + q_block * static.bq + jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    k_slot = k_block * static.bk + jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    mask = near(static, q_slot, k_slot, span_ref[1]) & (valid > 0)
    return jnp.where(mask, s, jnp.finfo(s.dtype).min), mask, slope


def softmax_start(top, total, acc):
    """Scratch of an online softmax before its first tile: largest score, sum of weights, weighted values."""
    top[...] = jnp.full_like(top, jnp.finfo(jnp.float32).min)
    total[...] = jnp.zeros_like(total)
    acc[...] = jnp.zeros_like(acc)


def softmax_add(top, total, acc, s, mask, values):
    """Take in the scores of one tile, the lowest number where masked, and its values."""
    old = top[:, :1]
    new = jnp.maximum(old, jnp.max(s, axis=1, keepdims=True))
    p = jnp.where(mask, jnp.exp(s - new), 0)
    keep = jnp.exp(old - new)
    top[...] = jnp.broadcast_to(new, top.shape)
    total[...] = jnp.broadcast_to(total[:, :1] * keep + jnp.sum(p, axis=1, keepdims=True), total.shape)
    acc[...] = acc[...] * keep + _dot(p.astype(values.dtype), values, 1, 0)


def softmax_finish(top, total, acc, out, lse):
    """Zeros and -inf for a row that saw nothing."""
    some = total[:, :1] != 0
    safe = jnp.where(some, total[:, :1], 1)
    out[...] = jnp.where(some, acc[...] / safe, 0).astype(out.dtype)
    lse[...] = jnp.where(some, jnp.log(safe) + top[:, :1], -jnp.inf)


def _forward_kernel(static, per_list, idx, count, span, q, k, v, valid, out, lse, top, total, acc):
    b, h, i, j = (pl.program_id(axis) for axis in range(4))
    row = (b, jax.lax.div(h, per_list), i)

    @pl.when(j == 0)
    def _():
        softmax_start(top, total, acc)

    @pl.when(j < count[row])
    def _():
        s, mask, _ = _tile(static, q[...], k[...], valid[...], i, idx[(*row, j)], span)
        softmax_add(top, total, acc, s, mask, v[...])

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        softmax_finish(top, total, acc, out, lse)


def _dq_kernel(static, per_list, idx, count, span, q, k, v, valid, d_out, lse, delta, dq, acc):
    b, h, i, j = (pl.program_id(axis) for axis in range(4))
    row = (b, jax.lax.div(h, per_list), i)

    @pl.when(j == 0)
    def _():
        acc[...] = jnp.zeros_like(acc)

    @pl.when(j < count[row])
    def _():
        s, mask, slope = _tile(static, q[...], k[...], valid[...], i, idx[(*row, j)], span)
        p = jnp.where(mask, jnp.exp(s - lse[...]), 0)
        ds = jnp.where(mask, p * (_dot(d_out[...], v[...], 1, 1) - delta[...]) * slope, 0)
        acc[...] += _dot(ds.astype(k.dtype), k[...], 1, 0)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        dq[...] = (acc[...] * static.scale).astype(dq.dtype)


def _dkv_kernel(static, group, per_list, idx, count, span, q, k, v, valid, d_out, lse, delta, dk, dv, acc_k, acc_v):
    b, head, i, g, j = (pl.program_id(axis) for axis in range(5))
    row = (b, jax.lax.div(head * group + g, per_list), i)

    @pl.when((g == 0) & (j == 0))
    def _():
        acc_k[...] = jnp.zeros_like(acc_k)
        acc_v[...] = jnp.zeros_like(acc_v)

    @pl.when(j < count[row])
    def _():
        s, mask, slope = _tile(static, q[...], k[...], valid[...], idx[(*row, j)], i, span)
        p = jnp.where(mask, jnp.exp(s - lse[...]), 0)
        ds = jnp.where(mask, p * (_dot(d_out[...], v[...], 1, 1) - delta[...]) * slope, 0)
        acc_v[...] += _dot(p.astype(d_out.dtype), d_out[...], 0, 0)
        acc_k[...] += _dot(ds.astype(q.dtype), q[...], 0, 0)

    @pl.when((g == pl.num_programs(3) - 1) & (j == pl.num_programs(4) - 1))
    def _():
        dk[...] = (acc_k[...] * static.scale).astype(dk.dtype)
        dv[...] = acc_v[...].astype(dv.dtype)


def check_block(name: str, block: int, length: int) -> None:
    """Raises: ConfigError for a block that Mosaic does not tile: no multiple of 8 and not the whole padded length."""
    if block % 8 and block != length:
        raise ConfigError(f"{name}: found {block}, expected a multiple of 8 on a TPU")


def _shapes(static: Static, q, k, idx, valid):
    check_block("bq", static.bq, q.shape[2])
    check_block("bk", static.bk, k.shape[2])
    heads, lists, kv_heads = q.shape[1], idx.shape[1], k.shape[1]
    if valid is None:
        valid = jnp.ones((k.shape[0], k.shape[2]), bool)
    valid = valid.astype(jnp.int32).reshape(k.shape[0], -1, 1, static.bk)
    return heads // lists, heads // kv_heads, valid


def _specs(static: Static, dim: int, per_list: int, group: int):
    """Block specs of q-like, row-like, k-like and valid arrays on the grid (B, H, nq, W)."""

    def key_block(b, h, i, j, idx, count, span):
        return idx[b, jax.lax.div(h, per_list), i, j]

    return (
        pl.BlockSpec((None, None, static.bq, dim), lambda b, h, i, j, *_: (b, h, i, 0)),
        pl.BlockSpec((None, None, static.bq, 1), lambda b, h, i, j, *_: (b, h, i, 0)),
        pl.BlockSpec(
            (None, None, static.bk, dim),
            lambda b, h, i, j, *lists: (b, jax.lax.div(h, group), key_block(b, h, i, j, *lists), 0),
        ),
        pl.BlockSpec((None, None, 1, static.bk), lambda b, h, i, j, *lists: (b, key_block(b, h, i, j, *lists), 0, 0)),
    )


def _params(parallel: int, sequential: int):
    return pltpu.CompilerParams(dimension_semantics=("parallel",) * parallel + ("arbitrary",) * sequential)


def forward(static: Static, q, k, v, idx, count, valid, span) -> tuple[Array, Array]:
    batch, heads, length, dim = q.shape
    per_list, group, valid = _shapes(static, q, k, idx, valid)
    q_like, row_like, k_like, valid_spec = _specs(static, dim, per_list, group)
    out, lse = pl.pallas_call(
        functools.partial(_forward_kernel, static, per_list),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(batch, heads, length // static.bq, idx.shape[-1]),
            in_specs=[q_like, k_like, k_like, valid_spec],
            out_specs=[q_like, row_like],
            scratch_shapes=[
                pltpu.VMEM((static.bq, LANES), jnp.float32),
                pltpu.VMEM((static.bq, LANES), jnp.float32),
                pltpu.VMEM((static.bq, dim), jnp.float32),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((batch, heads, length, 1), jnp.float32),
        ],
        compiler_params=_params(3, 1),
        interpret=static.interpret,
    )(idx, count, span, q, k, v, valid)
    return out, lse[..., 0]


def backward(static: Static, q, k, v, idx, count, valid, span, d_out, lse, delta) -> tuple[Array, Array, Array]:
    batch, heads, length, dim = q.shape
    per_list, group, valid = _shapes(static, q, k, idx, valid)
    q_like, row_like, k_like, valid_spec = _specs(static, dim, per_list, group)
    d_out, lse, delta = d_out.astype(q.dtype), lse[..., None], delta[..., None]
    rows, blocks = length // static.bq, k.shape[2] // static.bk
    dq = pl.pallas_call(
        functools.partial(_dq_kernel, static, per_list),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(batch, heads, rows, idx.shape[-1]),
            in_specs=[q_like, k_like, k_like, valid_spec, q_like, row_like, row_like],
            out_specs=q_like,
            scratch_shapes=[pltpu.VMEM((static.bq, dim), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        compiler_params=_params(3, 1),
        interpret=static.interpret,
    )(idx, count, span, q, k, v, valid, d_out, lse, delta)

    turned, number = transpose_lists(block_mask(idx, count, blocks))

    def query_block(b, head, i, g, j, turned, number, span):
        h = head * group + g
        return b, h, turned[b, jax.lax.div(h, per_list), i, j], 0

    q_like = pl.BlockSpec((None, None, static.bq, dim), query_block)
    row_like = pl.BlockSpec((None, None, static.bq, 1), query_block)
    k_like = pl.BlockSpec((None, None, static.bk, dim), lambda b, head, i, g, j, *_: (b, head, i, 0))
    valid_spec = pl.BlockSpec((None, None, 1, static.bk), lambda b, head, i, g, j, *_: (b, i, 0, 0))
    dk, dv = pl.pallas_call(
        functools.partial(_dkv_kernel, static, group, per_list),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(batch, k.shape[1], blocks, group, rows),
            in_specs=[q_like, k_like, k_like, valid_spec, q_like, row_like, row_like],
            out_specs=[k_like, k_like],
            scratch_shapes=[pltpu.VMEM((static.bk, dim), jnp.float32)] * 2,
        ),
        out_shape=[jax.ShapeDtypeStruct(k.shape, k.dtype), jax.ShapeDtypeStruct(v.shape, v.dtype)],
        compiler_params=_params(3, 2),
        interpret=static.interpret,
    )(turned, number, span, q, k, v, valid, d_out, lse, delta)
    return dq, dk, dv
