"""Noise at its SNR, rounding to its levels, over any tree."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmeth import scaling
from jaxmeth.types import ConfigError


def tree():
    rng = np.random.default_rng(0)
    normal = {"embed": (40, 16), "kernel": (3, 60, 50), "head": (16, 40)}
    normal = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in normal.items()}
    scale = np.asarray([0.1, 1.0, 10.0], np.float32)[:, None, None]
    return {
        "embed": {"embedding": jnp.asarray(normal["embed"])},
        "layers": {
            "mlp": {"kernel": jnp.asarray(normal["kernel"] * scale)},
            "norm": {"scale": jnp.ones((3, 16), jnp.bfloat16)},
        },
        "head": (jnp.asarray(normal["head"]), jnp.arange(4)),
    }


@pytest.mark.parametrize("snr_db", [0.0, 10.0, 30.0])
def test_noise_has_its_power_in_every_tensor_and_every_layer(snr_db):
    weights = tree()
    noisy = scaling.perturb_gaussian(jax.random.key(1), weights, snr_db)
    for layer in range(3):
        w, v = (t["layers"]["mlp"]["kernel"][layer] for t in (weights, noisy))
        measured = 10 * np.log10(np.mean(w**2) / np.mean((v - w) ** 2))
        # 3,000 draws: the power of the noise is within 10 % with near certainty.
        assert abs(measured - snr_db) < 0.5


def test_structure_shapes_types_and_integers_are_kept():
    weights = tree()
    for out in (scaling.perturb_gaussian(jax.random.key(1), weights, 20.0), scaling.perturb_round(weights, 3)):
        assert jax.tree.structure(out) == jax.tree.structure(weights)
        assert jax.tree.map(lambda v: (v.shape, v.dtype), out) == jax.tree.map(lambda v: (v.shape, v.dtype), weights)
        np.testing.assert_array_equal(out["head"][1], jnp.arange(4))


def test_infinite_snr_and_zero_weights_change_nothing():
    weights = tree()
    same = scaling.perturb_gaussian(jax.random.key(1), weights, jnp.inf)
    jax.tree.map(np.testing.assert_array_equal, same, weights)
    zeros = {"w": jnp.zeros((4, 4))}
    np.testing.assert_array_equal(scaling.perturb_gaussian(jax.random.key(1), zeros, 0.0)["w"], 0.0)


def test_leaves_get_different_noise_and_keys_matter():
    pair = {"a": jnp.ones((50, 50)), "b": jnp.ones((50, 50))}
    first, second = (scaling.perturb_gaussian(jax.random.key(k), pair, 10.0) for k in (0, 1))
    assert abs(np.corrcoef((first["a"] - 1).ravel(), (first["b"] - 1).ravel())[0, 1]) < 0.1
    assert not np.allclose(first["a"], second["a"])
    again = scaling.perturb_gaussian(jax.random.key(0), pair, 10.0)
    jax.tree.map(np.testing.assert_array_equal, first, again)


def test_levels_can_be_mapped_over():
    weights = {"w": jax.random.normal(jax.random.key(0), (20, 20))}
    levels = jnp.asarray([0.0, 20.0])
    mapped = jax.vmap(lambda level: scaling.perturb_gaussian(jax.random.key(1), weights, level))(levels)["w"]
    one = jnp.stack([scaling.perturb_gaussian(jax.random.key(1), weights, level)["w"] for level in levels])
    np.testing.assert_allclose(mapped, one, rtol=1e-6, atol=1e-6)
    bits = jnp.asarray([2, 3])
    mapped = jax.vmap(lambda b: scaling.perturb_round(weights, b))(bits)["w"]
    one = jnp.stack([scaling.perturb_round(weights, b)["w"] for b in bits])
    np.testing.assert_allclose(mapped, one, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_rounding_leaves_the_levels_of_each_channel_and_is_within_half_a_step(bits):
    w = jax.random.uniform(jax.random.key(0), (7, 400), minval=-2)
    out = np.asarray(scaling.perturb_round({"w": w}, bits)["w"]).T
    w = w.T
    for channel in range(7):
        assert len(np.unique(np.round(out[:, channel], 4))) == 2**bits
        column = np.asarray(w[:, channel])
        step = (column.max() - column.min()) / (2**bits - 1)
        assert np.abs(out[:, channel] - column).max() <= step / 2 * (1 + 1e-4)
        np.testing.assert_allclose(
            [out[:, channel].min(), out[:, channel].max()], [column.min(), column.max()], rtol=1e-5
        )


def test_more_bits_round_less_and_many_bits_hardly_at_all():
    w = {"w": jax.random.normal(jax.random.key(0), (64, 8))}
    errors = [float(jnp.abs(scaling.perturb_round(w, b)["w"] - w["w"]).mean()) for b in (2, 3, 4, 8, 16)]
    assert np.all(np.diff(errors) < 0)
    assert errors[-1] < 1e-4


def test_rounding_takes_matrices_and_leaves_norms_and_embeddings():
    weights = tree()
    out = scaling.perturb_round(weights, 2)
    np.testing.assert_array_equal(out["embed"]["embedding"], weights["embed"]["embedding"])
    np.testing.assert_array_equal(out["layers"]["norm"]["scale"], weights["layers"]["norm"]["scale"])
    assert not np.allclose(out["layers"]["mlp"]["kernel"], weights["layers"]["mlp"]["kernel"])
    constant = {"w": jnp.full((5, 3), 0.7)}
    np.testing.assert_array_equal(scaling.perturb_round(constant, 2)["w"], constant["w"])


def test_select_decides():
    weights = tree()
    out = scaling.perturb_gaussian(jax.random.key(0), weights, 0.0, select=lambda path, leaf: "mlp" in path)
    np.testing.assert_array_equal(out["embed"]["embedding"], weights["embed"]["embedding"])
    assert not np.allclose(out["layers"]["mlp"]["kernel"], weights["layers"]["mlp"]["kernel"])


@pytest.mark.parametrize("snr_db", [float("nan"), [1.0, 2.0]])
def test_bad_levels_are_refused(snr_db):
    with pytest.raises(ConfigError, match="snr_db"):
        scaling.perturb_gaussian(jax.random.key(0), tree(), np.asarray(snr_db))


@pytest.mark.parametrize("bits", [0, -3, float("nan")])
def test_bad_bits_are_refused(bits):
    with pytest.raises(ConfigError, match="bits"):
        scaling.perturb_round(tree(), bits)
