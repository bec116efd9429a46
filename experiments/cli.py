"""The command line: list, run, tour, report, sweep. A wrong command is one line and exit code 2, never a traceback."""

import contextlib
import importlib
import inspect
import io
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from rich.text import Text

from experiments import core, figures, show
from experiments.discover import discover
from experiments.failures import Stop, Terminated, explain, fail, unknown
from experiments.jsonio import decode_config, encode, read_json, write_json
from experiments.rundir import RunDir, open_run

PROG = "python -m experiments"
HELP = """usage: python -m experiments [COMMAND] [options]

  list                 the experiments with claim, minutes and needs (also without a command)
  run NAME             run one; NAME --help shows its options
  tour                 run all at the smoke preset, then make the report
  report               one HTML page of all runs
  sweep NAME           run one over a grid of options, here or on Slurm

  python -m experiments run NAME --preset smoke
  python -m experiments sweep NAME --grid lr=1e-3,3e-3 --grid seed=0..7
"""


@dataclass(frozen=True)
class RunOptions:
    """Where the run goes."""

    preset: str = "laptop"
    """smoke, laptop, paper or another the experiment names (smollm2): what the options below start from."""
    config: Path | None = None
    """A JSON file of options (also a run's config.json); options given here win over it."""
    out: Path = Path("results")
    """Folder of all results."""
    name: str = ""
    """Name of the run's folder; a finished one is not run again. Made from preset and options if left out."""
    fresh: bool = False
    """Start again where an unfinished run of the same options would be continued."""


def main(argv: list[str] | None = None, name: str | None = None) -> NoReturn:
    """Run the command line and exit. ``name`` puts ``run <name>`` in front."""
    argv = list(sys.argv[1:] if argv is None else argv)
    sys.exit(guarded(["run", name, *argv] if name else argv))


def guarded(argv: list[str]) -> int:
    """``dispatch`` with every foreseeable failure as one line on stderr and its exit code."""
    earlier = None
    with contextlib.suppress(ValueError):  # not the main thread
        earlier = signal.signal(signal.SIGTERM, _terminate)
    try:
        return dispatch(argv)
    except SystemExit as end:  # --help
        return int(end.code or 0)
    except Stop as stop:
        return fail(stop.code, stop.message, stop.usage)
    except KeyboardInterrupt:
        return fail(130, "by Ctrl-C")
    except Terminated:
        return fail(143, "by SIGTERM")
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        code, message = explain(error)
        if not message:
            raise
        return fail(code, message)
    finally:
        if earlier is not None:
            signal.signal(signal.SIGTERM, earlier)


def _terminate(*_) -> NoReturn:
    raise Terminated


def dispatch(argv: list[str]) -> int:
    """Run one command; its exit code."""
    commands = {"list": list_command, "run": run_command, "tour": tour_command}
    commands |= {"report": report_command, "sweep": sweep_command}
    if argv and argv[0] in ("-h", "--help", "help"):
        print(HELP)
        return 0
    if not argv or argv[0] in commands:
        return commands[argv[0] if argv else "list"](argv[1:])
    raise Stop(2, unknown("command", argv[0], commands), f"{PROG} {{{','.join(commands)}}} ...")


def parse(function: Callable[..., Any], argv: list[str], prog: str, description: str, usage: str = "") -> Any:
    """tyro with its error box folded into one line. ``--help`` exits 0."""
    import tyro

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            options = (tyro.conf.OmitArgPrefixes,)
            return tyro.cli(function, args=argv, prog=prog, description=description, config=options)
    except SystemExit as end:
        if not end.code:
            raise
        raise Stop(2, _one_line(said.getvalue()), usage or f"{prog} [options]") from None


def _one_line(box: str) -> str:
    """The message inside tyro's error box: the lines between its title and its first rule, and its suggestion."""
    lines = [line.strip("│|╭╰╮╯ ") for line in re.sub(r"\x1b\[[\d;]*m", "", box).splitlines()][1:]
    message = lines[: next((i for i, line in enumerate(lines) if set(line) <= set("─-")), len(lines))]
    meant = re.search(r"Perhaps you meant:\W*(--[\w-]+)", " ".join(lines))
    text = " ".join(message or box.split()).removeprefix("Error parsing experiment: ")
    return text + (f"; did you mean {meant.group(1)}?" if meant else "")


def load(name: str, usage: str) -> ModuleType:
    """Import one experiment by name."""
    known = discover()
    name = name.replace("-", "_")
    if name not in known:
        raise Stop(2, unknown("experiment", name, known), usage)
    if isinstance(known[name], str):
        raise Stop(2, f"experiments/{name}.py {known[name]}", usage)
    return importlib.import_module(f"experiments.{name}")


