"""RIPO against stored values and gradients, its geometry, and its limits."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import compiled

from jaxmeth import rl
from jaxmeth.types import ConfigError

FILES = ["token_n6t8", "tokenadv_n5t10"]
SETTINGS = {
    "default": {},
    "noguard": {"r_min": None, "r_max": None},
    "delta0_02": {"delta_low": 0.02},
    "asym": {"delta_low": 0.08, "delta_high": 0.02},
}


@pytest.mark.parametrize("double", [False, True], ids=["float32", "float64"])
@pytest.mark.parametrize("file", FILES)
def test_stored_values_and_gradients(golden, file, double):
    with jax.enable_x64(double), np.load(golden / "16-ripo" / f"{file}.npz") as g:
        dtype = jnp.float64 if double else jnp.float32
        logp, old, adv, mask = (jnp.asarray(g[k], dtype) for k in ("logp", "logp_old", "adv", "mask"))

        def loss(x, keywords):
            s = rl.ripo(x, old, adv, mask, log_ratio_clamp=None, **keywords)
            return rl.aggregate(-s.value, mask), s

        def everything(x):
            found = {
                name: (jax.value_and_grad(loss, has_aux=True)(x, k), rl.ripo_bounds(old, **k))
                for name, k in SETTINGS.items()
            }
            return found, rl.fisher_distance(x, old)

        found, distance = compiled(everything)(logp)
        counts = g["mask"] > 0

        def close(value, key, where=slice(None)):
            expected = g[key]
            rtol = 1e-9 if double else 1e-5
            np.testing.assert_allclose(
                np.asarray(value)[where], expected[where], rtol=rtol, atol=rtol * np.abs(expected).max(), err_msg=key
            )

        for name, (((value, s), grad), (lower, upper)) in found.items():
            close(lower, f"{name}/lower")
            close(upper, f"{name}/upper")
            close(s.value, f"{name}/surrogate", counts)
            close(value, f"{name}/loss", ())
            close(grad, f"{name}/grad")
            np.testing.assert_array_equal((s.clipped_low | s.clipped_high)[counts], g[f"{name}/clipped"][counts])
            close(distance, f"{name}/geom")
            assert np.asarray(grad).any()


@pytest.mark.parametrize(
    ("delta", "p", "radius", "largest"),
    [(0.02, 0.8, 0.1581, 0.9265), (0.02, 0.01, 1.4142, 0.02414), (0.05, 1.0, 0.2236, 1.2236)],
)
def test_worked_numbers(delta, p, radius, largest):
    _, upper = compiled(partial(rl.ripo_bounds, delta_low=delta))(np.log(np.asarray([p], np.float32)))
    np.testing.assert_allclose(upper[0] - 1, radius, rtol=1e-3)
    np.testing.assert_allclose(p * upper[0], largest, rtol=1e-3)


def test_every_bound_is_equally_far(x64):
    """Case of the definition: half of delta for every p, which fixed bounds miss by three orders."""
    logp_old, distance = np.linspace(-12.0, 0, 50), compiled(rl.fisher_distance)
    bounds = partial(rl.ripo_bounds, delta_low=0.03, delta_high=0.07, r_min=None, r_max=None)
    lower, upper = compiled(bounds)(logp_old)
    np.testing.assert_allclose(distance(logp_old + np.log(upper), logp_old), 0.035, rtol=1e-6)
    inside = lower > 0
    assert inside.sum() > 5
    at = np.where(inside, lower, 1)
    np.testing.assert_allclose(distance(logp_old + np.log(at), logp_old)[inside], 0.015, rtol=1e-6)
    assert (np.diff(upper) < 0).all()
    second_moment = np.exp(logp_old) * upper**2
    np.testing.assert_allclose(second_moment, (np.exp(logp_old / 2) + 0.07**0.5) ** 2, rtol=1e-9)
    np.testing.assert_allclose(second_moment[0], 0.07, rtol=0.02)


def test_default_is_looser_than_fixed_clipping_everywhere():
    lower, upper = compiled(rl.ripo_bounds)(np.linspace(-20, 0, 40, dtype=np.float32))
    assert (upper > 1.2).all()
    assert (lower < 0.8).all()
    assert upper.max() == 10
    assert lower.min() == 0.5


@pytest.fixture(scope="module")
def made():
    rng = np.random.default_rng(0)
    old = -np.abs(rng.normal(2, 1.5, (5, 4)))
    arrays = (old + 0.5 * rng.normal(size=old.shape), old, rng.normal(size=5))
    return (*(jnp.asarray(a, jnp.float32) for a in arrays), jnp.asarray(rng.uniform(size=old.shape) < 0.8))


def test_limits_of_delta(made):
    logp, old, adv, mask = made
    free = partial(rl.ripo, r_min=None, r_max=None)
    s = compiled(partial(free, delta_low=np.inf))(*made)
    grad = compiled(jax.grad(lambda x: free(x, old, adv, mask, delta_low=0.0).value.sum()))(logp)
    logp, old, adv, mask = map(np.asarray, made)
    np.testing.assert_allclose(s.value, np.where(mask, np.exp(logp - old) * adv[:, None], 0), rtol=1e-5)
    np.testing.assert_array_equal(grad != 0, mask & ((logp - old) * adv[:, None] < 0))


def test_on_policy_is_grpo(made):
    logp, _, adv, mask = made
    for old in (None, logp):
        ours, theirs = (compiled(f)(logp, old, adv, mask) for f in (rl.ripo, rl.ppo_clip))
        jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_no_gradient_through_the_bounds(made):
    grads = compiled(jax.grad(lambda old: sum(b.sum() for b in rl.ripo_bounds(old))))(made[1])
    assert not np.asarray(grads).any()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_extreme_old_probabilities(dtype):
    """-100 stays finite, 0 is p = 1, and a rounding error above 0 counts as 0."""
    old = jnp.asarray([-1e4, -100.0, 0.0, 0.25], dtype)

    @compiled
    def every(old):
        guards = ({}, {"r_min": None, "r_max": None}, {"r_min": None})
        return [rl.ripo_bounds(old, **g) for g in guards] + [rl.dcpo_bounds(old), rl.dcpo_bounds(old, cap=None)]

    for bound in jax.tree.leaves(every(old)):
        assert bound.dtype == jnp.float32
        assert np.isfinite(bound).all()
    np.testing.assert_allclose(every(old)[0][1][2:], 1 + 0.05**0.5, rtol=1e-6)
    far = compiled(rl.fisher_distance)(jnp.asarray([-1.0, -200.0, 0.0, -3.0]), jnp.asarray([-300.0, -1.0, -90.0, -3.0]))
    assert not np.isnan(far).any()
    assert far[3] == 0


def test_dcpo_bounds():
    lower, upper = compiled(rl.dcpo_bounds)(np.log(np.asarray([1.0, 0.5, 0.01], np.float32)))
    np.testing.assert_allclose(lower, [0.8, 0.5, 0.5], atol=1e-6)
    expected = [0.5 + 0.5 * 1.8**0.5, 0.5 + 0.5 * 2.6**0.5, 0.5 + 0.5 * 81**0.5]
    np.testing.assert_allclose(upper, expected, rtol=1e-6)


def test_dcpo_clips_at_its_bounds(made):
    logp, old, adv, mask = made
    s, (lower, upper) = compiled(rl.dcpo)(*made), compiled(rl.dcpo_bounds)(old)
    logp, old, adv, mask = map(np.asarray, made)
    ratio = np.exp(logp - old)
    expected = np.minimum(ratio * adv[:, None], np.clip(ratio, lower, upper) * adv[:, None])
    np.testing.assert_allclose(s.value, np.where(mask, expected, 0), rtol=1e-5)


@pytest.mark.parametrize(
    ("keywords", "field"),
    [
        ({"delta_low": -0.1}, "delta_low"),
        ({"delta_high": float("nan")}, "delta_high"),
        ({"r_min": 1.5}, "r_min"),
        ({"r_min": -0.5}, "r_min"),
        ({"r_max": 0.5}, "r_max"),
        ({"log_ratio_clamp": -1.0}, "log_ratio_clamp"),
    ],
)
def test_bad_input_names_the_field(made, keywords, field):
    with pytest.raises(ConfigError, match=f"^{field}: found"):
        rl.ripo(*made, **keywords)


def test_bad_baseline_input():
    with pytest.raises(ConfigError, match=r"^e_low: found"):
        rl.dcpo_bounds(jnp.zeros(2), e_low=-1.0)
    with pytest.raises(ConfigError, match=r"^cap: found"):
        rl.dcpo_bounds(jnp.zeros(2), cap=0.5)
    with pytest.raises(ConfigError, match=r"^logp_old: found"):
        rl.fisher_distance(jnp.zeros(2), jnp.zeros(3))
