"""The tables of tensors: Hugging Face name, the leaves of our tree it holds, and how the numbers lie in it.

A layout gives, for one Hugging Face tensor and the leaves it holds, pairs of views of equal shape. Copying from left to
right loads, from right to left saves, so every layout inverts exactly by construction. ``{i}`` in a name is the layer;
such a tensor holds row i of stacked leaves.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

Shape = tuple[int, ...]
Pairs = list[tuple[np.ndarray, np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Layout:
    """``shape(leaf shapes, cfg)`` is the Hugging Face shape; ``pairs(tensor, leaves, cfg)`` matches the numbers up."""

    shape: Callable[[Sequence[Shape], Any], Shape]
    pairs: Callable[[np.ndarray, Sequence[np.ndarray], Any], Pairs]


def _row_pairs(w: np.ndarray, leaves: Sequence[np.ndarray], cfg) -> Pairs:
    """The rows of several linear layers one below the other (biases: one after the other)."""
    ends = np.cumsum([len(leaf) for leaf in leaves])
    return [(w[end - len(leaf) : end], leaf) for end, leaf in zip(ends, leaves, strict=True)]


def _column_pairs(w: np.ndarray, leaves: Sequence[np.ndarray], cfg) -> Pairs:
    """GPT-2's Conv1D keeps [in, out], so fused layers lie side by side."""
    ends = np.cumsum([len(leaf) for leaf in leaves])
    return [(w[..., end - len(leaf) : end].T, leaf) for end, leaf in zip(ends, leaves, strict=True)]


def _head_pairs(w: np.ndarray, leaves: Sequence[np.ndarray], cfg) -> Pairs:
    """GPT-NeoX fuses q, k and v head by head: rows [H, 3, D]."""
    split = w.reshape(cfg.num_heads, len(leaves), cfg.head_dim, *w.shape[1:])
    return [(split[:, part], leaf.reshape(split[:, part].shape)) for part, leaf in enumerate(leaves)]


def _patch_pairs(w: np.ndarray, leaves: Sequence[np.ndarray], cfg) -> Pairs:
    """A convolution whose stride is its kernel: [C, channels, patch, patch] as [C, -1]."""
    return [(w.reshape(w.shape[0], -1), leaves[0])]


def _rows(shapes: Sequence[Shape], cfg) -> Shape:
    return (sum(s[0] for s in shapes), *shapes[0][1:])


SAME = Layout(lambda shapes, cfg: shapes[0], lambda w, leaves, cfg: [(w, leaves[0])])
TRANSPOSED = Layout(lambda shapes, cfg: shapes[0][::-1], lambda w, leaves, cfg: [(w.T, leaves[0])])
ROWS = Layout(_rows, _row_pairs)
COLUMNS = Layout(lambda shapes, cfg: (*shapes[0][1:], sum(s[0] for s in shapes)), _column_pairs)
HEADS = Layout(_rows, _head_pairs)
PATCHES = Layout(
    lambda shapes, cfg: (shapes[0][0], cfg.vision.num_channels, cfg.vision.patch_size, cfg.vision.patch_size),
    _patch_pairs,
)


class Entry(NamedTuple):
    """One line of a table: a Hugging Face name, the leaves it holds (paths joined by dots), their layout."""

    name: str
    paths: tuple[str, ...]
    layout: Layout = SAME


def _linear(name: str, *paths: str, layout: Layout = SAME, dot: str = ".") -> list[Entry]:
    """Weight and bias of a linear layer; entries whose leaves a configuration lacks are dropped later."""
    return [
        Entry(f"{name}{dot}weight", tuple(f"{p}.weight" for p in paths), layout),
        Entry(f"{name}{dot}bias", tuple(f"{p}.bias" for p in paths), layout),
    ]


def _norm(name: str, path: str) -> list[Entry]:
    return [Entry(f"{name}.weight", (f"{path}.scale",)), Entry(f"{name}.bias", (f"{path}.bias",))]


def _embedding(name: str, path: str) -> Entry:
    return Entry(f"{name}.weight", (f"{path}.embedding",))


