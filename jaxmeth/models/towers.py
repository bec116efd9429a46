"""The modules behind ``encoder.py``: configurations, BERT, and the text and image towers of CLIP and SigLIP.

Letters: B batch, T tokens, S patches, C hidden, E projection. ``encoder.py`` has the parameter tree and the functions.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxmeth.attention.dense import dense
from jaxmeth.models.layers import ACTIVATIONS, Linear, compute_dtype, layer_norm, raw
from jaxmeth.types import AttendContext, ConfigError


@dataclass(frozen=True)
class BertConfig:
    """A BERT encoder; learned positions, post-norm layers, every linear has a bias.

    ``activation`` is a key of ``layers.ACTIVATIONS``. ``pooler`` says whether the checkpoint carries the pooler.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    max_positions: int
    type_vocab_size: int = 2
    norm_eps: float = 1e-12
    activation: str = "gelu"
    pooler: bool = True
    pad_token_id: int | None = 0
    model_type: str = "bert"

    def __post_init__(self):
        _check(self, "vocab_size", "max_positions", "type_vocab_size")


@dataclass(frozen=True)
class TextTowerConfig:
    """The text half of a dual encoder. ``eos_token_id`` is where CLIP pools (2: at the largest id, see encode_text)."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    max_positions: int
    norm_eps: float = 1e-5
    activation: str = "quick_gelu"
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None

    def __post_init__(self):
        _check(self, "vocab_size", "max_positions")


@dataclass(frozen=True)
class VisionTowerConfig:
    """The image half of a dual encoder: square images cut into square patches, row by row."""

    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    image_size: int
    patch_size: int
    num_channels: int = 3
    norm_eps: float = 1e-5
    activation: str = "quick_gelu"

    def __post_init__(self):
        _check(self, "patch_size", "num_channels")
        if self.image_size < self.patch_size:
            raise ConfigError(f"image_size: found {self.image_size}, expected at least patch_size {self.patch_size}")

    @property
    def grid(self) -> int:
        """Patches along one side; what does not fill a patch is dropped."""
        return self.image_size // self.patch_size


@dataclass(frozen=True)
class DualEncoderConfig:
    """CLIP or SigLIP: two towers that end in the same ``projection_dim``-dimensional space.

    ``model_type`` is "clip" or "siglip" and decides the structure. SigLIP has no projection of images, so there
    ``projection_dim`` (its text tower's ``projection_size``) must equal ``vision.hidden_size``.
    """

    model_type: str
    text: TextTowerConfig
    vision: VisionTowerConfig
    projection_dim: int

    def __post_init__(self):
        if self.model_type not in ("clip", "siglip"):
            raise ConfigError(f"model_type: found {self.model_type!r}, expected clip or siglip")
        if self.model_type == "clip" and self.text.eos_token_id is None:
            raise ConfigError("text.eos_token_id: found None, expected the token at which CLIP pools")
        if self.model_type == "siglip" and self.projection_dim != self.vision.hidden_size:
            raise ConfigError(
                f"projection_dim: found {self.projection_dim}, expected vision.hidden_size {self.vision.hidden_size}"
            )


def _check(cfg, *sizes: str) -> None:
    for name in ("hidden_size", "num_layers", "num_heads", "intermediate_size", *sizes):
        if getattr(cfg, name) < 1:
            raise ConfigError(f"{name}: found {getattr(cfg, name)}, expected at least 1")
    if cfg.hidden_size % cfg.num_heads:
        raise ConfigError(f"num_heads: found {cfg.num_heads}, which does not divide hidden_size {cfg.hidden_size}")
    if cfg.activation not in ACTIVATIONS:
        raise ConfigError(f"activation: found {cfg.activation!r}, expected one of {', '.join(ACTIVATIONS)}")


_StackConfig = BertConfig | TextTowerConfig | VisionTowerConfig


class BertOutput(NamedTuple):
    """What ``encode_text`` returns for BERT; ``pooled_unit`` is the mean over real tokens, scaled to unit length."""

    hidden: Float[Array, "B T C"]
    pooled_unit: Float[Array, "B C"]


class Attention(nnx.Module):
    """Projections with biases around dense attention; queries and keys may come from different sequences."""

    def __init__(self, cfg: _StackConfig, rngs: nnx.Rngs):
        self.heads = cfg.num_heads
        self.q, self.k, self.v, self.o = (
            Linear(cfg.hidden_size, cfg.hidden_size, bias=True, rngs=rngs) for _ in range(4)
        )

    def __call__(self, x: Float[Array, "B T C"], y: Float[Array, "B S C"], ctx: AttendContext) -> Float[Array, "B T C"]:
        q, k, v = (rearrange(a, "b t (h d) -> b h t d", h=self.heads) for a in (self.q(x), self.k(y), self.v(y)))
        out, _ = dense(q, k, v, ctx, None)
        return self.o(rearrange(out, "b h t d -> b t (h d)"))


class MLP(nnx.Module):
    """``down(act(up x))``."""

    def __init__(self, cfg: _StackConfig, rngs: nnx.Rngs):
        self.activation = cfg.activation
        self.up = Linear(cfg.hidden_size, cfg.intermediate_size, bias=True, rngs=rngs)
        self.down = Linear(cfg.intermediate_size, cfg.hidden_size, bias=True, rngs=rngs)

    def __call__(self, x: Float[Array, "B T C"]) -> Float[Array, "B T C"]:
        return self.down(ACTIVATIONS[self.activation](self.up(x)))


class PreNormBlock(nnx.Module):
    """``x + attn(norm(x))``, then ``x + mlp(norm(x))``: a layer of CLIP and SigLIP."""

    def __init__(self, cfg: _StackConfig, rngs: nnx.Rngs):
        self.attn_norm, self.mlp_norm = _norm(cfg, rngs), _norm(cfg, rngs)
        self.attn, self.mlp = Attention(cfg, rngs), MLP(cfg, rngs)

    def __call__(self, x: Float[Array, "B T C"], ctx: AttendContext) -> Float[Array, "B T C"]:
        y = self.attn_norm(x)
        x = x + self.attn(y, y, ctx)
        return x + self.mlp(self.mlp_norm(x))


class PostNormBlock(nnx.Module):
    """``norm(x + attn(x))``, then ``norm(x + mlp(x))``: a layer of BERT."""

    def __init__(self, cfg: _StackConfig, rngs: nnx.Rngs):
        self.attn_post_norm, self.mlp_post_norm = _norm(cfg, rngs), _norm(cfg, rngs)
        self.attn, self.mlp = Attention(cfg, rngs), MLP(cfg, rngs)

    def __call__(self, x: Float[Array, "B T C"], ctx: AttendContext) -> Float[Array, "B T C"]:
        x = self.attn_post_norm(x + self.attn(x, x, ctx))
        return self.mlp_post_norm(x + self.mlp(x))


class Bert(nnx.Module):
    """The module class of ``BertConfig``, usable by other Flax code."""

    def __init__(self, cfg: BertConfig, rngs: nnx.Rngs):
        self.cfg = cfg
        self.embed = _table(cfg.vocab_size, cfg.hidden_size, rngs)
        self.positions = _table(cfg.max_positions, cfg.hidden_size, rngs)
        self.token_types = _table(cfg.type_vocab_size, cfg.hidden_size, rngs)
        self.embed_norm = _norm(cfg, rngs)
        self.layers = _stack(PostNormBlock, cfg, rngs)
        if cfg.pooler:
            self.pooler = Linear(cfg.hidden_size, cfg.hidden_size, bias=True, rngs=rngs)

    def __call__(
        self, tokens: Int[Array, "B T"], mask: Bool[Array, "B T"], token_types: Int[Array, "B T"]
    ) -> BertOutput:
        dtype = compute_dtype(raw(self.embed_norm.scale).dtype)
        # Summed in this order because float addition does not associate, and the reference does it so.
        x = _look_up(self.embed, tokens, dtype) + _look_up(self.token_types, token_types, dtype)
        x = self.embed_norm(x + _look_up(self.positions, _positions(mask), dtype))
        x = _run(self.layers, self.cfg, x, mask, causal=False)
        hidden = x.astype(jnp.promote_types(dtype, jnp.float32))
        kept = jnp.where(mask[:, :, None], hidden, 0)
        # The sum points where the mean points, so unit length needs no count.
        return BertOutput(hidden, unit(jnp.sum(kept, axis=1)))


class TextTower(nnx.Module):
    """Tokens to unnormalised embeddings ``[B, E]``; causal for CLIP, bidirectional for SigLIP."""

    def __init__(self, cfg: DualEncoderConfig, rngs: nnx.Rngs):
        self.cfg, self.clip = cfg.text, cfg.model_type == "clip"
        self.embed = _table(cfg.text.vocab_size, cfg.text.hidden_size, rngs)
        self.positions = _table(cfg.text.max_positions, cfg.text.hidden_size, rngs)
        self.layers = _stack(PreNormBlock, cfg.text, rngs)
        self.norm = _norm(cfg.text, rngs)
        self.projection = Linear(cfg.text.hidden_size, cfg.projection_dim, bias=not self.clip, rngs=rngs)

    def __call__(self, tokens: Int[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, "B E"]:
        dtype = compute_dtype(raw(self.norm.scale).dtype)
        x = _look_up(self.embed, tokens, dtype) + _look_up(self.positions, _positions(mask), dtype)
        x = _run(self.layers, self.cfg, x, mask, causal=self.clip)
        if self.clip:
            at = _end_of_text(tokens, mask, self.cfg.eos_token_id)
            pooled = jnp.take_along_axis(x, at[:, None, None], axis=1)[:, 0]
        else:
            pooled = x[:, -1]
        # The norm acts on each vector alone, so only the pooled one needs it.
        return jnp.where(jnp.any(mask, axis=1)[:, None], self.projection(self.norm(pooled)), 0)


class VisionTower(nnx.Module):
    """Pixels to unnormalised embeddings ``[B, E]``; CLIP pools a class token, SigLIP by an attention head."""

    def __init__(self, cfg: DualEncoderConfig, rngs: nnx.Rngs):
        self.cfg, self.clip = cfg.vision, cfg.model_type == "clip"
        tower, size = cfg.vision, cfg.vision.hidden_size
        self.patch = Linear(tower.num_channels * tower.patch_size**2, size, bias=not self.clip, rngs=rngs)
        self.positions = _table(tower.grid**2 + int(self.clip), size, rngs)
        self.layers = _stack(PreNormBlock, tower, rngs)
        self.norm = _norm(tower, rngs)
        if self.clip:
            self.class_token = nnx.Param(jax.random.normal(rngs.params(), (size,), jnp.float32) * 0.02)
            self.pre_norm = _norm(tower, rngs)
            self.projection = Linear(size, cfg.projection_dim, rngs=rngs)
        else:
            self.head = AttentionPool(tower, rngs)

    def __call__(self, pixels: Float[Array, "B channels height width"]) -> Float[Array, "B E"]:
        dtype, side = compute_dtype(raw(self.norm.scale).dtype), self.cfg.grid * self.cfg.patch_size
        # Pixels that do not fill a patch at the right and bottom edge are dropped, as an unpadded convolution does.
        patches = rearrange(
            pixels[:, :, :side, :side].astype(dtype),
            "b c (h y) (w x) -> b (h w) (c y x)",
            y=self.cfg.patch_size,
            x=self.cfg.patch_size,
        )
        x = self.patch(patches)
        if self.clip:
            first = jnp.broadcast_to(raw(self.class_token).astype(dtype), (x.shape[0], 1, x.shape[2]))
            x = jnp.concatenate([first, x], axis=1)
        x = x + raw(self.positions.embedding).astype(dtype)[None]
        valid = jnp.ones(x.shape[:2], bool)
        if self.clip:
            x = _run(self.layers, self.cfg, self.pre_norm(x), valid, causal=False)
            return self.projection(self.norm(x[:, 0]))
        return self.head(self.norm(_run(self.layers, self.cfg, x, valid, causal=False)))


class AttentionPool(nnx.Module):
    """SigLIP's pooling: one learned query attends over all patches; then a residual MLP."""

    def __init__(self, cfg: VisionTowerConfig, rngs: nnx.Rngs):
        self.cfg = cfg
        self.probe = nnx.Param(jax.random.normal(rngs.params(), (1, 1, cfg.hidden_size), jnp.float32) * 0.02)
        self.attn, self.norm, self.mlp = Attention(cfg, rngs), _norm(cfg, rngs), MLP(cfg, rngs)

    def __call__(self, x: Float[Array, "B S C"]) -> Float[Array, "B C"]:
        probe = jnp.broadcast_to(raw(self.probe).astype(x.dtype), (x.shape[0], 1, x.shape[2]))
        valid = jnp.ones(x.shape[:2], bool)
        pooled = self.attn(probe, x, _context(self.cfg, valid, 1, causal=False))
        return (pooled + self.mlp(self.norm(pooled)))[:, 0]


class DualEncoder(nnx.Module):
    """The module class of ``DualEncoderConfig``, usable by other Flax code."""

    def __init__(self, cfg: DualEncoderConfig, rngs: nnx.Rngs):
        self.text, self.vision = TextTower(cfg, rngs), VisionTower(cfg, rngs)
        # The values training starts from: 1 / 0.07 for CLIP, 10 and -10 for SigLIP.
        if cfg.model_type == "clip":
            self.logit_scale = nnx.Param(jnp.asarray(-math.log(0.07), jnp.float32))
        else:
            self.logit_scale = nnx.Param(jnp.full((1,), math.log(10.0), jnp.float32))
            self.logit_bias = nnx.Param(jnp.full((1,), -10.0, jnp.float32))


def _norm(cfg: _StackConfig, rngs: nnx.Rngs) -> nnx.LayerNorm:
    return layer_norm(cfg.hidden_size, epsilon=cfg.norm_eps, rngs=rngs)


def _table(rows: int, size: int, rngs: nnx.Rngs) -> nnx.Embed:
    return nnx.Embed(rows, size, embedding_init=jax.nn.initializers.normal(0.02), rngs=rngs)


def _look_up(table: nnx.Embed, ids: Int[Array, "B T"], dtype: jnp.dtype) -> Float[Array, "B T C"]:
    return jnp.take(raw(table.embedding), ids, axis=0).astype(dtype)


def _stack(block: type[nnx.Module], cfg: _StackConfig, rngs: nnx.Rngs) -> nnx.Module:
    return nnx.vmap(lambda r: block(cfg, r), in_axes=0, out_axes=0)(rngs.split(cfg.num_layers))


def _positions(mask: Bool[Array, "B T"]) -> Int[Array, "B T"]:
    """Real tokens are counted, so that padding on either side changes nothing; a padded slot keeps its own index."""
    slots = jnp.arange(mask.shape[1], dtype=jnp.int32)
    return jnp.where(mask, jnp.cumsum(mask, axis=1, dtype=jnp.int32) - 1, slots[None])


def _context(cfg: _StackConfig, valid: Bool[Array, "B S"], queries: int, *, causal: bool) -> AttendContext:
    positions = _positions(valid)
    return AttendContext(
        q_pos=positions[:, :queries],
        kv_pos=positions,
        q_slot=jnp.arange(queries, dtype=jnp.int32),
        kv_valid=valid,
        layer=jnp.int32(0),
        window=jnp.int32(valid.shape[1]),
        scale=(cfg.hidden_size // cfg.num_heads) ** -0.5,
        causal=causal,
    )


def _run(
    layers: nnx.Module, cfg: _StackConfig, x: Float[Array, "B T C"], valid: Bool[Array, "B T"], *, causal: bool
) -> Float[Array, "B T C"]:
    graph, params = nnx.split(layers)
    ctx = _context(cfg, valid, x.shape[1], causal=causal)

    def body(x, this):
        layer, block = this
        return nnx.merge(graph, block)(x, replace(ctx, layer=layer)), None

    return jax.lax.scan(body, x, (jnp.arange(cfg.num_layers, dtype=jnp.int32), nnx.to_pure_dict(params)))[0]


def _end_of_text(tokens: Int[Array, "B T"], mask: Bool[Array, "B T"], eos_token_id: int) -> Int[Array, " B"]:
    """Slot of CLIP's pooled token: the first real ``eos_token_id``, the last real token where there is none.

    An id of 2 is how old files name it wrongly; there the pooled token is the one with the largest id.
    """
    if eos_token_id == 2:
        return jnp.argmax(jnp.where(mask, tokens, -1), axis=1)
    ends = mask & (tokens == eos_token_id)
    last = mask.shape[1] - 1 - jnp.argmax(mask[:, ::-1], axis=1)
    return jnp.where(jnp.any(ends, axis=1), jnp.argmax(ends, axis=1), last)


def unit(x: Float[Array, "B E"]) -> Float[Array, "B E"]:
    """Unit length in float32 or better; a zero row stays zero, with a zero gradient."""
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    square = jnp.sum(jnp.square(x), axis=-1, keepdims=True)
    return x * jnp.where(square == 0, 0, jax.lax.rsqrt(jnp.where(square == 0, 1, square)))
