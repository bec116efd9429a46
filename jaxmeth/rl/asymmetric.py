"""Asymmetric prompt weights: how much a prompt counts, as an explicit function of its success rate.

For binary rewards with success rate p, a policy gradient is ``w(p) p (1-p) (g1 - g0)``, g1 and g0 the mean score
gradients of right and wrong rollouts. GRPO and RLOO are two choices of w, symmetric about 1/2; the asymmetric ones
favour hard prompts and use the prompts that were never solved. Written with the effective weight e = w p (1-p), which
stays finite, the advantages are ``e/p`` (right) and ``-e/(1-p)`` (wrong); only the latter at p = 0, the former at 1:

=========== ==================== ====================================== ======== ========
name        w(p)                 e(p)                                   A at p=0 A at p=1
=========== ==================== ====================================== ======== ========
rloo        1                    p(1-p)                                 0        0
grpo        1/sqrt(p(1-p))       sqrt(p(1-p))                           0        0
linear_r    1/p                  1-p                                    -1       0
sqrt_r      1/(p sqrt(1-p))      sqrt(1-p)                              -1       0
uniform_r   1/(p(1-p))           1                                      -1       1
plateau_r   e/(p(1-p))           1 if p <= tau else (1-p)/(1-tau)       -1       0
=========== ==================== ====================================== ======== ========

w is the derivative of the objective that is maximised: p; 2 arcsin sqrt p; log p; -2 artanh sqrt(1-p); logit p.
``dr_grpo`` is another name of ``rloo``; neither has RLOO's factor M/(M-1).

uniform_r and plateau_r are Reconstructions of weightings known by name only: e constant, and e constant up to tau; the
alternative for plateau_r, a plateau in w, would not match the other names, which describe e. sqrt_r is fixed by being
time-optimal (:func:`optimal_weight`).

Reference: R. Heckel, M. Soltanolkotabi and C. Thrampoulidis, "Asymmetric prompt weighting for RL with verifiable
rewards", arXiv 2602.11128.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Num

from jaxmeth.rl._common import LARGEST, as_float, check_choice, check_number
from jaxmeth.rl.advantages import Advantages, GroupIds, Rewards, Valid, centre
from jaxmeth.types import ConfigError, extremes, is_concrete

WEIGHTS = ("rloo", "dr_grpo", "grpo", "linear_r", "sqrt_r", "uniform_r", "plateau_r")
CLOCKS = ("regular", "effective")

Effective = str | Callable[[Array], Array]
"""A name of the table, or e(p) itself; a callable must be finite on [0, 1]."""
Clock = str | Callable[[Array], Array]
Scalar = float | Num[Array, ""]


def _sqrt(x: Array) -> Array:
    """sqrt with gradient 0 at 0."""
    return jnp.where(x > 0, jnp.sqrt(jnp.where(x > 0, x, 1)), 0)


def success_rate(
    rewards: Rewards, valid: Valid = None, *, group_ids: GroupIds = None, num_groups: int | None = None
) -> Float[Array, " P"]:
    """Mean usable reward of each prompt, clipped to [0, 1]; 0 of none."""
    c = centre(rewards, valid, group_ids, num_groups)
    return jnp.clip(c.mean * c.scale, 0, 1)


def effective_weight(
    name_or_fn: Effective, p: Float[Array, "*prompts"], *, tau: Scalar = 0.5
) -> Float[Array, "*prompts"]:
    """e(p) = w(p) p (1-p) of the table, for p in [0, 1]; value and gradient are finite at both ends.

    Raises:
      ConfigError: an unknown name, tau outside [0, 1], a readable p outside [0, 1] or NaN.
    """
    if is_concrete(p) and p.size:
        low, high = extremes(p)
        if not (low >= 0 and high <= 1):
            raise ConfigError(f"p: found {low:g} to {high:g}, expected rates in [0, 1]")
    p = as_float(p)
    if callable(name_or_fn):
        return name_or_fn(p)
    check_choice("weight", name_or_fn, WEIGHTS)
    check_number("tau", tau, 0, 1)
    if name_or_fn == "grpo":
        return _sqrt(p * (1 - p))
    if name_or_fn == "linear_r":
        return 1 - p
    if name_or_fn == "sqrt_r":
        return _sqrt(1 - p)
    if name_or_fn == "uniform_r":
        return jnp.ones_like(p)
    if name_or_fn == "plateau_r":
        flat = p <= tau
        return jnp.where(flat, 1, (1 - p) / jnp.where(flat, 1, 1 - tau))
    return p * (1 - p)


def _interior_weight(weight: Effective, rate: Array, n: Array, tau: Scalar) -> Array:
    """w with the rate kept off the ends by half a rollout."""
    half = 0.5 / jnp.maximum(n, 1)
    inside = jnp.clip(rate, half, 1 - half)
    return effective_weight(weight, inside, tau=tau) / (inside * (1 - inside))


def adv_prompt_weighted(
    rewards: Rewards,
    valid: Valid = None,
    *,
    weight: Effective = "linear_r",
    zero_success: Literal["keep", "drop"] | str = "keep",
    zero_success_scale: Scalar = 1.0,
    ddof: int = 0,
    tau: Scalar = 0.5,
    group_ids: GroupIds = None,
    num_groups: int | None = None,
) -> Advantages:
    """Advantages ``e/p`` (right) and ``-e/(1-p)`` (wrong): an advantage of the core that replaces ``adv_grpo``.

    A prompt that was never solved gives every rollout -e(0), one that is always solved e(1). A prompt with a usable
    reward other than 0 and 1 gets ``w(p) (r - mean)``, with w at the mean clipped to [1/(2M), 1 - 1/(2M)], M its usable
    rollouts; map such rewards to [0, 1].

    Args:
      rewards: [P, G], or [N] with ``group_ids``.
      weight: a name of the table or e(p).
      zero_success: ``drop`` gives the rollouts of a never-solved prompt 0.
      zero_success_scale: factor on those of a never-solved prompt; :func:`zero_success_warmup` makes a schedule.
      ddof: 1 makes the grpo row that of the sample standard deviation; nothing else changes.
      tau: of plateau_r.

    Returns:
      The shape of rewards; 0 at unusable rollouts (invalid, NaN or infinite reward) and in prompts without any other.

    Raises:
      ConfigError: an unknown weight or zero_success, tau outside [0, 1], ddof other than 0 and 1, unequal shapes, a
        zero_success_scale that is negative, NaN or infinite.
    """
    check_choice("zero_success", zero_success, ("keep", "drop"))
    check_number("ddof", ddof, 0, 1)
    check_number("zero_success_scale", zero_success_scale, 0, LARGEST)
    c = centre(rewards, valid, group_ids, num_groups)
    groups, r, n = c.groups, c.rewards, c.n
    p = jnp.clip(c.mean * c.scale, 0, 1)
    e = effective_weight(weight, p, tau=tau)
    right = jnp.where(p > 0, e / jnp.where(p > 0, p, 1), 0)
    wrong = jnp.where(p < 1, -e / jnp.where(p < 1, 1 - p, 1), 0)
    scale = jnp.asarray(0.0 if zero_success == "drop" else zero_success_scale, r.dtype)
    wrong = jnp.where(p > 0, wrong, wrong * scale)
    binary = jnp.where(r == 1, groups.spread(right), groups.spread(wrong))
    graded = c.deviation * groups.spread(c.scale * _interior_weight(weight, p, n, tau))
    is_binary = groups.total(((r != 0) & (r != 1)).astype(jnp.int32)) == 0
    adv = jnp.where(c.ok, jnp.where(groups.spread(is_binary), binary, graded), 0)
    if weight == "grpo" and ddof:
        adv = adv * groups.spread(jnp.sqrt(jnp.maximum(n - 1, 0) / jnp.maximum(n, 1)))
    return adv


def zero_success_warmup(step: Num[ArrayLike, ""], steps: int, *, ramp: bool = False) -> Float[Array, ""]:
    """``zero_success_scale`` of a training step: 0 before ``steps``, then 1; with ``ramp`` linear from 0 to 1.

    Reconstruction: the paper skips never-solved prompts for the first 50 to 100 steps; the ramp is an alternative.
    """
    check_number("steps", steps, 0)
    step = as_float(step)
    return jnp.clip(step / steps, 0, 1) if ramp and steps else (step >= steps).astype(step.dtype)


@dataclass(frozen=True)
class PromptWeight:
    """``(rewards, valid) -> w [P]``; see :func:`as_prompt_weight`."""

    weight: Effective
    tau: float = 0.5

    def __call__(
        self, rewards: Rewards, valid: Valid = None, *, group_ids: GroupIds = None, num_groups: int | None = None
    ) -> Float[Array, " P"]:
        c = centre(rewards, valid, group_ids, num_groups)
        return _interior_weight(self.weight, jnp.clip(c.mean * c.scale, 0, 1), c.n, self.tau)


def as_prompt_weight(weight: Effective = "linear_r", *, tau: float = 0.5) -> PromptWeight:
    """w(p) as a prompt weight of the core, to multiply ``adv_dr_grpo`` (or ``adv_rloo``: a factor n/(n-1) more).

    Equal to :func:`adv_prompt_weighted` for 0 < p < 1; all-wrong and all-right prompts, where r - mean is 0, stay 0.
    On ``adv_grpo``, or on ``adv_prompt_weighted`` with a weight of its own, it would scale twice, which ``PolicyLoss``
    refuses.

    Raises:
      ConfigError: an unknown name, tau outside [0, 1].
    """
    if not callable(weight):
        check_choice("weight", weight, WEIGHTS)
    check_number("tau", tau, 0, 1)
    return PromptWeight(weight, tau)


# --- when which weight is time-optimal -------------------------------------------------------------------------------
#
# One prompt, infinitely many rollouts: dp/dt = w(p) p (1-p). A unit of time costs c(p): 1 counts updates ("regular"),
# 1/p rollouts per success ("effective"). The budget is C = int w dp. Integrals are over theta = arcsin sqrt p, where
# dp = 2 sqrt(p (1-p)) dtheta takes the singularities at both ends away.

_PANELS, _NODES = 512, 8


def _cost(clock: Clock, p: Array) -> Array:
    if callable(clock):
        return clock(p)
    check_choice("clock", clock, CLOCKS)
    return jnp.ones_like(p) if clock == "regular" else 1 / p


def _pair(p0: ArrayLike, p1: ArrayLike) -> Array:
    return jnp.stack(jnp.broadcast_arrays(as_float(p0), as_float(p1)))


def _integral(integrand: Callable[[Array], Array], p0: ArrayLike, p1: ArrayLike) -> Array:
    """``int integrand(p) 2 sqrt(p (1-p)) dtheta`` over [p0, p1], integrand without its root: Gauss-Legendre panels."""
    low, high = jnp.arcsin(jnp.sqrt(_pair(p0, p1)))
    dtype = low.dtype
    x, weight = np.polynomial.legendre.leggauss(_NODES)
    at = ((np.arange(_PANELS)[:, None] + 0.5 + 0.5 * x[None]) / _PANELS).reshape(-1)
    weight = np.tile(weight / (2 * _PANELS), _PANELS)
    theta = low + (high - low) * jnp.asarray(at, dtype)
    # Near 1 a square may round to 1, where weights are 0/0.
    p = jnp.minimum(jnp.square(jnp.sin(theta)), 1 - jnp.finfo(dtype).epsneg)
    return (high - low) * (integrand(p, jnp.sin(theta) * jnp.cos(theta)) * jnp.asarray(weight, dtype)).sum()


def _check_rates(p0: ArrayLike, p1: ArrayLike, budget: ArrayLike) -> None:
    check_number("p0", p0, 0, 1, above=True)
    check_number("p1", p1, 0, 1, above=True)
    check_number("budget", budget, 0, above=True)


def optimal_weight(p: Float[Array, "*rates"], clock: Clock = "regular") -> Float[Array, "*rates"]:
    """The w(p) that reaches a target soonest at a given budget, up to scale: ``sqrt(c(p) / (p (1-p)))``.

    Regular clock (c = 1): ``1/sqrt(p(1-p))``, GRPO's. Effective clock (c = 1/p): ``1/(p sqrt(1-p))``, sqrt_r's. By the
    Cauchy-Schwarz inequality; derived here, and consistent with the paper's statements.

    Args:
      p: in (0, 1).
      clock: ``regular``, ``effective`` or c(p).

    Raises:
      ConfigError: an unknown clock.
    """
    return jnp.sqrt(_cost(clock, as_float(p)) / (p * (1 - p)))


def optimal_time(
    p0: Num[ArrayLike, ""], p1: Num[ArrayLike, ""], budget: Num[ArrayLike, ""] = 1.0, clock: Clock = "regular"
) -> Float[Array, ""]:
    """The least time from p0 to p1 with ``int w dp = budget``: ``(int sqrt(c/(p(1-p))) dp)^2 / budget``.

    Regular: ``(2 arcsin sqrt p1 - 2 arcsin sqrt p0)^2 / budget``; effective: ``(2 artanh sqrt(1-p0) -
    2 artanh sqrt(1-p1))^2 / budget``; another clock by quadrature.

    Raises:
      ConfigError: rates outside (0, 1], a budget that is not positive, an unknown clock.
    """
    _check_rates(p0, p1, budget)
    if callable(clock):
        length = _integral(lambda p, root: 2 * jnp.sqrt(clock(p)), p0, p1)
        return jnp.square(length) / budget
    check_choice("clock", clock, CLOCKS)

    def primitive(p: Array) -> Array:
        if clock == "regular":
            return 2 * jnp.arcsin(jnp.sqrt(p))
        return jnp.log(p) - 2 * jnp.log1p(jnp.sqrt(1 - p))  # -2 artanh sqrt(1-p), without cancellation at small p

    start, end = primitive(_pair(p0, p1))
    return jnp.square(end - start) / budget


def time_to_target(
    w_fn: Effective,
    p0: Num[ArrayLike, ""],
    p1: Num[ArrayLike, ""],
    budget: Num[ArrayLike, ""] = 1.0,
    clock: Clock = "regular",
    *,
    tau: Scalar = 0.5,
) -> Float[Array, ""]:
    """Time from p0 to p1 under a weight scaled to the budget: ``int c dp / (w p (1-p)) * int w dp / budget``.

    Args:
      w_fn: a name of the table, or w(p) (not e(p)); its scale does not matter.
      p0, p1: in (0, 1), where the weight is positive. (At 1 most weights never arrive.)

    Returns:
      A scalar, at least :func:`optimal_time`; for smooth weights the quadrature error is below 1e-7 of it in float64.

    Raises:
      ConfigError: rates outside (0, 1), a budget that is not positive, an unknown clock or weight.
    """
    _check_rates(p0, p1, budget)
    for name, rate in (("p0", p0), ("p1", p1)):
        if is_concrete(rate) and not float(rate) < 1:
            raise ConfigError(f"{name}: found {rate}, expected a rate below 1")

    def weight(p: Array) -> Array:
        return w_fn(p) if callable(w_fn) else effective_weight(w_fn, p, tau=tau) / (p * (1 - p))

    time = _integral(lambda p, root: 2 * _cost(clock, p) / (weight(p) * root), p0, p1)
    spent = _integral(lambda p, root: 2 * weight(p) * root, p0, p1)
    return time * spent / budget


def logodds_step(p: Float[Array, "*rates"], w: Num[ArrayLike, "..."], eta: Num[ArrayLike, "..."]) -> Array:
    """One exact KL-proximal step: ``logit(p') = logit(p) + eta w``. 0 and 1 stay where they are."""
    p = as_float(p)
    inside = (p > 0) & (p < 1)
    q = jnp.where(inside, p, 0.5)
    return jnp.where(inside, jax.nn.sigmoid(jnp.log(q) - jnp.log1p(-q) + eta * jnp.where(inside, w, 0)), p)
