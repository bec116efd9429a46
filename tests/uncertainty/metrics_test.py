"""PRR against the public code, ROC-AUC against its definition, and the bootstrap against known laws."""

import csv
from functools import partial
from itertools import permutations
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmeth import uncertainty
from jaxmeth.types import ConfigError
from jaxmeth.uncertainty import auroc, prediction_rejection_ratio

STORED = Path(__file__).parents[1] / "golden" / "12-rauq"
TIED_ROW = 2
# The table of the golden README: PRR@0.5, PRR@1.0, ROC-AUC, interval of the PRR@0.5 difference to perplexity.
REFERENCE = {
    "rauq_prob_a0.2": (0.727, 0.656, 0.844, -0.080, 0.111),
    "rauq_prob_a0.5": (0.701, 0.657, 0.843, -0.065, 0.039),
    "rauq_entropy_a0.9": (0.605, 0.593, 0.803, -0.240, 0.026),
    "rauq_entropy_a0.8": (0.623, 0.594, 0.806, -0.228, 0.044),
    "perplexity": (0.705, 0.712, 0.841, 0.0, 0.0),
    "msp": (0.756, 0.671, 0.852, -0.095, 0.173),
    "mean_entropy": (0.608, 0.609, 0.790, -0.250, 0.031),
}


@pytest.fixture(scope="module")
def g():
    with np.load(STORED / "synthetic.npz") as stored:
        return dict(stored)


@pytest.fixture(scope="module")
def answers():
    with open(STORED / "smollm2_scores.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    return {name: jnp.asarray([float(row[name]) for row in rows]) for name in ("correct", *REFERENCE)}


# --- PRR -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("double", "tolerance"), [(False, 5e-6), (True, 1e-9)], ids=["float32", "float64"])
@pytest.mark.parametrize("column", [0, 1])
def test_stored_ratios(g, double, tolerance, column):
    max_rejection = (0.5, 1.0)[column]
    with jax.enable_x64(double):
        for row in range(5):
            u, q = (
                jnp.asarray(g[name][row], jnp.float64 if double else jnp.float32) for name in ("prr_u", "prr_quality")
            )
            atol = 0.05 if row == TIED_ROW else tolerance
            raw, oracle, _, normalised = g["prr_raw_oracle_mc_norm"][row, column]
            found = prediction_rejection_ratio(u, q, max_rejection=max_rejection)
            np.testing.assert_allclose(found, g["prr_normalised_analytic"][row, column], rtol=0, atol=atol)
            np.testing.assert_allclose(found, normalised, rtol=0, atol=max(atol, 0.02))
            np.testing.assert_allclose(uncertainty.rejection_area(u, q, max_rejection), raw, rtol=0, atol=atol)
            np.testing.assert_allclose(uncertainty.rejection_area(-q, q, max_rejection), oracle, rtol=0, atol=tolerance)


def test_ties_keep_the_input_order():
    """Two tied answers: the one that comes first is accepted first."""
    u, q = jnp.asarray([0.0, 1.0, 1.0, 2.0]), jnp.asarray([1.0, 1.0, 0.0, 0.0])
    np.testing.assert_allclose(prediction_rejection_ratio(u, q, 1.0), 1.0, rtol=1e-6)
    swapped = prediction_rejection_ratio(u, jnp.asarray([1.0, 0.0, 1.0, 0.0]), 1.0)
    raw, oracle = (1 + 1 / 2 + 2 / 3 + 1 / 2) / 4, (1 + 1 + 2 / 3 + 1 / 2) / 4
    np.testing.assert_allclose(swapped, (raw - 0.5) / (oracle - 0.5), rtol=1e-6)


@pytest.mark.parametrize("max_rejection", [0.5, 1.0])
def test_the_ratio_of_random_order_is_zero(max_rejection):
    q = jnp.asarray([0.1, 0.9, 0.4, 1.0, 0.3, 0.0])
    orders = jnp.asarray(list(permutations(range(6))), jnp.float32)
    ratios = jax.vmap(lambda u: prediction_rejection_ratio(u, q, max_rejection))(orders)
    np.testing.assert_allclose(ratios.mean(), 0, atol=1e-6)
    np.testing.assert_allclose(ratios.max(), 1, rtol=1e-5)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31 - 1), max_rejection=st.sampled_from([0.5, 1.0]))
def test_ratio_invariants(seed, max_rejection):
    rng = np.random.default_rng(seed)
    u = jnp.asarray(rng.integers(-8, 8, 24), jnp.float32)
    q = jnp.asarray(rng.uniform(0, 1, 24), jnp.float32)
    ratio = partial(prediction_rejection_ratio, max_rejection=max_rejection)
    plain = ratio(u, q)
    assert plain <= 1 + 1e-5
    np.testing.assert_array_equal(plain, ratio(jnp.exp(u / 3) * 5 - 2, q))
    np.testing.assert_allclose(plain, ratio(u, 7 * q - 3), atol=1e-5)
    np.testing.assert_allclose(ratio(-q, q), 1, rtol=1e-5)


