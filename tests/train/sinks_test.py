"""Where metrics go."""

import subprocess
import sys

import numpy as np
import pytest

from jaxmeth import train
from jaxmeth.errors import CheckpointError
from jaxmeth.train.sinks import CsvSink


def test_metrics(tmp_path):
    sink = CsvSink(tmp_path / "metrics.csv")
    sink.write(0, "", {"loss": np.float32(0.1)})
    sink.write(1, "", {"loss": 1 / 3})
    sink.write(1, "eval", {"accuracy": 5})
    assert (tmp_path / "metrics.csv").read_text() == (
        "step,part,loss,accuracy\n0,,0.1,\n1,,0.3333333333333333,\n1,eval,,5\n"
    )


def test_metrics_of_a_continued_run_have_no_gap_and_no_duplicate(tmp_path):
    path = tmp_path / "metrics.csv"
    whole = CsvSink(path)
    for step in range(6):
        for part in ("a", "b"):
            whole.write(step, part, {"loss": step / 7})
    expected = path.read_text()

    path.unlink()
    killed = CsvSink(path)
    for step in range(5):
        killed.write(step, "a", {"loss": step / 7})
        if step < 3:
            killed.write(step, "b", {"loss": step / 7})
    with open(path, "a") as file:
        file.write("3,b,0.42")  # killed inside a line
    resumed = CsvSink(path)
    for step in range(3, 6):  # from its last checkpoint, before the last row of part a
        for part in ("a", "b"):
            resumed.write(step, part, {"loss": step / 7})
    assert sorted(path.read_text().splitlines()) == sorted(expected.splitlines())
    lines = path.read_text().splitlines()
    assert [line for line in lines if ",a," in line] == [line for line in expected.splitlines() if ",a," in line]


@pytest.mark.parametrize("content", [b"\xff\xfe\n1,2\n", b"step,part,loss\nx,,1\n", b"a,b\n1,2\n"])
def test_a_file_that_holds_something_else_is_named(tmp_path, content):
    path = tmp_path / "metrics.csv"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"metrics\.csv: no table of metrics"):
        CsvSink(path).write(0, "", {"loss": 1})


def test_metrics_file_cut_anywhere_can_be_continued(tmp_path):
    path = tmp_path / "metrics.csv"
    sink = CsvSink(path)
    for step in range(3):
        sink.write(step, "a", {"loss": step, "accuracy": -step})
    whole = path.read_bytes()
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        kept = [int(row["step"]) for row in CsvSink(path).rows()]
        assert kept == list(range(len(kept)))
        sink = CsvSink(path)
        for step in range(len(kept), 3):
            sink.write(step, "a", {"loss": step, "accuracy": -step})
        assert path.read_bytes() == whole


def test_fan_out_and_missing_packages(monkeypatch):
    seen = []
    train.fan_out(lambda s, m: seen.append((s, m)), lambda s, m: seen.append(s))(3, {"loss": 1.0})
    assert seen == [(3, {"loss": 1.0}), 3]
    for package, sink in (("tensorboardX", lambda: train.tensorboard_sink("x")), ("wandb", train.wandb_sink),
                          ("trackio", train.trackio_sink)):  # fmt: skip
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(ImportError, match=rf"{package} is not installed: pip install 'jaxmeth\[track\]'"):
            sink()


def test_trackers_are_given_numbers(monkeypatch, tmp_path):
    """The packages are stood in for: what they would be called with."""
    calls = []

    class Run:
        def log(self, metrics, step):
            calls.append((metrics, step))

    class Writer:
        def __init__(self, folder):
            calls.append(folder)

        def add_scalar(self, *values):
            calls.append(values)

        def flush(self):
            calls.append("flush")

    def package(**attributes):
        return type("Package", (), {name: staticmethod(value) for name, value in attributes.items()})

    monkeypatch.setitem(sys.modules, "wandb", package(init=lambda **k: calls.append(k) or Run()))
    monkeypatch.setitem(sys.modules, "tensorboardX", package(SummaryWriter=Writer))
    train.wandb_sink(project="p")(2, {"loss": np.float32(0.5)})
    train.tensorboard_sink(tmp_path)(1, {"loss": np.float32(0.25)})
    assert calls == [{"project": "p"}, ({"loss": 0.5}, 2), str(tmp_path), ("loss", 0.25, 1), "flush"]


def test_importing_the_sinks_imports_no_jax():
    code = "import sys, jaxmeth.train.sinks, jaxmeth.train.files; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
