"""The linear seam, norms and rotary tables."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxmeth.models import RopeConfig, linear
from jaxmeth.models.layers import RMSNorm, rope_frequencies, rope_tables, rotate
from jaxmeth.types import ConfigError, LinearWeight


class LowRank(NamedTuple):
    base: jax.Array
    a: jax.Array
    b: jax.Array

    def matmul(self, x):
        return x @ self.base.T + (x @ self.a.T) @ self.b.T


def test_linear_takes_arrays_and_weight_types():
    r = np.random.default_rng(0)
    x, base, a, b = (jnp.asarray(r.normal(size=s), jnp.float32) for s in ((2, 3, 8), (6, 8), (2, 8), (6, 2)))
    weight = LowRank(base, a, b)
    assert isinstance(weight, LinearWeight)
    np.testing.assert_allclose(linear(x, base), np.asarray(x) @ np.asarray(base).T, atol=1e-5)
    np.testing.assert_allclose(linear(x, weight), linear(x, base + b @ a), atol=1e-5)


def test_linear_accumulates_low_precision_in_float32():
    x = jnp.full((1, 4096), 0.01, jnp.bfloat16)
    w = jnp.full((1, 4096), 1.0, jnp.bfloat16)
    assert linear(x, w).dtype == jnp.bfloat16
    np.testing.assert_allclose(float(linear(x, w)[0, 0]), 4096 * float(x[0, 0]), rtol=0.005)


def test_rms_norm_offset_is_around_the_stored_scale():
    x = jnp.asarray(np.random.default_rng(1).normal(size=(2, 3, 8)), jnp.float32)
    plain, shifted = RMSNorm(8, epsilon=1e-6), RMSNorm(8, epsilon=1e-6, offset=1.0)
    np.testing.assert_allclose(plain(x), shifted(x), atol=1e-6)
    np.testing.assert_allclose(np.mean(np.square(plain(x)), -1), 1.0, atol=1e-4)
    assert np.all(np.isfinite(plain(jnp.zeros((1, 8)))))
    gradient = nnx.grad(lambda m: m(jnp.zeros((1, 8))).sum())(plain)
    assert np.all(np.isfinite(gradient["scale"][...]))


@pytest.mark.parametrize(
    ("name", "rope"),
    [
        ("linear", RopeConfig(kind="linear", factor=4.0)),
        ("llama3", RopeConfig(kind="llama3", factor=8.0, original_max_positions=512)),
        ("yarn", RopeConfig(kind="yarn", factor=4.0, original_max_positions=1024)),
        (
            "yarn_attention",
            RopeConfig(
                kind="yarn", factor=2.0, original_max_positions=2048, attention_factor=1.5, beta_fast=16, beta_slow=2
            ),
        ),
    ],
)
def test_frequencies_equal_the_reference(golden, name, rope):
    stored = np.load(golden / "rope" / "frequencies.npz")
    freq, factor = rope_frequencies(rope, 64)
    np.testing.assert_allclose(freq, stored[name], rtol=1e-6)
    np.testing.assert_allclose(factor, stored[f"{name}_factor"], rtol=1e-6)


def test_rotation_keeps_lengths_and_depends_on_distance_only():
    r = np.random.default_rng(2)
    q, k = (jnp.asarray(r.normal(size=(1, 1, 1, 16)), jnp.float32) for _ in range(2))

    def score(at_q, at_k):
        tables = [rope_tables((RopeConfig(),), 16, jnp.full((1, 1), p, jnp.int32), jnp.float32) for p in (at_q, at_k)]
        turned = [rotate(x, cos[0], sin[0]) for x, (cos, sin) in zip((q, k), tables, strict=True)]
        np.testing.assert_allclose(jnp.linalg.norm(turned[0]), jnp.linalg.norm(q), rtol=1e-5)
        return float(jnp.sum(turned[0] * turned[1]))

    np.testing.assert_allclose(score(5, 2), score(105, 102), rtol=1e-3)
    assert abs(score(5, 2) - score(5, 4)) > 1e-3


def test_no_rotation_is_the_identity():
    cos, sin = rope_tables((RopeConfig(kind="none"),), 8, jnp.arange(5)[None], jnp.float32)
    x = jnp.asarray(np.random.default_rng(3).normal(size=(1, 2, 5, 8)), jnp.float32)
    np.testing.assert_array_equal(rotate(x, cos[0], sin[0]), x)


def test_unknown_rope_kind_is_refused_by_name():
    with pytest.raises(ConfigError, match="longrope"):
        RopeConfig(kind="longrope")
