"""One fit for every scaling law: many random starts at once, and a bootstrap as one more batch.

    result = scaling.fit(scaling.SHANNON, n, d, loss, rng=jax.random.key(0))
    scaling.predict(result, 12e9, 300e9)

Sizes are plain counts; parameters are given for N/n0 and D/d0 (1e9 each). Inside, sizes are divided by their geometric
means, so that raw counts and billions fit alike. Everything runs in float32, or in float64 where 64-bit types are on
(``with jax.enable_x64(True)``) and the data are float64: the Shannon law has flat valleys, so prefer that.
"""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Int, PRNGKeyArray, Shaped

from jaxmeth.scaling import levenberg
from jaxmeth.scaling.checks import check_points
from jaxmeth.scaling.laws import ScalingLaw
from jaxmeth.scaling.shannon import Log, Real, floats
from jaxmeth.types import ConfigError, is_concrete

Points = Shaped[ArrayLike, "..."]
"""One number a data point, [n]; shapes are checked with a message of their own."""

_LOG_BOUND = 40.0
_EXPONENT_BOUND = 5.0
_SCREEN_STEPS, _SCREEN_ROWS = 20, 64
_KEEP, _ENOUGH = 16, 0.75
_NEAR = 1.01


class FitResult(NamedTuple):
    """A fitted law. ``spread``, ``near`` say how well the data pin the parameters down, ``at_bound`` which ran away."""

    params: Any
    """The law's parameters for N/n0 and D/d0 (they may overflow in odd units; ``theta`` does not)."""
    sse: Float[Array, ""]
    """Weighted sum of squared errors of the loss."""
    r2: Float[Array, ""]
    """1 - SSE/SST over the fitted points."""
    value: Float[Array, ""]
    """What was minimised: sse / 2 in units of the squared mean loss, or the Huber sum of log errors."""
    converged: Bool[Array, ""]
    """Whether the best start converged to a finite value."""
    near: Int[Array, ""]
    """Starts that ended within 1 % of the best value."""
    spread: Any
    """Largest minus smallest of each parameter over those starts (coefficients: of their logs); 0 = pinned down."""
    at_bound: Any
    """True for each parameter at its bound: exponents in [0, 5], logs of coefficients in [-40, 40]."""
    theta: Float[Array, " p"]
    """Logs of the free coefficients, then free exponents, in units of ``scale``."""
    scale: Float[Array, "2"]
    """Geometric means of N and D, the units of ``theta``."""
    units: Float[Array, "2"]
    """n0 and d0, the units of ``params``."""
    law: ScalingLaw
    """The law with its gauge and constants fixed; static."""


