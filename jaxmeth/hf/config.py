"""Hugging Face ``config.json`` to a jaxmeth configuration and back.

Both layouts are read: the current one (``rope_parameters``, possibly one dict a layer type; ``layer_types``) and the
older one of most published checkpoints (``rope_theta``/``rope_scaling``/``rope_local_base_freq``;
``sliding_window_pattern``, ``no_rope_layers``, ``use_sliding_window`` with ``max_window_layers``). Written is the older
one wherever it can say everything, because every release of transformers reads it. A field that is absent takes the
default of the family's own configuration class; the sizes of the model are required.
"""

import dataclasses
import math
import warnings
from typing import Any

from jaxmeth.hf import config_encoders as encoders
from jaxmeth.hf.families import FAMILIES, GEMMA3_SIZES, GPT2_NAMES, Family
from jaxmeth.hf.fields import REQUIRED, Fields
from jaxmeth.models.config import DecoderConfig
from jaxmeth.models.layers import RopeConfig
from jaxmeth.types import ConfigError

FULL, SLIDING = "full_attention", "sliding_attention"


SUPPORTED = (*FAMILIES, "gemma3", "bert", "clip", "siglip")


def config_from_hf(data: dict[str, Any], source: str = "config.json"):
    """The configuration a Hugging Face ``config.json`` describes.

    Args:
      data: the parsed file.
      source: its name, for messages.

    Returns:
      ``DecoderConfig``, ``BertConfig`` or ``DualEncoderConfig``. A multimodal ``gemma3`` gives its text part.

    Raises:
      ConfigError: a required field is missing, has the wrong type, or asks for something that is not implemented
        (an unknown ``model_type``, rope type or activation; quantised storage; a variant that changes the function).
    """
    fields = Fields(data, source)
    model_type = fields.text("model_type", allowed=SUPPORTED)
    if data.get("auto_map") or data.get("trust_remote_code"):
        warnings.warn(f"{source}: auto_map/trust_remote_code: ignored, no code of a checkpoint is run", stacklevel=2)
    fields.refuse("quantization_config")
    if model_type == "bert":
        return encoders.bert_from_hf(fields)
    if model_type in ("clip", "siglip"):
        return encoders.dual_from_hf(fields, model_type)
    if model_type != "gemma3":
        return _decoder_from_hf(fields, model_type)
    text = fields.inner("text_config")
    shared = {name: data[name] for name in ("tie_word_embeddings", "eos_token_id", "bos_token_id") if name in data}
    nested = {**GEMMA3_SIZES, **shared, **{k: v for k, v in text.data.items() if v is not None}}
    return _decoder_from_hf(Fields(nested, source, "text_config."), "gemma3_text")


def config_to_hf(cfg) -> dict[str, Any]:
    """The Hugging Face ``config.json`` of a configuration; ``config_from_hf(config_to_hf(cfg)) == cfg``.

    Raises:
      ConfigError: the family's ``config.json`` cannot express the configuration (names the field).
    """
    if isinstance(cfg, encoders.BertConfig):
        return encoders.bert_to_hf(cfg)
    if isinstance(cfg, encoders.DualEncoderConfig):
        return encoders.dual_to_hf(cfg)
    if cfg.model_type not in FAMILIES:
        raise ConfigError(f"model_type: found {cfg.model_type!r}, expected one of {', '.join(FAMILIES)}")
    out = _decoder_to_hf(cfg)
    again = _decoder_from_hf(Fields(out, "config.json"), cfg.model_type)
    for field in dataclasses.fields(cfg):
        wanted, got = getattr(cfg, field.name), getattr(again, field.name)
        if wanted != got:
            raise ConfigError(f"{field.name}: found {wanted!r}, a {cfg.model_type} config.json can only say {got!r}")
    return out


