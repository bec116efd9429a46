"""Where a decoder commutes with a change of its channels: permutation regions, merged rotations, norm folding.

Everything here leaves the function of the model as it is; weights are ``[..., out, in]`` with a leading layer axis.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Num

from jaxmeth.models import DecoderConfig
from jaxmeth.quant.hadamard import block_hadamard, check_block
from jaxmeth.quant.qtensor import QTensor
from jaxmeth.types import ConfigError, Params, WeightsError, is_concrete

HIGHEST = jax.lax.Precision.HIGHEST
NOT_ORTHONORMAL = 1e-2  # far above what float32 leaves, far below what changes the function


def get(params: Params, path: str):
    """The leaf at a path joined by dots. Raises: ConfigError where there is none."""
    node = params
    for name in path.split("."):
        if not isinstance(node, dict) or name not in node:
            raise ConfigError(f"region: found no parameter {path}, expected paths of this model")
        node = node[name]
    return node


def put(params: Params, path: str, leaf) -> Params:
    """The same tree with another leaf at a path; nothing is changed in place."""
    name, _, rest = path.partition(".")
    return {**params, name: put(params.get(name, {}), rest, leaf) if rest else leaf}


def plain(params: Params, path: str) -> Array:
    """The float array at a path. Raises: ConfigError where it is quantised or adapted already."""
    leaf = get(params, path)
    if isinstance(leaf, dict):
        raise ConfigError(f"region: found {path}, a group of {', '.join(leaf)}, expected the path of one parameter")
    if not isinstance(leaf, jax.Array | np.ndarray):
        raise ConfigError(f"{path}: found a {type(leaf).__name__}, expected a plain weight (a model is quantised once)")
    return jnp.asarray(leaf)


class Region(NamedTuple):
    """Parameters that one order of channels moves together.

    Attributes:
      rows: paths whose outputs are reordered: the second to last axis of a weight, the last of a bias.
      cols: paths whose last axis is reordered: the inputs of a weight, the channels of an embedding or a norm.
      heads: channels are not moved across this many equal parts; 0 for one part.
      copies: how often each part of ``rows`` occurs in ``cols`` (query heads a key/value head).
    """

    rows: tuple[str, ...]
    cols: tuple[str, ...]
    heads: int = 0
    copies: int = 1


def _norms(cfg: DecoderConfig) -> list[str]:
    pre = ["attn_norm", "mlp_norm"] if cfg.norm_order != "post" else []
    post = ["attn_post_norm", "mlp_post_norm"] if cfg.norm_order != "pre" else []
    return ["norm", *(f"layers.{n}" for n in pre + post)]


def _up(cfg: DecoderConfig) -> tuple[str, ...]:
    return ("layers.mlp.gate", "layers.mlp.up") if cfg.gated_mlp else ("layers.mlp.up",)


READ_BY_ATTENTION = ("layers.attn.q", "layers.attn.k", "layers.attn.v")


def stream_region(cfg: DecoderConfig) -> Region:
    """P1: the residual stream, one order for all layers. Legal in every family, as norms are reordered with it."""
    parts = ("scale", "bias") if cfg.norm == "layernorm" else ("scale",)
    readers = [*READ_BY_ATTENTION, *_up(cfg)] + ([] if cfg.tie_embeddings else ["head"])
    cols = ["embed.embedding"] + (["positions.embedding"] if cfg.learned_positions else [])
    cols += [f"{n}.{p}" for n in _norms(cfg) for p in parts] + [f"{r}.weight" for r in readers]
    rows = ["layers.attn.o.weight", "layers.mlp.down.weight"]
    rows += ["layers.attn.o.bias"] if cfg.attention_out_bias else []
    rows += ["layers.mlp.down.bias"] if cfg.mlp_bias else []
    return Region(tuple(rows), tuple(cols))


def value_region(cfg: DecoderConfig) -> Region:
    """P2: the channels of each value head, an order ``[L, Hkv D]`` that stays within heads.

    Reconstruction: the public code leaves attention alone; within a key/value head the channels may move, as long as
    all query heads that share it follow.
    """
    bias = ("layers.attn.v.bias",) if cfg.attention_bias else ()
    rows, cols = ("layers.attn.v.weight", *bias), ("layers.attn.o.weight",)
    return Region(rows, cols, cfg.num_kv_heads, cfg.num_heads // cfg.num_kv_heads)


def hidden_region(cfg: DecoderConfig) -> Region:
    """P3: the hidden channels of the MLP, an order ``[L, F]``: PeRQ spreads the down projection's outliers by it."""
    bias = tuple(f"{u}.bias" for u in _up(cfg)) if cfg.mlp_bias else ()
    return Region(tuple(f"{u}.weight" for u in _up(cfg)) + bias, ("layers.mlp.down.weight",))


