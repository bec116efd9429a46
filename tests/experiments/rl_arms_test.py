"""The shared harness of the reinforcement-learning experiments: what is paired, chosen, counted and resumed."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import asymmetric, core, lambda_grpo, ripo, rl_arms, rl_compose, rl_tables, rl_tasks, rler
from experiments.rl_config import TINY, Training
from jaxmeth import models, rl
from jaxmeth.errors import ConfigError

MINI = Training(**{**TINY, "warm_steps": 2, "steps": 2, "evaluations": 1, "rates": (1e-3,)})


@pytest.fixture(scope="module")
def bench():
    return rl_arms.prepare(MINI)


def tokens_of(*answers, width=8):
    ids = np.zeros((len(answers), width), np.int32)
    for row, text in enumerate(answers):
        these = [*rl_tasks.encode(text.rstrip("~")), *([] if text.endswith("~") else [rl_tasks.END])]
        ids[row, : len(these)] = these
    return ids


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"group_size": 7}, "group_size: found 7, which"),
        ({"evaluations": 7}, "evaluations: found 7"),
        ({"rates": (float("nan"),)}, "rates: found nan"),
        ({"rates": ()}, "rates: found none"),
        ({"task": "sudoku"}, "task: found 'sudoku'"),
        ({"temperature": 0.0}, "temperature: found 0"),
        ({"train_problems": 3}, "train_problems: found 3"),
        ({"width": 20}, "width: found 20"),
    ],
)
def test_bad_options_are_named(options, named):
    with pytest.raises(ConfigError, match=named.replace(", which", "")):
        Training(**options)


def test_no_models_is_an_error():
    with pytest.raises(ConfigError, match="models: found 0"):
        rler.Config(models=0)


def test_too_few_problems_are_found_before_any_step(command, tmp_path):
    options = {"--preset": "smoke", "--rollouts": 1600, "--train-problems": 200, "--group-size": 8, "--out": tmp_path}
    code, _, err = command("run", "ripo", *(word for pair in options.items() for word in pair))
    assert code == 2
    assert "train_problems: found 146 different problems" in err
    assert "Traceback" not in err


def test_a_bad_option_is_one_line_and_exit_2(command):
    code, _, err = command("run", "ripo", "--rates", "nan")
    assert code == 2
    assert "rates" in err
    assert "Traceback" not in err


def test_same_answers_compare_what_follows_the_last_comma():
    texts = ["8,6", "7,6", "6", "8,16", "5~", "16"]
    tokens = jnp.asarray(tokens_of(*texts)).reshape(2, 1, 3, 8)
    ids = rl_arms.same_answers(rl_arms.Judged(tokens, tokens != 0, None))
    assert ids.shape == (1, 2, 3)
    assert ids.reshape(-1).tolist() == [0, 0, 0, 3, -1, 3]


def test_label_free_rewards_never_read_labels():
    tokens = jnp.asarray(tokens_of("6", "6", "7", "7", "7", "8")).reshape(2, 1, 3, 8)
    logp = jnp.log(jnp.linspace(0.1, 0.9, 6))[:, None] + jnp.zeros((6, 8))
    first = jnp.asarray(tokens_of("8", "8", "9~", "8", "7", "6")).reshape(2, 1, 3, 8)
    judged = rl_arms.Judged(tokens, tokens != 0, None, logp.reshape(2, 1, 3, 8), (first, first != 0))
    for arm in rler.arms()[1:]:
        found = [arm.reward(judged._replace(right=jnp.full((2, 1, 3), z))) for z in (True, False)]
        np.testing.assert_array_equal(found[0].reward, found[1].reward)
        assert found[0].reward.shape == found[0].keep.shape == (2, 1, 3), arm.name
    rewards = {a.name: np.asarray(a.reward(judged).reward) for a in rler.arms()[1:]}
    np.testing.assert_array_equal(rewards["self majority"].reshape(2, 3), [[1, 1, 0], [1, 1, 0]])
    np.testing.assert_array_equal(rewards["ensemble hard"].reshape(2, 3), [[0, 0, 1], [1, 1, 0]])
    np.testing.assert_array_equal(rewards["frozen votes"].reshape(2, 3), [[0, 0, 0], [0, 0, 1]])
    np.testing.assert_allclose(rewards["own confidence"].reshape(-1), np.linspace(0.1, 0.9, 6), rtol=1e-5)
    mixed = (rewards["ensemble hard"] + rewards["ensemble soft"]) / 2
    np.testing.assert_allclose(rewards["ensemble, alpha 0.5"], mixed, rtol=1e-6)
    np.testing.assert_allclose(rewards["self frequency"].reshape(2, 3), [[2 / 3, 2 / 3, 1 / 3]] * 2, rtol=1e-6)


def test_shuffled_weights_are_the_same_weights_elsewhere():
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(2, 4, (16, 6)), jnp.int32)
    alive = jnp.asarray(np.arange(6)[None] < rng.integers(1, 7, 16)[:, None])
    weight, dealt = (f(tokens, alive, 8) for f in (rl.lambda_grpo_weight, lambda_grpo.shuffled_weight))
    np.testing.assert_array_equal(np.sort(np.asarray(weight)[alive]), np.sort(np.asarray(dealt)[alive]))
    assert (np.asarray(dealt)[~np.asarray(alive)] == 0).all()
    assert (np.asarray(weight) != np.asarray(dealt)).any()
    mean = np.asarray(lambda_grpo.mean_weight(tokens, alive, 8))
    np.testing.assert_allclose(mean[alive], np.asarray(weight)[alive].mean(), rtol=1e-6)


def test_process_advantages_are_grpo_in_another_order():
    """The gradient in the log-probabilities of prefixes, which rollouts share, is GRPO's; lambda-GRPO's is not."""
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 2, (8, 3))
    # A number for each prefix: its tokens after a leading 1, in binary.
    prefix = jnp.asarray([[int("1" + "".join(map(str, row[: t + 1])), 2) for t in range(3)] for row in tokens.tolist()])
    mask = jnp.asarray(np.arange(3)[None] < rng.integers(2, 4, 8)[:, None])
    batch = rl.RolloutBatch(jnp.asarray(rng.integers(0, 2, (2, 4)), jnp.float32), None, jnp.asarray(tokens), mask)
    arms = {a.name: a.loss for a in lambda_grpo.arms()}
    table = jnp.asarray(rng.normal(size=(2, 16)), jnp.float32)

    def gradient(loss):
        of = jnp.repeat(jnp.arange(2), 4)[:, None]
        return jax.grad(lambda table: loss(table[of, prefix], batch)[0])(table)

    grpo, process, weighted = (
        gradient(f) for f in (arms["GRPO"], arms["process advantages"](0), arms["lambda, per token"])
    )
    assert np.abs(grpo).max() > 0.01
    np.testing.assert_allclose(process, grpo, rtol=1e-5, atol=1e-7)
    assert np.abs(weighted - grpo).max() > 0.01


def test_every_combination_is_legal_or_has_a_reason():
    legal, illegal = rl_compose.combinations()
    assert len(legal) == 32
    assert len(illegal) == 16
    assert all(name.startswith(("grpo linear", "grpo sqrt")) for name in illegal)
    assert all("scales already" in reason for reason in illegal.values())
    assert set(rl_compose.COMPARED) <= set(legal)


def test_a_combination_without_a_gradient_does_not_train():
    row = {"loss": 0.1, "grad_norm": 0.5, "reward": 0.2}
    trials = [rl_compose._trial(f"{n} none none ppo verifier", row) for n in ("grpo", "rloo")]
    trials.append(rl_compose._trial("grpo none none ppo RLER", row | {"grad_norm": 0.0}))
    cfg = rl_compose.PRESETS["smoke"]
    assert [(c.measured, c.holds) for c in rl_compose.trial_claims(cfg, trials)] == [(3, "yes"), (2, "yes")]
    trials[0]["grad_norm"] = 0.0
    assert [(c.measured, c.holds) for c in rl_compose.trial_claims(cfg, trials)] == [(3, "yes"), (1, "no")]
    assert len(rl_compose.trial_claims(rl_compose.PRESETS["smollm2"], trials)) == 1


@pytest.mark.slow
def test_arms_share_warm_start_prompts_and_keys(bench):
    """Two arms with one loss give the same curves; a stored run is not computed again; another loss differs."""
    folder = core.RunDir()
    other = rl.PolicyLoss(advantage=rl.adv_prompt_weighted)
    arms = [rl_arms.Arm(n, loss) for n, loss in (("a", rl.PolicyLoss()), ("b", rl.PolicyLoss()), ("c", other))]
    found = rl_arms.compare(MINI, folder, bench, arms)
    for name, values in found.curves["a"].items():
        np.testing.assert_array_equal(values, found.curves["b"][name])
        assert values.shape == (MINI.seeds, MINI.evaluations + 1)
    np.testing.assert_array_equal(found.curves["a"]["pass"][:, 0], found.curves["c"]["pass"][:, 0])
    assert np.abs(found.curves["a"]["loss"] - found.curves["c"]["loss"])[:, 1:].max() > 0
    assert np.isnan(found.curves["a"]["loss"][:, 0]).all()
    stored = folder.chunks()
    folder.save("arm0-report", **{k: v + 1 for k, v in folder.load("arm0-report").items()})
    again = rl_arms.compare(MINI, folder, bench, arms)
    np.testing.assert_array_equal(again.last("a"), found.last("a") + 1)
    assert folder.chunks() == stored
    assert (found.edge, found.selection) == ({}, {})
    rows = {r["arm"]: r for r in rl_tables.rows(found, "a", ("clip_low",))}
    assert tuple(rows["b"]["over a"]) == (0, 0, 0)
    assert rl_tables.ahead(found, "b", "a").holds == "no"


@pytest.mark.slow
def test_training_raises_the_reward(bench):
    """A reward that a few steps can raise, whatever the verifier says: answers that begin with 1."""
    one = rl_tasks.encode("1")[0]

    def begins(judged):
        return rl_arms.Given((judged.tokens[..., 0] == one).astype(jnp.float32), jnp.ones_like(judged.right))

    def with_past(judged):
        # The same for all answers of a batch, so that it teaches nothing.
        return begins(judged)._replace(reward=begins(judged).reward + 100 * (judged.first[0][..., 0] == one).mean())

    cfg = dataclasses.replace(MINI, rollouts=64, steps=16, evaluations=2)
    grpo = rl.presets.grpo()
    run = rl_arms.trainer(
        cfg, bench, [rl_arms.Arm("one", grpo, begins), rl_arms.Arm("past", grpo, with_past, past=True)]
    )
    leaves = rl_arms.warm_seeds(cfg, core.RunDir(), bench)
    structure = jax.tree.structure(models.abstract_params(bench.model))
    params = jax.tree.unflatten(structure, [jnp.asarray(leaf[:2]) for leaf in leaves])
    reward, more = (
        np.asarray(run(i, params, jax.random.split(jax.random.key(0), 2), jnp.asarray([3e-2, 3e-2])).training["reward"])
        for i in (0, 1)
    )
    assert (reward[:, 2] > reward[:, 1] + 0.1).all(), reward
    # What the first models answer has not moved.
    first = (more - reward) / 100
    assert (np.abs(first[:, 2] - first[:, 1]) < 0.05).all(), first
    assert (first[:, 1:] > 0).all()


def test_rates_are_chosen_on_other_seeds():
    cfg = Training(seeds=4, selection_seeds=3, rates=(1e-3, 1e-2))
    runs = rl_arms.batches(cfg)
    assert [len(r) for r in runs] == [4, 4]
    assert {seed for r in runs for seed, _ in r} == {4, 5, 6}
    best, mean = rl_arms.choose(cfg, np.array([0.1, 0.2, 0.3, 0.4, 0.5, np.nan, 9.0, 9.0]))
    assert best == 1
    np.testing.assert_allclose(mean, [0.2, 0.3])


def test_steps_to_a_level():
    steps = np.array([0, 10, 20])
    curves = np.array([[0.1, 0.3, 0.5], [0.6, 0.1, 0.9], [0.0, 0.1, 0.2]])
    np.testing.assert_allclose(rl_tables.steps_to(curves, steps, 0.4), [15, 0, np.nan])
    np.testing.assert_allclose(rl_tables.steps_to(curves, steps, np.array([0.2, 0.7, 0.1])), [5, 17.5, 10])


def test_steps_to_a_share_of_ones_own_peak():
    curves = {"a": {"pass": np.array([[0.0, 0.8, 1.0, 0.5]] * 3)}}
    measured = rl_arms.Measured({}, {}, {}, curves, np.array([0, 10, 20, 30]))
    np.testing.assert_allclose(rl_tables.near_peak(measured, "a"), [15, 15, 15])


def test_sooner_is_the_share_of_the_baselines_steps():
    steps = np.array([0, 10, 20])
    curves = {"fast": [[0.0, 0.4, 0.6]] * 3, "slow": [[0.0, 0.1, 0.2]] * 3, "never": [[0.0, 0.1, 0.1]] * 3}
    measured = rl_arms.Measured({}, {}, {}, {k: {"pass": np.array(v)} for k, v in curves.items()}, steps)
    claim = rl_tables.sooner(measured, "fast", "slow", 0.5)
    assert (claim.measured, claim.interval, claim.holds) == (0.25, (0.25, 0.25), "yes")
    claim = rl_tables.sooner(measured, "never", "slow", 0.5)
    assert (claim.measured, claim.interval, claim.holds) == (np.inf, (np.inf, np.inf), "no")


def test_nothing_is_reached_sooner_where_the_baseline_learnt_nothing():
    steps = np.array([0, 10, 20])
    rise = np.array([0.06, -0.05, 0.05, -0.04])  # for certain nowhere, though 0.005 on average
    curves = {
        "arm": [[0.1, 0.4, 0.6]] * 4, "flat": [[0.1, 0.1, 0.1]] * 4, "fell": [[0.1, 0.2, 0.05]] * 4,
        "noise": np.stack([np.full(4, 0.1), np.full(4, 0.1), 0.1 + rise], axis=1),
    }  # fmt: skip
    measured = rl_arms.Measured({}, {}, {}, {k: {"pass": np.array(v)} for k, v in curves.items()}, steps)
    for baseline in ("flat", "fell", "noise"):
        claim = rl_tables.sooner(measured, "arm", baseline, 0.5)
        assert np.isnan(claim.measured), baseline
        assert claim.holds == "undecided", baseline


def late_in_some_resamples():
    """An arm whose mean reaches its baseline's end of 0.2, as in half of the resamples; the baseline starts at 0.1."""
    steps, noise = np.arange(5) * 10, np.linspace(-0.02, 0.0212, 8)[:, None]
    arm = np.concatenate([np.full((8, 1), 0.1), 0.2 + np.repeat(noise, 4, axis=1)], axis=1)
    curves = {"arm": arm, "slow": np.array([[0.1, 0.12, 0.15, 0.18, 0.2]] * 8), "never": np.full((8, 5), 0.1)}
    return rl_arms.Measured({}, {}, {}, {k: {"pass": v} for k, v in curves.items()}, steps)


