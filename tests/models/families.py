"""Small configurations that between them use every feature of the decoder, for the tests beside this file."""

import math

from jaxmeth.models import DecoderConfig, RopeConfig

_SIZES = {
    "vocab_size": 61, "hidden_size": 24, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8,
    "intermediate_size": 40, "max_positions": 64,
}  # fmt: skip

FAMILIES = {
    "llama": DecoderConfig("llama", **_SIZES),
    "qwen3": DecoderConfig("qwen3", **_SIZES, qk_norm="head", tie_embeddings=True),
    "mistral": DecoderConfig("mistral", **_SIZES, layer_windows=(5, 5, 5)),
    "gemma": DecoderConfig(
        "gemma3_text", **_SIZES, norm_offset=1.0, norm_order="sandwich", qk_norm="head", activation="gelu_tanh",
        ropes=(RopeConfig(1e4), RopeConfig(1e6)), layer_ropes=(0, 1, 0), layer_windows=(4, 0, 4),
        attention_scale=0.2, attention_softcap=3.0, logit_softcap=5.0, embed_scale=math.sqrt(24), tie_embeddings=True,
    ),
    "gpt_neox": DecoderConfig(
        "gpt_neox", **{**_SIZES, "num_kv_heads": 4}, norm="layernorm", parallel_residual=True, activation="gelu",
        gated_mlp=False, attention_bias=True, attention_out_bias=True, mlp_bias=True, rotary_dim=4,
    ),
    "gpt2": DecoderConfig(
        "gpt2", **{**_SIZES, "num_kv_heads": 4}, norm="layernorm", activation="gelu_tanh", gated_mlp=False,
        attention_bias=True, attention_out_bias=True, mlp_bias=True, ropes=(RopeConfig(kind="none"),),
        learned_positions=True, tie_embeddings=True,
    ),
    "olmo2": DecoderConfig("olmo2", **_SIZES, norm_order="post", qk_norm="full"),
    "smollm3": DecoderConfig("smollm3", **_SIZES, ropes=(RopeConfig(), RopeConfig(kind="none")), layer_ropes=(0, 0, 1)),
}  # fmt: skip
