"""The definition: dense scores under a mask made from the lists; gradients by differentiation."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxmeth.kernels.block_attention.shapes import Static, near, used


def block_mask(idx: Int[Array, "*R W"], count: Int[Array, "*R"], blocks: int) -> Bool[Array, "*R nk"]:
    """The lists as a mask over ``blocks`` key blocks: True = listed."""
    rows = jnp.where(used(count, idx.shape[-1]), idx, blocks).reshape(-1, idx.shape[-1])
    mask = jax.vmap(lambda row: jnp.zeros(blocks, bool).at[row].set(True, mode="drop"))(rows)
    return mask.reshape(*count.shape, blocks)


def attention(static: Static, q, k, v, idx, count, valid, span) -> tuple[Array, Array]:
    """``(out [B,H,T,D], lse [B,H,T])`` of padded arrays."""
    exact = jnp.promote_types(q.dtype, jnp.float32)
    repeat = functools.partial(jnp.repeat, axis=1)
    keys, values = (repeat(x.astype(exact), q.shape[1] // k.shape[1]) for x in (k, v))
    scores = jnp.einsum("bhtd,bhsd->bhts", q.astype(exact) * static.scale, keys, precision="highest")
    if static.softcap is not None:
        scores = static.softcap * jnp.tanh(scores / static.softcap)
    listed = block_mask(idx, count, k.shape[2] // static.bk)
    listed = jnp.repeat(jnp.repeat(listed, static.bq, axis=2), static.bk, axis=3)
    q_slot = span[0] + jnp.arange(q.shape[2], dtype=jnp.int32)[:, None]
    mask = repeat(listed, q.shape[1] // idx.shape[1])
    mask &= near(static, q_slot, jnp.arange(k.shape[2], dtype=jnp.int32)[None], span[1])[None, None]
    if valid is not None:
        mask &= valid[:, None, None, :]
    scores = jnp.where(mask, scores, jnp.finfo(exact).min)
    top = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    weights = jnp.where(mask, jnp.exp(scores - top), 0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    some = total != 0
    # 0 * NaN is NaN: what is not finite is added only where it is seen.
    finite = jnp.isfinite(values)
    weights = weights / jnp.where(some, total, 1)
    out = jnp.einsum("bhts,bhsd->bhtd", weights, jnp.where(finite, values, 0), precision="highest")
    seen = jnp.einsum("bhts,bhsd->bhtd", mask.astype(exact), (~finite).astype(exact)) > 0
    out = out + jnp.where(seen, jnp.nan, 0)
    lse = jnp.where(some, jnp.log(jnp.where(some, total, 1)) + top, -jnp.inf)
    return out.astype(q.dtype), lse[..., 0]
