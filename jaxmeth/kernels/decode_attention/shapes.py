"""What the implementations share."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array


@dataclasses.dataclass(frozen=True)
class Static:
    """The static half of a call of ``decode_attention``."""

    bk: int
    scale: float
    softcap: float | None
    interpret: Any = False


def clean(mask: Array, *arrays: Array) -> list[Array]:
    """Keys and values with zeros where ``mask [B, 1 or Hs, keys]`` leaves them out: 0 * NaN is NaN."""
    return [jnp.where(mask[..., None], x, 0) for x in arrays]


def finish(static: Static, scores: Array, mask: Array | None, values: Array) -> tuple[Array, Array]:
    """``(out, lse)`` of scores ``[B, Hs, M, keys]`` before soft cap and mask, and values ``[B, Hs, keys, D]``."""
    if static.softcap is not None:
        scores = static.softcap * jnp.tanh(scores / static.softcap)
    if mask is not None:
        scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
    top = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - top)
    if mask is not None:
        weights = jnp.where(mask, weights, 0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    some = total != 0
    out = jnp.einsum("bkms,bksd->bkmd", weights, values) / jnp.where(some, total, 1)
    return out, jnp.where(some, jnp.log(jnp.where(some, total, 1)) + top, -jnp.inf)[..., 0]
