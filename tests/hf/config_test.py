"""config.json in both layouts, there and back, and what is refused."""

import dataclasses
import json
import math

import pytest

from jaxmeth.hf import config_from_hf, config_to_hf
from jaxmeth.models.config import DecoderConfig
from jaxmeth.models.layers import RopeConfig
from jaxmeth.types import ConfigError

DECODERS = (
    "llama", "llama3_rope", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "gpt_neox", "olmo2", "smollm3", "phi3",
    "gpt2",
)  # fmt: skip
ALL = (*DECODERS, "bert", "clip", "siglip")


@pytest.fixture
def read(golden):
    def read(name):
        return json.loads((golden / "hf" / name / "config.json").read_text())

    return read


def without(data, *names):
    return {k: v for k, v in data.items() if k not in names}


@pytest.mark.parametrize("name", ALL)
def test_there_and_back(read, name):
    cfg = config_from_hf(read(name))
    written = config_to_hf(cfg)
    assert config_from_hf(json.loads(json.dumps(written))) == cfg
    assert written["model_type"] == read(name)["model_type"]
    assert hash(cfg) == hash(config_from_hf(read(name)))  # static under jit


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3", "olmo2", "phi3", "smollm3"])
def test_both_rope_layouts_are_read_alike(read, name):
    data = read(name)
    rope = data["rope_parameters"]
    old = without(data, "rope_parameters") | {"rope_theta": rope["rope_theta"], "rope_scaling": None}
    assert config_from_hf(old) == config_from_hf(data)


def test_llama3_rope_in_both_layouts(read):
    data = read("llama3_rope")
    rope = data["rope_scaling"] | {"rope_theta": data["rope_theta"]}
    new = without(data, "rope_scaling", "rope_theta") | {"rope_parameters": rope}
    assert config_from_hf(new) == config_from_hf(data)
    assert config_from_hf(data).ropes == (
        RopeConfig(5e5, "llama3", 8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=64),
    )


def test_gemma3_in_both_layouts(read):
    data = read("gemma3")
    old = without(data, "rope_parameters", "layer_types", "_sliding_window_pattern") | {
        "rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": None, "sliding_window_pattern": 6,
    }  # fmt: skip
    assert config_from_hf(old) == config_from_hf(data)
    cfg = config_from_hf(data)
    assert cfg.layer_windows == (8, 8, 8, 8, 8, 0, 8)
    assert [cfg.ropes[i].theta for i in cfg.layer_ropes] == [1e4] * 5 + [1e6, 1e4]
    assert cfg.attention_scale == 24**-0.5
    assert cfg.embed_scale == math.sqrt(32)


def test_a_stretched_gemma3_stretches_only_its_full_layers(read):
    data = without(read("gemma3"), "rope_parameters") | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    cfg = config_from_hf(data)
    assert cfg.ropes == (RopeConfig(1e6, "linear", 8.0), RopeConfig(1e4))
    assert config_from_hf(config_to_hf(cfg)) == cfg