@pytest.mark.parametrize("max_rejection", [0.5, 1.0])
@pytest.mark.parametrize("value", [0.0, 0.3, -7.0])
def test_constant_quality_is_one_half(max_rejection, value):
    u = jax.random.normal(jax.random.key(0), (31,))
    found = prediction_rejection_ratio(u, jnp.full(31, value), max_rejection)
    np.testing.assert_allclose(found, 0.5, rtol=1e-6)


def test_where_nothing_can_be_ranked_the_raw_area_is_reported():
    """With one prefix (all n answers) the oracle is the random order."""
    u, q = jnp.asarray([0.3, 0.1, 0.2]), jnp.asarray([0.0, 1.0, 1.0])
    np.testing.assert_allclose(prediction_rejection_ratio(u, q, 0.5), 2 / 3, rtol=1e-6)
    np.testing.assert_allclose(prediction_rejection_ratio(u[:1], q[:1]), 0.5)


def test_binary_and_integer_quality_and_infinite_scores():
    u = jnp.asarray([0.1, jnp.inf, 0.2, 3.0, jnp.inf, 0.4])
    q = jnp.asarray([True, False, True, True, False, False])
    plain = prediction_rejection_ratio(u, q, 1.0)
    np.testing.assert_array_equal(plain, prediction_rejection_ratio(u, q.astype(jnp.int32), 1.0))
    np.testing.assert_array_equal(plain, prediction_rejection_ratio(u, q.astype(jnp.float32), 1.0))
    np.testing.assert_array_equal(plain, prediction_rejection_ratio(jnp.where(jnp.isinf(u), jnp.nan, u), q, 1.0))
    assert jnp.isfinite(plain)


def test_shuffled_random_value(g):
    u, q = jnp.asarray(g["prr_u"][0], jnp.float32), jnp.asarray(g["prr_quality"][0], jnp.float32)
    exact = prediction_rejection_ratio(u, q)
    shuffled = prediction_rejection_ratio(u, q, random="shuffled", key=jax.random.key(42))
    assert 0 < abs(float(exact - shuffled)) < 0.03
    with pytest.raises(ConfigError, match="key: found None"):
        prediction_rejection_ratio(u, q, random="shuffled")
    with pytest.raises(ConfigError, match="random: found 'mean'"):
        prediction_rejection_ratio(u, q, random="mean")


@pytest.mark.parametrize("value", [0.0, -1.0, 1.5, float("nan")])
def test_a_share_that_cannot_be_rejected(value):
    with pytest.raises(ConfigError, match="max_rejection: found"):
        prediction_rejection_ratio(jnp.zeros(3), jnp.ones(3), value)


def test_no_answers():
    for function in (prediction_rejection_ratio, uncertainty.rejection_area, auroc):
        with pytest.raises(ConfigError, match="found 0 answers"):
            function(jnp.zeros(0), jnp.zeros(0))
    with pytest.raises(ConfigError, match=r"q: found shape \(3,\), expected \(4,\)"):
        prediction_rejection_ratio(jnp.zeros(4), jnp.zeros(3))


# --- ROC-AUC ---------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31 - 1))
def test_auroc_is_the_share_of_pairs_in_order(seed):
    rng = np.random.default_rng(seed)
    score, positive = rng.integers(0, 6, 20).astype(np.float32), rng.uniform(size=20) < 0.4
    pairs = score[positive][:, None] - score[~positive][None]
    expected = ((pairs > 0) + 0.5 * (pairs == 0)).mean() if pairs.size else np.nan
    found = auroc(jnp.asarray(score), jnp.asarray(positive))
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    np.testing.assert_allclose(auroc(jnp.asarray(-score), jnp.asarray(positive)), 1 - expected, rtol=1e-5, atol=1e-6)


def test_auroc_at_the_edges():
    score = jnp.asarray([1.0, 2.0, 3.0])
    assert jnp.isnan(auroc(score, jnp.zeros(3, bool)))
    assert jnp.isnan(auroc(score, jnp.ones(3, bool)))
    np.testing.assert_array_equal(auroc(jnp.zeros(3), jnp.asarray([True, False, True])), 0.5)
    wrong = jnp.asarray([True, False, True])
    np.testing.assert_array_equal(auroc(jnp.asarray([jnp.inf, 0.0, jnp.inf]), wrong), 1.0)
    np.testing.assert_array_equal(auroc(jnp.asarray([jnp.nan, 0.0, jnp.inf]), wrong), 1.0)
    np.testing.assert_array_equal(auroc(score, wrong), auroc(score, wrong.astype(jnp.int32)))