def test_resamples_in_which_an_arm_never_gets_there_count():
    measured = late_in_some_resamples()
    for claim in (
        rl_tables.sooner(measured, "arm", "slow", 0.5),
        rl_tables.sooner_to(measured, ("never", "arm"), "slow", 0.2, 0.5),
    ):
        assert claim.measured < 0.26
        assert claim.interval[0] < 0.25
        assert claim.interval[1] == np.inf
        assert claim.holds == "undecided"


def test_a_baseline_that_never_gets_there_bounds_the_share():
    """It may get there just after the end, or never."""
    curves = {"fast": [[0.0, 0.4, 0.4]] * 3, "late": [[0.0, 0.1, 0.2]] * 3, "never": [[0.0, 0.1, 0.1]] * 3}
    measured = rl_arms.Measured({}, {}, {}, {k: {"pass": np.array(v)} for k, v in curves.items()}, np.array([0, 5, 10]))
    claim = rl_tables.sooner_to(measured, ("fast",), "never", 0.2, 0.8)
    np.testing.assert_allclose([claim.measured, *claim.interval], [0.25, 0.0, 0.25])
    assert claim.holds == "yes"
    claim = rl_tables.sooner_to(measured, ("late",), "never", 0.2, 0.8)
    assert (claim.measured, claim.interval, claim.holds) == (1.0, (0.0, 1.0), "undecided")


