"""The confidence network of a judge, and how well a confidence ranks: pairs, margins, capacity.

Public as ``uncertainty.judge``.

Reference: "Margin-Adaptive Confidence Ranking for Reliable LLM Judgement", arXiv 2605.15416 (by a reading note).
"""

import itertools
import math
from functools import lru_cache
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, ArrayLike, Bool, Float, Int, Key, Num

from jaxmeth.risk.bounds import check_probability
from jaxmeth.types import ConfigError, Params

GAMMA_GRID = np.geomspace(1e-3, 1.0, 400)
"""Margins among which the adaptive one is chosen. Reconstruction: the note gives no range."""


# --- estimator -------------------------------------------------------------------------------------------------------


class Estimator(nnx.Module):
    """MLP from views to a logit, ReLU between the layers."""

    def __init__(self, widths: tuple[int, ...], *, rngs: nnx.Rngs):
        for i, (inside, outside) in enumerate(itertools.pairwise(widths)):
            setattr(self, f"layer{i}", nnx.Linear(inside, outside, rngs=rngs))
        self.depth = len(widths) - 1

    def __call__(self, x: Float[Array, "*b T"]) -> Float[Array, "*b"]:
        for i in range(self.depth):
            x = getattr(self, f"layer{i}")(x if i == 0 else jax.nn.relu(x))
        return x[..., 0]


@lru_cache
def _graph(widths: tuple[int, ...]) -> nnx.GraphDef:
    return nnx.split(nnx.eval_shape(lambda: Estimator(widths, rngs=nnx.Rngs(0))))[0]


def _kernels(params: Params) -> list[Array]:
    return [params[f"layer{i}"]["kernel"] for i in range(len(params))]


def init_estimator(rng: Key[Array, ""], num_views: int, hidden: tuple[int, ...] = (64, 32, 16)) -> Params:
    """Parameters ``{"layer0": {"kernel", "bias"}, ...}`` of the confidence network; ``rng`` is consumed."""
    module = Estimator((num_views, *hidden, 1), rngs=nnx.Rngs(rng))
    return nnx.to_pure_dict(nnx.state(module))


def logit(params: Params, s: Array) -> Array:
    kernels = _kernels(params)
    widths = (*[kernel.shape[0] for kernel in kernels], 1)
    s = s.astype(jnp.result_type(jnp.float32, s.dtype))
    return nnx.merge(_graph(widths), params)(s)


def confidence(params: Params, s: Float[Array, "*b T"]) -> Float[Array, "*b"]:
    """``C(s) = sigmoid(MLP(s))`` in (0, 1), in float32 (float64 for float64 views)."""
    return jax.nn.sigmoid(logit(params, s))


# --- ranking ---------------------------------------------------------------------------------------------------------


def sample_pairs(
    rng: Key[Array, ""], agree: Bool[Array, " n"] | Int[Array, " n"], num: int = 5000
) -> tuple[Int[Array, " P"], Int[Array, " P"]]:
    """Random (agree, disagree) index pairs with replacement; ``rng`` is consumed.

    Where a class is empty its indices are arbitrary: ``fit`` looks for that first.
    """
    agree = agree.astype(bool)
    first, second = jax.random.split(rng)
    return _draw(first, agree, num), _draw(second, ~agree, num)


def _draw(rng: Array, member: Array, num: int) -> Array:
    """Uniform among the true entries: the r-th of them is where the running count passes r."""
    count = jnp.cumsum(member)
    rank = jnp.floor(jax.random.uniform(rng, (num,)) * count[-1]).astype(count.dtype)
    return jnp.minimum(jnp.searchsorted(count, rank, side="right"), member.shape[0] - 1)


def margins(conf: Array, i: Array, j: Array) -> Array:
    return conf[i] - conf[j]


def soft_risk(diff: Array, gamma: ArrayLike, tau: ArrayLike) -> Array:
    return jax.nn.softplus(-(diff - gamma) / tau).mean(-1)


def rank_loss(
    conf: Float[Array, " n"],
    i: Int[Array, " P"],
    j: Int[Array, " P"],
    gamma: Num[ArrayLike, ""],
    kind: Literal["hard", "soft"] = "hard",
    tau: float = 0.1,
    ties: Literal["none", "half"] = "none",
) -> Float[Array, ""]:
    """Ranking risk of pairs (i agrees, j disagrees) with ``d = C_i - C_j`` at margin gamma.

    Hard: ``mean 1[d < gamma]``, strict, so that constant confidence has risk 0 at gamma = 0; ``ties="half"`` counts
    ``d = gamma`` as a half (then risk 0 is 1 - AUROC over all pairs). Soft: ``mean softplus(-(d - gamma) / tau)``, at
    least ``ln 2`` times the hard risk.

    Reference: arXiv 2605.15416, equations of the ranking risk and its surrogate (by the note).
    """
    diff = margins(conf, i, j)
    if kind == "soft":
        return soft_risk(diff, gamma, tau)
    below = (diff < gamma).astype(diff.dtype)
    return jnp.mean(below + 0.5 * (diff == gamma) if ties == "half" else below)


