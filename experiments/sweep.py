"""``sweep NAME --grid lr=1e-3,3e-3 --grid seed=0..7``: every combination as a plain ``run`` in its own folder.

A trial's folder is named by its options, so a trial that is finished, by whichever command, is not run again, and one
that was interrupted continues. Locally the trials are processes of their own; on Slurm submitit submits them as one
job array.
"""

import csv
import importlib.util
import io
import itertools
import re
import shlex
import subprocess
import sys
import time
import typing
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal

import tyro
from rich.text import Text

from experiments import cli, core, show
from experiments.failures import Stop, unknown
from experiments.jsonio import config_hash, read_json, write_json
from experiments.rundir import config_record, make_folder
from jaxmeth.train.files import write_atomically


@dataclass(frozen=True)
class SweepOptions:
    """Which trials, and where they run."""

    grid: tyro.conf.UseAppendAction[list[str]] = field(default_factory=list)
    """One option and its values, again for another: lr=1e-3,3e-3 or seed=0..7 (ends included)."""
    launcher: Literal["local", "slurm"] = "local"
    """local: processes on this machine. slurm: a job array, through the package submitit."""
    jobs: int = 1
    """Trials at the same time."""
    slurm: tyro.conf.UseAppendAction[list[str]] = field(default_factory=list)
    """A Slurm setting, again for another: partition=gpu, time=60 (minutes), gpus_per_node=1, mem=32GB."""
    dry_run: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print the commands and stop."""
    preset: str = "laptop"
    """smoke, laptop, paper or another the experiment names (smollm2): what the options below start from."""
    config: Path | None = None
    """A JSON file of options; options given here win over it."""
    out: Path = Path("results")
    """Folder of all results."""


class Trial(typing.NamedTuple):
    """One point of the grid."""

    point: dict[str, str]
    config: Any
    folder: Path
    command: list[str]

    @property
    def finished(self) -> bool:
        """Whether its result is stored."""
        return (self.folder / "result.json").exists()


def sweep_command(argv: list[str]) -> int:
    """Run the trials that are not finished; 1 when one failed."""
    module, rest, usage = cli.named(argv, "sweep")
    options, config = cli.parse_config(module, rest, SweepOptions, "sweep", usage)
    if options.jobs < 1:
        raise Stop(2, f"--jobs: found {options.jobs}, expected at least 1", usage)
    grid = read_grid(module, options.grid, usage)
    trials = [make_trial(module, options, config, point, usage) for point in grid]
    todo = [t for t in trials if not t.finished]
    if options.dry_run:
        for trial in trials:
            print(shlex.join(trial.command) + ("    # finished" if trial.finished else ""))
        return 0
    submit = slurm_executor(options, usage) if options.launcher == "slurm" and todo else None
    for trial in todo:
        prepare(module, options, trial)
    show.console().print(f"{len(trials)} trials, {len(trials) - len(todo)} of them finished already")
    if submit:
        jobs = submit([t.command for t in todo])
        print(f"submitted {len(jobs)} jobs: {', '.join(str(j.job_id) for j in jobs)}")
        print("the same command, later, runs what is missing; the report shows what is there")
        return 0
    run_local(todo, options.jobs)
    return summarise(module, options.out, trials)


def read_grid(module: ModuleType, grid: list[str], usage: str) -> list[dict[str, str]]:
    """The points of ``["lr=1e-3,3e-3", "seed=0..7"]``: every combination, the last option fastest."""
    hints = typing.get_type_hints(module.Config)
    axes: dict[str, list[str]] = {}
    for text in grid:
        name, sign, values = text.partition("=")
        name = name.strip().lstrip("-").replace("-", "_")
        if not sign or not values.strip():
            raise Stop(2, f"--grid: found {text!r}, expected option=value,value or option=first..last", usage)
        if name not in hints:
            raise Stop(2, f"--grid: {unknown('option', name, hints)}", usage)
        if name in axes:
            raise Stop(2, f"--grid: found {name} twice, expected each option once", usage)
        axes[name] = [v for part in values.split(",") for v in _values(part.strip())]
        if len(axes[name]) == 0 or len(set(axes[name])) < len(axes[name]):
            raise Stop(2, f"--grid: found {values!r}, expected values of {name}, each once", usage)
    if not axes:
        raise Stop(2, "--grid is missing, expected --grid option=value,value", usage)
    return [dict(zip(axes, point, strict=True)) for point in itertools.product(*axes.values())]


def _values(part: str) -> list[str]:
    run = re.fullmatch(r"(-?\d+)\.\.(-?\d+)", part)
    return [str(i) for i in range(int(run[1]), int(run[2]) + 1)] if run else [part] if part else []


def make_trial(module: ModuleType, options: SweepOptions, base: Any, point: dict[str, str], usage: str) -> Trial:
    """The trial at one point; its values are read as the same flags of ``run`` would be."""
    flags = []
    for name, value in point.items():
        flag = name.replace("_", "-")
        if value.lower() in ("true", "false") and isinstance(getattr(base, name), bool):
            flags.append(f"--{flag}" if value.lower() == "true" else f"--no-{flag}")
        else:
            flags += [f"--{flag}", *value.split()]

    def one(experiment: module.Config = base) -> Any:
        return experiment

    config = cli.parse(one, flags, f"{cli.PROG} sweep {cli.short_name(module)}", "", usage)
    name = cli.short_name(module)
    run = f"{options.preset}-{config_hash(name, config, core.data_folder())}"
    folder = options.out / name / run
    where = ["--config", str(folder / "config.json"), "--out", str(options.out), "--name", run]
    return Trial(point, config, folder, [sys.executable, "-m", "experiments", "run", name, *where])


def prepare(module: ModuleType, options: SweepOptions, trial: Trial) -> None:
    """Make the trial's folder with its config.json, which the command reads."""
    make_folder(trial.folder, options.out)
    if not (trial.folder / "config.json").exists():
        record = config_record(cli.short_name(module), trial.config, options.preset, core.data_folder())
        write_json(trial.folder / "config.json", record)


