"""The judge's confidence: golden numbers, identities, the guarantee by simulation, and what is refused."""

import csv
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from jaxmeth.types import ConfigError
from jaxmeth.uncertainty import judge

STORED = Path(__file__).parents[1] / "golden" / "06-judge-confidence" / "reference.npz"


@pytest.fixture(scope="module")
def g():
    with np.load(STORED) as stored:
        return dict(stored)


def parameters(g, dtype=jnp.float32):
    layers = {}
    for i in range(4):
        layers[f"layer{i}"] = {"kernel": jnp.asarray(g[f"w{i}"], dtype), "bias": jnp.asarray(g[f"b{i}"], dtype)}
    return layers


@pytest.fixture(scope="module")
def params(g):
    return parameters(g)


# --- golden ----------------------------------------------------------------------------------------------------------


def test_forward(g, params):
    found = judge.confidence(params, jnp.asarray(g["features"], jnp.float32))
    np.testing.assert_allclose(found, g["confidence"], atol=1e-5)


def test_forward_in_float64(g, x64):
    found = judge.confidence(parameters(g, jnp.float64), jnp.asarray(g["features"]))
    np.testing.assert_allclose(found, g["confidence"], atol=1e-12)


def test_ranking_risks_and_auroc(g):
    conf = jnp.asarray(g["confidence"], jnp.float32)
    agree = g["agree"]
    i, j = (
        jnp.asarray(v.ravel()) for v in np.meshgrid(np.flatnonzero(agree), np.flatnonzero(1 - agree), indexing="ij")
    )
    np.testing.assert_allclose(conf[i] - conf[j], g["pair_diff"].ravel(), atol=1e-6)
    for k, gamma in enumerate(g["gamma"]):
        np.testing.assert_allclose(judge.rank_loss(conf, i, j, float(gamma)), g["rk_hard"][k], atol=1e-6)
        soft = judge.rank_loss(conf, i, j, float(gamma), kind="soft")
        np.testing.assert_allclose(soft, g["rk_soft_tau0.1"][k], rtol=1e-5)
    area = judge.auroc(conf, jnp.asarray(agree))
    np.testing.assert_allclose(area, g["auroc"], atol=1e-6)
    np.testing.assert_allclose(1 - judge.rank_loss(conf, i, j, 0.0, ties="half"), area, atol=1e-6)


def test_capacity(g, params):
    np.testing.assert_allclose(judge.complexity_proxy(params, 1.0), g["frobenius_root"], rtol=1e-5)
    found = judge.pac_bayes_complexity(params, gamma=0.2, pairs=100, delta=0.1)
    prefactor = 4**2 * 64 * np.log(4 * 64)
    np.testing.assert_allclose(found.phi, prefactor * g["phi_over_prefactor"], rtol=1e-4)
    np.testing.assert_allclose(found.term, np.sqrt((float(found.phi) + np.log(3000)) / (0.04 * 99)), rtol=1e-5)


@pytest.mark.parametrize("beta", ["0.0001", "0.01"])
def test_adaptive_margin(g, beta):
    diff = jnp.asarray(g["pair_diff"].ravel(), jnp.float32)
    grid = jnp.asarray(g["gamma_grid"], jnp.float32)
    norm = float(g["frobenius_root"])
    found = judge.margin_objective(diff, norm, float(beta), grid)
    np.testing.assert_allclose(found, g[f"objective_beta{beta}"], rtol=1e-5)
    gamma = judge.adaptive_gamma(diff, norm, float(beta), grid)
    np.testing.assert_allclose(gamma, g[f"gamma_star_beta{beta}"], rtol=1e-5)


def test_annotators(g):
    conf, label = judge.aggregate_annotators(jnp.asarray(g["annot_probs"], jnp.float32))
    np.testing.assert_allclose(conf, g["annot_mean_max"], atol=1e-6)
    np.testing.assert_array_equal(label, g["annot_label"])


@pytest.fixture(scope="module")
def real():
    """Confidence and error of three judges on the 500 real rows."""
    with open(STORED.with_name("judge_probs.csv")) as file:
        rows = list(csv.DictReader(file))
    human = np.asarray([int(row["human_label"]) for row in rows])
    found = {}
    for name in ("mistral7b", "gpt35", "gpt4"):
        probs = np.asarray([[float(row[f"{name}_p1"]), float(row[f"{name}_p2"])] for row in rows])
        found[name] = jnp.asarray(probs.max(1), jnp.float32), jnp.asarray(probs.argmax(1) + 1 != human)
    return found


