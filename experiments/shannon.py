"""Scaling laws: does a law with a channel's noise fit losses that turn upwards, and does it predict them?

E1 fits six laws to published tables (Pythia on both corpora, repeated data, Chinchilla's figure 4, overtrained models),
each on all its points and on a part that must predict the rest. E2 trains a family of tiny language models here,
disturbs their checkpoints by weight noise and rounding, and asks the laws fitted to the smaller and earlier ones for
the bigger and later. ``--data my.csv`` (columns n, d, loss and optionally group; sizes and tokens as counts) gives the
report of E1 on your own runs, with where more tokens stop helping and compute-optimal sizes.

Claim: the Shannon law extrapolates to bigger models and longer runs where monotone laws collapse: pooled R2 .847 for
the full law, .673 for the simplified (arXiv 2605.23901, through public readings).
Command: python -m experiments run shannon --preset smoke
Expected (laptop, seed 0): E1 reaches the reference fits in every cell (worst SSE ratio 1.00) with delta > beta on both
Pythia corpora (0.72 [0.03, 2.46] and 0.42 [0.25, 2.21]); the Shannon law fits the standard corpus best, but on the
deduplicated one a plain additive degradation (Chinchilla+QiD) predicts the 12B model better (RMSE .033 against .129).
E2: at the six levels that turn, R2 held out is above the better monotone law's by .07 [.00, .12] or more; the largest
model's minimum is missed by a factor of 1.9 [1.5, 3.1] at most.
Minutes: smoke 1, laptop 15 on two idle cores.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments import core, scaling_family, scaling_fits, scaling_own, scaling_tables
from experiments.scaling_fits import MONOTONE, Cell, Fitted

ABOUT = core.About(
    claim="The Shannon law fits losses that turn upwards and predicts bigger models and longer runs.",
    minutes={"smoke": 1, "laptop": 15},
    needs="nothing",
    knob="batch",
)

# The spec's fits by scipy's least squares, best of 60 starts, to three decimals: sums of squared errors.
REFERENCE_LAWS = ("OpenAI", "Chinchilla", "Chinchilla+QiD", "Shannon simplified", "Shannon")
BY_SIZE, BY_TOKENS = "12B, fit <= 6.9B and <= 180B", "> 180B, fit <= 180B"
REFERENCE_SSE = {
    ("Pythia standard", "in-sample"): (1.595, 2.572, 1.043, 0.912, 0.908),
    ("Pythia standard", BY_SIZE): (0.665, 0.746, 0.406, 0.352, 0.347),
    ("Pythia deduped", "in-sample"): (2.515, 4.475, 1.423, 1.443, 1.443),
}
REFERENCE_RMSE = {
    ("Pythia standard", BY_SIZE): (0.128, 0.131, 0.077, 0.083, 0.074),
    ("Pythia standard", BY_TOKENS): (0.150, 0.224, 0.133, 0.106, 0.136),
    ("Pythia deduped", BY_SIZE): (0.097, 0.107, 0.033, 0.129, 0.129),
    ("Pythia deduped", BY_TOKENS): (0.219, 0.303, 0.137, 0.143, 0.143),
}
REFERENCE_R2 = {("Pythia standard", BY_SIZE): (0.951, 0.950, 0.982, 0.980, 0.984)}
# A surface turns where a size ends this much above its lowest loss; less may be the noise of the draws.
RISE = 0.01
FITTED_SHARE = 0.6


@dataclass(frozen=True, kw_only=True)
class Config(core.Config):
    """Which tables, how many starts, how large a family."""

    data: Path | None = None
    """CSV file of your own runs (columns n, d, loss, optionally group) in place of all below; or a folder of real
    extracts (else JAXMETH_DATA)."""
    tables: bool = True
    """E1, the published tables."""
    every_table: bool = True
    """E1 on more than Pythia: repeated data, Chinchilla's figure 4, overtrained models."""
    family: bool = True
    """E2, the family trained here."""
    starts: int = 64
    """Random starts of every fit."""
    resamples: int = 200
    """Bootstrap resamples of the intervals."""
    budgets: tuple[float, ...] = (1e21, 1e23)
    """Training budgets in FLOP for the compute-optimal sizes of your own runs."""
    text: Path | None = None
    """Text to train the family on; without one the documentation that comes with Python."""
    widths: tuple[int, ...] = (24, 40, 72, 128, 200)
    """Hidden sizes of the family; the last is the one to predict."""
    train_steps: int = 1500
    """Training steps of each model; the twelve checkpoints are spread evenly over their logarithm."""
    rate: float = 3e-3
    """Peak learning rate at width 64; others by the inverse root of their width."""
    batch: int = 16
    """Sequences a step."""
    length: int = 64
    """Characters a sequence."""
    snr_db: tuple[float, ...] = (4.0, 7.0, 10.0, 13.0, 16.0, 20.0)
    """Levels of weight noise, signal to noise in dB."""
    bits: tuple[int, ...] = (2, 3, 4)
    """Bit widths of rounding."""
    draws: int = 3
    """Noise draws averaged at each level."""
    shapes_only: bool = False
    """Without --text, only check that the family fits together: shapes, nothing trained."""

    def __post_init__(self):
        super().__post_init__()
        self.require(starts=(1, None), resamples=(1, None), budgets=(1e6, None), widths=(8, None), bits=(1, 16))
        self.require(train_steps=(48, None), batch=(1, None), length=(8, None), draws=(1, None), rate=(1e-6, 1.0))
        self.require(snr_db=(-40, 120))
        if len(self.widths) < 3 or list(self.widths) != sorted(set(self.widths)):
            raise core.ConfigError(f"widths: found {self.widths}, expected at least three, rising")


