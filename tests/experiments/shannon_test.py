"""The scaling-law experiment: its tables, a user's own table, the family and its claims."""

import dataclasses

import numpy as np
import pytest

from experiments import core, scaling_family, scaling_own, scaling_tables, shannon
from experiments.scaling_fits import Cell, Fitted, held_out
from experiments.scaling_tables import Table
from jaxmeth.errors import ConfigError

TURNING = (0.12, 1.0, 0.002, 0.006, 0.1, 0.15, 0.35, 0.9, 0.8)


def written(tmp_path, text, name="my.csv"):
    path = tmp_path / name
    path.write_text(text)
    return path


def lines(rows, header="n,d,loss"):
    return "\n".join([header, *(",".join(map(str, r)) for r in rows)]) + "\n"


def runs(turning=True):
    """24 runs of a law that turns, or of Chinchilla's."""
    n, d = (v.ravel() for v in np.meshgrid([1e8, 4e8, 1.5e9, 6e9], np.geomspace(1e10, 4e11, 6), indexing="ij"))
    if not turning:
        return n, d, 1.04 + 0.45 * (n / 1e9) ** -0.34 + 1.17 * (d / 1e9) ** -0.28
    a, b, c, dd, e, alpha, beta, gamma, delta = TURNING
    noise = c * (n * d / 1e18) ** gamma + dd * (d / 1e9) ** delta + e
    return n, d, 1 / (a * (n / 1e9) ** alpha * np.log2(1 + b * (d / 1e9) ** beta / noise))


def test_the_published_tables_are_the_spec_s():
    standard, deduped = scaling_tables.pythia(False), scaling_tables.pythia(True)
    for t in (standard, deduped):
        assert len(t.y) == 120
        assert len(np.unique(t.n)) == 8
        assert t.d.min() > 6e9
    # The 1B is the deduplicated run in both.
    same = standard.n == np.unique(standard.n)[3]
    np.testing.assert_array_equal(standard.y[same], deduped.y[same])
    assert not np.array_equal(standard.y, deduped.y)
    small = standard.n == standard.n.min()
    assert standard.y[small].min() == pytest.approx(4.55, abs=0.01)
    assert standard.y[small][-1] == pytest.approx(4.96, abs=0.01)
    assert [len(scaling_tables.repetition().y), len(scaling_tables.chinchilla().y)] == [229, 245]
    assert len(scaling_tables.overtraining().y) == 104
    assert len(scaling_tables.groups(scaling_tables.overtraining())) == 3


def test_a_folder_of_extracts_takes_the_place_of_the_packaged_tables(tmp_path):
    with pytest.raises(ConfigError, match="--data: found no file 10-shannon-scaling-law"):
        shannon.run(shannon.Config(data=tmp_path))
    (tmp_path / "10-shannon-scaling-law").mkdir()
    text = (scaling_tables.PACKAGED / "chinchilla_fig4.csv").read_text().splitlines()[:11]
    written(tmp_path / "10-shannon-scaling-law", "\n".join(text), "chinchilla_fig4.csv")
    assert len(scaling_tables.chinchilla(tmp_path).y) == 10


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "line 1: found columns none, expected a column 'n'"),
        ("n,tokens,loss\n1e8,1e10,3\n", "line 1: found columns n, tokens, loss, expected a column 'd'"),
        ("n,d,loss\n", "found no rows below the header"),
        ("n,d,loss\n1e8,1e10,3\n1e8,2e10,nan\n", "line 3, column loss: found 'nan', expected a number above 0"),
        ("n,d,loss\n1e8,1e10,3\n1e8,0,3\n", "line 3, column d: found '0', expected a number above 0"),
        ("n,d,loss\n-1e8,1e10,3\n", "line 2, column n: found '-1e8'"),
        ("n,d,loss\n1e8,1e10,\n", "line 2, column loss: found ''"),
        ("n,d,loss\n1e8,1e10,inf\n", "line 2, column loss: found 'inf'"),
        ("n,d,loss\n70M,1e10,3\n", "line 2, column n: found '70M'"),
        ("n,d,loss\n1e8,1e10\n", "line 2: found 2 cells, expected 3"),
        ("n,d,loss\n1e8,1e10,3,4\n", "line 2: found 4 cells, expected 3"),
    ],
)
def test_a_bad_cell_is_named_with_its_line_and_column(tmp_path, text, said):
    with pytest.raises(ConfigError) as raised:
        scaling_tables.read(written(tmp_path, text))
    assert str(raised.value).startswith("my.csv")
    assert said in str(raised.value)


