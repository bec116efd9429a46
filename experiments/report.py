"""One self-contained HTML page of all runs below a folder: the ledger of claims, tables, plots, configurations.

No file is fetched when the page is opened; it reads without scripts (they only filter and sort), in light and dark,
and on paper.
"""

import base64
import json
import shlex
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from experiments import show
from experiments.curves import read_metrics, svg_curves
from experiments.page import SCRIPT, STYLE
from jaxmeth.errors import ConfigError
from jaxmeth.train.files import write_atomically

_SIZE = ("smoke", "smollm2", "laptop", "paper")


class Run(NamedTuple):
    """A run's folder and what is stored there; ``problem`` says why there is no result."""

    path: Path
    record: dict[str, Any]
    problem: str = ""


def build(out: Path) -> Path:
    """Write ``out/report.html``; returns its path.

    Raises: ConfigError when ``out`` is not a folder or holds no run.
    """
    if not out.is_dir():
        raise ConfigError(f"--out {out}: found no folder, expected the results of earlier runs")
    runs = read_runs(out)
    if not runs:
        raise ConfigError(f"--out {out}: found no runs, expected results of `python -m experiments run NAME`")
    page = out / "report.html"
    write_atomically(page, lambda file: file.write(render(runs, out).encode()))
    return page


def read_runs(out: Path) -> list[Run]:
    """Every run below ``out``, the oldest first; a damaged or unfinished one carries its problem."""
    runs = []
    for config in out.glob("*/*/config.json"):
        folder = config.parent
        runs.append(_read_run(folder))
    return sorted(runs, key=lambda run: (run.path.parent.name, run.record.get("started", ""), run.path.name))


def _read_run(folder: Path) -> Run:
    result = folder / "result.json"
    if not result.exists():
        chunks = len(list(folder.glob("chunks/*.npz")))
        return Run(folder, {}, f"unfinished ({chunks} chunk{'' if chunks == 1 else 's'} stored)")
    try:
        record = json.loads(result.read_text(encoding="utf-8"))
        needed = ("tables", "claims", "notes", "figures", "preset", "config", "about", "seconds", "started", "machine")
        missing = [name for name in needed if name not in record]
    except (ValueError, TypeError, OSError) as error:
        return Run(folder, {}, f"damaged result.json ({error})")
    return Run(folder, {}, f"damaged result.json (no {missing[0]})") if missing else Run(folder, record)


def leading(runs: Iterable[Run]) -> Run:
    """The run that speaks for an experiment: the latest of its largest preset."""
    finished = [run for run in runs if not run.problem]
    return max(finished, key=lambda run: (_rank(run.record["preset"]), run.record["started"]))


def _rank(preset: str) -> int:
    return _SIZE.index(preset) if preset in _SIZE else -1


def ledger(runs: Iterable[Run]) -> list[dict[str, Any]]:
    """One line a claim: what the latest run of the largest preset says, and the verdict of every run."""
    claims: dict[tuple[str, str], list[tuple[Run, dict]]] = {}
    for run in runs:
        for claim in run.record.get("claims", ()):
            claims.setdefault((run.path.parent.name, claim["statement"]), []).append((run, claim))
    lines = []
    for (experiment, _), stated in claims.items():
        speaks = leading(run for run, _ in stated)
        claim = next(c for run, c in stated if run is speaks)
        history = [(run.path.name, c["holds"]) for run, c in stated]
        lines.append({"experiment": experiment, "run": speaks, "claim": claim, "history": history})
    return lines