def _decoder_from_hf(fields: Fields, model_type: str) -> DecoderConfig:
    family = FAMILIES[model_type]
    default = family.defaults
    name = GPT2_NAMES if model_type == "gpt2" else {}

    def size(key: str, fallback=REQUIRED, **limits):
        return fields.integer(name.get(key, key), fallback, **limits)

    layers = size("num_hidden_layers", high=4096)
    hidden, heads = size("hidden_size"), size("num_attention_heads")
    head_dim = size("head_dim", default.get("head_dim"))
    if head_dim is None:
        if hidden % heads:
            raise fields.error(name.get("num_attention_heads", "num_attention_heads"), f"a divisor of {hidden}")
        head_dim = hidden // heads
    kv_heads = size("num_key_value_heads", default.get("num_key_value_heads", heads), nullable=True) or heads
    if heads % kv_heads:
        raise fields.error("num_key_value_heads", f"a divisor of the {heads} attention heads")
    positions = size("max_position_embeddings")
    values = dict(family.fixed)
    values |= {bias: fields.flag(bias, default.get(bias, False)) for bias in family.optional_biases}
    if "attention_bias" in family.optional_biases:
        values["attention_out_bias"] = values["attention_bias"]
    types = _layer_types(fields, family, layers)
    values |= _special(fields, model_type, default, hidden, head_dim)
    if not values.get("learned_positions"):
        values |= _ropes(fields, model_type, default, types, positions, head_dim)
    return DecoderConfig(
        model_type=model_type,
        vocab_size=size("vocab_size"),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=size("intermediate_size", 4 * hidden if model_type == "gpt2" else REQUIRED),
        max_positions=positions,
        norm_eps=fields.number(family.eps, default.get(family.eps, 1e-6)),
        activation=encoders.activation(fields, family.activation, default.get(family.activation, "silu")),
        layer_windows=_windows(fields, family, types, layers),
        tie_embeddings=fields.flag("tie_word_embeddings", default.get("tie_word_embeddings", False)),
        bos_token_id=fields.integer("bos_token_id", default.get("bos_token_id"), low=0, nullable=True),
        eos_token_ids=end_tokens(fields, default.get("eos_token_id")),
        pad_token_id=fields.integer("pad_token_id", default.get("pad_token_id"), low=-1, nullable=True),
        **values,
    )


def end_tokens(fields: Fields, default: int | None) -> tuple[int, ...]:
    """``eos_token_id``: a number, a list of numbers, or null."""
    value = fields.data.get("eos_token_id", default)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise fields.error("eos_token_id", "a token id or a list of them")
    return tuple(ids)


def _special(fields: Fields, model_type: str, default: dict, hidden: int, head_dim: int) -> dict[str, Any]:
    """Fields that only one family has, and refusals of variants that compute something else."""
    if model_type == "gpt2":
        for field, harmless in (("scale_attn_by_inverse_layer_idx", False), ("add_cross_attention", False)):
            fields.refuse(field, harmless)
        scale = None if fields.flag("scale_attn_weights", True) else 1.0
        return {"attention_scale": scale, "ropes": (RopeConfig(kind="none"),)}
    if model_type == "gpt_neox":
        return {"parallel_residual": fields.flag("use_parallel_residual", True)}
    if model_type in ("gemma2", "gemma3_text"):
        fields.refuse("use_bidirectional_attention", False)
        scalar = fields.number("query_pre_attn_scalar", default["query_pre_attn_scalar"])
        caps = {
            ours: fields.number(theirs, default.get(theirs), nullable=True)
            for ours, theirs in (
                ("attention_softcap", "attn_logit_softcapping"),
                ("logit_softcap", "final_logit_softcapping"),
            )
        }
        scale = None if scalar == head_dim else scalar**-0.5
        return dict(caps, attention_scale=scale, embed_scale=math.sqrt(hidden))
    return {}


def _layer_types(fields: Fields, family: Family, layers: int) -> list[str]:
    """Full or sliding attention, one a layer."""
    if family.windows != "types":
        return [FULL] * layers
    given = fields.many("layer_types", layers, (FULL, SLIDING))
    if given is not None:
        return given
    if family.activation == "hidden_activation":  # the Gemmas: every n-th layer is full
        default = 2 if "attn_logit_softcapping" in family.defaults else 6
        every = fields.integer("sliding_window_pattern", fields.integer("_sliding_window_pattern", default))
        return [FULL if (i + 1) % every == 0 else SLIDING for i in range(layers)]
    if not fields.flag("use_sliding_window", False):
        return [FULL] * layers
    if family.architecture == "SmolLM3ForCausalLM":
        return [FULL if rotated else SLIDING for rotated in _rotated(fields, layers)]
    first = fields.integer("max_window_layers", 28, low=0)
    return [SLIDING if i >= first else FULL for i in range(layers)]


def _windows(fields: Fields, family: Family, types: list[str], layers: int) -> tuple[int, ...]:
    default = family.defaults.get("sliding_window")
    window = None if family.windows == "none" else fields.integer("sliding_window", default, nullable=True)
    if family.windows == "all":
        return () if window is None else (window,) * layers
    if family.activation != "hidden_activation" and not fields.flag("use_sliding_window", False):
        return ()
    if window is None or SLIDING not in types:
        return ()
    return tuple(window if t == SLIDING else 0 for t in types)


