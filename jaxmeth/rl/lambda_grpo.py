"""lambda-GRPO: every step that rollouts share counts once, not once a rollout that contains it.

Rollouts of one prompt share prefixes. The process set of token (i, t) is ``L(i,t) = {j : y_j[0..t] = y_i[0..t]}``,
inclusive of t; the sets form a prefix tree. GRPO gives each step of that tree the weight |L|; the token weight
``u = 1/|L|`` takes it away: policy and KL term are multiplied by it (``weight_kl=True``), the divisor stays the number
of tokens. With that divisor a step shrinks by mean(u), which Adam hides and SGD does not: compare at a matched update
norm, or with ``normalise="weights"``, whose divisor is the sum of weights.

Prefixes are judged on real tokens (``alive``: tool output included, EOS too), wherever the padding is: rows are aligned
by their first real token. Compose as ``PolicyLoss(token_weight=lambda_grpo_weight, weight_kl=True, ...)`` with any
advantage, prompt weight or ratio of tokens; on a ratio of sequences (GSPO) it is undefined.

Reference: M. Sullivan and A. Koller, "GRPO is secretly a process reward model", arXiv 2509.21154; official code
coli-saar/grpo-prm. Not the "lambda-GRPO" of arXiv 2510.06870, nor GRPO-lambda, arXiv 2510.00194.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num

from jaxmeth.rl._common import as_float, check_choice, check_shape, usable
from jaxmeth.types import ConfigError, whole_number

METHODS = ("pairwise", "scan", "hash")
# Tokens compared at once.
_CHUNK = 16

Tokens = Int[Array, "N T"]
Alive = Num[Array, "_ _"] | Bool[Array, "_ _"]
GroupIds = Int[Array, " _"] | None


class _Rows(NamedTuple):
    """Completions moved to the left edge: tokens [N, T] and lengths [N]; ``alive`` and ``settled`` lead back."""

    tokens: Array
    lengths: Array
    alive: Array
    settled: Array

    def back(self, x: Array) -> Array:
        """Values by position in the completion -> by column, 0 at padding."""

        def gather(x: Array) -> Array:
            return jnp.take_along_axis(x, jnp.maximum(_position(self.alive), 0), 1)

        return jnp.where(self.alive, jax.lax.cond(self.settled, lambda x: x, gather, x), 0)


def _position(alive: Array) -> Array:
    return jnp.cumsum(alive, 1, dtype=jnp.int32) - 1


def _check_alive(tokens: Array, alive: Array) -> Array:
    check_shape("alive", alive, tokens.shape, "tokens")
    return alive != 0


def _align(tokens: Array, alive: Array) -> _Rows:
    n, width = tokens.shape
    lengths = alive.sum(1, dtype=jnp.int32)
    settled = (alive == (jnp.arange(width)[None] < lengths[:, None])).all()

    def move(tokens: Array) -> Array:
        column = jnp.where(alive, _position(alive), width)
        return jnp.zeros_like(tokens).at[jnp.arange(n)[:, None], column].set(tokens, mode="drop")

    # Right-padded rows, the common case, are where they belong.
    return _Rows(jax.lax.cond(settled, lambda tokens: tokens, move, tokens), lengths, alive, settled)


def _check_groups(tokens: Array, group_size: Any) -> None:
    if group_size is None:
        raise ConfigError("group_size: found None, expected the number of rollouts of a prompt")
    whole_number("group_size", group_size, 1)
    if tokens.shape[0] % group_size:
        raise ConfigError(f"group_size: found {group_size}, expected a divisor of the {tokens.shape[0]} rows")


def _shared_length(rows: _Rows, group_size: int) -> Array:
    """Number of leading tokens that rollouts i and j of each prompt share, int[P, G, G]; on the diagonal the length."""
    n, width = rows.tokens.shape
    lengths = rows.lengths.reshape(-1, group_size)
    padded = jnp.pad(rows.tokens, ((0, 0), (0, -width % _CHUNK)))
    grouped = padded.reshape(n // group_size, group_size, padded.shape[1])
    column = jnp.arange(_CHUNK, dtype=jnp.int32)[None, None, None]
    pairs = ~jnp.eye(group_size, dtype=bool)[None]

    def unfinished(state: tuple[Array, Array]) -> Array:
        start, shared = state
        return (pairs & (shared > start)).any()

    def compare(state: tuple[Array, Array]) -> tuple[Array, Array]:
        start, shared = state
        now = jax.lax.dynamic_slice_in_dim(grouped, start, _CHUNK, 2)
        differs = now[:, :, None, :] != now[:, None, :, :]
        first = jnp.where(differs, start + column, width).min(-1)
        return start + _CHUNK, jnp.minimum(shared, first)

    # Until no pair agrees any more: rollouts part early, as a rule.
    limit = jnp.minimum(lengths[:, :, None], lengths[:, None, :])
    return jax.lax.while_loop(unfinished, compare, (jnp.int32(0), limit))[1]


def _pairwise(rows: _Rows, group_size: int) -> Array:
    """Rollout j is in L(i,t) while t is below what i and j share: the sets need the pairs, not pairs x tokens."""
    n, width = rows.tokens.shape
    member = _shared_length(rows, group_size)[..., None] > jnp.arange(width)[None, None, None]
    return member.sum(2, dtype=jnp.int32).reshape(n, width)


def _scan(rows: _Rows, group_size: int) -> Array:
    """One token after the other, carrying which pairs still agree."""
    n, width = rows.tokens.shape
    grouped = rows.tokens.reshape(-1, group_size, width)
    lengths = rows.lengths.reshape(-1, group_size)

    def step(share: Array, now: tuple[Array, Array]) -> tuple[Array, Array]:
        token, t = now
        alive = t < lengths
        share &= (token[:, :, None] == token[:, None, :]) & alive[:, :, None] & alive[:, None, :]
        return share, share.sum(-1, dtype=jnp.int32)

    start = jnp.broadcast_to(lengths[:, :, None] >= 0, (n // group_size, group_size, group_size))
    _, sizes = jax.lax.scan(step, start, (jnp.moveaxis(grouped, -1, 0), jnp.arange(width)))
    return jnp.moveaxis(sizes, 0, -1).reshape(n, width)


def _mix(x: Array, seed: int) -> Array:
    """A 32-bit permutation that leaves no pattern of small integers (murmur3's finaliser)."""
    x = x.astype(jnp.uint32) ^ jnp.uint32(seed)
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _hash(rows: _Rows, group: Array) -> Array:
    """Count equal prefix hashes of a group at each position, by sorting; rows past their end count for nobody."""
    n, width = rows.tokens.shape
    hashes = []
    for seed, base in ((0x9E3779B9, 0x01000193), (0x7F4A7C15, 0x5BD1E995)):
        powers = jnp.cumprod(jnp.full((width,), base, jnp.uint32), dtype=jnp.uint32)
        hashes.append(jnp.cumsum(_mix(rows.tokens, seed) * powers[None], 1, dtype=jnp.uint32).T)
    ended = jnp.arange(width, dtype=jnp.int32)[:, None] >= rows.lengths[None]
    # An ended row is a group of its own.
    key = jnp.where(ended, -1 - jnp.arange(n, dtype=jnp.int32)[None], group.astype(jnp.int32)[None])
    index = jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32)[None], key.shape)
    *keys, order = jax.lax.sort((key, *hashes, index), num_keys=3)
    first = jnp.ones((width, 1), bool)
    new = jnp.concatenate([first, jnp.stack([k[:, 1:] != k[:, :-1] for k in keys]).any(0)], 1)
    last = jnp.concatenate([new[:, 1:], first], 1)
    start = jax.lax.cummax(jnp.where(new, index, 0), axis=1)
    end = jax.lax.cummin(jnp.where(last, index, n), axis=1, reverse=True)
    _, sizes = jax.lax.sort((order, end - start + 1), num_keys=1)
    return jnp.where(ended, 0, sizes).T


