"""Dense attention: the reference, and the decoder's default."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxmeth.kernels import block_attention, dense_lists
from jaxmeth.kernels.backend import resolve
from jaxmeth.types import AttendContext, State

BLOCKED_FROM = 1024
"""Queries from which the blocked computation is the faster one on CPU; accelerators keep the plain one."""
_ROWS, _KEYS = 1536, 512
"""Rows of scores (query heads of a key/value head times queries) and keys of a block."""
_KERNEL_BLOCK = 64
"""Rows and keys of a block for the Pallas kernels: a power of two that fits every chip's memory."""


def dense(
    q: Float[Array, "B H T D"],
    k: Float[Array, "B Hkv S D"],
    v: Float[Array, "B Hkv S D"],
    ctx: AttendContext,
    state: State,
) -> tuple[Float[Array, "B H T D"], State]:
    r"""Softmax attention over every key that ``ctx.mask()`` admits.

    .. math:: o_t = \sum_s p_{ts} v_s, \quad p_{t\cdot} = \mathrm{softmax}_s(c\,\tanh(\alpha q_t k_s / c))

    with scale alpha and soft cap c (no tanh without one). Query head h reads key/value head ``h // (H / Hkv)``.
    Scores and softmax are float32 or better. A query that may attend nothing gives zeros. ``state`` passes through.

    Reference: Vaswani et al., Attention Is All You Need, arXiv 1706.03762, equation 1; Ainslie et al., GQA,
    arXiv 2305.13245; the soft cap is Gemma 2's, arXiv 2408.00118, section 2.
    """
    batch, heads, length, dim = q.shape
    kv_heads = k.shape[1]
    if length >= BLOCKED_FROM and resolve("auto") == "xla":
        out, _ = blocked(
            q, k, v, kv_valid=ctx.kv_valid, start=ctx.q_slot[0], window=ctx.window, causal=ctx.causal, scale=ctx.scale,
            softcap=ctx.softcap,
        )  # fmt: skip
        return out, state
    exact = jnp.promote_types(q.dtype, jnp.float32)
    grouped = (q * ctx.scale).reshape(batch, kv_heads, heads // kv_heads * length, dim)
    scores = jnp.einsum("bktd,bksd->bkts", grouped, k, preferred_element_type=exact)
    if ctx.softcap is not None:
        scores = jnp.tanh(scores / ctx.softcap) * ctx.softcap
    scores = scores.reshape(batch, heads, length, -1)
    mask = ctx.mask()
    # A finite floor, so that a fully masked row has a finite maximum and a zero gradient.
    scores = jnp.where(mask, scores, jnp.finfo(exact).min)
    top = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    weights = jnp.where(mask, jnp.exp(scores - top), 0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = (weights / jnp.where(total == 0, 1, total)).astype(v.dtype)
    out = jnp.einsum("bkts,bksd->bktd", weights.reshape(batch, kv_heads, -1, weights.shape[-1]), v)
    return out.reshape(batch, heads, length, v.shape[-1]).astype(q.dtype), state


def blocked(
    q: Float[Array, "B H T D"],
    k: Float[Array, "B Hkv S D"],
    v: Float[Array, "B Hkv S D"],
    *,
    kv_valid: Bool[Array, "B S"] | None = None,
    start: int | Int[Array, ""] = 0,
    window: int | Int[Array, ""] | None = None,
    causal: bool = True,
    scale: float | None = None,
    softcap: float | None = None,
    backend: str = "auto",
) -> tuple[Float[Array, "B H T D"], Float[Array, "B H T"]]:
    """Dense attention a tile at a time, and its log-sum-exp: memory is linear in T and S, later keys cost nothing.

    Arguments as in ``kernels.block_attention``, whose lists are full here.
    """
    batch, heads, length, _ = q.shape
    kv_heads, slots = k.shape[1:3]
    rows, keys = max(16, _ROWS * kv_heads // heads // 16 * 16), _KEYS
    if resolve(backend) in ("tpu", "gpu"):
        rows = keys = _KERNEL_BLOCK
    idx, count = dense_lists(batch, length, slots, rows, keys, start, causal)
    lists = [jnp.broadcast_to(x, (batch, kv_heads, *x.shape[2:])) for x in (idx, count)]
    return block_attention(
        q, k, v, *lists, bq=rows, bk=keys, kv_valid=kv_valid, start=start, window=window, causal=causal, scale=scale,
        softcap=softcap, return_lse=True, backend=backend,
    )  # fmt: skip
