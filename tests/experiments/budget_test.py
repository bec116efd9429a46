"""The budget experiment: its sampler against plain generation, votes, rules, policies, and a small run."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from experiments import budget, budget_real, core, policies, rules, selfconsistency, trajectories
from jaxmeth import risk
from jaxmeth.risk import budget as stopping


def test_samples_share_one_cache_and_equal_plain_generation():
    """At a temperature near 0 each of the K samples is the greedy answer to examples and question together."""
    from jaxmeth import models
    from jaxmeth import uncertainty as unc
    from jaxmeth.attention import dense

    cfg = models.DecoderConfig("llama", 61, 32, 3, 4, 2, 8, 64, 64)
    params = jax.tree.map(lambda p: 4 * p, models.init(cfg, jax.random.key(0)))
    rng = np.random.default_rng(0)
    shown = rng.integers(0, 61, (1, 5)).astype(np.int32)
    asked = rng.integers(0, 61, (2, 4)).astype(np.int32)
    mask = np.array([[True] * 4, [False, False, True, True]])
    new, samples, layers = 6, 3, (1, 2)
    whole = np.concatenate([np.repeat(shown, 2, axis=0), asked], axis=1)
    seen = np.concatenate([np.ones((2, 5), bool), mask], axis=1)
    # Padding lies between examples and question here; generate wants it on the left.
    order = np.argsort(seen, axis=1, kind="stable")
    plain = models.generate(
        params, cfg, np.take_along_axis(whole, order, 1), np.take_along_axis(seen, order, 1), key=jax.random.key(0),
        max_new_tokens=new,
    )  # fmt: skip
    stop = jnp.asarray([int(plain.tokens[0, 3])])
    cache = models.apply(params, cfg, shown, cache=models.init_cache(cfg, 1, 5 + 4 + new)).cache
    found = selfconsistency._sampler()(
        params, cache, asked, mask, jax.random.key(1), jnp.float32(1e-4), stop, cfg=cfg,
        attend=unc.rauq_tap(dense), layers=layers, samples=samples, new=new,
    )  # fmt: skip
    for q in range(2):
        tokens = np.asarray(plain.tokens[q])
        hits = np.flatnonzero(tokens == int(stop[0]))
        n = hits[0] + 1 if hits.size else new
        for k in range(samples):
            assert found["spent"][q, k] == n
            np.testing.assert_array_equal(found["tokens"][q, k, :n], tokens[:n])
            np.testing.assert_allclose(found["prob"][q, k], np.exp(plain.logprobs[q, :n]).mean(), rtol=1e-4)
        assert 0 < found["trust"][q, 0] <= 1
        np.testing.assert_allclose(found["trust"][q], found["trust"][q, 0], rtol=1e-5)
    assert (np.asarray(found["spent"]) == 4).any()


def test_votes():
    texts = [["Paris", "paris.", "Lyon", "Paris"], ["Rome", "Bari", "Bari", "Bari"]]
    numbers = np.arange(8.0).reshape(2, 4)
    found = selfconsistency.votes(
        selfconsistency.Samples(texts, np.full((2, 4), 3), numbers, numbers), ["Paris", "Bari"]
    )
    np.testing.assert_array_equal(found.correct, [[1, 1, 1, 1], [0, 0, 1, 1]])
    np.testing.assert_allclose(found.signals["majority"], [[1 / 2, 2 / 3, 2 / 4, 3 / 5], [1 / 2, 1 / 3, 2 / 4, 3 / 5]])
    halves = 1 - np.log(2) / np.log(5)
    np.testing.assert_allclose(found.signals["vote_entropy"][:, 0], halves, rtol=1e-6)
    assert found.signals["vote_entropy"][0, 1] > halves > found.signals["vote_entropy"][1, 1]
    np.testing.assert_array_equal(found.tokens, [[3, 6, 9, 12]] * 2)
    np.testing.assert_array_equal(found.signals["rauq"], numbers)


CHEAP = ("naive", "UCB as coded (n = grid)", "Hoeffding suffix")


@pytest.fixture(scope="module")
def tables():
    """Loss and cost of three calibration sets of 60 trajectories."""
    draw = jax.jit(lambda key: trajectories.upper_table(*trajectories.simulate(key, 60)[:3], trajectories.grid()))
    return [draw(key) for key in jax.random.split(jax.random.key(2), 3)]


@pytest.mark.parametrize("rule", [rules.Rule("hoeffding", "suffix", True), rules.Rule("hoeffding", "split", True)])
def test_rules_choose_what_calibrate_chooses(tables, rule):
    sets = jax.tree.map(lambda *v: jnp.stack(v), *[rules.halves(*table) for table in tables])
    eps = (0.12, 0.2, 0.3, 0.4, 0.5)
    found = rules.choose(rule, sets, eps, 0.1)
    assert found.index.shape == (3, 5)
    assert (found.index >= 0).any()
    assert (found.index < 0).any()
    for r, table in enumerate(tables):
        for e, level in enumerate(eps):
            alone = risk.calibrate(*table, level, 0.1, rule.bound, rule.validity)
            assert found.index[r, e] == alone.index
            needed = np.nan if alone.feasible else alone.bound
            np.testing.assert_allclose(found.needed[r, e], needed, atol=1e-6)


def test_the_coded_margin_is_that_of_the_grid(tables):
    """Admissible where mean + sqrt(ln(1/delta) / (2 x 1,040)) <= eps, whatever the number of trajectories."""
    sets = jax.tree.map(lambda *v: jnp.stack(v), *[rules.halves(*table) for table in tables])
    eps = 0.15
    found = rules.choose(rules.RULES["UCB as coded (n = grid)"], sets, (eps,), 0.1)
    for r, (loss, cost) in enumerate(tables):
        passed = np.asarray(loss.mean(0)) + np.sqrt(np.log(10) / 2080) <= eps
        assert found.index[r, 0] == np.where(passed, cost.mean(0), np.inf).argmin()


def test_exact_intervals_are_scipys():
    for hits, n in ((0, 20), (7, 20), (20, 20), (113, 2000)):
        exact = scipy.stats.binomtest(hits, n).proportion_ci(0.95, "exact")
        np.testing.assert_allclose(rules.binomial(hits, n), (hits / n, exact.low, exact.high), atol=1e-6)
    assert np.isnan(rules.binomial(0, 0).value)


def test_outcomes_by_hand():
    """Sure and wrong; hopeless though right later; sure and right; never anything."""
    signal = jnp.asarray([[0.9, 0.9, 0.9], [0.1, 0.5, 0.5], [0.5, 0.9, 0.9], [0.5, 0.5, 0.5]])
    correct = jnp.asarray([[0, 0, 1], [0, 1, 1], [0, 1, 1], [0, 0, 0]], bool)
    length, tokens = jnp.full(4, 3), jnp.asarray([[10, 20, 40]] * 4)
    policy = stopping.Policy(*[jnp.float32(v) for v in (0.8, 0.0, 0.0, 0.2, 0.2, 40.0, 0.0, 1.0)])
    found = jax.jit(policies.outcome)(policy, signal, correct, length, tokens)
    np.testing.assert_allclose(found, (1 / 4, (2 / 3) / 4, (0.25 + 0.25 + 0.5 + 1) / 4, 1 / 4), rtol=1e-6)
    both = policies.evaluate(jax.tree.map(lambda v: jnp.stack([v, v]), policy), signal, correct, length, tokens)
    np.testing.assert_allclose(both, np.array(found)[:, None].repeat(2, 1), rtol=1e-6)
    table = jax.jit(policies.upper_tables)(signal, correct, length, tokens, jnp.asarray([0.8, 2.0]))
    np.testing.assert_array_equal(table.loss, [[1, 0], [0, 0], [0, 0], [0, 0]])
    np.testing.assert_array_equal(table.share, [[0.25, 1], [1, 1], [0.5, 1], [1, 1]])
    first, full = policies.fixed_budgets(correct, length, tokens, (0.3, 1.0))
    np.testing.assert_allclose(first, (1.0, 0.0, 0.25, 0.0))
    np.testing.assert_allclose(full, (0.0, 0.0, 1.0, 0.75))
    np.testing.assert_allclose(policies.oracle(correct, length, tokens), (0, 0, (1 + 0.5 + 0.5 + 1) / 4, 0.75))


def test_thresholds_with_hindsight():
    share, right = np.array([[0.2, 0.5, 1.0]]), np.array([[0.3, 0.6, 0.7]])
    wrong = np.array([[0.1, 0.1, 0.0]])
    asked = np.array([0.5])
    assert policies.cheapest(share, right, wrong, asked, 0.1) == 0.5
    assert policies.cheapest(share, right, wrong, asked, 0.05) == 1.0
    assert policies.cheapest(share, right, wrong, np.array([0.9]), 0.1) == 1.0


def test_an_unknown_rule_is_refused():
    with pytest.raises(core.ConfigError, match="rules: found 'none'"):
        budget.Config(rules=("naive", "none"))


@pytest.mark.parametrize("field", ["eps", "eps_exhausted", "real_eps"])
@pytest.mark.parametrize("level", [0.0, 1.0, float("nan")])
def test_a_level_of_risk_is_inside_the_unit_interval(field, level):
    with pytest.raises(core.ConfigError, match=f"^{field}: found"):
        budget.Config(**{field: (0.1, level)})


def test_a_wrong_file_of_questions_is_known_first(tmp_path, monkeypatch):
    monkeypatch.delattr(budget, "_made")
    (tmp_path / "runs.csv").write_text("n,d,loss\n1,2,3\n")
    with pytest.raises(core.ConfigError, match=r"runs\.csv: found no column id"):
        budget.run(budget.Config(file=tmp_path / "runs.csv"))


def test_splits_are_disjoint_and_whole():
    first, second = budget_real.splits(50, budget.Config(splits=3))
    assert first.shape == (3, 10)
    np.testing.assert_array_equal(np.sort(np.concatenate([first, second], axis=1)), np.arange(50)[None].repeat(3, 0))
    assert not np.array_equal(first[0], first[1])


def test_made_rows_and_claims():
    cfg = budget.Config(
        rules=CHEAP, calibrations=60, sizes=(60,), eps=(0.05, 0.2), eps_exhausted=(0.45,), population=10_000
    )
    rows, law = budget._made(cfg, core.RunDir())
    assert len(rows) == 3 * 3  # two levels of one loss, one of the other
    assert law["risk"][0] > 0.8
    assert law["risk"][-1] == 0
    by = {(r["loss"], r["eps"], r["rule"]): r for r in rows}
    hopeless = by["paper's", 0.05, "Hoeffding suffix"]
    assert hopeless["feasible"] == 0
    assert hopeless["share of tokens"] == 1
    np.testing.assert_allclose(hopeless["smallest eps"], np.sqrt(np.log(10) / 120), atol=1e-6)
    assert by["paper's", 0.2, "naive"]["violations"].lo > 0.1
    assert by["paper's", 0.2, "Hoeffding suffix"]["violations"].value <= rules.allowed(0.1, 60)
    verdicts = {c.statement: c.holds for c in budget._promises(cfg, rows)}
    assert verdicts["naive rule: least violation rate over all n and eps"] == "yes"
    assert verdicts["Hoeffding suffix: worst violation rate over all n and eps"] == "yes"


def test_the_paper_preset_checks_shapes():
    result = budget.run(budget.PRESETS["paper"])
    rows = {r["array"]: r for r in result.rows}
    assert rows["parameters"]["numbers"] == 8_190_735_360
    assert rows["tokens"]["shape"] == "[16, 30000]"


@pytest.mark.slow
def test_a_small_run_writes_its_parts(monkeypatch, command, tmp_path):
    small = dataclasses.replace(
        budget.PRESETS["smoke"],
        rules=("naive", "Clopper-Pearson suffix"),
        calibrations=40,
        sizes=(50,),
        items=8,
        samples=4,
        splits=10,
        population=10_000,
    )
    monkeypatch.setitem(budget.PRESETS, "smoke", small)
    code, out, err = command("run", "budget", "--preset", "smoke", "--out", tmp_path)
    assert code == 0, err
    assert "questions: stop or give up" in out
    names = {p.name for p in Path(tmp_path).glob("budget/*/figures/*.png")}
    assert names == {"risk_compute_made.png", "risk_compute_questions.png", "signals.png"}