def _take(a: Array, idx: Array, axis: int, path: str) -> Array:
    """Gather along an axis from the end; an order a layer goes with the leading axis of ``a``."""
    if a.shape[axis] != idx.shape[-1] or (idx.ndim > 1 and a.shape[0] != idx.shape[0]):
        raise ConfigError(f"region: found {path} of shape {a.shape}, expected {idx.shape[-1]} channels on axis {axis}")
    if idx.ndim == 1:
        return jnp.take(a, idx, axis=axis)
    shape = [idx.shape[0]] + [1] * (a.ndim - 1)
    shape[axis] = idx.shape[-1]
    return jnp.take_along_axis(a, idx.reshape(shape), axis=axis)


def _check_order(idx: Int[Array, "*l d"], parts: int) -> None:
    if not is_concrete(idx):
        return
    d = idx.shape[-1]
    if not np.array_equal(np.sort(idx, axis=-1), np.broadcast_to(np.arange(d), idx.shape)):
        raise ConfigError(f"idx: found repeated or missing channels, expected each of 0 to {d - 1} once")
    if parts > 1 and not np.array_equal(
        np.asarray(idx) // (d // parts), np.broadcast_to(np.arange(d) // (d // parts), idx.shape)
    ):
        raise ConfigError(f"idx: found channels moved across heads, expected orders within {parts} heads")


def permute_params(params: Params, region: tuple, idx: Num[Array, "*l d"]) -> Params:
    r"""Give the channels of a region another order: new channel p is old channel ``idx[p]``, everywhere alike.

    .. math:: \Phi(X W_1) W_2 = \Phi(X W_1 P) P^\top W_2

    Args:
      region: a ``Region``, of ``stream_region``, ``value_region``, ``hidden_region``, or your own.
      idx: ``[d]`` for all layers or ``[L, d]``.

    Returns:
      Parameters of the same function.

    Raises: ConfigError where the region names a parameter that the model lacks, of another width, or quantised
      already; where (outside jit) idx is no permutation or moves channels across heads.
    Reference: arXiv 2601.22347, permutation equivariance.
    """
    if not isinstance(region, Region):
        raise ConfigError(f"region: found {region!r}, expected a Region")
    idx = jnp.asarray(idx)
    if not jnp.issubdtype(idx.dtype, jnp.integer):
        raise ConfigError(f"idx: found {idx.dtype}, expected integers")
    parts = max(region.heads, 1)
    if idx.shape[-1] % parts:
        raise ConfigError(f"idx: found {idx.shape[-1]} channels, expected a multiple of {parts} heads")
    _check_order(idx, parts)
    size = idx.shape[-1] // parts
    offset = jnp.arange(parts)[:, None] * size
    local = idx.reshape(*idx.shape[:-1], parts, size) - offset.reshape((1,) * (idx.ndim - 1) + offset.shape)
    wide = jnp.repeat(local, region.copies, axis=-2)
    shift = (jnp.arange(parts * region.copies)[:, None] * size).reshape((1,) * (idx.ndim - 1) + (-1, 1))
    wide = (wide + shift).reshape(*idx.shape[:-1], -1)
    for path in region.rows:
        params = put(params, path, _take(plain(params, path), idx, -2 if path.endswith(".weight") else -1, path))
    for path in region.cols:
        params = put(params, path, _take(plain(params, path), wide, -1, path))
    return params


