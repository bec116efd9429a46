"""Claims, estimates, configuration checks, progress and data files of the experiment runner."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments import core
from jaxmeth.types import ConfigError


@pytest.mark.parametrize(
    ("comparison", "threshold", "interval", "expected"),
    [
        (">=", 0.5, None, "yes"),
        (">", 0.5, None, "no"),
        ("<=", 0.5, None, "yes"),
        ("<", 0.5, None, "no"),
        (">=", 0.4, (0.4, 0.6), "yes"),
        (">", 0.4, (0.4, 0.6), "undecided"),
        (">", 0.6, (0.4, 0.6), "no"),
        (">=", 0.6, (0.4, 0.6), "undecided"),
        ("<=", 0.6, (0.4, 0.6), "yes"),
        ("<", 0.3, (0.4, 0.6), "no"),
        (">=", 0.5, (math.nan, 0.6), "undecided"),
    ],
)
def test_verdict(comparison, threshold, interval, expected):
    assert core.Claim("x", 0.5, comparison, threshold, interval).holds == expected


@given(
    st.floats(-1e6, 1e6),
    st.floats(0, 10),
    st.floats(0, 10),
    st.floats(-1e6, 1e6),
    st.sampled_from([">=", "<=", ">", "<"]),
)
def test_an_interval_never_turns_a_claim(measured, below, above, threshold, comparison):
    """Adding an interval around the measured value keeps its verdict or withdraws it."""
    bare = core.Claim("x", measured, comparison, threshold).holds
    assert core.Claim(
        "x", core.Estimate(measured, measured - below, measured + above), comparison, threshold
    ).holds in (
        bare,
        "undecided",
    )


def test_claim_takes_its_interval_from_an_estimate():
    claim = core.Claim("x", core.Estimate(np.float32(2.0), 1, 3), ">", 0)
    assert (claim.measured, claim.interval, claim.holds) == (2.0, (1.0, 3.0), "yes")
    assert core.Claim("x", math.nan, ">", 0).holds == "undecided"
    with pytest.raises(ValueError, match="comparison"):
        core.Claim("x", 1, "=", 1)


def test_require_names_the_field(toy):
    with pytest.raises(ConfigError, match="items: found 0, expected at least 1"):
        toy.Config(items=0)
    with pytest.raises(ConfigError, match="scale: found nan, expected 0 to 10"):
        toy.Config(scale=math.nan)
    with pytest.raises(ConfigError, match=r"levels: found 2\.0, expected 0 to 1"):
        toy.Config(levels=(0.5, 2.0))
    with pytest.raises(ConfigError, match="seed: found -1"):
        toy.Config(seed=-1)
    toy.Config(items=1, scale=10, levels=())
    config = toy.Config()
    config.require(data=(1, 2))
    with pytest.raises(ConfigError, match="items: found 100, expected at most 5"):
        config.require(items=(None, 5))


def test_core_offers_the_library_error():
    assert core.ConfigError is ConfigError
    with pytest.raises(AttributeError, match="no attribute 'Confg'"):
        core.Confg  # noqa: B018


def test_bootstrap_of_a_mean_matches_the_normal_interval():
    x = np.random.default_rng(0).normal(3.0, 2.0, size=2000)
    found = core.bootstrap_interval(np.mean, x)
    half = 1.96 * x.std() / math.sqrt(len(x))
    assert found.value == x.mean()
    assert found.lo == pytest.approx(x.mean() - half, abs=0.1 * half)
    assert found.hi == pytest.approx(x.mean() + half, abs=0.1 * half)


def test_bootstrap_covers():
    """95 % intervals hold the true mean in 92 % to 98 % of 400 data sets (three binomial standard errors)."""
    rng = np.random.default_rng(1)
    held = 0
    for seed in range(400):
        found = core.bootstrap_interval(
            lambda x: x.mean(axis=1), rng.normal(size=60), resamples=300, seed=seed, batched=True
        )
        held += found.lo <= 0 <= found.hi
    assert 0.917 <= held / 400 <= 0.983


def test_bootstrap_is_paired_seeded_and_batched_alike():
    rng = np.random.default_rng(2)
    a = rng.normal(size=50)
    b = a + 0.01 * rng.normal(size=50)
    paired = core.bootstrap_interval(lambda a, b: (a - b).mean(), a, b, resamples=250)
    alone = core.bootstrap_interval(np.mean, a, resamples=250)
    assert paired.hi - paired.lo < 0.1 * (alone.hi - alone.lo)
    assert paired == core.bootstrap_interval(lambda a, b: (a - b).mean(), a, b, resamples=250)
    assert paired != core.bootstrap_interval(lambda a, b: (a - b).mean(), a, b, resamples=250, seed=1)
    both = core.bootstrap_interval(lambda a, b: np.array([a.mean(), (a - b).mean()]), a, b, resamples=250)
    stacked = core.bootstrap_interval(
        lambda a, b: np.stack([a.mean(1), (a - b).mean(1)], 1), a, b, resamples=250, batched=True
    )
    for field in range(3):
        np.testing.assert_allclose(both[field], [alone[field], paired[field]], rtol=1e-12)
        np.testing.assert_allclose(stacked[field], both[field], rtol=1e-12)


def test_bootstrap_of_degenerate_data():
    constant = core.bootstrap_interval(np.mean, np.ones(5), resamples=20)
    assert constant == (1.0, 1.0, 1.0)
    undefined = core.bootstrap_interval(lambda x: math.nan, np.ones(5), resamples=20)
    assert all(map(math.isnan, undefined))
    rare = np.array([1.0] + [0.0] * 9)  # a third of the resamples lack the one: left out
    assert core.bootstrap_interval(lambda x: x.mean() if x.any() else math.nan, rare).lo == pytest.approx(0.1)
    half = core.bootstrap_interval(lambda x: np.array([math.nan, x.mean()]), np.ones(5), resamples=20)
    assert math.isnan(half.lo[0])
    assert half.lo[1] == 1
    for end in (math.inf, -math.inf):  # a third of the resamples lack it: infinite, so one end of the interval is
        found = core.bootstrap_interval(np.mean, np.array([end] + [1.0] * 9))
        assert sorted(found) == sorted((end, 1.0, end))
        assert core.bootstrap_interval(np.mean, np.full(3, end)) == (end, end, end)
    for wrong in ({"resamples": 0}, {"level": 1.0}):
        with pytest.raises(ConfigError, match="bootstrap: found"):
            core.bootstrap_interval(np.mean, np.ones(5), **wrong)
    with pytest.raises(ConfigError, match="n=0"):
        core.bootstrap_interval(np.mean, np.ones(0))
    with pytest.raises(ConfigError, match=r"lengths \[5, 4\]"):
        core.bootstrap_interval(np.mean, np.ones(5), np.ones(4))


def test_data_file_never_falls_back(tmp_path, monkeypatch):
    assert core.data_file("00-toy", "toy.csv") is None
    (tmp_path / "00-toy").mkdir()
    monkeypatch.setenv("JAXMETH_DATA", str(tmp_path))
    with pytest.raises(ConfigError, match=r"JAXMETH_DATA: found no file 00-toy/toy\.csv in"):
        core.data_file("00-toy", "toy.csv")
    (tmp_path / "00-toy" / "toy.csv").write_text("x\n1\n")
    assert core.data_file("00-toy", "toy.csv") == tmp_path / "00-toy" / "toy.csv"
    with pytest.raises(ConfigError, match="--data: found no file"):
        core.data_file("00-toy", "toy.csv", tmp_path / "elsewhere")
    monkeypatch.setenv("JAXMETH_DATA", "")
    assert core.data_file("00-toy", "toy.csv") is None


def test_progress_is_quiet_for_short_work_and_speaks_for_long(capfd, monkeypatch):
    assert list(core.progress(range(5), description="short")) == [0, 1, 2, 3, 4]
    assert capfd.readouterr() == ("", "")
    monkeypatch.setattr(core.progress, "interval", 0.0)
    bar = core.progress(iter("ab"), total=2, description="long")
    for _ in bar:
        bar.note("loss 2.3")
    out, err = capfd.readouterr()
    assert out == ""
    assert err.splitlines()[0].startswith("long: 1 of 2, 0 s, about 0 s left, loss 2.3")
    assert err.splitlines()[-1].startswith("long: 2 of 2, 0 s, loss 2.3")


def test_run_from_python_writes_nothing(toy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = toy.run(toy.PRESETS["smoke"])
    assert [c.holds for c in result.claims] == ["yes", "no"]
    assert list(result.tables()) == [""]
    assert not list(tmp_path.iterdir())


def test_a_result_can_hold_several_tables():
    assert list(core.Result({"a": [{"x": 1}], "b": []}).tables()) == ["a", "b"]
    assert json.dumps(core.Result([]).tables()) == '{"": []}'
