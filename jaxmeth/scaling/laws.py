"""The rival laws, and each law as data for one ``fit``: its parameters, their roles, and how units change them.

The seam is ``Law: (params, N, D) -> loss``. A :class:`ScalingLaw` is such a function that also says which of its
parameters are positive coefficients (fitted as logs) and which are exponents. Two laws that need a third input, the
bits or the strength of a perturbation, take it as ``x``.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmeth.scaling import shannon
from jaxmeth.scaling.shannon import Real, floats, log_of, log_sum, prepare
from jaxmeth.types import ConfigError, is_concrete


class ChinchillaParams(NamedTuple):
    """``E + A / N^a + B / D^b``."""

    A: Real
    B: Real
    E: Real
    a: Real
    b: Real


class OpenAIParams(NamedTuple):
    """``[(Nc / N)^(aN / aD) + Dc / D]^aD``."""

    Nc: Real
    Dc: Real
    aN: Real
    aD: Real


class QiDParams(NamedTuple):
    """``k D^b / (N^a P^g)``, P bits."""

    k: Real
    a: Real
    b: Real
    g: Real


class PTQParams(NamedTuple):
    """``C (D^gD / N^gN) exp(-P / gP)``, P bits."""

    C: Real
    gD: Real
    gN: Real
    gP: Real


class ChinchillaQiDParams(NamedTuple):
    """Chinchilla's loss plus the QiD degradation ``k D^qb / (N^qa P^g)``."""

    A: Real
    B: Real
    E: Real
    a: Real
    b: Real
    k: Real
    qa: Real
    qb: Real
    g: Real


class PrecisionParams(NamedTuple):
    """Chinchilla's loss plus the post-training part of the precision law, ``C (D^gD / N^gN) exp(-P / gP)``."""

    A: Real
    B: Real
    E: Real
    a: Real
    b: Real
    C: Real
    gD: Real
    gN: Real
    gP: Real


@jax.jit
def chinchilla_loss(params: ChinchillaParams, n: Real, d: Real) -> Float[Array, "..."]:
    """Chinchilla's loss ``E + A / N^a + B / D^b``; N and D in the units of the parameters.

    Reference: Hoffmann et al., "Training Compute-Optimal Large Language Models", arXiv 2203.15556, equation 2.
    """
    p, log_n, log_d = prepare(params, n, d)
    return jnp.exp(_chinchilla(p, log_n, log_d, None))


@jax.jit
def openai_loss(params: OpenAIParams, n: Real, d: Real) -> Float[Array, "..."]:
    """OpenAI's loss ``[(Nc / N)^(aN / aD) + Dc / D]^aD``; no additive floor.

    Reference: Kaplan et al., "Scaling Laws for Neural Language Models", arXiv 2001.08361, equation 1.5.
    """
    p, log_n, log_d = prepare(params, n, d)
    return jnp.exp(_openai(p, log_n, log_d, None))


@jax.jit
def qid_delta(params: QiDParams, n: Real, d: Real, bits: Real = 1.0) -> Float[Array, "..."]:
    """Degradation by quantisation ``k D^b / (N^a P^g)``, to be added to a clean loss; bits > 0.

    Reference: Ouyang et al., "Low-Bit Quantization Favors Undertrained LLMs", arXiv 2411.17691. Indicative values
    a = 0.2276, b = 0.5251, g = 5.4812, k = 0.017 are second-hand.
    """
    p, log_n, log_d = prepare(params, n, d)
    bits = jnp.asarray(bits, log_n.dtype)
    return p.k * jnp.exp(p.b * log_d - p.a * log_n - p.g * jnp.log(bits))


@jax.jit
def ptq_delta(params: PTQParams, n: Real, d: Real, bits: Real = 0.0) -> Float[Array, "..."]:
    """Degradation after training ``C (D^gD / N^gN) exp(-P / gP)``, to be added to a clean loss.

    Reference: Kumar et al., "Scaling Laws for Precision", arXiv 2411.04330, the post-training term.
    """
    p, log_n, log_d = prepare(params, n, d)
    bits = jnp.asarray(bits, log_n.dtype)
    return p.C * jnp.exp(p.gD * log_d - p.gN * log_n - bits / p.gP)


@jax.jit
def r2_score(y: Float[Array, "*batch"], yhat: Float[Array, "*batch"]) -> Float[Array, ""]:
    """Pooled ``1 - SSE / SST`` over all points, SST about the mean of ``y`` (the test points); may be negative.

    A constant ``y`` gives -inf, or NaN where it is predicted exactly.
    """
    y, yhat = floats(y, yhat)
    return 1.0 - jnp.sum((y - yhat) ** 2) / jnp.sum((y - y.mean()) ** 2)


def _chinchilla(p, log_n, log_d, x):
    return log_sum([p.E, p.A, p.B], [jnp.zeros_like(log_n), -p.a * log_n, -p.b * log_d])