@pytest.mark.parametrize("name", ["mistral7b", "gpt35", "gpt4"])
def test_thresholds_and_bounds_on_the_real_table(g, real, name):
    conf, error = real[name]
    step = 1 / 4999 + 1e-6
    for a, alpha in enumerate(g["alpha"]):
        for d, delta in enumerate(g["delta"]):
            for compat, stored in ((True, "official"), (False, "textbook")):
                found = judge.fixed_sequence_test(conf, error, float(alpha), float(delta), compat=compat).lam
                expected = g[f"fst_{stored}_{name}"][a, d]
                assert found == expected or abs(found - expected) <= step, (alpha, delta, compat)
    probes = jnp.asarray(g[f"probe_lambda_{name}"], jnp.float32)
    found = judge.fixed_sequence_test(conf, error, 0.1, 0.1, grid=probes)
    np.testing.assert_array_equal(found.count, g[f"probe_n_{name}"])
    np.testing.assert_allclose(found.upper, g[f"probe_upper_{name}"], atol=1e-6)


# --- annotators and features -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def views():
    probs = jax.random.uniform(jax.random.key(0), (200, 7, 2)) + 0.01
    return probs / probs.sum(-1, keepdims=True)


def test_swapping_the_answers_changes_neither_features_nor_confidence(views):
    swapped = jnp.flip(views, -1)
    s, label = judge.features(views)
    s_swapped, label_swapped = judge.features(swapped)
    np.testing.assert_array_equal(s, s_swapped)
    np.testing.assert_array_equal(label, 1 - label_swapped)
    np.testing.assert_array_equal(judge.aggregate_annotators(views)[0], judge.aggregate_annotators(swapped)[0])
    raw, _ = judge.features(views, orient=False)
    np.testing.assert_allclose(raw, views[..., 0], atol=1e-6)
    np.testing.assert_allclose(s.mean(1), judge.aggregate_annotators(views)[0], atol=1e-6)


def test_one_view_is_the_predictive_probability(views):
    conf, label = judge.aggregate_annotators(views[:, :1])
    np.testing.assert_allclose(conf, views[:, 0].max(-1), atol=1e-6)
    np.testing.assert_array_equal(label, views[:, 0].argmax(-1))


def test_missing_views_are_left_out(views):
    holed = views.at[:, 2].set(jnp.nan).at[:, 4].set(0.0)
    kept = jnp.asarray([0, 1, 3, 5, 6])
    conf, label = judge.aggregate_annotators(holed)
    expected, expected_label = judge.aggregate_annotators(views[:, kept])
    np.testing.assert_allclose(conf, expected, atol=1e-6)
    np.testing.assert_array_equal(label, expected_label)
    s, _ = judge.features(holed)
    np.testing.assert_allclose(s[:, 2], expected, atol=1e-6)
    np.testing.assert_allclose(s.mean(1), expected, atol=1e-6)
    nothing, _ = judge.aggregate_annotators(jnp.full((2, 3, 2), jnp.nan))
    np.testing.assert_array_equal(nothing, 0.5)


def test_low_precision_views_are_normalised_in_float32():
    probs = jnp.asarray([[[0.3, 0.9]]], jnp.bfloat16)
    conf, _ = judge.aggregate_annotators(probs)
    assert conf.dtype == jnp.float32
    low, high = probs[0, 0].astype(jnp.float32)
    np.testing.assert_allclose(conf[0], high / (low + high), rtol=1e-6)


def test_presentation_orders_are_averaged():
    shown, swapped = jnp.asarray([[2.0, 0.0]]), jnp.asarray([[1.0, 3.0]])
    found = judge.verdict_probs(shown, swapped)
    first = 1 / (1 + np.exp(-2.0))
    np.testing.assert_allclose(found, [[first, 1 - first]], atol=1e-6)
    np.testing.assert_allclose(judge.verdict_probs(swapped, shown), jnp.flip(found, -1), atol=1e-6)
    uneven = judge.verdict_probs(shown, shown)
    np.testing.assert_allclose(uneven, 0.5, atol=1e-6)


def test_both_readings_of_the_views():
    assert len(judge.shot_subsets(5)) == 5
    assert len(judge.shot_subsets(5, nested=False)) == 31
    assert judge.shot_subsets(3) == [(0,), (0, 1), (0, 1, 2)]
    with pytest.raises(ConfigError, match="shots"):
        judge.shot_subsets(0)