def _rotated(fields: Fields, layers: int) -> list[int]:
    """SmolLM3: 1 where a layer rotates, 0 where it has no position embedding."""
    given = fields.many("no_rope_layers", layers, (0, 1))
    if given is not None:
        return given
    every = fields.integer("no_rope_layer_interval", 4)
    return [int((i + 1) % every != 0) for i in range(layers)]


def _ropes(fields: Fields, model_type: str, default: dict, types: list[str], positions: int, head_dim: int) -> dict:
    """``ropes``, ``layer_ropes`` and ``rotary_dim``."""
    theta_name = "rotary_emb_base" if model_type == "gpt_neox" else "rope_theta"
    part_name = "rotary_pct" if model_type == "gpt_neox" else "partial_rotary_factor"
    theta = fields.number(theta_name, default.get("rope_theta", 10000.0))
    part = fields.number(part_name, default.get("rotary_pct", 1.0))
    flat = "rope_scaling" if fields.data.get("rope_scaling") is not None else "rope_parameters"
    scaling = fields.inner(flat, {})
    # Phi-3 keeps the length before stretching outside of the rope fields.
    original = fields.integer("original_max_position_embeddings", positions)
    if model_type == "gemma3_text":
        local = fields.number("rope_local_base_freq", 10000.0)
        if flat == "rope_parameters" and scaling.data:
            if not scaling.data.keys() <= {FULL, SLIDING}:
                raise fields.error(flat, f"one object for {FULL} and one for {SLIDING}")
            pair = [_rope(scaling.inner(t, {}), base, original) for t, base in ((FULL, theta), (SLIDING, local))]
        else:
            pair = [_rope(scaling, theta, original), RopeConfig(local)]
        return {"ropes": tuple(pair), "layer_ropes": tuple(int(t == SLIDING) for t in types)}
    if FULL in scaling.data or SLIDING in scaling.data:
        kinds = sorted(set(types))
        ropes = tuple(_rope(scaling.inner(t), theta, original) for t in kinds)
        return {"ropes": ropes, "layer_ropes": tuple(kinds.index(t) for t in types) if len(kinds) > 1 else ()}
    part = scaling.number("partial_rotary_factor", part)
    if part > 1:
        raise scaling.error("partial_rotary_factor", "at most 1")
    rotary = int(head_dim * part)
    if rotary < 2 or rotary % 2:
        raise fields.error(part_name, f"an even number of rotated channels of the {head_dim}, not {rotary}")
    out: dict[str, Any] = {"ropes": (_rope(scaling, theta, original),)}
    if rotary != head_dim:
        out["rotary_dim"] = rotary
    if model_type == "smollm3":
        rotated = _rotated(fields, len(types))
        if not all(rotated):
            out["ropes"] += (RopeConfig(kind="none"),)
            out["layer_ropes"] = tuple(1 - r for r in rotated)
    return out


def _rope(fields: Fields, theta: float, original: int) -> RopeConfig:
    """One rotary embedding from ``rope_scaling`` or (one layer type of) ``rope_parameters``."""
    key = "rope_type" if "rope_type" in fields.data else "type"
    kind = fields.text(key, "default", allowed=("default", "linear", "llama3", "yarn"))
    theta = fields.number("rope_theta", theta)
    if kind == "default":
        return RopeConfig(theta)
    factor = fields.number("factor")
    if kind == "linear":
        return RopeConfig(theta, kind, factor)
    if kind == "llama3":
        return RopeConfig(
            theta,
            kind,
            factor,
            low_freq_factor=fields.number("low_freq_factor"),
            high_freq_factor=fields.number("high_freq_factor"),
            original_max_positions=fields.integer("original_max_position_embeddings", original),
        )
    fields.refuse("truncate", True)
    attention = fields.number("attention_factor", 0.0)
    both = fields.number("mscale", 0.0, above=None), fields.number("mscale_all_dim", 0.0, above=None)
    if not attention and all(both):
        over, under = (0.1 * m * math.log(max(factor, 1.0)) + 1.0 for m in both)
        attention = over / under
    return RopeConfig(
        theta,
        kind,
        factor,
        original_max_positions=fields.integer("original_max_position_embeddings", original),
        beta_fast=fields.number("beta_fast", 32.0),
        beta_slow=fields.number("beta_slow", 1.0),
        attention_factor=attention,
    )


