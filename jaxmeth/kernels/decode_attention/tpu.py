"""Pallas for TPU: the block list is prefetched and chooses what each grid step copies. Interpreted and lowered only."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from jaxmeth.kernels.block_attention.tpu import LANES, _dot, check_block, softmax_add, softmax_finish, softmax_start
from jaxmeth.kernels.decode_attention.shapes import Static

SUBLANES = 16
"""Query rows are padded to a multiple of it, which suits float32 and bfloat16."""


def _kernel(static, overridden, idx, count, q, k, v, valid, *rest):
    if overridden:
        new_k, new_v, use, out, lse, top, total, acc = rest
    else:
        out, lse, top, total, acc = rest
    b, h, j = (pl.program_id(axis) for axis in range(3))

    @pl.when(j == 0)
    def _():
        softmax_start(top, total, acc)

    @pl.when(j < count[b, h])
    def _():
        keys, values = k[...], v[...]
        if overridden:
            swap = use[...] > 0
            keys, values = jnp.where(swap, new_k[...], keys), jnp.where(swap, new_v[...], values)
        s = _dot(q[...], keys, 1, 1) * static.scale
        if static.softcap is not None:
            s = static.softcap * jnp.tanh(s / static.softcap)
        mask = jnp.broadcast_to(valid[...] > 0, s.shape)
        s = jnp.where(mask, s, jnp.finfo(s.dtype).min)
        softmax_add(top, total, acc, s, mask, values)

    @pl.when(j == pl.num_programs(2) - 1)
    def _():
        softmax_finish(top, total, acc, out, lse)


def forward(static: Static, q, k, v, idx, count, valid, override) -> tuple[Array, Array]:
    check_block("bk", static.bk, k.shape[2])
    batch, lists, queries, dim = q.shape
    group = lists // k.shape[1]
    q = jnp.pad(q, ((0, 0), (0, 0), (0, -queries % SUBLANES), (0, 0)))
    if valid is None:
        valid = jnp.ones((batch, k.shape[2]), bool)
    rows = pl.BlockSpec((None, None, q.shape[2], dim), lambda b, h, j, *_: (b, h, 0, 0))
    block = pl.BlockSpec(
        (None, None, static.bk, dim), lambda b, h, j, idx, count: (b, jax.lax.div(h, group), idx[b, h, j], 0)
    )
    arrays = [q, k, v, valid.astype(jnp.int32).reshape(batch, -1, 1, static.bk)]
    specs = [
        rows,
        block,
        block,
        pl.BlockSpec((None, None, 1, static.bk), lambda b, h, j, idx, count: (b, idx[b, h, j], 0, 0)),
    ]
    if override is not None:
        arrays += [override.k, override.v, override.use.astype(jnp.int32).reshape(batch, -1, 1)]
        specs += [
            block,
            block,
            pl.BlockSpec((None, static.bk, 1), lambda b, h, j, idx, count: (b, idx[b, h, j], 0)),
        ]
    lse_spec = pl.BlockSpec((None, None, q.shape[2], 1), lambda b, h, j, *_: (b, h, 0, 0))
    out, lse = pl.pallas_call(
        functools.partial(_kernel, static, override is not None),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch, lists, idx.shape[-1]),
            in_specs=specs,
            out_specs=[rows, lse_spec],
            scratch_shapes=[
                pltpu.VMEM((q.shape[2], LANES), jnp.float32),
                pltpu.VMEM((q.shape[2], LANES), jnp.float32),
                pltpu.VMEM((q.shape[2], dim), jnp.float32),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((*q.shape[:3], 1), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        interpret=static.interpret,
    )(idx, count, *arrays)
    return out[:, :, :queries], lse[:, :, :queries, 0]
