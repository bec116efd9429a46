"""Intervals of a fit: resampled tables refitted as one more batch."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from jaxmeth.scaling.fit import FitResult, Points, arrays, in_units, predict, search, tabulate
from jaxmeth.scaling.laws import ScalingLaw
from jaxmeth.scaling.shannon import Real
from jaxmeth.types import ConfigError

_JITTER = 0.3


class Bootstrap(NamedTuple):
    """Refits of R resampled tables; hand it to :func:`predict` like a result for predictions [R, ...]."""

    params: Any
    theta: Float[Array, "R p"]
    converged: Bool[Array, " R"]
    scale: Float[Array, "2"]
    units: Float[Array, "2"]
    """n0 and d0, the units of ``params``."""
    law: ScalingLaw
    """The law with its gauge and constants fixed; static."""


@partial(jax.jit, static_argnames=("resamples", "count"))
def _resample(rng, groups, resamples, count):
    """How often each point is drawn in each resample, [R, n]."""
    drawn = jax.random.randint(rng, (resamples, count), 0, count)
    return jax.vmap(lambda row: jnp.zeros(count, jnp.float32).at[row].add(1.0))(drawn)[:, groups]


def bootstrap(
    result: FitResult,
    n: Points,
    d: Points,
    y: Points,
    *,
    rng: PRNGKeyArray,
    x: Points | None = None,
    weights: Points | None = None,
    groups: Points | None = None,
    resamples: int = 200,
    lanes: int = 4,
    objective: str = "mse",
    huber: float = 1e-3,
    steps: int = 200,
) -> Bootstrap:
    """Refit resampled tables, all in one batch, from the fit and from ``lanes - 1`` points around it.

    Points are resampled with replacement, or whole ``groups`` (integers [n]): checkpoints of one training run are not
    independent, so give its index. ``n, d, y, x, weights`` and the objective are those of the fit. Consumes ``rng``.
    Reference: Efron and Tibshirani, "An Introduction to the Bootstrap", chapter 6.

    Not under ``jit``: how many are drawn depends on the data.

    Raises: ConfigError where ``resamples`` or ``lanes`` is below 1, a shape differs, or fewer than two can be drawn.
    """
    for name, count in (("resamples", resamples), ("lanes", lanes)):
        if count < 1:
            raise ConfigError(f"{name}: found {count}, expected at least 1")
    n, d, y, weights, x = arrays(n, d, y, weights, x)
    groups = np.arange(len(y)) if groups is None else np.asarray(groups)
    if groups.shape != y.shape:
        raise ConfigError(f"groups: found shape {groups.shape}, expected {y.shape}")
    # Points of weight 0 are no part of the sample, so they are not drawn.
    used = np.asarray(weights) > 0
    index, count = np.zeros(len(y), int), 0
    if used.any():
        labels, index[used] = np.unique(groups[used], return_inverse=True)
        count = len(labels)
    if count < 2:
        raise ConfigError(f"groups: found {count} with points of weight above 0, expected at least 2 to draw from")
    law, table = result.law, tabulate(n, d, y, weights, x)
    draw_key, start_key = jax.random.split(rng)
    counts = _resample(draw_key, jnp.asarray(index), resamples, count).astype(y.dtype) * weights[None]
    noise = _JITTER * jax.random.normal(start_key, (resamples, lanes, len(result.theta)), y.dtype)
    start = (result.theta[None, None] + noise.at[:, 0].set(0.0)).reshape(resamples * lanes, -1)
    found = search(
        law, table, start, jnp.repeat(counts, lanes, axis=0), objective=objective, huber=huber, steps=steps,
        with_x=x is not None,
    )  # fmt: skip
    best = jnp.argmin(found.value.reshape(resamples, lanes), axis=1) + lanes * jnp.arange(resamples)
    theta = found.theta[best]
    log_units = jnp.log(result.units) - jnp.log(table.scale)
    params = jax.vmap(lambda t: in_units(law, t, log_units))(theta)
    return Bootstrap(params, theta, found.converged[best], table.scale, result.units, law)


@partial(jax.jit, static_argnames=("level",))
def intervals(boot: Bootstrap, level: float = 0.95):
    """Percentile intervals (low, high) of the parameters, over the refits that converged; NaN where none did."""
    return tuple(
        jax.tree.map(lambda v, q=q: jnp.nanquantile(jnp.where(boot.converged, v, jnp.nan), q), boot.params)
        for q in ((1 - level) / 2, (1 + level) / 2)
    )


@partial(jax.jit, static_argnames=("level",))
def predict_interval(
    boot: Bootstrap, n: Real, d: Real, x: Real | None = None, level: float = 0.95
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """Percentile interval (low, high) of the predicted loss, of the law's curve and not of a new noisy point."""
    values = predict(boot, n, d, x)
    keep = boot.converged.reshape((-1,) + (1,) * (values.ndim - 1))
    return tuple(
        jnp.nanquantile(jnp.where(keep, values, jnp.nan), q, axis=0) for q in ((1 - level) / 2, (1 + level) / 2)
    )