def render(runs: list[Run], out: Path) -> str:
    """The page."""
    experiments: dict[str, list[Run]] = {}
    for run in runs:
        experiments.setdefault(run.path.parent.name, []).append(run)
    lines = ledger(runs)
    counts = {v: sum(line["claim"]["holds"] == v for line in lines) for v in show.VERDICTS}
    finished = sum(not run.problem for run in runs)
    tiles = [(len(experiments), "experiment", "experiments", ""), (finished, "finished run", "finished runs", "")]
    tiles += (
        [(len(runs) - finished, "run without a result", "runs without a result", "")] if finished < len(runs) else []
    )
    tiles += [
        (counts["yes"], "claim holds", "claims hold", "yes"),
        (counts["no"], "claim does not hold", "claims do not hold", "no"),
        (counts["undecided"], "claim undecided", "claims undecided", "undecided"),
    ]
    shown = "".join(
        f"<div class='tile {colour}'><b>{n}</b>{one if n == 1 else many}</div>" for n, one, many, colour in tiles
    )
    nav = "".join(f"<a href='#{escape(name)}'>{escape(name)}</a>" for name in experiments)
    sections = "".join(_section(name, found, out) for name, found in experiments.items())
    made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return (
        "<!doctype html><html lang=en><head><meta charset=utf-8>"
        "<meta name=viewport content='width=device-width,initial-scale=1'>"
        f"<title>jaxmeth experiments</title><style>{STYLE}</style></head><body>"
        f"<header><h1>jaxmeth experiments</h1><p class=dim>{made}</p><div class=tiles>{shown}</div>"
        f"</header><nav><a href='#ledger'>claims</a>{nav}</nav><main>"
        f"{_ledger_section(lines)}{sections}</main><script>{SCRIPT}</script></body></html>\n"
    )


def _ledger_section(lines: list[dict[str, Any]]) -> str:
    if not lines:
        return "<section id=ledger><h2>Claims</h2><p class=dim>No finished run states a claim.</p></section>"
    body = ""
    for line in lines:
        measured, interval, threshold, _ = show.claim_cells(line["claim"])
        squares = "".join(
            f"<i class={verdict} title='{escape(f'{run}: {show.VERDICTS[verdict][0]}', quote=True)}'></i>"
            for run, verdict in line["history"][-40:]
        )
        cells = [
            f"<td><a href='#{escape(line['experiment'])}'>{escape(line['experiment'])}</a>",
            f"<td>{escape(line['claim']['statement'])}",
            f"<td class=n>{escape(measured)}<td class=n>{escape(interval)}<td class=c>{escape(threshold)}",
            f"<td>{_pill(line['claim']['holds'])}<td>{escape(line['run'].record['preset'])}",
            f"<td class=runs>{squares}",
        ]
        body += f"<tr data-v={line['claim']['holds']}>{''.join(cells)}"
    buttons = "".join(
        f"<button data-v={v}{' class=on' if v == 'all' else ''}>{escape(label)}</button>"
        for v, label in [("all", "all"), *((v, show.VERDICTS[v][0]) for v in show.VERDICTS)]
    )
    heads = ("experiment", "claim", "measured", "interval", "threshold", "verdict", "preset", "all runs")
    return (
        "<section id=ledger><h2>Claims</h2><p class=dim>What the latest run of the largest preset says; each square "
        f"on the right is one run, the oldest first.</p><div class=filter>{buttons}</div>"
        f"<div class=scroll><table><thead><tr>{_heads(heads, 'nn', 2)}</thead><tbody>{body}</tbody></table></div>"
        "</section>"
    )


def _heads(names: Iterable[str], numeric: str = "", start: int = 0) -> str:
    right = range(start, start + len(numeric))
    return "".join(f"<th scope=col{' class=n' if i in right else ''}>{escape(n)}" for i, n in enumerate(names))


def _pill(verdict: str) -> str:
    return f"<span class='pill {verdict}'>{show.VERDICTS[verdict][0]}</span>"


def _section(name: str, runs: list[Run], out: Path) -> str:
    finished = [run for run in runs if not run.problem]
    inner = ""
    if finished:
        first = leading(finished)
        others = [run for run in reversed(finished) if run is not first]
        inner = f"<p class=claim>{escape(str(first.record['about'].get('claim', '')))}</p>{_run(first)}"
        inner += "<h3 class=others>Other runs</h3>" if others else ""
        for run in others:
            summary = f"{_title(run)} <span class=dim>{escape(_changes(run, first))}</span>"
            inner += f"<details><summary>{summary}</summary>{_run(run, title=False)}</details>"
    for run in (r for r in runs if r.problem):
        words = ["python", "-m", "experiments", "run", name, "--config", str(run.path / "config.json")]
        command = shlex.join([*words, "--out", str(out), "--name", run.path.name])
        inner += (
            f"<p class=problem><b>{escape(run.path.name)}</b>: {escape(run.problem)}<code>{escape(command)}</code></p>"
        )
    return f"<section id='{escape(name)}'><h2>{escape(name)}</h2>{inner}</section>"


