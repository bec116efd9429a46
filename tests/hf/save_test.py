"""What ``save`` writes besides the tensors, and where it refuses to write."""

import dataclasses
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxmeth import hf
from jaxmeth.types import ConfigError, WeightsError


@pytest.fixture
def llama(golden):
    return hf.load(golden / "hf" / "llama")


def test_the_folder_is_complete(llama, tmp_path):
    hf.save(tmp_path / "deep" / "out", llama)
    assert sorted(p.name for p in (tmp_path / "deep" / "out").iterdir()) == ["config.json", "model.safetensors"]
    config = json.loads((tmp_path / "deep" / "out" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["torch_dtype"] == "float32"
    assert hf.config_from_hf(config) == llama.cfg


def test_the_type_of_most_parameters_is_named(llama, tmp_path):
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.ndim > 1 else x, llama.params)
    hf.save(tmp_path, llama._replace(params=params))
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_shards(llama, tmp_path):
    hf.save(tmp_path, llama, max_shard_bytes=20_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2
    for file in files:
        for name in load_file(tmp_path / file):
            assert index["weight_map"][name] == file
    again = hf.load(tmp_path)
    for x, y in zip(jax.tree.leaves(again.params), jax.tree.leaves(llama.params), strict=True):
        np.testing.assert_array_equal(x, y)


def test_weights_are_never_overwritten(llama, tmp_path):
    hf.save(tmp_path, llama)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    other = dataclasses.replace(llama.cfg, eos_token_ids=(3,))
    for limit in (5e9, 20_000):
        with pytest.raises(WeightsError, match="already holds weights"):
            hf.save(tmp_path, llama._replace(cfg=other), max_shard_bytes=limit)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_places_that_cannot_be_written(llama, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(WeightsError, match="cannot be written"):
        hf.save(tmp_path / "file", llama)
    with pytest.raises(WeightsError, match="cannot be written"):
        hf.save(tmp_path / "file" / "below", llama)
    if os.geteuid() != 0:
        (tmp_path / "closed").mkdir(mode=0o500)
        with pytest.raises(WeightsError, match="cannot be written"):
            hf.save(tmp_path / "closed" / "out", llama)


def test_a_configuration_without_words_for_it(llama, tmp_path):
    with pytest.raises(ConfigError, match="causal"):
        hf.save(tmp_path / "out", llama._replace(cfg=dataclasses.replace(llama.cfg, causal=False)))
    assert not (tmp_path / "out").exists()
