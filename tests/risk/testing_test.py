"""Selections: against MAPIE, by simulation of their guarantee, and at the edges (fault case 34)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.trajectories import simulate, upper_table
from jaxmeth import risk
from jaxmeth.types import ConfigError

GUARANTEED = [
    ("auto", "suffix"),
    ("clopper_pearson", "suffix"),
    ("hoeffding", "suffix"),
    ("hoeffding_bentkus", "suffix"),
    ("empirical_bernstein", "suffix"),
    ("clopper_pearson", "bonferroni"),
    ("clopper_pearson", "split"),
]
# The rest of the table runs with -m slow: what costs time is compiling.
CHEAP = [("clopper_pearson", "suffix"), ("hoeffding", "suffix"), ("empirical_bernstein", "suffix")]
CHEAP += [("clopper_pearson", "bonferroni")]
RULES = [("auto", "suffix"), ("clopper_pearson", "bonferroni"), ("clopper_pearson", "split"), ("crc", "pointwise")]
RULES += [("naive", "pointwise"), ("empirical_bernstein", "bonferroni")]
M = 4  # one number of candidates in the hand-made cases: selections compile once
GRID = jnp.linspace(0, 1.05, 106)


# --- MAPIE -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def mapie(golden):
    with np.load(golden / "11-risk-controlled-reasoning" / "mapie.npz") as stored:
        return dict(stored)


@pytest.mark.parametrize("name", ["binary", "fractional"])
def test_pvalues_of_mapie(mapie, name):
    losses = jnp.asarray(mapie[name], jnp.float32)
    found = risk.hb_pvalue(losses.mean(0)[:, None], 256, jnp.asarray(mapie["alpha"], jnp.float32)[None])
    # MAPIE does not clip its p-values at 1.
    np.testing.assert_allclose(found, np.minimum(mapie[f"{name}_pvalue"], 1), atol=1e-6)


@pytest.mark.parametrize("name", ["binary", "fractional"])
@pytest.mark.parametrize("procedure", [risk.fixed_sequence, risk.bonferroni])
def test_rejections_of_mapie(mapie, name, procedure):
    pvalues = jnp.asarray(mapie[f"{name}_pvalue"].T, jnp.float32)
    for d, delta in enumerate(mapie["delta"]):
        np.testing.assert_array_equal(procedure(pvalues, float(delta)), mapie[f"{name}_{procedure.__name__}"][:, d])


@pytest.mark.parametrize("name", ["binary", "fractional"])
@pytest.mark.parametrize("validity", ["suffix", "bonferroni"])
def test_selection_of_mapie(mapie, name, validity):
    """With the loosest threshold the cheapest, the selection is the first column that MAPIE rejects."""
    losses = jnp.asarray(mapie[name], jnp.float32)
    cost = jnp.broadcast_to(jnp.arange(40.0)[None], losses.shape)
    stored = mapie[f"{name}_{'fixed_sequence' if validity == 'suffix' else validity}"]
    for a, alpha in enumerate(mapie["alpha"]):
        for d, delta in enumerate(mapie["delta"]):
            found = risk.calibrate(losses, cost, float(alpha), float(delta), "hoeffding_bentkus", validity)
            rejected = np.flatnonzero(stored[a, d])
            assert int(found.index) == (rejected[0] if rejected.size else -1)


@pytest.mark.parametrize("name", ["binary", "fractional"])
def test_bounds_of_mapie(mapie, name):
    losses = jnp.asarray(mapie[name], jnp.float32)
    summary = risk.summarise(losses, losses)
    for rule, stored in (("hoeffding", "hoeffding"), ("empirical_bernstein", "bernstein")):
        for d, delta in enumerate(mapie["delta"]):
            expected = np.minimum(mapie[f"{name}_{stored}_{d}"], 1)
            np.testing.assert_allclose(risk.upper_bounds(summary, float(delta), rule), expected, atol=1e-6)
    np.testing.assert_allclose(risk.upper_bounds(summary, 0.1, "crc"), mapie[f"{name}_crc"], atol=1e-6)


# --- the guarantee, by simulation ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def curve():
    """True risk of every threshold, from 100,000 trajectories."""
    sample = jax.jit(lambda key: upper_table(*simulate(key, 20_000)[:3], GRID)[0].mean(0))
    return jnp.stack([sample(jax.random.key(i)) for i in range(5)]).mean(0)


@pytest.fixture(scope="module")
def draws():
    """Losses of 2,000 calibration sets of 100 trajectories, with costs."""

    def draw(key):
        losses, cost = upper_table(*simulate(key, 100)[:3], GRID)
        return losses.astype(bool), cost.mean(0)

    return jax.lax.map(draw, jax.random.split(jax.random.key(99), 2000))


LEVELS = jnp.asarray([0.1, 0.2])


def violation_rates(curve, draws, delta, bound, validity):
    """Share of the calibrations whose threshold has a true risk above eps, for each eps of LEVELS."""

    def one(draw):
        losses, cost = draw
        losses = losses.astype(jnp.float32)
        cost = jnp.broadcast_to(cost[None], losses.shape)
        found = jax.vmap(lambda eps: risk.calibrate(losses, cost, eps, delta, bound, validity))(LEVELS)
        return found.feasible & (curve[found.index] > LEVELS)

    return np.asarray(jax.lax.map(one, draws, batch_size=100).mean(0))


@pytest.mark.parametrize(
    ("bound", "validity"),
    [
        pytest.param(*rule, marks=() if rule in CHEAP else pytest.mark.slow, id="-".join(rule))
        for rule in [*GUARANTEED, ("auto", "split")]
    ],
)
def test_the_violation_rate_is_at_most_delta(curve, draws, bound, validity):
    delta = 0.1
    allowed = delta + 3 * np.sqrt(delta * (1 - delta) / 2000)
    assert (violation_rates(curve, draws, delta, bound, validity) <= allowed).all()


def test_the_naive_rule_violates_far_more_often(curve, draws):
    assert (violation_rates(curve, draws, 0.1, "naive", "pointwise") > 0.3).all()


# --- algebra ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def table():
    return upper_table(*simulate(jax.random.key(5), 150)[:3], GRID)


def admissible(losses, eps, bound, validity="pointwise"):
    """The set of admissible columns, read off by making one column at a time free."""

    def chosen(j):
        cost = jnp.where(jnp.arange(losses.shape[1]) == j, 0.0, 1.0)
        return risk.calibrate(losses, jnp.broadcast_to(cost[None], losses.shape), eps, 0.1, bound, validity).index == j

    return np.asarray(jax.lax.map(chosen, jnp.arange(losses.shape[1])))


def test_admissible_sets_are_nested(table):
    losses, _ = table
    losses = losses[:, 66:]
    naive = admissible(losses, 0.15, "naive")
    for bound in ("crc", "hoeffding", "clopper_pearson"):
        stricter = admissible(losses, 0.15, bound)
        assert stricter.any()
        assert not (stricter & ~naive).any()
        for validity in ("suffix", "bonferroni"):
            assert not (admissible(losses, 0.15, bound, validity) & ~stricter).any()
        assert not (stricter & ~admissible(losses, 0.2, bound)).any()


@pytest.mark.parametrize(("bound", "validity"), RULES)
def test_jit_vmap_and_row_order_change_nothing(table, bound, validity):
    losses, cost = table
    eps = jnp.asarray([0.01, 0.12, 0.3])

    def run(losses, cost, eps):
        return risk.calibrate(losses, cost, eps, 0.1, bound, validity)

    eager = [run(losses, cost, e) for e in eps]
    stacked = jax.tree.map(lambda *v: jnp.stack(v), *eager)
    together = jax.jit(jax.vmap(run, in_axes=(None, None, 0)))(losses, cost, eps)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), stacked, together)
    if validity != "split":  # a split is by row, so it depends on their order
        order = np.random.default_rng(0).permutation(len(losses))
        shuffled = run(losses[order], cost[order], eps[1])
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), eager[1], shuffled)


@pytest.mark.parametrize(("bound", "validity"), RULES)
@pytest.mark.parametrize("fraction", [False, True])
def test_infeasible_names_the_smallest_eps_that_would_do(table, bound, validity, fraction):
    losses, cost = table
    loose = jnp.minimum(jnp.arange(106), 39)  # the loose thresholds only, in the shape of the whole table
    losses, cost = losses[:, loose], cost[:, loose]
    losses = jnp.clip(losses, 0.03, 1.0) if fraction else losses
    eps = 0.002
    found = risk.calibrate(losses, cost, eps, 0.1, bound, validity)
    assert not found.feasible
    assert found.index == -1
    assert np.isnan(found.risk_hat)
    assert np.isnan(found.cost)
    least = float(found.bound)
    assert least > eps
    assert risk.calibrate(losses, cost, least + 2e-6, 0.1, bound, validity).feasible
    if least > eps + 1e-5:
        for smaller in np.linspace(eps, least - 1e-5, 7):
            assert not risk.calibrate(losses, cost, float(smaller), 0.1, bound, validity).feasible


def test_suffix_needs_every_stricter_column():
    losses = jnp.zeros((100, M)).at[:50, 2].set(1.0)
    cost = jnp.broadcast_to(jnp.arange(float(M))[None], losses.shape)
    assert risk.calibrate(losses, cost, 0.1, 0.1, validity="suffix").index == 3
    assert risk.calibrate(losses, cost, 0.2, 0.1, "hoeffding", validity="pointwise").index == 0


def test_auto_takes_the_exact_bound_for_zeros_and_ones_only():
    binary = jnp.zeros((40, M)).at[:3].set(1.0)
    cost = jnp.zeros((40, M))
    exact = risk.calibrate(binary, cost, 0.5, 0.1)
    assert exact.bound == risk.calibrate(binary, cost, 0.5, 0.1, "clopper_pearson").bound
    halves = jnp.zeros((40, M)).at[:6].set(0.5)
    loose = risk.calibrate(halves, cost, 0.5, 0.1)
    assert loose.bound == risk.calibrate(halves, cost, 0.5, 0.1, "hoeffding_bentkus").bound
    assert loose.bound > exact.bound
    assert not risk.calibrate(halves, cost, 0.9, 0.1, "clopper_pearson").feasible


def test_the_first_of_equal_costs_wins():
    zeros = jnp.zeros((100, M))
    assert risk.calibrate(zeros, zeros, 0.2, 0.1).index == 0


# --- fault case 34 ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bound", "validity"), RULES)
def test_no_data_proves_nothing(bound, validity):
    none = jnp.zeros((0, M))
    found = risk.calibrate(none, none, 0.5, 0.1, bound, validity)
    assert not found.feasible
    assert found.bound == 1


def test_one_row():
    one = jnp.zeros((1, M))
    assert not risk.calibrate(one, one, 0.85, 0.1).feasible
    np.testing.assert_allclose(risk.calibrate(one, one, 0.85, 0.1).bound, 0.9, atol=1e-6)
    assert risk.calibrate(one, one, 0.91, 0.1).feasible


@pytest.mark.parametrize("n", [1, 9, 99])
def test_crc_below_one_over_n_plus_one_is_infeasible_and_the_tie_is_not(n):
    clean = jnp.zeros((n, M))
    below = risk.calibrate(clean, clean, 0.999 / (n + 1), 0.1, "crc")
    assert not below.feasible
    np.testing.assert_allclose(below.bound, 1 / (n + 1), rtol=1e-6)
    assert risk.calibrate(clean, clean, 1 / (n + 1), 0.1, "crc").feasible


def test_all_right_gives_the_closed_form_and_all_wrong_nothing():
    clean = jnp.zeros((30, M))
    found = risk.calibrate(clean, clean, 0.0739, 0.1)
    assert found.feasible
    np.testing.assert_allclose(found.bound, 1 - 0.1 ** (1 / 30), atol=1e-6)
    assert not risk.calibrate(clean, clean, 0.0738, 0.1).feasible
    for bound, validity in RULES[:3]:
        wrong = risk.calibrate(jnp.ones((30, M)), clean, 0.99, 0.1, bound, validity)
        assert not wrong.feasible
        assert wrong.bound == 1


def test_hoeffding_at_fifty_rows_is_infeasible_below_its_margin():
    clean = jnp.zeros((50, M))
    assert not risk.calibrate(clean, clean, 0.151, 0.1, "hoeffding").feasible
    assert risk.calibrate(clean, clean, 0.152, 0.1, "hoeffding").feasible


def test_from_eps_one_on_everything_is_admissible():
    ones = jnp.ones((5, M))
    for eps in (1.0, 3.0):
        assert risk.calibrate(ones, ones, eps, 0.1).feasible


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"eps": 0.0}, "eps"),
        ({"eps": -0.1}, "eps"),
        ({"eps": float("nan")}, "eps"),
        ({"delta": 0.0}, "delta"),
        ({"delta": 1.0}, "delta"),
        ({"losses": jnp.full((5, 2), 1.1)}, r"losses: found values in \[1.1"),
        ({"losses": jnp.full((5, 2), -0.1)}, "losses"),
        ({"losses": jnp.full((5, 2), jnp.nan)}, "losses"),
        ({"cost": jnp.full((5, 2), jnp.nan)}, "cost"),
        ({"losses": jnp.zeros((5, 0)), "cost": jnp.zeros((5, 0))}, "m > 0"),
    ],
)
def test_what_calibrate_refuses(change, message):
    arguments = {"losses": jnp.zeros((5, 2)), "cost": jnp.zeros((5, 2)), "eps": 0.1, "delta": 0.1} | change
    with pytest.raises(ConfigError, match=message):
        risk.calibrate(**arguments)
