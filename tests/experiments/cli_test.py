"""The command line in this process: what it prints, writes and refuses."""

import csv
import json
import re
import shlex
import signal
import sys

import pytest

import experiments
from experiments import cli


def one_line(err):
    """The error line, checked to be the last of at most a usage line and itself."""
    lines = err.splitlines()
    assert 1 <= len(lines) <= 2, err
    assert all(line.startswith("usage: python -m experiments ") for line in lines[:-1])
    assert lines[-1].startswith(("error: ", "stopped: "))
    assert "Traceback" not in err
    return lines[-1].partition(": ")[2]


def test_list_shows_claim_minutes_and_needs(command):
    for argv in ([], ["list"]):
        code, out, err = command(*argv)
        assert (code, err) == (0, "")
        line = next(line for line in out.splitlines() if line.strip().startswith("toy"))
        assert "three times smaller" in line
        assert line.split()[-3:] == ["0.1", "2", "nothing"]
    assert "experiments.toy" not in sys.modules


def test_list_shows_what_is_wrong_with_a_module(command, tmp_path, monkeypatch):
    (tmp_path / "cut.py").write_text("ABOUT = core.About(claim='x'\n")
    (tmp_path / "computed.py").write_text("ABOUT = core.About(claim=str(1))\n")
    (tmp_path / "misspelt.py").write_text("ABOUT = core.About(clam='x')\n")
    (tmp_path / "helper.py").write_text("def run(): ...\n")
    monkeypatch.setattr(experiments, "__path__", [str(tmp_path)])
    code, out, _ = command("list")
    assert code == 0
    assert "cannot be read: '(' was never closed, line 1" in out
    assert "literal arguments" in out
    assert "clam" in out
    assert "helper" not in out
    code, _, err = command("run", "cut")
    assert code == 2
    assert "experiments/cut.py cannot be read" in one_line(err)


def test_help(command):
    assert "sweep NAME" in command("--help")[1]
    code, out, _ = command("run", "--help")
    assert code == 0
    assert re.search(r"experiments: .*\btoy\b", out)
    code, out, _ = command("run", "toy", "--help", "--preset", "smoke")
    assert code == 0
    assert "Number of items, each drawn nine times. (default: 20)" in " ".join(out.split())
    assert "Expected: a ratio of errors near 3. Minutes: 0.1." in out
    assert "--preset" in out


def test_a_run_shows_and_stores_its_result(command, tmp_path):
    code, out, err = command("run", "toy", "--preset", "smoke", "--out", tmp_path, "--scale", 2, "--levels", 0.1, 0.2)
    assert (code, err) == (0, "")
    (folder,) = (tmp_path / "toy").iterdir()
    assert {p.name for p in folder.iterdir()} == {"chunks", "config.json", "figures", "metrics.csv", "result.json"}
    result = json.loads((folder / "result.json").read_text())
    assert result["config"] == json.loads((folder / "config.json").read_text())["config"]
    assert (result["config"]["scale"], result["config"]["levels"], result["preset"]) == (2.0, [0.1, 0.2], "smoke")
    assert result["figures"] == ["figures/errors.png"]
    assert (folder / "figures" / "errors.png").read_bytes().startswith(b"\x89PNG")
    assert [claim["holds"] for claim in result["claims"]] == ["yes", "no"]
    assert set(result["tables"][""][0]) == {"method", "error", "draws"}
    assert result["machine"]["python"]
    rows = list(csv.DictReader((folder / "metrics.csv").read_text().splitlines()))
    assert len(rows) == 40
    assert float(rows[-2]["error"]) == pytest.approx(result["tables"][""][0]["error"]["value"])

    assert "toy, preset smoke, scale=2.0, levels=(0.1, 0.2)" in out
    assert "holds" in out
    assert "does not hold" in out
    assert "note: made data" in out
    assert f"wrote {folder}: result.json, metrics.csv, figures/errors.png" in out
    assert shlex.split(result["command"])[3:6] == ["run", "toy", "--preset"]