def named(argv: list[str], command: str) -> tuple[ModuleType, list[str], str]:
    """The experiment that ``argv`` begins with, the rest, and the usage line."""
    usage = f"{PROG} {command} NAME [--preset smoke|laptop|paper] [options] (--help after the name shows them)"
    if argv and argv[0] in ("-h", "--help"):
        print(f"usage: {usage}\n\nexperiments: {', '.join(discover()) or 'none'}")
        raise SystemExit(0)
    if not argv or argv[0].startswith("-"):
        raise Stop(2, f"the experiment's name is missing, expected one of {', '.join(discover()) or 'none'}", usage)
    module = load(argv[0], usage)
    return module, argv[1:], usage.replace("NAME", short_name(module), 1)


def short_name(module: ModuleType) -> str:
    """``rauq`` of ``experiments.rauq``."""
    return module.__name__.rpartition(".")[2]


def parse_config(module: ModuleType, argv: list[str], options: type, command: str, usage: str) -> tuple[Any, Any]:
    """The command's ``options`` and the experiment's Config: preset, then --config file, then flags."""
    preset, file = _value(argv, "--preset"), _value(argv, "--config")
    stored: dict = {}
    if file:
        stored = read_json(Path(file))
        if stored.get("experiment", short_name(module)) != short_name(module):
            raise Stop(2, f"{file}: found a config of {stored['experiment']}, expected {short_name(module)}", usage)
        preset = preset or stored.get("preset")
        stored = stored["config"] if isinstance(stored.get("config"), dict) else stored
    preset = preset or "laptop"
    if preset not in module.PRESETS:
        raise Stop(2, unknown("preset", preset, module.PRESETS), usage)
    start = module.PRESETS[preset]
    start = decode_config(module.Config, stored, base=start) if stored else start
    settings = options(preset=preset)

    def both(run: options = settings, experiment: module.Config = start) -> tuple[Any, Any]:
        return run, experiment

    # tyro joins single lines: a blank one before what begins with a label, and after the command, which is copied.
    about = re.sub(r"\n+(?=[A-Z][\w ]*: )", "\n\n", inspect.cleandoc(module.__doc__ or ""))
    about = re.sub(r"(?m)^(Command: .*)\n+", r"\1\n\n", about)
    return parse(both, argv, f"{PROG} {command} {short_name(module)}", about, usage)


def _value(argv: list[str], flag: str) -> str | None:
    """The last value of ``flag`` in ``argv``, before tyro sees it."""
    found = None
    for i, word in enumerate(argv):
        if word.startswith(f"{flag}="):
            found = word.partition("=")[2]
        elif word == flag and i + 1 < len(argv):
            found = argv[i + 1]
    return found


def list_command(argv: list[str]) -> int:
    """Print the experiments."""
    if argv and argv[0] not in ("-h", "--help"):
        raise Stop(2, f"unknown option {argv[0]!r}, expected none", f"{PROG} list")
    show.show_list(discover())
    print(f"{PROG} run NAME --preset smoke    (--help for everything else)")
    return 0


def run_command(argv: list[str]) -> int:
    """Run one experiment into its folder, show and store the result."""
    module, rest, usage = named(argv, "run")
    options, config = parse_config(module, rest, RunOptions, "run", usage)
    if options.name and not re.fullmatch(r"[\w][\w.=,+-]*", options.name):
        raise Stop(2, f"--name: found {options.name!r}, expected letters, digits and ._=,+-", usage)
    where = {"name": options.name, "fresh": options.fresh, "data": core.data_folder()}
    with open_run(options.out, short_name(module), config, options.preset, **where) as folder:
        if folder.finished:
            show.console().print(f"{folder.path} is finished; --fresh runs it again", soft_wrap=True)
            return 0
        _header(module, options, config, folder)
        record, result = execute(module, config, folder)
        record |= {"preset": options.preset, "command": shlex.join([*PROG.split(), "run", *argv])}
        write_json(folder.path / "result.json", record)
        if result.figures and figures.available():
            record["figures"] = figures.save(result.figures, folder.path)
            write_json(folder.path / "result.json", record)
        elif result.figures:
            show.console().print(Text(figures.MISSING, style="yellow"))
        show.show_result(record, folder.path)
    return 0


