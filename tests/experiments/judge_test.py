"""The judge experiment: its data, scalings, ranking, training in blocks, and a small run."""

import csv

import jax
import numpy as np
import pytest

from experiments import core, judge, judge_data, judge_methods
from jaxmeth.errors import ConfigError
from jaxmeth.uncertainty import judge as library

COLUMNS = ["id", "human_label", *(f"{j}_p{k}" for j in judge_data.JUDGES for k in (1, 2)), *judge_data.LENGTHS]


def write(path, rows):
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([COLUMNS, *rows])
    return path


def rows_of(n=24):
    rng = np.random.default_rng(0)
    p = rng.uniform(0.05, 0.95, (n, 3))
    lengths = rng.integers(10, 900, (n, 3))
    return [
        [i, 1 + int(rng.random() < 0.5), *np.column_stack([a, 1 - a]).ravel(), *b]
        for i, (a, b) in enumerate(zip(p, lengths, strict=True))
    ]


def swapped(row):
    i, human, a, b, c, d, e, f, asked, one, two = row
    return [i, 3 - human, b, a, d, c, f, e, asked, two, one]


def test_swapping_the_answers_changes_nothing(tmp_path):
    rows = rows_of()
    here = judge_data.read(write(tmp_path / "a.csv", rows))
    there = judge_data.read(write(tmp_path / "b.csv", [swapped(r) for r in rows]))
    np.testing.assert_allclose(here.s, there.s, atol=1e-6)
    np.testing.assert_array_equal(here.agree, there.agree)
    np.testing.assert_allclose(here.heuristics["simulated annotators"], there.heuristics["simulated annotators"])
    p = np.array([r[6:8] for r in rows])
    np.testing.assert_array_equal(here.agree, p.argmax(1) + 1 == [r[1] for r in rows])
    np.testing.assert_allclose(here.heuristics["simulated annotators"], p.max(1), rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({1: 3}, "line 2, column human_label: found '3', expected 1 or 2"),
        ({2: "x"}, "line 2, column mistral7b_p1: found 'x', expected a probability"),
        ({3: 1.5}, "line 2, column mistral7b_p2: found '1.5'"),
        ({2: "nan"}, "line 2, column mistral7b_p1: found 'nan'"),
        ({2: 0, 3: 0}, "line 2: found no probability above 0"),
        ({10: -1}, "line 2, column output2_chars: found '-1', expected a count"),
    ],
)
def test_a_bad_table_is_named(tmp_path, change, named):
    rows = rows_of()
    for place, value in change.items():
        rows[0][place] = value
    with pytest.raises(ConfigError, match=named) as raised:
        judge_data.read(write(tmp_path / "bad.csv", rows))
    assert "bad.csv" in str(raised.value)


def test_a_missing_table_or_column_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.csv"):
        judge_data.read(tmp_path / "none.csv")
    (tmp_path / "short.csv").write_text("id,human_label\n1,1\n")
    with pytest.raises(ConfigError, match="no column mistral7b_p1"):
        judge_data.read(tmp_path / "short.csv")


def test_made_views_hide_what_their_mean_does_not_show():
    rows = {
        k: np.asarray(v) for k, v in jax.jit(judge_data.made_rows, static_argnums=1)(jax.random.key(0), 4000).items()
    }
    assert rows["s"].shape == (4000, 25)
    assert abs(rows["agree"].mean() - (0.55 + 0.43 / 2)) < 0.03
    trend = rows["s"].reshape(-1, 5, 5).mean(1) @ np.arange(-2, 3)
    strict, area = judge_methods.ranking(
        np.stack([rows["simulated annotators"], trend]), rows["agree"][None].repeat(2, 0)
    )
    assert abs(area[0] - 0.5) < 0.05
    assert area[1] > 0.6
    np.testing.assert_allclose(strict, 1 - area, atol=1e-3)


def test_made_tables_are_judged_better_than_by_chance():
    table = judge_data.made_table(500, 0)
    skill = [1 - error.mean() for _, error in table.each]
    assert 0.6 < skill[0] < skill[2] < 0.95
    assert table.s.shape == (500, 6)