def _names(law: ScalingLaw) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Free coefficients and free others, in the order of theta."""
    constant = {name for name, _ in law.fixed}
    logs = tuple(k for k in law.coefficients if k not in constant)
    others = (*law.exponents, *(name for name, *_ in law.covariates))
    return logs, tuple(k for k in others if k not in constant)


def _settle(law: ScalingLaw, gauge: str | None, with_x: bool) -> ScalingLaw:
    """The law with its gauge and, without ``x``, its covariates fixed."""
    fixed = dict(law.fixed)
    if law.gauge and gauge is not None and gauge not in law.gauge:
        raise ConfigError(f"gauge: found {gauge!r}, expected one of {', '.join(law.gauge)} or None")
    if law.gauge and gauge is not None and not any(fixed.get(k) for k in law.gauge):
        fixed[gauge] = 1.0
    if not with_x:
        fixed |= {name: neutral for name, _, _, neutral in law.covariates}
    return replace(law, fixed=tuple(fixed.items()))


def free_parameters(law: ScalingLaw, *, gauge: str | None = "b", with_x: bool = False) -> tuple[str, ...]:
    """Names of the parameters that a fit of this law determines, coefficients first: the order of given starts."""
    return _free(_settle(law, gauge, with_x))


def _free(law: ScalingLaw) -> tuple[str, ...]:
    return sum(_names(law), ())


def _decode(law: ScalingLaw, theta: Float[Array, " p"]):
    """Parameters of ``theta``, for N and D over their geometric means, coefficients as logs."""
    logs, others = _names(law)
    values = {k: _constant(v, theta.dtype, k in law.coefficients) for k, v in law.fixed}
    values |= {k: Log(theta[i]) for i, k in enumerate(logs)}
    return law.params(**values, **{k: theta[len(logs) + i] for i, k in enumerate(others)})


def _constant(value, dtype, coefficient):
    if not coefficient:
        return jnp.asarray(value, dtype)
    return Log(jnp.log(jnp.asarray(value, dtype))) if value else None


def in_units(law: ScalingLaw, theta: Float[Array, " p"], log_units: Float[Array, "2"]):
    """Parameters of ``theta`` as plain numbers, for N and D over units given as logs of multiples of their means.

    A change of units moves the coefficient that the gauge holds at 1 as well; it is divided out of all of them.
    """
    held = _decode(law, theta)
    powers = law.powers(held)
    logs = {name: value.value for name, value in held._asdict().items() if isinstance(value, Log)}
    for name, (i, j) in powers.items():
        if name in logs:
            logs[name] = logs[name] + i * log_units[0] + j * log_units[1]
    common = next((logs[name] for name, value in law.fixed if name in law.gauge and value), 0.0)
    values = {k: jnp.zeros((), theta.dtype) if v is None else v for k, v in held._asdict().items()}
    values |= {name: jnp.exp(v - common if name in law.gauge else v) for name, v in logs.items()}
    return law.params(**values)


def _box(law: ScalingLaw, dtype) -> tuple[Array, Array]:
    logs, others = _names(law)
    ranges = {name: (low, high) for name, low, high, _ in law.covariates}
    low = [-_LOG_BOUND] * len(logs) + [ranges.get(k, (0.0, 0.0))[0] for k in others]
    high = [_LOG_BOUND] * len(logs) + [ranges.get(k, (0.0, _EXPONENT_BOUND))[1] for k in others]
    return jnp.asarray(low, dtype), jnp.asarray(high, dtype)


@partial(jax.jit, static_argnames=("count",))
def _draw(law: ScalingLaw, key, count: int, log_mean: Array) -> Float[Array, "S p"]:
    """Random starts: logs within 3 of 0 (of the log mean loss, where the loss is linear in them), others in [0, 2]."""
    logs, others = _names(law)
    uniform = jax.random.uniform(key, (count, len(logs) + len(others)), log_mean.dtype)
    sign = [1.0 if k in law.response else -1.0 if f"/{k}" in law.response else 0.0 for k in logs]
    rest = [0.0] * len(others)
    shift = log_mean * jnp.asarray(sign + rest, log_mean.dtype)
    low, width = ([v] * len(logs) + [w] * len(others) for v, w in ((-3.0, 0.0), (6.0, 2.0)))
    return (shift + jnp.asarray(low, log_mean.dtype))[None] + uniform * jnp.asarray(width, log_mean.dtype)[None]


def _residual(law: ScalingLaw, objective: str, mean: Array, with_x: bool):
    """``(theta, log n, log d, y, x) -> residual`` of one point."""

    def residual(theta, log_n, log_d, y, x):
        log_loss = law.log_loss(_decode(law, theta), log_n, log_d, x if with_x else None)
        if objective == "mse":
            return (jnp.exp(log_loss) - y) / mean.astype(theta.dtype)
        return log_loss - jnp.log(y)

    return residual


class Table(NamedTuple):
    """Data ready to fit. Rows that do not count (weight 0) hold harmless values."""

    log_n: Array
    log_d: Array
    y: Array
    x: Array
    weights: Array
    scale: Array
    mean: Array


@jax.jit
def tabulate(n, d, y, weights, x) -> Table:
    used = weights > 0
    total = jnp.sum(weights)
    logs = jnp.stack([jnp.log(n), jnp.log(d), jnp.where(used, y, 1.0)])
    means = jnp.sum(jnp.where(used[None], weights[None] * logs, 0.0), axis=1) / total
    centred = jnp.where(used[None], logs[:2] - means[:2, None], 0.0)
    x = jnp.zeros_like(y) if x is None else jnp.where(used, x, 1.0)
    return Table(centred[0], centred[1], logs[2], x, weights, jnp.exp(means[:2]), means[2])


@jax.jit
def _thin(table: Table) -> Table:
    """At most 64 of the points that count, spread evenly over the table, in float32."""
    used = table.weights > 0
    first = jnp.argsort(~used, stable=True)
    rows = min(_SCREEN_ROWS, len(table.y))
    chosen = first[jnp.arange(rows) * jnp.sum(used) // rows]
    pick = {name: getattr(table, name)[chosen] for name in ("log_n", "log_d", "y", "x", "weights")}
    return jax.tree.map(lambda v: v.astype(jnp.float32), table._replace(**pick))


@partial(jax.jit, static_argnames=("objective", "with_x"))
def search(law, table: Table, start, weights, *, objective, huber, steps, with_x) -> levenberg.Solution:
    residual = _residual(law, objective, table.mean, with_x)
    rows = (table.log_n, table.log_d, table.y, table.x)
    width = huber if objective == "huber" else None
    # Several rows of weights are several problems.
    enough = _ENOUGH if len(weights) == 1 else 1.0
    box = _box(law, start.dtype)
    return levenberg.minimise(residual, start, *box, rows, weights, huber=width, steps=steps, enough=enough)


@partial(jax.jit, static_argnames=("with_x",))
def _finish(law, table: Table, found: levenberg.Solution, n0, d0, *, with_x) -> FitResult:
    dtype = table.y.dtype
    units = jnp.asarray([n0, d0], dtype)
    # Starts that met in one minimum differ by rounding; the one that settled most is taken.
    ties = found.value <= jnp.min(found.value) * (1 + 32 * jnp.finfo(dtype).eps)
    best = jnp.argmin(jnp.where(ties & found.converged, found.slope, jnp.where(ties, jnp.finfo(dtype).max, jnp.inf)))
    theta, value = found.theta[best], found.value[best]
    near = (found.value <= value * _NEAR + jnp.finfo(dtype).eps ** 2)[:, None]
    ends = jnp.where(near, found.theta, -jnp.inf).max(0) - jnp.where(near, found.theta, jnp.inf).min(0)
    lower, upper = _box(law, dtype)
    log_loss = law.log_loss(_decode(law, theta), table.log_n, table.log_d, table.x if with_x else None)
    sse = jnp.sum(table.weights * (jnp.exp(log_loss) - table.y) ** 2)
    return FitResult(
        params=in_units(law, theta, jnp.log(units) - jnp.log(table.scale)),
        sse=sse,
        r2=1.0 - sse / jnp.sum(table.weights * (table.y - table.mean) ** 2),
        value=value,
        converged=found.converged[best],
        near=jnp.sum(near),
        spread=_label(law, jnp.where(jnp.isfinite(value), ends, jnp.nan), 0.0),
        at_bound=_label(law, (theta <= lower) | (theta >= upper), False),
        theta=theta,
        scale=table.scale,
        units=units,
        law=law,
    )


def _label(law, vector, constant):
    """A vector over theta as the law's parameter tuple; ``constant`` for the fixed ones."""
    values = {k: jnp.asarray(constant, vector.dtype) for k, _ in law.fixed}
    return law.params(**values, **{k: vector[i] for i, k in enumerate(_free(law))})