def test_the_same_command_gives_the_same_result(command, tmp_path):
    for _ in range(2):
        assert command("run", "toy", "--preset", "smoke", "--out", tmp_path)[0] == 0
    first, second = (json.loads((f / "result.json").read_text()) for f in sorted((tmp_path / "toy").iterdir()))
    assert second["run"] == f"{first['run']}-2"
    assert first["tables"] == second["tables"]
    assert command("run", "toy", "--preset", "smoke", "--out", tmp_path, "--seed", 1)[0] == 0
    third = json.loads(max((tmp_path / "toy").glob("*/result.json"), key=lambda p: p.stat().st_mtime).read_text())
    assert third["tables"] != first["tables"]


def test_a_named_finished_run_is_not_run_again(command, tmp_path):
    argv = ("run", "toy", "--preset", "smoke", "--out", tmp_path, "--name", "mine")
    assert command(*argv)[0] == 0
    stored = (tmp_path / "toy" / "mine" / "result.json").stat().st_mtime_ns
    code, out, _ = command(*argv)
    assert code == 0
    assert "is finished; --fresh runs it again" in out
    assert (tmp_path / "toy" / "mine" / "result.json").stat().st_mtime_ns == stored
    assert command(*argv, "--fresh")[0] == 0
    assert (tmp_path / "toy" / "mine" / "result.json").stat().st_mtime_ns > stored


def test_a_config_file_gives_options_and_flags_win(command, tmp_path):
    file = tmp_path / "c.json"
    file.write_text('{"items": 7, "scale": 3, "data": null}')
    out = tmp_path / "out"
    assert command("run", "toy", "--preset", "smoke", "--config", file, "--scale", 4, "--out", out)[0] == 0
    (config,) = out.glob("toy/*/config.json")
    stored = json.loads(config.read_text())
    assert (stored["config"]["items"], stored["config"]["scale"], stored["preset"]) == (7, 4.0, "smoke")
    assert command("run", "toy", f"--config={config}", "--out", out)[0] == 0
    assert (config.parent.parent / f"{config.parent.name}-2" / "result.json").exists()


def test_the_module_runs_by_itself(toy, tmp_path, capfd):
    from experiments import core

    with pytest.raises(SystemExit) as end:
        core.main(toy.__file__, ["--preset", "smoke", "--out", str(tmp_path)])
    assert end.value.code == 0
    assert "does not hold" in capfd.readouterr().out


def test_without_matplotlib_the_run_succeeds_and_names_the_extra(command, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)
    code, out, _ = command("run", "toy", "--preset", "smoke", "--out", tmp_path)
    assert code == 0
    assert "jaxmeth[viz]" in out
    (result,) = tmp_path.glob("toy/*/result.json")
    assert json.loads(result.read_text())["figures"] == []


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("runn", "unknown command 'runn'; did you mean run?"),
        ("run", "the experiment's name is missing, expected one of"),
        ("run --preset smoke", "the experiment's name is missing"),
        ("run tou", "unknown experiment 'tou'; did you mean toy?"),
        ("run zzz", "unknown experiment 'zzz'; expected one of"),
        ("run toy --preset huge", "unknown preset 'huge'; expected one of smoke, laptop, paper"),
        ("run toy --itemz 3", "Unrecognized options: --itemz, 3; did you mean --items?"),
        ("run toy extra", "Unrecognized options: extra"),
        ("run toy --items", "Missing value for argument '--items'"),
        ("run toy --out", "Missing value for argument '--out'"),
        ("run toy --items abc", "Error parsing --items: invalid literal"),
        ("run toy --items -1", "items: found -1, expected at least 1"),
        ("run toy --scale nan", "scale: found nan, expected 0 to 10"),
        ("run toy --mode x", "invalid choice 'x' for argument '--mode'"),
        ("run toy --name ../x", "--name: found '../x'"),
        ("run toy --config absent.json", "absent.json: cannot be read"),
        ("report --out absent", "--out absent: found no folder"),
        ("report --format pdf", "Unrecognized options: --format, pdf"),
        ("tour --preset smoke", "Unrecognized options: --preset, smoke"),
        ("list --all", "unknown option '--all'"),
    ],
)
def test_wrong_commands_are_one_line(command, tmp_path, monkeypatch, argv, message):
    monkeypatch.chdir(tmp_path)
    code, out, err = command(*argv.split())
    assert code == 2
    assert message in one_line(err)
    assert out == ""
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("mode", "code", "message"),
    [
        ("refuse", 2, "weights: found none, expected a folder"),
        ("missing", 2, "No module named 'package_that_is_missing'; install the package package_that_is_missing"),
        ("memory", 1, "out of memory: could not allocate 7.28 TiB with"),
        ("xla", 1, "out of memory: could not allocate 64 TiB with"),
        ("extra", 2, "hub names need huggingface_hub: install jaxmeth[hf]"),
        ("full", 1, "metrics.csv: No space left on device"),
        ("data", 2, "JAXMETH_DATA: found no file 00-toy/toy.csv"),
    ],
)
def test_failures_of_a_run_are_one_line(command, tmp_path, monkeypatch, mode, code, message):
    monkeypatch.setenv("JAXMETH_DATA", str(tmp_path))
    found, _, err = command("run", "toy", "--mode", mode, "--out", tmp_path / "out", "--items", 1 << 20)
    assert found == code
    assert message in one_line(err)
    if mode in ("memory", "xla"):
        assert err.rstrip().endswith("lower --items (now 1048576)")
    assert not list((tmp_path / "out" / "toy").iterdir())


