"""Advantages: rewards of the rollouts of a prompt -> how much better than the prompt's others each of them is.

The seam is ``(rewards [P, G], valid [P, G]) -> advantages [P, G]``. Every function also takes ragged groups: rewards
[N] with ``group_ids`` int[N] and the static ``num_groups``. Common to all of them:

* m, s and n of a group are over its usable rollouts: valid, and with a finite reward. An unusable rollout (NaN or
  infinite reward included) moves nothing and gets 0, as does every rollout of a group of one, and of none.
* A group of equal rewards gets exactly 0, whatever rounding does to its mean.
* Rewards up to 1e30 neither overflow nor lose the difference between them; bfloat16 and integers become float32.
* The result is a constant: no gradient flows into the rewards.
* Lists of numbers are taken as arrays.
* ConfigError where shapes disagree, ``group_ids`` lie outside 0 .. num_groups-1, or one of the two is missing.

Reference: Z. Shao et al., "DeepSeekMath" (GRPO), arXiv 2402.03300; Z. Liu et al., "Understanding R1-Zero-like
training" (Dr. GRPO), arXiv 2503.20783; A. Ahmadian et al., "Back to basics" (RLOO), arXiv 2402.14740.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num

from jaxmeth.rl._common import Groups, check_number, groups_of, usable
from jaxmeth.types import is_concrete, whole_number

Rewards = Num[Array, "*rollouts"]
Valid = Num[Array, "*other"] | Bool[Array, "*other"] | None
GroupIds = Int[Array, " _"] | None
Advantages = Float[Array, "*rollouts"]


class GroupStats(NamedTuple):
    """Number, mean and standard deviation of the usable rewards of each group; mean 0 of none, std 0 up to ddof."""

    n: Float[Array, " P"]
    mean: Float[Array, " P"]
    std: Float[Array, " P"]


class Centred(NamedTuple):
    """Rewards less the mean of their group, in units of ``scale``, so that squares of large rewards stay finite.

    ``rewards`` are as they came, 0 where they are not ``ok``.
    """

    rewards: Array
    deviation: Array
    mean: Array
    scale: Array
    n: Array
    ok: Array
    groups: Groups


def centre(rewards: Any, valid: Any, group_ids: Any, num_groups: int | None) -> Centred:
    """The beginning of every advantage."""
    return _centre(*usable(rewards, valid), groups_of(rewards, group_ids, num_groups))


@jax.jit
def _centre(r: Array, ok: Array, groups: Groups) -> Centred:
    n = groups.total(ok.astype(r.dtype))
    high, low = groups.highest(jnp.where(ok, r, -jnp.inf)), -groups.highest(jnp.where(ok, -r, -jnp.inf))
    scale = _power_of_two(jnp.maximum(high, -low))
    x = r / groups.spread(scale)
    # From the lowest reward on, so that the mean of nearly equal rewards is rounded once.
    base = jnp.where(n > 0, low, 0) / scale
    mean = base + groups.total(jnp.where(ok, x - groups.spread(base), 0)) / jnp.maximum(n, 1)
    differs = ok & groups.spread(high > low)
    return Centred(r, jnp.where(differs, x - groups.spread(mean), 0), mean, scale, n, ok, groups)


def _power_of_two(magnitude: Array) -> Array:
    """About the magnitude, at least 1: dividing by it is exact, so that small differences of rewards survive."""
    info = jnp.finfo(magnitude.dtype)
    bounded = jnp.clip(magnitude, 1, 2.0 ** (info.maxexp - 2))
    return jax.lax.reduce_precision(bounded, info.bits - info.nmant - 1, 0)


def standard_deviation(c: Centred, ddof: Any) -> Array:
    if is_concrete(ddof):
        whole_number("ddof", ddof, 0)
    return _standard_deviation(c, ddof)


@jax.jit
def _standard_deviation(c: Centred, ddof: Array | int) -> Array:
    square = c.groups.total(c.deviation * c.deviation)
    return jnp.where(c.n > ddof, jnp.sqrt(square / jnp.maximum(c.n - ddof, 1)), 0)


@jax.jit
def _ratio(a: Array, b: Array) -> Array:
    """a / b, 0 where b is 0."""
    return jnp.where(b > 0, a / jnp.where(b > 0, b, 1), 0)


def group_stats(
    rewards: Rewards, valid: Valid = None, ddof: int = 1, *, group_ids: GroupIds = None, num_groups: int | None = None
) -> GroupStats:
    """Number, mean and standard deviation (divisor ``n - ddof``) of the usable rewards of each group.

    Args:
      rewards: [P, G], or [N] with ``group_ids``.
      valid: the same shape, nonzero = this rollout exists and could be scored; None = all.
    """
    c = centre(rewards, valid, group_ids, num_groups)
    return GroupStats(c.n, c.mean * c.scale, standard_deviation(c, ddof) * c.scale)


def adv_grpo(
    rewards: Rewards,
    valid: Valid = None,
    *,
    eps: float | Float[Array, ""] = 1e-4,
    ddof: int = 1,
    group_ids: GroupIds = None,
    num_groups: int | None = None,
) -> Advantages:
    """GRPO: ``(r - m) / (s + eps)``.

    Where rewards of a group differ by as little as eps, eps decides the result: TRL uses 1e-4, verl and tunix 1e-6.

    Args:
      eps: at least 0.
      ddof: a whole number; 1 in all public code (s with n - 1), 0 is the population value that papers print.
    """
    check_number("eps", eps, 0)
    c = centre(rewards, valid, group_ids, num_groups)
    return _ratio(c.deviation, c.groups.spread(standard_deviation(c, ddof) + eps / c.scale))


def adv_dr_grpo(
    rewards: Rewards, valid: Valid = None, *, group_ids: GroupIds = None, num_groups: int | None = None
) -> Advantages:
    """Dr. GRPO: ``r - m``, GRPO without the division by the standard deviation."""
    c = centre(rewards, valid, group_ids, num_groups)
    return c.deviation * c.groups.spread(c.scale)


def adv_rloo(
    rewards: Rewards, valid: Valid = None, *, group_ids: GroupIds = None, num_groups: int | None = None
) -> Advantages:
    """RLOO: the reward less the mean of the *other* rollouts, ``n/(n-1) (r - m)``."""
    c = centre(rewards, valid, group_ids, num_groups)
    return c.deviation * c.groups.spread(c.scale * _ratio(c.n, c.n - 1))


def adv_batch_std(
    rewards: Rewards,
    valid: Valid = None,
    *,
    eps: float | Float[Array, ""] = 1e-4,
    ddof: int = 1,
    group_ids: GroupIds = None,
    num_groups: int | None = None,
) -> Advantages:
    """``(r - m) / (s_batch + eps)`` with the standard deviation of the raw rewards of everything that is passed.

    The only advantage that looks across groups: before splitting a batch, compute it on the whole one and let the parts
    use :func:`adv_reinforce` on the result.
    """
    check_number("eps", eps, 0)
    c = centre(rewards, valid, group_ids, num_groups)
    whole = centre(c.rewards.reshape(1, -1), c.ok.reshape(1, -1), None, None)
    scale = whole.scale[0]
    return _ratio(c.deviation * c.groups.spread(c.scale / scale), standard_deviation(whole, ddof)[0] + eps / scale)


def adv_reinforce(
    rewards: Rewards, valid: Valid = None, *, group_ids: GroupIds = None, num_groups: int | None = None
) -> Advantages:
    """REINFORCE: the reward itself, without a baseline."""
    groups_of(rewards, group_ids, num_groups)
    return usable(rewards, valid)[0]


def group_filter(
    rewards: Rewards, valid: Valid = None, *, group_ids: GroupIds = None, num_groups: int | None = None
) -> Bool[Array, " P"]:
    """DAPO's dynamic sampling: keep the groups whose usable rewards are not all equal.

    A group with fewer than two usable rollouts is dropped. Dropping changes the denominator of a global token mean;
    the advantages it drops are 0 anyway.

    Reference: Q. Yu et al., "DAPO", arXiv 2503.14476, section 3.2.
    """
    c = centre(rewards, valid, group_ids, num_groups)
    return c.groups.highest(jnp.abs(c.deviation)) > 0