def _openai(p, log_n, log_d, x):
    size = p.aN / p.aD * (log_of(p.Nc) - log_n)
    data = log_of(p.Dc) - log_d
    return p.aD * jnp.logaddexp(size, data)


def _chinchilla_qid(p, log_n, log_d, bits):
    fall = p.qb * log_d - p.qa * log_n - (0.0 if bits is None else p.g * jnp.log(bits))
    return log_sum([p.E, p.A, p.B, p.k], [jnp.zeros_like(log_n), -p.a * log_n, -p.b * log_d, fall])


def _precision(p, log_n, log_d, bits):
    fall = p.gD * log_d - p.gN * log_n - (0.0 if bits is None else bits / p.gP)
    return log_sum([p.E, p.A, p.B, p.C], [jnp.zeros_like(log_n), -p.a * log_n, -p.b * log_d, fall])


def _shannon(p, log_n, log_d, x):
    return -shannon.log_capacity(p, log_n, log_d)


def _noisy(p, log_n, log_d, strength):
    return -shannon.log_capacity(p if strength is None else shannon.raise_noise(p, strength), log_n, log_d)


def _scale_powers(p, log_n0, log_d0, powers):
    """``coefficient * n0^i d0^j`` for ``powers``: coefficient -> (i, j)."""
    return p._replace(**{k: getattr(p, k) * jnp.exp(i * log_n0 + j * log_d0) for k, (i, j) in powers.items()})


def _chinchilla_powers(p):
    return {"A": (-p.a, 0.0), "B": (0.0, -p.b)}


@jax.tree_util.register_static
@dataclass(frozen=True)
class ScalingLaw:
    """A law as a function ``(params, N, D, x=None) -> loss`` together with what a fit needs to know of it.

    Static: as a part of a PyTree it has no leaves.
    """

    name: str
    """For tables."""
    params: type
    """NamedTuple of its parameters."""
    log_loss: Callable[[Any, Array, Array, Array | None], Array]
    """``(params, log N, log D, x) -> log L``, elementwise; coefficients may be ``shannon.Log``."""
    coefficients: tuple[str, ...]
    """Positive parameters, fitted as logs."""
    exponents: tuple[str, ...]
    """Parameters fitted as they are, in [0, 5]."""
    powers: Callable[[Any], dict[str, tuple[Real, Real]]]
    """params -> {coefficient: (power of n0, power of d0)} by which a change of units multiplies it."""
    response: tuple[str, ...] = ()
    """Coefficients of which the loss is a sum of multiples; a leading ``/`` means the loss falls as its inverse."""
    covariates: tuple[tuple[str, float, float, float], ...] = ()
    """(parameter, low, high, value without ``x``) of those that only ``x`` can identify."""
    fixed: tuple[tuple[str, float], ...] = ()
    """Parameters that are constants."""
    gauge: tuple[str, ...] = ()
    """Coefficients with a common factor that changes nothing; one of them is held at 1."""

    def __call__(self, params, n: Real, d: Real, x: Real | None = None) -> Float[Array, "..."]:
        """Loss at N and D in the units of ``params``."""
        return _evaluate(self, params, n, d, x)

    def rescale(self, params, n0: Real, d0: Real):
        """Parameters for N/n0 and D/d0 that predict what ``params`` predict for N and D."""
        return _rescale(self, params, n0, d0)


@jax.jit
def _evaluate(law: ScalingLaw, params, n, d, x):
    p, log_n, log_d = prepare(params, n, d)
    return jnp.exp(law.log_loss(p, log_n, log_d, None if x is None else jnp.asarray(x, log_n.dtype)))


@jax.jit
def _rescale(law: ScalingLaw, params, n0, d0):
    p, log_n0, log_d0 = prepare(params, n0, d0)
    return _scale_powers(p, log_n0, log_d0, law.powers(p))


SHANNON = ScalingLaw(
    name="Shannon",
    params=shannon.ShannonParams,
    log_loss=_shannon,
    coefficients=("a", "b", "c", "d", "e"),
    exponents=("alpha", "beta", "gamma", "delta"),
    powers=lambda p: {"a": (p.alpha, 0.0), "b": (0.0, p.beta), "c": (p.gamma, p.gamma), "d": (0.0, p.delta)},
    response=("/a",),
    gauge=("b", "c", "d", "e"),
)
"""The full law: nine parameters, eight once b = 1."""

SHANNON_SIMPLE = replace(SHANNON, name="Shannon simplified", fixed=(("b", 1.0), ("e", 0.0)))
"""b = 1 and e = 0: seven parameters."""

