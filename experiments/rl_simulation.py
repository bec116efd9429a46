"""What the simulations of the reinforcement-learning experiments share: tables of softmax policies, ratios of means."""

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments import core, rl_tables
from experiments.rl_arms import METRICS, Arm, policy
from experiments.rl_config import Training


class Simulated(NamedTuple):
    """What a simulation adds to the result of its experiment."""

    tables: dict[str, core.Rows]
    claims: list[core.Claim]
    notes: list[str]


NOTHING = Simulated({}, [], [])
"""Where ``simulation_seeds`` is 0."""


def seed_keys(cfg: Training, number: int) -> Any:
    """The seeds' keys of simulation ``number``: made anew for each arm, whose draws are the same on purpose."""
    return jax.random.split(jax.random.fold_in(jax.random.key(cfg.seed), number), cfg.simulation_seeds)


def ratio(first: np.ndarray, second: np.ndarray) -> core.Estimate:
    """The first's mean over the second's, bootstrapped over paired seeds; NaN where the second's mean is 0."""

    def statistic(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        below = b.mean(1)
        return np.where(below == 0, np.nan, a.mean(1) / np.where(below == 0, 1, below))

    return core.bootstrap_interval(statistic, first, second, batched=True)


def first_at(curves: np.ndarray, level: float) -> float | None:
    """The first step [seeds, steps] at which the seeds' mean is at least ``level``; None: never."""
    above = np.flatnonzero(curves.mean(0) >= level)
    return int(above[0]) if len(above) else None


def steps_ratio(first: np.ndarray, second: np.ndarray, level: float) -> core.Estimate:
    """Steps of the mean curve of the first to ``level`` over those of the second; a curve that never gets there counts
    with its whole length, which makes the ratio a bound. Between steps by a line."""

    def needed(curves: np.ndarray) -> np.ndarray:
        found = rl_tables.steps_to(curves.mean(1), np.arange(curves.shape[2]), level)
        return np.where(np.isnan(found), curves.shape[2], found)

    return core.bootstrap_interval(lambda a, b: needed(a) / needed(b), first, second, batched=True)


def learning(arms: Sequence[Arm]) -> Callable[..., tuple[Any, Any]]:
    """``(arm, step, logp, batch) -> (gradient of the arm's loss by logp, its metrics)``; the arm is a traced number.

    Differentiated inside each branch, so that none keeps what the others need.
    """
    branches = [jax.grad(policy(a.loss, METRICS), argnums=1, has_aux=True) for a in arms]
    return lambda arm, *rest: jax.lax.switch(arm, branches, *rest)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """``jax.jit``; on CPUs at optimisation level 1, a third of the compilation, which costs more than these loops.

    A level in ``XLA_FLAGS`` stands.
    """
    level = "xla_backend_optimization_level"
    free = jax.default_backend() == "cpu" and level not in os.environ.get("XLA_FLAGS", "")
    return jax.jit(function, compiler_options={level: "1"} if free else None)


def draw(key: Any, p: Any, count: int) -> Any:
    """``count`` draws from each row of probabilities [S, A]: int [S, count], by the inverse of the distribution."""
    upto = jnp.cumsum(p, axis=1)[:, None, :-1]
    u = jax.random.uniform(key, (len(p), count))
    return (u[..., None] > upto).sum(2)
