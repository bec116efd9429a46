"""Attention of a few queries over a cache: all of it, or the blocks of a list; some rows may be overridden."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxmeth.kernels.backend import resolve
from jaxmeth.kernels.block_attention import check_lists
from jaxmeth.kernels.block_attention.shapes import check_array, check_qkv
from jaxmeth.kernels.decode_attention import reference, xla
from jaxmeth.kernels.decode_attention.shapes import Static, clean
from jaxmeth.types import ConfigError, is_concrete, whole_number

__all__ = ["Override", "decode_attention"]


class Override(NamedTuple):
    """Keys and values that replace those of the cache at the slots where ``use`` is True."""

    k: Float[Array, "B Hkv S D"]
    v: Float[Array, "B Hkv S D"]
    use: Bool[Array, "B S"]


def decode_attention(
    q: Float[Array, "B H n D"],
    k: Float[Array, "B Hkv S D"],
    v: Float[Array, "B Hkv S D"],
    *,
    kv_valid: Bool[Array, "B S"] | None = None,
    idx: Int[Array, "B Hs W"] | None = None,
    count: Int[Array, "B Hs"] | None = None,
    bk: int = 64,
    override: Override | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    backend: str = "auto",
    interpret: Any = False,
    debug: bool = False,
) -> Float[Array, "B H n D"] | tuple[Float[Array, "B H n D"], Float[Array, "B H n"]]:
    r"""Softmax attention of n queries over the valid slots of a cache, or over those in the listed blocks.

    .. math:: o = \sum_{s \in A} p_s v_s, \quad p = \mathrm{softmax}_{s \in A}(\alpha q k_s)

    All n queries see the same slots: there is no causality among them (n is 1 in decoding). With a list the cost is
    that of W blocks, whatever the length of the cache. For inference: only "reference" and "xla" have gradients.

    Args:
      q: queries; head h reads key/value head ``h // (H / Hkv)``.
      k: cached keys. S need not be a multiple of ``bk``.
      v: cached values.
      kv_valid: True = the slot takes part; None = all.
      idx: block numbers in [0, ceil(S / bk)) for each key/value head, or for each head (Hs is Hkv or H), each once in
        the first ``count``; None = all.
      count: how many entries count, 0 to W.
      bk: slots in a block.
      override: keys and values to use in place of the cache's at some slots.
      scale: alpha; None = 1 / sqrt(D).
      softcap: c of ``c tanh(score / c)``; None = none.
      return_lse: also return ``log sum exp`` of the scores, by which partial results merge.
      backend: "auto", "reference", "xla", "tpu" or "gpu", as in ``block_attention``.
      interpret: run a Pallas kernel by the interpreter.
      debug: check the lists on the host; ignored under ``jit``.

    Returns:
      Attention in q's dtype, and lse if asked for; zeros and -inf where no slot takes part. A NaN or infinity in q
      stays in its row; one in k or v, of the cache or overriding, reaches the queries of its key/value head whose list
      holds it, and nothing where its slot is not valid, not listed or overridden.

    Raises:
      ConfigError: shapes or dtypes that do not fit, ``idx`` without ``count``, an unknown or absent backend, the
        gradient of one that has none, with ``debug`` a bad list.

    Reference: Dao et al., Flash-Decoding for long-context inference, 2023.
    """
    _check(q, k, v, kv_valid, idx, count, bk, override)
    static = Static(bk, q.shape[-1] ** -0.5 if scale is None else scale, softcap, interpret)
    name = resolve(backend, interpret)
    batch, kv_heads, slots = k.shape[:3]
    blocks = -(-slots // bk)
    if idx is not None and debug and is_concrete(idx) and is_concrete(count):
        check_lists(idx[:, :, None], count[:, :, None], blocks)
    if slots % bk and kv_valid is None and (idx is not None or name in ("tpu", "gpu")):
        kv_valid = jnp.ones((batch, slots), bool)
    if idx is not None or name in ("tpu", "gpu"):
        k, v, kv_valid, override = jax.tree.map(lambda x: _pad(x, bk), (k, v, kv_valid, override))
    if idx is None and name in ("tpu", "gpu"):
        idx = jnp.broadcast_to(jnp.arange(blocks, dtype=jnp.int32), (batch, kv_heads, blocks))
        count = jnp.full((batch, kv_heads), blocks, jnp.int32)
    if idx is not None:
        idx = jnp.clip(idx.astype(jnp.int32), 0, blocks - 1)
        count = jnp.minimum(count.astype(jnp.int32), idx.shape[-1])
    grouped = q.reshape(batch, kv_heads if idx is None else idx.shape[1], -1, q.shape[-1])
    run = functools.partial(_kernel, name) if name in ("tpu", "gpu") else _module(name).forward
    out, lse = run(static, grouped, k, v, idx, count, kv_valid, override)
    out, lse = out.reshape(q.shape).astype(q.dtype), lse.reshape(q.shape[:3])
    return (out, lse) if return_lse else out


def _check(q, k, v, kv_valid, idx, count, bk, override) -> None:
    whole_number("bk", bk, 1)
    check_qkv(q, k, v, kv_valid)
    if (idx is None) != (count is None):
        raise ConfigError("idx, count: found one of them, expected both or neither")
    if idx is not None:
        lists = [(k.shape[0], heads) for heads in (k.shape[1], q.shape[1])]
        check_array("idx", idx, jnp.integer, *((*shape, max(1, *idx.shape[2:])) for shape in lists))
        check_array("count", count, jnp.integer, idx.shape[:2])
    if override is not None:
        for name, x in (("override.k", override.k), ("override.v", override.v)):
            check_array(name, x, jnp.floating, k.shape)
        check_array("override.use", override.use, jnp.bool_, (k.shape[0], k.shape[2]))


def _pad(x: Array, block: int) -> Array:
    axis = 1 if x.ndim == 2 else 2
    return jnp.pad(x, [(0, -n % block if i == axis else 0) for i, n in enumerate(x.shape)])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _kernel(name, static, q, k, v, idx, count, valid, override):
    if valid is not None:
        k, v = clean(valid[:, None], k, v)
        if override is not None:
            new_k, new_v = clean(valid[:, None], override.k, override.v)
            override = Override(new_k, new_v, override.use)
    return _module(name).forward(static, q, k, v, idx, count, valid, override)


def _no_gradient(name, *_):
    raise ConfigError(f"backend: found {name!r} where a gradient is taken, expected 'reference' or 'xla'")


_kernel.defvjp(_no_gradient, _no_gradient)


def _module(name: str):
    if name == "reference":
        return reference
    if name == "xla":
        return xla
    if name == "tpu":
        from jaxmeth.kernels.decode_attention import tpu

        return tpu
    from jaxmeth.kernels.decode_attention import gpu

    return gpu
