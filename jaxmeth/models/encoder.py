"""Encoders: BERT (MiniLM and its kin) and the two towers of CLIP and SigLIP.

Flax NNX modules, always used purely: the parameters are a nested dict, the layers are stacked on a leading axis and
scanned. Names follow the decoder; a linear weight is ``[out, in]``. Letters: V vocabulary, C hidden, F intermediate,
P positions, L layers, E projection. Parameter tree of ``BertConfig``::

    embed.embedding [V, C]
    positions.embedding [P, C]
    token_types.embedding [type_vocab_size, C]
    embed_norm.scale, .bias [C]
    layers.attn.q, .k, .v, .o .weight [L, C, C], .bias [L, C]
    layers.attn_post_norm.scale, .bias [L, C]       # after the residual sum: norm(x + attn(x))
    layers.mlp.up.weight [L, F, C], .bias [L, F]
    layers.mlp.down.weight [L, C, F], .bias [L, C]
    layers.mlp_post_norm.scale, .bias [L, C]        # norm(x + mlp(x))
    pooler.weight [C, C], .bias [C]                 # only with cfg.pooler; kept for the round trip, never applied

Parameter tree of ``DualEncoderConfig`` (C, F, L, P are each tower's own; "clip", "siglip" mark what only one has)::

    text.embed.embedding [V, C]
    text.positions.embedding [P, C]
    text.layers.*                                   # see below
    text.norm.scale, .bias [C]                      # final_layer_norm
    text.projection.weight [E, C]                   # clip: text_projection; siglip: text_model.head
    text.projection.bias [E]                        # siglip
    vision.patch.weight [C, channels * patch * patch]  # columns ordered (channel, y, x): the convolution's as [C, -1]
    vision.patch.bias [C]                           # siglip
    vision.class_token [C]                          # clip: class_embedding
    vision.positions.embedding [P, C]               # P = patches, + 1 for clip's class token in row 0
    vision.pre_norm.scale, .bias [C]                # clip: pre_layrnorm
    vision.layers.*
    vision.norm.scale, .bias [C]                    # post_layernorm
    vision.projection.weight [E, C]                 # clip: visual_projection
    vision.head.probe [1, 1, C]                     # siglip, with all of head.*: attention pooling
    vision.head.attn.q, .k, .v, .o .weight [C, C], .bias [C]   # in_proj_weight [3C, C] holds the rows of q, k, v
    vision.head.norm.scale, .bias [C]
    vision.head.mlp.up.weight [F, C], .bias [F]
    vision.head.mlp.down.weight [C, F], .bias [C]
    logit_scale []  (clip) or [1] (siglip)          # a logarithm
    logit_bias [1]                                  # siglip

    layers.attn_norm.scale, .bias [L, C]            # layer_norm1, before attention
    layers.attn.q, .k, .v, .o .weight [L, C, C], .bias [L, C]
    layers.mlp_norm.scale, .bias [L, C]             # layer_norm2, before the MLP
    layers.mlp.up.weight [L, F, C], .bias [L, F]
    layers.mlp.down.weight [L, C, F], .bias [L, C]

``position_ids`` buffers of older checkpoints are not parameters (they hold 0, 1, 2, ... as int64, which has no gradient
and which JAX would narrow to int32): they do not belong to the tree and a converter drops them, as newer files do.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxmeth.models.decoder import on_host
from jaxmeth.models.towers import (
    Bert,
    BertConfig,
    BertOutput,
    DualEncoder,
    DualEncoderConfig,
    TextTowerConfig,
    VisionTowerConfig,
    unit,
)
from jaxmeth.types import ConfigError, Params, extremes

__all__ = [
    "BertConfig",
    "BertOutput",
    "DualEncoderConfig",
    "EncoderConfig",
    "TextTowerConfig",
    "VisionTowerConfig",
    "abstract_params",
    "encode_image",
    "encode_text",
    "init",
    "similarity",
]

EncoderConfig = BertConfig | DualEncoderConfig


@functools.lru_cache(maxsize=64)
def graph_definition(cfg: EncoderConfig) -> nnx.GraphDef:
    """The static half of the module, made once a configuration without computing anything."""
    return nnx.split(nnx.eval_shape(lambda: _module(cfg, nnx.Rngs(0))))[0]


def build(cfg: EncoderConfig, params: Params) -> Bert | DualEncoder:
    """The module around given parameters (inside a jitted function; merging costs nothing at run time)."""
    return nnx.merge(graph_definition(cfg), params)


def _module(cfg: EncoderConfig, rngs: nnx.Rngs) -> Bert | DualEncoder:
    return (Bert if isinstance(cfg, BertConfig) else DualEncoder)(cfg, rngs)


@functools.partial(jax.jit, static_argnums=0)
def _init(cfg: EncoderConfig, key) -> Params:
    return nnx.to_pure_dict(nnx.split(_module(cfg, nnx.Rngs(key)))[1])


def init(cfg: EncoderConfig, key: Array) -> Params:
    """Random parameters: normal with standard deviation 0.02, biases 0, scales 1, logit scale and bias as published.

    Consumes ``key``. Returns the tree of the module docstring in float32.
    """
    return _init(cfg, key)


@functools.lru_cache(maxsize=64)
def abstract_params(cfg: EncoderConfig) -> Params:
    """The parameter tree as ``jax.ShapeDtypeStruct``s: which leaves a configuration has, and their shapes."""
    return jax.eval_shape(lambda: _init(cfg, jax.random.key(0)))


@functools.partial(jax.jit, static_argnums=1)
def _encode_text(params, cfg, tokens, mask, token_types):
    mask = jnp.ones(tokens.shape, bool) if mask is None else mask.astype(bool)
    module = build(cfg, params)
    if isinstance(cfg, BertConfig):
        return module(tokens, mask, jnp.zeros_like(tokens) if token_types is None else token_types)
    return unit(module.text(tokens, mask))


def encode_text(
    params: Params,
    cfg: EncoderConfig,
    tokens: Int[Array, "B T"] | np.ndarray,
    mask: Bool[Array, "B T"] | Int[Array, "B T"] | np.ndarray | None = None,
    *,
    token_types: Int[Array, "B T"] | np.ndarray | None = None,
) -> BertOutput | Float[Array, "B E"]:
    r"""Embed a batch of token sequences; compiled once a shape.

    BERT: hidden states h after the last layer, and :math:`u = \bar h / \|\bar h\|`, :math:`\bar h` the mean over real
    tokens (what sentence-transformers calls mean pooling). CLIP: causal attention, the state at the end-of-text token,
    projected, unit length; the token is the first ``eos_token_id``, the last real token in a row without one, and with
    ``eos_token_id`` 2 (old files) the one with the largest id. SigLIP: bidirectional attention, the state at the last
    slot, projected, unit length.

    Positions count real tokens, so padding on either side does not change BERT or CLIP. SigLIP reads the last slot
    even where that is padding: it was trained on rows padded to ``max_positions`` with no mask, so leave ``mask`` None.

    Args:
      params: the tree of the module docstring; linear weights may be any ``types.LinearWeight``.
      cfg: static.
      tokens: ids in [0, V).
      mask: True = a real token; None = all.
      token_types: BERT only: the segment of each token; None = all 0.

    Returns:
      ``BertOutput`` for BERT, else unit embeddings ``[B, E]``; float32 (float64 for float64 parameters). A row with no
      real token has the zero vector for its embedding; the hidden states of padding are finite and mean nothing.

    Raises:
      ConfigError: tokens outside the vocabulary (checked where the values are on this host), an empty sequence, one
        longer than ``max_positions``, a mask or token types that do not fit, token types for another model than BERT.

    Reference: Devlin et al., BERT, arXiv 1810.04805; Reimers and Gurevych, Sentence-BERT, arXiv 1908.10084, section 3;
    Radford et al., CLIP, arXiv 2103.00020, section 2.4; Zhai et al., SigLIP, arXiv 2303.15343.
    """
    text = cfg if isinstance(cfg, BertConfig) else cfg.text
    if tokens.ndim != 2 or tokens.shape[1] == 0:
        raise ConfigError(f"tokens: found shape {tuple(tokens.shape)}, expected [batch, length] and at least one token")
    if tokens.shape[1] > text.max_positions:
        raise ConfigError(f"tokens: found {tokens.shape[1]} a row, expected at most max_positions {text.max_positions}")
    if token_types is not None and text is not cfg:
        raise ConfigError(f"token_types: found an array, expected None for model_type {cfg.model_type}")
    for name, array in (("mask", mask), ("token_types", token_types)):
        if array is not None and array.shape != tokens.shape:
            raise ConfigError(f"{name}: found shape {tuple(array.shape)}, expected that of tokens, {tokens.shape}")
    _check_ids("tokens", tokens, text.vocab_size)
    if token_types is not None:
        _check_ids("token_types", token_types, text.type_vocab_size)
    return _encode_text(params, cfg, tokens, mask, token_types)


def _check_ids(name: str, ids, size: int) -> None:
    """Ids must lie in a table of ``size`` rows; values on an accelerator are not fetched for this."""
    if on_host(ids) and ids.size:
        low, high = extremes(ids)
        if low < 0 or high >= size:
            raise ConfigError(f"{name}: found id {low if low < 0 else high}, expected 0 to {size - 1}")


@functools.partial(jax.jit, static_argnums=1)
def _encode_image(params, cfg, pixels):
    return unit(build(cfg, params).vision(pixels))


def encode_image(
    params: Params, cfg: EncoderConfig, pixels: Float[Array, "B channels height width"] | np.ndarray
) -> Float[Array, "B E"]:
    """Embed a batch of images; compiled once a shape.

    The image is cut into patches row by row, each patch mapped linearly. CLIP: a class token in front, its last state
    normed and projected. SigLIP: the normed states pooled by one learned query. Either is scaled to unit length.

    Args:
      params: the tree of the module docstring.
      cfg: static.
      pixels: channels first, scaled and normalised as the model's image processor does; ``image_size`` squared.

    Returns:
      Unit embeddings ``[B, E]``, float32 (float64 for float64 parameters).

    Raises:
      ConfigError: pixels of another shape than the model's, or integers (not yet scaled); BERT, which sees no images.

    Reference: Radford et al., CLIP, arXiv 2103.00020, section 2.4; Zhai et al., SigLIP, arXiv 2303.15343; Lee et al.,
    Set Transformer, arXiv 1810.00825, section 3.2 (pooling by attention).
    """
    _expect_dual(cfg)
    tower = cfg.vision
    expected = (tower.num_channels, tower.image_size, tower.image_size)
    if pixels.ndim != 4 or pixels.shape[1:] != expected:
        raise ConfigError(
            f"pixels: found shape {tuple(pixels.shape)}, expected [batch, {', '.join(map(str, expected))}]"
        )
    if not jnp.issubdtype(pixels.dtype, jnp.floating):
        raise ConfigError(f"pixels: found dtype {pixels.dtype}, expected normalised floating point values")
    return _encode_image(params, cfg, pixels)


@jax.jit
def _similarity(scale, bias, text, image):
    logits = jnp.matmul(image, text.T) * jnp.exp(scale.reshape(()).astype(image.dtype))
    return logits if bias is None else logits + bias.reshape(()).astype(image.dtype)


def similarity(
    params: Params, cfg: EncoderConfig, text: Float[Array, "N E"], image: Float[Array, "M E"]
) -> Float[Array, "M N"]:
    r"""How well each text fits each image, as logits.

    .. math:: \ell_{mn} = e^{s}\, u_m \cdot t_n + b

    with image embeddings u, text embeddings t, the learned s (``logit_scale``) and b (``logit_bias``; CLIP has none).
    CLIP: softmax over n gives the texts' probabilities for an image. SigLIP: sigmoid gives that of each pair.

    Args:
      params: the tree of the module docstring; only the scale and the bias are read.
      cfg: static.
      text: unit embeddings from ``encode_text``; N may be 0.
      image: unit embeddings from ``encode_image``; M may be 0.

    Returns:
      ``logits_per_image [M, N]``.

    Raises:
      ConfigError: BERT, which has neither.

    Reference: Radford et al., CLIP, arXiv 2103.00020, figure 3; Zhai et al., SigLIP, arXiv 2303.15343, algorithm 1.
    """
    _expect_dual(cfg)
    return _similarity(params["logit_scale"], params.get("logit_bias"), text, image)


def _expect_dual(cfg) -> None:
    if not isinstance(cfg, DualEncoderConfig):
        raise ConfigError(f"cfg: found {type(cfg).__name__}, expected a DualEncoderConfig (clip, siglip)")
