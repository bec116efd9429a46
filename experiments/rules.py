"""Rules for choosing a threshold, side by side on many calibration sets at once."""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from experiments import core

CODE_GRID = 1040
"""Upper thresholds of the authors' grid, which their code takes for the number of trajectories."""
BLOCK, LEVELS = 200, 4


class Rule(NamedTuple):
    """A bound and a validity; ``guaranteed`` says that the violation rate is at most delta whatever the law."""

    bound: str
    validity: str
    guaranteed: bool


RULES = {
    "naive": Rule("naive", "pointwise", False),
    "CRC": Rule("crc", "pointwise", False),
    "UCB as coded (n = grid)": Rule("code", "pointwise", False),
    "UCB pointwise": Rule("hoeffding", "pointwise", False),
    "Hoeffding suffix": Rule("hoeffding", "suffix", True),
    "Hoeffding-Bentkus suffix": Rule("hoeffding_bentkus", "suffix", True),
    "empirical Bernstein suffix": Rule("empirical_bernstein", "suffix", True),
    "Clopper-Pearson suffix": Rule("clopper_pearson", "suffix", True),
    "Clopper-Pearson Bonferroni": Rule("clopper_pearson", "bonferroni", True),
    "Clopper-Pearson split": Rule("clopper_pearson", "split", True),
}


class Sets(NamedTuple):
    """R calibration sets in two halves (a ``risk.Summary`` each, leaves [R, m])."""

    first: Any
    second: Any


class Chosen(NamedTuple):
    """Arrays [R, E]: the candidate (-1 infeasible), and the smallest eps that would have been feasible (else NaN)."""

    index: np.ndarray
    needed: np.ndarray


def halves(losses, cost):
    """``Sets`` of one calibration set [n, m]; vmap or map over sets."""
    from jaxmeth import risk

    middle = losses.shape[0] // 2
    return Sets(risk.summarise(losses[:middle], cost[:middle]), risk.summarise(losses[middle:], cost[middle:]))


def _joined(sets: Sets):
    import jax.numpy as jnp

    one, two = sets
    n = one.n + two.n
    cost = (one.cost * one.n + two.cost * two.n) / jnp.maximum(n, 1)
    return type(one)(one.total + two.total, one.square + two.square, one.fractional | two.fractional, cost, n)


@lru_cache
def _apply(bound: str, validity: str):
    import jax

    from jaxmeth import risk

    def one(sets: Sets, eps, delta):
        if validity == "split":
            return risk.select_split(sets.first, sets.second, eps, delta, bound)
        return risk.select(_joined(sets), eps, delta, bound, validity)

    return jax.jit(jax.vmap(jax.vmap(one, in_axes=(None, 0, None)), in_axes=(0, None, None)))


def choose(rule: Rule, sets: Sets, eps, delta: float) -> Chosen:
    """What a rule chooses for every set and eps [E], in blocks of one size, so that each rule compiles once."""
    import jax

    coded = rule.bound == "code"
    margin = float(np.sqrt(np.log(1 / delta) / (2 * CODE_GRID))) if coded else 0.0
    repeats, wide = len(sets.first.n), np.asarray(eps, np.float32) - np.float32(margin)
    wide = np.concatenate([wide, np.repeat(wide[-1:], -len(wide) % LEVELS)])
    run = _apply("naive" if coded else rule.bound, rule.validity)
    parts = []
    for start in range(0, repeats, BLOCK):
        rows = np.minimum(np.arange(start, start + BLOCK), repeats - 1)
        parts.append(run(jax.tree.map(lambda v, rows=rows: v[rows], sets), wide, delta))
    index, feasible, bound = (
        np.concatenate([np.asarray(getattr(part, name)) for part in parts])[:repeats, : len(eps)]
        for name in ("index", "feasible", "bound")
    )
    return Chosen(index, np.where(feasible, np.nan, bound + margin))


def at(curve: np.ndarray, index: np.ndarray, infeasible: float) -> np.ndarray:
    """A curve [m] or [R, m] at the chosen candidates [R, E]; ``infeasible`` where none was."""
    curve = np.broadcast_to(curve, (index.shape[0], curve.shape[-1]))
    return np.where(index < 0, infeasible, np.take_along_axis(curve, np.maximum(index, 0), axis=1))


def binomial(hits: int, n: int, level: float = 0.95) -> core.Estimate:
    """A share with its exact (Clopper-Pearson) interval."""
    from jaxmeth import risk

    tail = (1 - level) / 2
    if n == 0:
        return core.Estimate(float("nan"), float("nan"), float("nan"))
    below = 1 - float(risk.clopper_pearson_upper(n - hits, n, tail))
    return core.Estimate(hits / n, below, float(risk.clopper_pearson_upper(hits, n, tail)))


def spread(values: np.ndarray) -> core.Estimate:
    """Mean over repeats, with the range of the middle 95% of them."""
    if not np.isfinite(values).any():
        return core.Estimate(float("nan"), float("nan"), float("nan"))
    lo, hi = np.nanquantile(values, [0.025, 0.975])
    return core.Estimate(float(np.nanmean(values)), float(lo), float(hi))


def allowed(delta: float, repeats: int) -> float:
    """delta and three standard errors of a rate over ``repeats``."""
    return delta + 3 * float(np.sqrt(delta * (1 - delta) / repeats))
