"""Grids, trials and launchers."""

import csv
import json
import shlex

import pytest

from experiments import cli, sweep


@pytest.fixture
def in_process(monkeypatch):
    """Trials of ``run_local`` run here instead of in processes; yields the list of their commands."""
    started = []

    def run(trials, jobs):
        for trial in trials:
            started.append(trial.command)
            cli.guarded(trial.command[3:])

    monkeypatch.setattr(sweep, "run_local", run)
    return started


def test_grid(toy):
    points = sweep.read_grid(toy, ["scale=1e-3,3e-3", "seed=0..2"], "")
    assert len(points) == 6
    assert points[0] == {"scale": "1e-3", "seed": "0"}
    assert points[1] == {"scale": "1e-3", "seed": "1"}
    assert points[-1] == {"scale": "3e-3", "seed": "2"}
    assert [p["seed"] for p in sweep.read_grid(toy, ["--seed=5, 0..1"], "")] == ["5", "0", "1"]
    assert sweep.read_grid(toy, ["mode=run"], "") == [{"mode": "run"}]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("", "--grid is missing"),
        ("--grid scale", "--grid: found 'scale', expected option=value"),
        ("--grid scale=", "--grid: found 'scale=', expected option=value"),
        ("--grid scael=1", "--grid: unknown option 'scael'; did you mean scale?"),
        ("--grid scale=1,1", "--grid: found '1,1', expected values of scale, each once"),
        ("--grid seed=3..1", "--grid: found '3..1', expected values of seed"),
        ("--grid scale=1 --grid scale=2", "--grid: found scale twice"),
        ("--grid scale=1,x", "Error parsing --scale"),
        ("--grid scale=1,11", "scale: found 11.0, expected 0 to 10"),
        ("--grid scale=1 --jobs 0", "--jobs: found 0, expected at least 1"),
        ("--grid scale=1 --launcher k8s", "invalid choice 'k8s' for argument '--launcher'"),
        ("--grid scale=1 --bogus", "Unrecognized options: --bogus"),
    ],
)
def test_wrong_grids_start_nothing(command, tmp_path, argv, message):
    code, _, err = command("sweep", "toy", *argv.split(), "--out", tmp_path / "out")
    assert code == 2
    assert message in err.splitlines()[-1]
    assert len(err.splitlines()) == 2
    assert not (tmp_path / "out").exists()


def test_dry_run_prints_plain_run_commands(command, tmp_path):
    code, out, _ = command("sweep", "toy", "--preset=smoke", "--grid=seed=0..1", "--out", tmp_path, "--dry-run")
    assert code == 0
    words = [shlex.split(line) for line in out.splitlines()]
    assert len(words) == 2
    assert words[0][1:5] == ["-m", "experiments", "run", "toy"]
    assert not list(tmp_path.iterdir())


def test_sweep_runs_what_is_missing(command, in_process, tmp_path):
    argv = ("sweep", "toy", "--preset", "smoke", "--out", tmp_path, "--grid", "scale=1,2", "--items", 5)
    code, out, _ = command(*argv, "--grid", "seed=0..1")
    assert code == 0
    assert len(in_process) == 4
    configs = [json.loads(p.read_text())["config"] for p in tmp_path.glob("toy/*/config.json")]
    assert sorted((c["scale"], c["seed"]) for c in configs) == [(1.0, 0), (1.0, 1), (2.0, 0), (2.0, 1)]
    assert all(c["items"] == 5 for c in configs)
    (table,) = tmp_path.glob("toy/sweep-*.csv")
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert len(rows) == 8
    assert {"scale", "seed", "run", "method", "error", "error_lo", "error_hi"} <= set(rows[0])
    assert f"all rows: {table}" in out

    code, out, _ = command(*argv, "--grid", "seed=0..2")
    assert code == 0
    assert "6 trials, 4 of them finished already" in out
    assert len(in_process) == 6
    # A plain run with the same options is one of the trials: nothing is left to run.
    code, _, _ = command(*argv[:1], *argv[1:6], "--grid", "seed=7")
    assert code == 0
    assert len(in_process) == 7