def run_local(trials: list[Trial], jobs: int) -> None:
    """Run the trials as processes, ``jobs`` at a time; what they print goes to ``log.txt`` in their folders."""
    running: set[subprocess.Popen] = set()
    stopped = False

    def run(trial: Trial) -> None:
        if stopped:
            return
        with open(trial.folder / "log.txt", "ab") as log:
            process = subprocess.Popen(trial.command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
            running.add(process)
            process.wait()
            running.discard(process)

    pool = ThreadPoolExecutor(jobs)
    try:
        futures = [pool.submit(run, trial) for trial in trials]
        for future in core.progress(as_completed(futures), total=len(trials), description="trials"):
            future.result()
    finally:
        stopped = True
        for process in list(running):
            process.terminate()  # each lets go of its folder; the same command continues it
        pool.shutdown(cancel_futures=True)


def slurm_executor(options: SweepOptions, usage: str) -> Any:
    """``commands -> jobs`` through submitit's Slurm executor."""
    if importlib.util.find_spec("submitit") is None:
        raise Stop(2, "--launcher slurm needs the package submitit: pip install submitit", usage)
    import submitit

    settings: dict[str, Any] = {"slurm_array_parallelism": options.jobs} if options.jobs > 1 else {}
    for text in options.slurm:
        name, sign, value = text.partition("=")
        if not sign:
            raise Stop(2, f"--slurm: found {text!r}, expected setting=value", usage)
        settings[f"slurm_{name}"] = int(value) if value.isdigit() else value
    try:
        executor = submitit.AutoExecutor(folder=options.out / "slurm", cluster="slurm")
        executor.update_parameters(**settings)
    except (RuntimeError, ValueError, NameError) as error:
        raise Stop(2, f"--launcher slurm: {error}", usage) from None

    def submit(commands: list[list[str]]) -> list[Any]:
        with executor.batch():
            return [executor.submit(submitit.helpers.CommandFunction(command)) for command in commands]

    return submit


def summarise(module: ModuleType, out: Path, trials: list[Trial]) -> int:
    """Show how each trial ended; write every row of every trial into one CSV file."""
    shown, rows = [], []
    for trial in trials:
        record = read_json(trial.folder / "result.json") if trial.finished else {"claims": [], "tables": {}}
        verdicts = [claim["holds"] for claim in record["claims"]]
        counts = {show.VERDICTS[v][0]: verdicts.count(v) for v in show.VERDICTS} if trial.finished else {}
        state = "finished" if trial.finished else _last_line(trial.folder / "log.txt")
        ended = {"seconds": record.get("seconds"), "run": trial.folder.name, "state": state}
        shown.append(trial.point | counts | ended)
        for title, table in record["tables"].items():
            rows += [trial.point | {"run": trial.folder.name, "table": title} | _flat(row) for row in table]
    show.console().print(show.rows_table(shown, "Trials"))
    if rows:
        path = out / cli.short_name(module) / f"sweep-{time.strftime('%Y%m%d-%H%M%S')}.csv"
        text = io.StringIO()
        writer = csv.DictWriter(text, list(dict.fromkeys(k for row in rows for k in row)), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_atomically(path, lambda file: file.write(text.getvalue().encode()))
        show.console().print(Text.assemble("all rows: ", (str(path), "bold")), soft_wrap=True)
    return int(not all(trial.finished for trial in trials))


def _last_line(log: Path) -> str:
    """The end of a failed trial's log, which says why."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return f"failed: {lines[-1].removeprefix('error: ')}" if lines else "failed"


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    """A stored row with each estimate as three columns."""
    flat = {}
    for name, cell in row.items():
        if show.is_estimate(cell):
            flat |= {name: cell["value"], f"{name}_lo": cell["lo"], f"{name}_hi": cell["hi"]}
        else:
            flat[name] = cell
    return flat
