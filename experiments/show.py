"""How results look: numbers, tables and verdicts, on the terminal and (the same numbers) in the report."""

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

VERDICTS = {"yes": ("holds", "green"), "no": ("does not hold", "red"), "undecided": ("undecided", "yellow")}
_LONGEST = 40


def console(stderr: bool = False) -> Console:
    """A console on the present stdout or stderr; wide where nobody is looking, so that logs do not wrap."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(file=stream, width=None if stream.isatty() else 140, highlight=False, soft_wrap=False)


def is_estimate(cell: Any) -> bool:
    """Whether a cell of a stored row is an ``Estimate``."""
    return isinstance(cell, Mapping) and set(cell) == {"value", "lo", "hi"}


def is_number(cell: Any) -> bool:
    """Whether a cell of a stored row is a number (NaN and infinities are stored as strings)."""
    return (isinstance(cell, int | float) and not isinstance(cell, bool)) or cell in ("nan", "inf", "-inf")


def formatter(values: Iterable[Any]) -> Callable[[Any], str]:
    """One format for a column: the decimals that give its median three digits, powers of ten where sizes differ."""
    sizes = [abs(float(v)) for v in values if is_number(v) and math.isfinite(float(v)) and v != 0]
    whole = all(isinstance(v, int) for v in values if is_number(v))
    largest, smallest = max(sizes, default=1.0), min(sizes, default=1.0)
    decimals = min(max(2 - math.floor(math.log10(sorted(sizes)[len(sizes) // 2] if sizes else 1.0)), 0), 6)

    def show(value: Any) -> str:
        if not is_number(value) or not math.isfinite(float(value)):
            return str(value)
        if whole:
            return f"{value:,}" if largest >= 1e5 else str(value)
        if largest >= 1e6 or smallest < 0.5 * 10**-decimals:
            return f"{float(value):.3g}"
        return f"{float(value):.{decimals}f}"

    return show


def cells(rows: list[Mapping[str, Any]]) -> tuple[list[str], list[list[str]], list[bool]]:
    """Column names, formatted cells, and which columns are numbers."""
    columns = list(dict.fromkeys(k for row in rows for k in row))
    shown = []
    numeric = []
    for name in columns:
        column = [row.get(name) for row in rows]
        formats = formatter([v for c in column for v in (c.values() if is_estimate(c) else [c])])
        shown.append([_cell(c, formats) for c in column])
        numeric.append(any(is_number(c) or is_estimate(c) for c in column))
    return columns, [list(row) for row in zip(*shown, strict=True)], numeric


def _cell(cell: Any, formats: Callable[[Any], str]) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if is_estimate(cell):
        return f"{formats(cell['value'])} [{formats(cell['lo'])}, {formats(cell['hi'])}]"
    return formats(cell) if is_number(cell) else str(cell)


def claim_cells(claim: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """Measured, interval, threshold and verdict of a stored claim."""
    interval = claim["interval"]
    formats = formatter([claim["measured"], *(interval or ())])
    shown = f"[{formats(interval[0])}, {formats(interval[1])}]" if interval else "-"
    threshold = claim["threshold"]
    threshold = f"{claim['comparison']} {threshold:g}" if is_number(threshold) else str(threshold)
    return formats(claim["measured"]), shown, threshold, VERDICTS[claim["holds"]][0]


def table(title: str = "", columns: Iterable[str] = (), numeric: Iterable[bool] = ()) -> Table:
    """An empty table in the house style."""
    made = Table(title=title or None, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for name, right in zip(columns, numeric, strict=True):
        made.add_column(Text(name), justify="right" if right else "left", overflow="fold")
    return made


def rows_table(rows: list[Mapping[str, Any]], title: str = "") -> RenderableType:
    """Rows side by side; the first column stands out, long tables are cut."""
    columns, body, numeric = cells(rows)
    made = table(title, columns, numeric)
    for row in body[:_LONGEST]:
        made.add_row(*(Text(c, style="bold" if i == 0 else "") for i, c in enumerate(row)))
    if len(body) > _LONGEST:
        return Group(made, Text(f"{len(body) - _LONGEST} more rows in result.json", style="dim"))
    return made


def claims_table(claims: Iterable[Mapping[str, Any]]) -> Table:
    """One line a claim, the verdict in colour."""
    made = table("Claims", ("claim", "measured", "interval", "threshold", "verdict"), (False, True, True, False, False))
    made.columns[0].ratio = 1
    for claim in claims:
        measured, interval, threshold, verdict = claim_cells(claim)
        style = VERDICTS[claim["holds"]][1]
        row = (claim["statement"], measured, interval, threshold)
        made.add_row(*map(Text, row), Text(verdict, style=f"bold {style}"))
    return made


def duration(seconds: float) -> str:
    """``4.2 s``, ``3 min 05 s`` or ``2 h 10 min``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def minutes(value: float | None) -> str:
    """A number of minutes for the list."""
    return "-" if value is None else f"{value:.2g}"


def show_list(abouts: Mapping[str, Any]) -> None:
    """The experiments with claim, minutes and needs; ``abouts`` maps a name to an ``About`` or to what is wrong."""
    made = table("", ("name", "claim", "smoke", "laptop", "needs"), (False, False, True, True, False))
    made.columns[1].ratio = 3
    made.columns[4].ratio = 1
    for name, about in abouts.items():
        if isinstance(about, str):
            made.add_row(Text(name, style="bold"), Text(about, style="red"))
            continue
        times = (minutes(about.minutes.get(preset)) for preset in ("smoke", "laptop"))
        made.add_row(Text(name, style="bold cyan"), Text(about.claim), *times, Text(about.needs, style="dim"))
    made.caption = "smoke and laptop: minutes on two cores"
    made.caption_justify = "left"
    console().print(made)


def show_result(record: Mapping[str, Any], path: Path | None = None) -> None:
    """The tables, claims and notes of a stored result, then what was written where."""
    shown = console()
    for title, rows in record["tables"].items():
        if rows:
            shown.print(rows_table(rows, title))
    if record["claims"]:
        shown.print(claims_table(record["claims"]))
    for note in record["notes"]:
        shown.print(Text(f"note: {note}", style="dim"))
    if path:
        files = ["result.json", *(["metrics.csv"] if (path / "metrics.csv").exists() else []), *record["figures"]]
        shown.print(Text.assemble("wrote ", (str(path), "bold"), f": {', '.join(files)}"), soft_wrap=True)
    shown.print(Text(f"done in {duration(record['seconds'])}", style="dim"))