PRESETS = {
    "smoke": Config(
        every_table=False, starts=16, resamples=10, widths=(16, 24, 32), train_steps=96, draws=1, snr_db=(7.0,),
        bits=(3,),
    ),
    "laptop": Config(),
    "paper": Config(
        starts=256, resamples=1000, widths=(64, 128, 256, 512, 1024), train_steps=50_000, batch=64, length=256,
        shapes_only=True,
    ),
}  # fmt: skip


def run(cfg: Config, folder: core.RunDir | None = None) -> core.Result:
    """Fit, extrapolate, compare."""
    import jax

    folder = folder or core.RunDir()
    with jax.enable_x64(True):
        if cfg.data is not None and not cfg.data.is_dir():
            return scaling_own.run(
                cfg.data, seed=cfg.seed, starts=cfg.starts, resamples=cfg.resamples, budgets=cfg.budgets
            )
        parts = [part(cfg, folder) for wanted, part in ((cfg.tables, _published), (cfg.family, _family)) if wanted]
    rows: dict[str, core.Rows] = {}
    figures: dict[str, Any] = {}
    for part in parts:
        rows |= part.tables()
        figures |= part.figures
    return core.Result(
        rows=rows,
        claims=[c for p in parts for c in p.claims],
        figures=figures,
        notes=[n for p in parts for n in p.notes],
    )


def _published_cells(cfg: Config) -> list[Cell]:
    cells = []
    for deduped in (False, True):
        t = scaling_tables.pythia(deduped, cfg.data)
        early = t.d <= 180e9
        cells += [
            scaling_fits.everything(t),
            Cell(t, BY_SIZE, early & (t.n <= 6.9e9), t.n > 1e10),
            Cell(t, BY_TOKENS, early, ~early),
        ]
    if not cfg.every_table:
        return cells
    for t in scaling_tables.groups(scaling_tables.repetition(cfg.data)):
        small = t.n < 0.6e9
        if len(t.y) >= 20:
            cells += [scaling_fits.everything(t), Cell(t, ">= 0.6B, fit < 0.6B", small, ~small)]
    for whole in (scaling_tables.chinchilla(cfg.data), scaling_tables.overtraining(cfg.data)):
        for t in scaling_tables.groups(whole):
            cheap = t.n * t.d <= np.quantile(t.n * t.d, 0.8)
            cells += [scaling_fits.everything(t), Cell(t, "largest fifth of n d", cheap, ~cheap)]
    return cells


def _published(cfg: Config, folder: core.RunDir) -> core.Result:
    """E1."""
    cells = _published_cells(cfg)
    fitted = []
    for number, cell in enumerate(core.progress(cells, description="fitting tables")):
        fitted.append(scaling_fits.fit_cell(cell, cfg.seed, number, cfg.starts))
        folder.log(number, "tables", **{k: float(r.sse) for k, r in fitted[-1].results.items()})
    rows = [_beside(row) for f in fitted for row in scaling_fits.rows(f)]
    turns = [f for f in fitted if f.cell.task == "in-sample" and f.cell.table.name.startswith("Pythia")]
    exponents = [_exponents(f, cfg) for f in turns]
    claims = [_reference_claim(rows)]
    for f, e in zip(turns, exponents, strict=True):
        statement = f"{f.cell.table.name}: delta > beta (the data noise outgrows the signal)"
        claims.append(core.Claim(statement, e["delta - beta"], ">", 0.0))
    claims += [
        _rival_claim(f, cfg) for f in fitted if f.cell.table in [t.cell.table for t in turns] and f.cell.test.any()
    ]
    return core.Result(
        rows={"E1 published tables": rows, "E1 Shannon on Pythia": exponents},
        claims=claims,
        figures={f"basin_{f.cell.table.name.split()[1]}": lambda g, f=f: scaling_fits.draw_basins(g, f) for f in turns},
        notes=[
            "Reference figures: scipy's least squares, best of 60 starts, from the specification.",
            "R2 held out is about the mean of the held-out points; below 0 is worse than that mean.",
            "At one perturbation the precision law has the shape of Chinchilla+QiD.",
            "Intervals of exponents and D*: bootstrap over whole training runs, eight of them: rough; none where D* is "
            "missing in most resamples. Intervals of RMSE ratios: bootstrap over held-out points.",
            *scaling_fits.remarks(rows),
        ],
    )