def test_the_best_of_some_arms_is_the_first_to_reach_a_level():
    steps = np.array([0, 10, 20])
    curves = {"fast": [[0.0, 0.4, 0.4]] * 3, "never": [[0.0, 0.1, 0.1]] * 3, "slow": [[0.0, 0.1, 0.3]] * 3}
    measured = rl_arms.Measured({}, {}, {}, {k: {"pass": np.array(v)} for k, v in curves.items()}, steps)
    claim = rl_tables.sooner_to(measured, ("never", "fast"), "slow", 0.2, 0.8)
    np.testing.assert_allclose([claim.measured, *claim.interval], [1 / 3] * 3)
    assert claim.holds == "yes"
    assert rl_tables.sooner_to(measured, ("never",), "slow", 0.2, 0.8).measured == np.inf
    neither = rl_tables.sooner_to(measured, ("never",), "never", 0.2, 0.8)
    assert (neither.interval, neither.holds) == ((0, np.inf), "undecided")
    assert np.isnan(rl_tables.sooner_to(measured, ("fast",), "slow", 0.0, 0.8).measured)


def measured_by(curves, selection=None):
    found = {a: dict.fromkeys(("pass", "pass@k", "entropy"), np.array(v)) for a, v in curves.items()}
    edge = dict.fromkeys(selection or (), True)
    return rl_arms.Measured(dict.fromkeys(curves, 1e-3), edge, selection or {}, found, np.array([0, 1]))


