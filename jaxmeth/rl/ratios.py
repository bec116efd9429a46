"""Ratio transforms: how the change of a token's probability enters the objective, and KL estimators.

The seam is ``(logp, logp_old, adv, mask) -> Surrogate``, to be maximised. With d = logp - logp_old and r = exp(d):

* logp, logp_old [N, T]: natural-log probabilities of the sampled tokens at the sampling temperature. ``logp_old=None``
  is the on-policy case: r = 1 in value and A grad(logp) as gradient. Differentiable in ``logp`` only.
* adv [N], or [N, T]; mask [N, T], nonzero = counts. Whatever stands at masked positions, NaN included, is never used;
  value and flags are 0 there.
* A is bounded so that each product (r A, A logp) is at most 1e30: advantages of 1e30, or a ratio of exp(79) times a
  large one, saturate there, value and gradient, and sums over tokens stay finite. Smaller products are untouched.
* Log-ratios are clamped to +-``log_ratio_clamp`` (no gradient beyond). None clamps only where ``exp`` would overflow.
  Finite input never gives NaN.
* The gradient of a clipped surrogate is r A where it is not clipped and 0 where it is; exactly on a bound, r A.
* ConfigError where shapes disagree or a threshold is negative, NaN or out of range.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Num

from jaxmeth.rl._common import as_float, check_choice, check_number, check_shape
from jaxmeth.types import ConfigError

LogProbs = Float[Array, "N T"]
Adv = Float[Array, " _"] | Float[Array, "_ _"]
Mask = Num[Array, "_ _"] | Bool[Array, "_ _"]
Scalar = float | Float[Array, ""]

# Of a product with an advantage: in float32 sums over 1e8 tokens stay finite.
_MOST = 1e30

KL_KINDS = ("k1", "kl", "abs", "k2", "mse", "k3", "low_var_kl", "k3+")


class Surrogate(NamedTuple):
    """What to maximise per token, and where clipping took the gradient away: below (A < 0) and above (A > 0)."""

    value: Float[Array, "N T"]
    clipped_low: Bool[Array, "N T"]
    clipped_high: Bool[Array, "N T"]


class Prepared(NamedTuple):
    """Checked input [N, T], 0 where masked: ``d`` = logp - logp_old; ``adv`` is at most 1e30."""

    logp: Array
    d: Array
    adv: Array
    mask: Array


def prepare(logp: Array, logp_old: Array | None, adv: Array, mask: Array) -> Prepared:
    """The beginning of every ratio transform; log-probabilities become float32 before they are subtracted."""
    check_shape("mask", mask, logp.shape, "logp")
    mask = mask != 0
    logp = jnp.where(mask, as_float(logp), 0)
    if logp_old is None:
        old = logp
    else:
        check_shape("logp_old", logp_old, logp.shape, "logp")
        old = jnp.where(mask, as_float(logp_old), 0)
    if adv.ndim == 1:
        check_shape("adv", adv, logp.shape[:1], "the rows of logp")
        adv = adv[:, None]
    else:
        check_shape("adv", adv, logp.shape, "logp")
    adv = jnp.where(mask, jnp.clip(jax.lax.stop_gradient(as_float(adv)), -_MOST, _MOST), 0)
    return Prepared(logp, logp - jax.lax.stop_gradient(old), adv, mask)


def safe_exp(d: Array, clamp: Scalar | None) -> Array:
    """``exp`` of d clamped to +-clamp, or where None to what cannot overflow."""
    if clamp is not None:
        check_number("log_ratio_clamp", clamp, 0, above=True)
    limit = 0.9 * float(np.log(jnp.finfo(d.dtype).max))
    return jnp.exp(jnp.clip(d, -limit, limit) if clamp is None else jnp.clip(d, -clamp, clamp))


def times(x: Array, adv: Array) -> Array:
    """``x adv``, with adv bounded where the product is beyond 1e30: the gradient is then bounded too."""
    most = _MOST / jnp.maximum(jnp.abs(jax.lax.stop_gradient(x)), 1)
    return x * jnp.clip(adv, -most, most)


def clip_ratio(ratio: Array, adv: Array, lower: Scalar | Array, upper: Scalar | Array, mask: Array) -> Surrogate:
    """``min(r A, clip(r, lower, upper) A)`` as a choice rather than a product: no gradient where it clips."""
    high, low = (ratio > upper) & (adv > 0), (ratio < lower) & (adv < 0)
    value = times(jnp.where(high, upper, jnp.where(low, lower, ratio)), adv)
    return Surrogate(jnp.where(mask, value, 0), low & mask, high & mask)


def _bounds(eps_low: Scalar, eps_high: Scalar | None) -> tuple[Scalar, Scalar]:
    eps_high = eps_low if eps_high is None else eps_high
    check_number("eps_low", eps_low, 0)
    check_number("eps_high", eps_high, 0)
    return 1 - eps_low, 1 + eps_high


def _cap_ratio(ratio: Array, adv: Array, upper: Scalar, delta: Scalar | None, dual_clip: Scalar | None) -> Array:
    """Both extra bounds limit the ratio of tokens with a negative advantage."""
    for name, cap, low in (("delta", delta, upper), ("dual_clip", dual_clip, 1)):
        if cap is not None:
            check_number(name, cap, float(low) if not isinstance(low, Array) else 1, above=True)
            ratio = jnp.where((adv < 0) & (ratio > cap), cap, ratio)
    return ratio


def _sequence_mean(x: Array, mask: Array) -> Array:
    """Mean of x over the unmasked tokens of each row, [N, 1]; 0 for a row without any."""
    return (x * mask).sum(1, keepdims=True) / jnp.maximum(mask.sum(1, keepdims=True), 1)


def ppo_clip(
    logp: LogProbs,
    logp_old: Float[Array, "_ _"] | None,
    adv: Adv,
    mask: Mask,
    *,
    eps_low: Scalar = 0.2,
    eps_high: Scalar | None = None,
    delta: Scalar | None = None,
    dual_clip: Scalar | None = None,
    log_ratio_clamp: Scalar | None = 20.0,
) -> Surrogate:
    """PPO's clipped surrogate: ``min(r A, clip(r, 1 - eps_low, 1 + eps_high) A)``.

    Args:
      eps_low, eps_high: at least 0; eps_high None means eps_low; 0.2 and 0.28 are DAPO's "clip higher".
      delta: TRL's two-sided clipping, ``min(min(r, delta) A, clip(r) A)``; more than 1 + eps_high, so that it bites for
        A < 0 only.
      dual_clip: c of dual clipping, ``max(s, c A)`` for A < 0; more than 1. verl has it on, with 3.
      log_ratio_clamp: 20 in verl and tunix, None in TRL.

    Reference: J. Schulman et al., "Proximal policy optimization algorithms", arXiv 1707.06347, equation 7; D. Ye et
    al., "Mastering complex control in MOBA games", arXiv 1912.09729, equation 5, for dual clipping.
    """
    lower, upper = _bounds(eps_low, eps_high)
    p = prepare(logp, logp_old, adv, mask)
    ratio = _cap_ratio(safe_exp(p.d, log_ratio_clamp), p.adv, upper, delta, dual_clip)
    return clip_ratio(ratio, p.adv, lower, upper, p.mask)


def gspo(
    logp: LogProbs,
    logp_old: Float[Array, "_ _"] | None,
    adv: Adv,
    mask: Mask,
    *,
    eps_low: Scalar = 3e-4,
    eps_high: Scalar | None = 4e-4,
    delta: Scalar | None = None,
    dual_clip: Scalar | None = None,
    log_ratio_clamp: Scalar | None = 20.0,
) -> Surrogate:
    """GSPO: :func:`ppo_clip` with one ratio a sequence, ``log r = sum(d mask) / max(sum(mask), 1)``, as in TRL.

    The clamp is on the log-ratio of the sequence; those of its tokens are not clamped.

    Reference: C. Zheng et al., "Group sequence policy optimization", arXiv 2507.18071, equations 5 and 7.
    """
    lower, upper = _bounds(eps_low, eps_high)
    p = prepare(logp, logp_old, adv, mask)
    ratio = safe_exp(_sequence_mean(p.d, p.mask), log_ratio_clamp)
    ratio = _cap_ratio(jnp.broadcast_to(ratio, p.d.shape), p.adv, upper, delta, dual_clip)
    return clip_ratio(ratio, p.adv, lower, upper, p.mask)


def gspo_token(
    logp: LogProbs,
    logp_old: Float[Array, "_ _"] | None,
    adv: Adv,
    mask: Mask,
    *,
    eps_low: Scalar = 3e-4,
    eps_high: Scalar | None = 4e-4,
    delta: Scalar | None = None,
    dual_clip: Scalar | None = None,
    log_ratio_clamp: Scalar | None = 10.0,
) -> Surrogate:
    """GSPO-token as in verl: the value of the sequence's ratio, but each token's own gradient.

    ``log r_tok = logp - sg(logp) + sg(log r_seq)``, capped at ``log_ratio_clamp`` from above only. Gradients equal
    those of :func:`gspo` where the advantage is one a sequence and the aggregation is ``seq_mean_token_mean``.

    Reference: C. Zheng et al., arXiv 2507.18071, equation 14.
    """
    lower, upper = _bounds(eps_low, eps_high)
    p = prepare(logp, logp_old, adv, mask)
    sequence = _sequence_mean(p.d, p.mask)
    d = p.logp - jax.lax.stop_gradient(p.logp) + jax.lax.stop_gradient(sequence)
    if log_ratio_clamp is not None:
        check_number("log_ratio_clamp", log_ratio_clamp, 0, above=True)
        d = jnp.where(d > log_ratio_clamp, log_ratio_clamp, d)
    ratio = _cap_ratio(safe_exp(d, None), p.adv, upper, delta, dual_clip)
    return clip_ratio(ratio, p.adv, lower, upper, p.mask)


def gmpo(
    logp: LogProbs,
    logp_old: Float[Array, "_ _"] | None,
    adv: Adv,
    mask: Mask,
    *,
    eps_low: Scalar = 0.4,
    eps_high: Scalar | None = None,
    log_ratio_clamp: Scalar | None = None,
) -> Surrogate:
    """GMPO: the geometric mean of token ratios, each clipped pessimistically in log space to [-eps_low, eps_high].

    ``A exp(mean_t min(sgn(A) d, sgn(A) clip(d)) sgn(A))``, repeated on the tokens of its sequence, so that
    ``seq_mean_token_mean`` over all rows is verl's plain mean over sequences. An advantage [N, T] is averaged over its
    row first. Flags are those of the tokens.

    Reference: Y. Zhao et al., "Geometric-mean policy optimization", arXiv 2507.20673, equation 4.
    """
    eps_high = eps_low if eps_high is None else eps_high
    _bounds(eps_low, eps_high)
    p = prepare(logp, logp_old, adv, mask)
    adv_seq = _sequence_mean(p.adv, p.mask)
    high, low = p.mask & (p.d > eps_high) & (adv_seq > 0), p.mask & (p.d < -eps_low) & (adv_seq < 0)
    d = jnp.where(high, eps_high, jnp.where(low, -eps_low, p.d))
    value = times(safe_exp(_sequence_mean(d, p.mask), log_ratio_clamp), adv_seq)
    return Surrogate(jnp.where(p.mask, value, 0), low, high)


def cispo(
    logp: LogProbs,
    logp_old: Float[Array, "_ _"] | None,
    adv: Adv,
    mask: Mask,
    *,
    eps_low: Scalar | None = None,
    eps_high: Scalar = 4.0,
    log_ratio_clamp: Scalar | None = 20.0,
) -> Surrogate:
    """CISPO: ``sg(clip(r, 1 - eps_low, 1 + eps_high)) A logp``: the weight is clipped, the gradient never lost.

    Args:
      eps_low: None (the default, as in TRL) = no lower bound.
      eps_high: the cap is 1 + eps_high. TRL's ``epsilon_high`` is the cap itself; its advice is a cap of 5.

    Reference: MiniMax, "MiniMax-M1", arXiv 2506.13585, equation 4.
    """
    check_number("eps_high", eps_high, 0)
    if eps_low is not None:
        check_number("eps_low", eps_low, 0)
    lower, upper = (-jnp.inf if eps_low is None else 1 - eps_low), 1 + eps_high
    p = prepare(logp, logp_old, adv, mask)
    ratio = jax.lax.stop_gradient(safe_exp(p.d, log_ratio_clamp))
    value = times(p.logp, times(jnp.clip(ratio, lower, upper), p.adv))
    high, low = (ratio > upper) & (p.adv > 0), (ratio < lower) & (p.adv < 0)
    return Surrogate(jnp.where(p.mask, value, 0), low & p.mask, high & p.mask)


def reinforce(logp: LogProbs, logp_old: Float[Array, "_ _"] | None, adv: Adv, mask: Mask) -> Surrogate:
    """The plain policy gradient, ``A logp``; ``logp_old`` plays no part."""
    p = prepare(logp, logp_old, adv, mask)
    never = jnp.zeros(p.logp.shape, bool)
    return Surrogate(jnp.where(p.mask, times(p.logp, p.adv), 0), never, never)


def kl(
    logp: LogProbs, logp_ref: Float[Array, "_ _"], kind: str = "k3", clamp: tuple[float, float] | None = None
) -> LogProbs:
    """Estimators of KL(pi || ref) from samples of pi; with q = logp_ref - logp:

    ``k1`` (= ``kl``) -q; ``abs`` |q|; ``k2`` (= ``mse``) q^2/2; ``k3`` (= ``low_var_kl``) exp(q) - q - 1 >= 0; ``k3+``
    has the value of k3 and the gradient of k2. All are 0 at q = 0. The means of k1 and k3 over samples of pi are the
    KL; but over *fixed* samples only k2 (and k3+) has its gradient.

    Args:
      logp, logp_ref: [N, T]; the reference is a constant.
      clamp: bounds on +-q and on the +-result, k3 and k3+ only; (20, 10) in verl, None in TRL. Without it q is
        clamped only above 44 (354 in float64), so that ``exp(q)`` times an importance ratio, summed, stays finite.

    Raises:
      ConfigError: an unknown kind, a clamp with another kind or not positive, unequal shapes.

    Reference: J. Schulman, "Approximating KL divergence" (2020), http://joschu.net/blog/kl-approx.html.
    """
    check_choice("kind", kind, KL_KINDS)
    check_shape("logp_ref", logp_ref, logp.shape, "logp")
    exponential = kind in ("k3", "low_var_kl", "k3+")
    if clamp is not None and not exponential:
        raise ConfigError(f"clamp: found {clamp} with kind {kind!r}, expected None except for k3 and k3+")
    q = jax.lax.stop_gradient(as_float(logp_ref)) - as_float(logp)
    if kind in ("k1", "kl"):
        return -q
    if kind == "abs":
        return jnp.abs(q)
    k2 = 0.5 * q * q
    if kind in ("k2", "mse"):
        return k2
    limit, ceiling = clamp or (0.5 * float(np.log(jnp.finfo(q.dtype).max)), None)
    check_number("clamp", limit, 0, above=True)
    bounded = jnp.clip(q, -limit, limit) if clamp else q
    k3 = jnp.expm1(jnp.minimum(bounded, limit)) - bounded
    if ceiling is not None:
        check_number("clamp", ceiling, 0, above=True)
        k3 = jnp.clip(k3, -ceiling, ceiling)
    return jax.lax.stop_gradient(k3) + (k2 - jax.lax.stop_gradient(k2)) if kind == "k3+" else k3