# --- ranking ---------------------------------------------------------------------------------------------------------


def test_risks_grow_with_the_margin_and_the_surrogate_lies_above(g):
    conf = jnp.asarray(g["confidence"], jnp.float32)
    i, j = judge.sample_pairs(jax.random.key(1), jnp.asarray(g["agree"]), 800)
    assert np.asarray(g["agree"])[i].all()
    assert not np.asarray(g["agree"])[j].any()
    gammas = np.linspace(0, 0.5, 12)
    hard = np.asarray([judge.rank_loss(conf, i, j, float(x)) for x in gammas])
    soft = np.asarray([judge.rank_loss(conf, i, j, float(x), kind="soft") for x in gammas])
    assert (np.diff(hard) >= 0).all()
    assert (np.diff(soft) > 0).all()
    assert (soft >= np.log(2) * hard - 1e-6).all()


def test_pairs_are_uniform():
    agree = jnp.asarray([0, 1, 1, 0, 1, 0, 0, 1])
    i, j = judge.sample_pairs(jax.random.key(2), agree, 40_000)
    for index, members in ((i, [1, 2, 4, 7]), (j, [0, 3, 5, 6])):
        count = np.bincount(np.asarray(index), minlength=8)
        assert count[members].sum() == 40_000
        assert scipy.stats.chisquare(count[members]).pvalue > 1e-3


def test_constant_confidence_has_no_misranking_but_half_the_area():
    conf, agree = jnp.full(10, 0.4), jnp.asarray([1, 0] * 5)
    i, j = jnp.asarray([0, 2]), jnp.asarray([1, 3])
    assert judge.rank_loss(conf, i, j, 0.0) == 0
    assert judge.rank_loss(conf, i, j, 0.0, ties="half") == 0.5
    assert judge.auroc(conf, agree) == 0.5


@pytest.mark.parametrize("label", [0, 1])
def test_one_class_has_no_ranking(label):
    assert judge.auroc(jnp.linspace(0, 1, 5), jnp.full(5, label)) == 0.5


def test_auroc_is_that_of_scipy():
    rng = np.random.default_rng(0)
    conf, agree = np.round(rng.uniform(size=300), 1).astype(np.float32), rng.uniform(size=300) < 0.6
    expected = scipy.stats.mannwhitneyu(conf[agree], conf[~agree]).statistic / (agree.sum() * (~agree).sum())
    np.testing.assert_allclose(judge.auroc(jnp.asarray(conf), jnp.asarray(agree)), expected, atol=1e-6)


def test_monotonicity_violation():
    conf = jnp.linspace(0, 1, 20)
    agree = jnp.asarray([0, 1] * 5 + [1, 1] * 2 + [0, 0] + [1, 1] * 2)
    assert judge.monotonicity_violation(conf, agree, bins=10) == np.float32(1 / 9)
    assert judge.monotonicity_violation(conf, agree * 0, bins=10) == 0
    assert judge.monotonicity_violation(conf[:3], agree[:3], bins=10) == 0
    with pytest.raises(ConfigError, match="bins"):
        judge.monotonicity_violation(conf, agree, bins=1)


def test_scaling_layers_against_each_other_keeps_phi_but_not_the_proxy(g, params):
    q = 3.0
    scaled = jax.tree.map(lambda x: x, params)
    scaled["layer1"] = {name: value * q for name, value in params["layer1"].items()}
    scaled["layer2"] = {"kernel": params["layer2"]["kernel"] / q, "bias": params["layer2"]["bias"]}
    s = jnp.asarray(g["features"], jnp.float32)
    np.testing.assert_allclose(judge.confidence(scaled, s), judge.confidence(params, s), atol=1e-6)
    phi = judge.pac_bayes_complexity(params).phi
    np.testing.assert_allclose(judge.pac_bayes_complexity(scaled).phi, phi, rtol=1e-4)
    assert judge.complexity_proxy(scaled, 1.0) > 1.2 * judge.complexity_proxy(params, 1.0)


def test_the_margin_grows_with_beta_and_starts_at_the_lower_end(g):
    diff, grid = jnp.asarray(g["pair_diff"].ravel(), jnp.float32), jnp.asarray(judge.GAMMA_GRID, jnp.float32)
    gammas = np.asarray([judge.adaptive_gamma(diff, 15.0, beta, grid) for beta in (0.0, 1e-5, 1e-4, 1e-3, 1e-2)])
    assert gammas[0] == grid[0]
    assert (np.diff(gammas) > 0).all()