def test_a_single_rate_is_not_chosen():
    """As ``compare`` leaves it with one rate, and with two."""
    one = measured_by({"a": [[0.1, 0.2]] * 2, "b": [[0.1, 0.3]] * 2})
    tables = rl_tables.table(MINI, one, "a")
    assert list(tables) == ["tiny model"]
    assert "at the grid's end" not in tables["tiny model"][0]
    text = " ".join(rl_tables.notes(MINI, one, "x"))
    assert "2 seeds; one rate, 0.001." in text
    assert "chosen" not in text
    assert "grid" not in text
    cfg = dataclasses.replace(MINI, rates=(1e-3, 1e-2))
    two = measured_by({"a": [[0.1, 0.2]] * 2}, {"a": np.array([0.2, 0.1])})
    assert len(rl_tables.table(cfg, two, "a")) == 2
    assert (
        "rates chosen on 1 others. The best rate lies at an end of the grid for a." in rl_tables.notes(cfg, two, "x")[1]
    )


def test_few_seeds_decide_nothing():
    measured = measured_by({"a": [[0.1, 0.2]] * 8, "b": [[0.1, 0.3]] * 8})
    ahead, exact = rl_tables.ahead(measured, "b", "a"), core.Claim("exact", 1.0, ">=", 1)
    assert ahead.holds == "yes"
    for seeds, simulated, verdicts in (
        (1, 8, "undecided yes yes"),
        (3, 8, "undecided yes yes"),
        (4, 3, "yes yes undecided"),
    ):
        cfg = dataclasses.replace(MINI, seeds=seeds, simulation_seeds=simulated)
        found = rl_tables.decided(cfg, [ahead, exact], [ahead])
        assert " ".join(c.holds for c in found) == verdicts
        assert [c.measured for c in found] == [ahead.measured, 1.0, ahead.measured]
        said = rl_tables.few_seeds(cfg)
        assert f"{min(seeds, simulated)} {'simulation ' if simulated < 4 else ''}seeds are undecided" in said[0]
        assert said[0] in rl_tables.notes(cfg, measured, "x")
    many = dataclasses.replace(MINI, seeds=4, simulation_seeds=0)
    assert rl_tables.decided(many, [ahead], []) == [ahead]
    assert rl_tables.few_seeds(many) == []


