"""Choose a threshold whose risk is certified: one hypothesis a candidate, corrected for having looked at many.

The seam of the family is :func:`calibrate`, ``(losses [n, m], cost [n, m], eps, delta) -> Selection``. A bound says
what one candidate's losses prove; a validity rule says which of m candidates may be believed at once.
"""

from functools import partial
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Int, Num

from jaxmeth.risk import bounds
from jaxmeth.types import ConfigError, is_concrete

Bound = Literal["auto", "naive", "crc", "hoeffding", "hoeffding_bentkus", "clopper_pearson", "empirical_bernstein"]
Validity = Literal["pointwise", "suffix", "bonferroni", "split"]

# A count of 0/1 losses comes as a float sum; the slack keeps its rounding from adding an error.
_SLACK = 1e-4


class Summary(NamedTuple):
    """What the rules need of losses [n, m]: per candidate sum, sum of squares, whether any loss is fractional."""

    total: Float[Array, " m"]
    square: Float[Array, " m"]
    fractional: Bool[Array, " m"]
    cost: Float[Array, " m"]
    n: Int[Array, ""]


class Selection(NamedTuple):
    """The chosen candidate. Where none is certified: index -1, feasible False, risk_hat and cost NaN.

    ``bound`` is the chosen candidate's upper bound on the risk; where none is certified, the smallest eps that would be
    feasible on these losses.
    """

    index: Int[Array, ""]
    feasible: Bool[Array, ""]
    risk_hat: Float[Array, ""]
    bound: Float[Array, ""]
    cost: Float[Array, ""]


def fixed_sequence(pvalues: Float[Array, "... m"], delta: Num[ArrayLike, ""]) -> Bool[Array, "... m"]:
    """Fixed-sequence testing from the last hypothesis backwards: rejected until the first p-value above delta.

    Every test has level delta, as no test follows a failure: the family-wise error is at most delta whatever the
    dependence, and no monotonicity is needed. Column m-1 must be the one that is most likely to be rejected.

    Reference: P. Bauer, "Multiple testing in clinical trials" (1991); "Learn then test", arXiv 2110.01052, section 3.
    """
    return _suffix(pvalues <= delta)


def bonferroni(pvalues: Float[Array, "... m"], delta: Num[ArrayLike, ""]) -> Bool[Array, "... m"]:
    """Bonferroni: each of the m hypotheses at level ``delta / m``; any of the rejected may be chosen afterwards."""
    return pvalues <= delta / pvalues.shape[-1]


def _suffix(passed: Bool[Array, "... m"]) -> Bool[Array, "... m"]:
    failures = jnp.cumsum(jnp.flip(~passed, -1).astype(jnp.int32), axis=-1)
    return jnp.flip(failures == 0, -1)


def summarise(losses: Float[Array, "n m"], cost: Float[Array, "n m"]) -> Summary:
    """Sums over the n rows, in float32 (float64 for float64 losses)."""
    dtype = jnp.result_type(jnp.float32, losses.dtype)
    losses, cost = losses.astype(dtype), cost.astype(dtype)
    n = losses.shape[0]
    fractional = jnp.any((losses != 0) & (losses != 1), axis=0)
    mean_cost = cost.sum(0) / max(n, 1)
    return Summary(losses.sum(0), jnp.square(losses).sum(0), fractional, mean_cost, jnp.asarray(n, jnp.int32))


def _count(summary: Summary) -> Array:
    return jnp.ceil(summary.total - _SLACK)


def upper_bounds(summary: Summary, delta: Num[ArrayLike, ""], bound: Bound) -> Float[Array, " m"]:
    """Upper bound on each candidate's risk, each on its own at level delta (``naive``, ``crc``: no level)."""
    n = summary.n
    rhat = summary.total / jnp.maximum(n, 1)
    if bound == "naive":
        return jnp.where(n > 0, rhat, 1.0)
    if bound == "crc":
        return bounds.crc_upper(summary.total, n)
    if bound == "hoeffding":
        return bounds.hoeffding_ucb(rhat, n, delta)
    if bound == "hoeffding_bentkus":
        return bounds.hb_upper(rhat, n, delta)
    if bound == "empirical_bernstein":
        variance = (summary.square - summary.total * rhat) / jnp.maximum(n - 1, 1)
        return bounds.empirical_bernstein_ucb(rhat, variance, n, delta)
    if bound == "auto":
        return bounds.mixed_upper(summary.total, _count(summary), n, delta, summary.fractional)
    exact = bounds.clopper_pearson_upper(jnp.where(summary.fractional, 0.0, _count(summary)), n, delta)
    return jnp.where(summary.fractional, 1.0, exact)


