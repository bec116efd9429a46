"""The Shannon scaling law and what follows from it: capacity, SNR, the tokens at which loss turns, the sign of scaling.

A model is read as a noisy channel: its size gives bandwidth, its data give signal and, past a point, noise. Everything
is computed from log N and log D. N and D are in whatever units the parameters are for (:func:`rescale` changes them);
functions are compiled, and elementwise over arrays that broadcast: parameters of shape [P, 1] give P surfaces.

Reference: "LLMs as Noisy Channels: A Shannon Perspective on Model Capacity and Scaling Laws", arXiv 2605.23901.
Reconstruction: the formula is known from three independent readings that agree, not from code; the law with explicit
perturbation strength and the reference scales are ours.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Num

from jaxmeth.types import ConfigError, is_concrete

Real = Num[ArrayLike, "..."]
"""Numbers or arrays that broadcast together."""

_CAP = 80.0
_LOG_LN2 = math.log(math.log(2.0))
_BISECTIONS = 80


class ShannonParams(NamedTuple):
    """All >= 0; a and b > 0 and one of c, d, e > 0. Only the ratios of b, c, d, e matter: report them with b = 1."""

    a: Real
    b: Real
    c: Real
    d: Real
    e: Real
    alpha: Real
    beta: Real
    gamma: Real
    delta: Real


class NoisyShannonParams(NamedTuple):
    """The nine parameters, and how fast a perturbation of strength X raises each noise: ``c exp(kappa_c X)``, ..."""

    a: Real
    b: Real
    c: Real
    d: Real
    e: Real
    alpha: Real
    beta: Real
    gamma: Real
    delta: Real
    kappa_c: Real
    kappa_d: Real
    kappa_e: Real


def floats(*values: Real) -> list[Array]:
    """All values in one floating type, float32 at least: the widest of the arrays, or JAX's default without any."""
    dtype = jnp.promote_types(jnp.result_type(float, *values), jnp.float32)
    return [jnp.asarray(v, dtype) for v in values]


def prepare(params, n: Real, d: Real):
    """Parameters, log N and log D in one floating type."""
    *leaves, n, d = floats(*params, n, d)
    return type(params)(*leaves), jnp.log(n), jnp.log(d)


class Log(NamedTuple):
    """A positive coefficient given by its log, as fits hold it: it needs no care at zero and cannot overflow."""

    value: Array


def log_of(coefficient: Array | Log) -> Array:
    """Log of a coefficient; -inf for zero."""
    return coefficient.value if isinstance(coefficient, Log) else jnp.log(coefficient)


def times_exp(coefficient: Array | Log, power: Array) -> Array | Log:
    """``coefficient exp(power)``."""
    if isinstance(coefficient, Log):
        return Log(coefficient.value + power)
    return coefficient * jnp.exp(power)


def log_sum(coefficients: list[Array | Log | None], logs: list[Array]) -> Array:
    """``log(sum_i c_i exp(t_i))``, exact and with the right gradient where a coefficient is zero.

    The largest term with a positive coefficient is taken out as a constant; the exponents left are capped at 80, so a
    zero coefficient meets no infinity. None is a zero known beforehand. All coefficients zero: -inf.
    """
    pairs = [(c, t) for c, t in zip(coefficients, logs, strict=True) if c is not None]
    terms = [
        c.value + t if isinstance(c, Log) else jnp.where(c > 0, jnp.log(jnp.where(c > 0, c, 1.0)) + t, -jnp.inf)
        for c, t in pairs
    ]
    top = jax.lax.stop_gradient(functools.reduce(jnp.maximum, terms))
    top = jnp.where(jnp.isfinite(top), top, 0.0)
    scaled = [
        jnp.exp(term - top) if isinstance(c, Log) else c * jnp.exp(jnp.minimum(t - top, _CAP))
        for (c, t), term in zip(pairs, terms, strict=True)
    ]
    return top + jnp.log(sum(scaled))


@jax.custom_jvp
def log_softplus(x: Array) -> Array:
    """``log(log(1 + exp(x)))``, by its series ``x - exp(x) / 2`` below -15, where float32 would lose it."""
    tail = jnp.exp(-jnp.abs(x))
    direct = jnp.log(jnp.maximum(jnp.maximum(x, 0.0) + jnp.log1p(tail), jnp.finfo(x.dtype).tiny))
    return jnp.where(x < -15.0, x - 0.5 * tail, direct)


@log_softplus.defjvp
def _log_softplus_jvp(primals, tangents):
    (x,), (dx,) = primals, tangents
    value = log_softplus(x)
    # sigmoid(x) / softplus(x), by logs: no branch, and 1 at -inf.
    return value, dx * jnp.exp(jnp.minimum(x, 0.0) - jnp.log1p(jnp.exp(-jnp.abs(x))) - value)


