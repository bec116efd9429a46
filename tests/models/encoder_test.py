"""BERT and the CLIP and SigLIP towers against the reference, and the algebra of masks, padding and pooling."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from jaxmeth import hf
from jaxmeth.models import encoder
from jaxmeth.models.towers import Bert, DualEncoder, unit
from jaxmeth.types import ConfigError

EOS = 7
BERT = encoder.BertConfig(40, 16, 2, 2, 24, 12)
CLIP = encoder.DualEncoderConfig(
    "clip",
    encoder.TextTowerConfig(40, 16, 2, 2, 24, 12, eos_token_id=EOS),
    encoder.VisionTowerConfig(16, 2, 4, 24, image_size=8, patch_size=4),
    projection_dim=10,
)
SIGLIP = dataclasses.replace(
    CLIP,
    model_type="siglip",
    text=dataclasses.replace(CLIP.text, activation="gelu_tanh"),
    projection_dim=16,
)
CONFIGS = {"bert": BERT, "clip": CLIP, "siglip": SIGLIP}
DUAL = [CLIP, SIGLIP]


@functools.cache
def leaves_of(cfg):
    leaves, tree = jax.tree_util.tree_flatten_with_path(encoder.abstract_params(cfg))
    rng = np.random.default_rng(1)
    centre = {"scale": 1.0, "logit_scale": 1.0}
    return tree, [
        jnp.asarray(centre.get(path[-1].key, 0.0) + rng.normal(0, 0.3, x.shape), x.dtype) for path, x in leaves
    ]


def params_of(cfg):
    """Parameters away from their neutral values, so that a dropped bias or a swapped norm shows."""
    return jax.tree.unflatten(*leaves_of(cfg))


def texts(rows=3, length=9, seed=0):
    """Random ids other than the end of text."""
    return np.random.default_rng(seed).integers(EOS + 1, 40, (rows, length)).astype(np.int32)


def pixels(rows=2, seed=0, size=8):
    return np.random.default_rng(seed).normal(size=(rows, 3, size, size)).astype(np.float32)


def text_vector(params, cfg, tokens, mask=None):
    out = encoder.encode_text(params, cfg, tokens, mask)
    return out.pooled_unit if isinstance(cfg, encoder.BertConfig) else out


def reference(folder):
    with np.load(folder / "golden.npz") as arrays:
        return dict(arrays)


def assert_golden(found, expected):
    np.testing.assert_allclose(np.asarray(found), expected, rtol=0, atol=2e-5 * np.abs(expected).max())


# The reference implementation


def test_bert_golden(golden):
    checkpoint, want = hf.load(golden / "hf" / "bert"), reference(golden / "hf" / "bert")
    out = encoder.encode_text(
        checkpoint.params,
        checkpoint.cfg,
        want["input_ids"],
        want["attention_mask"],
        token_types=want["token_type_ids"],
    )
    assert_golden(out.hidden, want["last_hidden_state"])
    assert_golden(out.pooled_unit, want["mean_pooled_unit"])


@pytest.mark.parametrize("name", ["clip", "siglip"])
def test_dual_encoder_golden(golden, name):
    (cfg, params, *_), want = hf.load(golden / "hf" / name), reference(golden / "hf" / name)
    text = encoder.encode_text(params, cfg, want["input_ids"], want.get("attention_mask"))
    image = encoder.encode_image(params, cfg, want["pixel_values"])
    assert_golden(text, want["text_embeds"])
    assert_golden(image, want["image_embeds"])
    assert_golden(encoder.similarity(params, cfg, text, image), want["logits_per_image"])


# The parameter tree


@pytest.mark.parametrize("cfg", CONFIGS.values(), ids=CONFIGS)
def test_tree_is_what_init_makes(cfg):
    params = encoder.init(cfg, jax.random.key(0))
    found = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    assert found == encoder.abstract_params(cfg)
    stacked = params["layers"] if cfg is BERT else params["text"]["layers"]
    assert stacked["mlp"]["up"]["weight"].shape == (2, 24, 16)
    # Layers start from different keys.
    assert not np.allclose(*stacked["attn"]["q"]["weight"])


def test_pooler_is_kept_but_never_applied():
    params = params_of(BERT)
    assert params["pooler"]["weight"].shape == (16, 16)
    without = dataclasses.replace(BERT, pooler=False)
    assert "pooler" not in encoder.abstract_params(without)
    bare = {name: leaf for name, leaf in params.items() if name != "pooler"}
    np.testing.assert_array_equal(
        text_vector(params, BERT, texts()), encoder.encode_text(bare, without, texts()).pooled_unit
    )


@pytest.mark.parametrize("cfg", DUAL, ids=["clip", "siglip"])
def test_every_leaf_of_a_dual_encoder_matters(cfg):
    def total(params):
        text = encoder.encode_text(params, cfg, texts())
        return jnp.sum(jnp.sin(encoder.similarity(params, cfg, text, encoder.encode_image(params, cfg, pixels()))))

    for path, grad in jax.tree_util.tree_leaves_with_path(jax.grad(total)(params_of(cfg))):
        assert np.all(np.isfinite(grad)), path
        # A bias on the keys shifts all scores of a query alike, which softmax does not see.
        if "['k']['bias']" not in jax.tree_util.keystr(path):
            assert np.abs(grad).max() > 1e-6, path


def test_modules_are_usable_by_other_flax_code():
    tokens, image = jnp.asarray(texts()), jnp.asarray(pixels())
    graph, state = nnx.split(Bert(BERT, nnx.Rngs(0)))
    mask = jnp.ones(tokens.shape, bool)
    direct = jax.jit(lambda s: nnx.merge(graph, s)(tokens, mask, jnp.zeros_like(tokens)))(state)
    found = encoder.encode_text(nnx.to_pure_dict(state), BERT, tokens)
    np.testing.assert_array_equal(direct.hidden, found.hidden)
    np.testing.assert_array_equal(direct.pooled_unit, found.pooled_unit)
    graph_clip, _ = nnx.split(nnx.eval_shape(lambda: DualEncoder(CLIP, nnx.Rngs(0))))
    direct = jax.jit(lambda p: unit(nnx.merge(graph_clip, p).vision(image)))(params_of(CLIP))
    np.testing.assert_array_equal(direct, encoder.encode_image(params_of(CLIP), CLIP, image))


class Halves(NamedTuple):
    """A weight in two parts: a linear weight that is not an array."""

    a: jax.Array
    b: jax.Array

    def matmul(self, x):
        return x @ self.a.T + x @ self.b.T


def test_a_weight_may_be_any_linear_weight():
    params = params_of(BERT)
    weight = params["layers"]["attn"]["q"]["weight"]
    edited = params_of(BERT)
    edited["layers"]["attn"]["q"]["weight"] = Halves(weight - 1, jnp.ones_like(weight))
    np.testing.assert_allclose(
        text_vector(edited, BERT, texts()), text_vector(params, BERT, texts()), rtol=0, atol=1e-5
    )


# Masks and padding


# Each example may compile anew, so a failure is reported as found rather than shrunk for minutes.
@settings(max_examples=8, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(
    cfg=st.sampled_from([BERT, CLIP]),
    left=st.booleans(),
    lengths=st.lists(st.integers(1, 6), min_size=3, max_size=3),
    seed=st.integers(0, 999),
)
def test_padding_on_either_side_changes_nothing(cfg, left, lengths, seed):
    params, tokens = params_of(cfg), texts(seed=seed)
    rng = np.random.default_rng(seed)
    mask = np.zeros(tokens.shape, bool)
    for row, n in enumerate(lengths):
        if left:
            mask[row, -n:] = True
        else:
            mask[row, :n] = True
    padded = text_vector(params, cfg, tokens, mask)
    # The end of text among the padding must not attract the pooling.
    other = np.where(mask, tokens, rng.choice([EOS, 0, 39], tokens.shape)).astype(np.int32)
    np.testing.assert_array_equal(padded, text_vector(params, cfg, other, mask))
    for row, n in enumerate(lengths):
        alone = text_vector(params, cfg, tokens[row : row + 1, mask[row]])
        assert alone.shape[0] == 1
        assert tokens[row, mask[row]].size == n
        np.testing.assert_allclose(padded[row : row + 1], alone, rtol=0, atol=2e-6)


@pytest.mark.parametrize("cfg", CONFIGS.values(), ids=CONFIGS)
def test_a_row_without_tokens_gives_zeros(cfg):
    params, tokens = params_of(cfg), texts()
    mask = np.ones(tokens.shape, bool)
    mask[1] = False
    out = text_vector(params, cfg, tokens, mask)
    np.testing.assert_array_equal(out[1], np.zeros_like(out[1]))
    np.testing.assert_allclose(np.linalg.norm(out[jnp.array([0, 2])], axis=1), 1, rtol=1e-6)
    if cfg is BERT:
        assert np.all(np.isfinite(encoder.encode_text(params, cfg, tokens, mask).hidden))
    grads = jax.grad(lambda p: jnp.sum(text_vector(p, cfg, tokens, mask)[1:]))(params)
    assert all(np.all(np.isfinite(g)) for g in jax.tree.leaves(grads))


@pytest.mark.parametrize("cfg", CONFIGS.values(), ids=CONFIGS)
def test_no_mask_is_all_true_and_integers_do(cfg):
    params, tokens = params_of(cfg), texts()
    for mask in (np.ones(tokens.shape, bool), np.ones(tokens.shape, np.int32), jnp.ones(tokens.shape, jnp.int32)):
        np.testing.assert_array_equal(
            text_vector(params, cfg, tokens), text_vector(params, cfg, jnp.asarray(tokens), mask)
        )


def test_bert_looks_both_ways_and_reads_segments():
    params, tokens = params_of(BERT), texts()
    before = encoder.encode_text(params, BERT, tokens).hidden
    changed = tokens.copy()
    changed[:, -1] = 0
    assert np.abs(encoder.encode_text(params, BERT, changed).hidden[:, 0] - before[:, 0]).max() > 1e-3
    same = encoder.encode_text(params, BERT, tokens, token_types=np.zeros_like(tokens)).hidden
    np.testing.assert_array_equal(before, same)
    assert (
        np.abs(encoder.encode_text(params, BERT, tokens, token_types=np.ones_like(tokens)).hidden - before).max() > 0.1
    )


# Pooling


def test_clip_pools_the_first_end_of_text_and_sees_nothing_after_it():
    params, tokens = params_of(CLIP), texts()
    tokens[:, 4] = EOS
    pooled = encoder.encode_text(params, CLIP, tokens)
    tail = tokens.copy()
    tail[:, 5:] = EOS
    np.testing.assert_array_equal(pooled, encoder.encode_text(params, CLIP, tail))
    np.testing.assert_allclose(pooled, encoder.encode_text(params, CLIP, tokens[:, :5]), rtol=0, atol=2e-6)
    head = tokens.copy()
    head[:, 0] = 0
    assert np.abs(encoder.encode_text(params, CLIP, head) - pooled).max() > 1e-3


def test_clip_without_end_of_text_pools_the_last_real_token():
    params, tokens = params_of(CLIP), EOS + 1 + np.arange(27, dtype=np.int32).reshape(3, 9)
    mask = np.arange(9)[None] < np.array([9, 4, 1])[:, None]
    found = encoder.encode_text(params, CLIP, tokens, mask)
    # Where the end of text is that very token, the ordinary rule pools the same slot.
    for row, last in enumerate((8, 3, 0)):
        cfg = dataclasses.replace(CLIP, text=dataclasses.replace(CLIP.text, eos_token_id=int(tokens[row, last])))
        want = encoder.encode_text(params, cfg, tokens, mask)[row]
        np.testing.assert_allclose(found[row], want, rtol=0, atol=2e-6)
    short = encoder.encode_text(params, CLIP, tokens[1:2, :4])
    np.testing.assert_allclose(found[1:2], short, rtol=0, atol=2e-6)


def test_clip_of_old_files_pools_the_largest_real_id():
    old = dataclasses.replace(CLIP, text=dataclasses.replace(CLIP.text, eos_token_id=2))
    params, tokens = params_of(CLIP), np.full((1, 6), 10, np.int32)
    tokens[0, 2], tokens[0, 5] = 30, 39
    marked = dataclasses.replace(CLIP, text=dataclasses.replace(CLIP.text, eos_token_id=30))
    mask = np.array([[True] * 5 + [False]])
    np.testing.assert_array_equal(
        encoder.encode_text(params, old, tokens, mask), encoder.encode_text(params, marked, tokens, mask)
    )
    ends_in_39 = dataclasses.replace(CLIP, text=dataclasses.replace(CLIP.text, eos_token_id=39))
    np.testing.assert_array_equal(
        encoder.encode_text(params, old, tokens), encoder.encode_text(params, ends_in_39, tokens)
    )


def test_siglip_pools_the_last_slot_and_looks_both_ways():
    params, tokens = params_of(SIGLIP), texts()
    base = encoder.encode_text(params, SIGLIP, tokens)
    for slot in (0, 8):
        changed = tokens.copy()
        changed[:, slot] = 0
        assert np.abs(encoder.encode_text(params, SIGLIP, changed) - base).max() > 1e-3
    # One token attends only itself: pooling, norm and projection of that slot alone.
    mask = np.zeros(tokens.shape, bool)
    mask[:, -1] = True
    changed = np.where(mask, tokens, 0).astype(np.int32)
    np.testing.assert_array_equal(
        encoder.encode_text(params, SIGLIP, tokens, mask), encoder.encode_text(params, SIGLIP, changed, mask)
    )


# Images


@pytest.mark.parametrize("cfg", DUAL, ids=["clip", "siglip"])
def test_patches_are_what_a_convolution_cuts(cfg):
    """Blocks of pixels in reading order, each kept whole: swapping two is a swap, turning their pixels is not."""
    params = params_of(cfg)
    params["vision"]["positions"]["embedding"] = jnp.zeros_like(params["vision"]["positions"]["embedding"])
    image = pixels(1)
    # Without positions an encoder does not see the order of the patches, and nothing else may change.
    swapped = image.copy()
    swapped[:, :, :4, 4:], swapped[:, :, 4:, :4] = image[:, :, 4:, :4], image[:, :, :4, 4:]
    base = encoder.encode_image(params, cfg, image)
    np.testing.assert_allclose(encoder.encode_image(params, cfg, swapped), base, rtol=0, atol=2e-6)
    turned = np.ascontiguousarray(image.swapaxes(2, 3))
    assert np.abs(encoder.encode_image(params, cfg, turned) - base).max() > 1e-3


@pytest.mark.parametrize("cfg", DUAL, ids=["clip", "siglip"])
def test_pixels_beyond_the_last_whole_patch_are_dropped(cfg):
    odd = dataclasses.replace(cfg, vision=dataclasses.replace(cfg.vision, image_size=11))
    assert odd.vision.grid == 2
    image = pixels(size=11)
    edge = image.copy()
    edge[:, :, 8:], edge[:, :, :, 8:] = 0, 0
    params = params_of(cfg)
    np.testing.assert_array_equal(encoder.encode_image(params, odd, image), encoder.encode_image(params, odd, edge))
    np.testing.assert_array_equal(
        encoder.encode_image(params, odd, image), encoder.encode_image(params, cfg, image[:, :, :8, :8])
    )


def test_similarity_is_the_scaled_cosine_plus_bias():
    text, image = np.eye(16, dtype=np.float32)[:3], np.eye(16, dtype=np.float32)[:2]
    fresh = encoder.init(SIGLIP, jax.random.key(0))
    logits = encoder.similarity(fresh, SIGLIP, jnp.asarray(text), jnp.asarray(image))
    np.testing.assert_allclose(logits, 10 * np.eye(3)[:2] - 10, rtol=1e-6, atol=1e-5)
    fresh = encoder.init(CLIP, jax.random.key(0))
    logits = encoder.similarity(fresh, CLIP, jnp.asarray(text), jnp.asarray(image))
    np.testing.assert_allclose(logits, np.eye(3)[:2] / 0.07, rtol=1e-6)
    assert encoder.similarity(fresh, CLIP, jnp.zeros((0, 16)), jnp.asarray(image)).shape == (2, 0)


# Transformations and precision


@pytest.mark.parametrize("cfg", CONFIGS.values(), ids=CONFIGS)
def test_jit_vmap_and_one_compilation(cfg):
    params, tokens = params_of(cfg), texts()
    mask = np.arange(9)[None] < np.array([9, 4, 6])[:, None]
    base = text_vector(params, cfg, tokens, mask)
    size = encoder._encode_text._cache_size()
    text_vector(params, cfg, texts(seed=3), mask)
    assert encoder._encode_text._cache_size() == size
    np.testing.assert_array_equal(jax.jit(lambda p, t, m: text_vector(p, cfg, t, m))(params, tokens, mask), base)
    rows = jax.vmap(lambda t, m: text_vector(params, cfg, t[None], m[None])[0])(jnp.asarray(tokens), jnp.asarray(mask))
    np.testing.assert_allclose(rows, base, rtol=0, atol=2e-6)
    if cfg is not BERT:
        image = jnp.asarray(pixels())
        rows = jax.vmap(lambda x: encoder.encode_image(params, cfg, x[None])[0])(image)
        np.testing.assert_allclose(rows, encoder.encode_image(params, cfg, image), rtol=0, atol=2e-6)


@pytest.mark.parametrize("cfg", CONFIGS.values(), ids=CONFIGS)
def test_stored_bfloat16_gives_float32(cfg):
    stored = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params_of(cfg))
    exact = jax.tree.map(lambda x: x.astype(jnp.float32), stored)
    found = text_vector(stored, cfg, texts())
    assert found.dtype == jnp.float32
    tolerance = 2e-6 if jax.default_backend() == "cpu" else 5e-2
    np.testing.assert_allclose(found, text_vector(exact, cfg, texts()), rtol=0, atol=tolerance)


@pytest.mark.parametrize("cfg", CONFIGS.values(), ids=CONFIGS)
def test_float64_parameters_give_float64(cfg, x64):
    single = jax.tree.map(lambda x: x.astype(jnp.float32), params_of(cfg))
    double = jax.tree.map(lambda x: x.astype(jnp.float64), single)
    found = text_vector(double, cfg, texts())
    assert found.dtype == jnp.float64
    np.testing.assert_allclose(found, text_vector(single, cfg, texts()), rtol=0, atol=1e-5)
    assert np.abs(np.linalg.norm(found, axis=1) - 1).max() < 1e-14


def test_unit_of_zero_is_zero_with_a_finite_gradient():
    x = jnp.stack([jnp.zeros(3), jnp.array([3.0, 0.0, 4.0])])
    np.testing.assert_allclose(unit(x), [[0, 0, 0], [0.6, 0, 0.8]], rtol=1e-6)
    assert np.all(np.isfinite(jax.grad(lambda a: jnp.sum(unit(a)))(x)))


# Bad input


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda p: encoder.encode_text(p[0], BERT, np.full((1, 3), 40)), "tokens: found id 40"),
        (lambda p: encoder.encode_text(p[1], CLIP, np.full((1, 3), -1)), "tokens: found id -1"),
        (lambda p: encoder.encode_text(p[1], CLIP, texts(length=13)), "tokens: found 13"),
        (lambda p: encoder.encode_text(p[1], CLIP, np.zeros((2, 0), np.int32)), "at least one token"),
        (lambda p: encoder.encode_text(p[0], BERT, texts(), np.ones((3, 8), bool)), "mask: found shape"),
        (lambda p: encoder.encode_text(p[0], BERT, texts(), token_types=texts(2)), "token_types: found shape"),
        (lambda p: encoder.encode_text(p[0], BERT, texts(), token_types=np.full((3, 9), 2)), "token_types: found id 2"),
        (lambda p: encoder.encode_text(p[1], CLIP, texts(), token_types=texts()), "token_types"),
        (lambda p: encoder.encode_image(p[1], CLIP, pixels(size=12)), r"pixels: found shape \(2, 3, 12, 12\)"),
        (lambda p: encoder.encode_image(p[1], CLIP, pixels()[0]), "pixels: found shape"),
        (lambda p: encoder.encode_image(p[1], CLIP, pixels().astype(np.uint8)), "pixels: found dtype uint8"),
        (lambda p: encoder.encode_image(p[0], BERT, pixels()), "found BertConfig"),
        (lambda p: encoder.similarity(p[0], BERT, jnp.ones((1, 2)), jnp.ones((1, 2))), "found BertConfig"),
    ],
)
def test_bad_input_is_named(call, words):
    params = [params_of(BERT), params_of(CLIP)]
    with pytest.raises(ConfigError, match=words):
        call(params)


@pytest.mark.parametrize(
    ("cfg", "change", "words"),
    [
        (BERT, {"num_heads": 3}, "num_heads: found 3"),
        (BERT, {"activation": "tanh"}, "activation: found 'tanh'"),
        (BERT, {"vocab_size": 0}, "vocab_size: found 0"),
        (CLIP.vision, {"image_size": 3}, "image_size: found 3"),
        (CLIP.vision, {"patch_size": 0}, "patch_size: found 0"),
        (CLIP, {"model_type": "align"}, "model_type: found 'align'"),
        (CLIP, {"text": dataclasses.replace(CLIP.text, eos_token_id=None)}, "text.eos_token_id"),
        (SIGLIP, {"projection_dim": 8}, "projection_dim: found 8"),
    ],
)
def test_bad_configuration_is_named(cfg, change, words):
    with pytest.raises(ConfigError, match=words):
        dataclasses.replace(cfg, **change)
