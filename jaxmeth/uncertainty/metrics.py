"""How well a score ranks answers: prediction rejection, ROC-AUC, and bootstrap intervals of scores and differences.

A metric is a function ``(u [n], q [n]) -> scalar`` of uncertainties and qualities (higher = better).
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Key, Num

from jaxmeth.types import ConfigError

Metric = Callable[[Array, Array], Array]
_RANDOM = ("exact", "shuffled")
_SHUFFLES = 1000
# Resamples worked on at once: bounds the memory, whatever n and their number.
_CHUNK = 128


class Interval(NamedTuple):
    """A statistic of all answers and the ends of its percentile bootstrap interval."""

    value: Float[Array, ""]
    low: Float[Array, ""]
    high: Float[Array, ""]


def _check_answers(**arrays: Array) -> None:
    (first, reference), *others = arrays.items()
    if not reference.size:
        raise ConfigError(f"{first}: found 0 answers, expected at least 1")
    for name, array in others:
        if array.shape != reference.shape:
            raise ConfigError(f"{name}: found shape {array.shape}, expected {reference.shape}, that of {first}")


def _prefixes(n: int, max_rejection: float) -> int:
    if not 0 < max_rejection <= 1:
        raise ConfigError(f"max_rejection: found {max_rejection}, expected a share in (0, 1]")
    return max(1, int(max_rejection * n))


def _repeat(draw: Callable[[Array, Array], Array], key: Array, times: int) -> Array:
    """``draw(i, key_i)`` for i below ``times``, a bounded number of them at once."""
    chunks = -(-times // _CHUNK)
    index = jnp.arange(chunks * -(-times // chunks)).reshape(chunks, -1)
    return jax.lax.map(jax.vmap(lambda i: draw(i, jax.random.fold_in(key, i))), index).reshape(-1)[:times]


@jax.jit
def _normalise(q: Array) -> tuple[Array, Array]:
    """q on [0, 1] (one half where it is constant), and whether it is constant."""
    q = q.astype(jnp.result_type(jnp.float32, q.dtype))
    low, high = q.min(), q.max()
    constant = low == high
    return jnp.where(constant, 0.5, (q - low) / jnp.where(constant, 1, high - low)), constant


@partial(jax.jit, static_argnames="prefixes")
def _accepted(u: Array, q: Array, prefixes: int) -> Array:
    return _area(q[jnp.argsort(u, stable=True)], prefixes)


def _area(q: Array, prefixes: int) -> Array:
    """Mean over the longest ``prefixes`` prefixes of their mean: a fixed weight for every rank."""
    inverse = np.where(np.arange(1, len(q) + 1) > len(q) - prefixes, 1 / np.arange(1, len(q) + 1), 0)
    weight = np.cumsum(inverse[::-1])[::-1] / prefixes
    return (q * jnp.asarray(weight, q.dtype)).sum()


def rejection_area(
    u: Float[Array, " n"], q: Num[Array, " n2"] | Bool[Array, " n2"], max_rejection: float = 0.5
) -> Float[Array, ""]:
    """Mean quality of the accepted answers while the most uncertain are rejected, up to a share of them.

    ``(1/R) sum_{k=n-R+1..n} m_k`` with m_k the mean quality of the k least uncertain and ``R = max(1, int(share n))``;
    q is first scaled to [0, 1] (constant: one half). Of equal u the first in the input is accepted first; NaN counts as
    the most uncertain.

    Raises:
      ConfigError: no answers, unequal shapes, or max_rejection outside (0, 1].
    """
    _check_answers(u=u, q=q)
    return _accepted(u, _normalise(q)[0], _prefixes(u.shape[0], max_rejection))


def prediction_rejection_ratio(
    u: Float[Array, " n"],
    q: Num[Array, " n2"] | Bool[Array, " n2"],
    max_rejection: float = 0.5,
    random: str = "exact",
    *,
    key: Key[Array, ""] | None = None,
) -> Float[Array, ""]:
    """PRR: ``(area(u) - random) / (area(oracle) - random)`` with the area of :func:`rejection_area`.

    1 for the order of the quality itself, 0 in expectation for a random one, negative for worse. Unchanged by strictly
    increasing maps of u and by positive affine maps of q.

    Args:
      q: quality, higher = better, binary or continuous.
      max_rejection: static; the paper reports 0.5.
      random: ``exact``, the expectation over all orders, which is the mean of the scaled q; ``shuffled``, the mean of
        1,000 shuffles as in the public code, which consumes ``key``.

    Returns:
      A scalar; where oracle and random agree (constant quality, or R = 1) the raw area, as in the public code.

    Raises:
      ConfigError: no answers, unequal shapes, max_rejection outside (0, 1], an unknown random, no key for ``shuffled``.

    Reference: arXiv 2505.20045; A. Malinin et al., "Uncertainty estimation in autoregressive structured
    prediction", arXiv 2002.07650; lm-polygraph.
    """
    _check_answers(u=u, q=q)
    prefixes = _prefixes(u.shape[0], max_rejection)
    if random not in _RANDOM:
        raise ConfigError(f"random: found {random!r}, expected one of {', '.join(_RANDOM)}")
    if random == "shuffled" and key is None:
        raise ConfigError("key: found None, expected one with random 'shuffled'")
    return _ratio(u, q, prefixes, key if random == "shuffled" else None)


@partial(jax.jit, static_argnames="prefixes")
def _ratio(u: Array, q: Array, prefixes: int, key: Array | None) -> Array:
    scaled, constant = _normalise(q)
    chance = scaled.mean()
    if key is not None:
        chance = _repeat(lambda i, k: _area(jax.random.permutation(k, scaled), prefixes), key, _SHUFFLES).mean()
    raw = _accepted(u, scaled, prefixes)
    gain = _area(-jnp.sort(-scaled), prefixes) - chance
    alike = constant | (prefixes == 1)
    return jnp.where(alike, raw, (raw - chance) / jnp.where(alike, 1, gain))


def auroc(score: Float[Array, " n"], positive: Num[Array, " n2"] | Bool[Array, " n2"]) -> Float[Array, ""]:
    """ROC-AUC: the probability that a positive scores above a negative, ties counting one half.

    To judge an uncertainty, positive = wrong: ``auroc(u, q < threshold)``. NaN counts as the largest score.

    Args:
      positive: bool, or a number that is not 0.

    Returns:
      A scalar; NaN where there is no positive or no negative.

    Raises:
      ConfigError: no answers or unequal shapes.
    """
    _check_answers(score=score, positive=positive)
    return _auroc(score, positive)


@jax.jit
def _auroc(score: Array, positive: Array) -> Array:
    dtype = jnp.result_type(jnp.float32, score.dtype)
    score = jnp.where(jnp.isnan(score), jnp.inf, score)
    score, hit = jax.lax.sort((score, positive.astype(bool).astype(dtype)), num_keys=1)
    # The rank of equals is the mean of the first and the last of their run.
    index = jnp.arange(score.shape[0])
    change = score[1:] != score[:-1]
    first = jax.lax.cummax(jnp.where(jnp.append(True, change), index, 0))
    last = jax.lax.cummin(jnp.where(jnp.append(change, True), index, score.shape[0]), reverse=True)
    positives = hit.sum()
    negatives = score.shape[0] - positives
    # The mean rank of the positives less what they owe to each other: exact enough in float32 for any n.
    mean_rank = 0.5 * (hit * (first + last)).sum() / jnp.maximum(positives, 1)
    area = (mean_rank - 0.5 * (positives - 1)) / jnp.maximum(negatives, 1)
    return jnp.where((positives > 0) & (negatives > 0), area, jnp.nan)


@partial(jax.jit, static_argnames=("metric", "resamples"))
def _bootstrap(metric, scores, q, key, resamples, level):
    """Of the metric of the first score less those of the others; all scores [k, n] see the same resamples."""
    n = q.shape[0]

    def measure(index):
        values = jax.vmap(metric, (0, None))(scores[:, index], q[index])
        return values[0] - values[1:].sum()

    # Draw 0 is the sample itself, so that the metric is compiled once.
    drawn = _repeat(
        lambda i, key: measure(jnp.where(i == 0, jnp.arange(n), jax.random.randint(key, (n,), 0, n))),
        key,
        resamples + 1,
    )
    tail = (1 - level) / 2
    low, high = jnp.nanquantile(drawn[1:], jnp.stack([tail, 1 - tail]))
    return Interval(drawn[0], low, high)


def _check_bootstrap(resamples: int, level: float) -> None:
    if resamples < 1:
        raise ConfigError(f"resamples: found {resamples}, expected at least 1")
    if not 0 < level < 1:
        raise ConfigError(f"level: found {level}, expected a value in (0, 1)")


def bootstrap(
    metric: Metric,
    u: Float[Array, " n"],
    q: Num[Array, " n2"] | Bool[Array, " n2"],
    *,
    key: Key[Array, ""],
    resamples: int = 2000,
    level: float = 0.95,
) -> Interval:
    """Percentile bootstrap interval of ``metric(u, q)`` over answers drawn with replacement.

    Args:
      metric: static: give the same function object again (a module's function, not a fresh lambda) to compile once.
      key: consumed.
      level: coverage in (0, 1).

    Returns:
      ``Interval``; resamples for which the metric is NaN (ROC-AUC without a positive) are left out.

    Raises:
      ConfigError: no answers, unequal shapes, no resamples, or level outside (0, 1).

    Reference: B. Efron and R. Tibshirani, "An introduction to the bootstrap" (1993), chapter 13.
    """
    _check_answers(u=u, q=q)
    _check_bootstrap(resamples, level)
    return _bootstrap(metric, u[None], q, key, resamples, level)


def paired_bootstrap(
    metric: Metric,
    u_a: Float[Array, " n"],
    u_b: Float[Array, " n2"],
    q: Num[Array, " n3"] | Bool[Array, " n3"],
    *,
    key: Key[Array, ""],
    resamples: int = 2000,
    level: float = 0.95,
) -> Interval:
    """Bootstrap interval of ``metric(u_a, q) - metric(u_b, q)``, both on the same resampled answers.

    An interval that holds 0 leaves the order of the two scores undecided. Arguments, degenerate input and errors as in
    :func:`bootstrap`.
    """
    _check_answers(u_a=u_a, u_b=u_b, q=q)
    _check_bootstrap(resamples, level)
    return _bootstrap(metric, jnp.stack([u_a, u_b]), q, key, resamples, level)