def log_noise(p, log_n: Array, log_d: Array) -> Array:
    """``log Z = log(c (D N)^gamma + d D^delta + e)``."""
    return log_sum([p.c, p.d, p.e], [p.gamma * (log_n + log_d), p.delta * log_d, jnp.zeros_like(log_d)])


def log_snr(p, log_n: Array, log_d: Array) -> Array:
    """``log SNR = log b + beta log D - log Z``."""
    return log_of(p.b) + p.beta * log_d - log_noise(p, log_n, log_d)


def log_capacity(p, log_n: Array, log_d: Array) -> Array:
    """``log C = log a + alpha log N + log softplus(log SNR) - log ln 2``."""
    return log_of(p.a) + p.alpha * log_n + log_softplus(log_snr(p, log_n, log_d)) - _LOG_LN2


@jax.jit
def snr(params: ShannonParams, n: Real, d: Real) -> Float[Array, "..."]:
    """Signal-to-noise ratio ``b D^beta / (c (D N)^gamma + d D^delta + e)``, a plain ratio; units of the parameters."""
    return jnp.exp(log_snr(*prepare(params, n, d)))


@jax.jit
def capacity(params: ShannonParams, n: Real, d: Real) -> Float[Array, "..."]:
    """Channel capacity ``C = a N^alpha log2(1 + SNR)``.

    Any shapes that broadcast; positive N and D (zero or less: NaN or a limit). float32, or float64 where an input has
    it; a low SNR keeps its relative precision.
    """
    return jnp.exp(log_capacity(*prepare(params, n, d)))


@jax.jit
def loss(params: ShannonParams, n: Real, d: Real) -> Float[Array, "..."]:
    """Shannon loss ``L = 1 / C``, in nats where it was fitted to nats.

    There is no additive floor: L -> 0 as N and D grow without noise. Compare with Chinchilla's E.
    Reference: arXiv 2605.23901, the nine-parameter law.
    """
    return jnp.exp(-log_capacity(*prepare(params, n, d)))


@jax.jit
def at_strength(params: NoisyShannonParams, strength: Real) -> ShannonParams:
    """The law under a perturbation of strength X >= 0: c, d, e times ``exp(kappa X)``; X = 0 is the implicit law.

    ``strength`` broadcasts with the sizes used next. Reconstruction: the paper has such a variant, its form was not
    found; the alternative is to refit nine parameters at every strength.
    """
    *leaves, x = floats(*params, strength)
    return raise_noise(NoisyShannonParams(*leaves), x)


def raise_noise(p: NoisyShannonParams, x: Array) -> ShannonParams:
    """:func:`at_strength` for parameters in one type, of which coefficients may be :class:`Log`."""
    pairs = ((p.c, p.kappa_c), (p.d, p.kappa_d), (p.e, p.kappa_e))
    raised = [times_exp(v, k * x) for v, k in pairs]
    return ShannonParams(p.a, p.b, *raised, p.alpha, p.beta, p.gamma, p.delta)


@jax.jit
def fix_gauge(params: ShannonParams) -> ShannonParams:
    """The same law with b = 1: b, c, d, e are divided by b, so that tables of coefficients can be compared."""
    return params._replace(b=params.b / params.b, c=params.c / params.b, d=params.d / params.b, e=params.e / params.b)


@jax.jit
def rescale(params: ShannonParams, n0: Real, d0: Real) -> ShannonParams:
    """Parameters for N/n0 and D/d0 that predict what ``params`` predict for N and D.

    ``a' = a n0^alpha, b' = b d0^beta, c' = c (d0 n0)^gamma, d' = d d0^delta``.
    """
    p, log_n0, log_d0 = prepare(params, n0, d0)
    return p._replace(
        a=p.a * jnp.exp(p.alpha * log_n0),
        b=p.b * jnp.exp(p.beta * log_d0),
        c=p.c * jnp.exp(p.gamma * (log_n0 + log_d0)),
        d=p.d * jnp.exp(p.delta * log_d0),
    )


def _noise_shares(p, log_n: Array, log_d: Array) -> tuple[Array, Array, Array]:
    """Shares of Z: ``c (D N)^gamma / Z`` and ``d D^delta / Z``, and log SNR."""
    log_z = log_noise(p, log_n, log_d)

    def share(coefficient, term):
        return coefficient * jnp.exp(jnp.minimum(term - log_z, _CAP))

    interaction = share(p.c, p.gamma * (log_n + log_d))
    return interaction, share(p.d, p.delta * log_d), jnp.log(p.b) + p.beta * log_d - log_z


def _snr_slope(p, log_n: Array, log_d: Array) -> Array:
    """``d ln SNR / d ln D = beta - (gamma c (DN)^gamma + delta d D^delta) / Z``; it never rises along D."""
    interaction, data, _ = _noise_shares(p, log_n, log_d)
    return p.beta - p.gamma * interaction - p.delta * data