def process_set_size(
    tokens: Tokens, alive: Alive, group_size: int | None, *, method: str = "pairwise", group_ids: GroupIds = None
) -> Int[Array, "N T"]:
    """|L(i,t)|: how many rollouts of the group share the prefix up to and including token t; 0 at padding.

    Of no tokens (T = 0, or no rows) the result is empty.

    Args:
      tokens: completions, after the prompt, prompt-major; what padding holds does not matter.
      alive: [N, T], nonzero = a real token. What is not real is skipped, wherever it stands.
      group_size: static G, a divisor of N.
      method: ``pairwise`` compares pairs until all have parted, at most O(G^2 T) time and O(G^2 + G T) memory a prompt;
        ``scan`` goes token by token; ``hash`` sorts two 32-bit prefix hashes, O(G log G T) time, and could in
        principle take two unequal prefixes for equal (chance below G^2 T / 2^64 a prompt). All three agree.
      group_ids: int[N], for ragged groups (``group_size`` None): always by ``hash``.

    Raises:
      ConfigError: an unknown method, unequal shapes, a group_size that is not a whole number of at least 1 or does not
        divide N.
    """
    check_choice("method", method, METHODS)
    alive = _check_alive(tokens, alive)
    if group_ids is not None:
        check_shape("group_ids", group_ids, tokens.shape[:1], "the rows of tokens")
        return _count(tokens, alive, group_ids, None, "hash")
    _check_groups(tokens, group_size)
    ids = jnp.arange(tokens.shape[0]) // group_size if method == "hash" else None
    return _count(tokens, alive, ids, group_size, method)