def _title(run: Run) -> str:
    verdicts = [claim["holds"] for claim in run.record["claims"]]
    pills = "".join(
        f"<span class='pill {v}'>{verdicts.count(v)} {show.VERDICTS[v][0]}</span>"
        for v in show.VERDICTS
        if v in verdicts
    )
    when = str(run.record["started"])[:16].replace("T", " ")
    return f"<b>{escape(run.path.name)}</b> <span class=dim>{escape(when)}, {_seconds(run)}</span> {pills}"


def _changes(run: Run, first: Run) -> str:
    """The options in which a run differs from the leading one."""
    ours, theirs = run.record["config"], first.record["config"]
    return ", ".join(f"{k}={v}" for k, v in ours.items() if theirs.get(k) != v)


def _seconds(run: Run) -> str:
    return escape(show.duration(float(run.record["seconds"])))


def _run(run: Run, title: bool = True) -> str:
    record = run.record
    parts = [f"<h3>{_title(run)}</h3>"] if title else []
    parts += [_table(rows, caption) for caption, rows in record["tables"].items() if rows]
    if record["claims"]:
        parts.append(_claims(record["claims"]))
    parts += [f"<p class=note>{escape(str(note))}</p>" for note in record["notes"]]
    figures = "".join(_figure(run.path / name) for name in record["figures"])
    parts.append(f"<div class=figures>{figures}</div>" if figures else "")
    if curves := svg_curves(read_metrics(run.path / "metrics.csv")):
        parts.append(f"<details><summary>metrics</summary><div class=figures>{curves}</div></details>")
    facts = {"command": record.get("command", "")} | record["machine"] | {"folder": run.path.name}
    parts.append(
        f"<details><summary>configuration</summary>{_pairs(record['config'])}</details>"
        f"<details><summary>command and machine</summary>{_pairs(facts)}</details>"
    )
    return f"<div class=run>{''.join(parts)}</div>"


def _table(rows: list[Mapping[str, Any]], caption: str) -> str:
    columns, body, numeric = show.cells(rows)
    heads = "".join(
        f"<th scope=col{' class=n' if n else ''}>{escape(c)}" for c, n in zip(columns, numeric, strict=True)
    )
    lines = ""
    for row in body:
        cells = (f"<td{' class=n' if n else ''}>{_interval(c)}" for c, n in zip(row, numeric, strict=True))
        lines += f"<tr>{''.join(cells)}"
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    return f"<div class=scroll><table>{title}<thead><tr>{heads}</thead><tbody>{lines}</tbody></table></div>"


def _interval(cell: str) -> str:
    value, bracket, rest = cell.partition(" [")
    if bracket and rest.endswith("]") and rest.count(",") == 1:
        return f"{escape(value)} <small>[{escape(rest)}</small>"
    return escape(cell)


def _claims(claims: list[Mapping[str, Any]]) -> str:
    body = ""
    for claim in claims:
        measured, interval, threshold, _ = show.claim_cells(claim)
        numbers = f"<td class=n>{escape(measured)}<td class=n>{escape(interval)}<td class=c>{escape(threshold)}"
        body += f"<tr><td>{escape(claim['statement'])}{numbers}<td>{_pill(claim['holds'])}"
    heads = _heads(("claim", "measured", "interval", "threshold", "verdict"), "nn", 1)
    return f"<div class=scroll><table><thead><tr>{heads}</thead><tbody>{body}</tbody></table></div>"


def _figure(path: Path) -> str:
    name = escape(path.stem.replace("_", " "))
    if not path.is_file():
        return f"<p class=note>{name}: the file {escape(path.name)} is gone</p>"
    data = base64.b64encode(path.read_bytes()).decode()
    return f"<figure><img alt='{name}' src='data:image/png;base64,{data}'><figcaption>{name}</figcaption></figure>"


def _pairs(values: Mapping[str, Any]) -> str:
    shown = (
        f"<dt>{escape(str(k))}<dd>{escape(v if isinstance(v, str) else json.dumps(v, ensure_ascii=False))}"
        for k, v in values.items()
    )
    return f"<dl>{''.join(shown)}</dl>"
