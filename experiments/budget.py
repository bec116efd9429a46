"""Budgets for reasoning with controlled risk: does the calibrated threshold keep its promise, and what does it cost?

Part one, made trajectories whose risk is known: how often does a rule choose a threshold of too high a risk? Part two,
a model: SmolLM2 samples answers to factual questions, the majority so far is the provisional answer, and the policy
decides after each sample whether to stop.

Claim: naive calibration often exceeds the tolerated risk, calibration with a bound stays below it; giving up on
hopeless questions saves compute beyond stopping when sure (arXiv 2602.03814).
Command: python -m experiments run budget --preset smoke
Expected: rules with a guarantee violate in at most a tenth of calibrations, the naive rule in a third to a half.
Minutes: smoke 1, laptop 15.
"""

from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from experiments import core, policies, rules
from experiments.trajectories import grid, simulate

ABOUT = core.About(
    claim="A risk-controlled threshold keeps its promise where the naive one breaks it, and still saves compute.",
    minutes={"smoke": 1, "laptop": 15},
    needs="SmolLM2-135M",
    knob="batch",
)
HAND_SET = (0.7, 0.85, 0.95)
SHARES = (0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True, kw_only=True)
class Config(core.Config):
    """How many calibrations, which levels, which model."""

    calibrations: int = 2000
    """Calibration sets of made trajectories for every size."""
    rules: tuple[str, ...] = tuple(rules.RULES)
    """Which rules to compare; compiling them is most of a small run."""
    sizes: tuple[int, ...] = (50, 200, 1000)
    """Trajectories of one calibration set."""
    eps: tuple[float, ...] = (0.05, 0.1, 0.2)
    """Tolerated risks; a wrong answer counts where the threshold fired."""
    eps_exhausted: tuple[float, ...] = (0.45,)
    """Tolerated risks of the authors' loss, which counts wrong answers at full budget too."""
    delta: float = 0.1
    """Probability with which a guarantee may fail."""
    population: int = 200_000
    """Made trajectories that stand for the known law."""
    model: str | None = None
    """Hugging Face folder, hub name or .gguf file; without one SmolLM2-135M-Instruct."""
    data: Path | None = None
    """Folder of real extracts (else JAXMETH_DATA); without one questions are built from installed packages."""
    file: Path | None = None
    """CSV file of questions (id, relation, split, question, answer) in place of the default."""
    items: int | None = None
    """How many questions, spread evenly over the set; without it all. 0 leaves the model out."""
    samples: int = 16
    """Answers sampled for a question: the full budget."""
    temperature: float = 0.7
    """Of the samples."""
    max_new_tokens: int = 10
    """Longest answer in tokens."""
    batch: int = 8
    """Questions answered at once; each takes ``samples`` rows."""
    splits: int = 200
    """Random splits of the questions into calibration and test."""
    calibration_share: float = 0.2
    """Share of the questions that calibrate."""
    real_eps: tuple[float, ...] = (0.1, 0.15, 0.2)
    """Tolerated risks on the questions."""
    shapes_only: bool = False
    """Without --model, only check that Qwen3-8B fits together: shapes, nothing computed."""

    def __post_init__(self):
        super().__post_init__()
        self.require(
            calibrations=(1, None), sizes=(2, None), eps=(1e-6, 1 - 1e-6), eps_exhausted=(1e-6, 1 - 1e-6),
            delta=(1e-9, 1 - 1e-9),
            population=(1, None), items=(0, None), samples=(2, None), temperature=(1e-3, None),
            max_new_tokens=(1, None), batch=(1, None), splits=(1, None), calibration_share=(1e-3, 0.999),
            real_eps=(1e-6, 1 - 1e-6),
        )  # fmt: skip
        for name in self.rules:
            if name not in rules.RULES:
                raise core.ConfigError(f"rules: found {name!r}, expected some of {', '.join(rules.RULES)}")


PRESETS = {
    "smoke": Config(
        rules=("naive", "CRC", "UCB as coded (n = grid)", "UCB pointwise", "Clopper-Pearson suffix"),
        calibrations=200,
        sizes=(50, 200),
        population=20_000,
        items=24,
        samples=8,
        splits=50,
        calibration_share=0.5,
    ),
    "laptop": Config(),
    "paper": Config(calibrations=10_000, samples=150, splits=1000, shapes_only=True),
}