def test_a_bug_keeps_its_traceback(command, tmp_path):
    with pytest.raises(KeyError, match="bug"):
        command("run", "toy", "--mode", "bug", "--out", tmp_path)


def test_out_is_checked_before_the_first_step(command, tmp_path):
    file = tmp_path / "file"
    file.write_text("x")
    for out in (file, file / "below", "/proc/results"):
        code, shown, err = command("run", "toy", "--mode", "bug", "--out", out)
        assert (code, shown) == (2, "")
        assert f"--out {out}: cannot write" in one_line(err)


def test_the_data_folder_is_part_of_the_run(command, tmp_path, monkeypatch):
    """A run with real data never continues one on made data."""
    assert command("run", "toy", "--preset", "smoke", "--out", tmp_path)[0] == 0
    monkeypatch.setenv("JAXMETH_DATA", str(tmp_path))
    assert command("run", "toy", "--preset", "smoke", "--out", tmp_path)[0] == 0
    hashes = {json.loads(p.read_text())["hash"] for p in tmp_path.glob("toy/*/config.json")}
    assert len(hashes) == 2


def test_an_interrupted_run_continues(command, toy, tmp_path, monkeypatch):
    argv = ("run", "toy", "--preset", "smoke", "--out", tmp_path)
    assert command(*argv, "--name", "whole")[0] == 0

    original = cli.RunDir.log

    def interrupt(self, step, part="", **metrics):
        if step == 11:
            raise KeyboardInterrupt
        original(self, step, part, **metrics)

    with monkeypatch.context() as patched:
        patched.setattr(cli.RunDir, "log", interrupt)
        code, _, err = command(*argv)
    assert code == 130
    assert "is unfinished: the same command continues it" in one_line(err)
    code, out, _ = command(*argv)
    assert code == 0
    assert "continuing an unfinished run (12 chunks are done)" in out
    whole, continued = tmp_path / "toy" / "whole", next((tmp_path / "toy").glob("smoke-*"))
    assert (whole / "metrics.csv").read_bytes() == (continued / "metrics.csv").read_bytes()
    results = [json.loads((p / "result.json").read_text()) for p in (whole, continued)]
    assert results[0]["tables"] == results[1]["tables"]
    assert results[0]["claims"] == results[1]["claims"]


def test_sigterm_handler_is_put_back(command):
    before = signal.getsignal(signal.SIGTERM)
    command("list")
    assert signal.getsignal(signal.SIGTERM) is before


def test_tour_runs_all_and_makes_the_report(command, tmp_path, monkeypatch):
    started = []

    def child(argv, **_):
        started.append(argv[1:])
        return cli.guarded(argv[3:])

    monkeypatch.setattr(cli, "child", child)
    monkeypatch.setattr(cli, "discover", lambda: {"toy": cli.core.About(claim="x"), "cut": "cannot be read"})
    code, out, _ = command("tour", "--out", tmp_path)
    assert code == 0
    assert started == [["-m", "experiments", "run", "toy", "--preset", "smoke", "--out", str(tmp_path)]]
    assert f"report: {tmp_path / 'report.html'}" in out
    assert (tmp_path / "report.html").exists()
    monkeypatch.setattr(cli, "child", lambda argv: 2)
    code, out, _ = command("tour", "--out", tmp_path)
    assert code == 1
    assert "failed (exit 2)" in out
