"""Reasoning budgets with controlled risk: when to stop because sure, and when to give up because progress is too slow.

:func:`calibrate_budget` turns labelled trajectories and a tolerated error rate into a :class:`Policy`;
:func:`stop_step` and :func:`observe` run that policy while a model generates. Exits, losses and costs of given
thresholds come from ``risk.trajectories`` and are public here too.

Reference: "Conformal Thinking: Risk Control for Reasoning on a Compute Budget", arXiv 2602.03814, and its public code.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Int, Num

from jaxmeth.risk import testing
from jaxmeth.risk import trajectories as _trajectories
from jaxmeth.risk.trajectories import LOWER as LOWER
from jaxmeth.risk.trajectories import NONE as NONE
from jaxmeth.risk.trajectories import UPPER as UPPER
from jaxmeth.risk.trajectories import CostKind as CostKind
from jaxmeth.risk.trajectories import LossKind as LossKind
from jaxmeth.risk.trajectories import LowerParams as LowerParams
from jaxmeth.risk.trajectories import dual_exit as dual_exit
from jaxmeth.risk.trajectories import ema as ema
from jaxmeth.risk.trajectories import ema_debiased as ema_debiased
from jaxmeth.risk.trajectories import emv_confidence as emv_confidence
from jaxmeth.risk.trajectories import lower_cost as lower_cost
from jaxmeth.risk.trajectories import lower_exit as lower_exit
from jaxmeth.risk.trajectories import lower_grid as lower_grid
from jaxmeth.risk.trajectories import lower_losses as lower_losses
from jaxmeth.risk.trajectories import lower_schedule as lower_schedule
from jaxmeth.risk.trajectories import upper_cost as upper_cost
from jaxmeth.risk.trajectories import upper_exit as upper_exit
from jaxmeth.risk.trajectories import upper_fired as upper_fired
from jaxmeth.risk.trajectories import upper_losses as upper_losses
from jaxmeth.types import ConfigError, Observe, StepInfo, is_concrete

_BLOCK = 32


class Policy(NamedTuple):
    """A stopping rule for one generation: thresholds on the smoothed signal. Scalars; +inf and -inf never fire."""

    upper: Float[Array, ""]
    c: Float[Array, ""]
    shift: Float[Array, ""]
    lo: Float[Array, ""]
    hi: Float[Array, ""]
    budget: Float[Array, ""]
    warmup: Float[Array, ""]
    alpha: Float[Array, ""]


class BudgetCalibration(NamedTuple):
    """Result of :func:`calibrate_budget`: the policy, both selections, and the upper risk once the lower rule acts.

    ``dual_risk`` and ``dual_bound`` are the mean and upper bound (at the upper delta) of the upper loss under the final
    dual rule. ``count_exhausted`` says which upper loss was used; ``confidence`` is one minus both deltas.
    """

    policy: Policy
    upper: testing.Selection
    lower: testing.Selection
    dual_risk: Float[Array, ""]
    dual_bound: Float[Array, ""]
    confidence: Float[Array, ""]
    count_exhausted: bool


# --- calibration -----------------------------------------------------------------------------------------------------


def lower_summary(
    y: Float[Array, "n T"],
    correct: Bool[Array, "n T"],
    length: Int[Array, " n"],
    tokens: Num[Array, "n T"],
    params: LowerParams,
    budget: Num[ArrayLike, ""],
    *,
    stop: Int[Array, " n"] | None = None,
    warmup: Num[ArrayLike, ""] = 200.0,
    kind: LossKind = "suffix_mean",
    cost_kind: CostKind = "incorrect",
    levels: int = 1,
) -> testing.Summary:
    """Sums over trajectories of the lower loss and cost of every schedule, for ``testing.select``.

    The same as summarising ``lower_losses`` and ``lower_cost`` at the dual exit, but one trajectory at a time: memory
    is O(m), neither [n, m] nor [n, m, T] exists, and no gather is needed, as going through the checkpoints from the
    back carries the loss and the cost of the earliest that fires.

    Args:
      stop: the exits of an upper rule fixed before; the lower rule must be strictly earlier. None: no upper rule.
      levels: how many consecutive candidates share c and shift (``lower_grid`` gives ``len(lo) * len(hi)``), whose
        logistic ramp is then computed once. 1 is right for any candidates.

    Raises:
      ConfigError: levels does not divide the candidates, or readable candidates of one run differ in c or shift.
    """
    m = params.c.shape[0]
    if levels < 1 or m % levels:
        raise ConfigError(f"levels: found {levels}, expected a divisor of the {m} candidates")
    for name, value in (("c", params.c), ("shift", params.shift)):
        if levels > 1 and is_concrete(value):
            runs = np.asarray(value).reshape(-1, levels)
            if (runs != runs[:, :1]).any():
                raise ConfigError(f"levels: found different {name} within a run of {levels}, expected equal ones")
    stop = _trajectories.last(length) if stop is None else stop
    return _lower_summary(y, correct, length, tokens, params, budget, stop, warmup, kind, cost_kind, levels)


@partial(jax.jit, static_argnames=("kind", "cost_kind", "levels"))
def _lower_summary(y, correct, length, tokens, params, budget, stop, warmup, kind, cost_kind, levels):
    n, steps = y.shape
    # Levels lie outside, runs inside: the long axis is the contiguous one, and a ramp is shared by all its levels.
    lo, hi = params.lo.reshape(-1, levels).T, params.hi.reshape(-1, levels).T
    slope, shift = params.c[::levels], params.shift[::levels]
    rise = _trajectories.gap(lo, hi)
    alive = jnp.arange(steps)[None] < jnp.minimum(stop, _trajectories.last(length))[:, None]
    alive = alive & (tokens >= warmup) & ~jnp.isnan(y)
    loss = _trajectories.lower_loss_table(correct, length, kind)
    cost = _trajectories.lower_cost_table(correct, length, cost_kind)
    unfired = jnp.take_along_axis(cost, jnp.minimum(stop, _trajectories.last(length))[:, None], axis=1)[:, 0]
    rows = (jnp.where(alive, y, jnp.inf), tokens.astype(lo.dtype), loss, cost, unfired)
    # Rows that fill the last block cost nothing and never fire. Sums of blocks keep float32 sums accurate.
    spare = -n % _BLOCK
    rows = [jnp.pad(row, [(0, spare)] + [(0, 0)] * (row.ndim - 1)) for row in rows]
    rows = [row.reshape(-1, _BLOCK, *row.shape[1:]) for row in rows]

    def one(sums, row):
        signal, used, loss, cost, unfired = row
        ramp = _trajectories.ramp(slope[None], shift[None], used[:, None], budget)

        def earlier(carry, column):
            ramp, signal, loss, cost = column
            fires = signal <= lo + rise * ramp[None]
            return (jnp.where(fires, loss, carry[0]), jnp.where(fires, cost, carry[1])), None

        start = (jnp.zeros_like(lo), jnp.full_like(lo, unfired))
        (loss, cost), _ = jax.lax.scan(earlier, start, (ramp, signal, loss, cost), reverse=True, unroll=12)
        total, spread, spent = sums
        # loss (1 - loss) is exactly 0 for 0 and 1, so its sum says whether any loss was fractional.
        return (total + loss, spread + loss * (1.0 - loss), spent + cost), None

    nothing = (jnp.zeros_like(lo),) * 3

    def block(sums, rows):
        part, _ = jax.lax.scan(one, nothing, rows)
        return jax.tree.map(jnp.add, sums, part), None

    sums, _ = jax.lax.scan(block, nothing, tuple(rows))
    total, spread, spent = (value.T.ravel() for value in sums)
    return testing.Summary(total, total - spread, spread > 0, spent / max(n, 1), jnp.asarray(n, jnp.int32))


def calibrate_ensemble(
    losses: Float[Array, "s n m"],
    cost: Float[Array, "s n m"],
    eps: Num[ArrayLike, ""],
    delta: Num[ArrayLike, ""],
    bound: testing.Bound = "auto",
    validity: testing.Validity = "suffix",
) -> tuple[Int[Array, ""], testing.Selection]:
    """The cheapest certified (signal, threshold) of s signals: each signal is calibrated at level ``delta / s``.

    The union bound over the signals pays for choosing among them; one signal is :func:`testing.calibrate`. Infeasible:
    signal -1 and the smallest eps that would do for any signal.
    """
    testing.check(losses, cost, eps, delta, bound, validity)
    one = partial(testing.calibrate, eps=eps, delta=delta / losses.shape[0], bound=bound, validity=validity)
    stacked = jax.vmap(one)(losses, cost)
    feasible = stacked.feasible.any()
    signal = jnp.where(
        feasible, jnp.argmin(jnp.where(stacked.feasible, stacked.cost, jnp.inf)), jnp.argmin(stacked.bound)
    )
    return jnp.where(feasible, signal, -1).astype(jnp.int32), jax.tree.map(lambda value: value[signal], stacked)


def _check_trajectories(signal: Array, correct: Array, length: Array, tokens: Array) -> None:
    if not signal.shape == correct.shape == tokens.shape or length.shape != signal.shape[:1]:
        found = f"{signal.shape}, {correct.shape}, {tokens.shape}, {length.shape}"
        raise ConfigError(f"signal, correct, tokens, length: found {found}, expected equal [n, T] and [n]")
    if is_concrete(length):
        values = np.asarray(length)
        wrong = np.flatnonzero((values < 1) | (values > signal.shape[1]))
        if wrong.size:
            i = wrong[0]
            raise ConfigError(f"length: found {values[i]} at row {i}, expected 1 to {signal.shape[1]} checkpoints")


def calibrate_budget(
    signal: Float[Array, "n T"],
    correct: Bool[Array, "n T"],
    length: Int[Array, " n"],
    tokens: Num[Array, "n T"],
    grid: Float[Array, " m"],
    params: LowerParams,
    *,
    budget: float,
    eps_upper: float,
    eps_lower: float,
    delta_upper: float = 0.05,
    delta_lower: float = 0.05,
    alpha: float = 1.0,
    warmup: float = 200.0,
    bound: testing.Bound = "auto",
    upper_validity: testing.Validity = "suffix",
    lower_validity: testing.Validity = "bonferroni",
    count_exhausted: bool = False,
    kind: LossKind = "suffix_mean",
    levels: int = 1,
) -> BudgetCalibration:
    """Two-stage calibration: first the upper threshold at ``eps_upper``, then the lower schedule at ``eps_lower``.

    The lower loss is that of the dual rule with the upper threshold fixed. By the union bound both risks hold together
    with probability at least ``1 - delta_upper - delta_lower``. A stage that is infeasible never stops: its threshold
    is infinite, and its ``Selection`` carries the smallest eps that would do.

    Args:
      signal: raw confidence; smoothed by :func:`ema` with ``alpha``. NaN does not fire.
      tokens: cumulative. budget: tokens at full budget.
      grid: upper thresholds, sorted upwards. params: lower candidates; levels as in :func:`lower_summary`.

    Raises:
      ConfigError: shapes that differ, a trajectory without checkpoints or longer than T, a grid that is not sorted, and
        all that :func:`testing.calibrate` refuses; ``lower_validity="split"`` (the streamed search has no rows).

    Reference: arXiv 2602.03814 (two-stage procedure, by a reading note). Reconstruction: validity and bounds.
    """
    _check_trajectories(signal, correct, length, tokens)
    if lower_validity == "split":
        raise ConfigError("lower_validity: found 'split', expected pointwise, suffix or bonferroni")
    if is_concrete(grid) and (np.diff(np.asarray(grid)) < 0).any():
        raise ConfigError("grid: found a decreasing step, expected thresholds sorted upwards")
    testing.check_levels(eps_lower, delta_lower)
    y = ema(signal, length, alpha)
    exits = upper_exit(y, length, grid)
    fired = upper_fired(y, exits, length, grid)
    losses = upper_losses(exits, correct, length, fired, count_exhausted)
    cost = upper_cost(exits, correct, length)
    upper = testing.calibrate(losses, cost, eps_upper, delta_upper, bound, upper_validity)
    threshold = jnp.where(upper.feasible, grid[upper.index], jnp.inf)

    stop = upper_exit(y, length, threshold[None])
    summary = lower_summary(
        y, correct, length, tokens, params, budget, stop=stop[:, 0], warmup=warmup, kind=kind, levels=levels
    )
    lower = testing.select(summary, eps_lower, delta_lower, bound, lower_validity)
    off = LowerParams(0.0, 0.0, -jnp.inf, -jnp.inf)
    chosen = [jnp.where(lower.feasible, value[lower.index], none) for value, none in zip(params, off, strict=True)]
    scalars = [jnp.asarray(value, y.dtype) for value in (budget, warmup, alpha)]
    policy = Policy(threshold, *chosen, *scalars)

    late = lower_exit(y, length, LowerParams(*[value[None] for value in chosen]), tokens, budget, warmup)
    dual = jnp.minimum(stop, late)
    fired = upper_fired(y, dual, length, threshold[None]) & (stop <= late)
    dual_losses = upper_losses(dual, correct, length, fired, count_exhausted)
    dual_summary = testing.summarise(dual_losses, jnp.zeros_like(dual_losses))
    dual_bound = testing.upper_bounds(dual_summary, delta_upper, bound)[0]
    confidence = jnp.asarray(1.0 - delta_upper - delta_lower, y.dtype)
    return BudgetCalibration(policy, upper, lower, dual_losses.mean(), dual_bound, confidence, count_exhausted)


# --- online ----------------------------------------------------------------------------------------------------------


class StopState(NamedTuple):
    """What the online rule remembers between checkpoints; any batch shape."""

    ema: Float[Array, "*b"]
    started: Bool[Array, "*b"]


def stop_init(shape: tuple[int, ...] = ()) -> StopState:
    """State before the first checkpoint, for one sequence or a batch of shape ``shape``."""
    return StopState(jnp.zeros(shape, jnp.float32), jnp.zeros(shape, bool))


def stop_step(
    state: StopState, signal: Float[Array, "*b"], tokens: Num[Array, "*b"], policy: Policy
) -> tuple[StopState, Int[Array, "*b"]]:
    """One checkpoint: ``action`` 0 continue, 1 stop confident, 2 stop hopeless; the online form of the batch exits.

    ``signal`` is raw (smoothed here), ``tokens`` cumulative. A NaN signal continues. Both rules at once stop confident.
    """
    value, started = _trajectories.smooth(state.ema, state.started, signal, policy.alpha)
    used = jnp.asarray(tokens, value.dtype)
    ramp = _trajectories.ramp(policy.c, policy.shift, used, policy.budget)
    low = _trajectories.level(policy.lo, policy.hi, ramp)
    seen = ~jnp.isnan(signal)
    sure = seen & (value >= policy.upper)
    hopeless = seen & (used >= policy.warmup) & (value <= low)
    action = jnp.where(sure, UPPER, jnp.where(hopeless, LOWER, NONE)).astype(jnp.int32)
    return StopState(value, started), action


class ObserveState(NamedTuple):
    """Carry of :func:`observe`: rule, tokens so far, signal gathered since the last checkpoint, final action."""

    stop: StopState
    tokens: Int[Array, " B"]
    gathered: Float[Array, " B"]
    action: Int[Array, " B"]


def observe_init(batch: int) -> ObserveState:
    """Carry to start ``models.generate(..., observe=..., carry=observe_init(B))`` with."""
    count = jnp.zeros((batch,), jnp.int32)
    return ObserveState(stop_init((batch,)), count, jnp.zeros((batch,), jnp.float32), count)


def token_certainty(info: StepInfo) -> Float[Array, " B"]:
    """``1 - entropy`` of the token's distribution in nats, the signal of the authors' code; may be negative."""
    return 1.0 - info.entropy


def observe(
    policy: Policy, signal: Callable[[StepInfo], Float[Array, " B"]] = token_certainty, every: int = 1
) -> Observe:
    """A policy as an observer of the generation loop: each row stops by itself, inside the compiled loop.

    A checkpoint comes every ``every`` tokens; its signal is the mean over the tokens since the last one. ``action`` of
    the final carry says why a row stopped: 0 not by the policy, 1 confident, 2 hopeless.

    Raises:
      ConfigError: every < 1.
    """
    if every < 1:
        raise ConfigError(f"every: found {every}, expected at least 1 token between checkpoints")

    def step(carry: ObserveState, info: StepInfo) -> tuple[ObserveState, Bool[Array, " B"]]:
        tokens = carry.tokens + info.active
        gathered = jnp.where(info.active, carry.gathered + signal(info), carry.gathered)
        due = info.active & (tokens % every == 0)
        state, action = stop_step(carry.stop, gathered / every, tokens, policy)
        state = jax.tree.map(lambda new, old: jnp.where(due, new, old), state, carry.stop)
        action = jnp.where(due, action, carry.action)
        gathered = jnp.where(due, 0.0, gathered)
        return ObserveState(state, tokens, gathered, action), action != NONE

    return step
