"""Every law on one table: fits, held-out predictions, what follows from them, and the picture of it."""

from typing import Any, NamedTuple

import numpy as np

from experiments import core
from experiments.scaling_tables import Table

# Tables are padded to multiples of this many rows (weight 0), so that a law compiles once for all of them.
PAD = 128
DRAWN = ("Chinchilla", "Chinchilla+QiD", "Shannon")
MONOTONE = ("Chinchilla", "OpenAI")
CURVE_POINTS = 120


class Cell(NamedTuple):
    """One fit of every law: the rows to fit and the rows to predict (none: in-sample)."""

    table: Table
    task: str
    fit: np.ndarray
    test: np.ndarray


class Fitted(NamedTuple):
    """What a cell gave: fit results by law name, for the laws that had enough points."""

    cell: Cell
    results: dict[str, Any]


def everything(table: Table) -> Cell:
    """All points fitted, none held out."""
    whole = np.ones(len(table.y), bool)
    return Cell(table, "in-sample", whole, ~whole)


def fit_cell(cell: Cell, seed: int, number: int, starts: int, only: tuple[str, ...] | None = None) -> Fitted:
    """Every law (or ``only`` some) on a cell; ``number`` tells the keys of cells apart."""
    import jax

    from jaxmeth import scaling

    t = cell.table
    pad = -len(t.y) % PAD
    n, d, y = (np.concatenate([v, np.ones(pad)]) for v in (t.n, t.d, t.y))
    weights = np.concatenate([cell.fit.astype(float), np.zeros(pad)])
    results = {}
    for i, law in enumerate(scaling.LAWS):
        if cell.fit.sum() < len(scaling.free_parameters(law)) or (only and law.name not in only):
            continue
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), number), i)
        results[law.name] = scaling.fit(law, n, d, y, weights=weights, rng=key, starts=starts)
    return Fitted(cell, results)


def rows(fitted: Fitted) -> list[dict[str, Any]]:
    """One row a law: how well it fits, how well it predicts, whether that can be trusted."""
    from jaxmeth import scaling

    cell, made = fitted.cell, []
    for law in scaling.LAWS:
        row = {"table": cell.table.name, "task": cell.task, "law": law.name, "points": int(cell.fit.sum())}
        result = fitted.results.get(law.name)
        if result is None:
            made.append(row | {"flags": f"not fitted: {len(scaling.free_parameters(law))} parameters"})
            continue
        row |= {"SSE": float(result.sse), "R2": float(result.r2)}
        if cell.test.any():
            rmse, r2 = held_out(fitted, law.name)
            row |= {"held out": int(cell.test.sum()), "RMSE held out": rmse, "R2 held out": r2}
        made.append(row | {"near best": int(result.near), "flags": _flags(result)})
    return made


def _flags(result) -> str:
    """What a reader must know before trusting the parameters."""
    flags = [] if bool(result.converged) else ["not converged"]
    flags += [f"{k} at bound" for k, v in result.at_bound._asdict().items() if bool(v)]
    return ", ".join(flags)


def predicted(fitted: Fitted, law: str) -> np.ndarray:
    """Losses of the held-out rows by a law."""
    from jaxmeth import scaling

    t, rows = fitted.cell.table, np.flatnonzero(fitted.cell.test)
    # As many as were fitted, padding included: one shape, one compilation.
    taken = np.resize(rows, len(t.y) + -len(t.y) % PAD)
    return np.asarray(scaling.predict(fitted.results[law], t.n[taken], t.d[taken]))[: len(rows)]


def held_out(fitted: Fitted, law: str) -> tuple[float, float]:
    """RMSE and R2 of the held-out rows."""
    y = fitted.cell.table.y[fitted.cell.test]
    miss = y - predicted(fitted, law)
    spread = np.sum((y - y.mean()) ** 2)
    return float(np.sqrt(np.mean(miss**2))), float(1 - np.sum(miss**2) / spread) if spread > 0 else float("nan")


def by_law(table_rows, table: str, task: str, column: str) -> dict[str, float]:
    """One column of one cell's rows, by law."""
    chosen = [r for r in table_rows if (r["table"], r["task"]) == (table, task)]
    return {r["law"]: r[column] for r in chosen if r.get(column) is not None}