_LAYER = "model.layers.{i}."
_PRE = {"input_layernorm": "attn_norm", "post_attention_layernorm": "mlp_norm"}
_POST = {"post_attention_layernorm": "attn_post_norm", "post_feedforward_layernorm": "mlp_post_norm"}
_SANDWICH = {**_POST, "input_layernorm": "attn_norm", "pre_feedforward_layernorm": "mlp_norm"}
_QKV = ("layers.attn.q", "layers.attn.k", "layers.attn.v")


def _llama_like(norms: dict[str, str], *, fused: bool = False) -> list[Entry]:
    entries = [_embedding("model.embed_tokens", "embed"), *_norm("model.norm", "norm"), *_linear("lm_head", "head")]
    for theirs, ours in norms.items():
        entries += _norm(_LAYER + theirs, f"layers.{ours}")
    if fused:
        entries += _linear(f"{_LAYER}self_attn.qkv_proj", *_QKV, layout=ROWS)
        entries += _linear(f"{_LAYER}mlp.gate_up_proj", "layers.mlp.gate", "layers.mlp.up", layout=ROWS)
    else:
        for part in "qkv":
            entries += _linear(f"{_LAYER}self_attn.{part}_proj", f"layers.attn.{part}")
        for part in ("gate", "up"):
            entries += _linear(f"{_LAYER}mlp.{part}_proj", f"layers.mlp.{part}")
    for part in "qk":
        entries += _norm(f"{_LAYER}self_attn.{part}_norm", f"layers.attn.{part}_norm")
    entries += _linear(f"{_LAYER}self_attn.o_proj", "layers.attn.o")
    return entries + _linear(f"{_LAYER}mlp.down_proj", "layers.mlp.down")


def _gpt_neox() -> list[Entry]:
    base, layer = "gpt_neox.", "gpt_neox.layers.{i}."
    return [
        _embedding(f"{base}embed_in", "embed"),
        *_norm(f"{base}final_layer_norm", "norm"),
        *_linear("embed_out", "head"),
        *_norm(f"{layer}input_layernorm", "layers.attn_norm"),
        *_norm(f"{layer}post_attention_layernorm", "layers.mlp_norm"),
        *_linear(f"{layer}attention.query_key_value", *_QKV, layout=HEADS),
        *_linear(f"{layer}attention.dense", "layers.attn.o"),
        *_linear(f"{layer}mlp.dense_h_to_4h", "layers.mlp.up"),
        *_linear(f"{layer}mlp.dense_4h_to_h", "layers.mlp.down"),
    ]


def _gpt2() -> list[Entry]:
    base, layer = "transformer.", "transformer.h.{i}."
    return [
        _embedding(f"{base}wte", "embed"),
        _embedding(f"{base}wpe", "positions"),
        *_norm(f"{base}ln_f", "norm"),
        *_linear("lm_head", "head"),
        *_norm(f"{layer}ln_1", "layers.attn_norm"),
        *_norm(f"{layer}ln_2", "layers.mlp_norm"),
        *_linear(f"{layer}attn.c_attn", *_QKV, layout=COLUMNS),
        *_linear(f"{layer}attn.c_proj", "layers.attn.o", layout=TRANSPOSED),
        *_linear(f"{layer}mlp.c_fc", "layers.mlp.up", layout=TRANSPOSED),
        *_linear(f"{layer}mlp.c_proj", "layers.mlp.down", layout=TRANSPOSED),
    ]


def _bert() -> list[Entry]:
    layer = "encoder.layer.{i}."
    entries = [
        _embedding("embeddings.word_embeddings", "embed"),
        _embedding("embeddings.position_embeddings", "positions"),
        _embedding("embeddings.token_type_embeddings", "token_types"),
        *_norm("embeddings.LayerNorm", "embed_norm"),
        *_linear(f"{layer}attention.output.dense", "layers.attn.o"),
        *_norm(f"{layer}attention.output.LayerNorm", "layers.attn_post_norm"),
        *_linear(f"{layer}intermediate.dense", "layers.mlp.up"),
        *_linear(f"{layer}output.dense", "layers.mlp.down"),
        *_norm(f"{layer}output.LayerNorm", "layers.mlp_post_norm"),
        *_linear("pooler.dense", "pooler"),
    ]
    for theirs, ours in (("query", "q"), ("key", "k"), ("value", "v")):
        entries += _linear(f"{layer}attention.self.{theirs}", f"layers.attn.{ours}")
    return entries