# --- rotations -------------------------------------------------------------------------------------------------------


class RotationPlan(NamedTuple):
    """What to rotate, None for nothing.

    Attributes:
      r1: ``[C, C]`` orthonormal, of the residual stream, merged into the weights.
      r2: ``[D, D]`` or ``[L, D, D]`` orthonormal, of each value head, merged.
      r3: block of the online Hadamard rotation before the down projection.
    """

    r1: Float[Array, "C C"] | None = None
    r2: Float[Array, "*l D D"] | None = None
    r3: int | None = None


def refuses_r1(cfg: DecoderConfig) -> str | None:
    """Why the residual stream of this family cannot be rotated, or None where it can."""
    if cfg.norm != "rmsnorm":
        return f"R1: found norm {cfg.norm} ({cfg.model_type}), expected rmsnorm: a rotation moves the mean it takes off"
    if cfg.norm_order != "pre":
        found = f"R1: found norm_order {cfg.norm_order} ({cfg.model_type})"
        return f"{found}, expected pre: a gain lies between writer and stream"
    return None


def _scaled(w: Array, gain: Array) -> Array:
    exact = jnp.promote_types(w.dtype, jnp.float32)
    return (w.astype(exact) * gain.astype(exact)).astype(w.dtype)


def fold_norms(params: Params, cfg: DecoderConfig) -> tuple[Params, DecoderConfig]:
    """Move the gains of pre-norms into the weights that read them; a tied head gets a weight of its own.

    Raises: ConfigError where ``refuses_r1`` gives a reason.
    """
    reason = refuses_r1(cfg)
    if reason:
        raise ConfigError(reason)
    if cfg.tie_embeddings:
        params = put(params, "head.weight", plain(params, "embed.embedding"))
        cfg = dataclasses.replace(cfg, tie_embeddings=False)
    for norm, readers in (
        ("layers.attn_norm", READ_BY_ATTENTION),
        ("layers.mlp_norm", _up(cfg)),
        ("norm", ("head",)),
    ):
        gain = plain(params, f"{norm}.scale")
        total = gain.astype(jnp.promote_types(gain.dtype, jnp.float32)) + cfg.norm_offset
        for reader in readers:
            w = plain(params, f"{reader}.weight")
            params = put(params, f"{reader}.weight", _scaled(w, total[..., None, :]))
        params = put(params, f"{norm}.scale", jnp.full_like(gain, 1.0 - cfg.norm_offset))
    return params, cfg


def _product(a: Array, b: Array, dtype) -> Array:
    exact = jnp.promote_types(jnp.promote_types(a.dtype, b.dtype), jnp.float32)
    return jnp.matmul(a.astype(exact), b.astype(exact), precision=HIGHEST).astype(dtype)


def _rotate_stream(params: Params, cfg: DecoderConfig, r: Float[Array, "C C"]) -> Params:
    if r.shape != (cfg.hidden_size, cfg.hidden_size):
        raise ConfigError(f"r1: found shape {r.shape}, expected {(cfg.hidden_size, cfg.hidden_size)}")
    region = stream_region(cfg)
    for path in region.cols:
        if path.endswith((".weight", ".embedding")):
            w = plain(params, path)
            params = put(params, path, _product(w, r, w.dtype))
    for path in region.rows:
        w = plain(params, path)
        out_last = jnp.swapaxes(w, -1, -2) if path.endswith(".weight") else w
        rotated = _product(out_last, r, w.dtype)
        params = put(params, path, jnp.swapaxes(rotated, -1, -2) if path.endswith(".weight") else rotated)
    return params


