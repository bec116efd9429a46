"""RIF-RFT: train only on what the model can sometimes solve; and how much a sequence of tasks makes it forget.

Before reinforcement fine-tuning (RFT, GRPO with a rule-based reward) on a task, roll the model *as it is at the start
of the task* out on every training instance, and drop the instances it never solves. The filter costs N rollouts an
instance; count them in every budget.

Reference: Lai et al., "Reinforcement fine-tuning naturally mitigates forgetting in continual post-training", arXiv
2507.05386; read through abstracts and third-party code. A later benchmark reports the opposite: "RL forgets! Towards
continual policy optimization", arXiv 2607.04364.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Int, Key

from jaxmeth.rl._common import as_float, check_number, check_shape
from jaxmeth.rl.advantages import Centred, Rewards, Valid, centre, group_stats, standard_deviation
from jaxmeth.types import ConfigError, Params


class FilterResult(NamedTuple):
    """Per instance: whether to train on it, share of successes, mean, population variance and best of its rewards.

    Of no usable rollout: keep False, pass_rate, mean and var 0, best -inf.
    """

    keep: Bool[Array, " X"]
    pass_rate: Float[Array, " X"]
    mean: Float[Array, " X"]
    var: Float[Array, " X"]
    best: Float[Array, " X"]


def rif_filter(
    rewards: Rewards,
    valid: Valid = None,
    *,
    success_threshold: float | Float[Array, ""] = 1.0,
    min_successes: int = 1,
    max_pass_rate: float | Float[Array, ""] | None = None,
) -> FilterResult:
    """Keep instance x if at least ``min_successes`` of its N rollouts reach ``success_threshold``.

    Reconstruction of the exact thresholds: the abstract says "rollout-based instance filtering", third-party code keeps
    an instance if any of 8 rollouts is correct. Alternatives: filtering on reward variance > 0 (here: max_pass_rate
    just below 1), repeating the filter every epoch, a soft probability of keeping.

    Args:
      rewards: [X, N]. With a format bonus pass the *accuracy* part only: the threshold compares what it is given.
      valid: [X, N], nonzero = exists; a NaN or infinite reward counts as not valid.
      min_successes: at least 0; 0 keeps whatever has a rollout.
      max_pass_rate: drop instances above it (mastered: without gradient under GRPO anyway); None = no limit.

    Raises:
      ConfigError: shapes that disagree, min_successes negative, max_pass_rate outside [0, 1], a NaN threshold.
    """
    check_number("min_successes", min_successes, 0)
    check_number("success_threshold", success_threshold, -jnp.inf)
    if max_pass_rate is not None:
        check_number("max_pass_rate", max_pass_rate, 0, 1)
    return _filter(centre(rewards, valid, None, None), success_threshold, min_successes, max_pass_rate)


@jax.jit
def _filter(c: Centred, success_threshold: Any, min_successes: Any, max_pass_rate: Any) -> FilterResult:
    successes = (c.ok & (c.rewards >= success_threshold)).sum(1)
    pass_rate = successes / jnp.maximum(c.n, 1)
    keep = (c.n > 0) & (successes >= min_successes)
    if max_pass_rate is not None:
        keep &= pass_rate <= max_pass_rate
    best = c.groups.highest(jnp.where(c.ok, c.rewards, -jnp.inf))
    var = jnp.square(standard_deviation(c, 0) * c.scale)
    return FilterResult(keep, pass_rate, c.mean * c.scale, var, best)


def kept_indices(keep: Bool[Array, " X"], size: int) -> Int[Array, " size"]:
    """Indices of the kept instances in order, padded with -1 to the static ``size`` (and cut off beyond it)."""
    check_number("size", size, 0)
    return jnp.nonzero(keep, size=size, fill_value=-1)[0]


def reward_variance(rewards: Rewards, valid: Valid = None) -> Float[Array, " X"]:
    """Population variance of the rewards of each instance; ``p (1 - p)`` where they are binary."""
    return jnp.square(group_stats(rewards, valid, ddof=0).std)


def gradient_scale(rewards: Rewards, valid: Valid = None, *, standardised: bool = True) -> Float[Array, " X"]:
    """Factor of the policy gradient of each instance, 0 where it is solved or hopeless.

    With binary rewards the gradient is this factor times the difference of the mean score gradients of right and wrong
    rollouts: ``sqrt(p (1 - p))`` where advantages are divided by the standard deviation, else ``p (1 - p)``. The
    gradient of supervised fine-tuning has no such factor, and is largest where the answer is unlikely.
    """
    std = group_stats(rewards, valid, ddof=0).std
    return std if standardised else jnp.square(std)


class ContinualMetrics(NamedTuple):
    """Scalars in the units of the accuracies; negative forgetting and transfer = accuracy was lost."""

    avg_acc: Float[Array, ""]
    forgetting: Float[Array, ""]
    backward_transfer: Float[Array, ""]
    gain: Float[Array, ""]


def continual_metrics(acc: Float[Array, "T _"], base: Float[Array, " _"]) -> ContinualMetrics:
    """Summaries of a[k, j], the accuracy on task j after training on task k, of T tasks:

    * avg_acc = mean_j a[T-1, j];
    * forgetting = mean over j < T-1 of a[T-1, j] - max over j <= k < T-1 of a[k, j];
    * backward_transfer = mean over j < T-1 of a[T-1, j] - a[j, j];
    * gain = mean_j a[j, j] - base[j].

    Args:
      base: accuracies before any training.

    Returns:
      Scalars; forgetting and transfer 0 for one task. forgetting <= backward_transfer.

    Raises:
      ConfigError: acc is not square or empty, base has another length.
    """
    tasks = acc.shape[0]
    if not tasks or acc.shape[1] != tasks:
        raise ConfigError(f"acc: found shape {acc.shape}, expected [T, T] with T at least 1")
    check_shape("base", base, (tasks,), "acc's tasks")
    return _continual(as_float(acc), as_float(base))


@jax.jit
def _continual(acc: Array, base: Array) -> ContinualMetrics:
    tasks = acc.shape[0]
    last, learnt = acc[-1], jnp.diagonal(acc)
    k, j = jnp.arange(tasks)[:, None], jnp.arange(tasks)[None]
    earlier = (k >= j) & (k < tasks - 1)
    best = jnp.where(earlier, acc, -jnp.inf).max(0)
    before = jnp.arange(tasks) < tasks - 1
    count = max(tasks - 1, 1)
    forgetting = jnp.where(before, last - jnp.where(before, best, 0), 0).sum() / count
    transfer = jnp.where(before, last - learnt, 0).sum() / count
    return ContinualMetrics(last.mean(), forgetting, transfer, (learnt - base).mean())


class ContinualRun(NamedTuple):
    """Accuracies [k, j] after each task and before any, whether nothing of a task was kept, and the last parameters."""

    acc: Float[Array, "T T"]
    base: Float[Array, " T"]
    skipped: tuple[bool, ...]
    params: Any


def run_continual(
    tasks: Sequence[Any],
    init_params: Params | Any,
    learner: Callable[[Any, Any, Array], Any],
    eval_fn: Callable[[Any, Any], float | ArrayLike],
    filter: Callable[[Any, Any, Array], Any] | None = None,
    *,
    key: Key[Array, ""],
) -> ContinualRun:
    """Train on one task after the other, and measure all tasks before the first and after each. A loop on the host.

    Args:
      learner: ``(params, task, key) -> params``.
      eval_fn: ``(params, task) -> accuracy``.
      filter: ``(params, task, key) -> task`` with fewer instances, or None where nothing is kept: the task is then
        skipped, never trained on. It sees the parameters at the start of the task.
      key: task k consumes ``fold_in(key, k)``, split in two: filter, learner.

    Raises:
      ConfigError: no tasks.
    """
    if not tasks:
        raise ConfigError("tasks: found none, expected at least 1")

    def evaluate(params: Any) -> Array:
        return jnp.stack([as_float(eval_fn(params, task)) for task in tasks])

    base, rows, skipped, params = evaluate(init_params), [], [], init_params
    for index, task in enumerate(tasks):
        filter_key, learner_key = jax.random.split(jax.random.fold_in(key, index))
        kept = task if filter is None else filter(params, task, filter_key)
        skipped.append(kept is None)
        if kept is not None:
            params = learner(params, kept, learner_key)
        rows.append(evaluate(params))
    return ContinualRun(jnp.stack(rows), base, tuple(skipped), params)
