"""``QTensor``: integers with a scale, as a result of rounding and as a weight that ``linear`` understands."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, UInt8

from jaxmeth.kernels.hadamard_quantize import hadamard_quantize, row_scale
from jaxmeth.kernels.quantized_matmul import quantized_matmul
from jaxmeth.models.layers import linear
from jaxmeth.quant.hadamard import ONE_PRODUCT, block_hadamard, hadamard
from jaxmeth.quant.permute import check_numbers
from jaxmeth.types import ConfigError


@jax.custom_jvp
def round_through(x: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """Round half to even; the derivative is that of the identity (a straight-through estimate)."""
    return jnp.round(x)


@round_through.defjvp
def _round_through_jvp(primals, tangents):
    return jnp.round(primals[0]), tangents[0]


@struct.dataclass
class QTensor:
    r"""Integers and scales, ``value = (q - zero) scale``; a weight ``[..., out, in]`` says what its input goes through.

    .. math:: y = Q_{act}(x R_b)\,\hat W^\top

    Attributes:
      q: int8 (weights) or uint8 (activations) codes; where ``packed`` two 4-bit codes a byte, uint8
        ``[..., out, ceil(in / 2)]``: the low half of byte j is column j, the high half column j + ceil(in / 2), both
        plus 8. Where ``bits`` is None the float weight itself.
      scale: ``[..., out, 1]``, ``[..., out, in / group]`` or, of activations, ``[..., 1]``; None where ``bits`` is.
      zero: integers as floats, ``[..., 1]``; None for symmetric weights.
      bits: static; None keeps floats, for a weight of which only the input is rotated or rounded.
      width: static; in, where ``packed``.
      rotate: static; block of the rotation that the input goes through first, None for none.
      act_bits: static; bits to which the rotated input is then rounded, None for none.
    """

    q: Any  # not annotated closer: None, or a shape or sharding, where trees are split and mapped
    scale: Any = None
    zero: Any = None
    bits: int | None = struct.field(pytree_node=False, default=4)
    width: int = struct.field(pytree_node=False, default=0)
    packed: bool = struct.field(pytree_node=False, default=False)
    rotate: int | None = struct.field(pytree_node=False, default=None)
    act_bits: int | None = struct.field(pytree_node=False, default=None)

    def inputs(self, x: Float[Array, "*n i"]) -> Float[Array, "*n i"]:
        """What meets the weight: x rotated, then rounded, both in the dtype of x."""
        x = x if self.rotate is None else block_hadamard(x, self.rotate)
        return x if self.act_bits is None else fake_quantize_act(x, self.act_bits)

    def matmul(self, x: Float[Array, "*n i"]) -> Float[Array, "*n o"]:
        """y in the dtype of x, by the kernels of this platform; straight-through gradients where inputs are rounded."""
        if self.bits is None or self.zero is not None or x.dtype == jnp.float64:
            return _as_floats(self, x)
        return by_kernels(self, x, "auto", False)


def _as_floats(weight: QTensor, x: Float[Array, "*n i"]) -> Float[Array, "*n o"]:
    """The definition of ``matmul``: inputs and weight as floats, one product."""
    return linear(weight.inputs(x), dequantize(weight))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def by_kernels(weight: QTensor, x: Float[Array, "*n i"], backend: str, interpret: Any) -> Float[Array, "*n o"]:
    """``matmul`` by the kernels: integers times integers, summed exactly, where rotation and rounding are one pass.

    A kernel has no derivative; the definition's is taken instead.
    """
    rows, scale = x.reshape(-1, x.shape[-1]), None
    block, bits = weight.rotate, weight.act_bits
    if block is not None and block <= ONE_PRODUCT and bits is not None and bits < 8:
        turn = hadamard(block)
        rows, scale, _ = hadamard_quantize(rows, turn, bits=bits, backend=backend, interpret=interpret)
    else:
        rows = weight.inputs(rows)
    y = quantized_matmul(rows, weight.q, weight.scale, x_scale=scale, backend=backend, interpret=interpret)
    return y.astype(x.dtype).reshape(*x.shape[:-1], -1)


def _forward(weight: QTensor, x: Array, backend: str, interpret: Any) -> tuple[Array, tuple]:
    return by_kernels(weight, x, backend, interpret), (weight, x)


def _backward(backend: str, interpret: Any, saved: tuple, gradient: Array) -> tuple:
    return jax.vjp(_as_floats, *saved)[1](gradient)


by_kernels.defvjp(_forward, _backward)


def check_bits(bits: int, name: str = "bits") -> None:
    """Raises: ConfigError outside 2 to 8."""
    if isinstance(bits, bool) or not isinstance(bits, int) or not 2 <= bits <= 8:
        raise ConfigError(f"{name}: found {bits!r}, expected 2 to 8")


def pack(weight: QTensor) -> QTensor:
    """Two codes a byte where the weight has at most 4 bits; others as they are. ``unpack`` is the inverse."""
    if weight.bits is None or weight.bits > 4 or weight.packed:
        return weight
    width = weight.q.shape[-1]
    half = -(-width // 2)
    codes = (weight.q.astype(jnp.int32) + 8).astype(jnp.uint8)
    pad = [(0, 0)] * (codes.ndim - 1) + [(0, 2 * half - width)]
    codes = jnp.pad(codes, pad, constant_values=8)
    return weight.replace(q=codes[..., :half] | (codes[..., half:] << 4), packed=True, width=width)


def codes(weight: QTensor) -> Array:
    """The codes one by one, int8 ``[..., out, in]``, packed or not."""
    if not weight.packed:
        return weight.q
    return _nibbles(weight.q)[..., : weight.width]


def _nibbles(q: UInt8[Array, "*n h"]) -> Array:
    both = jnp.concatenate([q & 15, q >> 4], axis=-1)
    return both.astype(jnp.int8) - jnp.int8(8)


def unpack(weight: QTensor) -> QTensor:
    """One code an int8."""
    return weight.replace(q=codes(weight), packed=False, width=0) if weight.packed else weight


def dequantize(x: QTensor) -> Float[Array, "*n i"]:
    """``(q - zero) scale`` in the dtype of the scale; the float weight itself where ``bits`` is None."""
    if x.bits is None:
        return x.q
    q = codes(x).astype(x.scale.dtype)
    if x.zero is not None:
        return (q - x.zero) * x.scale
    groups = x.scale.shape[-1]
    if groups == 1:
        return q * x.scale
    return (q.reshape(*q.shape[:-1], groups, -1) * x.scale[..., None]).reshape(q.shape)


def _act_grid(x: Float[Array, "*n d"], bits: int) -> tuple[Array, Array, Array]:
    """Codes as floats, scale and zero of each token."""
    levels = 2**bits - 1
    exact = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    low, high = (f(exact, axis=-1, keepdims=True, initial=0.0) for f in (jnp.min, jnp.max))
    scale = row_scale(low, high, bits)
    zero = round_through(-low / scale)
    return jnp.clip(round_through(exact / scale) + zero, 0, levels), scale, zero


def quantize_act(x: Float[Array, "*n d"], bits: int = 4) -> QTensor:
    r"""Round each token to a grid of its own that holds 0.

    .. math:: s = \frac{\max(0, \max x) - \min(0, \min x)}{2^B - 1}, \quad z = [-\min(0, \min x) / s],
       \quad q = \mathrm{clip}([x / s] + z, 0, 2^B - 1)

    Args:
      x: ``[..., d]``; statistics in float32 or better.
      bits: B, 2 to 8.

    Returns:
      ``QTensor``, q uint8 ``[..., d]``, scale and zero ``[..., 1]``. A token of zeros stays zeros: s is at least 1e-12.

    Raises: ConfigError for bits outside 2 to 8, NaN or infinity (outside jit; inside, such a token gives NaN).
    Reference: arXiv 2601.22347, dynamic per-token asymmetric activation quantisation.
    """
    check_bits(bits)
    check_numbers(x, "x")
    q, scale, zero = _act_grid(x, bits)
    return QTensor(q.astype(jnp.uint8), scale, zero, bits=bits)


def fake_quantize_act(x: Float[Array, "*n d"], bits: int) -> Float[Array, "*n d"]:
    """``dequantize(quantize_act(x))`` in the dtype of x, with straight-through gradients; nothing is checked."""
    check_bits(bits, "act_bits")
    q, scale, zero = _act_grid(x, bits)
    return ((q - zero) * scale).astype(x.dtype)