def _beside(row: dict[str, Any]) -> dict[str, Any]:
    """The row with the specification's figures, where it has some."""
    key = row["table"], row["task"]
    if row["law"] not in REFERENCE_LAWS:
        return row
    at = REFERENCE_LAWS.index(row["law"])
    columns = {"reference SSE": REFERENCE_SSE, "reference RMSE": REFERENCE_RMSE, "reference R2": REFERENCE_R2}
    return row | {name: table[key][at] for name, table in columns.items() if key in table}


def _reference_claim(rows: core.Rows) -> core.Claim:
    """Worst ratio to the reference, at the reference's three decimals."""
    ratios = [round(r["SSE"], 3) / r["reference SSE"] for r in rows if r.get("reference SSE")]
    return core.Claim("SSE over the reference fits, worst cell", max(ratios), "<=", 1.0)


def _rival_claim(fitted: Fitted, cfg: Config) -> core.Claim:
    """Does the Shannon law predict better than the additive rival with as many parameters?"""
    y = fitted.cell.table.y[fitted.cell.test]
    misses = [(scaling_fits.predicted(fitted, law) - y) ** 2 for law in ("Shannon", "Chinchilla+QiD")]
    ratio = core.bootstrap_interval(
        lambda a, b: np.sqrt(a.mean() / b.mean()), *misses, resamples=cfg.resamples, seed=cfg.seed
    )
    name = f"{fitted.cell.table.name}, {fitted.cell.task}"
    return core.Claim(f"{name}: RMSE of Shannon over that of Chinchilla+QiD", ratio, "<=", 1.0)


def _exponents(fitted: Fitted, cfg: Config) -> dict[str, Any]:
    """Exponents of the full law and critical tokens of each size, with intervals over resampled training runs."""
    t, result = fitted.cell.table, fitted.results["Shannon"]
    boot = scaling_fits.resampled(fitted, cfg.seed, cfg.resamples)
    p, q, kept = result.params, boot.params, boot.converged
    row: dict[str, Any] = {"table": t.name}
    for name in ("alpha", "beta", "gamma", "delta"):
        row[name] = scaling_fits.interval(getattr(p, name), getattr(q, name), kept)
    row["delta - beta"] = scaling_fits.interval(p.delta - p.beta, q.delta - q.beta, kept)
    sizes = np.unique(t.n)
    values, drawn = scaling_fits.critical(result, boot, sizes, t.d)
    for i, n in enumerate(sizes):
        row[f"D* at {n / 1e9:.2g}B, 1e9 tokens"] = scaling_fits.interval(values[i] / 1e9, drawn[:, i] / 1e9, kept)
    return row | {"refits converged": float(np.mean(kept))}


def _family(cfg: Config, folder: core.RunDir) -> core.Result:
    """E2."""
    if cfg.shapes_only and cfg.text is None:
        note = "E2: shapes only, nothing trained. To train: --text with a file of 1e8 characters and more."
        return core.Result(rows={"E2 family, shapes": scaling_family.shapes(cfg)}, notes=[note])
    tables = scaling_family.train_all(cfg, folder)
    fitted = []
    for number, t in enumerate(core.progress(tables, description="fitting the family")):
        fit = (t.n < t.n.max()) & (t.d <= FITTED_SHARE * t.d.max())
        cell = Cell(t, f"fit smaller sizes and first {FITTED_SHARE:.0%} of tokens", fit, ~fit)
        fitted.append(scaling_fits.fit_cell(cell, cfg.seed, 1000 + number, cfg.starts))
    turning = [f for f in fitted if _rises(f).any()]
    turns = [_turn_row(f, cfg) for f in turning]
    rows = [row for f in fitted for row in scaling_fits.rows(f)]
    sizes = ", ".join(f"{n:.3g}" for n in np.unique(tables[0].n))
    return core.Result(
        rows={
            "E2 losses": [_loss_row(f) for f in fitted],
            "E2 predictions": rows,
            "E2 critical tokens of the largest size": turns,
        },
        claims=_family_claims(turning, turns, cfg),
        figures={
            f"family_{f.cell.table.name.split(', ')[1].replace(' ', '_')}": lambda g, f=f: scaling_fits.draw_basins(
                g, f
            )
            for f in fitted
        },
        notes=[
            f"E2: sizes {sizes}; up to {tables[0].d.max():.3g} characters, twelve checkpoints a size.",
            f"A level counts as turning where a size ends more than {RISE:.0%} above its lowest loss; "
            f"{len(turning)} of {len(fitted)} do.",
            "Hollow points in the figures are held out. R2 is pooled over them; its interval is a bootstrap over them.",
            *scaling_fits.remarks(rows),
        ],
    )


