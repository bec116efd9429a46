"""What the implementations share: the static half of a call, the mask of one tile, the transposed lists."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


@dataclasses.dataclass(frozen=True)
class Static:
    """The static half of a call of ``block_attention``."""

    bq: int
    bk: int
    causal: bool
    scale: float
    softcap: float | None
    interpret: Any = False


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
