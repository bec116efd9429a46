"""Asymmetric prompt weights against stored values, their invariants, and the theory of time-optimal weights."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import compiled
from scipy.integrate import quad

from jaxmeth import rl
from jaxmeth.types import ConfigError

NAMES = {
    "rloo": "rloo",
    "grpo": "grpo",
    "linear": "linear_r",
    "sqrt": "sqrt_r",
    "uniform": "uniform_r",
    "plateau": "plateau_r",
}
WEIGHTS = tuple(NAMES.values())
FOLDER = "15-asymmetric-prompt-weighting"
P, G = 5, 6


@compiled
def everything(rewards, valid):
    return {name: rl.adv_prompt_weighted(rewards, valid, weight=name) for name in WEIGHTS}


@compiled
def effective(rate):
    """e and its slope of each weight."""
    return {name: jax.vmap(jax.value_and_grad(partial(rl.effective_weight, name)))(rate) for name in WEIGHTS}


@partial(compiled, static_argnames="clock")
def times(*ends, clock):
    return {name: rl.time_to_target(name, *ends, clock) for name in WEIGHTS}


@pytest.mark.parametrize("double", [False, True], ids=["float32", "float64"])
@pytest.mark.parametrize("file", ["binary_p8g8", "masked_p7g6"])
def test_stored_advantages(golden, file, double):
    with jax.enable_x64(double), np.load(golden / FOLDER / f"{file}.npz") as g:
        dtype = jnp.float64 if double else jnp.float32
        rewards, valid = jnp.asarray(g["rewards"], dtype), jnp.asarray(g["valid"], dtype)
        tolerance = {"rtol": 1e-9, "atol": 1e-12} if double else {"rtol": 1e-5, "atol": 1e-6}
        rate = rl.success_rate(rewards, valid)
        np.testing.assert_allclose(rate, g["rho"], **tolerance)
        found, e = everything(rewards, valid), effective(rate)
        for short, name in NAMES.items():
            np.testing.assert_allclose(found[name], g[f"adv_{short}"], **tolerance, err_msg=name)
            some = g["n"] > 0
            np.testing.assert_allclose(e[name][0][some], g[f"eff_{short}"][some], **tolerance, err_msg=name)
            assert not g[f"eff_{short}"][~some].any()


def binary(seed=0):
    """Every success rate, the ends included, and a ragged group."""
    rng = np.random.default_rng(seed)
    rewards = np.arange(G)[None] < np.asarray([0, 2, 3, 6, 5])[:, None]
    valid = np.ones((P, G), bool)
    valid[4, 1:3] = False
    return jnp.asarray(rng.permuted(rewards, axis=1), jnp.float32), jnp.asarray(valid)


def test_sums_and_ends():
    rewards, valid = binary()
    ends = effective(jnp.asarray([0.0, 1.0]))
    for name, adv in everything(rewards, valid).items():
        np.testing.assert_allclose(np.asarray(adv)[[1, 2, 4]].sum(1), 0, atol=1e-5)
        e, _ = ends[name]
        np.testing.assert_allclose(adv[0], -e[0])
        np.testing.assert_allclose(adv[3], e[1])
        assert e[0] == (name.endswith("_r"))
        assert e[1] == (name == "uniform_r")


def test_effective_weight_is_the_coefficient_of_the_update():
    """mean_i A_i s_i = e(p) (mean of s over right - mean of s over wrong) for any s."""
    rewards, valid = binary()
    s = jnp.asarray(np.random.default_rng(3).normal(size=(P, G)), jnp.float32)
    ok, s = np.asarray(valid), np.asarray(s)
    right = ok & (np.asarray(rewards) == 1)
    weights = effective(rl.success_rate(rewards, valid))
    for name, adv in everything(rewards, valid).items():
        (e, _), adv = weights[name], np.asarray(adv)
        for row in (1, 2, 4):
            difference = s[row][right[row]].mean() - s[row][ok[row] & ~right[row]].mean()
            np.testing.assert_allclose((adv * s)[row][ok[row]].mean(), e[row] * difference, rtol=1e-4, atol=1e-6)


def test_rows_of_the_core():
    rewards, valid = binary()
    found = everything(rewards, valid)

    @compiled
    def core(r, v):
        return rl.adv_grpo(r, v, eps=0.0, ddof=0), rl.adv_grpo(r, v, eps=0.0), rl.adv_rloo(r, v)

    population, sample, rloo = core(rewards, valid)
    weighted = compiled(lambda r, v: [rl.adv_prompt_weighted(r, v, weight=w, ddof=1) for w in ("grpo", "linear_r")])
    bessel, linear = weighted(rewards, valid)
    np.testing.assert_allclose(found["grpo"], population, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(bessel, sample, rtol=1e-5, atol=1e-6)
    n = np.asarray(valid).sum(1, keepdims=True)
    np.testing.assert_allclose(found["rloo"] * n / (n - 1), rloo, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(linear, found["linear_r"])


def test_as_prompt_weight_agrees_inside():
    rewards, valid = binary()
    centred = np.asarray(rl.adv_dr_grpo(rewards, valid))
    weights = compiled(lambda *a: {name: rl.as_prompt_weight(name)(*a) for name in WEIGHTS})(rewards, valid)
    for name, adv in everything(rewards, valid).items():
        product = centred * weights[name][:, None]
        np.testing.assert_allclose(product[[1, 2, 4]], np.asarray(adv)[[1, 2, 4]], rtol=1e-5, atol=1e-6)
        assert not product[[0, 3]].any()


def test_zero_success():
    rewards, valid = binary()
    settings = ({}, {"zero_success": "drop"}, {"zero_success_scale": 0.5})
    kept, dropped, half = compiled(lambda r: [rl.adv_prompt_weighted(r, valid, **k) for k in settings])(rewards)
    np.testing.assert_array_equal(kept[0], -1)
    np.testing.assert_array_equal(dropped[0], 0)
    np.testing.assert_array_equal(half[0], -0.5)
    for other in (dropped, half):
        np.testing.assert_array_equal(other[1:], kept[1:])
    scales = [[float(rl.zero_success_warmup(t, 10, ramp=ramp)) for t in (0, 5, 9, 10, 50)] for ramp in (False, True)]
    np.testing.assert_allclose(scales, [[0, 0, 0, 1, 1], [0, 0.5, 0.9, 1, 1]], rtol=1e-6)
    assert rl.zero_success_warmup(0, 0, ramp=True) == 1


def test_graded_rewards():
    """A usable reward outside {0, 1} makes the prompt graded: w(mean) (r - mean); a masked one does not."""
    rewards = jnp.asarray([[0.25, 0.5, 1.0, 0.0], [0.3, 0.0, 1.0, 0.0], [-3.0, -1.0, -1.0, -1.0]])
    valid = np.ones((3, 4))
    valid[1, 0] = 0
    found = compiled(rl.adv_prompt_weighted)(rewards, valid)
    rewards, mean = np.asarray(rewards), 1.75 / 4
    np.testing.assert_allclose(found[0], (rewards[0] - mean) / mean, rtol=1e-5)
    np.testing.assert_allclose(found[1], [0, -1, 2, -1], rtol=1e-6)
    # The mean is clipped to [1/8, 7/8] inside w.
    np.testing.assert_allclose(found[2], (rewards[2] + 1.5) * 8, rtol=1e-5)


def test_any_effective_weight():
    rewards, valid = binary()
    settings = ({"weight": lambda p: 1 - p}, *({"weight": "plateau_r", "tau": tau} for tau in (0.0, 1.0)))
    own, low, high = compiled(lambda r: [rl.adv_prompt_weighted(r, valid, **k) for k in settings])(rewards)
    named = everything(rewards, valid)
    np.testing.assert_allclose(own, named["linear_r"], rtol=1e-6)
    np.testing.assert_allclose(low, named["linear_r"], rtol=1e-6)
    np.testing.assert_allclose(high, named["uniform_r"], rtol=1e-6)


@pytest.mark.parametrize("name", WEIGHTS)
def test_shape_of_the_weights(name):
    """Asymmetric ones fall with p, the others are symmetric; values and gradients are finite at both ends."""
    e, slope = effective(jnp.linspace(0, 1, 101))[name]
    assert np.isfinite(e).all()
    assert np.isfinite(slope).all()
    if name in ("linear_r", "sqrt_r"):
        assert (slope[1:-1] < 0).all()
    elif name != "plateau_r":
        np.testing.assert_allclose(e, e[::-1], atol=1e-6)


def test_degenerate_groups():
    """Cases 30 and 31: NaN rewards, groups of none and of one, no prompts, rewards of 1e30."""
    rewards, valid = binary()
    changed, some, fewer = np.array(rewards), np.array(valid), np.array(valid)
    changed[1, 0] = np.nan
    changed[2] *= 1e30
    some[0] = fewer[1, 0] = False
    spoilt, absent = everything(changed, some), everything(rewards, fewer)
    for name, adv in spoilt.items():
        assert np.isfinite(adv).all(), name
        assert not np.asarray(adv[0]).any()
        np.testing.assert_array_equal(adv[1], absent[name][1])
        np.testing.assert_array_equal(adv[3:], absent[name][3:])
    assert everything(jnp.zeros((0, 4)), jnp.zeros((0, 4)))["grpo"].shape == (0, 4)
    np.testing.assert_array_equal(everything(jnp.asarray([[0.0], [1.0]]), jnp.ones((2, 1)))["linear_r"], [[-1], [0]])
    grad = compiled(jax.grad(lambda r: rl.adv_prompt_weighted(r, valid, weight="grpo").sum()))(rewards)
    np.testing.assert_array_equal(grad, 0)


def test_ragged_groups_agree():
    rewards, valid = binary()
    keep = np.flatnonzero(np.asarray(valid).reshape(-1))
    ids = jnp.asarray(np.repeat(np.arange(P), G)[keep])
    ragged = compiled(lambda r: rl.adv_prompt_weighted(r, group_ids=ids, num_groups=P, weight="plateau_r"))
    found = ragged(np.asarray(rewards).reshape(-1)[keep])
    expected = everything(rewards, valid)["plateau_r"].reshape(-1)[keep]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


# --- theory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("double", [False, True], ids=["float32", "float64"])
def test_stored_times(golden, double):
    rows = json.loads((golden / FOLDER / "theory_times.json").read_text())
    with jax.enable_x64(double):
        tolerance = 1e-6 if double else 1e-5
        for row in rows:
            ends = row["rho0"], row["rho1"], row["budget"]
            for clock in ("regular", "effective"):
                optimum = rl.optimal_time(*ends, clock)
                np.testing.assert_allclose(optimum, row[f"{clock}_optimum"], rtol=tolerance)
                time = times(*ends, clock=clock)
                for short, name in NAMES.items():
                    found = time[name]
                    np.testing.assert_allclose(found, row[short][clock], rtol=tolerance)
                    best = (short, clock) in (("grpo", "regular"), ("sqrt", "effective"))
                    assert bool(found > optimum * (1 + 1e-3)) != best


def test_duality_and_scale(x64):
    ends = 0.02, 0.8, 2.0
    regular, rollouts = (times(*ends, clock=clock) for clock in ("regular", "effective"))
    np.testing.assert_allclose(regular["rloo"], regular["uniform_r"], rtol=1e-9)
    np.testing.assert_allclose(rollouts["linear_r"], rollouts["uniform_r"], rtol=1e-9)
    np.testing.assert_allclose(regular["grpo"] * 2, times(*ends[:2], 1.0, clock="regular")["grpo"], rtol=1e-12)
    np.testing.assert_allclose(rl.time_to_target(lambda p: 7 / p, *ends), regular["linear_r"], rtol=1e-12)


def test_any_clock(x64):
    """c(p) = p: the optimal weight reaches the bound, another does not; the bound against scipy's quadrature."""
    clock = lambda p: p  # noqa: E731
    bound = rl.optimal_time(0.1, 0.9, 3.0, clock)
    expected = quad(lambda p: (1 / (1 - p)) ** 0.5, 0.1, 0.9)[0] ** 2 / 3
    np.testing.assert_allclose(bound, expected, rtol=1e-8)
    best = rl.time_to_target(lambda p: rl.optimal_weight(p, clock), 0.1, 0.9, 3.0, clock)
    np.testing.assert_allclose(best, bound, rtol=1e-9)
    assert rl.time_to_target("linear_r", 0.1, 0.9, 3.0, clock) > 1.1 * bound


