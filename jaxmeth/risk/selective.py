"""Accept where confidence is high enough that errors are rare, with a guarantee; hand on the rest.

Fixed-sequence testing over a descending grid of thresholds, cascades of it, and what a threshold achieves. Public for
judges as ``uncertainty.judge``.

Reference: J. Jung et al., "Trust or Escalate: LLM Judges with Provable Guarantees for Human Agreement" (2025), and its
public code (``compat``).
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Int, Num

from jaxmeth.risk.bounds import clopper_pearson_upper
from jaxmeth.risk.testing import check_levels, fixed_sequence
from jaxmeth.types import ConfigError, is_concrete

GRID_POINTS = 5000


class Threshold(NamedTuple):
    """``lam`` accepts ``conf >= lam``; +inf accepts nothing. Per grid point the bound on the error and the count."""

    lam: Float[Array, ""]
    upper: Float[Array, " g"]
    count: Int[Array, " g"]


class Selective(NamedTuple):
    """Share accepted, agreement among the accepted (NaN where none is), number accepted."""

    coverage: Float[Array, ""]
    agreement: Float[Array, ""]
    count: Int[Array, ""]


def _default_grid(dtype: jnp.dtype) -> Array:
    return jnp.linspace(0.0, 1.0, GRID_POINTS, dtype=dtype)


def _check(error: Array, grid: Array, alpha: ArrayLike, delta: ArrayLike, min_count: int) -> None:
    check_levels(alpha, delta)
    if min_count < 1:
        raise ConfigError(f"min_count: found {min_count}, expected at least 1")
    if is_concrete(error) and not np.isin(np.asarray(error), (0, 1)).all():
        raise ConfigError("error: found a value other than 0 and 1, expected the disagreements as 0/1")
    if is_concrete(grid) and (np.diff(np.asarray(grid)) < 0).any():
        raise ConfigError("grid: found a decreasing step, expected thresholds sorted upwards")


def fixed_sequence_test(
    conf: Float[Array, " n"],
    error: Num[Array, " n"] | Bool[Array, " n"],
    alpha: Num[ArrayLike, ""],
    delta: Num[ArrayLike, ""],
    grid: Float[Array, " g"] | None = None,
    min_count: int = 30,
    compat: bool = False,
) -> Threshold:
    """The least threshold that is certified: ``inf{lam : Rplus(lam') <= alpha for all lam' >= lam on the grid}``.

    ``Rplus(lam)`` is the one-sided Clopper-Pearson bound at level delta on the error rate of the items with
    ``conf >= lam``. Then ``P(P(error | conf >= lam) <= alpha) >= 1 - delta`` for exchangeable items that had no part in
    training the confidence. The tests go down from the strictest threshold with ``min_count`` items and stop at the
    first failure; where they START matters for power, so fix ``min_count`` in advance and do not tune it on this data.

    Args:
      conf: confidences; NaN is never accepted.
      error: 1 where judge and human disagree. alpha: tolerated error rate, positive. delta: in (0, 1).
      grid: sorted upwards; default 5,000 points on [0, 1].
      compat: reproduce the public code: it looks ahead at ``lam - 1/len(grid)``, returns the first threshold from the
        strictest down whose look-ahead fails, and returns the strictest where that fails itself (no guarantee).

    Returns:
      A ``Threshold``, ``lam = +inf`` where nothing is certified (also for fewer than ``min_count`` items, and n = 0).

    Raises:
      ConfigError: alpha <= 0, delta outside (0, 1), min_count < 1, an error that is not 0/1, an unsorted grid.
    """
    dtype = jnp.result_type(jnp.float32, conf.dtype)
    conf = jnp.where(jnp.isnan(conf), -jnp.inf, conf).astype(dtype)
    grid = _default_grid(dtype) if grid is None else grid
    _check(error, grid, alpha, delta, min_count)
    n = conf.shape[0]
    order = jnp.argsort(-conf, stable=True)
    ranked = -conf[order]
    errors = jnp.concatenate([jnp.zeros(1, dtype), jnp.cumsum(error[order].astype(dtype))])

    def accepted(points: Array) -> Array:
        return jnp.searchsorted(ranked, -points, side="right").astype(jnp.int32)

    # There are at most n + 1 different counts: with few items, invert once for each of those.
    few = n + 1 < grid.shape[0]
    table = clopper_pearson_upper(errors, jnp.arange(n + 1), delta) if few else None

    def upper_at(count: Array) -> Array:
        return table[count] if few else clopper_pearson_upper(errors[count], count, delta)

    count = accepted(grid)
    upper = upper_at(count)
    sparse = count < min_count
    if compat:
        ahead = upper_at(accepted(grid - 1.0 / grid.shape[0]))
        strictest = ~sparse & (jnp.cumsum(jnp.flip(~sparse)) == 1)[::-1]
        stops = ((ahead > alpha) & ~sparse) | ((upper > alpha) & strictest)
        last = jnp.where(stops.any(), grid.shape[0] - 1 - jnp.argmax(jnp.flip(stops)), 0)
        lam = jnp.where(sparse.all(), jnp.inf, grid[last])
    else:
        certified = fixed_sequence(jnp.where(sparse, -jnp.inf, upper), alpha) & ~sparse
        lam = jnp.where(certified.any(), grid[jnp.argmax(certified)], jnp.inf)
    return Threshold(lam, upper, count)


def cascade_calibrate(
    judges: Sequence[tuple[Float[Array, " n"], Num[Array, " n"] | Bool[Array, " n"]]],
    alpha: Num[ArrayLike, ""],
    delta: Num[ArrayLike, ""],
    grid: Float[Array, " g"] | None = None,
    min_count: int = 30,
) -> Float[Array, " J"]:
    """Thresholds of judges in order of cost: judge j is calibrated on the items that 1..j-1 did not accept.

    A judge that certifies nothing gets +inf, and the next one sees the same items. The error of each judge is held at
    level delta; all J together, by the union bound, with probability at least ``1 - J delta``.

    Args:
      judges: (confidence, 0/1 error) of each judge on the same n items.
    """
    if not judges:
        raise ConfigError("judges: found none, expected at least one (confidence, error) pair")
    open_items = jnp.ones(judges[0][0].shape, bool)
    thresholds = []
    for conf, error in judges:
        lam = fixed_sequence_test(jnp.where(open_items, conf, jnp.nan), error, alpha, delta, grid, min_count).lam
        open_items = open_items & ~(conf >= lam)
        thresholds.append(lam)
    return jnp.stack(thresholds)


def cascade_apply(confs: Sequence[Float[Array, " n"]], lams: Float[Array, " J"]) -> Int[Array, " n"]:
    """The first judge whose confidence reaches its threshold, or -1: nobody is sure, ask a person."""
    accepts = jnp.stack([conf >= lam for conf, lam in zip(confs, lams, strict=True)])
    return jnp.where(accepts.any(0), jnp.argmax(accepts, axis=0), -1).astype(jnp.int32)


def selective(
    conf: Float[Array, " n"], agree: Num[Array, " n"] | Bool[Array, " n"], lam: Num[ArrayLike, ""]
) -> Selective:
    """What accepting ``conf >= lam`` achieves on labelled items."""
    accepted = conf >= lam
    count = accepted.sum()
    right = jnp.sum(accepted * agree.astype(conf.dtype))
    agreement = jnp.where(count > 0, right / jnp.maximum(count, 1), jnp.nan)
    return Selective(count / max(conf.shape[0], 1), agreement, count)
