"""``config.json`` of the encoders (BERT, CLIP, SigLIP), and the names of activations."""

from typing import Any

from jaxmeth.hf.fields import REQUIRED, Fields
from jaxmeth.models.encoder import BertConfig, DualEncoderConfig, TextTowerConfig, VisionTowerConfig

# The tanh form has three names; they compute the same function.
ACTIVATION_NAMES = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "quick_gelu": "quick_gelu",
}


def activation(fields: Fields, name: str, default: str) -> str:
    """Our name of the activation in field ``name``."""
    return ACTIVATION_NAMES[fields.text(name, default, allowed=tuple(ACTIVATION_NAMES))]


def activation_name(ours: str, prefer: str | None = None) -> str:
    """The Hugging Face name, the family's own where it has one."""
    if prefer is not None and ACTIVATION_NAMES[prefer] == ours:
        return prefer
    return "gelu_pytorch_tanh" if ours == "gelu_tanh" else ours


def _sizes(fields: Fields, defaults: dict[str, Any]) -> dict[str, Any]:
    names = (
        ("hidden_size", "hidden_size"),
        ("num_layers", "num_hidden_layers"),
        ("num_heads", "num_attention_heads"),
        ("intermediate_size", "intermediate_size"),
    )
    out = {ours: fields.integer(theirs, defaults.get(theirs, REQUIRED)) for ours, theirs in names}
    if out["hidden_size"] % out["num_heads"]:
        raise fields.error("num_attention_heads", f"a divisor of hidden_size {out['hidden_size']}")
    return out


def _sizes_to_hf(cfg) -> dict[str, Any]:
    return {
        "hidden_size": cfg.hidden_size,
        "num_hidden_layers": cfg.num_layers,
        "num_attention_heads": cfg.num_heads,
        "intermediate_size": cfg.intermediate_size,
        "layer_norm_eps": cfg.norm_eps,
    }


def bert_from_hf(fields: Fields) -> BertConfig:
    """``BertConfig`` of a ``bert`` config.json (``pooler`` is settled by the weights)."""
    fields.refuse("position_embedding_type", "absolute")
    fields.refuse("is_decoder", False)
    fields.refuse("add_cross_attention", False)
    return BertConfig(
        vocab_size=fields.integer("vocab_size"),
        **_sizes(fields, {}),
        max_positions=fields.integer("max_position_embeddings"),
        type_vocab_size=fields.integer("type_vocab_size", 2),
        norm_eps=fields.number("layer_norm_eps", 1e-12),
        activation=activation(fields, "hidden_act", "gelu"),
        pad_token_id=fields.integer("pad_token_id", 0, low=0, nullable=True),
    )


def bert_to_hf(cfg: BertConfig) -> dict[str, Any]:
    """The inverse of ``bert_from_hf``."""
    return dict(
        model_type="bert",
        architectures=["BertModel"],
        vocab_size=cfg.vocab_size,
        **_sizes_to_hf(cfg),
        max_position_embeddings=cfg.max_positions,
        type_vocab_size=cfg.type_vocab_size,
        hidden_act=activation_name(cfg.activation),
        pad_token_id=cfg.pad_token_id,
    )


# Nested configurations leave out what equals their class defaults.
_TEXT_DEFAULTS = {
    "clip": {
        "vocab_size": 49408,
        "hidden_size": 512,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "intermediate_size": 2048,
        "max_position_embeddings": 77,
        "layer_norm_eps": 1e-5,
        "hidden_act": "quick_gelu",
    },
    "siglip": {
        "vocab_size": 32000,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "max_position_embeddings": 64,
        "layer_norm_eps": 1e-6,
        "hidden_act": "gelu_pytorch_tanh",
    },
}
_VISION_DEFAULTS = {
    "clip": {"patch_size": 32, "layer_norm_eps": 1e-5, "hidden_act": "quick_gelu"},
    "siglip": {"patch_size": 16, "layer_norm_eps": 1e-6, "hidden_act": "gelu_pytorch_tanh"},
}
_VISION_SIZES = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}


def dual_from_hf(fields: Fields, model_type: str) -> DualEncoderConfig:
    """``DualEncoderConfig`` of a ``clip`` or ``siglip`` config.json."""
    text, vision = fields.inner("text_config"), fields.inner("vision_config")
    vision.refuse("vision_use_head", True)
    t, v = _TEXT_DEFAULTS[model_type], _VISION_DEFAULTS[model_type]
    if model_type == "clip":
        projection = fields.integer("projection_dim", 512)
    else:
        projection = text.integer("projection_size", text.integer("hidden_size", t["hidden_size"]))
    return DualEncoderConfig(
        model_type=model_type,
        text=TextTowerConfig(
            vocab_size=text.integer("vocab_size", t["vocab_size"]),
            **_sizes(text, t),
            max_positions=text.integer("max_position_embeddings", t["max_position_embeddings"]),
            norm_eps=text.number("layer_norm_eps", t["layer_norm_eps"]),
            activation=activation(text, "hidden_act", t["hidden_act"]),
            bos_token_id=text.integer("bos_token_id", 49406, low=0, nullable=True),
            eos_token_id=text.integer("eos_token_id", 49407, low=0, nullable=True),
            pad_token_id=text.integer("pad_token_id", 1, low=0, nullable=True),
        ),
        vision=VisionTowerConfig(
            **_sizes(vision, _VISION_SIZES),
            image_size=vision.integer("image_size", 224),
            patch_size=vision.integer("patch_size", v["patch_size"]),
            num_channels=vision.integer("num_channels", 3),
            norm_eps=vision.number("layer_norm_eps", v["layer_norm_eps"]),
            activation=activation(vision, "hidden_act", v["hidden_act"]),
        ),
        projection_dim=projection,
    )


def dual_to_hf(cfg: DualEncoderConfig) -> dict[str, Any]:
    """The inverse of ``dual_from_hf``."""
    clip = cfg.model_type == "clip"
    text = dict(
        model_type=f"{cfg.model_type}_text_model",
        vocab_size=cfg.text.vocab_size,
        **_sizes_to_hf(cfg.text),
        max_position_embeddings=cfg.text.max_positions,
        hidden_act=activation_name(cfg.text.activation),
        bos_token_id=cfg.text.bos_token_id,
        eos_token_id=cfg.text.eos_token_id,
        pad_token_id=cfg.text.pad_token_id,
        **({"projection_dim": cfg.projection_dim} if clip else {"projection_size": cfg.projection_dim}),
    )
    vision = dict(
        model_type=f"{cfg.model_type}_vision_model",
        **_sizes_to_hf(cfg.vision),
        image_size=cfg.vision.image_size,
        patch_size=cfg.vision.patch_size,
        num_channels=cfg.vision.num_channels,
        hidden_act=activation_name(cfg.vision.activation),
        **({"projection_dim": cfg.projection_dim} if clip else {"vision_use_head": True}),
    )
    return dict(
        model_type=cfg.model_type,
        architectures=["CLIPModel" if clip else "SiglipModel"],
        text_config=text,
        vision_config=vision,
        **({"projection_dim": cfg.projection_dim} if clip else {}),
    )
