"""The RIF filter and continual metrics against stored values, their invariants, and the loop over tasks."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import compiled

from jaxmeth import rl
from jaxmeth.types import ConfigError

SETTINGS = {
    "paper": {},
    "strict": {"min_successes": 2},
    "learnable": {"max_pass_rate": 0.999},
    "soft": {"success_threshold": 0.5},
}


@pytest.mark.parametrize("double", [False, True], ids=["float32", "float64"])
@pytest.mark.parametrize("file", ["filter_x12n8", "filter_x6n4"])
def test_stored_filters_and_metrics(golden, file, double):
    with jax.enable_x64(double), np.load(golden / "08-rif-rft" / f"{file}.npz") as g:
        dtype, rtol = (jnp.float64, 1e-9) if double else (jnp.float32, 1e-5)
        rewards, valid = jnp.asarray(g["rewards"], dtype), jnp.asarray(g["valid"], dtype)
        found = compiled(lambda r, v: {name: rl.rif_filter(r, v, **k) for name, k in SETTINGS.items()})(rewards, valid)
        for name, result in found.items():
            np.testing.assert_array_equal(result.keep, g[f"{name}/keep"], err_msg=name)
            for field in ("pass_rate", "mean", "var", "best"):
                expected = g[f"{name}/{field}"]
                np.testing.assert_allclose(getattr(result, field), expected, rtol=rtol, atol=rtol, err_msg=field)
        acc, base = jnp.asarray(g["acc_matrix"], dtype), jnp.asarray(g["base"], dtype)
        stored = [g[k] for k in ("avg_acc", "forgetting", "backward_transfer", "avg_gain")]
        np.testing.assert_allclose(jnp.stack(jax.jit(rl.continual_metrics)(acc, base)), stored, rtol=rtol)


def binary(seed=0, rate=0.3):
    rng = np.random.default_rng(seed)
    rewards = (rng.uniform(size=(12, 8)) < rate).astype(np.float32)
    rewards[0], rewards[1] = 0, 1
    valid = rng.uniform(size=rewards.shape) < 0.8
    valid[2] = False
    return jnp.asarray(rewards), jnp.asarray(valid)


def test_invariants():
    rewards, valid = binary()
    everything = rl.rif_filter(rewards, valid, min_successes=0).keep
    np.testing.assert_array_equal(everything, np.asarray(valid).any(1))
    kept = [rl.rif_filter(rewards, valid, min_successes=k).keep for k in range(5)]
    assert all((np.asarray(b) <= np.asarray(a)).all() for a, b in pairwise(kept))
    assert kept[4].sum() < kept[1].sum() < kept[0].sum()
    learnable = rl.rif_filter(rewards, valid, max_pass_rate=0.999)
    np.testing.assert_array_equal(learnable.keep, learnable.var > 0)
    np.testing.assert_array_equal(learnable.keep, rl.reward_variance(rewards, valid) > 0)
    order = np.random.default_rng(1).permutation(8)
    shuffled = rl.rif_filter(rewards[:, order], valid[:, order])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), shuffled, rl.rif_filter(rewards, valid))


def test_threshold_is_monotone():
    rewards = jnp.asarray(np.random.default_rng(2).uniform(size=(12, 8)), jnp.float32)
    sizes = [int(rl.rif_filter(rewards, success_threshold=t).keep.sum()) for t in (0.0, 0.8, 0.9, 0.99, 1.1)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == 12 > sizes[-1] == 0


def test_probability_of_keeping():
    """1 - (1-q)^N within three standard errors."""
    q, times, rollouts = 0.15, 20_000, 8
    success = jax.random.bernoulli(jax.random.key(0), q, (times, rollouts)).astype(jnp.float32)
    expected = 1 - (1 - q) ** rollouts
    error = (expected * (1 - expected) / times) ** 0.5
    assert abs(float(rl.rif_filter(success).keep.mean()) - expected) < 3 * error


def test_gradient_scale():
    rewards, valid = binary()
    p = np.asarray(rl.success_rate(rewards, valid))
    np.testing.assert_allclose(rl.gradient_scale(rewards, valid), np.sqrt(p * (1 - p)), rtol=1e-4, atol=1e-6)
    plain = rl.gradient_scale(rewards, valid, standardised=False)
    np.testing.assert_allclose(plain, p * (1 - p), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(plain, rl.reward_variance(rewards, valid), rtol=1e-6)


def test_unusable_rewards_are_left_out():
    """Case 30, and rewards of 1e30."""
    rewards = jnp.asarray([[jnp.nan, 1.0, 0.0, 0.0], [jnp.nan, jnp.inf, 0.0, 0.0], [1e30, 0.0, 0.0, 0.0]])
    found = rl.rif_filter(rewards)
    np.testing.assert_array_equal(found.keep, [True, False, True])
    np.testing.assert_allclose(found.pass_rate, [1 / 3, 0, 1 / 4])
    assert not any(np.isnan(x).any() for x in found)
    empty = rl.rif_filter(jnp.zeros((3, 0)))
    assert not empty.keep.any()
    np.testing.assert_array_equal(empty.best, -np.inf)
    assert rl.rif_filter(jnp.zeros((0, 4))).keep.shape == (0,)


def test_kept_indices():
    keep = jnp.asarray([True, False, True, True])
    found = jax.jit(rl.kept_indices, static_argnums=1)
    np.testing.assert_array_equal(found(keep, 5), [0, 2, 3, -1, -1])
    np.testing.assert_array_equal(found(keep, 2), [0, 2])
    assert found(keep, 0).shape == (0,)


def test_signs_of_forgetting():
    falls = rl.continual_metrics(jnp.asarray([[0.8, 0.1], [0.5, 0.9]]), jnp.asarray([0.2, 0.1]))
    np.testing.assert_allclose(jnp.stack(falls), [0.7, -0.3, -0.3, 0.7], rtol=1e-5)
    same = rl.continual_metrics(jnp.full((4, 4), 0.3), jnp.zeros(4))
    np.testing.assert_array_equal([same.forgetting, same.backward_transfer], 0)
    one = rl.continual_metrics(jnp.asarray([[0.6]]), jnp.asarray([0.5]))
    np.testing.assert_allclose(jnp.stack(one), [0.6, 0, 0, 0.1], rtol=1e-5)
    rng = np.random.default_rng(0)
    for _ in range(5):
        found = rl.continual_metrics(jnp.asarray(rng.uniform(size=(4, 4)), jnp.float32), jnp.zeros(4))
        assert found.forgetting <= found.backward_transfer + 1e-7


def test_loop_over_tasks():
    """Parameters are how often each task was learnt; the filter empties task 1, which is then never trained on."""
    seen = []

    def learner(params, task, key):
        seen.append((task, jax.random.uniform(key)))
        return params.at[task].add(1.0)

    def accuracy(params, task):
        return params[task] / (1 + params.sum())

    run = rl.run_continual(
        [0, 1, 2], jnp.zeros(3), learner, accuracy, lambda params, task, key: None if task == 1 else task,
        key=jax.random.key(0),
    )  # fmt: skip
    assert run.skipped == (False, True, False)
    np.testing.assert_allclose(run.acc, [[1 / 2, 0, 0], [1 / 2, 0, 0], [1 / 3, 0, 1 / 3]], rtol=1e-6)
    np.testing.assert_array_equal(run.base, 0)
    np.testing.assert_array_equal(run.params, [1, 0, 1])
    assert [task for task, _ in seen] == [0, 2]
    assert seen[0][1] != seen[1][1]
    again = rl.run_continual([0, 1, 2], jnp.zeros(3), learner, accuracy, key=jax.random.key(0))
    assert again.skipped == (False,) * 3
    assert seen[2][1] == seen[0][1]


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda: rl.rif_filter(jnp.ones((2, 3)), jnp.ones((2, 2))), "valid"),
        (lambda: rl.rif_filter(jnp.ones(3)), "rewards"),
        (lambda: rl.rif_filter(jnp.ones((2, 3)), min_successes=-1), "min_successes"),
        (lambda: rl.rif_filter(jnp.ones((2, 3)), max_pass_rate=1.5), "max_pass_rate"),
        (lambda: rl.rif_filter(jnp.ones((2, 3)), success_threshold=float("nan")), "success_threshold"),
        (lambda: rl.kept_indices(jnp.ones(2, bool), -1), "size"),
        (lambda: rl.continual_metrics(jnp.ones((2, 3)), jnp.ones(2)), "acc"),
        (lambda: rl.continual_metrics(jnp.ones((0, 0)), jnp.ones(0)), "acc"),
        (lambda: rl.continual_metrics(jnp.ones((2, 2)), jnp.ones(3)), "base"),
        (lambda: rl.run_continual([], None, None.__eq__, None.__eq__, key=jax.random.key(0)), "tasks"),
    ],
)
def test_bad_input_names_the_field(call, field):
    with pytest.raises(ConfigError, match=f"^{field}: found"):
        call()