def test_a_metric_is_compared_at_matched_pass_rate():
    passed = np.array([[0.0, 0.2, 0.6], [0.1, 0.3, 0.3], [0.0, 0.1, 0.2]])
    entropy = np.array([[3.0, 2.0, 1.0], [3.0, 1.0, 0.0], [3.0, 2.0, 1.0]])
    np.testing.assert_allclose(rl_tables.at_level(passed, entropy, np.array([0.4, 0.1, 0.3])), [1.5, 3.0, np.nan])
    curves = {
        "wide": {"pass": np.array([[0.0, 0.2, 0.6]] * 3), "entropy": np.array([[3.0, 2.5, 2.0]] * 3)},
        "narrow": {"pass": np.array([[0.0, 0.4, 0.3]] * 3), "entropy": np.array([[3.0, 1.0, 0.5]] * 3)},
    }
    measured = rl_arms.Measured({}, {}, {}, curves, np.array([0, 10, 20]))
    # Both reach 0.4: the wide one half-way between its last two evaluations.
    claim = rl_tables.matched(measured, "wide", "narrow", "entropy")
    assert (claim.measured, claim.comparison, claim.holds) == (1.25, ">=", "yes")
    assert [row["entropy"].value for row in rl_tables.matched_rows(measured, "entropy")] == [2.25, 1.0]


