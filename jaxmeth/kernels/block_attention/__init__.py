"""Attention over a list of key blocks for each block of queries, differentiable, on every platform."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxmeth.kernels.backend import resolve
from jaxmeth.kernels.block_attention import reference, xla
from jaxmeth.kernels.block_attention.reference import block_mask
from jaxmeth.kernels.block_attention.shapes import Static, check_array, check_qkv, used
from jaxmeth.types import ConfigError, is_concrete, whole_number

__all__ = ["block_attention", "block_mask", "check_lists", "dense_lists"]


def block_attention(
    q: Float[Array, "B H T D"],
    k: Float[Array, "B Hkv S D"],
    v: Float[Array, "B Hkv S D"],
    idx: Int[Array, "B Hs nq W"],
    count: Int[Array, "B Hs nq"],
    *,
    bq: int = 128,
    bk: int = 64,
    kv_valid: Bool[Array, "B S"] | None = None,
    start: int | Int[Array, ""] = 0,
    window: int | Int[Array, ""] | None = None,
    causal: bool = True,
    scale: float | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    backend: str = "auto",
    interpret: Any = False,
    debug: bool = False,
) -> Float[Array, "B H T D"] | tuple[Float[Array, "B H T D"], Float[Array, "B H T"]]:
    r"""Softmax attention in which the queries of block i see only the key blocks ``idx[..., i, :count[..., i]]``.

    .. math:: o_t = \sum_{s \in A_t} p_{ts} v_s, \quad p_{t\cdot} = \mathrm{softmax}_{s \in A_t}(\alpha q_t k_s),
              \quad \mathrm{lse}_t = \log \sum_{s \in A_t} e^{\alpha q_t k_s}

    A_t holds the slots of the listed blocks that causality, the window and ``kv_valid`` admit. Partial results merge
    by ``o = sum_i exp(lse_i - lse) o_i``. The lists are data: nothing recompiles when they change. q, k and v have
    gradients, equal to those of masked dense attention; time and memory grow with the listed blocks, not with T x S.

    Args:
      q: queries; head h reads key/value head ``h // (H / Hkv)``. T and S need not be multiples of the blocks.
      k: keys, after rotation.
      v: values.
      idx: block numbers in [0, ceil(S / bk)), each once in a row's first ``count``, best ascending; what comes after
        is not read. Hs is H or Hkv (shared by the query heads of a key/value head); nq = ceil(T / bq).
      count: how many entries of a row count, 0 to W.
      bq: queries in a block.
      bk: keys in a block.
      kv_valid: True = the slot takes part.
      start: the slot of the first query (queries lie on consecutive slots); may be traced.
      window: a key takes part at a distance below it; may be traced; None = no window.
      causal: a query sees no later slot.
      scale: alpha; None = 1 / sqrt(D).
      softcap: c of ``c tanh(score / c)``; None = none.
      return_lse: also return lse in float32 (float64 for float64 input).
      backend: "auto", "reference" (dense and masked), "xla", "tpu" (Pallas: blocks must be multiples of 8, or one),
        "gpu" (Pallas on Triton: blocks must be powers of two of at least 16).
      interpret: run a Pallas kernel by the interpreter: True, or ``pltpu.InterpretParams`` for the TPU's.
      debug: check the lists, which copies them to the host; ignored under ``jit``.

    Returns:
      Attention in q's dtype, and lse if asked for. Scores and sums are float32 or better. A query that may see
      nothing gives zeros and lse -inf. A NaN or infinity in q stays in its row; one in k reaches the queries that see
      it; one in v with "reference" the same, elsewhere every query of the query blocks that count its key block, also
      the earlier ones, but for queries that see nothing. What ``kv_valid`` excludes and what no list counts reaches
      nothing. Gradients are less exact: such a number in q may fill dk and dv of the key blocks that its query block
      counts, one in k or v dq of the query blocks that count it and dk, dv of all that those count; with "reference"
      those of its key/value head.

    Raises:
      ConfigError: shapes or dtypes that do not fit, an unknown or absent backend, with ``debug`` a list that points
        past the end or names a block twice.

    Reference: Dao, FlashAttention-2, arXiv 2307.08691, section 3.1 (online softmax and its gradients).
    """
    _check(q, k, v, idx, count, kv_valid, bq, bk)
    static = Static(bq, bk, causal, q.shape[-1] ** -0.5 if scale is None else scale, softcap, interpret)
    name = resolve(backend, interpret)
    length, slots = q.shape[2], k.shape[2]
    if debug and is_concrete(idx) and is_concrete(count):
        check_lists(idx, count, -(-slots // bk))
    q = _pad(q, bq)
    if slots % bk and kv_valid is None:
        kv_valid = jnp.ones((k.shape[0], slots), bool)
    if kv_valid is not None:
        # So that nothing an unused slot holds reaches the sums: 0 * NaN is NaN.
        k, v = (jnp.where(kv_valid[:, None, :, None], x, 0) for x in (k, v))
        kv_valid = jnp.pad(kv_valid, ((0, 0), (0, -slots % bk)))
    k, v = _pad(k, bk), _pad(v, bk)
    idx = jnp.clip(idx.astype(jnp.int32), 0, k.shape[2] // bk - 1)
    count = jnp.minimum(count.astype(jnp.int32), idx.shape[-1])
    # The last block that counts, again: on TPU it is not copied twice, and no other one's NaN meets a weight of zero.
    last = jnp.take_along_axis(idx, jnp.maximum(count - 1, 0)[..., None], axis=-1)
    idx = jnp.where(used(count, idx.shape[-1]), idx, last)
    far = jnp.iinfo(jnp.int32).max // 2
    span = jnp.stack([jnp.asarray(start, jnp.int32), jnp.asarray(far if window is None else window, jnp.int32)])
    # The lists are a choice, not a function to differentiate.
    idx, count = jax.lax.stop_gradient((idx, count))
    if name == "reference":
        out, lse = reference.attention(static, q, k, v, idx, count, kv_valid, span)
    else:
        out, lse = _attend(name, static, q, k, v, idx, count, kv_valid, span)
    out = out[:, :, :length]
    return (out, lse[:, :, :length]) if return_lse else out


def dense_lists(
    batch: int, length: int, slots: int, bq: int, bk: int, start: int | Int[Array, ""] = 0, causal: bool = True
) -> tuple[Int[Array, "B 1 nq W"], Int[Array, "B 1 nq"]]:
    """The lists of dense attention: all blocks, or with ``causal`` all up to the last query's own; Hs is 1.

    Broadcast the head axis to Hkv for ``block_attention``.
    """
    rows, blocks = -(-length // bq), -(-slots // bk)
    idx = jnp.broadcast_to(jnp.arange(blocks, dtype=jnp.int32), (batch, 1, rows, blocks))
    last = jnp.asarray(start, jnp.int32) + jnp.minimum((jnp.arange(rows, dtype=jnp.int32) + 1) * bq, length) - 1
    count = jnp.minimum(last // bk + 1, blocks) if causal else jnp.full(rows, blocks, jnp.int32)
    return idx, jnp.broadcast_to(count, (batch, 1, rows))


def check_lists(idx: Int[Array, "B Hs nq W"], count: Int[Array, "B Hs nq"], blocks: int) -> None:
    """Refuse lists that point outside [0, blocks) or name a block twice; copies them to the host.

    Raises: ConfigError naming the first bad row.
    """
    idx, count = np.asarray(idx), np.asarray(count)
    used = np.arange(idx.shape[-1]) < count[..., None]
    bad = used & ((idx < 0) | (idx >= blocks))
    if bad.any():
        at = tuple(int(x) for x in np.argwhere(bad)[0])
        raise ConfigError(f"idx{list(at)}: found block {int(idx[at])}, expected 0 to {blocks - 1}")
    if (count < 0).any() or (count > idx.shape[-1]).any():
        at = tuple(int(x) for x in np.argwhere((count < 0) | (count > idx.shape[-1]))[0])
        raise ConfigError(f"count{list(at)}: found {int(count[at])}, expected 0 to {idx.shape[-1]}")
    ordered = np.sort(np.where(used, idx, blocks + np.arange(idx.shape[-1])), axis=-1)
    twice = (ordered[..., 1:] == ordered[..., :-1]).any(-1)
    if twice.any():
        raise ConfigError(f"idx{[int(x) for x in np.argwhere(twice)[0]]}: found a block twice, expected each once")


def _check(q, k, v, idx, count, kv_valid, bq, bk) -> None:
    for name, block in (("bq", bq), ("bk", bk)):
        whole_number(name, block, 1)
    check_qkv(q, k, v, kv_valid)
    width = max(1, *idx.shape[3:])
    lists = [(q.shape[0], heads, -(-q.shape[2] // bq)) for heads in (k.shape[1], q.shape[1])]
    check_array("idx", idx, jnp.integer, *((*shape, width) for shape in lists))
    check_array("count", count, jnp.integer, idx.shape[:3])


def _pad(x: Array, block: int) -> Array:
    return jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % block), (0, 0)))


def _module(name: str):
    """Pallas is imported only where it runs: it takes half a second."""
    if name == "xla":
        return xla
    if name == "tpu":
        from jaxmeth.kernels.block_attention import tpu

        return tpu
    from jaxmeth.kernels.block_attention import gpu

    return gpu


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(name, static, q, k, v, idx, count, valid, span):
    return _module(name).forward(static, q, k, v, idx, count, valid, span)


def _forward(name, static, q, k, v, idx, count, valid, span):
    out, lse = _attend(name, static, q, k, v, idx, count, valid, span)
    return (out, lse), (q, k, v, idx, count, valid, span, out, lse)


def _backward(name, static, residual, cotangents):
    q, k, v, idx, count, valid, span, out, lse = residual
    d_out, d_lse = cotangents
    # d score = p (d p - delta): the cotangent of lse enters as minus its own value.
    delta = jnp.sum(out.astype(lse.dtype) * d_out.astype(lse.dtype), axis=-1) - d_lse
    shown = jnp.where(jnp.isneginf(lse), 0, lse)
    dq, dk, dv = _module(name).backward(static, q, k, v, idx, count, valid, span, d_out, shown, delta)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None, None, None, None


_attend.defvjp(_forward, _backward)