def _passes(summary: Summary, eps: Array, delta: Array, bound: Bound) -> Bool[Array, " m"]:
    """Whether "risk > eps" is rejected, each candidate on its own; the same as ``upper_bounds <= eps`` but cheaper."""
    if bound in ("naive", "crc", "hoeffding", "empirical_bernstein"):
        passed = upper_bounds(summary, delta, bound) <= eps
    else:
        fractional = summary.fractional | (bound == "hoeffding_bentkus")
        pvalue = bounds.mixed_pvalue(summary.total, _count(summary), summary.n, eps, fractional)
        passed = (pvalue <= delta) & ~(summary.fractional & (bound == "clopper_pearson"))
    return passed | (eps >= 1)


def _column(summary: Summary, index: Array) -> Summary:
    return Summary(*[field[index] for field in summary[:4]], summary.n)


def _lowest(summary: Summary, delta: Array, bound: Bound) -> Int[Array, " k"]:
    """Candidates among which the least upper bound is. All but one bound grow with the mean: two inversions, not m."""
    if bound == "empirical_bernstein":
        return jnp.argmin(upper_bounds(summary, delta, bound))[None]
    exact = jnp.argmin(jnp.where(summary.fractional, jnp.inf, summary.total))
    loose = jnp.argmin(jnp.where(summary.fractional, summary.total, jnp.inf))
    return jnp.stack([exact, loose])


def _cheapest(admissible: Array, cost: Array) -> Array:
    return jnp.argmin(jnp.where(admissible, cost, jnp.inf))


def _selection(summary: Summary, index: Array, feasible: Array, reached: Array, needed: Array) -> Selection:
    def only(value):
        return jnp.where(feasible, value, jnp.nan)

    rhat = summary.total[index] / jnp.maximum(summary.n, 1)
    return Selection(
        jnp.where(feasible, index, -1).astype(jnp.int32),
        feasible,
        only(rhat),
        jnp.where(feasible, reached, needed),
        only(summary.cost[index]),
    )


@partial(jax.jit, static_argnames=("bound", "validity"))
def select(
    summary: Summary,
    eps: Num[ArrayLike, ""],
    delta: Num[ArrayLike, ""],
    bound: Bound = "auto",
    validity: Validity = "suffix",
) -> Selection:
    """:func:`calibrate` from sums, for those who stream the losses; for ``split`` see :func:`select_split`.

    Checks no value.
    """
    m = summary.total.shape[0]
    eps = jnp.asarray(eps, summary.total.dtype)
    level = jnp.asarray(delta, summary.total.dtype) / (m if validity == "bonferroni" else 1)
    passed = _passes(summary, eps, level, bound)
    admissible = _suffix(passed) if validity == "suffix" else passed
    index = _cheapest(admissible, summary.cost)
    lowest = jnp.asarray([m - 1]) if validity == "suffix" else _lowest(summary, level, bound)
    upper = upper_bounds(_column(summary, jnp.concatenate([index[None], lowest])), level, bound)
    return _selection(summary, index, jnp.any(admissible), upper[0], upper[1:].min())


@partial(jax.jit, static_argnames=("bound",))
def select_split(
    choose: Summary, certify: Summary, eps: Num[ArrayLike, ""], delta: Num[ArrayLike, ""], bound: Bound = "auto"
) -> Selection:
    """:func:`calibrate` with validity ``split`` from the sums of its two halves. Checks no value."""
    eps, delta = (jnp.asarray(value, choose.total.dtype) for value in (eps, delta))
    first, second = upper_bounds(choose, delta, bound), upper_bounds(certify, delta, bound)
    index = _cheapest(first <= eps, choose.cost)
    feasible = (first[index] <= eps) & (second[index] <= eps)
    # The choice changes with eps only where another candidate enters, at its own first bound: walk through those.
    order = jnp.argsort(first, stable=True)
    entry = first[order]

    def better(left, right):
        take = (right[0] < left[0]) | ((right[0] == left[0]) & (right[1] < left[1]))
        return jnp.where(take, right[0], left[0]), jnp.where(take, right[1], left[1])

    _, chosen = jax.lax.associative_scan(better, (choose.cost[order], order))
    needed = jnp.maximum(entry, second[chosen])
    following = jnp.concatenate([entry[1:], jnp.full((1,), jnp.inf, entry.dtype)])
    needed = jnp.min(jnp.where((needed < following) & (needed > eps), needed, 1.0))
    return _selection(certify, index, feasible, second[index], needed)


