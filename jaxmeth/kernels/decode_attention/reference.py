"""The definition: dense scores under a mask."""

import jax.numpy as jnp
from jaxtyping import Array

from jaxmeth.kernels.block_attention.reference import block_mask
from jaxmeth.kernels.decode_attention.shapes import Static, clean, finish


def forward(static: Static, q, k, v, idx, count, valid, override) -> tuple[Array, Array]:
    exact = jnp.promote_types(q.dtype, jnp.float32)
    if override is not None:
        use = override.use[:, None, :, None]
        k, v = jnp.where(use, override.k, k), jnp.where(use, override.v, v)
    k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    mask = jnp.ones((k.shape[0], 1, k.shape[2]), bool) if valid is None else valid[:, None]
    if idx is not None:
        mask = mask & jnp.repeat(block_mask(idx, count, k.shape[2] // static.bk), static.bk, axis=-1)
    k, v = clean(mask, k, v)
    scores = jnp.einsum("bkmd,bksd->bkms", q.astype(exact) * static.scale, k.astype(exact), precision="highest")
    return finish(static, scores, mask[:, :, None, :], v.astype(exact))
