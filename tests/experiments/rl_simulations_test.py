"""The simulations of the reinforcement-learning experiments: identities, exact values and directions at tiny sizes."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import (
    asymmetric,
    core,
    lambda_grpo,
    rl_bandit,
    rl_linear,
    rl_simulation,
    rl_tabular,
    rl_tree,
    rl_votes,
)
from experiments import rler as rler_experiment
from experiments.rl_arms import Arm
from experiments.rl_config import Training
from jaxmeth import rl


@pytest.fixture
def small(monkeypatch):
    """``small(module, NAME=value)``: other sizes of a simulation."""

    def change(module, **sizes):
        for name, value in sizes.items():
            assert hasattr(module, name), name
            monkeypatch.setattr(module, name, value)

    return change


def keys(count=2):
    return jax.random.split(jax.random.key(1), count)


def test_draws_follow_the_probabilities():
    p = jnp.array([[0.2, 0.5, 0.3], [0.0, 1.0, 0.0]])
    found = np.asarray(rl_simulation.draw(jax.random.key(0), p, 4000))
    share = np.bincount(found[0], minlength=3) / 4000
    np.testing.assert_allclose(share, p[0], atol=4 * 0.5 / 4000**0.5)
    assert (found[1] == 1).all()


def test_ratios_of_means_and_of_steps():
    first, second = np.array([1.0, 3.0]), np.array([4.0, 4.0])
    assert rl_simulation.ratio(first, second).value == 0.5
    assert np.isnan(rl_simulation.ratio(first, 0 * second).value)
    fast, slow = np.tile(np.linspace(0, 1, 11), (2, 1)), np.tile(np.linspace(0, 0.5, 11), (2, 1))
    assert rl_simulation.first_at(fast, 0.5) == 5
    assert rl_simulation.first_at(slow, 0.6) is None
    np.testing.assert_allclose(rl_simulation.steps_ratio(fast, slow, 0.25).value, 0.5)
    # Never reached: the whole length stands in, which the note says.
    np.testing.assert_allclose(rl_simulation.steps_ratio(fast, slow, 0.55).value, 5.5 / 11)


def test_no_clip_is_ripo_without_bounds(small):
    small(rl_bandit, STATES=4, ACTIONS=6, GROUP=8)
    endless = partial(rl.ripo, delta_low=float("inf"), r_min=None, r_max=None)
    ratios = {"free": partial(rl.ppo_clip, eps_low=float("inf")), "endless": endless, "tight": rl.ppo_clip}
    run = rl_bandit.bandit([Arm(n, rl.PolicyLoss(ratio=r)) for n, r in ratios.items()], steps=4)
    free, endless, tight = (run(i, keys(), 4.0, 0.0) for i in range(3))
    np.testing.assert_allclose(free["accuracy"], endless["accuracy"], rtol=1e-5)
    assert (endless["clipped"] == 0).all()
    assert (tight["clipped"][:, 0] > 0).all()
    assert (abs(free["accuracy"] - tight["accuracy"])[:, 1] > 1e-3).all()


def test_the_bandit_starts_as_it_says():
    logits, right = rl_bandit.start(jax.random.key(0))
    np.testing.assert_allclose(jax.nn.softmax(logits)[:, 0], rl_bandit.RARE, rtol=1e-5)
    assert right[:, 0].all()
    assert (right.sum(1) == 2).all()


def test_rewards_flipped_half_of_the_time_teach_nothing(small):
    small(rl_bandit, STATES=16, ACTIONS=6, GROUP=16, STEPS=60, RATES=(2.0,), FLIPS=(0.0, 0.5))
    arms = [Arm(name, rl.PolicyLoss()) for name in (rl_bandit.PPO,)]
    small(rl_bandit, _claims=lambda curves: [curves])
    found = rl_bandit.simulate(Training(simulation_seeds=2), core.RunDir(), arms)
    clean, noisy = (row["accuracy@59"].value for row in found.tables["simulation: bandit"])
    assert clean > 0.9
    assert noisy < 0.7
    assert rl_bandit.simulate(Training(simulation_seeds=0), core.RunDir(), arms) == rl_simulation.NOTHING


def test_accuracy_of_a_tree_is_exact():
    length, tokens = rl_tree.LENGTH, rl_tree.TOKENS
    logits = jax.random.normal(jax.random.key(0), (rl_tree.PROMPTS, rl_tree.NODES, tokens))
    right = rl_tree.answers(jax.random.key(1), 0)
    np.testing.assert_allclose(right.mean(1), 1 / tokens**2)
    p = np.asarray(jax.nn.softmax(logits))
    begin = int(np.argmax(right[0])) // tokens ** (length - 2)
    by_hand = p[0, 0, begin // tokens] * p[0, 1 + begin // tokens, begin % tokens]
    np.testing.assert_allclose(rl_tree.reached(logits, right)[0], by_hand, rtol=1e-5)
    drawn, node, leaf = (np.asarray(a) for a in rl_tree.sample(jax.random.key(2), logits))
    np.testing.assert_array_equal(leaf, (drawn * tokens ** np.arange(length - 1, -1, -1)).sum(-1))
    np.testing.assert_array_equal(node[..., 1], 1 + drawn[..., 0])


def test_trees_weigh_as_the_arms_say(small):
    small(rl_tree, LENGTH=4, NODES=(3**4 - 1) // 2, PROMPTS=4, GROUP=8)
    arms = [a for a in lambda_grpo.arms() if a.name != "mean weight"]
    run, names = rl_tree.tree(arms, steps=3), [a.name for a in arms]
    found = {name: run(i, keys(), 0, 2.0, False, 8.0) for i, name in enumerate(names)}
    base, same = (found[name]["accuracy"] for name in (rl_tree.BASE, rl_tree.PROCESS))
    np.testing.assert_allclose(same, base, rtol=1e-4)
    shuffled, weighted = (found[name]["weight"][:, 0] for name in (rl_tree.SHUFFLED, rl_tree.WEIGHTED))
    np.testing.assert_allclose(shuffled, weighted, rtol=1e-5)
    assert (abs(found[rl_tree.WEIGHTED]["accuracy"] - base)[:, -1] > 1e-4).all()


def test_pushing_all_wrong_answers_down_loses_prompts(small):
    small(rl_tabular, PROMPTS=32)
    arms = [a for a in asymmetric.arms() if a.name in ("grpo", rl_tabular.LOSS, rl_tabular.DROP)]
    run, names = rl_tabular.tabular(arms, steps=25), [a.name for a in arms]
    found = {name: run(i, keys(), 0, 16.0) for i, name in enumerate(names)}
    assert (found[rl_tabular.LOSS]["lost"] > 0.05).all()
    assert (found[rl_tabular.DROP]["lost"] == 0).all()
    assert (found["grpo"]["accuracy"][:, 0] < 0.05).all()
    assert (found["grpo"]["accuracy"][:, -1] > 0.5).all()


def test_votes_and_a_verifier_that_errs(small):
    small(rl_votes, PROMPTS=16)
    arms = [a for a in rler_experiment.arms() if a.name in ("verifier", rl_votes.SELF, rl_votes.PLAIN)]
    run = rl_votes.voting(arms, 2, steps=12)
    oracle, own, ensemble = (run(i, keys(), 0.5, 0.0) for i in range(3))
    assert (oracle["noise"] == 0).all()
    assert (oracle["accuracy"][:, -1] > oracle["accuracy"][:, 0] + 0.2).all()
    assert ensemble["noise"][:, 0].mean() < own["noise"][:, 0].mean()
    errs = {kind: run(len(arms) + i, keys(), 0.5, 0.4) for i, kind in enumerate(rl_votes.FLIPS)}
    np.testing.assert_allclose(errs["both ways"]["noise"].mean(), 0.4, atol=0.05)
    assert (errs["false positives"]["symbias"] == 1).all()
    assert (errs["false negatives"]["symbias"] == -1).all()


def test_the_linear_policy_gradient_is_that_of_the_core():
    scores = jax.random.normal(jax.random.key(0), (3, 5))
    answer = jax.random.randint(jax.random.key(1), (3, 4), 0, 5)
    rewards = (answer < 2).astype(jnp.float32)

    def loss(scores):
        logp = jnp.take_along_axis(jax.nn.log_softmax(scores), answer, axis=1).reshape(-1, 1)
        batch = rl.RolloutBatch(rewards, None, None, jnp.ones(logp.shape, bool))
        return rl.PolicyLoss()(logp, batch)[0] * len(scores)

    expected = jax.grad(loss)(scores)
    np.testing.assert_allclose(rl_linear.reinforced(scores, answer, rl.adv_grpo(rewards)), expected, atol=1e-6)


def test_filtering_saves_rollouts_and_supervision_forgets(small):
    small(rl_linear, PRETRAIN=300)
    run = rl_linear.learner(40)
    shown, own, filtered = (run(i, keys(), 10.0) for i in range(3))
    assert (shown["rollouts"] == 0).all()
    assert (own["rollouts"] == 40 * rl_linear.TASKS * rl_linear.BATCH * rl_linear.GROUP).all()
    trained = filtered["rollouts"] - rl_linear.TASKS * rl_linear.TRAIN * rl_linear.FILTER
    assert (trained < own["rollouts"]).all()
    assert ((filtered["kept"] > 0.1) & (filtered["kept"] < 1)).all()
    gain = [
        np.mean([f["accuracy"][:, k + 1, k] - f["accuracy"][:, 0, k] for k in range(rl_linear.TASKS)])
        for f in (shown, own)
    ]
    assert gain[0] > gain[1] > 0
