"""Exits, losses and selections against the authors' numpy functions on 84 trajectories, and their algebra."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.trajectories import simulate, upper_table
from jaxmeth import models, risk
from jaxmeth.risk import budget
from jaxmeth.types import ConfigError, StepInfo

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


# --- algebra of the exits --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made():
    return simulate(jax.random.key(3), 90)


SCHEDULES = budget.lower_grid(
    jnp.asarray([0.0, 0.002, 0.01]), jnp.asarray([0.2, 0.6]), jnp.asarray([-1.0, 0.2]), jnp.asarray([0.5, 0.7])
)


def test_upper_exits_grow_with_the_threshold(made):
    signal, _, length, _ = made
    grid = jnp.linspace(0, 1.05, 64)
    exits = np.asarray(budget.upper_exit(signal, length, grid))
    assert (np.diff(exits, axis=1) >= 0).all()
    inside = np.arange(24)[None] < np.asarray(length)[:, None]
    lowest = np.where(inside, signal, np.inf).min()
    ends = budget.upper_exit(signal, length, jnp.asarray([lowest, 1.01], jnp.float32))
    np.testing.assert_array_equal(ends[:, 0], 0)
    np.testing.assert_array_equal(ends[:, 1], length - 1)


def test_schedules_at_their_limits(made):
    tokens = made[3]
    params = budget.LowerParams(*jnp.asarray([[0.0, 0.5, -0.4, 0.8], [50.0, 0.5, -0.4, 0.8], [0.01, 0.3, 0.6, 0.6]]).T)
    flat, step, constant = jnp.moveaxis(budget.lower_schedule(params, tokens, 3000.0, warmup=0.0), 1, 0)
    np.testing.assert_allclose(flat, 0.2, atol=1e-6)
    np.testing.assert_allclose(constant, 0.6, atol=1e-6)
    np.testing.assert_allclose(step, np.where(tokens < 1500, -0.4, np.where(tokens > 1500, 0.8, 0.2)), atol=1e-4)


def test_warm_up_never_fires(made):
    signal, _, length, tokens = made
    always = budget.LowerParams(*jnp.asarray([[0.0, 0.0, 2.0, 2.0]]).T)
    exits = np.asarray(budget.lower_exit(signal - 3.0, length, always, tokens, 1.0, warmup=700.0))[:, 0]
    reached = np.asarray(tokens) >= 700
    first = np.where(reached.any(1), reached.argmax(1), 99)
    np.testing.assert_array_equal(exits, np.minimum(first, np.asarray(length) - 1))
    schedule = budget.lower_schedule(always, tokens, 1.0, warmup=700.0)[:, 0]
    np.testing.assert_array_equal(schedule, np.where(reached, 2.0, -1.0))


def test_a_disabled_lower_rule_leaves_the_upper_rule(made):
    signal, _, length, tokens = made
    upper = budget.upper_exit(signal, length, jnp.asarray([0.7, 0.9]))
    for level in (-1.0, -jnp.inf):
        off = budget.LowerParams(*jnp.asarray([[0.0, 0.0, level, level]] * 2).T)
        lower = budget.lower_exit(signal, length, off, tokens, 3000.0)
        exits, reason = budget.dual_exit(upper, lower, length)
        np.testing.assert_array_equal(exits, upper)
        assert not (reason == budget.LOWER).any()


def test_ties_fire_both_rules_and_the_upper_wins():
    signal, length = jnp.asarray([[0.2, 0.5, 0.1]]), jnp.asarray([3])
    tokens = jnp.asarray([[1, 2, 3]])
    upper = budget.upper_exit(signal, length, jnp.asarray([0.5]))
    level = budget.LowerParams(*jnp.asarray([[0.0, 0.0, 0.5, 0.5]]).T)
    assert upper[0, 0] == 1
    assert budget.lower_exit(signal, length, level, tokens, 1.0, warmup=0.0)[0, 0] == 0
    late = budget.lower_exit(signal, length, level, tokens, 1.0, warmup=2.0)
    assert late[0, 0] == 1
    assert budget.dual_exit(upper, late, length)[1][0, 0] == budget.UPPER


def test_nan_does_not_fire_and_is_skipped_by_the_average():
    signal = jnp.asarray([[jnp.nan, 0.4, jnp.nan, 0.8, 0.1]])
    length, tokens = jnp.asarray([5]), jnp.arange(5)[None]
    y = budget.ema(signal, length, 0.5)
    np.testing.assert_allclose(y, [[np.nan, 0.4, np.nan, 0.6, 0.35]], atol=1e-6)
    np.testing.assert_array_equal(budget.upper_exit(y, length, jnp.asarray([-9.0, 0.5, 2.0])), [[1, 3, 4]])
    always = budget.LowerParams(*jnp.asarray([[0.0, 0.0, 9.0, 9.0]]).T)
    assert budget.lower_exit(y, length, always, tokens, 1.0, warmup=0.0)[0, 0] == 1


def test_one_checkpoint_and_none():
    """A trajectory of one checkpoint exits there; one without any never fires and costs nothing."""
    signal, correct = jnp.asarray([[0.9, 0.0], [0.9, 0.0]]), jnp.zeros((2, 2), bool)
    length, tokens, grid = jnp.asarray([1, 0]), jnp.asarray([[300, 0], [0, 0]]), jnp.asarray([0.0, 0.5])
    upper = budget.upper_exit(signal, length, grid)
    lower = budget.lower_exit(signal, length, budget.LowerParams(*jnp.full((4, 2), 0.95)), tokens, 1.0)
    np.testing.assert_array_equal(upper, 0)
    np.testing.assert_array_equal(lower, 0)
    np.testing.assert_array_equal(budget.dual_exit(upper, lower, length)[1], budget.NONE)
    fired = budget.upper_fired(signal, upper, length, grid)
    np.testing.assert_array_equal(fired, [[True, True], [False, False]])
    np.testing.assert_array_equal(budget.upper_losses(upper, correct, length, fired), [[1, 1], [0, 0]])
    np.testing.assert_array_equal(budget.upper_losses(upper, correct, length, fired, True), [[1, 1], [0, 0]])
    np.testing.assert_array_equal(budget.upper_cost(upper, correct, length), 0)
    np.testing.assert_array_equal(budget.lower_losses(lower, correct, length), 0)
    np.testing.assert_array_equal(budget.lower_cost(lower, correct, length), [[1, 1], [0, 0]])


def test_the_two_upper_losses_differ_only_where_nothing_fired(made):
    signal, correct, length, _ = made
    grid = jnp.asarray([0.5, 0.8, 1.1])
    exits = budget.upper_exit(signal, length, grid)
    fired = budget.upper_fired(signal, exits, length, grid)
    paper = budget.upper_losses(exits, correct, length, fired)
    code = budget.upper_losses(exits, correct, length, fired, count_exhausted=True)
    np.testing.assert_array_equal(paper, code * fired)
    assert code[:, 2].mean() > 0.2
    assert paper[:, 2].sum() == 0


def test_calm_signals_are_confident_and_the_average_is_the_identity_at_one(made):
    signal, _, length, _ = made
    np.testing.assert_array_equal(budget.ema(signal, length, 1.0), np.where(inside(length), signal, 0))
    calm = budget.emv_confidence(jnp.full((1, 60), 0.7), jnp.asarray([60]), 0.1)
    assert calm[0, -1] > 0.9
    assert calm[0, 0] == 0


def inside(length):
    return np.arange(24)[None] < np.asarray(length)[:, None]


# --- search and calibration ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("levels", [1, 4])
@pytest.mark.parametrize("kind", ["suffix_mean", "final"])
def test_the_streamed_search_sums_the_loss_matrix(made, levels, kind):
    signal, correct, length, tokens = made
    stop = budget.upper_exit(signal, length, jnp.asarray([0.85]))
    lower = budget.lower_exit(signal, length, SCHEDULES, tokens, 3000.0)
    exits, _ = budget.dual_exit(stop, lower, length)
    gave_up = jnp.where(lower < stop, lower, length[:, None] - 1)
    losses = budget.lower_losses(gave_up, correct, length, kind)
    expected = risk.summarise(losses, budget.lower_cost(exits, correct, length))
    found = budget.lower_summary(
        signal, correct, length, tokens, SCHEDULES, 3000.0, stop=stop[:, 0], kind=kind, levels=levels
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4, rtol=1e-5), found, expected)


def test_levels_must_share_slope_and_shift(made):
    with pytest.raises(ConfigError, match="divisor"):
        budget.lower_summary(*made, SCHEDULES, 3000.0, levels=5)
    with pytest.raises(ConfigError, match="different shift"):
        budget.lower_summary(*made, SCHEDULES, 3000.0, levels=8)


def calibrated(data, **changes):
    settings = {"budget": 3000.0, "eps_upper": 0.2, "eps_lower": 0.25, "alpha": 0.7} | changes
    return budget.calibrate_budget(*data, jnp.linspace(0, 1.05, 64), SCHEDULES, levels=4, **settings)


@pytest.fixture(scope="module")
def many():
    return simulate(jax.random.key(8), 400)


def test_two_stages(many):
    found = calibrated(many)
    assert found.upper.feasible
    assert found.lower.feasible
    assert found.upper.bound <= 0.2 + 1e-6
    assert found.lower.bound <= 0.25 + 1e-6
    np.testing.assert_allclose(found.confidence, 0.9, atol=1e-6)
    assert 0 <= found.dual_risk <= found.dual_bound <= 1
    assert found.dual_risk <= found.upper.risk_hat  # the lower rule only takes answers away


def test_an_infeasible_stage_never_stops(many):
    signal, _, length, tokens = many
    found = calibrated(many, eps_upper=1e-3, eps_lower=1e-3, count_exhausted=True)
    assert not found.upper.feasible
    assert found.upper.index == -1
    assert found.policy.upper == jnp.inf
    assert not found.lower.feasible
    assert found.policy.lo == -jnp.inf
    assert found.count_exhausted
    assert found.upper.bound > 0.3  # the error at full budget is the floor of the code's loss
    actions, _ = run_online(found.policy, signal, length, tokens)
    assert not actions.any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"length": jnp.zeros(400, jnp.int32)}, "length: found 0 at row 0"),
        ({"length": jnp.full(400, 25)}, "length: found 25"),
        ({"eps_lower": 0.0}, "eps"),
        ({"delta_lower": 1.0}, "delta"),
        ({"eps_upper": -1.0}, "eps"),
        ({"lower_validity": "split"}, "lower_validity"),
    ],
)
def test_what_calibration_refuses(many, change, message):
    names = ("signal", "correct", "length", "tokens")
    data = dict(zip(names, many, strict=True)) | {k: v for k, v in change.items() if k in names}
    rest = {k: v for k, v in change.items() if k not in names}
    with pytest.raises(ConfigError, match=message):
        calibrated(tuple(data.values()), **rest)


def test_shapes_that_disagree_are_refused():
    """Asked of the check itself: the shape checker of the tests would be first."""
    signal, length = jnp.zeros((4, 5)), jnp.ones(4, int)
    for tokens, rows in ((jnp.zeros((4, 3)), length), (signal, length[:2])):
        with pytest.raises(ConfigError, match=r"expected equal \[n, T\]"):
            budget._check_trajectories(signal, signal > 0, rows, tokens)


def test_an_unsorted_grid_is_refused(many):
    with pytest.raises(ConfigError, match="sorted"):
        budget.calibrate_budget(*many, jnp.asarray([0.9, 0.1]), SCHEDULES, budget=1.0, eps_upper=0.1, eps_lower=0.1)


def test_an_ensemble_is_the_cheapest_certified_signal_and_of_one_signal_its_calibration():
    table = jax.jit(lambda key: upper_table(*simulate(key, 200)[:3], jnp.linspace(0, 1.05, 64)))
    tables = [table(jax.random.key(i)) for i in (1, 2)]
    losses, cost = (jnp.stack(values) for values in zip(*tables, strict=True))
    cost = cost.at[1].add(0.2)
    signal, found = budget.calibrate_ensemble(losses, cost, 0.15, 0.1, "hoeffding")
    alone = risk.calibrate(losses[0], cost[0], 0.15, 0.05, "hoeffding")
    assert signal == 0
    jax.tree.map(np.testing.assert_array_equal, found, alone)
    signal, found = budget.calibrate_ensemble(losses[1:], cost[1:], 0.2, 0.1, "hoeffding")
    jax.tree.map(np.testing.assert_array_equal, found, risk.calibrate(losses[1], cost[1], 0.2, 0.1, "hoeffding"))
    signal, found = budget.calibrate_ensemble(losses, cost, 1e-4, 0.1, "hoeffding")
    assert signal == -1
    assert not found.feasible
    np.testing.assert_allclose(found.bound, np.sqrt(np.log(20) / 400), atol=1e-6)
    with pytest.raises(ConfigError, match="losses"):
        budget.calibrate_ensemble(losses - 1, cost, 0.15, 0.1)


# --- online ----------------------------------------------------------------------------------------------------------


def run_online(policy, signal, length, tokens):
    """First action of each trajectory and its checkpoint (the last one where there was none)."""
    state = budget.stop_init((signal.shape[0],))
    actions = []
    for t in range(signal.shape[1]):
        state, action = budget.stop_step(state, signal[:, t], tokens[:, t], policy)
        actions.append(np.where(t < np.asarray(length), action, 0))
    actions = np.stack(actions, 1)
    acted = (actions != 0).any(1)
    first = np.where(acted, (actions != 0).argmax(1), np.asarray(length) - 1)
    return np.where(acted, actions[np.arange(len(first)), first], 0), first


def test_online_acts_where_the_batch_exits(many):
    signal, _, length, tokens = many
    policy = calibrated(many).policy
    y = budget.ema(signal, length, policy.alpha)
    upper = budget.upper_exit(y, length, policy.upper[None])
    params = budget.LowerParams(policy.c[None], policy.shift[None], policy.lo[None], policy.hi[None])
    lower = budget.lower_exit(y, length, params, tokens, policy.budget, 200.0)
    exits, reason = (np.asarray(value)[:, 0] for value in budget.dual_exit(upper, lower, length))
    actions, first = run_online(policy, signal, length, tokens)
    np.testing.assert_array_equal(first, exits)
    early = exits < np.asarray(length) - 1
    np.testing.assert_array_equal(actions[early], reason[early])
    assert {0, 1, 2} <= set(reason.tolist())


def test_online_under_jit(many):
    signal, _, _, tokens = many
    policy = calibrated(many).policy
    state = budget.stop_init((400,))
    eager = budget.stop_step(state, signal[:, 0], tokens[:, 0], policy)
    jitted = jax.jit(budget.stop_step)(state, signal[:, 0], tokens[:, 0], policy)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), eager, jitted)


def test_observe_stops_each_row_by_its_own_signal():
    """Row 0 is sure from its second checkpoint on, row 1 never, row 2 hopeless after the warm-up."""
    policy = budget.Policy(*[jnp.asarray(v) for v in (0.9, 0.0, 0.0, 0.1, 0.1, 100.0, 6.0, 1.0)])
    step = budget.observe(policy, every=2)
    entropies = jnp.asarray([[0.5, 0.5, 0.05, 0.05, 0.5, 0.5], [0.5] * 6, [0.99] * 6])
    carry, active = budget.observe_init(3), jnp.ones(3, bool)
    stops = []
    for t in range(6):
        zeros = jnp.zeros(3)
        carry, stop = step(carry, StepInfo(jnp.zeros(3, jnp.int32), zeros, entropies[:, t], None, active))
        stops.append(np.asarray(stop))
        active = active & ~stop
    np.testing.assert_array_equal(np.stack(stops, 1).argmax(1), [3, 0, 5])
    np.testing.assert_array_equal(carry.action, [budget.UPPER, budget.NONE, budget.LOWER])
    np.testing.assert_array_equal(carry.tokens, [4, 6, 6])
    with pytest.raises(ConfigError, match="every"):
        budget.observe(policy, every=0)


def test_generation_is_stopped_by_the_policy_row_by_row():
    """Inside the compiled loop of ``models.generate``: each row ends where the batch rule exits on its own signal."""
    cfg, new = models.DecoderConfig("llama", 61, 32, 2, 4, 2, 8, 64, 64), 12
    params = jax.tree.map(lambda p: 4 * p, models.init(cfg, jax.random.key(0)))
    prompts = jax.random.randint(jax.random.key(1), (6, 4), 0, 61, jnp.int32)

    def generate(**how):
        mask = jnp.ones(prompts.shape, bool)
        return models.generate(params, cfg, prompts, mask, key=jax.random.key(2), max_new_tokens=new, **how)

    free = generate()
    signal, length = 1.0 - free.entropy, jnp.full(6, new)
    tokens = jnp.broadcast_to(jnp.arange(1, new + 1)[None], signal.shape)
    y = budget.ema(signal, length, 0.7)
    high, low = (float(jnp.quantile(y, q)) for q in (0.9, 0.12))
    policy = budget.Policy(*[jnp.float32(v) for v in (high, 0.0, 0.0, low, low, 1.0, 3.0, 0.7)])
    level = budget.LowerParams(*[v[None] for v in policy[1:5]])
    upper = budget.upper_exit(y, length, policy.upper[None])
    lower = budget.lower_exit(y, length, level, tokens, 1.0, 3.0)
    exits, reason = (np.asarray(value)[:, 0] for value in budget.dual_exit(upper, lower, length))
    assert {budget.UPPER, budget.LOWER} <= set(reason.tolist())
    assert len(set(exits.tolist())) > 2

    stopped = generate(observe=budget.observe(policy), carry=budget.observe_init(6))
    np.testing.assert_array_equal(stopped.lengths, exits + 1)
    early = exits < new - 1
    np.testing.assert_array_equal(np.asarray(stopped.carry.action)[early], reason[early])
    kept = np.arange(new)[None] < np.asarray(stopped.lengths)[:, None]
    np.testing.assert_array_equal(stopped.tokens, np.where(kept, free.tokens, 0))