def _rotate_values(params: Params, cfg: DecoderConfig, r: Float[Array, "*l D D"]) -> Params:
    d, kv, heads = cfg.head_dim, cfg.num_kv_heads, cfg.num_heads
    if r.shape[-2:] != (d, d) or r.ndim > 3 or (r.ndim == 3 and r.shape[0] != cfg.num_layers):
        raise ConfigError(f"r2: found shape {r.shape}, expected {(d, d)} or {(cfg.num_layers, d, d)}")
    r = jnp.broadcast_to(r, (cfg.num_layers, d, d))
    v, o = plain(params, "layers.attn.v.weight"), plain(params, "layers.attn.o.weight")
    by_head = jnp.swapaxes(v.reshape(cfg.num_layers, kv, d, -1), -1, -2)
    v_new = jnp.swapaxes(_product(by_head, r[:, None], v.dtype), -1, -2).reshape(v.shape)
    o_new = _product(o.reshape(cfg.num_layers, -1, heads, d), r[:, None], o.dtype).reshape(o.shape)
    params = put(put(params, "layers.attn.v.weight", v_new), "layers.attn.o.weight", o_new)
    if cfg.attention_bias:
        b = plain(params, "layers.attn.v.bias")
        rotated = _product(b.reshape(cfg.num_layers, kv, d), r, b.dtype)
        params = put(params, "layers.attn.v.bias", rotated.reshape(b.shape))
    return params


def _check_orthonormal(r: Float[Array, "*l n n"] | None, name: str) -> None:
    if r is None or not is_concrete(r) or r.shape[-1] != r.shape[-2]:
        return  # shapes are checked against the model
    eye = jnp.broadcast_to(jnp.eye(r.shape[-1], dtype=r.dtype), r.shape)
    gap = float(jnp.abs(_product(r, jnp.swapaxes(r, -1, -2), r.dtype) - eye).max())
    if not gap <= NOT_ORTHONORMAL:
        raise ConfigError(f"{name}: found a matrix {gap:.2g} from orthonormal, expected at most {NOT_ORTHONORMAL}")


def rotate_params(params: Params, cfg: DecoderConfig, plan: RotationPlan) -> tuple[Params, DecoderConfig]:
    r"""Rotate the residual stream, the value heads and the input of the down projection.

    .. math:: E R_1,\; W_{read} R_1,\; R_1^\top W_{write}; \quad R_2^\top W_v^h,\; W_o^h R_2; \quad
       (x R_3)(W_{down} R_3)^\top

    R1 and R2 are merged and cost nothing; R1 first folds the norms' gains and unties a tied head. R3 leaves a
    ``QTensor`` that rotates its input at run time.

    Returns:
      Parameters of the same function, and the configuration they belong to.

    Raises: ConfigError for R1 in a family that does not admit it (a post-norm or a LayerNorm, see ``refuses_r1``), for
      matrices of another size or (outside jit) not orthonormal, a block that does not divide the width, or weights
      quantised already.
    Reference: Liu et al., SpinQuant, arXiv 2405.16406, figure 1; arXiv 2601.22347. Reconstruction: which families
      admit R1.
    """
    for name in ("r1", "r2"):
        _check_orthonormal(getattr(plan, name), name)
    if plan.r1 is not None:
        params, cfg = fold_norms(params, cfg)
        params = _rotate_stream(params, cfg, plan.r1)
    if plan.r2 is not None:
        params = _rotate_values(params, cfg, plan.r2)
    if plan.r3 is not None:
        down = plain(params, "layers.mlp.down.weight")
        check_block(down.shape[-1], plan.r3, "r3")
        params = put(
            params, "layers.mlp.down.weight", QTensor(block_hadamard(down, plan.r3), bits=None, rotate=plan.r3)
        )
    return params, cfg


def check_finite(params: Params) -> None:
    """Raises: WeightsError naming the first parameter that holds NaN or infinity (read on the host)."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if is_concrete(leaf) and jnp.issubdtype(leaf.dtype, jnp.floating) and not bool(jnp.isfinite(leaf).all()):
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            raise WeightsError(f"{name}: found NaN or infinity, expected finite numbers")