def _decoder_to_hf(cfg: DecoderConfig) -> dict[str, Any]:
    family = FAMILIES[cfg.model_type]
    name = GPT2_NAMES if cfg.model_type == "gpt2" else {}
    sizes = {
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.hidden_size,
        "num_hidden_layers": cfg.num_layers,
        "num_attention_heads": cfg.num_heads,
        "intermediate_size": cfg.intermediate_size,
        "max_position_embeddings": cfg.max_positions,
    }
    eos = cfg.eos_token_ids
    out: dict[str, Any] = {
        "model_type": cfg.model_type,
        "architectures": [family.architecture],
        **{name.get(key, key): value for key, value in sizes.items()},
        family.eps: cfg.norm_eps,
        family.activation: encoders.activation_name(cfg.activation, family.defaults.get(family.activation)),
        "tie_word_embeddings": cfg.tie_embeddings,
        "bos_token_id": cfg.bos_token_id,
        "eos_token_id": None if not eos else eos[0] if len(eos) == 1 else list(eos),
        "pad_token_id": cfg.pad_token_id,
        **{bias: getattr(cfg, bias) for bias in family.optional_biases},
    }
    if cfg.model_type == "gpt2":
        return {**out, "scale_attn_weights": cfg.attention_scale is None}
    if cfg.model_type == "gpt_neox":
        out["use_parallel_residual"] = cfg.parallel_residual
    else:
        out |= {"num_key_value_heads": cfg.num_kv_heads, "head_dim": cfg.head_dim}
    if family.activation == "hidden_activation":
        scalar = cfg.head_dim if cfg.attention_scale is None else cfg.attention_scale**-2
        out["query_pre_attn_scalar"] = round(scalar) if math.isclose(scalar, round(scalar), rel_tol=1e-12) else scalar
        out |= {"attn_logit_softcapping": cfg.attention_softcap, "final_logit_softcapping": cfg.logit_softcap}
    return {**out, **_windows_to_hf(cfg, family), **_ropes_to_hf(cfg)}


def _windows_to_hf(cfg: DecoderConfig, family: Family) -> dict[str, Any]:
    if family.windows == "none":
        return {}
    window = max(cfg.layer_windows, default=0) or None
    if family.windows == "all":
        return {"sliding_window": window}
    windows = cfg.layer_windows or (0,) * cfg.num_layers
    types = [SLIDING if w else FULL for w in windows]
    if cfg.model_type == "gemma3_text":  # there a layer's type also picks its rope
        types = [SLIDING if rope else FULL for rope in cfg.layer_ropes]
    out: dict[str, Any] = {"sliding_window": window, "layer_types": types}
    if family.activation != "hidden_activation":
        out["use_sliding_window"] = window is not None
    return out


def _ropes_to_hf(cfg: DecoderConfig) -> dict[str, Any]:
    first, *others = cfg.ropes
    part = 1.0 if cfg.rotary_dim is None else cfg.rotary_dim / cfg.head_dim
    if cfg.model_type == "gpt_neox":
        out: dict[str, Any] = {"rotary_emb_base": first.theta, "rotary_pct": part}
    else:
        out = {"rope_theta": first.theta}
        if part != 1.0:
            out["partial_rotary_factor"] = part
    if cfg.model_type == "smollm3":
        out["no_rope_layers"] = [1 - rope for rope in cfg.layer_ropes] or [1] * cfg.num_layers
    if cfg.model_type == "gemma3_text":
        local = others[0] if others else RopeConfig()
        if local.kind != "default":
            return {"rope_parameters": {FULL: _rope_to_hf(first), SLIDING: _rope_to_hf(local)}}
        out["rope_local_base_freq"] = local.theta
    elif cfg.layer_ropes and cfg.model_type != "smollm3":
        types = [SLIDING if w else FULL for w in cfg.layer_windows]
        named = dict(zip(types, (cfg.ropes[i] for i in cfg.layer_ropes), strict=False))
        return {**out, "rope_parameters": {t: _rope_to_hf(rope) for t, rope in named.items()}}
    if first.kind != "default":
        out["rope_scaling"] = {k: v for k, v in _rope_to_hf(first).items() if k != "rope_theta"}
        if cfg.model_type == "phi3" and first.original_max_positions:
            out["original_max_position_embeddings"] = first.original_max_positions
    return out


def _rope_to_hf(rope: RopeConfig) -> dict[str, Any]:
    out: dict[str, Any] = {"rope_theta": rope.theta, "rope_type": rope.kind}
    if rope.kind != "default":
        out["factor"] = rope.factor
    if rope.kind == "llama3":
        out |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        out |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow}
        if rope.attention_factor:
            out["attention_factor"] = rope.attention_factor
    if rope.kind in ("llama3", "yarn"):
        out["original_max_position_embeddings"] = rope.original_max_positions
    return out