def test_ranking_is_the_librarys():
    rng = np.random.default_rng(1)
    conf, agree = np.round(rng.random((3, 80)), 1), rng.random((3, 80)) < 0.7
    strict, area = judge_methods.ranking(conf, agree)
    for r in range(3):
        expected = library.auroc(jax.numpy.asarray(conf[r], jax.numpy.float32), jax.numpy.asarray(agree[r]))
        np.testing.assert_allclose(area[r], expected, atol=1e-6)
        pairs = conf[r][agree[r]][:, None] - conf[r][~agree[r]][None]
        np.testing.assert_allclose(strict[r], (pairs < 0).mean())


def test_scalings_keep_the_order_and_calibrate():
    rng = np.random.default_rng(2)
    z = rng.normal(0, 3, 4000)
    conf, agree = 1 / (1 + np.exp(-z)), rng.random(4000) < 1 / (1 + np.exp(-z / 3))
    asked = np.linspace(0.001, 0.999, 300)
    scaled = judge_methods.temperature(conf, agree, asked)
    assert (np.diff(scaled) > 0).all()
    np.testing.assert_allclose(scaled, 1 / (1 + np.exp(-np.log(asked / (1 - asked)) / 3)), atol=0.03)
    steps = judge_methods.isotonic(conf, agree, asked)
    assert (np.diff(steps) >= 0).all()
    assert np.abs(steps - scaled).mean() < 0.05
    # The first three pool at their mean confidence; straight from there to the last.
    pooled = judge_methods.isotonic(np.arange(4.0), np.array([1, 0, 0, 1]), np.arange(4.0))
    np.testing.assert_allclose(pooled, [1 / 3, 1 / 3, 2 / 3, 1])


def test_training_in_blocks_changes_nothing(monkeypatch):
    """Five splits in blocks of two (the last one filled up) begin as the first two alone; keys are by split."""
    monkeypatch.setattr(judge_methods, "BLOCK", 2)
    rng = np.random.default_rng(3)
    s, agree = rng.random((5, 60, 4)).astype(np.float32), rng.random((5, 60)) < 0.6
    fitting = library.FitConfig(epochs=2, pairs=100, batch=50, hidden=(4,))
    conf, gamma = judge_methods.train(core.RunDir(), "x", fitting, s, agree, s[:, :7], seed=0)
    assert conf.shape == (5, 7)
    assert len(set(gamma.tolist())) > 1
    first, _ = judge_methods.train(core.RunDir(), "x", fitting, s[:2], agree[:2], s[:2, :7], seed=0)
    np.testing.assert_array_equal(conf[:2], first)
    assert np.abs(conf[2:4] - first).min() > 0


def test_the_paper_preset_checks_shapes():
    rows = {r["array"]: r["shape"] for r in judge.run(judge.PRESETS["paper"]).rows}
    assert rows["views"] == "[6, 3000, 155]"
    assert rows["layer0 kernel"] == "[6, 155, 64]"


@pytest.mark.slow
def test_a_small_run_keeps_its_promises(monkeypatch):
    chosen = {k: v for k, v in judge_methods.settings(2, 200).items() if "network" not in k and "logistic" not in k}
    monkeypatch.setattr(judge_methods, "settings", lambda *_: chosen)
    small = judge.Config(
        splits=6, repeats=4, made_train=400, made_test=600, calibrations=150, alphas=(0.2, 0.3),
        min_count=40,
    )  # fmt: skip
    result = judge.run(small)
    tables = result.tables()
    assert set(tables) >= {"made views: ranking", "made views: promises", "500 made comparisons: cascade"}
    assert len(tables["500 made comparisons: selective judging"]) == 6 * 2
    verdicts = {c.statement: c.holds for c in result.claims}
    assert verdicts["made views, fixed-sequence test: worst violation rate"] == "yes"
    for row in tables["made views: promises"]:
        if row["rule"] == "fixed-sequence test":
            assert row["violations"].value <= row["certified"]