def _tower(tower: str) -> list[Entry]:
    """The transformer layers that the text and the image half of CLIP and SigLIP share."""
    layer, ours = f"{tower}_model.encoder.layers.{{i}}.", f"{tower}.layers."
    entries = [
        *_norm(f"{layer}layer_norm1", f"{ours}attn_norm"),
        *_norm(f"{layer}layer_norm2", f"{ours}mlp_norm"),
        *_linear(f"{layer}self_attn.out_proj", f"{ours}attn.o"),
        *_linear(f"{layer}mlp.fc1", f"{ours}mlp.up"),
        *_linear(f"{layer}mlp.fc2", f"{ours}mlp.down"),
    ]
    for part in "qkv":
        entries += _linear(f"{layer}self_attn.{part}_proj", f"{ours}attn.{part}")
    return entries


def _dual() -> list[Entry]:
    return [
        _embedding("text_model.embeddings.token_embedding", "text.embed"),
        _embedding("text_model.embeddings.position_embedding", "text.positions"),
        *_norm("text_model.final_layer_norm", "text.norm"),
        Entry("vision_model.embeddings.patch_embedding.weight", ("vision.patch.weight",), PATCHES),
        Entry("vision_model.embeddings.patch_embedding.bias", ("vision.patch.bias",)),
        _embedding("vision_model.embeddings.position_embedding", "vision.positions"),
        *_norm("vision_model.post_layernorm", "vision.norm"),
        Entry("logit_scale", ("logit_scale",)),
        *_tower("text"),
        *_tower("vision"),
    ]


def _clip() -> list[Entry]:
    return [
        *_dual(),
        Entry("vision_model.embeddings.class_embedding", ("vision.class_token",)),
        *_norm("vision_model.pre_layrnorm", "vision.pre_norm"),  # the name is misspelt in every checkpoint
        *_linear("text_projection", "text.projection"),
        *_linear("visual_projection", "vision.projection"),
    ]


def _siglip() -> list[Entry]:
    head, ours = "vision_model.head.", "vision.head."
    qkv = tuple(f"{ours}attn.{part}" for part in "qkv")
    return [
        *_dual(),
        *_linear("text_model.head", "text.projection"),
        Entry(f"{head}probe", (f"{ours}probe",)),
        *_linear(f"{head}attention.in_proj", *qkv, layout=ROWS, dot="_"),
        *_linear(f"{head}attention.out_proj", f"{ours}attn.o"),
        *_norm(f"{head}layernorm", f"{ours}norm"),
        *_linear(f"{head}mlp.fc1", f"{ours}mlp.up"),
        *_linear(f"{head}mlp.fc2", f"{ours}mlp.down"),
        Entry("logit_bias", ("logit_bias",)),
    ]


TABLES: dict[str, list[Entry]] = {
    **{name: _llama_like(_PRE) for name in ("llama", "mistral", "qwen2", "qwen3", "smollm3")},
    **{name: _llama_like(_SANDWICH) for name in ("gemma2", "gemma3_text")},
    "olmo2": _llama_like(_POST),
    "phi3": _llama_like(_PRE, fused=True),
    "gpt_neox": _gpt_neox(),
    "gpt2": _gpt2(),
    "bert": _bert(),
    "clip": _clip(),
    "siglip": _siglip(),
}

# The prefix that saved names carry, then those that are read as well: a bare model, or one inside a larger one.
PREFIXES: dict[str, tuple[str, ...]] = {
    "gpt_neox": ("gpt_neox.", ""),
    "gpt2": ("transformer.", ""),
    "bert": ("", "bert."),
    "clip": ("",),
    "siglip": ("",),
}
DECODER_PREFIXES = ("model.", "", "model.language_model.", "language_model.model.")
HEAD_PREFIX = "language_model."

# Constants that old releases stored next to the weights.
BUFFERS = r"(^|\.)(rotary_emb\.inv_freq|(attn|attention)\.(bias|masked_bias)|position_ids)$"
# The image half of a multimodal Gemma 3, which is not read.
OTHER_HALVES = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
