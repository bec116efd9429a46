"""Aggregations: a loss per token [N, T] -> one number, by a divisor that may be given from outside.

A batch that is split over micro-batches or devices keeps its loss and gradient if every part divides by the *whole*
batch's divisor: sum (or ``psum``) :func:`aggregate_denominator` over the parts, pass it as ``denominator``, and sum the
parts' losses.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Num

from jaxmeth.rl._common import as_float, check_choice, check_number, check_shape
from jaxmeth.types import ConfigError, extremes, is_concrete

MODES = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "token_sum_norm", "group_token_mean")

Mask = Num[Array, "_ _"] | Bool[Array, "_ _"]
GroupIds = Int[Array, " _"] | None


def _over(total: Array, count: Array) -> Array:
    return total / jnp.where(count > 0, count, 1)


def _check(mask: Array, mode: str, group_ids: Array | None) -> None:
    check_choice("mode", mode, MODES)
    if mode == "group_token_mean":
        if group_ids is None:
            raise ConfigError("group_ids: found None, expected the group of each row with mode 'group_token_mean'")
        check_shape("group_ids", group_ids, mask.shape[:1], "the rows of mask")
        if is_concrete(group_ids) and group_ids.size:
            low, high = extremes(group_ids)
            if low < 0 or high >= group_ids.size:
                raise ConfigError(f"group_ids: found {low} to {high}, expected 0 to {group_ids.size - 1}, one a row")


def _per_group(x: Array, group_ids: Array) -> Array:
    # No batch has more groups than rows, so the ids need no static number of groups.
    return jax.ops.segment_sum(x, group_ids, x.shape[0])


def aggregate_denominator(
    mask: Mask,
    mode: str = "token_mean",
    *,
    count_empty_rows: bool = True,
    max_len: int | None = None,
    group_ids: GroupIds = None,
    weight: Float[Array, "_ _"] | None = None,
) -> Float[Array, ""]:
    """The outermost divisor of :func:`aggregate`: tokens, rows, N * max_len, or groups. Parts of a batch add up.

    Args:
      weight: [N, T], with ``token_mean`` only: counts every token that much (``normalise="weights"`` of lambda-GRPO).

    Raises:
      ConfigError: see :func:`aggregate`; a weight with another mode.
    """
    _check(mask, mode, group_ids)
    mask = mask != 0
    dtype = as_float(0.0).dtype
    if weight is not None:
        if mode != "token_mean":
            raise ConfigError(f"weight: found one with mode {mode!r}, expected None except with token_mean")
        check_shape("weight", weight, mask.shape, "mask")
        return jnp.where(mask, as_float(weight), 0).sum()
    if mode == "token_mean":
        return mask.sum().astype(dtype)
    if mode == "token_sum_norm":
        if max_len is None:
            raise ConfigError("max_len: found None, expected the longest completion length with mode 'token_sum_norm'")
        check_number("max_len", max_len, 1)
        return jnp.asarray(mask.shape[0] * max_len, dtype)
    filled = mask.any(1)
    if mode == "group_token_mean":
        present = jnp.ones_like(filled) if count_empty_rows else filled
        return (_per_group(present.astype(jnp.int32), group_ids) > 0).sum().astype(dtype)
    if mode == "seq_mean_token_mean" and count_empty_rows:
        return jnp.asarray(mask.shape[0], dtype)
    return filled.sum().astype(dtype)


def aggregate(
    x: Float[Array, "N T"],
    mask: Mask,
    mode: str = "token_mean",
    *,
    count_empty_rows: bool = True,
    denominator: float | Num[Array, ""] | None = None,
    max_len: int | None = None,
    group_ids: GroupIds = None,
) -> Float[Array, ""]:
    """Reduce a loss per token to one number, c_i = the number of unmasked tokens of row i:

    * ``token_mean``: sum(x mask) / sum(mask) (DAPO; TRL bnpo and dapo; "token-mean" of verl and tunix);
    * ``seq_mean_token_mean``: mean over rows of sum_t(x mask) / max(c_i, 1) (GRPO);
    * ``seq_mean_token_sum``: sum over rows / number of non-empty rows (verl, tunix);
    * ``token_sum_norm``: sum(x mask) / (N max_len) (Dr. GRPO in TRL). verl's "seq-mean-token-sum-norm" divides by
      max_len only: ``denominator=max_len``;
    * ``group_token_mean``: mean over groups of the token_mean inside each (as printed in the DAPO and RIPO papers).

    Masked positions play no part, whatever they hold. Where nothing is unmasked, or there are no rows, the result and
    its gradient are 0.

    Args:
      mask: [N, T], nonzero = counts.
      count_empty_rows: for seq_mean_token_mean (and groups without a token): whether an empty one counts as 0 in the
        mean (TRL) or not at all (verl, tunix).
      denominator: replaces the outermost divisor; above 0, or 0 where nothing is unmasked.
      max_len: a constant of the run, not the padded length of this batch.
      group_ids: int[N] in 0 .. N-1, for group_token_mean.

    Raises:
      ConfigError: an unknown mode, unequal shapes, max_len or group_ids missing where the mode needs them; readable
        group_ids out of range, or a readable denominator that is NaN, negative, or 0 with something to divide.
    """
    check_shape("mask", mask, x.shape, "x")
    _check(mask, mode, group_ids)
    mask = mask != 0
    x = jnp.where(mask, as_float(x), 0)
    if denominator is None:
        denominator = aggregate_denominator(
            mask, mode, count_empty_rows=count_empty_rows, max_len=max_len, group_ids=group_ids
        )
    else:
        nothing = is_concrete(mask) and not np.any(np.asarray(mask))
        check_number("denominator", denominator, 0, above=not nothing)
    if mode == "seq_mean_token_mean":
        total = _over(x.sum(1), mask.sum(1)).sum()
    elif mode == "group_token_mean":
        tokens = _per_group(mask.sum(1), group_ids)
        total = _over(_per_group(x.sum(1), group_ids), tokens).sum()
    else:
        total = x.sum()
    return _over(total, jnp.asarray(denominator, total.dtype))