def auroc(conf: Float[Array, " n"], agree: Bool[Array, " n"] | Int[Array, " n"]) -> Float[Array, ""]:
    """Probability that an agreement is ranked above a disagreement, ties counted half; one half if a class is empty."""
    agree = agree.astype(bool)
    # Sorted disagreements, with +inf in the places of the agreements, so that searching counts disagreements only.
    wrong = jnp.sort(jnp.where(agree, jnp.inf, conf))
    below = jnp.searchsorted(wrong, conf, side="left") + jnp.searchsorted(wrong, conf, side="right")
    pairs = agree.sum() * (~agree).sum()
    wins = 0.5 * jnp.sum(jnp.where(agree, below, 0).astype(conf.dtype))
    return jnp.where(pairs > 0, wins / jnp.maximum(pairs, 1), 0.5)


def monotonicity_violation(
    conf: Float[Array, " n"], agree: Bool[Array, " n"] | Int[Array, " n"], bins: int = 10
) -> Float[Array, ""]:
    """Share of adjacent confidence bins (equal mass) whose agreement decreases; 0 for fewer items than bins.

    Raises:
      ConfigError: bins < 2.
    """
    if bins < 2:
        raise ConfigError(f"bins: found {bins}, expected at least 2")
    n = conf.shape[0]
    if n < bins:
        return jnp.zeros((), conf.dtype)
    rank = jnp.argsort(jnp.argsort(conf, stable=True), stable=True)
    place = rank * bins // n
    hits = jax.ops.segment_sum(agree.astype(conf.dtype), place, bins)
    rate = hits / jax.ops.segment_sum(jnp.ones(n, conf.dtype), place, bins)
    return jnp.mean((rate[1:] < rate[:-1]).astype(conf.dtype))


# --- capacity and the adaptive margin --------------------------------------------------------------------------------


class Complexity(NamedTuple):
    """``phi`` and the root term of the bound without its unknown constant: for comparison, never a guarantee."""

    phi: Float[Array, ""]
    term: Float[Array, ""]


def frobenius_root(params: Params) -> Array:
    """Root of the summed squared Frobenius norms of the weights (no biases), with a finite gradient at 0."""
    total = sum(jnp.sum(jnp.square(kernel)) for kernel in _kernels(params))
    return jnp.where(total > 0, jnp.sqrt(jnp.where(total > 0, total, 1.0)), 0.0)


def complexity_proxy(params: Params, gamma: Num[ArrayLike, ""]) -> Float[Array, ""]:
    """``sqrt(sum_l ||W_l||_F^2) / gamma``: the penalty of the adaptive objective. Weights only, no biases.

    Unlike the Phi of the bound it changes when a layer is scaled by q and the next by 1/q, which leaves a ReLU network
    the same function: it is the looser of the two.
    """
    return frobenius_root(params) / gamma


def pac_bayes_complexity(params: Params, gamma: float = 0.1, pairs: int = 5000, delta: float = 0.05) -> Complexity:
    """Capacity in the generalisation bound of the ranking risk.

    ``Phi = n^2 h ln(n h) prod_l ||W_l||_2^2 sum_l ||W_l||_F^2 / ||W_l||_2^2`` and
    ``sqrt((Phi + ln(3 m / delta)) / (gamma^2 (m - 1)))``. Reconstruction: n is the depth, h the largest width, m the
    number of pairs. A layer that is 0 makes Phi 0.

    Raises:
      ConfigError: gamma <= 0, fewer than 2 pairs, delta outside (0, 1).

    Reference: arXiv 2605.15416, theorem on the margin bound (by the note).
    """
    check_probability("gamma", gamma, closed_above=True)
    check_probability("delta", delta)
    if pairs < 2:
        raise ConfigError(f"pairs: found {pairs}, expected at least 2")
    kernels = _kernels(params)
    depth, width = len(kernels), max(max(kernel.shape) for kernel in kernels)
    spectral = jnp.stack([jnp.linalg.norm(kernel, ord=2) for kernel in kernels])
    frobenius = jnp.stack([jnp.sum(jnp.square(kernel)) for kernel in kernels])
    ratio = frobenius / jnp.where(spectral > 0, jnp.square(spectral), 1.0)
    phi = depth**2 * width * math.log(depth * width) * jnp.prod(jnp.square(spectral)) * ratio.sum()
    return Complexity(phi, jnp.sqrt((phi + math.log(3 * pairs / delta)) / (gamma**2 * (pairs - 1))))


def margin_objective(
    diff: Float[Array, " P"],
    norm: Num[ArrayLike, ""],
    beta: Num[ArrayLike, ""],
    grid: Float[Array, " g"],
    tau: float = 0.1,
) -> Float[Array, " g"]:
    """``mean softplus(-(d - gamma) / tau) + beta norm / gamma`` for every gamma of the grid: rising plus falling."""
    return jax.lax.map(lambda gamma: soft_risk(diff, gamma, tau), grid, batch_size=16) + beta * norm / grid


def adaptive_gamma(
    diff: Float[Array, " P"],
    norm: Num[ArrayLike, ""],
    beta: Num[ArrayLike, ""],
    grid: Float[Array, " g"],
    tau: float = 0.1,
) -> Float[Array, ""]:
    """The grid's minimiser of :func:`margin_objective`; grows with beta, and is the lower end at beta = 0."""
    return grid[jnp.argmin(margin_objective(diff, norm, beta, grid, tau))]