SHANNON_NOISE = replace(
    SHANNON,
    name="Shannon with strength",
    params=shannon.NoisyShannonParams,
    log_loss=_noisy,
    covariates=(("kappa_c", -20.0, 20.0, 0.0), ("kappa_d", -20.0, 20.0, 0.0), ("kappa_e", -20.0, 20.0, 0.0)),
)
"""One law over all strengths ``x`` of a perturbation: eleven parameters."""

CHINCHILLA = ScalingLaw(
    name="Chinchilla",
    params=ChinchillaParams,
    log_loss=_chinchilla,
    coefficients=("A", "B", "E"),
    exponents=("a", "b"),
    powers=_chinchilla_powers,
    response=("A", "B", "E"),
)

OPENAI = ScalingLaw(
    name="OpenAI",
    params=OpenAIParams,
    log_loss=_openai,
    coefficients=("Nc", "Dc"),
    exponents=("aN", "aD"),
    powers=lambda p: {"Nc": (-1.0, 0.0), "Dc": (0.0, -1.0)},
)

CHINCHILLA_QID = ScalingLaw(
    name="Chinchilla+QiD",
    params=ChinchillaQiDParams,
    log_loss=_chinchilla_qid,
    coefficients=("A", "B", "E", "k"),
    exponents=("a", "b", "qa", "qb"),
    powers=lambda p: {**_chinchilla_powers(p), "k": (-p.qa, p.qb)},
    response=("A", "B", "E", "k"),
    covariates=(("g", 0.0, 20.0, 0.0),),
)
"""The fairest rival of the full Shannon law: eight free parameters at one perturbation."""

PRECISION = ScalingLaw(
    name="Precision",
    params=PrecisionParams,
    log_loss=_precision,
    coefficients=("A", "B", "E", "C"),
    exponents=("a", "b", "gD", "gN"),
    powers=lambda p: {**_chinchilla_powers(p), "C": (-p.gN, p.gD)},
    response=("A", "B", "E", "C"),
    covariates=(("gP", 1e-2, 20.0, 1.0),),
)
"""At one bit width it has the shape of Chinchilla+QiD; they differ over several."""

LAWS = (SHANNON, SHANNON_SIMPLE, CHINCHILLA, OPENAI, CHINCHILLA_QID, PRECISION)
"""The six laws that every comparison shows side by side."""


class Allocation(NamedTuple):
    """Compute-optimal sizes in plain counts and the loss there; NaN where no optimum lies inside the bounds."""

    n: Float[Array, "..."]
    d: Float[Array, "..."]
    loss: Float[Array, "..."]


def compute_optimal(
    law: ScalingLaw,
    params,
    flops: Real,
    *,
    n0: float = 1e9,
    d0: float = 1e9,
    n_lo: float = 1e4,
    n_hi: float = 1e15,
    flops_per: float = 6.0,
    x: Real | None = None,
) -> Allocation:
    """The N and D = flops / (flops_per N) with the lowest loss; ``params`` are for N/n0 and D/d0.

    For every law here log L along that line is unimodal in log N (sums of exponentials are log-convex, and log SNR is
    concave), so the sign of its slope is bisected. NaN where the loss falls towards ``n_lo`` or ``n_hi``.

    Raises: ConfigError where a concrete ``flops`` is not positive.
    """
    if is_concrete(flops) and not jnp.all(jnp.asarray(flops) > 0):
        raise ConfigError(f"flops: found {flops}, expected more than 0")
    return _allocate(law, params, flops, n0, d0, n_lo, n_hi, flops_per, x)


@jax.jit
def _allocate(law: ScalingLaw, params, flops, n0, d0, n_lo, n_hi, flops_per, x) -> Allocation:
    *leaves, flops = floats(*params, flops)
    p = type(params)(*leaves)
    dtype = flops.dtype
    log_n0, log_d0, low, high, per = (jnp.log(jnp.asarray(v, dtype)) for v in (n0, d0, n_lo, n_hi, flops_per))
    budget = jnp.log(flops) - per
    x = None if x is None else jnp.asarray(x, dtype)

    def log_loss(log_n):
        return law.log_loss(p, log_n - log_n0, budget - log_n - log_d0, x)

    def slope(log_n):
        return jax.jvp(log_loss, (log_n,), (jnp.ones_like(log_n),))[1]

    low, high = (v + jnp.zeros_like(budget) for v in (low, high))
    inside = (slope(low) < 0) & (slope(high) > 0)

    def halve(_, ends):
        left, right = ends
        middle = 0.5 * (left + right)
        falling = slope(middle) < 0
        return jnp.where(falling, middle, left), jnp.where(falling, right, middle)

    left, right = jax.lax.fori_loop(0, 80, halve, (low, high))
    log_n = 0.5 * (left + right)
    values = jnp.exp(log_n), jnp.exp(budget - log_n), jnp.exp(log_loss(log_n))
    return Allocation(*(jnp.where(inside, v, jnp.nan) for v in values))