@partial(jax.jit, static_argnames=("group_size", "method"))
def _count(tokens: Array, alive: Array, ids: Array | None, group_size: int | None, method: str) -> Array:
    if not tokens.size:
        return jnp.zeros(tokens.shape, jnp.int32)
    rows = _align(tokens, alive)
    if method == "hash":
        return rows.back(_hash(rows, ids))
    return rows.back((_pairwise if method == "pairwise" else _scan)(rows, group_size))


def lambda_grpo_weight(
    tokens: Tokens, alive: Alive, group_size: int | None, *, method: str = "pairwise", group_ids: GroupIds = None
) -> Float[Array, "N T"]:
    """The token weight ``u = 1/|L(i,t)|`` in [1/G, 1], 0 at padding. Arguments and errors: :func:`process_set_size`.

    Non-decreasing along a rollout; its sum over a group is the number of distinct prefixes. 1 where no first token is
    shared, which makes lambda-GRPO equal to GRPO, and for groups of one.
    """
    size = process_set_size(tokens, alive, group_size, method=method, group_ids=group_ids)
    one = as_float(1.0)
    return jnp.where(size > 0, one / jnp.maximum(size, 1), 0)


def process_rewards(
    rewards: Num[Array, "P G"],
    tokens: Tokens,
    alive: Alive,
    valid: Num[Array, "_ _"] | Bool[Array, "_ _"] | None = None,
) -> Float[Array, "N T"]:
    """The implicit process reward: the mean reward of the rollouts in L(i,t); for analysis. 0 at padding.

    ``sum_i sum_t a_i g(i,t) = sum over steps S of |L_S| A_S sum_{t in S} g(t)``: GRPO with outcome rewards is
    process-reward RL in which step S weighs |L_S|, with A_S the standardised process reward.

    Args:
      rewards: of each rollout; unusable ones (invalid, NaN, infinite) are left out of the mean (0 of none).

    Raises:
      ConfigError: see :func:`process_set_size`.
    """
    if rewards.ndim != 2:
        raise ConfigError(f"rewards: found shape {rewards.shape}, expected [P, G]")
    group_size = rewards.shape[1]
    _check_groups(tokens, group_size)
    if rewards.size != tokens.shape[0]:
        raise ConfigError(f"rewards: found shape {rewards.shape}, expected [P, G] with P G = {tokens.shape[0]}")
    return _mean_reward(tokens, _check_alive(tokens, alive), *usable(rewards, valid))


@jax.jit
def _mean_reward(tokens: Array, alive: Array, r: Array, ok: Array) -> Array:
    if not tokens.size:
        return jnp.zeros(tokens.shape, r.dtype)
    rows = _align(tokens, alive)
    member = _shared_length(rows, r.shape[1])[..., None] > jnp.arange(tokens.shape[1])[None, None, None]
    counted = member & ok[:, None, :, None]
    total = jnp.where(counted, r[:, None, :, None], 0).sum(2)
    return rows.back((total / jnp.maximum(counted.sum(2), 1)).reshape(tokens.shape))


def process_tree_stats(tokens: Tokens, alive: Alive, group_size: int) -> dict[str, Float[Array, ""]]:
    """Scalars of the prefix trees of a batch: how much sharing there is for lambda-GRPO to undo.

    ``mean_weight`` mean of u over real tokens; ``n_steps`` number of steps (maximal runs of tokens with the same set);
    ``mean_step_len`` tokens a step; ``frac_shared`` share of real tokens with |L| > 1. 0 where there are no tokens.
    """
    alive = _check_alive(tokens, alive)
    return _tree(process_set_size(tokens, alive, group_size), alive)


@jax.jit
def _tree(size: Array, alive: Array) -> dict[str, Array]:
    real = size > 0
    weight = jnp.where(real, 1 / jnp.maximum(size, 1), 0)
    # The sets of a rollout are nested: the set changes exactly where its size does.
    rows = _align(size, alive)
    by_position = rows.tokens
    before = jnp.pad(by_position, ((0, 0), (1, 0)))[:, :-1]
    starts = rows.back(jnp.where(by_position != before, 1, 0))
    count = jnp.maximum(real.sum(), 1)
    n_steps, prefixes = (weight * starts).sum(), weight.sum()
    return {
        "mean_weight": prefixes / count,
        "n_steps": n_steps,
        "mean_step_len": prefixes / jnp.maximum(n_steps, 1),
        "frac_shared": (size > 1).sum() / count,
    }