def arrays(n, d, y, weights, x):
    n, d, y = floats(*(np.asarray(v) if isinstance(v, list | tuple) else v for v in (n, d, y)))
    dtype = y.dtype
    weights = jnp.ones_like(y) if weights is None else jnp.asarray(weights, dtype)
    return n, d, y, weights, None if x is None else jnp.asarray(x, dtype)


def fit(
    law: ScalingLaw,
    n: Points,
    d: Points,
    y: Points,
    *,
    rng: PRNGKeyArray,
    x: Points | None = None,
    weights: Points | None = None,
    starts: int | Float[Array, "S p"] | Float[np.ndarray, "S p"] = 64,
    objective: str = "mse",
    huber: float = 1e-3,
    gauge: str | None = "b",
    steps: int = 1000,
    keep: int | None = None,
    mask_nonfinite: bool = False,
    n0: float = 1e9,
    d0: float = 1e9,
) -> FitResult:
    """Fit a law to losses ``y`` at sizes ``n`` and tokens ``d`` (plain counts), the best of many random starts.

    ``objective="mse"`` minimises the weighted squared error of the loss, ``"huber"`` Huber's loss of width ``huber`` of
    the log loss. Coefficients are fitted as logs in [-40, 40], exponents in [0, 5], by Levenberg-Marquardt: all starts
    go 20 steps in float32 on 64 of the points, the best ``keep`` (default: one in 64, at least 16) go on until
    three in four and the best of all have converged.
    ``starts`` may be an array of starts in the order of :func:`free_parameters`, logs of coefficients first, for N and
    D over their geometric means. ``gauge`` names the noise coefficient of the Shannon law fixed at 1 (None: its Hessian
    is singular). ``x``: bits or strength of a perturbation, for the laws that know it. Weight 0 leaves a point out.
    ``mask_nonfinite=True`` leaves out points whose loss is NaN or infinite. Consumes ``rng``. Safe under ``jit`` and
    ``vmap``; there the data are not checked.

    Raises: ConfigError naming row and field for fewer points than parameters, one size only, values that are not
    positive and finite, repeated rows, mixed units, unknown ``objective`` or ``gauge``.

    Reconstruction: the paper fits by scipy's ``curve_fit`` from all ones and all 0.1; bounds, random starts and
    ``huber`` (as in arXiv 2203.15556, appendix D.3) are ours.
    """
    if objective not in ("mse", "huber"):
        raise ConfigError(f"objective: found {objective!r}, expected 'mse' or 'huber'")
    law = _settle(law, gauge, x is not None)
    n, d, y, weights, x = arrays(n, d, y, weights, x)
    if mask_nonfinite:
        weights = jnp.where(jnp.isfinite(y), weights, 0.0)
    begin = None if isinstance(starts, int) else jnp.asarray(starts, y.dtype)
    count = starts if begin is None else len(begin)
    _check_options(law, count, huber, steps, keep, begin)
    if all(is_concrete(v) for v in (n, d, y, weights, x)):
        host = [None if v is None else np.asarray(v, np.float64) for v in (n, d, y, weights, x)]
        check_points(*host, free=len(_free(law)), law=law.name, n0=n0, d0=d0)
    table = tabulate(n, d, y, weights, x)
    start = _draw(law, rng, count, jnp.log(table.mean)) if begin is None else begin
    keep = min(count, max(_KEEP, count // 64) if keep is None else keep)
    options = {"objective": objective, "huber": huber, "with_x": x is not None}
    if keep < count:
        # Most of the work is here, where float32 and some of the points are enough to tell good starts from bad.
        small = _thin(table)
        screened = search(law, small, start.astype(jnp.float32), small.weights[None], steps=_SCREEN_STEPS, **options)
        start = screened.theta[jnp.argsort(screened.value)[:keep]].astype(y.dtype)
    found = search(law, table, start, weights[None], steps=steps, **options)
    return _finish(law, table, found, n0, d0, with_x=x is not None)


def _check_options(law, count, huber, steps, keep, begin):
    for name, value in (("starts", count), ("steps", steps), ("keep", keep)):
        if value is not None and value < 1:
            raise ConfigError(f"{name}: found {value}, expected at least 1")
    if not huber > 0:
        raise ConfigError(f"huber: found {huber}, expected more than 0")
    free = _free(law)
    if begin is not None and begin.shape[1] != len(free):
        raise ConfigError(f"starts: found {begin.shape[1]} columns, expected {len(free)}: {', '.join(free)}")


@jax.jit
def predict(result: Any, n: Real, d: Real, x: Real | None = None) -> Float[Array, "..."]:
    """Loss of a fitted law at sizes and tokens in plain counts; a ``Bootstrap`` adds a leading axis of resamples."""
    dtype = result.theta.dtype
    log_n, log_d = (jnp.log(jnp.asarray(v, dtype)) - jnp.log(s) for v, s in zip((n, d), result.scale, strict=True))
    x = None if x is None else jnp.asarray(x, dtype)

    def one(theta):
        return jnp.exp(result.law.log_loss(_decode(result.law, theta), log_n, log_d, x))

    return one(result.theta) if result.theta.ndim == 1 else jax.vmap(one)(result.theta)
