"""Exits, losses and selections against the authors' numpy functions on 84 trajectories, and their algebra."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmeth import risk
from jaxmeth.risk import budget

STORED = Path(__file__).parents[1] / "golden" / "11-risk-controlled-reasoning" / "trajectories.npz"


@pytest.fixture(scope="module")
def g():
    with np.load(STORED) as stored:
        return dict(stored)


@pytest.fixture
def rows(g):
    """signal, correct, length, tokens."""
    return (jnp.asarray(g["signal"]), jnp.asarray(g["correct"]), jnp.asarray(g["length"]), jnp.asarray(g["tokens"]))


@pytest.fixture
def params(g):
    return budget.LowerParams(*jnp.asarray(g["lower_params_c_shift_l_u"].T, jnp.float32))


@pytest.fixture
def grid(g):
    return jnp.asarray(g["upper_grid"], jnp.float32)


def test_smoothing(g, rows):
    signal, _, length, _ = rows
    np.testing.assert_allclose(budget.ema(signal, length, 0.2), g["ema_alpha0.2"], atol=1e-5)
    np.testing.assert_allclose(budget.ema_debiased(signal, length, 0.1), g["ema_debiased_tau0.1"], atol=1e-5)
    np.testing.assert_allclose(budget.emv_confidence(signal, length, 0.1), g["emv_confidence_tau0.1"], atol=1e-5)


def test_upper_exits_losses_and_costs(g, rows, grid):
    signal, correct, length, _ = rows
    exits = budget.upper_exit(signal, length, grid)
    np.testing.assert_array_equal(exits, g["upper_exit"])
    fired = budget.upper_fired(signal, exits, length, grid)
    counted = budget.upper_losses(exits, correct, length, fired, count_exhausted=True)
    np.testing.assert_array_equal(counted, g["upper_loss"])
    steps = budget.upper_cost(exits, correct, length) * g["length"][:, None]
    np.testing.assert_allclose(steps, g["upper_regret_steps"], atol=1e-5)


def test_lower_schedule_exits_losses_and_costs(g, rows, params):
    signal, correct, length, tokens = rows
    schedule = budget.lower_schedule(params, tokens[:4], 1.0, warmup=0.0)
    inside = np.broadcast_to((np.arange(24) < g["length"][:4, None])[:, None], schedule.shape)
    np.testing.assert_allclose(np.asarray(schedule)[inside], g["lower_threshold_first4"][inside], atol=1e-6)
    exits = budget.lower_exit(signal, length, params, tokens, 1.0, warmup=0.0)
    np.testing.assert_array_equal(exits, g["lower_exit"])
    for kind, name in (("final", "final"), ("suffix_mean", "suffix_mean")):
        losses = budget.lower_losses(exits, correct, length, kind)
        np.testing.assert_allclose(losses, g[f"lower_risk_{name}"], atol=1e-6)
    for kind, name in (("incorrect", "incorrect_frac"), ("time", "time_frac")):
        cost = budget.lower_cost(exits, correct, length, kind)
        np.testing.assert_allclose(cost, g[f"lower_efficiency_{name}"], atol=1e-6)


def test_dual_exit(g, rows, params):
    signal, _, length, tokens = rows
    upper = budget.upper_exit(signal, length, jnp.asarray([g["dual_upper_threshold"]], jnp.float32))
    lower = budget.lower_exit(signal, length, params, tokens, 1.0, warmup=0.0)
    exits, reason = budget.dual_exit(upper, lower, length)
    np.testing.assert_array_equal(exits, g["dual_exit"])
    ran_out = np.asarray(exits) == g["length"][:, None] - 1
    expected = np.where(ran_out, budget.NONE, np.where(lower < upper, budget.LOWER, budget.UPPER))
    np.testing.assert_array_equal(reason, expected)


@pytest.mark.parametrize(("rule", "name"), [("naive", "naive"), ("crc", "CRC"), ("hoeffding", "UCB")])
def test_selection_of_the_upper_threshold(g, rows, grid, rule, name):
    signal, correct, length, _ = rows
    exits = budget.upper_exit(signal, length, grid)
    losses = budget.upper_losses(exits, correct, length, exits < 0, count_exhausted=True)
    cost = budget.upper_cost(exits, correct, length)
    cost = cost * length[:, None]
    for i, eps in enumerate(g["epsilon"]):
        found = risk.calibrate(losses, cost, float(eps), 0.1, bound=rule, validity="pointwise")
        threshold = float(grid[found.index]) if found.feasible else -1.0
        stored = g[f"upper_select_{name}"][i]
        assert (threshold == -1) == (stored == -1)
        if stored != -1:
            tied = np.flatnonzero(np.asarray(cost.mean(0)) == cost[:, found.index].mean())
            assert np.isclose(g["upper_grid"][tied], stored, atol=1e-6).any()
            np.testing.assert_allclose(found.risk_hat, g[f"upper_select_{name}_risk"][i], atol=1e-6)


@pytest.mark.parametrize(("rule", "name"), [("naive", "naive"), ("crc", "CRC"), ("hoeffding", "UCB")])
def test_selection_of_the_lower_schedule(g, rows, params, rule, name):
    signal, correct, length, tokens = rows
    summary = budget.lower_summary(signal, correct, length, tokens, params, 1.0, warmup=0.0)
    for i, eps in enumerate(g["epsilon"]):
        found = risk.select(summary, float(eps), 0.1, bound=rule, validity="pointwise")
        stored = g[f"lower_select_{name}"][i]
        assert (int(found.index) == -1) == (stored == -1)
        if stored != -1:
            np.testing.assert_allclose(found.cost, summary.cost[stored], atol=1e-6)