@pytest.mark.parametrize(("name", "value"), [("gamma", 0.0), ("delta", 1.0), ("pairs", 1)])
def test_what_the_bound_refuses(params, name, value):
    with pytest.raises(ConfigError, match=name):
        judge.pac_bayes_complexity(params, **{name: value})


# --- training --------------------------------------------------------------------------------------------------------

TINY = judge.FitConfig(epochs=2, pairs=200, batch=100, hidden=(4,))
SMALL = judge.FitConfig(epochs=6, pairs=1000, batch=100, hidden=(16, 8), lr=1e-2)


@pytest.fixture(scope="module")
def task():
    """Views whose mean says nothing: agreement depends on the spread between two of them."""
    rng = np.random.default_rng(4)
    s = rng.uniform(size=(600, 4)).astype(np.float32)
    agree = rng.uniform(size=600) < 1 / (1 + np.exp(-8 * (s[:, 0] - s[:, 1])))
    return jnp.asarray(s), jnp.asarray(agree)


def test_training_learns_the_order_and_moves_the_margin(task):
    s, agree = task
    state = judge.fit(jax.random.key(0), s[:400], agree[:400], SMALL)
    assert judge.auroc(judge.estimate(state, s[400:]), agree[400:]) > 0.85
    assert judge.auroc(s[400:].mean(1), agree[400:]) < 0.6
    assert state.history.loss[-1] < state.history.loss[0]
    np.testing.assert_array_equal(state.gamma, state.history.gamma[-1])
    assert state.gamma != SMALL.gamma


def test_a_fixed_margin_stays(task):
    config = judge.FitConfig(epochs=2, pairs=200, batch=100, hidden=(4,), adaptive=False, beta=0.0)
    state = judge.fit(jax.random.key(0), *task, config)
    np.testing.assert_allclose(state.history.gamma, 0.1, atol=1e-7)


@pytest.mark.parametrize("change", [{"loss": "bce"}, {"optimizer": "sgd", "lr": 0.3}])
def test_the_other_objectives_train_too(task, change):
    config = judge.FitConfig(**({"epochs": 6, "pairs": 1000, "batch": 100, "hidden": (16, 8), "lr": 1e-2} | change))
    state = judge.fit(jax.random.key(0), *task, config)
    assert judge.auroc(judge.estimate(state, task[0]), task[1]) > 0.75


def test_jit_and_vmap_of_training(task):
    s, agree = task[0][:300], task[1][:300]  # as in the tests below: compiled once
    keys = jax.random.split(jax.random.key(3), 2)
    alone = [judge.fit(key, s, agree, TINY) for key in keys]
    together = jax.jit(jax.vmap(lambda key: judge.fit(key, s, agree, TINY)))(keys)
    for k in range(2):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b[k], atol=1e-4), alone[k], together)  # noqa: B023


@pytest.mark.parametrize("label", [0, 1])
def test_one_class_keeps_the_heuristic_and_warns(task, label):
    s = task[0][:300]
    with pytest.warns(UserWarning, match="one class"):
        state = judge.fit(jax.random.key(0), s, jnp.full(300, label), TINY)
    assert state.fallback
    np.testing.assert_allclose(judge.estimate(state, s), s.mean(1), atol=1e-6)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params))


def test_what_training_refuses(task):
    s, agree = task
    with pytest.raises(ConfigError, match="no rows"):
        judge.fit(jax.random.key(0), s[:0], agree[:0], SMALL)
    with pytest.raises(ConfigError, match="not finite"):
        judge.fit(jax.random.key(0), s.at[3, 1].set(jnp.nan), agree, SMALL)
    for change in ({"epochs": 0}, {"tau": 0.0}, {"beta": -1.0}, {"gamma": float("nan")}):
        with pytest.raises(ConfigError, match=next(iter(change))):
            judge.FitConfig(**change)


