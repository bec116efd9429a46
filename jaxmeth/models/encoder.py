"""Bidirectional encoders: BERT (MiniLM and its kin) and the two towers of CLIP and SigLIP.

Flax NNX modules, always used purely: the parameters are a nested dict, the layers are stacked on a leading axis and
scanned. Names follow the decoder; a linear kernel is ``[in, out]``. Letters: V vocabulary, C hidden, F intermediate,
P positions, L layers, E projection. Parameter tree of ``BertConfig``::

    embed.embedding [V, C]
    positions.embedding [P, C]
    token_types.embedding [type_vocab_size, C]
    embed_norm.scale, .bias [C]
    layers.attn.q, .k, .v, .o .kernel [L, C, C], .bias [L, C]
    layers.attn_post_norm.scale, .bias [L, C]       # after the residual sum: norm(x + attn(x))
    layers.mlp.up.kernel [L, C, F], .bias [L, F]
    layers.mlp.down.kernel [L, F, C], .bias [L, C]
    layers.mlp_post_norm.scale, .bias [L, C]        # norm(x + mlp(x))
    pooler.kernel [C, C], .bias [C]                 # only with cfg.pooler; kept for the round trip, never applied

Parameter tree of ``DualEncoderConfig`` (C, F, L, P are each tower's own; "clip", "siglip" mark what only one has)::

    text.embed.embedding [V, C]
    text.positions.embedding [P, C]
    text.layers.*                                   # see below
    text.norm.scale, .bias [C]                      # final_layer_norm
    text.projection.kernel [C, E]                   # clip: text_projection; siglip: text_model.head
    text.projection.bias [E]                        # siglip
    vision.patch.kernel [channels * patch * patch, C]  # rows ordered (channel, y, x): the convolution's
                                                       # [C, channels, patch, patch] as [C, -1], transposed
    vision.patch.bias [C]                           # siglip
    vision.class_token [C]                          # clip: class_embedding
    vision.positions.embedding [P, C]               # P = patches, + 1 for clip's class token in row 0
    vision.pre_norm.scale, .bias [C]                # clip: pre_layrnorm
    vision.layers.*
    vision.norm.scale, .bias [C]                    # post_layernorm
    vision.projection.kernel [C, E]                 # clip: visual_projection
    vision.head.probe [1, 1, C]                     # siglip, with all of head.*: attention pooling
    vision.head.attn.q, .k, .v, .o .kernel [C, C], .bias [C]   # in_proj_weight [3C, C] holds the rows of q, k, v
    vision.head.norm.scale, .bias [C]
    vision.head.mlp.up.kernel [C, F], .bias [F]
    vision.head.mlp.down.kernel [F, C], .bias [C]
    logit_scale []  (clip) or [1] (siglip)          # a logarithm
    logit_bias [1]                                  # siglip

    layers.attn_norm.scale, .bias [L, C]            # layer_norm1, before attention
    layers.attn.q, .k, .v, .o .kernel [L, C, C], .bias [L, C]
    layers.mlp_norm.scale, .bias [L, C]             # layer_norm2, before the MLP
    layers.mlp.up.kernel [L, C, F], .bias [L, F]
    layers.mlp.down.kernel [L, F, C], .bias [L, C]

``position_ids`` buffers of older checkpoints are not parameters (they hold 0, 1, 2, ... as int64, which has no gradient
and which JAX would narrow to int32): they do not belong to the tree and a converter drops them, as newer files do.
"""

from dataclasses import dataclass


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