def execute(module: ModuleType, config: Any, folder: RunDir) -> tuple[dict, core.Result]:
    """Call ``run``; what result.json will hold (figures not drawn yet), and the result itself."""
    started, clock = datetime.now(UTC), time.perf_counter()
    takes_folder = len(inspect.signature(module.run).parameters) > 1
    try:
        result = module.run(config, folder) if takes_folder else module.run(config)
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)  # ends a progress bar that the interrupted loop still holds
        kept = f"{folder.path} is unfinished: the same command continues it"
        if isinstance(error, KeyboardInterrupt):
            raise Stop(130, f"by Ctrl-C; {kept}") from None
        if isinstance(error, Terminated):
            raise Stop(143, f"by SIGTERM; {kept}") from None
        code, message = explain(error, module.ABOUT, config) if isinstance(error, Exception) else (1, "")
        folder.discard_if_empty()
        if message:
            raise Stop(code, message) from error
        raise
    record = {
        "experiment": short_name(module),
        "run": folder.path.name if folder.path else "",
        "about": module.ABOUT,
        "config": config,
        "tables": result.tables(),
        "claims": [encode(claim) | {"holds": claim.holds} for claim in result.claims],
        "notes": list(result.notes),
        "figures": [],
        "started": started.isoformat(timespec="seconds"),
        "seconds": round(time.perf_counter() - clock, 2),
        "machine": machine(),
    }
    return encode(record), result


def machine() -> dict[str, str]:
    """Versions and device, JAX's where the run used it."""
    import jaxmeth

    found = {"python": platform.python_version(), "jaxmeth": jaxmeth.__version__, "cores": str(os.cpu_count())}
    if jax := sys.modules.get("jax"):
        devices = jax.devices()
        found |= {"jax": jax.__version__, "device": f"{len(devices)} x {devices[0].device_kind}"}
    return found


def _header(module: ModuleType, options: RunOptions, config: Any, folder: RunDir) -> None:
    shown = show.console()
    shown.print(Text(module.ABOUT.claim, style="italic"))
    changed = [
        f"{f.name}={getattr(config, f.name)}"
        for f in fields(config)
        if getattr(config, f.name) != getattr(module.PRESETS[options.preset], f.name)
    ]
    line = f"{short_name(module)}, preset {options.preset}{''.join(f', {c}' for c in changed)}"
    shown.print(Text.assemble((line, "bold cyan"), f" -> {folder.path}"), soft_wrap=True)
    if folder.continued:
        shown.print(Text(f"continuing an unfinished run ({folder.chunks()} chunks are done)", style="yellow"))


def child(argv: list[str], **streams: Any) -> int:
    """Run a command, pass our own end on to it; its exit code."""
    sys.stdout.flush()
    process = subprocess.Popen(argv, **streams)
    try:
        return process.wait()
    except BaseException:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        raise


def tour_command(argv: list[str]) -> int:
    """Every experiment at ``smoke``, each in a process of its own, then the report."""

    def options(out: Path = Path("results")) -> Path:
        """Run every experiment at the smoke preset, then make the report.

        Args:
            out: Folder of all results.
        """
        return out

    out = parse(options, argv, f"{PROG} tour", inspect.getdoc(options).partition("\n")[0])
    names = [name for name, about in discover().items() if not isinstance(about, str)]
    outcome = []
    for i, name in enumerate(names):
        show.console().rule(Text(f"{i + 1} of {len(names)}: {name}", style="bold"))
        clock = time.perf_counter()
        code = child([sys.executable, "-m", "experiments", "run", name, "--preset", "smoke", "--out", str(out)])
        state = "ran" if code == 0 else f"failed (exit {code})"
        outcome.append({"experiment": name, "outcome": state, "seconds": round(time.perf_counter() - clock, 1)})
        if code in (130, 143):
            raise Stop(code, "the tour ends here")
    if outcome:
        show.console().print(show.rows_table(outcome, "Tour"))
    report_command(["--out", str(out)])
    return int(any(row["outcome"] != "ran" for row in outcome))


def sweep_command(argv: list[str]) -> int:
    """Run one experiment over a grid of options."""
    from experiments import sweep

    return sweep.sweep_command(argv)


def report_command(argv: list[str]) -> int:
    """One HTML page of all runs."""

    def options(out: Path = Path("results")) -> Path:
        """Make one HTML page of all runs: tables, plots and the ledger of claims.

        Args:
            out: Folder of all results; the page is written there.
        """
        return out

    from experiments import report

    out = parse(options, argv, f"{PROG} report", inspect.getdoc(options).partition("\n")[0])
    page = report.build(out)
    show.console().print(Text.assemble("report: ", (str(page), f"bold link {page.resolve().as_uri()}")), soft_wrap=True)
    return 0