def test_auroc_of_many():
    """Sums of ranks stay exact enough in float32."""
    score = jnp.arange(50_000, dtype=jnp.float32)
    np.testing.assert_allclose(auroc(score, score >= 25_000), 1.0, rtol=1e-5)
    np.testing.assert_allclose(auroc(score, score % 2 == 0), 0.5, atol=1e-4)


# --- real answers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REFERENCE)
def test_reference_table(answers, name):
    half, full, area, low, high = REFERENCE[name]
    u, q = answers[name], answers["correct"]
    np.testing.assert_allclose(prediction_rejection_ratio(u, q), half, atol=6e-4)
    np.testing.assert_allclose(prediction_rejection_ratio(u, q, 1.0), full, atol=6e-4)
    np.testing.assert_allclose(auroc(u, q < 0.5), area, atol=6e-4)
    interval = uncertainty.paired_bootstrap(
        prediction_rejection_ratio, u, answers["perplexity"], q, key=jax.random.key(0)
    )
    np.testing.assert_allclose(interval.value, half - REFERENCE["perplexity"][0], atol=1.2e-3)
    # Two bootstraps of 2,000 resamples: their ends differ by Monte-Carlo error.
    np.testing.assert_allclose([interval.low, interval.high], [low, high], atol=0.02)


# --- bootstrap -------------------------------------------------------------------------------------------------------


def mean_product(u, q):
    return (u * q).mean()


def test_interval_of_a_mean():
    """The percentile interval of a mean of n values is the mean plus or minus 1.96 standard errors."""
    u = jnp.asarray(np.random.default_rng(1).normal(size=200), jnp.float32)
    found = uncertainty.bootstrap(mean_product, u, jnp.ones(200), key=jax.random.key(2))
    error = u.std() / 200**0.5
    np.testing.assert_allclose(found.value, u.mean(), rtol=1e-5)
    np.testing.assert_allclose([found.low, found.high], [u.mean() - 1.96 * error, u.mean() + 1.96 * error], atol=0.02)
    narrow = uncertainty.bootstrap(mean_product, u, jnp.ones(200), key=jax.random.key(2), level=0.5)
    np.testing.assert_allclose(narrow.high - narrow.low, 2 * 0.6745 * error, rtol=0.1)


def test_bootstrap_is_reproducible_and_needs_its_key():
    u, q = jnp.asarray(np.random.default_rng(2).normal(size=(2, 200)), jnp.float32)
    runs = [uncertainty.bootstrap(mean_product, u, q, key=jax.random.key(k)) for k in (1, 1, 2)]
    np.testing.assert_array_equal(runs[0], runs[1])
    assert runs[0].low != runs[2].low


def test_pairs_are_resampled_together():
    """A constant difference has no spread, however much either score has."""
    u = jnp.asarray(np.random.default_rng(3).normal(size=200), jnp.float32)
    found = uncertainty.paired_bootstrap(mean_product, u + 1, u, jnp.ones(200), key=jax.random.key(4))
    np.testing.assert_allclose(found, [1, 1, 1], rtol=1e-5)
    assert isinstance(found, uncertainty.Interval)


def test_coverage():
    """95% intervals of a mean hold the truth in about 95 of 100 samples."""
    draws = jnp.asarray(np.random.default_rng(5).normal(size=(400, 60)), jnp.float32)

    @jax.jit
    @jax.vmap
    def interval(u, key):
        return uncertainty.bootstrap(mean_product, u, jnp.ones(60), key=key, resamples=333)

    _, low, high = interval(draws, jax.random.split(jax.random.key(6), 400))
    assert 0.91 < ((low <= 0) & (high >= 0)).mean() < 0.98


def wrong_auroc(u, q):
    return auroc(u, q < 0.5)


def test_resamples_without_a_value_are_left_out():
    """Four answers, one wrong: a third of the resamples has no wrong one, and ROC-AUC no value."""
    u, q = jnp.asarray([4.0, 1.0, 5.0, 3.0]), jnp.asarray([0.0, 1.0, 1.0, 1.0])
    found = uncertainty.bootstrap(wrong_auroc, u, q, key=jax.random.key(8))
    assert jnp.isfinite(jnp.asarray(found)).all()
    none = uncertainty.bootstrap(wrong_auroc, u, jnp.ones(4), key=jax.random.key(8))
    assert np.isnan(none).all()


def test_bootstrap_refusals():
    u = jnp.zeros(4)
    with pytest.raises(ConfigError, match="level: found 95"):
        uncertainty.bootstrap(mean_product, u, u, key=jax.random.key(0), level=95)
    with pytest.raises(ConfigError, match="resamples: found 0"):
        uncertainty.bootstrap(mean_product, u, u, key=jax.random.key(0), resamples=0)
    with pytest.raises(ConfigError, match="u_b: found shape"):
        uncertainty.paired_bootstrap(mean_product, u, u[:3], u, key=jax.random.key(0))
