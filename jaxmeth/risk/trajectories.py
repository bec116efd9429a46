"""Trajectories of checkpoints: smoothing of the signal, exits under thresholds, and what an exit costs.

A trajectory i has ``length[i]`` checkpoints; at each a confidence ``signal`` (higher = surer), whether the provisional
answer is ``correct``, and the cumulative ``tokens``. Arrays are padded to T behind their length, and padding never
fires. Public as ``risk.budget``.

Reference: "Conformal Thinking: Risk Control for Reasoning on a Compute Budget", arXiv 2602.03814, and its public code.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Int, Num

NONE, UPPER, LOWER = 0, 1, 2
"""Reason and action codes: ran on, stopped confident, stopped hopeless."""

LossKind = Literal["suffix_mean", "final"]
CostKind = Literal["incorrect", "time"]


class LowerParams(NamedTuple):
    """Lower schedules: slope ``c`` per token, ``shift`` as a share of the budget, levels ``lo`` and ``hi``."""

    c: Float[Array, "*m"]
    shift: Float[Array, "*m"]
    lo: Float[Array, "*m"]
    hi: Float[Array, "*m"]


def lower_grid(
    c: Float[Array, " a"], shift: Float[Array, " b"], lo: Float[Array, " d"], hi: Float[Array, " e"]
) -> LowerParams:
    """All combinations, flat [a b d e]; each run of ``d e`` rows shares c and shift (``levels`` of the search)."""
    return LowerParams(*[axis.ravel() for axis in jnp.meshgrid(c, shift, lo, hi, indexing="ij")])


def inside(length: Int[Array, " n"], steps: int) -> Bool[Array, "n T"]:
    return jnp.arange(steps)[None] < length[:, None]


def last(length: Int[Array, " n"]) -> Int[Array, " n"]:
    return jnp.maximum(length - 1, 0).astype(jnp.int32)


# --- smoothing -------------------------------------------------------------------------------------------------------


def smooth(value: Array, started: Array, x: Array, alpha: ArrayLike) -> tuple[Array, Array]:
    """One step of the moving average; a NaN leaves it as it is."""
    seen = ~jnp.isnan(x)
    moved = jnp.where(started, alpha * x + (1.0 - alpha) * value, x)
    return jnp.where(seen, moved, value), started | seen


def ema(x: Float[Array, "n T"], length: Int[Array, " n"], alpha: Num[ArrayLike, ""]) -> Float[Array, "n T"]:
    """Exponential moving average ``y[0] = x[0]``, ``y[t] = alpha x[t] + (1 - alpha) y[t-1]``; padding 0.

    alpha in (0, 1], larger = less smoothing. A NaN gives NaN at its own step only (it cannot fire) and is skipped.
    """

    def step(carry, column):
        value, started = smooth(*carry, column, alpha)
        return (value, started), jnp.where(jnp.isnan(column), jnp.nan, value)

    start = (jnp.zeros_like(x[:, 0]), jnp.zeros(x.shape[0], bool))
    _, y = jax.lax.scan(step, start, x.T)
    return jnp.where(inside(length, x.shape[1]), y.T, 0.0)


def _moments(x: Array, tau: ArrayLike, v0: ArrayLike) -> tuple[Array, Array, Array]:
    """Zero-started moving mean, moving variance around it, debiasing weight ``1 - beta^(t+1)``, by step."""
    beta = 1.0 - tau

    def step(carry, column):
        mean, variance, index = carry
        mean = tau * column + beta * mean
        spread = tau * jnp.square(column - mean) + beta * variance
        variance = jnp.where(index == 0, variance, spread)
        return (mean, variance, index + 1), (mean, variance)

    start = (jnp.zeros_like(x[:, 0]), jnp.full_like(x[:, 0], v0), jnp.asarray(0, jnp.int32))
    _, (mean, variance) = jax.lax.scan(step, start, x.T)
    weight = -jnp.expm1(jnp.log1p(-jnp.asarray(tau, x.dtype)) * jnp.arange(1, x.shape[1] + 1, dtype=x.dtype))
    return mean.T, variance.T, weight[None]


def ema_debiased(x: Float[Array, "n T"], length: Int[Array, " n"], tau: Num[ArrayLike, ""]) -> Float[Array, "n T"]:
    """Moving mean started from 0, divided by ``1 - (1 - tau)^(t+1)``; padding 0. tau in (0, 1]."""
    mean, _, weight = _moments(x, tau, 0.0)
    return jnp.where(inside(length, x.shape[1]), mean / weight, 0.0)


def emv_confidence(
    x: Float[Array, "n T"], length: Int[Array, " n"], tau: Num[ArrayLike, ""], v0: float = 1.0
) -> Float[Array, "n T"]:
    """One minus the debiased exponential moving variance, clipped at 0: a calm signal is a confident one. Padding 0.

    With ``beta = 1 - tau``: ``m[t] = tau x[t] + beta m[t-1]`` from ``m[-1] = 0``, ``v[0] = v0``,
    ``v[t] = tau (x[t] - m[t])^2 + beta v[t-1]``; the variance is ``v[0]`` at 0 and ``v[t] / (1 - beta^(t+1))`` later.
    """
    _, variance, weight = _moments(x, tau, v0)
    debiased = jnp.where(jnp.arange(x.shape[1])[None] == 0, variance, variance / weight)
    return jnp.where(inside(length, x.shape[1]), jnp.maximum(1.0 - debiased, 0.0), 0.0)


# --- exits -----------------------------------------------------------------------------------------------------------


def upper_exit(y: Float[Array, "n T"], length: Int[Array, " n"], grid: Float[Array, " m"]) -> Int[Array, "n m"]:
    """First checkpoint with ``y >= grid[j]``, else the last one; NaN and padding never fire; 0 for length 0."""
    live = jnp.where(inside(length, y.shape[1]) & ~jnp.isnan(y), y, -jnp.inf)
    best = jax.lax.cummax(live, axis=1)
    below = (best[:, None, :] < grid[None, :, None]).sum(-1, dtype=jnp.int32)  # fused: [n, m, T] is never stored
    return jnp.minimum(below, last(length)[:, None])


def upper_fired(
    y: Float[Array, "n T"], exits: Int[Array, "n m"], length: Int[Array, " n"], grid: Float[Array, " m"]
) -> Bool[Array, "n m"]:
    """Whether the upper threshold was met at the exit, rather than the trajectory having run out."""
    return (jnp.take_along_axis(y, exits, axis=1) >= grid[None]) & (length > 0)[:, None]


def ramp(c: Array, shift: Array, tokens: Array, budget: ArrayLike) -> Array:
    return jax.nn.sigmoid(c * (tokens - shift * budget))


def gap(lo: Array, hi: Array) -> Array:
    return jnp.where(hi == lo, 0.0, hi - lo)  # lo = hi = -inf switches the schedule off, without a NaN


def level(lo: Array, hi: Array, ramp: Array) -> Array:
    return lo + gap(lo, hi) * ramp


def lower_schedule(
    params: LowerParams, tokens: Num[Array, "n T"], budget: Num[ArrayLike, ""], warmup: Num[ArrayLike, ""] = 200.0
) -> Float[Array, "n m T"]:
    """Threshold below which to give up, ``lo + (hi - lo) / (1 + exp(-c (tokens - shift * budget)))``; -1 in warm-up.

    c = 0 gives the constant ``(lo + hi) / 2``; a large c gives a step at ``shift * budget`` tokens.
    """
    c, shift, lo, hi = (value[None, :, None] for value in params)
    used = tokens[:, None, :].astype(c.dtype)
    return jnp.where(used < warmup, -1.0, level(lo, hi, ramp(c, shift, used, budget)))


def lower_exit(
    y: Float[Array, "n T"],
    length: Int[Array, " n"],
    params: LowerParams,
    tokens: Num[Array, "n T"],
    budget: Num[ArrayLike, ""],
    warmup: Num[ArrayLike, ""] = 200.0,
) -> Int[Array, "n m"]:
    """First checkpoint with ``y <= lower_schedule``, else the last one; warm-up, NaN and padding never fire.

    Goes through the checkpoints from the back, so that no [n, m, T] array exists.
    """
    c, shift, lo, hi = (value[None] for value in params)
    alive = inside(length, y.shape[1]) & (tokens >= warmup)
    live = jnp.where(alive & ~jnp.isnan(y), y, jnp.inf)

    def step(exits, column):
        signal, used, t = column
        fires = signal[:, None] <= level(lo, hi, ramp(c, shift, used[:, None], budget))
        return jnp.where(fires, t, exits), None

    steps = jnp.arange(y.shape[1], dtype=jnp.int32)
    start = jnp.broadcast_to(last(length)[:, None], (y.shape[0], params.c.shape[0]))
    exits, _ = jax.lax.scan(step, start, (live.T, tokens.T.astype(y.dtype), steps), reverse=True)
    return exits


def dual_exit(
    upper: Int[Array, "n m1"], lower: Int[Array, "n m2"], length: Int[Array, " n"]
) -> tuple[Int[Array, "n m"], Int[Array, "n m"]]:
    """Exit and reason of the two rules together: the earlier exit; ``upper`` [n, m] or [n, 1].

    Reason 1 upper, 2 lower, 0 none (ran to its last checkpoint). Reconstruction: both at the same earlier checkpoint
    counts as upper, because an answer is returned.
    """
    exits = jnp.minimum(upper, lower)
    reason = jnp.where(lower < upper, LOWER, UPPER)
    return exits, jnp.where(exits >= last(length)[:, None], NONE, reason)


# --- losses and costs ------------------------------------------------------------------------------------------------


def upper_losses(
    exits: Int[Array, "n m"],
    correct: Bool[Array, "n T"],
    length: Int[Array, " n"],
    fired: Bool[Array, "n m"],
    count_exhausted: bool = False,
) -> Float[Array, "n m"]:
    """Whether a wrong answer was returned: ``1[fired] 1[wrong at the exit]``.

    ``count_exhausted`` leaves out the factor ``1[fired]``: the loss of the authors' code, whose risk cannot fall below
    the error rate at full budget. The paper's loss (the default) costs nothing where no threshold fired.
    """
    wrong = ~jnp.take_along_axis(correct, exits, axis=1) & (length > 0)[:, None]
    return (wrong if count_exhausted else wrong & fired).astype(jnp.float32)


def upper_cost(exits: Int[Array, "n m"], correct: Bool[Array, "n T"], length: Int[Array, " n"]) -> Float[Array, "n m"]:
    """Needless checkpoints as a share: ``max(0, exit - first correct) / length``; 0 where no answer is ever correct.

    Reconstruction: divided by the trajectory's length, as in the reading of the paper; the code leaves that out.
    """
    solved = correct & inside(length, correct.shape[1])
    first = jnp.where(solved.any(1), jnp.argmax(solved, axis=1), correct.shape[1])[:, None]
    return jnp.maximum(exits - first, 0) / jnp.maximum(length, 1)[:, None].astype(jnp.float32)


def lower_loss_table(correct: Array, length: Array, kind: LossKind) -> Float[Array, "n T"]:
    """Loss of giving up at each checkpoint; 0 at the last one, which is not giving up."""
    steps = jnp.arange(correct.shape[1])[None]
    final = last(length)[:, None]
    solved = (correct & inside(length, correct.shape[1])).astype(jnp.float32)
    if kind == "suffix_mean":
        ahead = jnp.flip(jnp.cumsum(jnp.flip(solved, 1), axis=1), 1)
        table = ahead / jnp.maximum(length[:, None] - steps, 1)
    else:
        table = jnp.broadcast_to(jnp.take_along_axis(solved, final, axis=1), correct.shape)
    return jnp.where(steps < final, table, 0.0)


def lower_cost_table(correct: Array, length: Array, kind: CostKind) -> Float[Array, "n T"]:
    steps = jnp.arange(correct.shape[1])
    spent = jnp.cumsum(~correct, axis=1) if kind == "incorrect" else jnp.broadcast_to(steps[None], correct.shape)
    return jnp.where(inside(length, correct.shape[1]), spent / jnp.maximum(length, 1)[:, None].astype(jnp.float32), 0.0)


def lower_losses(
    exits: Int[Array, "n m"], correct: Bool[Array, "n T"], length: Int[Array, " n"], kind: LossKind = "suffix_mean"
) -> Float[Array, "n m"]:
    """What giving up threw away ("farsighted"): the share of correct answers from the exit on; 0 at the last one.

    ``final`` looks at the last answer only (first version of the authors' code). For the dual rule pass the last
    checkpoint as exit where the lower rule did not act.
    """
    return jnp.take_along_axis(lower_loss_table(correct, length, kind), exits, axis=1)


def lower_cost(
    exits: Int[Array, "n m"], correct: Bool[Array, "n T"], length: Int[Array, " n"], kind: CostKind = "incorrect"
) -> Float[Array, "n m"]:
    """Effort spent without an answer: ``#{k <= exit : wrong} / length``, or ``exit / length`` for ``time``."""
    return jnp.take_along_axis(lower_cost_table(correct, length, kind), exits, axis=1)
