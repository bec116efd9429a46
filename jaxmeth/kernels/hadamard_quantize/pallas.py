"""Pallas on TPU and GPU: a tile of rows is rotated and rounded without leaving the chip's memory."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as plt

from jaxmeth.kernels.hadamard_quantize import HIGHEST, round_rows

ROWS = 16
LANES = 128


def _body(x_ref, h_ref, q_ref, scale_ref, zero_ref, *, bits: int):
    """A tile of rows, whole: once for the extremes, once more to round (the rotation is cheaper than keeping it)."""
    width = h_ref.shape[0]
    h = h_ref[...].astype(jnp.float32)

    def turned(j: int):
        x = x_ref[:, pl.ds(j * width, width)].astype(jnp.float32)
        return jnp.dot(x, h, precision=HIGHEST, preferred_element_type=jnp.float32)

    runs = x_ref.shape[1] // width
    low = high = jnp.zeros((x_ref.shape[0], 1), jnp.float32)
    for j in range(runs):
        y = turned(j)
        low = jnp.minimum(low, jnp.min(y, axis=1, keepdims=True))
        high = jnp.maximum(high, jnp.max(y, axis=1, keepdims=True))
    for j in range(runs):
        codes, scale, zero = round_rows(turned(j), low, high, bits)
        q_ref[:, pl.ds(j * width, width)] = codes.astype(jnp.int32).astype(jnp.int8)
    scale_ref[...], zero_ref[...] = scale, zero


def _pallas(x, h, bits: int, params: Any, interpret: Any, wide: int):
    rows, d = x.shape
    # Several small blocks side by side fill the matrix unit.
    copies = 1
    while h.shape[0] * copies * 2 <= wide and d % (h.shape[0] * copies * 2) == 0:
        copies *= 2
    h = jnp.kron(jnp.eye(copies, dtype=jnp.float32), h.astype(jnp.float32))
    padded = jnp.pad(x, ((0, -rows % ROWS), (0, 0)))
    tall = padded.shape[0]
    row = lambda width: pl.BlockSpec((ROWS, width), lambda i: (i, 0))  # noqa: E731
    call = pl.pallas_call(
        functools.partial(_body, bits=bits),
        grid=(tall // ROWS,),
        in_specs=[row(d), pl.BlockSpec(h.shape, lambda i: (0, 0))],
        out_specs=[row(d), row(1), row(1)],
        out_shape=[jax.ShapeDtypeStruct((tall, w), t) for w, t in ((d, jnp.int8), (1, jnp.float32), (1, jnp.float32))],
        compiler_params=params,
        interpret=interpret,
    )
    return tuple(a[:rows] for a in call(padded, h))


def tpu(x, h, bits: int, interpret: Any = False):
    """Mosaic: rows in tiles, blocks below 128 made block-diagonal matrices of 128."""
    params = pltpu.CompilerParams(dimension_semantics=("parallel",))
    return _pallas(x, h, bits, params, interpret, LANES)


def gpu(x, h, bits: int, interpret: Any = False):
    """Triton: as ``tpu``, in products of at most 64."""
    return _pallas(x, h, bits, plt.CompilerParams(num_warps=4, num_stages=1), interpret, 64)
