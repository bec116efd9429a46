"""Pallas on Triton: one program a list walks it. Interpreted and lowered only.

``bk`` must be a power of two of at least 16; queries and head dimension are padded to one.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array

from jaxmeth.kernels.block_attention.gpu import _dot, _widen, power_of_two
from jaxmeth.kernels.decode_attention.shapes import Static
from jaxmeth.types import ConfigError


def _kernel(static, overridden, q, k, v, valid, idx, count, *rest):
    if overridden:
        new_k, new_v, use, out, lse = rest
    else:
        out, lse = rest
    queries = q[...]

    def body(j, carry):
        top, total, acc = carry
        at = pl.ds(idx[j] * static.bk, static.bk)
        keys, values = k[at, :], v[at, :]
        if overridden:
            swap = use[at][:, None] > 0
            keys, values = jnp.where(swap, new_k[at, :], keys), jnp.where(swap, new_v[at, :], values)
        s = _dot(queries, keys, 1, 1) * static.scale
        if static.softcap is not None:
            s = static.softcap * jnp.tanh(s / static.softcap)
        mask = jnp.broadcast_to(valid[at][None, :] > 0, s.shape)
        s = jnp.where(mask, s, jnp.finfo(s.dtype).min)
        new = jnp.maximum(top, jnp.max(s, axis=1))
        p = jnp.where(mask, jnp.exp(s - new[:, None]), 0)
        keep = jnp.exp(top - new)
        return new, total * keep + jnp.sum(p, axis=1), acc * keep[:, None] + _dot(p.astype(values.dtype), values, 1, 0)

    start = (
        jnp.full(queries.shape[:1], jnp.finfo(jnp.float32).min),
        jnp.zeros(queries.shape[:1], jnp.float32),
        jnp.zeros(queries.shape, jnp.float32),
    )
    top, total, acc = jax.lax.fori_loop(0, count[0], body, start)
    some = total != 0
    safe = jnp.where(some, total, 1)
    out[...] = jnp.where(some[:, None], acc / safe[:, None], 0).astype(out.dtype)
    lse[...] = jnp.where(some, jnp.log(safe) + top, -jnp.inf)


def forward(static: Static, q, k, v, idx, count, valid, override) -> tuple[Array, Array]:
    if static.bk != power_of_two(static.bk):
        raise ConfigError(f"bk: found {static.bk}, expected a power of two of at least 16 on a GPU")
    batch, lists, queries, dim = q.shape
    group = lists // k.shape[1]
    q = jnp.pad(_widen(q), ((0, 0), (0, 0), (0, power_of_two(queries) - queries), (0, 0)))
    if valid is None:
        valid = jnp.ones((batch, k.shape[2]), bool)
    slots, wide, idx = k.shape[2], q.shape[-1], _widen(idx)

    def whole(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, *shape), lambda b, h: (b, h, *(0 for _ in shape)))

    cache = pl.BlockSpec((None, None, slots, wide), lambda b, h: (b, jax.lax.div(h, group), 0, 0))
    shared = pl.BlockSpec((None, slots), lambda b, h: (b, 0))
    arrays = [q, _widen(k), _widen(v), valid.astype(jnp.int32), idx, count[..., None]]
    specs = [whole(*q.shape[2:]), cache, cache, shared, whole(idx.shape[-1]), whole(1)]
    if override is not None:
        arrays += [_widen(override.k), _widen(override.v), override.use.astype(jnp.int32)]
        specs += [cache, cache, shared]
    out, lse = pl.pallas_call(
        functools.partial(_kernel, static, override is not None),
        grid=(batch, lists),
        in_specs=specs,
        out_specs=[whole(*q.shape[2:]), whole(q.shape[2])],
        out_shape=[jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct(q.shape[:3], jnp.float32)],
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
        interpret=bool(static.interpret),
    )(*arrays)
    return out[:, :, :queries, :dim], lse[:, :, :queries]