def test_just_below_one():
    """The square of a sine rounds to 1 there."""
    found = times(0.1, np.nextafter(np.float32(1), np.float32(0)), 1.0, clock="regular")
    assert all(np.isfinite(time) for time in found.values())
    np.testing.assert_allclose(found["grpo"], rl.optimal_time(0.1, 1.0), rtol=1e-3)


def test_optimal_weights_are_grpo_and_sqrt():
    p = jnp.linspace(0.05, 0.95, 19)
    for clock, name in (("regular", "grpo"), ("effective", "sqrt_r")):
        expected = rl.effective_weight(name, p) / (p * (1 - p))
        np.testing.assert_allclose(rl.optimal_weight(p, clock), expected, rtol=1e-5)


def test_stored_trajectories(golden, x64):
    stored = json.loads((golden / FOLDER / "logodds_traj.json").read_text())
    for short, name in NAMES.items():

        def step(p, _, name=name):
            w = rl.effective_weight(name, p) / (p * (1 - p))
            moved = jnp.minimum(rl.logodds_step(p, w, stored["eta"]), 1 - 1e-9)
            return moved, moved

        _, path = jax.lax.scan(step, jnp.asarray(stored["rho0"]), length=60)
        np.testing.assert_allclose(path, stored[short][1:], rtol=1e-9)


