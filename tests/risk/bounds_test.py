"""The bounds against scipy, their algebra, and what they refuse."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmeth import risk
from jaxmeth.types import ConfigError


def test_golden_bounds(golden):
    g = np.load(golden / "11-risk-controlled-reasoning" / "trajectories.npz")
    n, delta = g["bound_n"][:, None, None], jnp.asarray(g["bound_delta"], jnp.float32)[None, None]
    rhat = g["bound_rhat"][None, :, None]
    hits = np.round(n * rhat)
    rhat = jnp.asarray(rhat, jnp.float32)
    np.testing.assert_allclose(risk.hoeffding_ucb(rhat, n, delta), g["bound_hoeffding"], atol=1e-6)
    np.testing.assert_allclose(risk.clopper_pearson_upper(hits, n, delta), g["bound_clopper_pearson"], atol=1e-6)
    np.testing.assert_allclose(risk.hb_upper(rhat, n, delta), g["bound_hoeffding_bentkus"], atol=1e-6)
    alpha = jnp.asarray(g["ltt_alpha"], jnp.float32)[None, None]
    np.testing.assert_allclose(risk.hb_pvalue(rhat, n, alpha), g["ltt_pvalue_hb"], atol=1e-6)


def near_the_mean(n, count=4000):
    rng = np.random.default_rng(n)
    k = rng.integers(0, n + 1, count)
    width = np.sqrt(np.maximum(k / n * (1 - k / n), 1 / n) / n)
    return k, np.clip(k / n + 2 * rng.normal(size=count) * width, 1e-6, 1 - 1e-6)


@pytest.mark.parametrize("n", [1, 5, 1000, 20_000])
def test_binomial_cdf_in_float32(n):
    k, p = near_the_mean(n)
    p = p.astype(np.float32)
    expected = scipy.stats.binom.cdf(k, n, p.astype(np.float64))
    found = np.asarray(risk.binomial_cdf(k, n, p), np.float64)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    small = (expected < 1e-3) & (expected > 1e-30)
    np.testing.assert_allclose(found[small], expected[small], rtol=2e-4)


@pytest.mark.parametrize("n", [3, 20_000])
def test_binomial_cdf_in_float64(x64, n):
    k, p = near_the_mean(n)
    np.testing.assert_allclose(risk.binomial_cdf(k, n, p), scipy.stats.binom.cdf(k, n, p), atol=1e-12)


@pytest.mark.parametrize("n", [1, 30, 1000, 20_000])
@pytest.mark.parametrize("delta", [0.1, 0.01, 1e-6])
def test_clopper_pearson_is_the_beta_quantile(n, delta):
    k = np.concatenate([np.linspace(0, n, 60), np.arange(20) % n]).astype(int)
    expected = np.where(k == n, 1.0, scipy.stats.beta.ppf(1 - delta, k + 1, np.maximum(n - k, 1)))
    np.testing.assert_allclose(risk.clopper_pearson_upper(k, n, delta), expected, atol=1e-6)


def test_clopper_pearson_of_no_error_is_closed_form():
    n = np.asarray([1, 30, 1000])
    np.testing.assert_allclose(risk.clopper_pearson_upper(0, n, 0.1), 1 - 0.1 ** (1 / n), atol=1e-6)


def test_all_wrong_and_no_data_prove_nothing():
    assert risk.clopper_pearson_upper(7, 7, 0.1) == 1
    for bound in (risk.hoeffding_ucb, risk.hb_upper, risk.clopper_pearson_upper):
        assert bound(0, 0, 0.1) == 1
    assert risk.hb_pvalue(0.0, 0, 0.5) == 1
    assert risk.hoeffding_pvalue(0.0, 0, 0.5) == 1
    assert risk.empirical_bernstein_ucb(0.0, 0.0, 1, 0.1) == 1
    assert risk.crc_upper(0, 0) == 1


@given(st.integers(1, 3000), st.floats(0, 1), st.floats(0.01, 0.99))
@settings(deadline=None, max_examples=60)
def test_the_hb_pvalue_is_at_most_each_of_its_two_parts(n, rhat, eps):
    p = float(risk.hb_pvalue(rhat, n, eps))
    bentkus = np.e * scipy.stats.binom.cdf(np.ceil(n * rhat - 1e-4), n, eps)
    assert 0 <= p <= min(bentkus, 1) + 1e-5
    inner = min(rhat, eps)
    assert p <= np.exp(-n * float(_kl(inner, eps))) + 1e-5


def _kl(a, b):
    return scipy.special.rel_entr(a, b) + scipy.special.rel_entr(1 - a, 1 - b)


@given(st.integers(1, 2000), st.floats(0, 1), st.floats(0.001, 0.5))
@settings(deadline=None, max_examples=60)
def test_bounds_lie_above_the_mean_fall_with_n_and_grow_as_delta_falls(n, share, delta):
    k = round(n * share)
    for bound, count in ((risk.clopper_pearson_upper, True), (risk.hb_upper, False), (risk.hoeffding_ucb, False)):
        value = float(bound(k if count else k / n, n, delta))
        assert k / n - 1e-6 <= value <= 1
        assert float(bound(2 * k if count else k / n, 2 * n, delta)) <= value + 1e-6
        assert float(bound(k if count else k / n, n, delta / 2)) >= value - 1e-6


@pytest.mark.parametrize(("bound", "argument"), [(risk.clopper_pearson_upper, 3), (risk.hb_upper, 0.06)])
def test_jit_and_vmap_change_nothing(bound, argument):
    n = jnp.asarray([50, 100, 1000])
    eager = bound(argument, n, 0.1)
    np.testing.assert_array_equal(jax.jit(bound)(argument, n, 0.1), eager)
    np.testing.assert_allclose(jax.vmap(lambda size: bound(argument, size, 0.1))(n), eager, atol=1e-7)
    np.testing.assert_allclose([bound(argument, int(size), 0.1) for size in n], eager, atol=1e-7)


def test_the_bound_is_where_the_pvalue_meets_delta():
    for rhat in (0.0, 0.07, 0.5, 0.93):
        bound = float(risk.hb_upper(rhat, 300, 0.1))
        assert risk.hb_pvalue(rhat, 300, bound) <= 0.1
        assert risk.hb_pvalue(rhat, 300, bound - 1e-5) > 0.1


def test_fractional_sums_do_not_add_an_error_by_rounding():
    """(7/13) * 13 is above 7 in float32; the ceiling must stay 7, where the second part of the p-value decides."""
    rhat = np.float32(7 / 13)
    assert rhat * np.float32(13) > 7
    expected = min(np.e * scipy.stats.binom.cdf(7, 13, 0.95), np.exp(-13 * _kl(7 / 13, 0.95)))
    other = min(np.e * scipy.stats.binom.cdf(8, 13, 0.95), np.exp(-13 * _kl(7 / 13, 0.95)))
    assert abs(expected - other) > 1e-5
    np.testing.assert_allclose(risk.hb_pvalue(rhat, 13, 0.95), expected, atol=1e-6)


def test_eps_outside_the_unit_interval_decides_without_data():
    np.testing.assert_array_equal(risk.hb_pvalue(0.5, 10, np.asarray([-1.0, 0.0, 1.0, 2.0])), [1, 1, 0, 0])


@pytest.mark.parametrize("delta", [0.0, 1.0, -0.1, 1.5, float("nan")])
def test_delta_outside_the_open_interval_is_refused(delta):
    calls = (
        lambda: risk.hoeffding_ucb(0.1, 10, delta),
        lambda: risk.clopper_pearson_upper(1, 10, delta),
        lambda: risk.hb_upper(0.1, 10, delta),
        lambda: risk.empirical_bernstein_ucb(0.1, 0.01, 10, delta),
    )
    for call in calls:
        with pytest.raises(ConfigError, match="delta"):
            call()


def test_an_impossible_count_is_refused():
    for k in (-1, 11):
        with pytest.raises(ConfigError, match="k: found"):
            risk.clopper_pearson_upper(k, 10, 0.1)


def test_gradients_of_the_pvalue_are_forward_differentiable():
    """d P(Bin(n, p) <= k) / dp = -n P(Bin(n-1, p) = k)."""
    _, slope = jax.jvp(lambda p: risk.binomial_cdf(4, 40, p), (0.12,), (1.0,))
    np.testing.assert_allclose(slope, -40 * scipy.stats.binom.pmf(4, 39, 0.12), rtol=1e-3)