def test_clipped_tokens_are_counted_by_old_probability():
    old = jnp.log(jnp.asarray([[0.05, 0.95, 1.0], [0.55, 0.52, 0.01]]))
    now = old + jnp.log(jnp.asarray([[3.0, 1.1, 1.3], [1.0, 0.3, 9.0]]))
    batch = rl.RolloutBatch(jnp.asarray([[1.0, 0.0]]), None, None, jnp.asarray([[1, 1, 1], [1, 1, 0]]), old)
    arms = {a.name: a for a in ripo.arms()}
    for name, clipped in ((ripo.PPO, {0: 1, 9: 1, 5: 1}), (ripo.RIPO, {0: 1, 9: 1, 5: 1}), (ripo.FREE, {})):
        arm = ripo.by_probability(arms[name])
        value, found = arm.loss(0)(now, batch)
        assert float(value) == float(arms[name].loss(now, batch)[0])
        assert set(arm.metrics) <= set(found)
        tokens = {0: 1, 9: 2, 5: 2}
        for i in range(10):
            np.testing.assert_allclose(found[f"tokens{i}"], tokens.get(i, 0) / 5, rtol=1e-6)
            np.testing.assert_allclose(found[f"clipped{i}"], clipped.get(i, 0) / 5, rtol=1e-6)


def test_theory_has_the_best_weight_of_each_clock():
    _, over, rows = asymmetric.theory(points=6)
    assert len(rows) == 12
    assert all((ratio > 1 - 1e-9).all() for weights in over.values() for ratio in weights.values())
    # RLOO's time is a difference of log-odds times one of rates; the least one is known in closed form.
    logit, angle = np.log(0.9 / 0.1) - np.log(1e-3 / 0.999), 2 * (np.arcsin(0.9**0.5) - np.arcsin(1e-3**0.5))
    np.testing.assert_allclose(over["regular"]["rloo"][0], logit * (0.9 - 1e-3) / angle**2, rtol=1e-6)


@pytest.mark.parametrize("module", [lambda_grpo, ripo, asymmetric, rler, rl_compose])
def test_the_paper_preset_checks_shapes(module):
    rows = module.run(module.PRESETS["paper"]).rows
    assert rows[0]["shape"] == "8,190,735,360"
    assert "gradient of every parameter" in rows[-1]["shape"]