@jax.jit
def model_scaling_slope(params: ShannonParams, n: Real, d: Real) -> Float[Array, "..."]:
    """``d ln C / d ln N = alpha - gamma (c (DN)^gamma / Z) SNR / ((1 + SNR) ln(1 + SNR))``."""
    p, log_n, log_d = prepare(params, n, d)
    interaction, _, log_ratio = _noise_shares(p, log_n, log_d)
    # SNR/((1+SNR) ln(1+SNR)) = sigmoid(log SNR) / softplus(log SNR), 1 at low SNR.
    gain = jnp.exp(jax.nn.log_sigmoid(log_ratio) - log_softplus(log_ratio))
    return p.alpha - p.gamma * interaction * gain


@jax.jit
def model_scaling_sign(params: ShannonParams, n: Real, d: Real) -> Float[Array, "..."]:
    """1 where a bigger model at the same tokens lowers the loss, -1 where it raises it, 0 where it does nothing."""
    return jnp.sign(model_scaling_slope(params, n, d))


def optimal_tokens(params: ShannonParams, n: Real, lo: Real, hi: Real) -> Float[Array, "..."]:
    """Critical tokens D*(N): the D in (lo, hi) with the lowest loss, or NaN where the loss is monotone there.

    As N is fixed this is the peak of the SNR; its log is concave in log D, so the sign of its slope is bisected. One
    Newton step at the end gives D* a gradient with respect to the parameters. D* exists iff the largest active noise
    exponent exceeds beta and the smallest is below it (e > 0 counts as exponent 0).

    Raises: ConfigError where lo or hi is not positive or lo >= hi (checked when they are concrete).
    """
    if is_concrete(lo) and is_concrete(hi) and not (jnp.all(jnp.asarray(lo) > 0) and jnp.all(lo < jnp.asarray(hi))):
        raise ConfigError(f"lo, hi: found {lo}, {hi}, expected 0 < lo < hi")
    return _peak(params, n, lo, hi)


@jax.jit
def _peak(params, n, lo, hi):
    p, log_n, low = prepare(params, n, lo)
    high = jnp.log(jnp.asarray(hi, low.dtype))

    fixed = jax.lax.stop_gradient(p)
    shape = jnp.broadcast_shapes(*(v.shape for v in (*p, log_n, low, high)))
    low, high = (jax.lax.stop_gradient(jnp.broadcast_to(v, shape)) for v in (low, high))
    inside = (_snr_slope(fixed, log_n, low) > 0) & (_snr_slope(fixed, log_n, high) < 0)

    def halve(_, ends):
        left, right = ends
        middle = 0.5 * (left + right)
        rising = _snr_slope(fixed, log_n, middle) > 0
        return jnp.where(rising, middle, left), jnp.where(rising, right, middle)

    left, right = jax.lax.fori_loop(0, _BISECTIONS, halve, (low, high))
    root = 0.5 * (left + right)
    _, curve = jax.jvp(lambda v: _snr_slope(fixed, log_n, v), (root,), (jnp.ones_like(root),))
    curve = jnp.where(inside & (curve < 0), curve, -1.0)
    return jnp.where(inside, jnp.exp(root - _snr_slope(p, log_n, root) / curve), jnp.nan)


@jax.jit
def critical_tokens(params: ShannonParams, n: Real) -> Float[Array, "..."]:
    """D*(N) in closed form, for the laws with one of c, d, e zero; NaN where there is no D* or no closed form.

    c = 0: ``(beta e / ((delta - beta) d))^(1/delta)``; d = 0: the same with ``c N^gamma`` and gamma;
    e = 0: ``((beta - gamma) c N^gamma / ((delta - beta) d))^(1/(delta - gamma))``. Ours; :func:`optimal_tokens` covers
    the rest.
    """
    p, log_n, _ = prepare(params, n, 1.0)
    interaction = p.c * jnp.exp(p.gamma * log_n)

    def balance(below, rate_below, above, rate_above):
        """D where the falling and the rising part of the slope cancel; NaN unless the rates lie around beta."""
        exists = (rate_below < p.beta) & (rate_above > p.beta) & (below > 0) & (above > 0)
        ratio = (p.beta - rate_below) * below / jnp.where(exists, (rate_above - p.beta) * above, 1.0)
        power = 1.0 / jnp.where(exists, rate_above - rate_below, 1.0)
        return jnp.where(exists, jnp.exp(power * jnp.log(jnp.where(exists, ratio, 1.0))), jnp.nan)

    no_c = balance(p.e, 0.0, p.d, p.delta)
    no_d = balance(p.e, 0.0, interaction, p.gamma)
    up, down = balance(interaction, p.gamma, p.d, p.delta), balance(p.d, p.delta, interaction, p.gamma)
    no_e = jnp.where(p.delta > p.gamma, up, down)
    choice = jnp.where(p.c == 0, no_c, jnp.where(p.d == 0, no_d, jnp.where(p.e == 0, no_e, jnp.nan)))
    return choice + jnp.zeros_like(log_n)