def run(cfg: Config, folder: core.RunDir | None = None) -> core.Result:
    """Made trajectories, then the model's."""
    folder = folder or core.RunDir()
    if cfg.shapes_only and cfg.model is None:
        from experiments.shapes import budget_shapes

        return budget_shapes()
    from experiments import budget_real

    asked = budget_real.questions_of(cfg) if cfg.items != 0 else None  # a wrong file is known before the long part
    tables: dict[str, core.Rows] = {}
    claims: list[core.Claim] = []
    figures: dict[str, Any] = {}
    made, curve = _made(cfg, folder)
    tables["made trajectories: one threshold"] = made
    claims += _promises(cfg, made)
    tables["made trajectories: several signals"] = _ensembles(cfg)
    tables["made trajectories: stop or give up"], more = _dual(cfg)
    claims += more
    figures["risk_compute_made"] = lambda f: _draw_made(f, cfg, made, curve)
    notes = [
        f"Made: {cfg.calibrations} calibrations for each n; a violation is a chosen threshold whose true risk, over "
        f"{cfg.population:,} trajectories, is above eps. Intervals of rates: 95%, exact binomial.",
        "Infeasible calibrations choose no threshold and spend the full budget; 'smallest eps' is what would do.",
        "CRC promises the mean risk only, and only for a monotone loss; 'UCB as coded' takes the "
        f"{rules.CODE_GRID:,} grid points of the authors' grid for the number of trajectories.",
    ]
    if asked:
        real = budget_real.study(cfg, folder, asked)
        tables |= real.tables
        claims += real.claims
        figures |= real.figures
        notes += real.notes
    return core.Result(rows=tables, claims=claims, figures=figures, notes=notes)


# --- one threshold on made trajectories ------------------------------------------------------------------------------


@lru_cache
def _drawn(n: int):
    """``keys [R] -> [Sets, Sets]``: calibration sets of n made trajectories, with the paper's and the authors' loss."""
    import jax

    def one(key):
        rows = simulate(key, n)
        tables = [policies.upper_tables(*rows, grid(), exhausted) for exhausted in (False, True)]
        return [rules.halves(table.loss, table.cost) for table in tables]

    return jax.jit(lambda keys: jax.lax.map(one, keys))