def test_a_file_that_is_none_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.csv: cannot be read"):
        shannon.run(shannon.Config(data=tmp_path / "none.csv"))
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"bytes\.csv: cannot be read"):
        scaling_tables.read(tmp_path / "bytes.csv")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda r: r[:3], "my.csv, loss: found 3 points, expected at least 4, the parameters of OpenAI"),
        (lambda r: [(1e8, d, y) for _, d, y in r], "my.csv, n: found 1e+08 in all 24 points"),
        (lambda r: [*r, r[4]], "my.csv, line 26: found the n, d, loss of line 6 again"),
        (lambda r: [(n, d / 1e9, y) for n, d, y in r], "my.csv, d: found 10 to 400"),
        (lambda r: [(n / 1e6, d / 1e6, y) for n, d, y in r], "is n given in billions or millions?"),
        (lambda r: [*r[:-1], (6e9, 400.0, 2.5)], "my.csv, d: found 400 (line 25) beside 1e+10 (line 2)"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_its_line(tmp_path, change, said):
    rows = list(zip(*runs(), strict=True))
    with pytest.raises(ConfigError) as raised:
        shannon.run(shannon.Config(data=written(tmp_path, lines(change(rows)))))
    assert said in str(raised.value)


def two_laws(monkeypatch, *names):
    from jaxmeth import scaling

    monkeypatch.setattr(scaling, "LAWS", tuple(law for law in scaling.LAWS if law.name in names))


def test_the_report_on_one_s_own_runs(tmp_path, monkeypatch):
    two_laws(monkeypatch, "Shannon", "Chinchilla")
    rows = [(n, d, y, "up") for n, d, y in zip(*runs(), strict=True)]
    rows += [(n, d, y, "down") for n, d, y in zip(*runs(turning=False), strict=True)]
    path = written(tmp_path, lines(rows, "n,d,loss,group"))
    result = shannon.run(shannon.Config(data=path, starts=16, resamples=10, budgets=(1e22,)))
    tables = result.tables()
    fits = {(r["table"], r["task"], r["law"]): r for r in tables["fits"]}
    assert fits["my.csv up", "in-sample", "Shannon"]["SSE"] < 1e-9
    assert fits["my.csv down", "in-sample", "Chinchilla"]["SSE"] < 1e-9
    assert fits["my.csv up", "largest model, fit the others", "Shannon"]["R2 held out"] > 0.99
    assert fits["my.csv up", "in-sample", "Chinchilla"]["SSE"] > 1e-3
    critical = [r for r in tables["where more tokens stop helping"] if r["table"] == "my.csv up"]
    assert [r["n"] for r in critical] == [1e8, 4e8, 1.5e9, 6e9]
    # Bigger models turn earlier, and the largest inside its data.
    tokens = [r["D*"].value for r in critical]
    assert np.all(np.diff(tokens) < 0)
    assert all(r["D*"].lo <= r["D*"].value * (1 + 1e-3) and r["D*"].hi >= r["D*"].value * (1 - 1e-3) for r in critical)
    n, d, y = runs()
    largest = n == 6e9
    assert tokens[-1] == pytest.approx(shannon.observed_minimum(d[largest], y[largest]), rel=0.5)
    best = [r for r in tables["compute-optimal sizes"] if (r["table"], r["law"]) == ("my.csv down", "Chinchilla")]
    ratio = (0.34 * 0.45 / (0.28 * 1.17)) ** (1 / 0.62)
    assert best[0]["n"] == pytest.approx(1e9 * ratio * (1e22 / 6e18) ** (0.28 / 0.62), rel=1e-3)
    assert best[0]["d"] * best[0]["n"] * 6 == pytest.approx(1e22)
    assert {r["parameter"] for r in tables["parameters"] if r["law"] == "Chinchilla"} == {"A", "B", "E", "a", "b"}
    from matplotlib.figure import Figure

    figure = Figure()
    result.figures["basin_0"](figure)
    assert len(figure.axes) == 4


def family(turning):
    """Tables as the family gives them, three sizes of twelve checkpoints: one level a law."""
    n, d = (v.ravel() for v in np.meshgrid([1e4, 1e5, 1e6], np.geomspace(1e4, 1e6, 12), indexing="ij"))
    a, b, c, dd, e, alpha, beta, gamma, delta = TURNING
    noise = c * (n * d / 1e9) ** gamma + 0.02 * dd * (d / 1e4) ** delta + e
    up = 1 / (a * (n / 1e5) ** alpha * np.log2(1 + b * (d / 1e4) ** beta / noise))
    down = 1.04 + 0.45 * (n / 1e5) ** -0.34 + 1.17 * (d / 1e4) ** -0.28
    run, nothing, count = np.repeat([16, 24, 32], 12), np.full(36, ""), np.arange(36)
    return [Table(f"Family, {name}", n, d, y, nothing, run, count) for name, y in (("up", up), ("down", down))][
        : 2 if turning else 3
    ][slice(None) if turning else slice(1, None)]


def test_the_success_number_is_measured_where_the_loss_turns(monkeypatch):
    two_laws(monkeypatch, "Shannon", "Chinchilla", "OpenAI")
    cfg = dataclasses.replace(shannon.PRESETS["smoke"], tables=False)
    monkeypatch.setattr(scaling_family, "train_all", lambda *_: family(turning=True))
    result = shannon.run(cfg)
    ahead, factor = result.claims
    assert ahead.holds == "yes"
    assert ahead.measured > 0.05
    assert factor.measured == pytest.approx(1, abs=0.1)
    assert factor.holds == "yes"
    (row,) = result.tables()["E2 critical tokens of the largest size"]
    assert row["level"] == "up"
    assert {r["level"]: r["above lowest at 1e+06"] > 0 for r in result.tables()["E2 losses"]} == {
        "up": True,
        "down": False,
    }
    held = {(r["table"], r["law"]): r["held out"] for r in result.tables()["E2 predictions"]}
    # The largest size, and what comes after 60% of the tokens of the others (the last two of twelve).
    assert set(held.values()) == {12 + 2 * 2}
    monkeypatch.setattr(scaling_family, "train_all", lambda *_: family(turning=False))
    assert [c.holds for c in shannon.run(cfg).claims] == ["undecided", "undecided"]


def test_the_observed_minimum_is_that_of_a_parabola_in_log_tokens():
    d = np.geomspace(1e4, 1e6, 12)
    assert shannon.observed_minimum(d, 2 + np.log(d / 7e4) ** 2) == pytest.approx(7e4)
    assert shannon.observed_minimum(d, -d) == 1e6
    assert shannon.observed_minimum(d, d) == 1e4


def test_a_fit_above_the_reference_fails_its_claim():
    key = {"table": "Pythia standard", "task": "in-sample"}
    rows = [key | {"law": "OpenAI", "SSE": 1.5953}, key | {"law": "Shannon", "SSE": 0.9079}]
    rows.append(key | {"law": "Precision", "SSE": 7.0})
    beside = [shannon._beside(r) for r in rows]
    assert [r.get("reference SSE") for r in beside] == [1.595, 0.908, None]
    assert shannon._reference_claim(beside).holds == "yes"
    worse = [*beside, shannon._beside(key | {"law": "Chinchilla", "SSE": 2.58})]
    assert shannon._reference_claim(worse).holds == "no"


def test_held_out_r2_is_about_the_mean_of_the_held_out_points(monkeypatch):
    n, d, y = runs()
    test = np.arange(24) >= 20
    cell = Cell(Table("t", n, d, y, np.full(24, ""), None, np.arange(24)), "task", ~test, test)
    monkeypatch.setattr("experiments.scaling_fits.predicted", lambda *_: y[test] + 0.1)
    rmse, r2 = held_out(Fitted(cell, {}), "any")
    assert rmse == pytest.approx(0.1)
    assert r2 == pytest.approx(1 - 0.01 / y[test].var())


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"widths": (16, 24)}, "widths"),
        ({"widths": (16, 16, 24)}, "widths"),
        ({"widths": (32, 24, 16)}, "widths"),
        ({"starts": 0}, "starts"),
        ({"train_steps": 3}, "train_steps"),
        ({"bits": (0,)}, "bits"),
        ({"snr_db": (float("nan"),)}, "snr_db"),
        ({"budgets": (-1.0,)}, "budgets"),
    ],
)
def test_options_out_of_range(options, field):
    with pytest.raises(ConfigError, match=field):
        shannon.Config(**options)


