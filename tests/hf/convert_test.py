"""Tensors there and back, logits against the reference, and tensors that do not fit."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxmeth import hf, models
from jaxmeth.hf import convert
from jaxmeth.hf.files import open_folder
from jaxmeth.types import WeightsError

DECODERS = (
    "llama", "llama3_rope", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "gpt_neox", "olmo2", "smollm3", "phi3",
    "gpt2",
)  # fmt: skip
ALL = (*DECODERS, "bert", "clip", "siglip")


@pytest.fixture
def edit(golden, tmp_path):
    """A copy of a golden folder with changed tensors and configuration."""

    def edit(name, change=lambda tensors: None, **config):
        folder = tmp_path / name
        folder.mkdir()
        stored = json.loads((golden / "hf" / name / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**stored, **config}))
        tensors = {}
        for file in sorted((golden / "hf" / name).glob("*.safetensors")):
            tensors |= load_file(file)
        change(tensors)
        save_file({k: np.array(v, order="C") for k, v in tensors.items()}, folder / "model.safetensors")
        return folder

    return edit


def same(a, b):
    """Names, types, shapes and bytes of two folders."""
    with open_folder(a) as x, open_folder(b) as y:
        assert x.tensors.keys() == y.tensors.keys()
        for name in x.tensors:
            one, two = x.read(name), y.read(name)
            assert (one.dtype, one.shape, one.tobytes()) == (two.dtype, two.shape, two.tobytes()), name
        return len(x.tensors)


def trees_equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.mark.parametrize("name", DECODERS)
def test_golden_logits_and_greedy_tokens(golden, name):
    cfg, params, _, _ = hf.load(golden / "hf" / name)
    with np.load(golden / "hf" / name / "golden.npz") as want:
        mask = want["attention_mask"].astype(bool)
        out = models.apply(params, cfg, jnp.asarray(want["input_ids"]), mask=jnp.asarray(mask))
        logits = np.asarray(out.logits)[mask]
        reference = want["logits"][mask]
        assert np.abs(logits - reference).max() <= 2e-5 * np.abs(reference).max()
        made = models.generate(
            params, cfg, jnp.asarray(want["input_ids"]), jnp.asarray(mask), key=jax.random.key(0), max_new_tokens=12
        )
        np.testing.assert_array_equal(np.asarray(made.tokens), want["greedy"])


@pytest.mark.parametrize("name", ALL)
def test_there_and_back_byte_equal(golden, tmp_path, name):
    first = hf.load(golden / "hf" / name)
    hf.save(tmp_path / "out", first)
    assert same(golden / "hf" / name, tmp_path / "out") > 10
    second = hf.load(tmp_path / "out")
    assert second.cfg == first.cfg
    trees_equal(first.params, second.params)


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "gpt2", "phi3", "siglip"])
@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_there_and_back_in_other_types(edit, tmp_path, name, kind):
    def narrow(tensors):
        for key in tensors:
            tensors[key] = tensors[key].astype(ml_dtypes.bfloat16 if kind == "bfloat16" else kind)

    folder = edit(name, narrow)
    checkpoint = hf.load(folder)
    assert {leaf.dtype for leaf in jax.tree.leaves(checkpoint.params)} == {jnp.dtype(kind)}
    hf.save(tmp_path / "out", checkpoint)
    same(folder, tmp_path / "out")


def test_the_tables_cover_every_leaf(golden):
    for name in ALL:
        cfg = hf.load(golden / "hf" / name).cfg
        covered = [path for job in convert.jobs(cfg) for path in job.entry.paths]
        tree = models.decoder if name in DECODERS else models.encoder
        assert sorted(covered) == sorted(convert.flatten(tree.abstract_params(cfg)))


def test_optional_biases(golden, tmp_path):
    cfg = dataclasses.replace(
        hf.load(golden / "hf" / "llama").cfg, attention_bias=True, attention_out_bias=True, mlp_bias=True
    )
    params = jax.tree.map(
        lambda x: jnp.arange(x.size, dtype=x.dtype).reshape(x.shape), models.decoder.abstract_params(cfg)
    )
    hf.save(tmp_path, hf.Checkpoint(cfg, params, None, None))
    again = hf.load(tmp_path)
    assert again.cfg == cfg
    trees_equal(again.params, params)


def test_cast(golden):
    stored = hf.load(golden / "hf" / "phi3").params
    cast = hf.load(golden / "hf" / "phi3", dtype=jnp.bfloat16).params
    trees_equal(cast, jax.tree.map(lambda x: x.astype(jnp.bfloat16), stored))


def test_float64_is_narrowed_with_a_warning_or_kept(edit):
    def widen(tensors):
        for key in tensors:
            tensors[key] = tensors[key].astype(np.float64) + 1e-12

    folder = edit("llama", widen)
    with pytest.warns(UserWarning, match="float64"):
        params = hf.load(folder).params
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    with jax.enable_x64(True):
        params = hf.load(folder).params
        assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float64")}


def test_layers_of_different_types_take_the_wider_one(edit):
    def mix(tensors):
        tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].astype(
            ml_dtypes.bfloat16
        )

    params = hf.load(edit("llama", mix)).params
    assert params["layers"]["mlp"]["up"]["weight"].dtype == jnp.float32


@pytest.mark.parametrize(
    ("name", "remove", "add"),
    [
        ("gpt2", "transformer.", ""),
        ("gpt_neox", "gpt_neox.", ""),
        ("qwen2", "model.", ""),
        ("bert", "", "bert."),
        ("gemma3", "model.", "language_model.model."),
        ("gemma3", "model.", "model.language_model."),
        ("llama", "", "language_model."),
    ],
)
def test_prefixes_of_a_bare_or_wrapped_model(golden, edit, name, remove, add):
    def rename(tensors):
        for key in list(tensors):
            if key.startswith(remove):
                tensors[add + key.removeprefix(remove)] = tensors.pop(key)

    trees_equal(hf.load(edit(name, rename)).params, hf.load(golden / "hf" / name).params)


@pytest.mark.parametrize(
    ("name", "buffer"),
    [
        ("llama", "model.layers.0.self_attn.rotary_emb.inv_freq"),
        ("gpt2", "transformer.h.0.attn.bias"),
        ("gpt2", "transformer.h.1.attn.masked_bias"),
        ("gpt_neox", "gpt_neox.layers.0.attention.masked_bias"),
        ("bert", "embeddings.position_ids"),
        ("clip", "text_model.embeddings.position_ids"),
    ],
)
def test_stored_constants_are_left_out_silently(golden, edit, name, buffer):
    folder = edit(name, lambda tensors: tensors.update({buffer: np.arange(4)}))
    trees_equal(hf.load(folder).params, hf.load(golden / "hf" / name).params)


def test_the_image_half_of_gemma3_is_left_out_with_a_warning(golden, edit):
    def wrap(tensors):
        for key in list(tensors):
            tensors["language_model." + key] = tensors.pop(key)
        tensors["vision_tower.vision_model.post_layernorm.weight"] = np.ones(3, np.float32)
        tensors["multi_modal_projector.mm_soft_emb_norm.weight"] = np.ones(3, np.float32)

    folder = edit("gemma3", wrap)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": config}))
    with pytest.warns(UserWarning, match="2 tensors of the image model"):
        params = hf.load(folder).params
    trees_equal(params, hf.load(golden / "hf" / "gemma3").params)


def test_bert_without_pooler(edit, tmp_path):
    def drop(tensors):
        del tensors["pooler.dense.weight"], tensors["pooler.dense.bias"]

    folder = edit("bert", drop)
    checkpoint = hf.load(folder)
    assert not checkpoint.cfg.pooler
    hf.save(tmp_path / "out", checkpoint)
    same(folder, tmp_path / "out")


def test_missing_and_unexpected_are_all_listed(edit):
    def change(tensors):
        del tensors["model.norm.weight"], tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.0.self_attn.q_proj.lora_A"] = np.zeros((2, 2), np.float32)
        tensors["extra"] = np.zeros(1, np.float32)

    folder = edit("llama", change)
    with pytest.raises(WeightsError) as error:
        hf.load(folder)
    for name in ("model.norm.weight", "model.layers.1.mlp.up_proj.weight", "q_proj.lora_A", "'extra'"):
        assert name in str(error.value)
    with pytest.raises(WeightsError, match="missing tensors \\(2\\)"):  # nothing is invented, strict or not
        hf.load(folder, strict=False)


def test_unexpected_tensors_are_warned_of_when_not_strict(golden, edit):
    folder = edit("llama", lambda tensors: tensors.update(extra=np.zeros(1, np.float32)))
    with pytest.raises(WeightsError, match="unexpected tensors \\(1\\): 'extra'"):
        hf.load(folder)
    with pytest.warns(UserWarning, match="unexpected tensors \\(1\\): 'extra'"):
        params = hf.load(folder, strict=False).params
    trees_equal(params, hf.load(golden / "hf" / "llama").params)


@pytest.mark.parametrize(
    ("name", "tensor", "change", "hint"),
    [
        ("llama", "model.layers.1.mlp.up_proj.weight", lambda w: w.T, "transposed"),
        ("gpt2", "transformer.h.0.mlp.c_fc.weight", lambda w: w.T, "transposed"),
        ("llama", "model.layers.0.self_attn.k_proj.weight", lambda w: w[:8], "key-value heads"),
        ("phi3", "model.layers.0.self_attn.qkv_proj.weight", lambda w: w[:48], "key-value heads"),
        ("gpt_neox", "gpt_neox.layers.0.attention.query_key_value.bias", lambda w: w[:48], "heads"),
        ("llama", "model.embed_tokens.weight", lambda w: w[:95], ""),
        ("clip", "vision_model.embeddings.patch_embedding.weight", lambda w: w[:, :1], ""),
    ],
)
def test_another_shape_names_tensor_expected_and_found(edit, name, tensor, change, hint):
    shapes = []

    def apply(tensors):
        shapes.append(tensors[tensor].shape)
        tensors[tensor] = change(tensors[tensor])
        shapes.append(tensors[tensor].shape)

    folder = edit(name, apply)
    with pytest.raises(WeightsError) as error:
        hf.load(folder)
    expected, found = shapes
    assert f"tensor {tensor!r}: found shape {found}, expected {expected}" in str(error.value)
    assert hint in str(error.value)
    assert "model.safetensors" in str(error.value)


def test_quantised_integers_are_not_taken_for_weights(edit):
    def change(tensors):
        tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].astype(np.int8)

    with pytest.raises(WeightsError, match=r"up_proj\.weight': found type int8"):
        hf.load(edit("llama", change))


def test_tied_with_an_equal_head(golden, edit):
    folder = edit("qwen2", lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].copy()}))
    checkpoint = hf.load(folder)
    assert checkpoint.cfg.tie_embeddings
    trees_equal(checkpoint.params, hf.load(golden / "hf" / "qwen2").params)


def test_tied_with_another_head_takes_the_stored_one(edit, tmp_path):
    folder = edit("qwen2", lambda t: t.update({"lm_head.weight": -t["model.embed_tokens.weight"]}))
    with pytest.warns(UserWarning, match="tie_word_embeddings: found true, but 'lm_head.weight' differs"):
        checkpoint = hf.load(folder)
    assert not checkpoint.cfg.tie_embeddings
    np.testing.assert_array_equal(
        checkpoint.params["head"]["weight"], -np.asarray(checkpoint.params["embed"]["embedding"])
    )
    hf.save(tmp_path / "out", checkpoint)
    same(folder, tmp_path / "out")


def test_untied_without_a_head_is_missing_a_tensor(edit):
    with pytest.raises(WeightsError, match=r"missing tensors \(1\): 'lm_head.weight'"):
        hf.load(edit("llama", lambda t: t.pop("lm_head.weight")))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_not_finite_is_warned_of_by_name_or_refused(edit, value):
    def change(tensors):
        for name in ("model.layers.1.mlp.down_proj.weight", "model.norm.weight"):
            tensors[name].reshape(-1)[3] = value

    folder = edit("llama", change)
    with pytest.warns(
        UserWarning, match=r"tensors \(2\): 'model\.norm\.weight', 'model\.layers\.1\.mlp\.down_proj\.weight'"
    ):
        params = hf.load(folder).params
    np.testing.assert_array_equal(np.asarray(params["norm"]["scale"])[3], np.float32(value))
    with pytest.raises(WeightsError, match=r"tensor 'model.*NaN or infinite"):
        hf.load(folder, strict_finite=True)


def test_large_finite_numbers_are_finite(edit):
    def change(tensors):
        tensors["model.norm.weight"][:] = 3e38  # their sum overflows

    hf.load(edit("llama", change), strict_finite=True)


def test_every_tensor_is_read_once_and_none_before_the_checks(golden, edit):
    reads = []

    def watched(folder):
        weights = open_folder(folder)
        real = weights.read
        weights.read = lambda name: (reads.append(name), real(name))[1]
        return weights

    cfg = hf.load(golden / "hf" / "phi3").cfg
    with watched(golden / "hf" / "phi3") as weights:
        convert.params_from_hf(cfg, weights)
        assert sorted(reads) == sorted(weights.tensors)
    reads.clear()
    folder = edit("phi3", lambda t: t.update({"model.norm.weight": np.zeros(3, np.float32)}))
    with watched(folder) as weights, pytest.raises(WeightsError):
        convert.params_from_hf(cfg, weights)
    assert reads == []


def test_saving_what_does_not_fit(golden, tmp_path):
    cfg, params, _, _ = hf.load(golden / "hf" / "llama")

    def broken(**changes):
        return hf.Checkpoint(cfg, {**params, **changes}, None, None)

    for checkpoint, message in (
        (broken(norm={}), "missing leaf norm.scale"),
        (broken(more={"x": params["norm"]["scale"]}), "unexpected leaf more.x"),
        (broken(norm={"scale": params["norm"]["scale"][:3]}), "leaf norm.scale: found shape"),
        (broken(norm={"scale": (1, 2)}), "leaf norm.scale: found tuple"),
    ):
        with pytest.raises(WeightsError, match=message):
            hf.save(tmp_path / "out", checkpoint)
    assert not (tmp_path / "out").exists()


def test_transposed_and_strided_leaves_are_saved_right(golden, tmp_path):
    """A numpy view with another memory order has the same values, so it gives the same file."""
    cfg, params, _, _ = hf.load(golden / "hf" / "llama")
    turned = jax.tree.map(lambda x: np.asfortranarray(np.asarray(x)), params)
    hf.save(tmp_path, hf.Checkpoint(cfg, turned, None, None))
    same(golden / "hf" / "llama", tmp_path)


def test_copy_in_strips_equals_a_plain_copy():
    rng = np.random.default_rng(0)
    for shape in ((1, 1), (5, 37), (64, 16), (33, 100)):
        source = rng.normal(size=shape[::-1]).astype(np.float32)
        to = np.zeros(shape, np.float32)
        convert._copy(to, source.T)
        np.testing.assert_array_equal(to, source.T)
        back = np.zeros(shape[::-1], np.float32)
        convert._copy(back.T, to)
        np.testing.assert_array_equal(back, source)
        narrow = np.zeros(shape, ml_dtypes.bfloat16)
        convert._copy(narrow, source.T)
        np.testing.assert_array_equal(narrow, source.T.astype(ml_dtypes.bfloat16))