def test_a_plain_run_counts_as_a_trial(command, in_process, tmp_path):
    assert command("run", "toy", "--preset", "smoke", "--items", 5, "--fast", "--out", tmp_path)[0] == 0
    code, _, _ = command(
        "sweep", "toy", "--preset", "smoke", "--out", tmp_path, "--grid", "items=5,6", "--grid", "fast=true"
    )
    assert code == 0
    assert len(in_process) == 1


def test_a_failed_trial_does_not_stop_the_others(command, in_process, tmp_path):
    code, out, _ = command("sweep", "toy", "--preset", "smoke", "--out", tmp_path, "--grid", "mode=refuse,run")
    assert code == 1
    assert len(in_process) == 2
    assert "finished" in out
    assert "failed" in out


def test_values_with_spaces_fill_a_tuple(command, in_process, tmp_path):
    argv = ("sweep", "toy", "--preset", "smoke", "--out", tmp_path, "--items", 5, "--grid", "levels=0.1 0.2,0.3")
    assert command(*argv)[0] == 0
    levels = [json.loads(p.read_text())["config"]["levels"] for p in tmp_path.glob("toy/*/config.json")]
    assert sorted(levels) == [[0.1, 0.2], [0.3]]


def test_slurm_without_submitit_names_the_package(command, tmp_path, monkeypatch):
    monkeypatch.setattr(sweep.importlib.util, "find_spec", lambda name: None)
    code, _, err = command("sweep", "toy", "--grid", "seed=0..1", "--launcher", "slurm", "--out", tmp_path)
    assert code == 2
    assert err.splitlines()[-1].endswith("needs the package submitit: pip install submitit")


FAKE_SUBMITIT = """
import contextlib, types
made = []
class AutoExecutor:
    def __init__(self, folder, cluster):
        if "nowhere" in str(folder):
            raise RuntimeError('Could not detect "srun", are you indeed on a slurm cluster?')
        self.cluster, self.submitted, self.parameters = cluster, [], {}
        made.append(self)
    def update_parameters(self, **parameters):
        self.parameters = parameters
    @contextlib.contextmanager
    def batch(self):
        yield
    def submit(self, function):
        self.submitted.append(function)
        return types.SimpleNamespace(job_id=f"12_{len(self.submitted)}")
helpers = types.SimpleNamespace(CommandFunction=lambda command: command)
"""


def test_slurm_submits_the_plain_commands_as_one_array(command, tmp_path, monkeypatch):
    (tmp_path / "submitit.py").write_text(FAKE_SUBMITIT)
    monkeypatch.syspath_prepend(tmp_path)
    out = tmp_path / "out"
    argv = ("sweep", "toy", "--preset", "smoke", "--grid", "seed=0..1", "--launcher", "slurm", "--jobs", 2)
    code, shown, _ = command(*argv, "--slurm", "partition=gpu", "--slurm", "time=60", "--out", out)
    import submitit

    (executor,) = submitit.made
    assert code == 0
    assert executor.cluster == "slurm"
    assert executor.parameters == {"slurm_array_parallelism": 2, "slurm_partition": "gpu", "slurm_time": 60}
    assert "submitted 2 jobs: 12_1, 12_2" in shown
    for trial in executor.submitted:
        assert cli.guarded(trial[3:]) == 0
    assert len(list(out.glob("toy/*/result.json"))) == 2
    assert command(*argv, "--out", out)[0] == 0
    assert len(submitit.made) == 1
    code, _, err = command(*argv, "--out", tmp_path / "nowhere")
    assert code == 2
    assert "are you indeed on a slurm cluster?" in err
    code, _, err = command(*argv, "--slurm", "gpu", "--out", tmp_path / "other")
    assert code == 2
    assert "--slurm: found 'gpu', expected setting=value" in err
