"""Tables, claims and plots that the reinforcement-learning experiments share."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments import core
from experiments.rl_config import Training

if TYPE_CHECKING:
    from experiments.rl_arms import Measured


def mean(values: np.ndarray) -> core.Estimate:
    """Mean over seeds with its bootstrap interval."""
    return core.bootstrap_interval(lambda v: v.mean(1), values, batched=True)


def difference(first: np.ndarray, second: np.ndarray) -> core.Estimate:
    """Mean paired difference over seeds with its bootstrap interval."""
    return core.bootstrap_interval(lambda a, b: (a - b).mean(1), first, second, batched=True)


def steps_to(curve: np.ndarray, steps: np.ndarray, level: float | np.ndarray) -> np.ndarray:
    """The step at which each curve [R, E] first reaches its level ([R] or one), between evaluations by a line.

    NaN: never.
    """
    out = np.full(len(curve), np.nan)
    for row, (values, wanted) in enumerate(zip(curve, np.broadcast_to(level, len(curve)), strict=True)):
        above = np.flatnonzero(values >= wanted)
        if not len(above):
            continue
        at = above[0]
        if at == 0:
            out[row] = steps[0]
            continue
        low, high = values[at - 1], values[at]
        out[row] = steps[at - 1] + (wanted - low) / (high - low) * (steps[at] - steps[at - 1])
    return out


def near_peak(measured: "Measured", arm: str, share: float = 0.9) -> core.Estimate:
    """The step at which the mean curve of an arm first reaches this share of its own highest pass rate."""

    def statistic(passed: np.ndarray) -> np.ndarray:
        curve = passed.mean(1)
        return steps_to(curve, measured.steps, share * curve.max(1))

    return core.bootstrap_interval(statistic, measured.curves[arm]["pass"], batched=True)


def at_level(passed: np.ndarray, values: np.ndarray, level: float | np.ndarray) -> np.ndarray:
    """Values [R, E] where the curve ``passed`` [R, E] first reaches its level, between evaluations by a line."""
    place = steps_to(passed, np.arange(passed.shape[1]), level)
    known = np.where(np.isnan(place), 0, place)
    low = np.minimum(known.astype(int), passed.shape[1] - 2)
    left, right = (np.take_along_axis(values, at[:, None], axis=1)[:, 0] for at in (low, low + 1))
    return np.where(np.isnan(place), np.nan, left + (known - low) * (right - left))


def matched(measured: "Measured", first: str, second: str, metric: str) -> core.Claim:
    """Whether an arm has as much of a metric as another where both first reach the lower of their best pass rates."""

    def statistic(*curves: np.ndarray) -> np.ndarray:
        a, b, of_a, of_b = (c.mean(1) for c in curves)
        level = np.minimum(a.max(1), b.max(1))
        return at_level(a, of_a, level) - at_level(b, of_b, level)

    curves = [measured.curves[arm][name] for name in ("pass", metric) for arm in (first, second)]
    estimate = core.bootstrap_interval(statistic, *curves, batched=True)
    return core.Claim(f"{metric} at matched pass rate, {first} less {second}", estimate, ">=", 0)


def matched_rows(measured: "Measured", metric: str) -> core.Rows:
    """A metric of every arm at the highest pass rate that the means of all arms reach."""
    level = min(curves["pass"].mean(0).max() for curves in measured.curves.values())

    def statistic(passed: np.ndarray, values: np.ndarray) -> np.ndarray:
        return at_level(passed.mean(1), values.mean(1), level)

    return [
        {"arm": arm, "pass rate": float(level)}
        | {metric: core.bootstrap_interval(statistic, curves["pass"], curves[metric], batched=True)}
        for arm, curves in measured.curves.items()
    ]


def rows(measured: "Measured", baseline: str, more: Sequence[str] = ()) -> core.Rows:
    """One row an arm: its rate, pass rates, and paired differences to the baseline."""
    found = []
    for arm, curves in measured.curves.items():
        row: dict[str, Any] = {"arm": arm, "rate": measured.rates[arm]}
        row |= {"at the grid's end": measured.edge[arm]} if measured.edge else {}
        row |= {"pass rate": mean(measured.last(arm)), "mean over training": mean(measured.area(arm))}
        row["pass@k"] = mean(measured.last(arm, "pass@k"))
        row["entropy"] = mean(measured.last(arm, "entropy"))
        row |= {name: float(np.nanmean(v)) if np.isfinite(v := curves[name]).any() else None for name in more}
        if arm != baseline:
            row[f"over {baseline}"] = difference(measured.last(arm), measured.last(baseline))
        found.append(row)
    return found


def selection_rows(cfg: Training, measured: "Measured") -> core.Rows:
    """Pass rate on the selection seeds by learning rate."""
    return [
        {"arm": arm} | {f"{rate:g}": float(v) for rate, v in zip(cfg.rates, scores, strict=False)}
        for arm, scores in measured.selection.items()
    ]


def ahead(measured: "Measured", first: str, second: str, metric: str = "pass") -> core.Claim:
    """Whether an arm ends above another."""
    text = (
        f"{metric} rate at the end, {first} less {second}" if metric == "pass" else f"{metric}, {first} less {second}"
    )
    return core.Claim(text, difference(measured.last(first, metric), measured.last(second, metric)), ">", 0)


def quicker(measured: "Measured", first: str, second: str) -> core.Claim:
    """Whether an arm's mean pass rate over training is above another's."""
    text = f"mean pass rate over training, {first} less {second}"
    return core.Claim(text, difference(measured.area(first), measured.area(second)), ">", 0)


def sooner(measured: "Measured", first: str, second: str, share: float) -> core.Claim:
    """Whether an arm reaches another's final pass rate in at most this share of the other's steps (mean curves).

    Infinite where it never does, NaN unless the other surely ends above where both begin: else there is nothing to
    reach.
    """

    def needed(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        a, b = a.mean(1), b.mean(1)
        found = steps_to(a, measured.steps, b[:, -1]) / measured.steps[-1]
        rise = b[:, -1] - np.maximum(a[:, 0], b[:, 0])
        return np.stack([np.where(np.isnan(found), np.inf, found), rise], axis=1)

    curves = [measured.curves[arm]["pass"] for arm in (first, second)]
    found, rise = (core.Estimate(*e) for e in zip(*core.bootstrap_interval(needed, *curves, batched=True), strict=True))
    if not rise.lo > 0:
        found = core.Estimate(np.nan, np.nan, np.nan)
    return core.Claim(f"share of {second}'s steps in which {first} reaches its final pass rate", found, "<=", share)


def sooner_to(measured: "Measured", firsts: Sequence[str], second: str, level: float, share: float) -> core.Claim:
    """Whether the best of some arms reaches a pass rate in at most this share of another's rollouts (mean curves).

    The best is the one that is there first, in each resample anew; infinite where none is. Where the other never gets
    there, the share lies between 0 (it never would) and what it is if the other does right after the end, which is the
    value shown. NaN where the other is there from the first.
    """

    def needed(*curves: np.ndarray) -> np.ndarray:
        *best, other = (steps_to(c.mean(1), measured.steps, level) for c in curves)
        late = np.isnan(other)
        other = np.where(late, measured.steps[-1], other)
        best = np.where(np.isnan(best), np.inf, best).min(0)
        most = np.where(other > 0, best / np.where(other > 0, other, 1), np.nan)
        return np.stack([np.where(late, 0, most), most], axis=1)

    curves = [measured.curves[arm]["pass"] for arm in (*firsts, second)]
    text = f"share of {second}'s rollouts in which the best of {', '.join(firsts)} reaches {level:.0%}"
    found = core.bootstrap_interval(needed, *curves, batched=True)
    return core.Claim(text, core.Estimate(found.value[1], found.lo[0], found.hi[1]), "<=", share)


LEAST_SEEDS = 4
"""Seeds below which no claim over seeds is decided: the bootstrap interval of 2 is their range, of 1 a point."""


def decided(cfg: Training, claims: Sequence[core.Claim], simulated: Sequence[core.Claim]) -> list[core.Claim]:
    """All claims; those with an interval over too few seeds keep what was measured, but neither interval nor verdict.

    Claims without an interval are not over seeds.
    """
    nothing = (np.nan, np.nan)
    return [
        dataclasses.replace(claim, interval=nothing) if claim.interval and seeds < LEAST_SEEDS else claim
        for seeds, part in ((cfg.seeds, claims), (cfg.simulation_seeds, simulated))
        for claim in part
    ]


def few_seeds(cfg: Training) -> list[str]:
    """A note where ``decided`` leaves claims open."""
    few = [f"{cfg.seeds} seeds"] if cfg.seeds < LEAST_SEEDS else []
    few += [f"{cfg.simulation_seeds} simulation seeds"] if 0 < cfg.simulation_seeds < LEAST_SEEDS else []
    if not few:
        return []
    return [
        f"Claims over {' and '.join(few)} are undecided: of fewer than {LEAST_SEEDS} an interval is only the range."
    ]


def notes(cfg: Training, measured: "Measured", paper: str) -> list[str]:
    """What a reader of the tables needs."""
    start = np.mean([curves["pass"][:, 0].mean() for curves in measured.curves.values()])
    source = "reasoning-gym's" if core.data_root(cfg.data) else "made"
    edges = [arm for arm, edge in measured.edge.items() if edge]
    chosen = f"rates chosen on {cfg.selection_seeds} others" if measured.selection else f"one rate, {cfg.rates[0]:g}"
    at_end = f" The best rate lies at an end of the grid for {', '.join(edges)}." if edges else ""
    model = f"Tiny character model (width {cfg.width}, {cfg.layers} layers), warm-started,"
    if cfg.model == "smollm2":
        model = "SmolLM2-135M-Instruct with LoRA"
    return [
        f"{model} on {source} problems of {cfg.task}; pass rate {start:.3f} at first. Each "
        f"arm: {cfg.steps} steps of {cfg.rollouts} rollouts, {cfg.epochs} update(s) each, the same prompts and keys.",
        f"{cfg.seeds} seeds; {chosen}.{at_end} Brackets: 95% bootstrap over seeds, differences paired by seed.",
        *few_seeds(cfg),
        f"The paper's scale: {paper}",
    ]


def draw_curves(figure: Any, measured: "Measured", metric: str = "pass", label: str = "held-out pass rate") -> None:
    """A learning curve an arm: the mean over seeds, with a band of one standard error."""
    axes = figure.subplots()
    for arm, curves in measured.curves.items():
        values = curves[metric]
        middle, error = values.mean(0), values.std(0) / np.sqrt(len(values))
        axes.plot(measured.steps, middle, label=arm)
        axes.fill_between(measured.steps, middle - error, middle + error, alpha=0.12)
    axes.set(xlabel="training step", ylabel=label)
    axes.legend(fontsize=7)


def table(cfg: Training, measured: "Measured", baseline: str, more: Sequence[str] = ()) -> Mapping[str, core.Rows]:
    """The two tables of every comparison; with a single rate the first alone."""
    shown = {"tiny model" if cfg.model == "tiny" else "SmolLM2-135M": rows(measured, baseline, more)}
    if measured.selection:
        shown["pass rate by learning rate, selection seeds"] = selection_rows(cfg, measured)
    return shown
