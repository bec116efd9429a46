"""Confidence bounds and p-values for a mean loss in [0, 1], accurate in float32.

Everything rests on :func:`binomial_cdf`. Computed from ``betainc`` or log-gamma it loses two to four digits in
float32 at n = 1,000, because large logarithms cancel. Here the probability mass is written with deviances, which are
small where the mass is large; a tail is the mass at its edge times a continued fraction of positive terms; and the one
difference that remains, ``k - n p``, is taken with the product's rounding error put back. All functions are elementwise
over broadcastable arrays, and safe under ``jit`` and ``vmap``.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Num

from jaxmeth.types import ConfigError, is_concrete

Real = Num[ArrayLike, "..."]
"""Numbers or arrays that broadcast together."""

# ln(n!) - [(n + 1/2) ln n - n + ln(2 pi)/2] for n = 1..15, and 0 for 0; the asymptotic series is exact beyond.
_STIRLING = [0.0] + [
    math.lgamma(n + 1) - (n + 0.5) * math.log(n) + n - 0.5 * math.log(2 * math.pi) for n in range(1, 16)
]
_FRACTION_STEPS = 500
_BENTKUS_SLACK = 1e-4


def _floats(*values: Real) -> list[Array]:
    """Broadcast to one shape and to float32, or float64 where an input has it."""
    dtype = jnp.result_type(jnp.float32, *values)
    return list(jnp.broadcast_arrays(*[jnp.asarray(v, dtype) for v in values]))


def _excess(k: Array, n: Array, p: Array) -> Array:
    """``k - n p`` with the rounding error of the product added back (Dekker's two-product)."""
    exponent, mantissa = (8, 11) if p.dtype == jnp.float32 else (11, 25)
    n_high = jax.lax.reduce_precision(n, exponent, mantissa)
    p_high = jax.lax.reduce_precision(p, exponent, mantissa)
    n_low, p_low = n - n_high, p - p_high
    product = n * p
    error = ((n_high * p_high - product) + n_high * p_low + n_low * p_high) + n_low * p_low
    return (k - product) - error


def _stirling_error(n: Array) -> Array:
    big = jnp.maximum(n, 16.0)
    inv2 = 1.0 / (big * big)
    series = (1 / 12 - (1 / 360 - (1 / 1260 - (1 / 1680 - inv2 / 1188) * inv2) * inv2) * inv2) / big
    table = jnp.asarray(_STIRLING, n.dtype)[jnp.clip(n, 0, 15).astype(jnp.int32)]
    return jnp.where(n < 16, table, series)


def _deviance(x: Array, mean: Array, excess: Array) -> Array:
    """Poisson deviance ``x ln(x/mean) + mean - x`` for ``x >= 0`` and ``excess = x - mean``; by series where small."""
    total = jnp.where(x + mean > 0, x + mean, 1.0)
    v = excess / total
    near = jnp.abs(v) < 0.1
    small = jnp.where(near, v, 0.0)
    square = small * small
    tail = jnp.zeros_like(small)
    # Sum over j of v^(2j) / (2j+1) by Horner; v^2 <= 0.01, so each term adds two digits.
    for j in range(4 if x.dtype == jnp.float32 else 8, 0, -1):
        tail = square * (1.0 / (2 * j + 1) + tail)
    series = excess * small + 2.0 * x * small * tail
    both = (x > 0) & (mean > 0)
    ratio = jnp.where(both, x, 1.0) / jnp.where(both, mean, 1.0)
    direct = jnp.where(x > 0, jnp.where(mean > 0, x * jnp.log(ratio) - excess, jnp.inf), mean)
    return jnp.where(near, series, direct)


def _two_deviances(x: Array, n: Array, p: Array) -> Array:
    """``n KL(x/n || p)`` for Bernoulli distributions: the sum of the deviances of hits and misses."""
    excess = _excess(x, n, p)
    # One stacked call rather than two: the compiled code is half as long.
    return _deviance(jnp.stack([x, n - x]), jnp.stack([n * p, n * (1.0 - p)]), jnp.stack([excess, -excess])).sum(0)


def _binomial_pmf(k: Array, n: Array, p: Array) -> Array:
    interior = (k > 0) & (k < n)
    scale = jnp.where(interior, n / jnp.where(interior, 2 * math.pi * k * (n - k), 1.0), 1.0)
    whole, hits, misses = _stirling_error(jnp.stack([n, k, n - k]))
    return jnp.sqrt(scale) * jnp.exp(whole - hits - misses - _two_deviances(k, n, p))


def _beta_fraction(a: Array, b: Array, x: Array, y: Array, excess: Array) -> Array:
    """Continued fraction R with ``I_x(a, b) = x^a y^b / B(a, b) * R``, for ``excess = a - (a + b) x >= 0``.

    Its terms are positive, so that float32 suffices, unlike those of the fraction that is usually quoted. Modified
    Lentz from the front; an element that has converged is left alone, as multiplying on would only gather rounding.

    Reference: A. DiDonato and A. Morris, "Significant digit computation of the incomplete beta function ratios",
    ACM TOMS 18 (1992), equation 9.1.
    """
    tolerance = 2 * jnp.finfo(x.dtype).eps
    head = 1.0 + excess
    first = head * a / (a + 1.0)

    def step(carry):
        m, c, d, value, change = carry
        s = a + 2.0 * m - 1.0
        w = m * (b - m) * x
        alpha = (a + m - 1.0) / s * ((a + b + m - 1.0) / s) * (w * x)
        beta = m + w / s + (a + m) / (s + 2.0) * (head + m * (1.0 + y))
        d = 1.0 / (beta + alpha * d)
        c = beta + alpha / c
        factor = c * d
        live = change > tolerance
        return m + 1, c, d, jnp.where(live, value * factor, value), jnp.where(live, jnp.abs(factor - 1.0), change)

    def unfinished(carry):
        return (carry[0] <= _FRACTION_STEPS) & jnp.any(carry[4] > tolerance)

    start = (jnp.asarray(1.0, x.dtype), first, jnp.zeros_like(x), first, jnp.ones_like(x))
    return 1.0 / jax.lax.while_loop(unfinished, step, start)[3]


def binomial_cdf(k: Real, n: Real, p: Real) -> Float[Array, "..."]:
    """``P(Bin(n, p) <= k)``; in float32 within 1e-6 for n up to 20,000, and small tails keep their relative accuracy.

    k is rounded down; k < 0 gives 0 and k >= n gives 1, also for n = 0.

    Reference: C. Loader, "Fast and accurate computation of binomial probabilities" (2000), for the mass;
    DiDonato and Morris (1992) for the tail.
    """
    return _binomial_cdf(*_floats(k, n, p))


@jax.jit
def _binomial_cdf(k: Array, n: Array, p: Array) -> Array:
    k = jnp.floor(k)
    inside = (k >= 0) & (k < n)
    hits, size = jnp.where(inside, k, 0.0), jnp.where(inside, n, 1.0)
    excess = _excess(hits + 1.0, size + 1.0, p)
    upper = excess >= 0  # the smaller tail is then P(X > k) = I_p(k+1, n-k), else P(X <= k) = I_q(n-k, k+1)
    a, b = jnp.where(upper, hits + 1.0, size - hits), jnp.where(upper, size - hits, hits + 1.0)
    x, y = jnp.where(upper, p, 1.0 - p), jnp.where(upper, 1.0 - p, p)
    edge = _binomial_pmf(jnp.where(upper, hits + 1.0, hits), size, p)
    tail = a * y * edge * _beta_fraction(a, b, x, y, jnp.abs(excess))
    value = jnp.clip(jnp.where(upper, 1.0 - tail, tail), 0.0, 1.0)
    return jnp.where(k >= n, 1.0, jnp.where(k < 0, 0.0, value))


def _largest(rejects: Callable[[Array], Array], low: Array) -> Array:
    """Upper end of the bracket around the largest p in [low, 1] that ``rejects`` does not reject, by bisection."""
    steps = 26 if low.dtype == jnp.float32 else 54

    def halve(_, bracket):
        below, above = bracket
        middle = 0.5 * (below + above)
        rejected = rejects(middle)
        return jnp.where(rejected, below, middle), jnp.where(rejected, middle, above)

    return jax.lax.fori_loop(0, steps, halve, (low, jnp.ones_like(low)))[1]


def check_probability(name: str, value: Real, *, closed_above: bool = False) -> None:
    """Raise ``ConfigError`` unless every readable value lies in (0, 1), or is merely positive with ``closed_above``.

    A traced value cannot be read and passes.
    """
    if not is_concrete(value):
        return
    found = np.asarray(value)
    if not (np.all(found > 0) and (closed_above or np.all(found < 1))):
        expected = "a positive number" if closed_above else "a value in (0, 1)"
        raise ConfigError(f"{name}: found {value}, expected {expected}")


def hoeffding_ucb(rhat: Real, n: Real, delta: Real) -> Float[Array, "..."]:
    """Hoeffding's upper confidence bound ``rhat + sqrt(ln(1/delta) / (2n))``, at most 1; 1 for n = 0.

    Args:
      rhat: mean of n losses in [0, 1].
      n: the number of independent losses (trajectories), never the number of thresholds tried.
      delta: error probability, in (0, 1).

    Raises:
      ConfigError: a readable delta outside (0, 1).

    Reference: W. Hoeffding (1963); S. Bates et al., "Distribution-free, risk-controlling prediction sets",
    arXiv 2101.02703, section 3.1.
    """
    check_probability("delta", delta)
    rhat, n, delta = _floats(rhat, n, delta)
    margin = jnp.sqrt(-jnp.log(delta) / (2.0 * jnp.maximum(n, 1.0)))
    return jnp.where(n > 0, jnp.minimum(rhat + margin, 1.0), 1.0)


def hoeffding_pvalue(rhat: Real, n: Real, eps: Real) -> Float[Array, "..."]:
    """p-value of "risk > eps" by Hoeffding's inequality, ``exp(-2 n (eps - rhat)_+^2)``; 1 for n = 0."""
    rhat, n, eps = _floats(rhat, n, eps)
    return jnp.exp(-2.0 * n * jnp.square(jnp.maximum(eps - rhat, 0.0)))


def crc_upper(total: Real, n: Real) -> Float[Array, "..."]:
    """Conformal risk control's corrected mean ``(total + 1) / (n + 1)`` of n losses in [0, 1] that add up to ``total``.

    The smallest eps for which the EXPECTED risk is controlled, and only for a loss that is monotone in the threshold.
    It takes the sum, so that a tie with eps is exact.

    Reference: A. Angelopoulos et al., "Conformal risk control", arXiv 2208.02814, equation 4.
    """
    total, n = _floats(total, n)
    return jnp.minimum((total + 1.0) / (n + 1.0), 1.0)


def empirical_bernstein_ucb(
    rhat: Real,
    variance: Real,
    n: Real,
    delta: Real,
) -> Float[Array, "..."]:
    """``rhat + sqrt(2 V ln(2/delta) / n) + 7 ln(2/delta) / (3 (n-1))``, at most 1; 1 for n < 2.

    Args:
      variance: V, the unbiased sample variance of the losses.

    Raises:
      ConfigError: a readable delta outside (0, 1).

    Reference: A. Maurer and M. Pontil, "Empirical Bernstein bounds and sample variance penalization",
    arXiv 0907.3740, theorem 4.
    """
    check_probability("delta", delta)
    rhat, variance, n, delta = _floats(rhat, variance, n, delta)
    log_term = jnp.log(2.0 / delta)
    size = jnp.maximum(n, 2.0)
    spread = jnp.sqrt(2.0 * jnp.maximum(variance, 0.0) * log_term / size)
    bound = rhat + spread + 7.0 * log_term / (3.0 * (size - 1.0))
    return jnp.where(n >= 2, jnp.minimum(bound, 1.0), 1.0)


def clopper_pearson_upper(k: Real, n: Real, delta: Real) -> Float[Array, "..."]:
    """One-sided Clopper-Pearson bound: the largest p with ``P(Bin(n, p) <= k) >= delta``.

    Exact for 0/1 losses. 1 for k = n and for n = 0; ``1 - delta^(1/n)`` for k = 0. Found by bisection with a fixed
    number of steps, and rounded up: the returned p is itself rejected (or is 1).

    Raises:
      ConfigError: a readable delta outside (0, 1), or a readable k outside 0..n.

    Reference: C. Clopper and E. Pearson (1934).
    """
    check_probability("delta", delta)
    if is_concrete(k) and is_concrete(n) and not np.all((np.asarray(k) >= 0) & (np.asarray(k) <= np.asarray(n))):
        raise ConfigError(f"k: found {k}, expected 0 <= k <= n with n = {n}")
    return _clopper_pearson(*_floats(k, n, delta))


@jax.jit
def _clopper_pearson(k: Array, n: Array, delta: Array) -> Array:
    low = jnp.floor(k) / jnp.maximum(n, 1.0)
    return jnp.where(k < n, _largest(lambda p: binomial_cdf(k, n, p) < delta, low), 1.0)


def hb_pvalue(rhat: Real, n: Real, eps: Real) -> Float[Array, "..."]:
    """Hoeffding-Bentkus p-value of "risk > eps" from the mean of n losses in [0, 1], 0/1 or fractional.

    ``min(exp(-n h1(min(rhat, eps), eps)), e P(Bin(n, eps) <= ceil(n rhat)), 1)`` with
    ``h1(a, b) = a ln(a/b) + (1-a) ln((1-a)/(1-b))``. 1 for n = 0 and for eps <= 0, 0 for eps >= 1.
    The rounding of ``n rhat`` in float32 must not lift the ceiling by one, so 1e-4 is subtracted first.

    Reference: A. Angelopoulos et al., "Learn then test", arXiv 2110.01052, proposition 1 (after Bates et al.,
    arXiv 2101.02703). Reconstruction: the budget paper does not say which p-value it uses; its code has Hoeffding's.
    """
    return _hb_pvalue(*_floats(rhat, n, eps))


@jax.jit
def _hb_pvalue(rhat: Array, n: Array, eps: Array) -> Array:
    return _pvalue(rhat, jnp.ceil(n * rhat - _BENTKUS_SLACK), n, eps, True)


def _pvalue(rhat: Array, count: Array, n: Array, eps: Array, fractional: Array | bool) -> Array:
    """Hoeffding-Bentkus where ``fractional``, else the binomial tail of ``count``; 1 for eps <= 0, 0 for eps >= 1."""
    inside = (eps > 0) & (eps < 1)
    level = jnp.where(inside, eps, 0.5)
    exact = binomial_cdf(count, n, level)
    hoeffding = jnp.where(rhat < level, jnp.exp(-_two_deviances(jnp.minimum(n * rhat, n), n, level)), 1.0)
    loose = jnp.minimum(jnp.minimum(hoeffding, math.e * exact), 1.0)
    return jnp.where(inside, jnp.where(fractional, loose, exact), jnp.where(eps >= 1, 0.0, 1.0))


def mixed_pvalue(total: Real, count: Real, n: Real, eps: Real, fractional: Bool[Array, "..."]) -> Float[Array, "..."]:
    """p-value of "risk > eps" from a sum of n losses: :func:`hb_pvalue` where ``fractional``, else the exact tail.

    ``count`` is the sum rounded up, of which both need the tail: computed once for the two.
    """
    total, count, n, eps = _floats(total, count, n, eps)
    return _pvalue(total / jnp.maximum(n, 1.0), count, n, eps, fractional)


@jax.jit
def mixed_upper(total: Real, count: Real, n: Real, delta: Real, fractional: Bool[Array, "..."]) -> Float[Array, "..."]:
    """:func:`hb_upper` where ``fractional``, else :func:`clopper_pearson_upper`, by one bisection."""
    total, count, n, delta = _floats(total, count, n, delta)
    rhat = total / jnp.maximum(n, 1.0)
    low = jnp.where(fractional, jnp.clip(rhat, 0.0, 1.0), jnp.floor(count) / jnp.maximum(n, 1.0))

    def rejects(level):
        value = _pvalue(rhat, count, n, level, fractional)
        return jnp.where(fractional, value <= delta, value < delta)

    return jnp.where(fractional | (count < n), _largest(rejects, low), 1.0)


def hb_upper(rhat: Real, n: Real, delta: Real) -> Float[Array, "..."]:
    """Hoeffding-Bentkus upper bound: the least eps from which on :func:`hb_pvalue` is at most delta; 1 if none is.

    Raises:
      ConfigError: a readable delta outside (0, 1).
    """
    check_probability("delta", delta)
    return _hb_upper(*_floats(rhat, n, delta))


@jax.jit
def _hb_upper(rhat: Array, n: Array, delta: Array) -> Array:
    return _largest(lambda eps: _hb_pvalue(rhat, n, eps) <= delta, jnp.clip(rhat, 0.0, 1.0))
