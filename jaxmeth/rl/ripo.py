"""RIPO: clip bounds that depend on the old probability of the token, so that clipped tokens travelled equally far.

With p = exp(logp_old) and r the probability ratio, one action's share of KL(pi_old || pi) is ``d = p (r - 1)^2 / 2``.
PPO's fixed bound on |r - 1| lets a frequent token travel far and a rare one hardly at all; ``|r - 1| <= sqrt(delta/p)``
bounds d by delta/2 for every p.

Note: with the default delta 0.05 RIPO is looser than PPO clipping at 0.2 for *every* token, since sqrt(0.05) = 0.2236
at p = 1. Part of a gain over PPO may be a looser clip: compare with PPO at 0.2236 and without clipping.

Compose it as ``PolicyLoss(advantage=adv_grpo, ratio=ripo, aggregation="token_mean")`` (as peers normalise) or
``"group_token_mean"`` (as printed). Sequence-level ratios are out of scope: p of a whole sequence is about 0.

Reference: Cai et al., "Beyond Euclidean clipping: overcoming exploration collapse in LLM RL via Riemannian isometric
policy optimization", arXiv 2607.10169; read through three summaries that agree on all equations.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxmeth.rl._common import as_float, check_number, check_shape
from jaxmeth.rl.ratios import Adv, LogProbs, Mask, Scalar, Surrogate, clip_ratio, prepare, safe_exp

# exp(40) is far beyond any ratio and finite in float32.
_MAX_EXPONENT = 40.0

Bounds = tuple[Float[Array, "*shape"], Float[Array, "*shape"]]


def _radius(logp_old: Array, delta: Scalar, cap: Scalar | None) -> Array:
    """sqrt(delta / p) in log space, so that logp_old = -100 stays finite; at most ``cap``."""
    limit = _MAX_EXPONENT if cap is None else jnp.log(jnp.asarray(cap, logp_old.dtype))
    half = 0.5 * (jnp.log(jnp.asarray(delta, logp_old.dtype)) - jnp.minimum(logp_old, 0))
    return jnp.exp(jnp.minimum(half, limit))


def ripo_bounds(
    logp_old: Float[Array, "*shape"],
    *,
    delta_low: Scalar = 0.05,
    delta_high: Scalar | None = None,
    r_min: Scalar | None = 0.5,
    r_max: Scalar | None = 10.0,
) -> Bounds:
    """Bounds of the ratio: ``max(1 - sqrt(delta_low / p), r_min)`` and ``min(1 + sqrt(delta_high / p), r_max)``.

    Args:
      logp_old: log-probability under the distribution that was sampled, the one in the ratio (temperature and any
        truncation included alike); a rounding error above 0 counts as 0. A constant: no gradient passes.
      delta_low, delta_high: twice the distance a token may travel, at least 0; delta_high None means delta_low.
      r_min, r_max: guards, needed because 1 - sqrt(delta/p) < 0 for p < delta. Reconstruction: read as limits on the
        *bounds* (one of three summaries: "two-sided clip [0.5, 10]"); the alternative, a hard clip of r itself,
        differs only for A < 0 and r > r_max. None: no guard, and the lower bound may be negative.

    Returns:
      (lower, upper), each of logp_old's shape.

    Raises:
      ConfigError: a delta that is negative or NaN, r_min outside [0, 1], r_max below 1.
    """
    delta_high = delta_low if delta_high is None else delta_high
    check_number("delta_low", delta_low, 0)
    check_number("delta_high", delta_high, 0)
    logp_old = jax.lax.stop_gradient(as_float(logp_old))
    lower, upper = 1 - _radius(logp_old, delta_low, None), 1 + _radius(logp_old, delta_high, r_max)
    if r_min is not None:
        check_number("r_min", r_min, 0, 1)
        lower = jnp.maximum(lower, r_min)
    if r_max is not None:
        check_number("r_max", r_max, 1)
        upper = jnp.minimum(upper, r_max)
    return lower, upper


def _old(logp: Array, logp_old: Array | None, mask: Array) -> Array:
    """The old log-probability where it counts, 0 elsewhere."""
    return jnp.where(mask, jax.lax.stop_gradient(logp) if logp_old is None else as_float(logp_old), 0)


def ripo(
    logp: LogProbs,
    logp_old: Float[Array, "_ _"] | None,
    adv: Adv,
    mask: Mask,
    *,
    delta_low: Scalar = 0.05,
    delta_high: Scalar | None = None,
    r_min: Scalar | None = 0.5,
    r_max: Scalar | None = 10.0,
    log_ratio_clamp: Scalar | None = 20.0,
) -> Surrogate:
    """RIPO's surrogate ``min(r A, clip(r, lower, upper) A)`` with the bounds of :func:`ripo_bounds`.

    A ratio transform of the core (shapes, masks, clamp and errors: see :mod:`jaxmeth.rl.ratios`). On-policy it is GRPO:
    r = 1 is always inside. With all old probabilities p0 and no guards it is ``ppo_clip(eps_low=sqrt(delta / p0))``.
    """
    p = prepare(logp, logp_old, adv, mask)
    bounds = ripo_bounds(
        _old(p.logp, logp_old, p.mask), delta_low=delta_low, delta_high=delta_high, r_min=r_min, r_max=r_max
    )
    return clip_ratio(safe_exp(p.d, log_ratio_clamp), p.adv, *bounds, p.mask)


def dcpo_bounds(
    logp_old: Float[Array, "*shape"], *, e_low: Scalar = 0.16, e_high: Scalar = 0.2, cap: Scalar | None = 10.0
) -> Bounds:
    """DCPO's bounds, a baseline that also depends on p: ``1/2 + sqrt(max(1 - 4 e_low/p, 0))/2`` and
    ``min(1/2 + sqrt(1 + 4 e_high/p)/2, cap)``.

    Reconstruction: from memory of DCPO (arXiv 2509.02333), unverified.

    Raises:
      ConfigError: e_low or e_high negative or NaN, a cap below 1.
    """
    check_number("e_low", e_low, 0)
    check_number("e_high", e_high, 0)
    inverse = jnp.exp(jnp.minimum(-jnp.minimum(jax.lax.stop_gradient(as_float(logp_old)), 0), _MAX_EXPONENT))
    lower = 0.5 + 0.5 * jnp.sqrt(jnp.maximum(1 - 4 * e_low * inverse, 0))
    upper = 0.5 + 0.5 * jnp.sqrt(1 + 4 * e_high * inverse)
    if cap is None:
        return lower, upper
    check_number("cap", cap, 1)
    return lower, jnp.minimum(upper, cap)


def dcpo(
    logp: LogProbs,
    logp_old: Float[Array, "_ _"] | None,
    adv: Adv,
    mask: Mask,
    *,
    e_low: Scalar = 0.16,
    e_high: Scalar = 0.2,
    cap: Scalar | None = 10.0,
    log_ratio_clamp: Scalar | None = 20.0,
) -> Surrogate:
    """The clipped surrogate with the bounds of :func:`dcpo_bounds`: a baseline of RIPO."""
    p = prepare(logp, logp_old, adv, mask)
    bounds = dcpo_bounds(_old(p.logp, logp_old, p.mask), e_low=e_low, e_high=e_high, cap=cap)
    return clip_ratio(safe_exp(p.d, log_ratio_clamp), p.adv, *bounds, p.mask)


def fisher_distance(logp: Float[Array, "*shape"], logp_old: Float[Array, "*other"]) -> Float[Array, "*shape"]:
    """``p (r - 1)^2 / 2``: what one action adds to KL(pi_old || pi), in nats, to second order.

    Raises:
      ConfigError: unequal shapes.
    """
    check_shape("logp_old", logp_old, logp.shape, "logp")
    logp, logp_old = as_float(logp), as_float(logp_old)
    limit = 0.45 * float(np.log(jnp.finfo(logp.dtype).max))  # its square stays finite
    d = logp - logp_old
    # sqrt(p) (r - 1); expm1 keeps the digits near r = 1, the difference of roots cannot overflow where r does.
    near = jnp.exp(0.5 * logp_old) * jnp.expm1(jnp.clip(d, -limit, 1.0))
    far = jnp.exp(jnp.minimum(logp - 0.5 * logp_old, limit)) - jnp.exp(0.5 * logp_old)
    return 0.5 * jnp.square(jnp.where(d < 1, near, far))
