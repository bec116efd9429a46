"""What the files of this family share: checks of arguments, and sums over the rollouts of each prompt."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxmeth.types import ConfigError, extremes, is_concrete

LARGEST = float(np.finfo(np.float32).max)


def as_float(x: Any) -> Array:
    """float32, or float64 where the input has it."""
    x = jnp.asarray(x)
    return x.astype(jnp.result_type(jnp.float32, x.dtype))


def as_array(name: str, x: Any) -> Array | np.ndarray:
    """Lists become arrays; what cannot become one is refused by name. NumPy's stay: ``jit`` can read those."""
    try:
        return x if hasattr(x, "dtype") else jnp.asarray(x)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name}: found {x!r}, expected an array of numbers") from error


def check_choice(name: str, value: Any, allowed: Iterable[str]) -> None:
    allowed = tuple(allowed)
    if value not in allowed:
        raise ConfigError(f"{name}: found {value!r}, expected one of {', '.join(allowed)}")


def check_number(name: str, value: Any, low: float, high: float = np.inf, *, above: bool = False) -> None:
    """Raise unless ``low <= value <= high`` (``low < value`` with ``above``); a traced value passes, unread."""
    if not is_concrete(value):
        return
    try:
        number = float("nan") if isinstance(value, str | bytes) or np.ndim(value) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = float("nan")
    if not ((low < number if above else low <= number) and number <= high):
        bound = f"{'above' if above else 'at least'} {low:g}" + ("" if np.isinf(high) else f" and at most {high:g}")
        shown = repr(value) if isinstance(value, str) else value
        raise ConfigError(f"{name}: found {shown}, expected a number {bound}")


def check_shape(name: str, array: Any, expected: tuple[int, ...], of: str) -> None:
    if jnp.shape(array) != expected:
        raise ConfigError(f"{name}: found shape {jnp.shape(array)}, expected {expected}, that of {of}")


@partial(jax.tree_util.register_dataclass, data_fields=["ids"], meta_fields=["count"])
@dataclass(frozen=True)
class Groups:
    """Which rollouts share a prompt: rows of an array [P, G] (``ids`` None), or ids [N] in 0 .. count-1."""

    ids: Any
    count: int

    def total(self, x: Array) -> Array:
        """Sum over each group, [P]."""
        return x.sum(1) if self.ids is None else jax.ops.segment_sum(x, self.ids, self.count)

    def highest(self, x: Array) -> Array:
        """Maximum over each group, [P]; -inf for an empty one."""
        if self.ids is None:
            return x.max(1, initial=-jnp.inf)
        return jax.ops.segment_max(x, self.ids, self.count)

    def spread(self, per_group: Array) -> Array:
        """[P] -> something that broadcasts against the rollouts."""
        return per_group[:, None] if self.ids is None else per_group[self.ids]


def groups_of(rewards: Any, group_ids: Any, num_groups: int | None) -> Groups:
    """The groups of rewards [P, G], or of rewards [N] with ids."""
    rewards = as_array("rewards", rewards)
    if group_ids is None:
        if rewards.ndim != 2:
            raise ConfigError(f"rewards: found shape {rewards.shape}, expected [P, G], or [N] together with group_ids")
        return Groups(None, rewards.shape[0])
    if rewards.ndim != 1:
        raise ConfigError(f"rewards: found shape {rewards.shape}, expected [N] together with group_ids")
    group_ids = as_array("group_ids", group_ids)
    check_shape("group_ids", group_ids, rewards.shape, "rewards")
    if num_groups is None:
        raise ConfigError("num_groups: found None, expected the number of groups together with group_ids")
    if is_concrete(group_ids) and rewards.size:
        low, high = extremes(group_ids)
        if low < 0 or high >= num_groups:
            raise ConfigError(f"group_ids: found {low} to {high}, expected 0 to {num_groups - 1}")
    return Groups(group_ids, num_groups)


def usable(rewards: Any, valid: Any) -> tuple[Array, Array]:
    """Constant rewards with 0 where unusable, and what is usable: valid and finite."""
    rewards = as_array("rewards", rewards)
    if valid is not None:
        valid = as_array("valid", valid)
        check_shape("valid", valid, rewards.shape, "rewards")
    return _usable(rewards, valid)


@jax.jit
def _usable(rewards: Array, valid: Array | None) -> tuple[Array, Array]:
    rewards = jax.lax.stop_gradient(as_float(rewards))
    ok = jnp.isfinite(rewards) if valid is None else jnp.isfinite(rewards) & (valid != 0)
    return jnp.where(ok, rewards, 0), ok