def test_the_corpus_holds_blocks_out_and_a_bad_text_is_named(tmp_path):
    text, held, vocab = scaling_family.corpus(None)
    assert len(text) > 8 * len(held) > 0
    assert min(text.min(), held.min()) >= 0
    assert max(text.max(), held.max()) == vocab - 1
    stops = scaling_family.steps_at(1500)
    assert (len(stops), stops[0], stops[-1]) == (12, 24, 1500)
    with pytest.raises(ConfigError, match="text: found 5 characters"):
        scaling_family.corpus(written(tmp_path, "short", "t.txt"))
    with pytest.raises(ConfigError, match="text: found"):
        scaling_family.corpus(tmp_path / "none.txt")


class Interrupted(core.RunDir):
    """Stops the run after the third checkpoint."""

    def save(self, key, **arrays):
        super().save(key, **arrays)
        if int(arrays["done"]) == 3:
            raise KeyboardInterrupt


@pytest.mark.slow
def test_the_family_trains_and_continues_where_it_was_stopped():
    cfg = shannon.Config(widths=(8, 16, 24), train_steps=48, snr_db=(0.0, 30.0), bits=(2, 8), draws=2)
    n, whole = scaling_family.train_one(cfg, core.RunDir(), 8)
    assert n == 2 * (4 * 8 * 8 + 3 * 8 * 32) + 2 * 2 * 8 + 8
    assert [v.name for v in scaling_family.levels(cfg.snr_db, cfg.bits)] == [
        "clean", "noise 30 dB", "noise 0 dB", "8 bits", "2 bits",
    ]  # fmt: skip
    assert np.isfinite(whole).all()
    assert np.all(np.diff(whole[:, 0]) < 0)
    # Hardly disturbed is hardly worse.
    np.testing.assert_allclose(whole[:, [1, 3]], whole[:, [0, 0]], rtol=0.02)
    assert np.abs(whole[-1, 2] - whole[-1, 0]) > 0.05
    folder = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        scaling_family.train_one(cfg, folder, 8)
    folder.__class__ = core.RunDir
    _, continued = scaling_family.train_one(cfg, folder, 8)
    np.testing.assert_array_equal(continued, whole)


@pytest.mark.slow
def test_the_paper_preset_fits_together():
    cfg = dataclasses.replace(shannon.PRESETS["paper"], tables=False)
    (rows,) = shannon.run(cfg).tables().values()
    assert [r["width"] for r in rows] == [64, 128, 256, 512, 1024]
    assert rows[-1]["parameters of the layers"] == 2 * (4 * 1024**2 + 3 * 1024 * 4096) + 5 * 1024
    assert rows[-1]["training FLOP"] == 6.0 * rows[-1]["parameters of the layers"] * 50_000 * 64 * 256


def test_own_report_reaches_the_command_line(tmp_path, command):
    code, _, said = command("run", "shannon", "--data", written(tmp_path, "n,d,loss\n1,2,x\n"), "--out", tmp_path)
    assert code == 2
    assert "my.csv, line 2, column loss: found 'x'" in said


def test_own_cells_hold_out_the_largest_and_the_longest():
    n, d, y = runs()
    cells = scaling_own._cells(Table("t", n, d, y, np.full(24, ""), None, np.arange(24)))
    assert [int(c.test.sum()) for c in cells] == [0, 6, 4]
    assert (n[cells[1].test] == n.max()).all()
    assert d[cells[2].test].min() > d[cells[2].fit].max()