def _level(fitted: Fitted) -> str:
    return fitted.cell.table.name.split(", ")[1]


def _figure_name(fitted: Fitted) -> str:
    return f"family_{_level(fitted).replace(' ', '_')}"


def _rises(fitted: Fitted) -> np.ndarray:
    """By how much each size, from small to large, ends above its lowest loss; 0 where by less than ``RISE``."""
    t = fitted.cell.table
    ends = np.array([t.y[t.n == n][-1] / t.y[t.n == n].min() - 1 for n in np.unique(t.n)])
    return np.where(ends > RISE, ends, 0.0)


def _loss_row(fitted: Fitted) -> dict[str, Any]:
    t = fitted.cell.table
    row: dict[str, Any] = {"level": _level(fitted)}
    for n, rise in zip(np.unique(t.n), _rises(fitted), strict=True):
        row |= {f"last loss at {n:.3g}": float(t.y[t.n == n][-1]), f"above lowest at {n:.3g}": float(rise)}
    return row


def observed_minimum(d: np.ndarray, y: np.ndarray) -> float:
    """Tokens at the lowest loss: the vertex, in log tokens, of the parabola through the lowest three points."""
    i = int(np.argmin(y))
    if i in (0, len(y) - 1):
        return float(d[i])
    a, b, _ = np.polyfit(np.log(d[i - 1 : i + 2]), y[i - 1 : i + 2], 2)
    return float(np.exp(-b / (2 * a)))


def _turn_row(fitted: Fitted, cfg: Config) -> dict[str, Any]:
    """Predicted and observed minimum of the size that was held out, where it turns."""
    t, result = fitted.cell.table, fitted.results["Shannon"]
    n = t.n.max()
    at = t.n == n
    boot = scaling_fits.resampled(fitted, cfg.seed, cfg.resamples)
    (value,), drawn = scaling_fits.critical(result, boot, np.array([n]), t.d)
    drawn = drawn[:, 0]
    row: dict[str, Any] = {"level": _level(fitted)}
    row["predicted D*"] = scaling_fits.interval(value, drawn, boot.converged)
    if not _rises(fitted)[-1]:
        return row | {"observed": None, "factor": None}
    seen = observed_minimum(t.d[at], t.y[at])

    def factor(tokens):
        ratio = np.abs(np.log(np.where(np.isfinite(tokens), tokens, np.inf) / seen))
        return np.exp(ratio)

    kept = factor(drawn)[np.asarray(boot.converged)]
    low, high = np.quantile(kept, [0.025, 0.975], method="nearest") if len(kept) else (np.nan, np.nan)
    return row | {"observed": seen, "factor": core.Estimate(float(factor(value)), float(low), float(high))}


def _family_claims(turning: list[Fitted], turns: core.Rows, cfg: Config) -> list[core.Claim]:
    """The success number: R2 against both monotone laws at every turning level, and D* within a factor 2."""
    better = "E2: R2 held out of Shannon less the better monotone law's, worst turning level"
    within = "E2: predicted over observed D* (or its inverse) of the largest size, worst turning level"
    nan = float("nan")
    if not turning:
        return [core.Claim(better, nan, ">", 0.0), core.Claim(within, nan, "<=", 2.0)]
    laws = ("Shannon", *MONOTONE)
    truth = np.stack([f.cell.table.y[f.cell.test] for f in turning], axis=1)
    guesses = np.stack([[scaling_fits.predicted(f, law) for law in laws] for f in turning])
    misses = (np.moveaxis(guesses, 2, 0) - truth[:, :, None]) ** 2

    def worst(y, miss):
        r2 = 1 - miss.sum(0) / ((y - y.mean(0)) ** 2).sum(0)[:, None]
        return (r2[:, 0] - r2[:, 1:].max(1)).min()

    ahead = core.bootstrap_interval(worst, truth, misses, resamples=cfg.resamples, seed=cfg.seed)
    factors = [row["factor"] for row in turns if row["factor"] is not None]
    off = core.Estimate(*(max(f[i] for f in factors) for i in range(3))) if factors else nan
    return [core.Claim(better, ahead, ">", 0.0), core.Claim(within, off, "<=", 2.0)]


if __name__ == "__main__":
    core.main(__file__)
