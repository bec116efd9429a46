"""Activations times a weight of 8-bit or packed 4-bit integers, which is never written out as floats."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Num

from jaxmeth.kernels.backend import resolve
from jaxmeth.types import ConfigError

HIGHEST = jax.lax.Precision.HIGHEST


def _codes(q: Array, width: int) -> Array:
    """int8 ``[N, K]``, packed or not."""
    if q.dtype != jnp.uint8:
        return q
    both = jnp.concatenate([q & 15, q >> 4], axis=1)
    return (both.astype(jnp.int8) - jnp.int8(8))[:, :width]


def reference(x: Array, q: Array, scale: Array) -> Array:
    """The definition: the float weight, then one product."""
    w = _codes(q, x.shape[1]).astype(jnp.float32) * jnp.repeat(scale, x.shape[1] // scale.shape[1], axis=1)
    return jnp.matmul(x.astype(jnp.float32), w.T, precision=HIGHEST)


def xla(x: Array, q: Array, scale: Array) -> Array:
    """Scales go on the product where a row has one, so that the weight is converted and no more."""
    x = x.astype(jnp.float32)
    codes = _codes(q, x.shape[1]).astype(jnp.float32)
    if scale.shape[1] == 1:
        return jnp.matmul(x, codes.T, precision=HIGHEST) * scale[:, 0][None]
    groups = scale.shape[1]
    w = codes.reshape(codes.shape[0], groups, -1) * scale[..., None]
    return jnp.matmul(x, w.reshape(codes.shape).T, precision=HIGHEST)


def quantized_matmul(
    x: Num[Array, "M K"],
    q: Num[Array, "N S"],
    scale: Float[Array, "n G"],
    *,
    x_scale: Float[Array, "M 1"] | None = None,
    backend: str = "auto",
    interpret: Any = False,
) -> Float32[Array, "M N"]:
    r"""Multiply by a rounded weight.

    .. math:: y_{mn} = s^x_m \sum_k x_{mk}\, c_{nk}\, s_{n, \lfloor k G / K \rfloor}

    Args:
      x: floats, or the int8 codes of ``hadamard_quantize`` (then ``x_scale`` is its scale).
      q: the codes c of a ``quant.QTensor``: int8 ``[N, K]``, or packed uint8 ``[N, ceil(K / 2)]``.
      scale: ``[N, 1]``, or ``[N, G]`` for G groups of K / G columns.
      x_scale: factor of each row; None = 1.
      backend: "auto", "reference", "xla", "tpu", "gpu". "auto" takes "xla" for groups that the tiles do not divide.
      interpret: run a Pallas kernel on any machine, for tests.

    Returns:
      float32 ``[M, N]``. Sums in float32; bfloat16 products on the Pallas backends for x below float32.

    Raises: ConfigError where shapes do not fit or the backend cannot run here.
    Reference: Frantar et al., MARLIN, arXiv 2408.11743 (weights unpacked beside the matrix unit); reconstruction.
    """
    k = x.shape[1]
    stored = -(-k // 2) if q.dtype == jnp.uint8 else k
    if q.dtype not in (jnp.uint8, jnp.int8) or q.shape[1] != stored:
        raise ConfigError(f"q: found {q.dtype} {q.shape}, expected int8 [N, {k}] or uint8 [N, {-(-k // 2)}]")
    groups = scale.shape[1]
    if scale.shape[0] != q.shape[0] or groups == 0 or k % groups:
        raise ConfigError(f"scale: found shape {scale.shape}, expected [{q.shape[0]}, a divisor of {k}]")
    chosen = resolve(backend, interpret)
    if chosen in ("tpu", "gpu") and groups > 1 and (stored % (k // groups) or (k // groups) % 16):
        if backend != "auto":
            raise ConfigError(f"scale: found groups of {k // groups} columns, expected multiples of 16 in each half")
        chosen = "xla"
    if chosen in ("reference", "xla") or 0 in (x.shape[0], q.shape[0]):
        y = {"reference": reference}.get(chosen, xla)(x, q, scale)
    else:
        y = _kernel(chosen)(x, q, scale, interpret)
    return y if x_scale is None else y * x_scale


def _kernel(name: str):
    """Pallas is imported only where it runs: it takes half a second."""
    from jaxmeth.kernels.quantized_matmul import pallas

    return {"tpu": pallas.tpu, "gpu": pallas.gpu}[name]