def test_calibration_items_that_trained_are_refused(task):
    s, agree = task
    ids = jnp.arange(600)
    state = judge.fit(jax.random.key(0), s[:300], agree[:300], TINY, ids=ids[:300])
    with pytest.raises(ConfigError, match=r"found 1 calibration items.*first 299"):
        judge.calibrate(state, s[299:], agree[299:], 0.2, 0.1, ids=ids[299:])
    with pytest.raises(ConfigError, match="ids: found none"):
        judge.calibrate(state, s[300:], agree[300:], 0.2, 0.1)
    found = judge.calibrate(state, s[300:], agree[300:], 0.2, 0.1, ids=ids[300:])
    expected = judge.fixed_sequence_test(judge.estimate(state, s[300:]), ~agree[300:], 0.2, 0.1)
    np.testing.assert_array_equal(found.lam, expected.lam)


def test_gradient_of_the_penalty_at_zero_weights_is_finite():
    params = jax.tree.map(jnp.zeros_like, judge.init_estimator(jax.random.key(0), 3, (4,)))
    grads = jax.grad(lambda p: judge.complexity_proxy(p, 0.1))(params)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))
    assert judge.pac_bayes_complexity(params).phi == 0


# --- selective judging -----------------------------------------------------------------------------------------------

COARSE = jnp.linspace(0, 1, 201)
FEW = COARSE[::10]  # fewer points than most tests have items: then one shape, compiled once


def risk_at(conf):
    """A known, decreasing error rate."""
    return 0.5 * (1 - conf) ** 1.5


def draw(key, n):
    first, second = jax.random.split(key)
    conf = jax.random.uniform(first, (n,))
    return conf, jax.random.uniform(second, (n,)) < risk_at(conf)


@pytest.fixture(scope="module")
def thresholds():
    """``(alpha, keys) -> lam``: one calibration of 400 items a key."""

    def one(key, alpha):
        conf, error = draw(key, 400)
        return judge.fixed_sequence_test(conf, error, alpha, 0.1, grid=COARSE, min_count=60).lam

    return jax.jit(lambda alpha, keys: jax.lax.map(lambda key: one(key, alpha), keys, batch_size=200))


@pytest.mark.parametrize("alpha", [0.05, 0.1, 0.2])
def test_the_guarantee_by_simulation(thresholds, alpha):
    """Accepted items' true error is the mean of a known curve above the threshold: (1 - lam)^1.5 / 5."""
    delta, repeats = 0.1, 2000
    lam = np.asarray(thresholds(alpha, jax.random.split(jax.random.key(11), repeats)))
    finite = np.isfinite(lam)
    violated = finite & (0.2 * np.where(finite, 1 - lam, 0.0) ** 1.5 > alpha)
    assert violated.mean() <= delta + 3 * np.sqrt(delta * (1 - delta) / repeats)
    assert finite.any()


def test_no_error_needs_enough_items():
    """n = 30 items without an error prove 1 - 0.1^(1/30) = 0.0739 and nothing below."""
    conf, error = jnp.linspace(0.2, 0.9, 30), jnp.zeros(30, bool)
    assert judge.fixed_sequence_test(conf, error, 0.0738, 0.1, FEW).lam == jnp.inf
    assert judge.fixed_sequence_test(conf, error, 0.0740, 0.1, FEW).lam == FEW[0]


def test_accepted_sets_are_nested_in_alpha():
    conf, error = draw(jax.random.key(2), 400)
    lams = [float(judge.fixed_sequence_test(conf, error, a, 0.1, COARSE).lam) for a in (0.01, 0.05, 0.1, 0.2, 0.5)]
    assert lams == sorted(lams, reverse=True)
    assert lams[0] == np.inf
    assert lams[-1] == 0


def test_large_and_small_grids_agree():
    """With more items than grid points the bounds are inverted on the grid, else per count."""
    conf, error = draw(jax.random.key(3), 400)
    fine = judge.fixed_sequence_test(conf, error, 0.1, 0.1)
    coarse = judge.fixed_sequence_test(conf, error, 0.1, 0.1, grid=jnp.linspace(0, 1, 5000)[::20])
    np.testing.assert_allclose(coarse.upper, fine.upper[::20], atol=1e-7)
    np.testing.assert_array_equal(coarse.count, fine.count[::20])


def test_ties_at_the_threshold_are_accepted_together():
    conf = jnp.asarray([0.5] * 40 + [0.9] * 40)
    error = jnp.asarray([0] * 20 + [1] * 20 + [0] * 40)
    found = judge.fixed_sequence_test(conf, error, 0.1, 0.1, grid=jnp.asarray([0.5, 0.7, 0.9, 0.95]))
    np.testing.assert_array_equal(found.count, [80, 40, 40, 0])
    assert found.lam == np.float32(0.7)
    assert judge.selective(conf, ~error.astype(bool), 0.9).count == 40


