"""What each decoder family fixes and what its optional ``config.json`` fields default to.

The defaults are those of the family's own configuration class in transformers, keyed by the Hugging Face field names.
"""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Family:
    """What one ``model_type`` fixes, and the defaults of its optional fields (``defaults``: Hugging Face names)."""

    architecture: str
    fixed: dict[str, Any] = dataclasses.field(default_factory=dict)
    optional_biases: tuple[str, ...] = ()
    windows: str = "none"  # "none" | "all" (one window everywhere) | "types" (layer_types)
    eps: str = "rms_norm_eps"
    activation: str = "hidden_act"
    defaults: dict[str, Any] = dataclasses.field(default_factory=dict)


_GEMMA: dict[str, Any] = {"norm_offset": 1.0, "norm_order": "sandwich"}
_GEMMA_DEFAULTS: dict[str, Any] = {
    "head_dim": 256,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256.0,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
_LLAMA_IDS = {"bos_token_id": 1, "eos_token_id": 2}

FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", optional_biases=("attention_bias", "mlp_bias"), defaults=_LLAMA_IDS),
    "mistral": Family(
        "MistralForCausalLM",
        windows="all",
        defaults=dict(_LLAMA_IDS, num_key_value_heads=8, sliding_window=4096),
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        fixed={"attention_bias": True},
        windows="types",
        defaults={"num_key_value_heads": 32, "sliding_window": 4096},
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        fixed={"qk_norm": "head"},
        optional_biases=("attention_bias",),
        windows="types",
        defaults={"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096},
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        fixed=_GEMMA,
        optional_biases=("attention_bias",),
        windows="types",
        activation="hidden_activation",
        defaults=dict(_GEMMA_DEFAULTS, attn_logit_softcapping=50.0, final_logit_softcapping=30.0),
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        fixed=dict(_GEMMA, qk_norm="head"),
        optional_biases=("attention_bias",),
        windows="types",
        activation="hidden_activation",
        defaults=dict(_GEMMA_DEFAULTS, rope_theta=1e6),
    ),
    "gpt_neox": Family(
        "GPTNeoXForCausalLM",
        fixed={"norm": "layernorm", "gated_mlp": False, "mlp_bias": True},
        optional_biases=("attention_bias",),
        eps="layer_norm_eps",
        defaults={
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-5,
            "attention_bias": True,
            "rotary_pct": 0.25,
            "bos_token_id": 0,
            "eos_token_id": 2,
        },
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        fixed={"norm_order": "post", "qk_norm": "full"},
        optional_biases=("attention_bias",),
        defaults={"rms_norm_eps": 1e-5, "pad_token_id": 1, "eos_token_id": 50279},
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        optional_biases=("attention_bias", "mlp_bias"),
        windows="types",
        defaults={
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
            "rope_theta": 2e6,
            "pad_token_id": 128004,
            "bos_token_id": 128000,
            "eos_token_id": 128001,
        },
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        windows="all",
        defaults={"rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 32000, "pad_token_id": 32000},
    ),
    "gpt2": Family(
        "GPT2LMHeadModel",
        fixed={
            "norm": "layernorm",
            "gated_mlp": False,
            "learned_positions": True,
            "attention_bias": True,
            "attention_out_bias": True,
            "mlp_bias": True,
        },
        eps="layer_norm_epsilon",
        activation="activation_function",
        defaults={
            "layer_norm_epsilon": 1e-5,
            "activation_function": "gelu_new",
            "tie_word_embeddings": True,
            "bos_token_id": 50256,
            "eos_token_id": 50256,
        },
    ),
}

# GPT-2 has its own words for the sizes.
GPT2_NAMES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
}

# Sizes that a nested ``text_config`` of Gemma 3 leaves out where they equal its class defaults.
GEMMA3_SIZES = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "max_position_embeddings": 131072,
}
