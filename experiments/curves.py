"""The metrics of a run as small line charts in SVG, for the report."""

import csv
import io
import math
from html import escape
from pathlib import Path

_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#8a8f98", "#a08b00")
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 360, 180, 52, 22, 8
_POINTS, _CHARTS = 400, 12

Series = dict[str, list[tuple[float, float]]]


def read_metrics(path: Path) -> dict[str, Series]:
    """``metrics.csv`` as metric -> part -> finite (step, value) points; cells that are no numbers are left out."""
    if not path.is_file():
        return {}
    text = path.read_text(encoding="utf-8", errors="replace").rpartition("\n")[0]
    metrics: dict[str, Series] = {}
    for row in csv.DictReader(io.StringIO(text)):
        for name, cell in row.items():
            if name in ("step", "part", None):
                continue
            try:
                point = float(row["step"]), float(cell)
            except (ValueError, TypeError, KeyError):
                continue
            if all(map(math.isfinite, point)):
                metrics.setdefault(name, {}).setdefault(row.get("part") or "", []).append(point)
    return metrics


def svg_curves(metrics: dict[str, Series]) -> str:
    """A chart for each metric of at least two points, one line a part."""
    drawn = [_chart(name, series) for name, series in metrics.items() if any(len(p) > 1 for p in series.values())]
    return "".join(drawn[:_CHARTS])


def _chart(name: str, series: Series) -> str:
    points = [p for line in series.values() for p in line]
    (x0, x1), (y0, y1) = (_range([p[i] for p in points]) for i in (0, 1))

    def place(x: float, y: float) -> str:
        across = _LEFT + (x - x0) / (x1 - x0) * (_WIDTH - _LEFT - 8)
        down = _TOP + (y1 - y) / (y1 - y0) * (_HEIGHT - _TOP - _BOTTOM)
        return f"{across:.1f},{down:.1f}"

    floor = _HEIGHT - _BOTTOM
    shown = (
        f"<line x1={_LEFT} y1={floor} x2={_WIDTH - 8} y2={floor} /><line x1={_LEFT} y1={_TOP} x2={_LEFT} y2={floor} />"
    )
    for value, y in ((y1, _TOP + 4), (y0, floor)):
        shown += f"<text x={_LEFT - 6} y={y} text-anchor=end>{value:.3g}</text>"
    for value, x, anchor in ((x0, _LEFT, "start"), (x1, _WIDTH - 8, "end")):
        shown += f"<text x={x} y={_HEIGHT - 6} text-anchor={anchor}>{value:g}</text>"
    legend = ""
    for i, (part, line) in enumerate(series.items()):
        colour = _COLOURS[i % len(_COLOURS)]
        thinned = line[:: max(1, math.ceil(len(line) / _POINTS))]
        path = " ".join(place(*p) for p in [*thinned, line[-1]])
        shown += f"<polyline points='{path}' stroke='{colour}' />"
        legend += f"<span><i style='background:{colour}'></i>{escape(part)}</span>" if part else ""
    svg = f"<svg viewBox='0 0 {_WIDTH} {_HEIGHT}' role=img aria-label='{escape(name, quote=True)}'>{shown}</svg>"
    return f"<figure class=curve>{svg}<figcaption>{escape(name)} {legend}</figcaption></figure>"


def _range(values: list[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)
