"""Rotate each run of channels and round each token, in one pass over the activations."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int8

from jaxmeth.kernels.backend import resolve
from jaxmeth.types import ConfigError

HIGHEST = jax.lax.Precision.HIGHEST
FLOOR = 1e-12


def row_scale(low: Array, high: Array, bits: int) -> Array:
    """The step of 2^bits levels from ``low`` to ``high``, at least ``FLOOR``; finite where their distance is not."""
    levels = 2**bits - 1
    span = high - low
    return jnp.maximum(jnp.where(jnp.isinf(span), high / levels - low / levels, span / levels), FLOOR)


def round_rows(y: Array, low: Array, high: Array, bits: int) -> tuple[Array, Array, Array]:
    """``(q - zero as floats, scale, zero)``; ``low`` and ``high`` hold 0."""
    levels = 2**bits - 1
    scale = row_scale(low, high, bits)
    zero = _half_even(-low / scale)
    return jnp.clip(_half_even(y / scale), -zero, levels - zero), scale, zero


def _half_even(x: Array) -> Array:
    """``jnp.round``, which Triton's lowering lacks."""
    below = jnp.floor(x)
    gap = x - below
    odd = below - 2 * jnp.floor(below / 2)
    return below + jnp.where((gap > 0.5) | ((gap == 0.5) & (odd == 1)), 1.0, 0.0)


def _rounded(y: Array, bits: int) -> tuple[Array, Array, Array]:
    low, high = (f(y, axis=-1, keepdims=True, initial=0.0) for f in (jnp.min, jnp.max))
    codes, scale, zero = round_rows(y, low, high, bits)
    return codes.astype(jnp.int8), scale, zero


def reference(x: Float[Array, "M d"], h: Float[Array, "b b"], bits: int) -> tuple[Array, Array, Array]:
    """The definition: one dense ``[d, d]`` rotation."""
    whole = jnp.kron(jnp.eye(x.shape[1] // h.shape[0]), h.astype(jnp.float32))
    return _rounded(jnp.matmul(x.astype(jnp.float32), whole, precision=HIGHEST), bits)


def xla(x: Float[Array, "M d"], h: Float[Array, "b b"], bits: int) -> tuple[Array, Array, Array]:
    """One product a block."""
    runs = x.astype(jnp.float32).reshape(x.shape[0], x.shape[1] // h.shape[0], h.shape[0])
    return _rounded(jnp.matmul(runs, h.astype(jnp.float32), precision=HIGHEST).reshape(x.shape), bits)


def hadamard_quantize(
    x: Float[Array, "M d"],
    h: Float[Array, "b c"],
    *,
    bits: int = 4,
    backend: str = "auto",
    interpret: Any = False,
) -> tuple[Int8[Array, "M d"], Float32[Array, "M 1"], Float32[Array, "M 1"]]:
    r"""Rotate blocks of channels and round each token asymmetrically.

    .. math:: y = x (I \otimes H), \quad s = (\max(0, y) - \min(0, y)) / (2^B - 1), \quad z = [-\min(0, y) / s],
       \quad c = \mathrm{clip}([y / s], -z, 2^B - 1 - z)

    Args:
      x: activations; float32 inside whatever the type.
      h: orthonormal ``[b, b]``, b divides d (``quant.hadamard(b)``); a power of two of at least 16 on a GPU.
      bits: B, 2 to 7, so that the codes fit int8.
      backend: "auto", "reference", "xla", "tpu", "gpu".
      interpret: run a Pallas kernel on any machine, for tests.

    Returns:
      ``(c int8 [M, d], s [M, 1], z [M, 1])``; y is about ``c s``. Rows of zeros give zeros. A row with NaN or infinity
      has scale NaN or infinity; its codes mean nothing.

    Raises: ConfigError for bits, block or backend out of range.
    Reference: arXiv 2601.22347 (dynamic per-token quantisation after a block rotation); the fusion is a reconstruction.
    """
    if not 2 <= bits <= 7:
        raise ConfigError(f"bits: found {bits}, expected 2 to 7")
    block = h.shape[0]
    if h.shape[1] != block or x.shape[1] % block:
        raise ConfigError(f"h: found shape {h.shape}, expected a square matrix whose size divides {x.shape[1]}")
    chosen = resolve(backend, interpret)
    if chosen == "gpu" and (block < 16 or block & (block - 1)):
        if backend == "gpu":
            raise ConfigError(f"h: found a block of {block}, expected a power of two of at least 16 on a GPU")
        chosen = "xla"
    if chosen in ("reference", "xla") or x.shape[0] == 0:
        return {"reference": reference}.get(chosen, xla)(x, h, bits)
    return _kernel(chosen)(x, h, bits, interpret)


def _kernel(name: str):
    """Pallas is imported only where it runs: it takes half a second."""
    from jaxmeth.kernels.hadamard_quantize import pallas

    return {"tpu": pallas.tpu, "gpu": pallas.gpu}[name]
