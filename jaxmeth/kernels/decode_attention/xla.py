"""Plain XLA: gathers the listed blocks (memory traffic of W blocks, not of the cache), then dense attention."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxmeth.kernels.block_attention.shapes import used
from jaxmeth.kernels.decode_attention.shapes import Static, clean, finish


def forward(static: Static, q, k, v, idx, count, valid, override) -> tuple[Array, Array]:
    exact = jnp.promote_types(q.dtype, jnp.float32)
    mask = None if valid is None else valid[:, None, :]
    use = None if override is None else override.use[:, None, :]
    sources = (k, v) if override is None else (k, v, override.k, override.v)
    if idx is not None:
        (batch, lists, width), kv_heads = idx.shape, k.shape[1]

        def rows(x: Array) -> Array:
            """``[B, 1 or Hkv, S, ...] -> [B, Hs, W * bk, ...]``."""
            x = jnp.broadcast_to(x, (batch, kv_heads, *x.shape[2:]))
            blocks = x.reshape(batch, kv_heads, -1, static.bk, *x.shape[3:])
            taken = jax.vmap(jax.vmap(lambda b, i: b[i]))(blocks, idx.reshape(batch, kv_heads, -1))
            return taken.reshape(batch, lists, width * static.bk, *x.shape[3:])

        sources = tuple(rows(x) for x in sources)
        listed = jnp.repeat(used(count, width), static.bk, axis=-1)
        mask = listed if mask is None else listed & rows(mask)
        use = None if use is None else rows(use)
    k, v = sources[:2]
    if use is not None:
        k, v = (jnp.where(use[..., None], new, old) for old, new in zip((k, v), sources[2:], strict=True))
    if mask is not None:
        k, v = clean(mask, k, v)
    scores = jnp.einsum("bkmd,bksd->bkms", q.astype(exact) * static.scale, k.astype(exact))
    return finish(static, scores, None if mask is None else mask[:, :, None, :], v.astype(exact))
