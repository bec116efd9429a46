"""What the implementations share: the static half of a call, what fits, the mask of a tile, the transposed lists."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxmeth.types import ConfigError


@dataclasses.dataclass(frozen=True)
class Static:
    """The static half of a call of ``block_attention``."""

    bq: int
    bk: int
    causal: bool
    scale: float
    softcap: float | None
    interpret: Any = False


def check_array(name: str, x: Any, kind: Any, *shapes: tuple[int, ...]) -> None:
    """Raises: ConfigError where ``x`` holds numbers of another kind than ``kind``, or has none of the shapes."""
    if x.shape not in shapes or not jnp.issubdtype(x.dtype, kind):
        expected = f"{kind.__name__.rstrip('_')} {' or '.join(dict.fromkeys(map(str, shapes)))}"
        raise ConfigError(f"{name}: found shape {x.shape} of {x.dtype}, expected {expected}")


def check_qkv(q: Any, k: Any, v: Any, kv_valid: Any) -> None:
    """Raises: ConfigError where queries, keys, values and which slots are real do not fit each other."""
    full = all(x.ndim == 4 and x.size for x in (q, k))
    if not full or q.shape[::3] != k.shape[::3] or q.shape[1] % k.shape[1]:
        expected = "[B, H, T, D], [B, Hkv, S, D], nothing empty and H a multiple of Hkv"
        raise ConfigError(f"q, k: found shapes {q.shape}, {k.shape}, expected {expected}")
    for name, x, shape in (("q", q, q.shape), ("k", k, k.shape), ("v", v, k.shape)):
        check_array(name, x, jnp.floating, shape)
    if kv_valid is not None:
        check_array("kv_valid", kv_valid, jnp.bool_, (k.shape[0], k.shape[2]))


def near(static: Static, q_slot: Array, k_slot: Array, window: Array) -> Array:
    """Whether causality and the window let the query at one slot see the key at another; the slots broadcast."""
    distance = q_slot - k_slot
    if static.causal:
        return (distance >= 0) & (distance < window)
    return jnp.abs(distance) < window


def used(count: Int[Array, "*R"], width: int) -> Bool[Array, "*R W"]:
    """Which of ``width`` places of each list lie before its count."""
    return jax.lax.broadcasted_iota(jnp.int32, (*count.shape, width), count.ndim) < count[..., None]


def transpose_lists(mask: Bool[Array, "*R nq nk"]) -> tuple[Int[Array, "*R nk nq"], Int[Array, "*R nk"]]:
    """For each key block the query blocks that list it, ascending, padded with the last one; and how many."""
    turned = jnp.swapaxes(mask, -1, -2)
    count = jnp.sum(turned, axis=-1, dtype=jnp.int32)
    order = jnp.argsort(~turned, axis=-1, stable=True).astype(jnp.int32)
    place = jax.lax.broadcasted_iota(jnp.int32, order.shape, order.ndim - 1)
    place = jnp.minimum(place, jnp.maximum(count[..., None] - 1, 0))
    return jnp.take_along_axis(order, place, axis=-1), count