def test_the_text_part_of_a_multimodal_gemma3(read):
    text = without(read("gemma3"), "tie_word_embeddings")
    outer = {"model_type": "gemma3", "text_config": text, "vision_config": {}, "eos_token_id": [1, 106]}
    cfg = config_from_hf(outer)
    assert cfg == dataclasses.replace(config_from_hf(read("gemma3")), eos_token_ids=(2,))
    # Published ones leave out whatever equals the class defaults.
    small = {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34, "intermediate_size": 10240,
             "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}  # fmt: skip
    cfg = config_from_hf(outer | {"text_config": small})
    assert (cfg.vocab_size, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim) == (262208, 8, 4, 256)
    assert cfg.eos_token_ids == (1, 106)
    assert cfg.ropes[0] == RopeConfig(1e6, "linear", 8.0)


def test_windows_by_layer_number_and_by_type(read):
    data = read("qwen2") | {"num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 8}
    by_number = config_from_hf(data | {"max_window_layers": 3})
    types = ["full_attention"] * 3 + ["sliding_attention"]
    assert by_number.layer_windows == (0, 0, 0, 8)
    assert config_from_hf(data | {"layer_types": types}) == by_number
    assert config_from_hf(data | {"layer_types": types, "use_sliding_window": False}).layer_windows == ()
    assert config_from_hf(config_to_hf(by_number)) == by_number


def test_layers_without_rope(read):
    cfg = config_from_hf(without(read("smollm3"), "no_rope_layers"))
    assert cfg == config_from_hf(read("smollm3"))
    assert [cfg.ropes[i].kind for i in cfg.layer_ropes] == ["default"] * 3 + ["none"]


def test_yarn(read):
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    cfg = config_from_hf(without(read("qwen2"), "rope_scaling") | {"rope_scaling": scaling})
    assert cfg.ropes == (RopeConfig(1e4, "yarn", 4.0, original_max_positions=64),)
    assert config_from_hf(config_to_hf(cfg)) == cfg
    both = config_from_hf(read("qwen2") | {"rope_scaling": scaling | {"mscale": 1.0, "mscale_all_dim": 0.5}})
    assert both.ropes[0].attention_factor == pytest.approx((0.1 * math.log(4) + 1) / (0.05 * math.log(4) + 1))


def test_an_absent_null_and_given_field_differ(read):
    data = read("gemma2")
    assert config_from_hf(data).attention_softcap == 3.0
    assert config_from_hf(data | {"attn_logit_softcapping": None}).attention_softcap is None
    assert config_from_hf(without(data, "attn_logit_softcapping")).attention_softcap == 50.0
    assert config_from_hf(without(read("mistral"), "sliding_window")).layer_windows == (4096, 4096)
    assert config_from_hf(read("mistral") | {"sliding_window": None}).layer_windows == ()
    assert config_from_hf(without(read("llama"), "num_key_value_heads")).num_kv_heads == 4
    assert config_from_hf(without(read("llama"), "tie_word_embeddings")).tie_embeddings is False
    assert config_from_hf(without(read("gemma2"), "tie_word_embeddings")).tie_embeddings is True


BAD = [
    ("llama", {"model_type": "mamba"}, "model_type: found 'mamba'"),
    ("llama", {"model_type": None}, "model_type"),
    ("llama", {"vocab_size": None}, "vocab_size"),
    ("llama", {"hidden_size": "32"}, "hidden_size: found '32'"),
    ("llama", {"hidden_size": 32.0}, "hidden_size"),
    ("llama", {"num_hidden_layers": True}, "num_hidden_layers"),
    ("llama", {"num_hidden_layers": 10**9}, "num_hidden_layers"),
    ("llama", {"num_attention_heads": 0}, "num_attention_heads"),
    ("llama", {"num_attention_heads": 5, "head_dim": None}, "num_attention_heads"),
    ("llama", {"num_key_value_heads": 3}, "num_key_value_heads"),
    ("llama", {"rms_norm_eps": "1e-6"}, "rms_norm_eps"),
    ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    ("llama", {"hidden_act": "mish"}, "hidden_act: found 'mish'"),
    ("llama", {"tie_word_embeddings": 1}, "tie_word_embeddings"),
    ("llama", {"eos_token_id": "2"}, "eos_token_id"),
    ("llama", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    ("llama", {"rope_parameters": {"rope_type": "wavelet"}}, "rope_parameters.rope_type: found 'wavelet'"),
    ("llama", {"rope_scaling": {"type": "longrope", "factor": 2.0}}, "rope_scaling.type: found 'longrope'"),
    ("llama", {"rope_scaling": {"type": "linear"}}, "rope_scaling.factor"),
    ("llama", {"rope_scaling": "linear"}, "rope_scaling"),
    ("llama", {"rope_parameters": {"rope_theta": -1.0}}, "rope_parameters.rope_theta"),
    ("llama3_rope", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling.low_freq_factor"),
    ("qwen3", {"layer_types": ["full_attention"]}, "layer_types"),
    ("qwen3", {"layer_types": ["full_attention", "chunked_attention"]}, "layer_types"),
    ("smollm3", {"no_rope_layers": [1, 1, 1, 2]}, "no_rope_layers"),
    ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ("gemma3", {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}, "rope_parameters"),
    ("gpt_neox", {"rotary_pct": 0.1}, "rotary_pct"),
    ("gpt2", {"n_embd": None}, "n_embd"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
    ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
    ("clip", {"text_config": None}, "text_config"),
    ("clip", {"vision_config": {"image_size": "16"}}, "vision_config.image_size"),
]


@pytest.mark.parametrize(
    ("name", "change", "named"), BAD, ids=[f"{n}-{next(iter(c))}-{i}" for i, (n, c, _) in enumerate(BAD)]
)
def test_refused_with_the_field(read, name, change, named):
    with pytest.raises(ConfigError) as error:
        config_from_hf(read(name) | change, "folder/config.json")
    assert str(error.value).startswith("folder/config.json: ")
    assert named in str(error.value)
    assert "\n" not in str(error.value)


def test_huge_values_are_not_repeated_whole(read):
    with pytest.raises(ConfigError) as error:
        config_from_hf(read("llama") | {"hidden_act": "x" * 10**6})
    assert len(str(error.value)) < 1000


def test_remote_code_is_ignored_with_a_note(read):
    with pytest.warns(UserWarning, match="auto_map"):
        cfg = config_from_hf(read("llama") | {"auto_map": {"AutoModel": "evil.py--Model"}, "trust_remote_code": True})
    assert cfg == config_from_hf(read("llama"))


def test_what_a_config_json_cannot_say_is_refused():
    cfg = DecoderConfig("llama", 96, 32, 2, 4, 2, 8, 48, 256, causal=False)
    with pytest.raises(ConfigError, match="causal"):
        config_to_hf(cfg)
    with pytest.raises(ConfigError, match="layer_windows"):
        config_to_hf(dataclasses.replace(cfg, causal=True, layer_windows=(0, 8)))
    with pytest.raises(ConfigError, match="model_type"):
        config_to_hf(dataclasses.replace(cfg, causal=True, model_type="mine"))
