"""The report on a user's own table of runs."""

from pathlib import Path
from typing import Any

import numpy as np

from experiments import core, scaling_fits, scaling_tables
from experiments.scaling_fits import Cell, Fitted
from experiments.scaling_tables import Table


def run(path: Path, *, seed: int, starts: int, resamples: int, budgets: tuple[float, ...]) -> core.Result:
    """Fits, extrapolations, critical tokens, compute-optimal sizes and parameters, for every group of the file.

    Raises: ConfigError naming the file, line and column of what cannot be meant.
    """
    whole, _ = scaling_tables.read(path)
    tables = scaling_tables.groups(whole)
    for t in tables:
        _check(t)
    cells = [c for t in tables for c in _cells(t)]
    fitted = [
        scaling_fits.fit_cell(c, seed, i, starts) for i, c in enumerate(core.progress(cells, description="fitting"))
    ]
    turns = [f for f in fitted if f.cell.task == "in-sample"]
    rows = [row for f in fitted for row in scaling_fits.rows(f)]
    return core.Result(
        rows={
            "fits": rows,
            "where more tokens stop helping": [row for f in turns for row in _turns(f, seed, resamples)],
            "compute-optimal sizes": [row for f in turns for row in _budgets(f, budgets)],
            "parameters": [row for f in turns for row in _parameters(f)],
        },
        figures={f"basin_{i}": lambda g, f=f: scaling_fits.draw_basins(g, f) for i, f in enumerate(turns)},
        notes=[
            f"{len(whole.y)} rows of {path.name}, {len(tables)} surface{'s' if len(tables) > 1 else ''}.",
            "Parameters are for n and d in 1e9; compute is 6 n d FLOP.",
            "D* is where the full Shannon law's loss is lowest at that size; empty: it falls on. Intervals: 95%, "
            "bootstrap over the rows; none where most resamples have no D*.",
            *scaling_fits.remarks(rows),
        ],
    )


def _check(t: Table) -> None:
    from jaxmeth import scaling
    from jaxmeth.scaling.checks import check_points

    least = min(scaling.LAWS, key=lambda law: len(scaling.free_parameters(law)))
    free = len(scaling.free_parameters(least))
    try:
        check_points(
            t.n, t.d, t.y, np.ones_like(t.y), None, free=free, law=least.name, n0=1e9, d0=1e9, where=t.where,
            names=scaling_tables.COLUMNS,
        )  # fmt: skip
    except core.ConfigError as error:
        raise core.ConfigError(f"{t.name}, {error}") from None


def _cells(t: Table) -> list[Cell]:
    """All points; the largest model from the others; the longest fifth of the runs from the rest."""
    cells = [scaling_fits.everything(t)]
    biggest, late = t.n == t.n.max(), t.d > np.quantile(t.d, 0.8)
    for task, test in (("largest model, fit the others", biggest), ("longest fifth, fit the rest", late)):
        fit = ~test
        if test.any() and fit.sum() >= 4 and len(np.unique(t.n[fit])) > 1 and len(np.unique(t.d[fit])) > 1:
            cells.append(Cell(t, task, fit, test))
    return cells


def _turns(fitted: Fitted, seed: int, resamples: int) -> list[dict[str, Any]]:
    """Critical tokens and the sign of scaling for every size of the table."""
    from jaxmeth import scaling

    t, rows = fitted.cell.table, []
    shannon = fitted.results.get("Shannon")
    if shannon is None:
        return rows
    boot = scaling_fits.resampled(fitted, seed, resamples)
    sizes = np.unique(t.n)
    tokens, drawn = scaling_fits.critical(shannon, boot, sizes, t.d)
    for i, (n, best) in enumerate(zip(sizes, tokens, strict=True)):
        sign = float(scaling.model_scaling_sign(shannon.params, n / 1e9, t.d.max() / 1e9))
        row = {"table": t.name, "n": n, "D*": None}
        if np.isfinite(best):
            row["D*"] = scaling_fits.interval(best, drawn[:, i], boot.converged)
        rows.append(
            row | {"a bigger model at the most tokens": {1.0: "helps", -1.0: "hurts"}.get(sign, "does nothing")}
        )
    return rows


def _budgets(fitted: Fitted, budgets: tuple[float, ...]) -> list[dict[str, Any]]:
    """Compute-optimal sizes by every law for every budget."""
    from jaxmeth import scaling

    rows = []
    for law in scaling.LAWS:
        result = fitted.results.get(law.name)
        for budget in budgets if result is not None else ():
            best = scaling.compute_optimal(result.law, result.params, np.float64(budget))
            values = {k: float(v) if np.isfinite(v) else None for k, v in best._asdict().items()}
            rows.append({"table": fitted.cell.table.name, "law": law.name, "FLOP": budget, **values})
    return rows


def _parameters(fitted: Fitted) -> list[dict[str, Any]]:
    rows = []
    for name, result in fitted.results.items():
        spread = result.spread._asdict()
        rows += [
            {
                "table": fitted.cell.table.name,
                "law": name,
                "parameter": k,
                "value": float(v),
                "spread over near-best starts": float(spread[k]),
            }
            for k, v in result.params._asdict().items()
        ]
    return rows
