"""A decoder one layer at a time, with the inputs of its linear weights: what calibration needs.

The layers and the weight leaves are those of ``models``; a leaf that notes its input stands in for each weight that is
watched, so no family needs code of its own here. Calibration tokens are whole windows without padding.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxmeth.attention.dense import dense
from jaxmeth.models import DecoderConfig
from jaxmeth.models.decoder import Block, _rotary_dim
from jaxmeth.models.layers import compute_dtype, linear, rope_tables
from jaxmeth.quant.permute import MassState, mass_init, merge_mass, update_mass
from jaxmeth.quant.regions import get, put
from jaxmeth.types import AttendContext, Params

HIGHEST = jax.lax.Precision.HIGHEST


class _Tap:
    """A weight that appends what it is given (rotated and rounded as it asks) to a list, while the layer is traced."""

    def __init__(self, leaf, seen: list):
        self.leaf, self.seen = leaf, seen

    def matmul(self, x: Array) -> Array:
        self.seen.append(self.leaf.inputs(x) if hasattr(self.leaf, "inputs") else x)
        return linear(x, self.leaf)


@functools.lru_cache(maxsize=64)
def _block_graph(cfg: DecoderConfig) -> nnx.GraphDef:
    return nnx.split(nnx.eval_shape(lambda: Block(cfg, nnx.Rngs(0))))[0]


def of_layer(params: Params, layer: int | Int[Array, ""]) -> Params:
    """The parameters of one layer."""
    return jax.tree.map(lambda a: a[layer], params["layers"])


@functools.partial(jax.jit, static_argnums=1)
def embed(params: Params, cfg: DecoderConfig, tokens: Int[Array, "B T"]) -> Float[Array, "B T C"]:
    """What the first layer is given."""
    dtype = compute_dtype(params["norm"]["scale"].dtype)
    x = jnp.take(params["embed"]["embedding"], tokens, axis=0).astype(dtype)
    if cfg.embed_scale != 1.0:
        x = x * jnp.asarray(cfg.embed_scale, dtype)
    if cfg.learned_positions:
        x = x + params["positions"]["embedding"][: tokens.shape[1]][None].astype(dtype)
    return x


def run_layer(
    cfg: DecoderConfig, layer_params: Params, layer: Int[Array, ""], x: Float[Array, "B T C"], watched: tuple[str, ...]
) -> tuple[Float[Array, "B T C"], dict[str, Array]]:
    """One layer: its output, and the inputs of the watched weights (``attn.q``, ``mlp.down``, ...)."""
    batch, length = x.shape[:2]
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None], (batch, length))
    cos, sin = rope_tables(cfg.ropes, _rotary_dim(cfg), positions, x.dtype)
    windows = np.array(cfg.layer_windows or (0,) * cfg.num_layers, np.int32)
    rope = jnp.asarray(cfg.layer_ropes or (0,) * cfg.num_layers, jnp.int32)[layer]
    ctx = AttendContext(
        q_pos=positions,
        kv_pos=positions,
        q_slot=jnp.arange(length, dtype=jnp.int32),
        kv_valid=jnp.ones((batch, length), bool),
        layer=jnp.asarray(layer, jnp.int32),
        window=jnp.asarray(np.where(windows == 0, length, windows), jnp.int32)[layer],
        scale=cfg.head_dim**-0.5 if cfg.attention_scale is None else cfg.attention_scale,
        softcap=cfg.attention_softcap,
        causal=cfg.causal,
    )
    seen: dict[str, list] = {name: [] for name in watched}
    for name in watched:
        path = f"{name}.weight"
        layer_params = put(layer_params, path, _Tap(get(layer_params, path), seen[name]))
    block = nnx.merge(_block_graph(cfg), layer_params)
    out, _ = block(x, cos[rope], sin[rope], lambda q, k, v: dense(q, k, v, ctx, None))
    return out, {name: values[0] for name, values in seen.items()}


@functools.partial(jax.jit, static_argnums=0)
def advance(
    cfg: DecoderConfig, layer_params: Params, layer: Int[Array, ""], x: Float[Array, "B T C"]
) -> Float[Array, "B T C"]:
    """The layer's output."""
    return run_layer(cfg, layer_params, layer, x, ())[0]


@functools.partial(jax.jit, static_argnums=(0, 6))
def second_moments(
    cfg: DecoderConfig,
    exact: Params,
    rounded: Params,
    layer: Int[Array, ""],
    x: Float[Array, "B T C"],
    xq: Float[Array, "B T C"],
    name: str,
) -> tuple[Float[Array, "i i"], Float[Array, "i i"]]:
    """``(X~^T X~, X^T X~)`` of one weight's inputs, summed over the tokens of a batch.

    X from the exact layer on x, X~ from the (partly) rounded one on xq. What lies behind the weight is not computed.
    """
    first = run_layer(cfg, exact, layer, x, (name,))[1][name]
    second = run_layer(cfg, rounded, layer, xq, (name,))[1][name]
    a, b = (v.astype(jnp.promote_types(v.dtype, jnp.float32)).reshape(-1, v.shape[-1]) for v in (first, second))
    return jnp.matmul(b.T, b, precision=HIGHEST), jnp.matmul(a.T, b, precision=HIGHEST)


@functools.partial(jax.jit, static_argnums=(1, 3))
def _masses(params: Params, cfg: DecoderConfig, tokens: Int[Array, "B T"], name: str) -> MassState:
    def body(x, this):
        layer_params, layer = this
        x, seen = run_layer(cfg, layer_params, layer, x, (name,))
        return x, update_mass(mass_init(seen[name].shape[-1]), seen[name])

    layers = jnp.arange(cfg.num_layers)
    return jax.lax.scan(body, embed(params, cfg, tokens), (params["layers"], layers))[1]


def masses(params: Params, cfg: DecoderConfig, batches: list, name: str) -> MassState:
    """Statistics of the inputs of one weight in each layer, ``[L, d]``, streamed over batches of tokens."""
    total = None
    for tokens in batches:
        more = _masses(params, cfg, jnp.asarray(tokens), name)
        more = more._replace(count=more.count[0])
        total = more if total is None else merge_mass(total, more)
    return total