def test_equal_confidences_accept_all_or_nothing():
    conf = jnp.full(100, 0.5)
    clean = judge.fixed_sequence_test(conf, jnp.zeros(100), 0.1, 0.1, FEW)
    assert clean.lam == 0
    wrong = judge.fixed_sequence_test(conf, jnp.ones(100), 0.9, 0.1, FEW)
    assert wrong.lam == jnp.inf
    assert wrong.upper[0] == 1


@pytest.mark.parametrize("n", [0, 1, 29])
@pytest.mark.parametrize("compat", [False, True])
def test_too_few_items_certify_nothing(n, compat):
    found = judge.fixed_sequence_test(jnp.full(n, 0.9), jnp.zeros(n), 0.5, 0.1, grid=FEW, compat=compat)
    assert found.lam == jnp.inf


def test_the_public_code_returns_a_threshold_without_a_guarantee():
    conf, error = jnp.linspace(0, 1, 100), jnp.ones(100)
    assert judge.fixed_sequence_test(conf, error, 0.1, 0.1, FEW).lam == jnp.inf
    assert np.isfinite(judge.fixed_sequence_test(conf, error, 0.1, 0.1, FEW, compat=True).lam)


def test_nan_confidence_is_never_accepted():
    conf = jnp.linspace(0.5, 1, 200).at[:50].set(jnp.nan)
    found = judge.fixed_sequence_test(conf, jnp.zeros(200), 0.1, 0.1, FEW)
    assert found.count[0] == 150
    assert judge.selective(conf, jnp.ones(200), 0.0).count == 150


def test_jit_and_vmap_of_the_test():
    conf, error = draw(jax.random.key(5), 300)
    alphas = jnp.asarray([0.05, 0.1, 0.2])

    def run(alpha):
        return judge.fixed_sequence_test(conf, error, alpha, 0.1, COARSE)

    eager = [run(alpha) for alpha in alphas]
    together = jax.jit(jax.vmap(run))(alphas)
    for k in range(3):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b[k], atol=1e-7), eager[k], together)  # noqa: B023


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"alpha": 0.0}, "eps"),
        ({"delta": 0.0}, "delta"),
        ({"delta": 1.0}, "delta"),
        ({"min_count": 0}, "min_count"),
        ({"error": jnp.full(40, 0.5)}, "error"),
        ({"grid": jnp.asarray([0.9, 0.1])}, "grid"),
    ],
)
def test_what_the_test_refuses(change, message):
    arguments = {"conf": jnp.full(40, 0.5), "error": jnp.zeros(40), "alpha": 0.1, "delta": 0.1} | change
    with pytest.raises(ConfigError, match=message):
        judge.fixed_sequence_test(**arguments)


def test_a_cascade_passes_on_what_a_judge_does_not_accept():
    weak, error_weak = draw(jax.random.key(6), 600)
    strong, error_strong = draw(jax.random.key(7), 600)
    hopeless, always_wrong = weak, jnp.ones(600, bool)
    judges = [(hopeless, always_wrong), (weak, error_weak), (strong, error_strong)]
    lams = judge.cascade_calibrate(judges, 0.1, 0.1, COARSE)
    assert lams[0] == jnp.inf
    alone = judge.fixed_sequence_test(weak, error_weak, 0.1, 0.1, COARSE).lam
    assert lams[1] == alone
    left = weak < alone
    rest = judge.fixed_sequence_test(strong[left], error_strong[left], 0.1, 0.1, COARSE).lam
    np.testing.assert_allclose(lams[2], rest, atol=1e-6)
    chosen = judge.cascade_apply([conf for conf, _ in judges], lams)
    expected = np.where(np.asarray(weak) >= alone, 1, np.where(np.asarray(strong) >= lams[2], 2, -1))
    np.testing.assert_array_equal(chosen, expected)
    with pytest.raises(ConfigError, match="judges"):
        judge.cascade_calibrate([], 0.1, 0.1)


def test_metrics_of_a_threshold():
    conf, agree = jnp.asarray([0.9, 0.8, 0.3, 0.2]), jnp.asarray([1, 0, 1, 0])
    found = judge.selective(conf, agree, 0.8)
    assert (found.coverage, found.agreement, found.count) == (0.5, 0.5, 2)
    nothing = judge.selective(conf, agree, jnp.inf)
    assert nothing.coverage == 0
    assert np.isnan(nothing.agreement)