@jax.jit
def _irregular(losses: Array, cost: Array) -> tuple[Array, Array]:
    return jnp.any(~((losses >= 0) & (losses <= 1))), jnp.any(~jnp.isfinite(cost))


def check_levels(eps: Num[ArrayLike, "..."], delta: Num[ArrayLike, "..."]) -> None:
    """Raise ``ConfigError`` for a readable eps that is not positive or a readable delta outside (0, 1)."""
    bounds.check_probability("eps", eps, closed_above=True)
    bounds.check_probability("delta", delta)


def check(losses: Array, cost: Array, eps: ArrayLike, delta: ArrayLike, bound: str, validity: str) -> None:
    """Raise ``ConfigError`` for what :func:`calibrate` refuses; losses and costs [..., n, m]."""
    if bound not in get_args(Bound):
        raise ConfigError(f"bound: found {bound!r}, expected one of {', '.join(get_args(Bound))}")
    if validity not in get_args(Validity):
        raise ConfigError(f"validity: found {validity!r}, expected one of {', '.join(get_args(Validity))}")
    if losses.shape != cost.shape or losses.shape[-1] == 0:
        raise ConfigError(f"losses, cost: found shapes {losses.shape}, {cost.shape}, expected equal [n, m] with m > 0")
    check_levels(eps, delta)
    outside, unbounded = _irregular(losses, cost)
    if is_concrete(outside):
        if outside:
            raise ConfigError(f"losses: found values in [{losses.min()}, {losses.max()}], expected all in [0, 1]")
        if unbounded:
            raise ConfigError("cost: found a value that is not finite, expected finite costs")


def calibrate(
    losses: Float[Array, "n m"],
    cost: Float[Array, "n m"],
    eps: Num[ArrayLike, ""],
    delta: Num[ArrayLike, ""],
    bound: Bound = "auto",
    validity: Validity = "suffix",
) -> Selection:
    """The cheapest of m candidates whose risk is at most eps with probability at least ``1 - delta``.

    A candidate is admissible if "risk > eps" is rejected by the bound under the validity rule; among the admissible the
    least mean cost wins, the first of equals. n counts independent rows (trajectories, items), never candidates.

    Args:
      losses: in [0, 1]; columns are candidates, with column m-1 the strictest (sort the grid upwards).
      cost: finite, any unit.
      eps: tolerated risk, positive; from 1 on every candidate is admissible. Map over it with ``vmap``.
      delta: in (0, 1).
      bound: ``auto`` is Clopper-Pearson for a column of zeros and ones and Hoeffding-Bentkus for a fractional one
        (which ``clopper_pearson`` never certifies);
        ``naive`` compares the mean and guarantees nothing; ``crc`` controls the expected risk only, and only for a loss
        monotone in the threshold; both ignore delta.
      validity: ``suffix`` also requires every stricter candidate to pass (fixed-sequence testing); ``bonferroni`` tests
        at ``delta / m``, for candidates without an order; ``split`` chooses on the first half of the rows, each
        candidate on its own, and certifies that one on the second half (shuffle the rows first if they have an
        order); ``pointwise`` takes each candidate on its own: a guarantee only where the risk is monotone and the
        costs fall with the threshold, kept to reproduce the authors' rule.

    Returns:
      A ``Selection``; infeasible is index -1 with ``bound`` the smallest eps that would do: no threshold is returned.
      n = 0 proves nothing: infeasible with bound 1 (unless eps >= 1). Ties count as within eps.

    Raises:
      ConfigError: a loss outside [0, 1] or NaN, a cost not finite, eps <= 0, delta outside (0, 1), no candidate,
        unequal shapes, an unknown rule. Under ``jit`` traced values are not checked.

    Reference: "Conformal Thinking", arXiv 2602.03814, and its code (rules naive, CRC, UCB; the code takes the number of
    grid points for n); "Learn then test", arXiv 2110.01052. Reconstruction: suffix, Bonferroni and split validity.
    """
    check(losses, cost, eps, delta, bound, validity)
    dtype = jnp.result_type(jnp.float32, losses.dtype)
    eps, delta = jnp.asarray(eps, dtype), jnp.asarray(delta, dtype)  # a float and an array then compile once
    if validity != "split":
        return select(_summarise(losses, cost), eps, delta, bound, validity)
    half = losses.shape[0] // 2
    choose, certify = _summarise(losses[:half], cost[:half]), _summarise(losses[half:], cost[half:])
    return select_split(choose, certify, eps, delta, bound)


_summarise = jax.jit(summarise)