def test_logodds_step_at_the_ends():
    found = rl.logodds_step(jnp.asarray([0.0, 1.0, 0.5]), jnp.asarray([jnp.inf, jnp.inf, 2.0]), 0.5)
    np.testing.assert_allclose(found, [0, 1, 1 / (1 + np.exp(-1))], rtol=1e-6)


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda r: rl.adv_prompt_weighted(r, weight="cubic"), "weight"),
        (lambda r: rl.adv_prompt_weighted(r, zero_success="skip"), "zero_success"),
        (lambda r: rl.adv_prompt_weighted(r, weight="plateau_r", tau=1.5), "tau"),
        (lambda r: rl.adv_prompt_weighted(r, ddof=2), "ddof"),
        (lambda r: rl.adv_prompt_weighted(r, jnp.ones((2, 2))), "valid"),
        (lambda r: rl.as_prompt_weight("cubic"), "weight"),
        (lambda r: rl.as_prompt_weight(tau=float("nan")), "tau"),
        (lambda r: rl.optimal_weight(r[0], "wall"), "clock"),
        (lambda r: rl.optimal_time(0.0, 0.5), "p0"),
        (lambda r: rl.optimal_time(0.1, 1.5), "p1"),
        (lambda r: rl.time_to_target("grpo", 0.1, 0.5, 0.0), "budget"),
        (lambda r: rl.time_to_target("cubic", 0.1, 0.5), "weight"),
        (lambda r: rl.zero_success_warmup(3, -1), "steps"),
        (lambda r: rl.adv_prompt_weighted(r, zero_success_scale=float("nan")), "zero_success_scale"),
        (lambda r: rl.adv_prompt_weighted(r, zero_success_scale=-1.0), "zero_success_scale"),
        (lambda r: rl.adv_prompt_weighted(r, zero_success_scale=float("inf")), "zero_success_scale"),
        (lambda r: rl.time_to_target("grpo", 0.1, 1.0), "p1"),
        (lambda r: rl.effective_weight("grpo", jnp.asarray([0.5, -1.0])), "p"),
        (lambda r: rl.effective_weight("grpo", jnp.asarray(2.0)), "p"),
        (lambda r: rl.effective_weight("grpo", jnp.asarray(jnp.nan)), "p"),
    ],
)
def test_bad_input_names_the_field(call, field):
    with pytest.raises(ConfigError, match=f"^{field}: found"):
        call(jnp.asarray([[0.0, 1.0]]))