@lru_cache
def _law(population: int, seed: int, solvable: float = 0.6):
    """Means over the population [m]: risk of both losses, share of tokens and of checkpoints, right answers."""
    import jax
    import jax.numpy as jnp

    size = min(population, 10_000)

    def one(key):
        rows = simulate(key, size, solvable_share=solvable)
        table, counted = (policies.upper_tables(*rows, grid(), c) for c in (False, True))
        return [v.astype(jnp.float32).mean(0) for v in (table.loss, counted.loss, table.share, table.right)]

    keys = jax.random.split(jax.random.key(seed + 1_000_003), -(-population // size))
    names = ("risk", "exhausted", "share", "right")
    return dict(zip(names, [np.asarray(v.mean(0)) for v in jax.jit(partial(jax.lax.map, one))(keys)], strict=True))


def _levels(cfg: Config) -> tuple[float, ...]:
    return tuple(sorted({*cfg.eps, *cfg.eps_exhausted}))  # all of them for every loss: rules compile once


def _made(cfg: Config, folder: core.RunDir) -> tuple[core.Rows, dict[str, np.ndarray]]:
    import jax

    law = _law(cfg.population, cfg.seed)
    rows: core.Rows = []
    levels = _levels(cfg)
    for step, n in enumerate(core.progress(cfg.sizes, description="calibrating")):
        keys = jax.random.split(jax.random.fold_in(jax.random.key(cfg.seed), n), cfg.calibrations)
        drawn = _drawn(n)(keys)
        for sets, loss, wanted in zip(drawn, ("paper's", "authors'"), (cfg.eps, cfg.eps_exhausted), strict=True):
            risk = law["risk" if loss == "paper's" else "exhausted"]
            for name in cfg.rules:
                rule = rules.RULES[name]
                found = rules.choose(rule, sets, levels, cfg.delta)
                for e, eps in enumerate(levels):
                    if eps in wanted:
                        row = _row(found.index[:, e : e + 1], found.needed[:, e], risk, law["share"], eps)
                        rows.append({"loss": loss, "n": n, "eps": eps, "rule": name} | row)
        folder.log(step, n=n)
    return rows, law


def _row(index: np.ndarray, needed: np.ndarray, risk: np.ndarray, share: np.ndarray, eps: float) -> dict[str, Any]:
    true = rules.at(risk, index, 0.0)
    feasible = int((index >= 0).sum())
    missing = np.isfinite(needed)
    return {
        "violations": rules.binomial(int((true > eps).sum()), index.size),
        "feasible": feasible / index.size,
        "mean risk": float(true.mean()),
        "share of tokens": float(rules.at(share, index, 1.0).mean()),
        "smallest eps": float(np.median(needed[missing])) if missing.any() else None,
    }


def _promises(cfg: Config, rows: core.Rows) -> list[core.Claim]:
    """One claim a rule over all n and eps, at its worst."""
    limit = rules.allowed(cfg.delta, cfg.calibrations)
    claims = []
    for name in cfg.rules:
        rates = [r["violations"].value for r in rows if r["rule"] == name]
        if rules.RULES[name].guaranteed:
            claims.append(core.Claim(f"{name}: worst violation rate over all n and eps", max(rates), "<=", limit))
    if "naive" in cfg.rules:
        naive = min((r["violations"] for r in rows if r["rule"] == "naive"), key=lambda v: v.value)
        claims.append(core.Claim("naive rule: least violation rate over all n and eps", naive, ">", cfg.delta))
    if {"UCB pointwise", "Clopper-Pearson suffix"} <= set(cfg.rules):
        by = {(r["loss"], r["n"], r["eps"], r["rule"]): r["share of tokens"] for r in rows}
        gains = [v - by[(*k[:3], "Clopper-Pearson suffix")] for k, v in by.items() if k[3] == "UCB pointwise"]
        text = "tokens saved by Clopper-Pearson suffix beyond the authors' UCB, least"
        claims.append(core.Claim(text, min(gains), ">=", 0))
    return claims


# --- several signals -------------------------------------------------------------------------------------------------


def _signals(signal, length):
    from jaxmeth.risk import budget

    return [signal, budget.ema(signal, length, 0.4), budget.emv_confidence(signal, length, 0.3)]


def _ensembles(cfg: Config, names=("raw signal", "smoothed", "calm (1 - moving variance)")) -> core.Rows:
    """The cheapest certified (signal, threshold) against each signal alone, at the middle size and eps."""
    import jax
    import jax.numpy as jnp

    from jaxmeth.risk import budget

    n, eps = cfg.sizes[len(cfg.sizes) // 2], cfg.eps[len(cfg.eps) // 2]

    def tables(key, count):
        signal, *rest = simulate(key, count)
        made = [policies.upper_tables(s, *rest, grid()) for s in _signals(signal, rest[1])]
        return policies.Table(*[jnp.stack(v) for v in zip(*made, strict=True)])

    def one(key):
        table = tables(key, n)
        signal, chosen = budget.calibrate_ensemble(table.loss, table.cost, eps, cfg.delta, "clopper_pearson")
        return [rules.halves(a, b) for a, b in zip(table.loss, table.cost, strict=True)], signal, chosen.index

    def means(key):
        table = tables(key, 10_000)
        return table.loss.mean(1), table.share.mean(1)

    keys = jax.random.split(jax.random.key(cfg.seed + 7), cfg.calibrations)
    sets, *chosen = jax.jit(partial(jax.lax.map, one))(keys)
    signal, index = (np.asarray(v) for v in chosen)
    many = jax.random.split(jax.random.key(cfg.seed + 8), max(cfg.population // 10_000, 1))
    risk, share = (np.asarray(v.mean(0)) for v in jax.jit(partial(jax.lax.map, means))(many))
    rows = []
    levels = _levels(cfg)
    for s, name in enumerate(names):
        alone = rules.choose(rules.RULES["Clopper-Pearson suffix"], sets[s], levels, cfg.delta).index
        alone = alone[:, levels.index(eps)][:, None]
        rows.append({"signal": name} | _row(alone, np.array([]), risk[s], share[s], eps))
    flat = np.where(signal >= 0, signal * risk.shape[1] + index, -1)[:, None]
    rows.append({"signal": "ensemble"} | _row(flat, np.array([]), risk.ravel(), share.ravel(), eps))
    chosen = [float((signal == s).mean()) for s in range(3)] + [None]
    return [{"n": n, "eps": eps} | r | {"chosen": c, "smallest eps": None} for r, c in zip(rows, chosen, strict=True)]


# --- stop or give up -------------------------------------------------------------------------------------------------


def lower_candidates(budget_tokens: float):
    """Schedules to choose from: slope and shift relative to the budget, levels on the signal's scale."""
    import jax.numpy as jnp

    from jaxmeth.risk import budget

    return budget.lower_grid(
        jnp.asarray([8.0, 40.0]) / budget_tokens,
        jnp.asarray([0.15, 0.3, 0.45, 0.6]),
        jnp.asarray([-1.0, 0.2]),
        jnp.asarray([0.4, 0.45, 0.5, 0.55, 0.6, 0.7]),
    )


DUALS = {
    "guaranteed (suffix, Bonferroni)": {"bound": "auto", "upper_validity": "suffix", "lower_validity": "bonferroni"},
    "naive": {"bound": "naive", "upper_validity": "pointwise", "lower_validity": "pointwise"},
}


def two_stage(rows, thresholds, params, eps: float, delta: float, total: float, rule: str, **kw):
    """``calibrate_budget`` with half of delta for each stage: its policy and whether each stage was feasible."""
    from jaxmeth.risk import budget

    found = budget.calibrate_budget(
        *rows, thresholds, params, budget=total, eps_upper=eps, eps_lower=eps, delta_upper=delta / 2,
        delta_lower=delta / 2, levels=12, **DUALS[rule], **kw,
    )  # fmt: skip
    return found.policy, found.upper.feasible, found.lower.feasible


def _dual(cfg: Config, solvable: float = 0.4, total: float = 3600.0) -> tuple[core.Rows, list[core.Claim]]:
    """Upper only, lower only, both; 60% of the trajectories are never solved."""
    import jax
    import jax.numpy as jnp

    n, eps = max(cfg.sizes), max(cfg.eps)
    repeats = min(cfg.calibrations, 1000)
    keys = jax.random.split(jax.random.key(cfg.seed + 17), repeats)
    params = lower_candidates(total)
    population = simulate(jax.random.key(cfg.seed + 18), min(cfg.population, 50_000), solvable_share=solvable)
    law = _law(cfg.population, cfg.seed, solvable)
    limit = rules.allowed(cfg.delta, repeats)
    rows, claims = [], []

    # What is switched off keeps its shape: all are calibrated on the same sets at once.
    off = (grid() + 2.0, jax.tree.map(lambda v: v * 0 - 1.0, params))
    upper = jnp.stack([grid(), grid(), off[0]])
    lower = jax.tree.map(lambda *v: jnp.stack(v), params, off[1], params)

    def one(key):
        rows = simulate(key, n, solvable_share=solvable)

        def stages(rule):
            return jax.vmap(lambda u, low: two_stage(rows, u, low, eps, cfg.delta, total, rule))(upper, lower)

        return {rule: stages(rule) for rule in DUALS}

    calibrated = jax.jit(partial(jax.lax.map, one))(keys)
    for kind, name in enumerate(("lower and upper", "upper only", "lower only")):
        for rule in DUALS:
            policy, upper_ok, lower_ok = jax.tree.map(lambda v, kind=kind: v[:, kind], calibrated[rule])
            found = policies.evaluate(policy, *population)
            broken = (found.upper_risk > eps) | (found.lower_risk > eps)
            rows.append(
                {"rule": f"{name}, {rule}", "n": n, "eps (both)": eps}
                | {
                    "violations": rules.binomial(int(broken.sum()), repeats),
                    "feasible": float((np.asarray(upper_ok) & np.asarray(lower_ok)).mean()),
                    "wrong answers": rules.spread(found.upper_risk),
                    "given up": rules.spread(found.lower_risk),
                    "right answers": rules.spread(found.right),
                    "share of tokens": rules.spread(found.share),
                }
            )
            if rule != "naive":
                rate = rows[-1]["violations"].value
                claims.append(core.Claim(f"{name}: violation rate of either risk, made", rate, "<=", limit))
            if rule != "naive" and kind == 0:
                same = policies.cheapest(*[law[k][None] for k in ("share", "right", "risk")], found.right, eps)
                saved = rules.spread(np.where(upper_ok & lower_ok, same - found.share, np.nan))
                claims.append(core.Claim("giving up saves tokens at equal right answers and risk, made", saved, ">", 0))
    simple = [*policies.fixed_budgets(*population[1:], SHARES), policies.oracle(*population[1:])]
    names = [f"fixed budget {s:g}" for s in SHARES] + ["oracle: first right answer"]
    marks = [int(np.abs(np.asarray(grid()) - t).argmin()) for t in HAND_SET]
    hand = [policies.Outcome(law["risk"][m], 0.0, law["share"][m], law["right"][m]) for m in marks]
    for name, o in zip(names + [f"hand-set threshold {t:g}" for t in HAND_SET], simple + hand, strict=True):
        rows.append(
            {"rule": name, "n": None, "eps (both)": None, "violations": None, "feasible": None}
            | {"wrong answers": float(o.upper_risk), "given up": float(o.lower_risk)}
            | {"right answers": float(o.right), "share of tokens": float(o.share)}
        )
    return rows, claims


def _draw_made(figure: Any, cfg: Config, rows: core.Rows, law: dict[str, np.ndarray]) -> None:
    axes = figure.subplots()
    n, eps = cfg.sizes[len(cfg.sizes) // 2], cfg.eps[len(cfg.eps) // 2]
    axes.plot(law["share"], law["risk"], color="0.5", label="every threshold")
    axes.axhline(eps, color="0.7", linestyle="--", label="tolerated risk")
    for row in rows:
        if row["n"] == n and row["eps"] == eps and row["loss"] == "paper's":
            sign = "o" if rules.RULES[row["rule"]].guaranteed else "x"
            label = f"{row['rule']} ({row['violations'].value:.2f})"
            axes.plot(row["share of tokens"], row["mean risk"], sign, label=label)
    axes.set(xlabel="share of the tokens at full budget", ylabel="wrong answers returned early")
    axes.set_title(f"n = {n}; in brackets how often the risk was exceeded", fontsize=10)
    axes.legend(fontsize=7)


if __name__ == "__main__":
    core.main(__file__)
