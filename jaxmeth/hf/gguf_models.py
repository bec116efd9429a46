"""GGUF files as Hugging Face checkpoints: the configuration from the metadata, the tensors under Hugging Face names.

llama.cpp's converter renames tensors and changes some: it permutes the query and key rows of ``llama`` files (its
rotation pairs neighbouring channels) and transposes GPT-2's Conv1D weights. Both are undone here.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from jaxmeth.hf import convert
from jaxmeth.hf.config import config_from_hf
from jaxmeth.hf.files import TensorInfo, Weights, show
from jaxmeth.models.config import DecoderConfig
from jaxmeth.types import ConfigError, WeightsError

ARCHITECTURES = ("llama", "qwen2", "qwen3", "phi3", "gpt2")

# Hugging Face module -> GGUF module, {i} is the layer.
_LLAMA_LIKE = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.{i}.input_layernorm": "blk.{i}.attn_norm",
    "model.layers.{i}.post_attention_layernorm": "blk.{i}.ffn_norm",
    "model.layers.{i}.self_attn.q_proj": "blk.{i}.attn_q",
    "model.layers.{i}.self_attn.k_proj": "blk.{i}.attn_k",
    "model.layers.{i}.self_attn.v_proj": "blk.{i}.attn_v",
    "model.layers.{i}.self_attn.o_proj": "blk.{i}.attn_output",
    "model.layers.{i}.self_attn.q_norm": "blk.{i}.attn_q_norm",
    "model.layers.{i}.self_attn.k_norm": "blk.{i}.attn_k_norm",
    "model.layers.{i}.self_attn.qkv_proj": "blk.{i}.attn_qkv",
    "model.layers.{i}.mlp.gate_proj": "blk.{i}.ffn_gate",
    "model.layers.{i}.mlp.up_proj": "blk.{i}.ffn_up",
    "model.layers.{i}.mlp.gate_up_proj": "blk.{i}.ffn_up",
    "model.layers.{i}.mlp.down_proj": "blk.{i}.ffn_down",
}
_GPT2 = {
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
    "lm_head": "output",
    "transformer.h.{i}.ln_1": "blk.{i}.attn_norm",
    "transformer.h.{i}.ln_2": "blk.{i}.ffn_norm",
    "transformer.h.{i}.attn.c_attn": "blk.{i}.attn_qkv",
    "transformer.h.{i}.attn.c_proj": "blk.{i}.attn_output",
    "transformer.h.{i}.mlp.c_fc": "blk.{i}.ffn_up",
    "transformer.h.{i}.mlp.c_proj": "blk.{i}.ffn_down",
}
MODULES = {arch: _GPT2 if arch == "gpt2" else _LLAMA_LIKE for arch in ARCHITECTURES}


def config_from_gguf(metadata: dict[str, Any], tensors: dict[str, TensorInfo], source: str = "gguf") -> DecoderConfig:
    """The configuration that a GGUF file's metadata describes.

    Args:
      metadata: the key-value pairs.
      tensors: by GGUF name; the vocabulary size is the rows of ``token_embd.weight``, and without ``output.weight``
        the embeddings are tied.
      source: the file, for messages.

    Raises:
      ConfigError: an architecture outside ``ARCHITECTURES``, experts, scaled rotary frequencies that the metadata does
        not describe, or a missing or mistyped key.
    """
    arch = metadata.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise ConfigError(
            f"{source}: general.architecture: found {show(arch)}, expected one of {', '.join(ARCHITECTURES)}; convert "
            "another one from its Hugging Face folder"
        )
    get = _Keys(metadata, arch, source)
    get.refuse("expert_count", 0)
    for name in ("rope_freqs.weight", "rope_factors_long.weight"):
        if name in tensors:
            raise ConfigError(
                f"{source}: {name}: found scaled rotary frequencies, whose constants a GGUF file does not keep; load "
                "the Hugging Face folder"
            )
    data: dict[str, Any] = {
        "model_type": arch,
        "vocab_size": _vocabulary(tensors, source),
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }
    names = {
        "hidden_size": "embedding_length",
        "num_hidden_layers": "block_count",
        "num_attention_heads": "attention.head_count",
        "intermediate_size": "feed_forward_length",
        "max_position_embeddings": "context_length",
    }
    if arch == "gpt2":
        names = dict(zip(("n_embd", "n_layer", "n_head", "n_inner", "n_positions"), names.values(), strict=True))
        data["layer_norm_epsilon"] = get.decimal("attention.layer_norm_epsilon")
    else:
        data["rms_norm_eps"] = get.decimal("attention.layer_norm_rms_epsilon")
        data["rope_theta"] = get.decimal("rope.freq_base", 10000.0)
        data["num_key_value_heads"] = get.count("attention.head_count_kv", get.count("attention.head_count"))
        data |= _heads(get)
        data |= {"sliding_window": get("attention.sliding_window", None), "use_sliding_window": False}
        data |= _scaling(get)
    data |= {theirs: get.count(ours) for theirs, ours in names.items()}
    if "blk.0.attn_q.bias" in tensors and arch == "llama":
        data["attention_bias"] = True
    cfg = config_from_hf(data, source)
    assert isinstance(cfg, DecoderConfig)  # as all of ARCHITECTURES
    return cfg


class _Keys:
    """Metadata of one architecture, ``<arch>.<name>``."""

    def __init__(self, metadata: dict[str, Any], arch: str, source: str):
        self.metadata, self.arch, self.source = metadata, arch, source

    def __call__(self, name: str, *default: Any) -> Any:
        key = f"{self.arch}.{name}"
        if key in self.metadata:
            return self.metadata[key]
        if default:
            return default[0]
        raise ConfigError(f"{self.source}: {key}: found nothing, expected a value")

    def refuse(self, name: str, harmless: Any) -> None:
        if self(name, harmless) != harmless:
            raise ConfigError(f"{self.source}: {self.arch}.{name}: found {show(self(name))}, expected {harmless!r}")

    def count(self, name: str, *default: int) -> int:
        """A whole number of at least 1 (some architectures have one a layer)."""
        value = self(name, *default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{self.source}: {self.arch}.{name}: found {show(value)}, expected a whole number")
        return value

    def decimal(self, name: str, *default: Any) -> Any:
        """The shortest decimal that gives the stored float32: 1e-05, not 9.999999747378752e-06."""
        value = self(name, *default)
        return float(str(np.float32(value))) if isinstance(value, float) else value


def _vocabulary(tensors: dict[str, TensorInfo], source: str) -> int:
    if "token_embd.weight" not in tensors:
        raise WeightsError(f"{source}: missing tensor 'token_embd.weight'")
    return tensors["token_embd.weight"].shape[0]


def _heads(get: _Keys) -> dict[str, Any]:
    size, heads = get.count("embedding_length"), get.count("attention.head_count")
    head_dim = get.count("attention.key_length", max(1, size // heads))
    get.refuse("attention.value_length", head_dim)
    rotary = get.count("rope.dimension_count", head_dim)
    return {"head_dim": head_dim} | ({"partial_rotary_factor": rotary / head_dim} if rotary != head_dim else {})


def _scaling(get: _Keys) -> dict[str, Any]:
    kind = get("rope.scaling.type", "none")
    if kind == "none":
        return {}
    scaling = {"rope_type": kind, "factor": get.decimal("rope.scaling.factor")}
    original = get("rope.scaling.original_context_length", None)
    return {"rope_scaling": scaling | ({"original_max_position_embeddings": original} if original else {})}


def _unpermute(heads: int) -> Callable[[np.ndarray], np.ndarray]:
    """Rows [H, D/2, 2] of llama.cpp's rotation back to [H, 2, D/2] of the rotate-half one."""

    def undo(w: np.ndarray) -> np.ndarray:
        rows = w.reshape(heads, w.shape[0] // heads // 2, 2, *w.shape[1:])
        return rows.swapaxes(1, 2).reshape(w.shape)

    return undo


def rename(cfg: DecoderConfig, weights: Weights) -> Weights:
    """The same weights under Hugging Face names, as Hugging Face has them.

    Tensors that no table names keep their GGUF name, so that a later check lists them as unexpected.
    """
    modules = MODULES[cfg.model_type]
    tensors: dict[str, TensorInfo] = {}
    readers: dict[str, Callable[[], np.ndarray]] = {}
    left = dict(weights.tensors)
    wanted = [(job.entry.name, i, name) for job in convert.jobs(cfg) for i, name in enumerate(job.names)]
    # The head has no line in the jobs of a tied model, but old converters store it all the same.
    for template, i, name in [*wanted, ("lm_head.weight", 0, "lm_head.weight")]:
        module, _, kind = template.rpartition(".")
        gguf_name = f"{modules[module].format(i=i)}.{kind}"
        if gguf_name not in left:
            continue
        info = left.pop(gguf_name)
        undo = _undo(cfg, template)
        shape = info.shape[::-1] if undo is np.transpose else info.shape
        tensors[name] = info._replace(shape=shape)
        readers[name] = _reader(weights, gguf_name, undo)
    tensors |= left
    readers |= {name: _reader(weights, name, None) for name in left}
    return Weights(tensors, readers)


def _undo(cfg: DecoderConfig, template: str) -> Callable | None:
    if cfg.model_type == "llama" and ".self_attn.q_proj." in template:
        return _unpermute(cfg.num_heads)
    if cfg.model_type == "llama" and ".self_attn.k_proj." in template:
        return _unpermute(cfg.num_kv_heads)
    if cfg.model_type == "gpt2" and template.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
        return np.transpose
    return None


def _reader(weights: Weights, name: str, undo: Callable | None) -> Callable[[], np.ndarray]:
    return lambda: weights.read(name) if undo is None else undo(weights.read(name))
