"""Levenberg-Marquardt for many starts at once, inside a box.

The problems are tiny (five to twelve parameters, hundreds of rows) and many (thousands of starts), so all starts step
together in one loop; its body holds one evaluation of residuals and Jacobian, made at the trial point and kept where
the trial is accepted. A parameter at its bound whose gradient points outwards is left out of the step.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

Residual = Callable[..., Array]
"""``(theta [p], row...) -> residual``, both scalars: one row of the data."""

_STUCK = 1e8
# Steps without progress that end a start; in float64 more of them, to settle past what the objective can tell.
_CALM, _SETTLE = 3, 12


class Solution(NamedTuple):
    """Where each of S starts ended; ``value`` is the objective there, inf where the start had none.

    ``slope`` is the squared gradient in units of the curvature: of equal values the smaller slope is nearer.
    """

    theta: Float[Array, "S p"]
    value: Float[Array, " S"]
    slope: Float[Array, " S"]
    converged: Bool[Array, " S"]
    steps: Int[Array, ""]


class _Carry(NamedTuple):
    theta: Array
    trial: Array
    value: Array
    gradient: Array
    hessian: Array
    slope: Array
    damping: Array
    calm: Array
    done: Array
    step: Array


def minimise(
    residual: Residual,
    start: Float[Array, "S p"],
    lower: Float[Array, " p"],
    upper: Float[Array, " p"],
    rows: tuple[Float[Array, " n"], ...],
    weights: Float[Array, "#S n"],
    *,
    huber: float | Float[Array, ""] | None = None,
    steps: int | Int[Array, ""] = 400,
    tolerance: float | None = None,
    enough: float = 1.0,
) -> Solution:
    """Minimise ``sum_i w_i rho(r_i(theta))`` over the box from every start, rho = r^2/2 or Huber's of width ``huber``.

    Huber's loss by iteratively reweighted squares. A start has converged when twelve (float32: three) accepted steps in
    a row lower its objective by less than ``tolerance`` (relative; 1e-10, or 1e-7 in float32), when nothing is left to
    lower, or when no step however short lowers it. It ends when all have; where the starts share one problem,
    ``enough`` is the share that must have, if the best of all is among them. All in the type of ``start``.
    """
    dtype = start.dtype
    eps = float(jnp.finfo(dtype).eps)
    single = dtype == jnp.float32
    tolerance = tolerance or (1e-7 if single else 1e-10)
    least = 1e-6 if single else 1e-12
    patience = _CALM if single else _SETTLE
    count, p = start.shape
    identity = jnp.eye(p, dtype=dtype)[None]

    def residuals(theta):
        return jax.vmap(residual, (None, *[0] * len(rows)))(theta, *rows)

    def with_jacobian(theta):
        """Residuals [n] and their Jacobian [p, n], forwards: a few parameters, hundreds of rows."""
        return jax.vmap(lambda v: jax.jvp(residuals, (theta,), (v,)), out_axes=(None, 0))(identity[0])

    def evaluate(theta):
        r, jacobian = jax.vmap(with_jacobian)(theta)
        value = _penalty(r, huber)
        weight = weights if huber is None else weights * (huber / jnp.maximum(jnp.abs(r), huber))
        # A row of weight zero must not spoil a start by its infinity.
        used = weights > 0
        value = jnp.sum(jnp.where(used, weights * value, 0.0), axis=-1)
        scaled = jnp.where(used, weight, 0.0)[:, None] * jnp.where(used[:, None], jacobian, 0.0)
        gradient = jnp.einsum("spn,sn->sp", scaled, jnp.where(used, r, 0.0))
        return value, gradient, jnp.einsum("spn,sqn->spq", scaled, jnp.where(used[:, None], jacobian, 0.0))

    def bound_by(theta, gradient):
        """Whether a parameter is at its bound and would leave the box."""
        return ((theta <= lower[None]) & (gradient > 0)) | ((theta >= upper[None]) & (gradient < 0))

    def scale_of(hessian):
        return jnp.maximum(jnp.diagonal(hessian, axis1=1, axis2=2), eps)

    def propose(theta, gradient, hessian, damping):
        free = ~bound_by(theta, gradient)
        diagonal = jnp.where(free, damping[:, None] * scale_of(hessian), 1.0)
        matrix = jnp.where(free[:, :, None] & free[:, None], hessian, 0.0) + identity * diagonal[:, :, None]
        factor = jnp.linalg.cholesky(matrix)
        step = jax.scipy.linalg.cho_solve((factor, True), jnp.where(free, gradient, 0.0)[..., None])[..., 0]
        # A matrix that is not positive definite gives NaN: stay, and damp more.
        return jnp.clip(theta - jnp.where(jnp.isfinite(step), step, 0.0), lower[None], upper[None])

    def body(c: _Carry) -> _Carry:
        value, gradient, hessian = evaluate(c.trial)
        slope = jnp.sum(jnp.where(bound_by(c.trial, gradient), 0.0, gradient) ** 2 / scale_of(hessian), axis=-1)
        # Near the minimum the objective is flat to rounding: there the gradient decides.
        flat = jnp.abs(value - c.value) <= 8 * eps * c.value
        better = jnp.where(flat, slope < c.slope, value < c.value) & ~c.done
        little = better & (c.value - value <= tolerance * c.value)
        theta = jnp.where(better[:, None], c.trial, c.theta)
        gradient = jnp.where(better[:, None], gradient, c.gradient)
        hessian = jnp.where(better[:, None, None], hessian, c.hessian)
        slope = jnp.where(better, slope, c.slope)
        damping = jnp.where(better, jnp.maximum(0.2 * c.damping, least), 4.0 * c.damping)
        calm = jnp.where(little, c.calm + 1, jnp.where(better, 0, c.calm))
        value = jnp.where(better, value, c.value)
        done = c.done | (calm >= patience) | (damping > _STUCK) | (value <= floor)
        trial = propose(theta, gradient, hessian, damping)
        return _Carry(theta, trial, value, gradient, hessian, slope, damping, calm, done, c.step + 1)

    floor = 4 * eps**2 * jnp.sum(weights, axis=-1)
    begin = jnp.clip(start, lower[None], upper[None])
    first = _Carry(
        begin,
        begin,
        jnp.full(count, jnp.inf, dtype),
        jnp.zeros((count, p), dtype),
        jnp.broadcast_to(identity, (count, p, p)),
        jnp.full(count, jnp.inf, dtype),
        jnp.full(count, 5e-2, dtype),
        jnp.zeros(count, jnp.int32),
        jnp.zeros(count, bool),
        jnp.zeros((), jnp.int32),
    )

    def going(c: _Carry):
        settled = jnp.all(c.done)
        if enough < 1:
            settled |= (jnp.mean(c.done) >= enough) & c.done[jnp.argmin(c.value)]
        return (c.step < steps) & ~settled

    last = jax.lax.while_loop(going, body, first)
    return Solution(last.theta, last.value, last.slope, last.done & jnp.isfinite(last.value), last.step)


def _penalty(r: Array, huber) -> Array:
    """``r^2 / 2``, or Huber's loss."""
    if huber is None:
        return 0.5 * r * r
    size = jnp.abs(r)
    return jnp.where(size <= huber, 0.5 * r * r, huber * (size - 0.5 * huber))