def remarks(table_rows) -> list[str]:
    """Where the Shannon law loses, in words."""
    said = []
    for table, task in dict.fromkeys((r["table"], r["task"]) for r in table_rows):
        errors = by_law(table_rows, table, task, "RMSE held out")
        scores = by_law(table_rows, table, task, "R2 held out")
        if {"Shannon", "Chinchilla+QiD"} <= errors.keys() and errors["Chinchilla+QiD"] < errors["Shannon"]:
            said.append(
                f"{table}, {task}: a plain additive degradation predicts better than the Shannon law "
                f"(RMSE {errors['Chinchilla+QiD']:.3f} against {errors['Shannon']:.3f})."
            )
        if scores and max(scores.values()) < 0:
            said.append(f"{table}, {task}: no law predicts (every R2 below 0).")
    return said


def turn(result, n, low: float, high: float):
    """Critical tokens of a fitted Shannon law, in counts; NaN where its loss falls all the way."""
    from jaxmeth import scaling

    n0, d0 = (float(v) for v in result.units)
    return scaling.optimal_tokens(result.params, n / n0, low / d0, high / d0) * d0


def interval(value, drawn, kept) -> core.Estimate:
    """A value with the 95% percentile interval of its finite resamples; NaN ends where fewer than half are finite."""
    drawn = np.asarray(drawn)[np.asarray(kept)]
    known = drawn[np.isfinite(drawn)]
    low, high = np.quantile(known, [0.025, 0.975]) if len(known) * 2 > len(drawn) > 0 else (np.nan, np.nan)
    return core.Estimate(float(value), float(low), float(high))


def resampled(fitted: Fitted, seed: int, resamples: int):
    """Refits of the full Shannon law on resampled training runs (on resampled points, where runs are not known)."""
    import jax

    from jaxmeth import scaling

    t, pad = fitted.cell.table, -len(fitted.cell.table.y) % PAD
    runs = np.arange(len(t.y)) if t.run is None else np.unique(t.run, return_inverse=True)[1]
    n, d, y = (np.concatenate([v, np.ones(pad)]) for v in (t.n, t.d, t.y))
    weights = np.concatenate([fitted.cell.fit.astype(float), np.zeros(pad)])
    groups = np.concatenate([runs, np.full(pad, -1)])
    return scaling.bootstrap(
        fitted.results["Shannon"], n, d, y, weights=weights, groups=groups, rng=jax.random.key(seed),
        resamples=resamples,
    )  # fmt: skip


def critical(result, boot, sizes: np.ndarray, d: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Critical tokens at sizes [k], of the fit [k] and of its resamples [R, k], sought in 0.1 to 1e4 times ``d``."""
    import jax

    low, high = d.min() / 10, 1e4 * d.max()
    batch = jax.tree.map(lambda v: v[:, None], boot.params)
    drawn = turn(result._replace(params=batch), sizes[None], low, high)
    return np.asarray(turn(result, sizes, low, high)), np.asarray(drawn)


def draw_basins(figure, fitted: Fitted) -> None:
    """Loss over tokens, one panel a size (eight at most): points, three fitted laws, and the Shannon law's minimum."""
    import jax

    # Figures are drawn when the run is over, and its float64 with it.
    with jax.enable_x64(True):
        _draw_panels(figure, fitted)


def _draw_panels(figure, fitted: Fitted) -> None:
    from jaxmeth import scaling

    t = fitted.cell.table
    sizes = np.unique(t.n)
    sizes = sizes[np.unique(np.linspace(0, len(sizes) - 1, 8).round().astype(int))]
    columns = min(4, len(sizes))
    lines = -(-len(sizes) // columns)
    figure.set_size_inches(3.0 * columns, 2.6 * lines)
    axes = figure.subplots(lines, columns, squeeze=False).ravel()
    for panel, n in zip(axes, sizes, strict=False):
        at = t.n == n
        for chosen, face in ((at & fitted.cell.fit, "#374151"), (at & ~fitted.cell.fit, "white")):
            panel.plot(t.d[chosen], t.y[chosen], "o", color="#374151", markerfacecolor=face, markersize=4)
        d = np.geomspace(t.d.min(), 2 * t.d.max(), CURVE_POINTS)
        for law in DRAWN:
            if law in fitted.results:
                panel.plot(d, np.asarray(scaling.predict(fitted.results[law], n, d)), linewidth=1.5, label=law)
        if "Shannon" in fitted.results:
            best = float(turn(fitted.results["Shannon"], n, d[0], d[-1]))
            if np.isfinite(best):
                low = float(scaling.predict(fitted.results["Shannon"], n, best))
                panel.plot([best], [low], "v", color="#D55E00", markersize=8, label="D*")
        panel.set_xscale("log")
        panel.set_title(f"{n:.3g} parameters", fontsize=9)
        panel.set_xlabel("tokens")
    for panel in axes[len(sizes) :]:
        panel.set_axis_off()
    axes[0].set_ylabel("loss, nats")
    axes[0].legend(fontsize=7)
