"""Layers shared by the decoder and the encoders: the linear seam, norms, activations, rotary embeddings."""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxmeth.types import ConfigError

KINDS_OF_ROPE = ("default", "linear", "llama3", "yarn", "none")

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
}


def compute_dtype(stored: DTypeLike) -> jnp.dtype:
    """The dtype to compute in: float32 on CPU, where XLA is many times slower below it; elsewhere the stored one."""
    if jnp.finfo(stored).bits < 32 and jax.default_backend() == "cpu":
        return jnp.dtype(jnp.float32)
    return jnp.dtype(stored)


def linear(x: Float[Array, "*b i"], w) -> Float[Array, "*b o"]:
    """``y = x w^T``: the only place that knows weight types.

    Args:
      x: activations ``[..., in]``.
      w: an array ``[out, in]`` (cast to the dtype of x; float32 accumulation below float32), or any PyTree with a
        ``matmul(x)`` method (``types.LinearWeight``): a quantised, low-rank adapted or rotated weight.

    Returns:
      ``[..., out]`` in the dtype of x.
    """
    if hasattr(w, "matmul"):
        return w.matmul(x)
    accumulate = jnp.promote_types(x.dtype, jnp.float32)
    # Stored [out, in] because of what XLA makes of it on a CPU when one token is decoded: it reads row after row of a
    # scanned layer where it lies, while from [in, out] it first copies each layer's weight (twice the memory traffic).
    return jnp.matmul(x, w.astype(x.dtype).T, preferred_element_type=accumulate).astype(x.dtype)


class Linear(nnx.Module):
    """``y = linear(x, weight) + bias``, weight ``[out, in]``; a Flax layer whose weight may be any linear weight."""

    def __init__(self, n_in: int, n_out: int, *, bias: bool = False, std: float = 0.02, rngs: nnx.Rngs):
        self.weight = nnx.Param(jax.random.normal(rngs.params(), (n_out, n_in), jnp.float32) * std)
        self.bias = nnx.Param(jnp.zeros((n_out,), jnp.float32)) if bias else nnx.data(None)

    def __call__(self, x: Float[Array, "*b i"]) -> Float[Array, "*b o"]:
        y = linear(x, raw(self.weight))
        return y if self.bias is None else y + _broadcast(raw(self.bias), y)


class RMSNorm(nnx.Module):
    """``y = x / sqrt(mean(x^2) + eps) * (offset + scale)``, statistics in float32 or better.

    Flax's own RMSNorm has no offset, which Gemma stores its scales around; that is the one reason for this class.
    """

    def __init__(self, size: int, *, epsilon: float, offset: float = 0.0, rngs: nnx.Rngs | None = None):
        self.scale = nnx.Param(jnp.full((size,), 1.0 - offset, jnp.float32))
        self.epsilon, self.offset = epsilon, offset

    def __call__(self, x: Float[Array, "*b c"]) -> Float[Array, "*b c"]:
        x32 = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        y = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + self.epsilon)
        scale = raw(self.scale).astype(x32.dtype) + self.offset
        return (y * _broadcast(scale, y)).astype(x.dtype)


def layer_norm(size: int, *, epsilon: float, rngs: nnx.Rngs) -> nnx.LayerNorm:
    """Flax's LayerNorm with the two-pass variance (the one-pass form loses digits on large means)."""
    return nnx.LayerNorm(size, epsilon=epsilon, use_fast_variance=False, rngs=rngs)


def raw(param):
    """The value of a Flax parameter, or the weight leaf that stands in its place after a merge of a plain dict."""
    return param.get_value() if isinstance(param, nnx.Variable) else param


def _broadcast(v: Float[Array, " c"], like: Float[Array, "*b c"]) -> Float[Array, "*one c"]:
    return v.astype(like.dtype).reshape((1,) * (like.ndim - 1) + v.shape)


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """One rotary embedding.

    Attributes:
      theta: base of the wave lengths; frequency i of d is ``theta ** (-2 i / d)``.
      kind: ``default``; ``linear`` (frequencies over ``factor``); ``llama3`` (low frequencies over ``factor``, high
        ones kept, a linear ramp between); ``yarn`` (the ramp over the number of rotations in the original context,
        with a temperature on the attention); ``none`` (a layer without rotation).
      factor: by how much the context is stretched.
      low_freq_factor: llama3: wave lengths over ``original_max_positions / low_freq_factor`` are stretched.
      high_freq_factor: llama3: wave lengths under ``original_max_positions / high_freq_factor`` are kept.
      original_max_positions: the context before stretching (llama3, yarn).
      beta_fast: yarn: rotations at and over which a frequency is kept.
      beta_slow: yarn: rotations at and under which a frequency is stretched.
      attention_factor: yarn: multiplies cosine and sine; 0 derives ``0.1 ln(factor) + 1``.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 0.0

    def __post_init__(self):
        if self.kind not in KINDS_OF_ROPE:
            raise ConfigError(f"rope kind: found {self.kind!r}, expected one of {', '.join(KINDS_OF_ROPE)}")


def rope_frequencies(rope: RopeConfig, dim: int) -> tuple[np.ndarray, float]:
    """Inverse wave lengths ``[dim / 2]`` in radians a position, and the factor on cosine and sine.

    Computed on the host once a compilation.

    References:
      Su et al., RoFormer, arXiv 2104.09864, section 3.2; Peng et al., YaRN, arXiv 2309.00071, equations 17-22;
      Dubey et al., The Llama 3 Herd of Models, arXiv 2407.21783 (constants of the released llama3 scaling).
    """
    freq = rope.theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    if rope.kind == "none":
        return np.zeros_like(freq), 1.0
    if rope.kind == "linear":
        return freq / rope.factor, 1.0
    if rope.kind == "llama3":
        turns = rope.original_max_positions * freq / (2 * math.pi)
        keep = np.clip((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0, 1)
        return keep * freq + (1 - keep) * freq / rope.factor, 1.0
    if rope.kind == "yarn":

        def index(turns: float) -> float:
            return dim * math.log(rope.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

        low, high = max(math.floor(index(rope.beta_fast)), 0), min(math.ceil(index(rope.beta_slow)), dim - 1)
        ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 1e-3), 0, 1)
        attention = rope.attention_factor or (0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0)
        return freq * (1 - ramp) + freq / rope.factor * ramp, attention
    return freq, 1.0


def rope_tables(
    ropes: tuple[RopeConfig, ...], dim: int, positions: Int[Array, "B T"], dtype: DTypeLike
) -> tuple[Float[Array, "R B T d"], Float[Array, "R B T d"]]:
    """Cosines and sines of each kind of rotation, d = dim / 2, computed once for all layers."""
    pairs = [rope_frequencies(rope, dim) for rope in ropes]
    at_least = jnp.promote_types(dtype, jnp.float32)
    freq = jnp.asarray(np.stack([f for f, _ in pairs]), at_least)
    factor = jnp.asarray(np.array([a for _, a in pairs]), at_least)[:, None, None, None]
    angle = positions.astype(at_least)[None, :, :, None] * freq[:, None, None, :]
    return (jnp.cos(angle) * factor).astype(dtype), (jnp.sin(angle) * factor).astype(dtype)


def rotate(
    x: Float[Array, "B H T D"], cos: Float[Array, "B T d"], sin: Float[Array, "B T d"]
) -> Float[Array, "B H T D"]:
    """Rotate the first 2 d of the D channels, halves paired (i with i + d); the rest passes through."""
    d = cos.shape[-1]
    first, second, rest = x[..., :d], x[..., d : 2 * d], x[..., 2 * d :]
    cos, sin = cos[:, None], sin[:, None]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)
