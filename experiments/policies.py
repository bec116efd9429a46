"""Stopping policies on trajectories: what each returns, risks and spends, one number a policy."""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np


class Table(NamedTuple):
    """Upper thresholds on one signal: loss, needless share (both [n, m]), share of the tokens, right answers [n, m]."""

    loss: Any
    cost: Any
    share: Any
    right: Any


class Outcome(NamedTuple):
    """Means over trajectories: wrong answers returned early, correct share given up, share of tokens, right answers."""

    upper_risk: Any
    lower_risk: Any
    share: Any
    right: Any


def spent(exits, tokens, length):
    """Tokens used up to the exits [n, m], as a share of those at full budget."""
    import jax.numpy as jnp

    full = jnp.take_along_axis(tokens, jnp.maximum(length - 1, 0)[:, None], axis=1)
    return jnp.take_along_axis(tokens, exits, axis=1) / full


def upper_tables(signal, correct, length, tokens, grid, count_exhausted=False) -> Table:
    """Every upper threshold of a grid, sorted upwards."""
    import jax.numpy as jnp

    from jaxmeth.risk import budget

    exits = budget.upper_exit(signal, length, grid)
    fired = budget.upper_fired(signal, exits, length, grid)
    return Table(
        budget.upper_losses(exits, correct, length, fired, count_exhausted),
        budget.upper_cost(exits, correct, length),
        spent(exits, tokens, length),
        jnp.take_along_axis(correct, exits, axis=1),
    )


def outcome(policy, signal, correct, length, tokens) -> Outcome:
    """The dual rule of a policy. Giving up returns no answer; running out returns the last one."""
    import jax.numpy as jnp

    from jaxmeth.risk import budget

    y = budget.ema(signal, length, policy.alpha)
    upper = budget.upper_exit(y, length, policy.upper[None])
    params = budget.LowerParams(*[v[None] for v in (policy.c, policy.shift, policy.lo, policy.hi)])
    lower = budget.lower_exit(y, length, params, tokens, policy.budget, policy.warmup)
    exits, _ = budget.dual_exit(upper, lower, length)
    gave_up = lower < upper
    fired = budget.upper_fired(y, exits, length, policy.upper[None]) & ~gave_up
    ran_out = jnp.maximum(length - 1, 0)[:, None]
    lost = budget.lower_losses(jnp.where(gave_up, lower, ran_out), correct, length)
    right = jnp.take_along_axis(correct, exits, axis=1) & ~gave_up
    wrong = budget.upper_losses(exits, correct, length, fired)
    return Outcome(wrong.mean(), lost.mean(), spent(exits, tokens, length).mean(), right.mean())


def fixed_budgets(correct, length, tokens, shares) -> list[Outcome]:
    """Stop every trajectory at a share of its own checkpoints, whatever the signal; 1 is the full budget."""
    import jax.numpy as jnp

    made = []
    for share in shares:
        exits = jnp.maximum(jnp.ceil(share * length).astype(jnp.int32) - 1, 0)[:, None]
        right = jnp.take_along_axis(correct, exits, axis=1)
        early = exits < (length - 1)[:, None]
        made.append(Outcome((~right & early).mean(), 0.0, spent(exits, tokens, length).mean(), right.mean()))
    return made


def oracle(correct, length, tokens) -> Outcome:
    """Stop at the first correct checkpoint; those that never are run out."""
    import jax.numpy as jnp

    inside = jnp.arange(correct.shape[1])[None] < length[:, None]
    solved = correct & inside
    first = jnp.where(solved.any(1), jnp.argmax(solved, axis=1), length - 1)[:, None]
    return Outcome(0.0, 0.0, spent(first, tokens, length).mean(), solved.any(1).mean())


@lru_cache
def _evaluate():
    import jax

    return jax.jit(lambda policies, *rows: jax.lax.map(lambda p: outcome(p, *rows), policies))


def evaluate(policies, signal, correct, length, tokens) -> Outcome:
    """:func:`outcome` of R policies on the same trajectories, [R]; equal ones are computed once, in 32s."""
    import jax.numpy as jnp

    stacked = np.stack([np.asarray(field, np.float32) for field in policies], axis=1)
    # NaN-free by construction; infinities compare equal.
    unique, back = np.unique(stacked, axis=0, return_inverse=True)
    padded = np.concatenate([unique, np.repeat(unique[-1:], -len(unique) % 32, axis=0)])
    found = _evaluate()(type(policies)(*jnp.asarray(padded.T)), signal, correct, length, tokens)
    return Outcome(*[np.asarray(field)[back.ravel()] for field in found])


def cheapest(curve_share, curve_right, curve_risk, right: np.ndarray, eps: float) -> np.ndarray:
    """Least token share [R] among thresholds [R, m] with at least ``right`` [R] right answers and a risk within eps.

    With hindsight, so in favour of the thresholds; 1 where there is none.
    """
    fit = (curve_right >= right[:, None] - 1e-6) & (curve_risk <= eps)
    return np.where(fit.any(1), np.where(fit, curve_share, np.inf).min(1), 1.0)
