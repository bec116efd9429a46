"""Pallas on TPU and GPU: the codes are unpacked beside the matrix unit."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as plt
from jaxtyping import Array

from jaxmeth.kernels.quantized_matmul import HIGHEST

ROWS, COLUMNS = 16, 128
ZERO_BYTE = 0x88  # two codes of 0


def _body(x_ref, q_ref, scale_ref, out_ref, *, chunk: int, group: int, packed: bool):
    """A tile of rows by a tile of columns; ``chunk`` columns of the stored weight at a time."""
    stored, grouped = q_ref.shape[1], scale_ref.shape[0] > 1
    total = jnp.zeros(out_ref.shape, jnp.float32)
    exact = jnp.float32 if x_ref.dtype == jnp.float32 else jnp.bfloat16  # 8-bit codes are exact in either
    for start in range(0, stored, chunk):
        q = q_ref[:, pl.ds(start, chunk)].astype(jnp.int32)
        for half in range(1 + packed):
            codes = ((q >> (4 * half)) & 15) - 8 if packed else q
            at = start + half * stored
            x = x_ref[:, pl.ds(at, chunk)]
            x = (x.astype(jnp.float32) if x.dtype == jnp.int8 else x).astype(exact)
            w = codes.astype(jnp.float32).astype(exact)
            precision = HIGHEST if exact == jnp.float32 else None
            part = jax.lax.dot_general(
                x, w, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
            )
            total += part * scale_ref[pl.ds(at // group, 1), :] if grouped else part
    # One scale a row goes on the sum, so that sums of integers stay exact.
    out_ref[...] = total if grouped else total * scale_ref[...]


def _pallas(x: Array, q: Array, scale: Array, params: Any, interpret: Any, chunk: int):
    """Shapes made multiples of the tiles: rows and columns by padding, K by padding each stored half."""
    (rows, k), n, packed = x.shape, q.shape[0], q.dtype == jnp.uint8
    stored, groups = q.shape[1], scale.shape[1]
    # Padding columns would shift the groups: with groups the chunk divides them instead.
    chunk = math.gcd(chunk, k // groups) if groups > 1 else chunk
    wide = -(-stored // chunk) * chunk
    x = jnp.pad(x, ((0, -rows % ROWS), (0, (2 * stored - k) if packed else 0)))
    halves = jnp.split(x, 2, axis=1) if packed else [x]
    x = jnp.concatenate([jnp.pad(a, ((0, 0), (0, wide - stored))) for a in halves], axis=1)
    pad = ((0, -n % COLUMNS), (0, wide - stored))
    q = jnp.pad(q, pad, constant_values=ZERO_BYTE if packed else 0)
    scale = jnp.pad(scale, ((0, -n % COLUMNS), (0, 0))).T.astype(jnp.float32)
    group = x.shape[1] if groups == 1 else k // groups
    call = pl.pallas_call(
        functools.partial(_body, chunk=chunk, group=group, packed=packed),
        grid=(x.shape[0] // ROWS, q.shape[0] // COLUMNS),
        in_specs=[
            pl.BlockSpec((ROWS, x.shape[1]), lambda i, j: (i, 0)),
            pl.BlockSpec((COLUMNS, wide), lambda i, j: (j, 0)),
            pl.BlockSpec((groups, COLUMNS), lambda i, j: (0, j)),
        ],
        out_specs=pl.BlockSpec((ROWS, COLUMNS), lambda i, j: (i, j)),
        out_shape=jax.ShapeDtypeStruct((x.shape[0], q.shape[0]), jnp.float32),
        compiler_params=params,
        interpret=interpret,
    )
    return call(x, q, scale)[:rows, :n]


def tpu(x, q, scale, interpret: Any = False):
    """Mosaic: the codes are unpacked in VMEM, K in runs of 512."""
    params = pltpu.CompilerParams(dimension_semantics=("parallel", "parallel"))
    return _pallas(x, q, scale, params, interpret, 512)


def gpu(x, q, scale, interpret: Any = False):
    """Triton: K in runs of 64."""
    return _pallas(x, q, scale, plt.CompilerParams(num_warps=4, num_stages=2), interpret, 64)
