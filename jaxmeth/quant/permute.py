"""Orders of channels that decide which outliers share a rotation block, and the statistics they are made from.

An order ``idx`` says "new channel p holds old channel idx[p]": ``x_permuted = x[..., idx]``, for rows and columns
alike. All functions here leave the channels as they are where one block holds them all.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from jaxmeth.quant.hadamard import check_divides
from jaxmeth.types import ConfigError, is_concrete

ROWS = 32
"""Rows added at a time, a power of two: their sums stay in the cache."""
ALONE = 32
"""Channels that join one by one where sorting the blocks places fewer."""


class MassState(NamedTuple):
    """Streaming statistics of channels: ``total`` of |x| and ``peak`` of |x| over ``count`` tokens.

    ``low`` is what rounding took from ``total``: the two together hold the sum to twice the digits, so that neither the
    number of tokens nor how they were batched moves an order made from it.
    """

    total: Float[Array, "*l d"]
    peak: Float[Array, "*l d"]
    count: Float[Array, ""]
    low: Float[Array, "*l d"]

    def layer(self, i: int) -> "MassState":
        """The statistics ``[d]`` of one layer of ``[L, d]``."""
        return MassState(self.total[i], self.peak[i], self.count, self.low[i])

    @property
    def mean(self) -> Float[Array, "*l d"]:
        """Mean |x|; 0 before the first token."""
        return self.total / jnp.maximum(self.count, 1)


Permute = Callable[[MassState, int], Int[Array, " d"]]
"""The seam: statistics of the channels and a block size -> an order."""


def mass_init(*shape: int) -> MassState:
    """No token seen yet."""
    return MassState(jnp.zeros(shape), jnp.zeros(shape), jnp.zeros(()), jnp.zeros(shape))


def _add(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
    """The sum of two numbers, each the sum of a float and of what its rounding lost (Knuth's exact sum)."""
    high = a[0] + b[0]
    back = high - a[0]
    low = (a[0] - (high - back)) + (b[0] - back) + (a[1] + b[1])
    top = high + low
    return top, low - (top - high)


@jax.jit
def _exact_size(x: Float[Array, "n d"]) -> tuple[Array, Array]:
    """The sum of |x| over rows, ``ROWS`` side by side and then in pairs, and what rounding took from it."""
    n, d = x.shape
    rest = n % ROWS
    last = jnp.abs(jnp.pad(x[n - rest :], ((0, ROWS - rest), (0, 0))))

    def add(i, total):
        rows = jnp.abs(jax.lax.dynamic_slice(x, (i * ROWS, 0), (ROWS, d)))
        return _add(total, (rows, jnp.zeros_like(rows)))

    total = (last, jnp.zeros_like(last))
    if n >= ROWS:
        total = jax.lax.fori_loop(0, n // ROWS, add, total)
    while (half := total[0].shape[0] // 2) > 0:
        total = _add((total[0][:half], total[1][:half]), (total[0][half:], total[1][half:]))
    return total[0][0], total[1][0]


def merge_mass(a: MassState, b: MassState) -> MassState:
    """The statistics of both sets of tokens."""
    total, low = _add((a.total, a.low), (b.total, b.low))
    return MassState(total, jnp.maximum(a.peak, b.peak), a.count + b.count, low)


def update_mass(state: MassState, x: Float[Array, "*n d"]) -> MassState:
    """Add the tokens of ``x``; float32 or better whatever the dtype of x. No tokens change nothing.

    Raises: ConfigError for another width than that of the state.
    """
    if state.total.shape != x.shape[-1:]:
        raise ConfigError(f"x: found shape {x.shape}, expected [..., {state.total.shape[-1]}], as the state")
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32)).reshape(-1, x.shape[-1])
    total, low = _exact_size(x)
    count = jnp.asarray(x.shape[0], state.count.dtype)
    return merge_mass(state, MassState(total, jnp.abs(x).max(0, initial=0.0), count, low))


def channel_mass(x: Float[Array, "T d"]) -> Float[Array, " d"]:
    """Mean |x| of each channel in float32 or better. Raises: ConfigError for no tokens, NaN or infinity."""
    if x.shape[0] == 0:
        raise ConfigError("x: found no tokens, expected at least one")
    check_numbers(x, "x")
    return jnp.abs(x.astype(jnp.promote_types(x.dtype, jnp.float32))).mean(0)


def check_numbers(x: Array, name: str) -> None:
    """Raises: ConfigError for NaN or infinity (outside jit)."""
    if is_concrete(x) and not bool(jnp.isfinite(x).all()):
        raise ConfigError(f"{name}: found NaN or infinity, expected finite numbers")


def _check(values: Array, block: int, name: str) -> None:
    if values.ndim != 1:
        raise ConfigError(f"{name}: found shape {values.shape}, expected one layer [d] (MassState.layer)")
    check_divides(values.shape[-1], block)
    check_numbers(values, name)


def massdiff(mass: Float[Array, " d"], block: int, low: Float[Array, " d"] | None = None) -> Int[Array, " d"]:
    r"""Greedy mass diffusion: an order in which all blocks hold about the same mass.

    The n = d / block heaviest channels open one block each; then, from heavy to light, each channel joins the lightest
    block that is not full (the first of equals):

    .. math:: j^* = \arg\min_{j : |B_j| < b} \sum_{i \in B_j} s_i, \qquad s_i = \mathrm{mean}_t |X_{ti}|

    which is longest-processing-time list scheduling with full blocks closed. While blocks are about as heavy as each
    other, many channels join in one step: O(b n log n) then, O(d n) where single blocks are far lighter than the rest.

    The masses of blocks come close to each other as they fill, so that sums in float32 pick the wrong one of two at
    large d; they are kept to twice the digits. With ``low`` the order is that of the exact sums over the tokens
    (``MassState``); without it, of the masses as given.

    Args:
      mass: s, or any multiple of it, of the input of the rotation in the unrotated model (``channel_mass``,
        ``MassState.total``).
      block: b, static.
      low: what rounding took from ``mass`` (``MassState.low``); None = nothing.

    Returns:
      The order; blocks in turn, members in the order they joined. Equal masses: lower channel first. Channels of mass
      0 join last, and as such count subnormal numbers and, inside jit, NaN and infinity. ``arange(d)`` where block = d.

    Raises: ConfigError where ``block`` does not divide d, for more than one layer, low of another shape, (outside jit)
      for NaN or infinity.
    Reference: arXiv 2601.22347, MassDiff. Reconstruction: the public code carries whole token vectors and takes the
      mean at each step; adding one candidate to every block leaves the argmin alone, so scalars suffice.
    """
    _check(mass, block, "mass")
    if low is not None:
        if low.shape != mass.shape:
            raise ConfigError(f"low: found shape {low.shape}, expected that of mass, {mass.shape}")
        check_numbers(low, "low")
    return _massdiff(mass, jnp.zeros_like(mass) if low is None else low, int(block))


@functools.partial(jax.jit, static_argnums=2)
def _massdiff(mass: Float[Array, " d"], low: Float[Array, " d"], block: int) -> Int[Array, " d"]:
    d = mass.shape[0]
    if d == block:
        return jnp.arange(d)
    n = d // block
    mass, low = (a.astype(jnp.promote_types(a.dtype, jnp.float32)) for a in (mass, low))
    finite = jnp.isfinite(mass) & jnp.isfinite(low)
    mass, low = jnp.where(finite, mass, 0), jnp.where(finite, low, 0)
    # Halved until no block can overflow: exact.
    most = jnp.finfo(mass.dtype).max
    scale = jnp.where(mass.max() > most / (2 * block), 2.0 ** -(block.bit_length() + 1), 1).astype(mass.dtype)
    mass, low = mass * scale, low * scale
    order = jax.lax.sort((-mass, -low, jnp.arange(d)), num_keys=2, is_stable=True)[2]
    if n == d:
        return order
    mass, low = mass[order], low[order]
    left, waiting, waiting_low = d - n, *(jnp.pad(a[n:], (0, n)) for a in (mass, low))

    def one(_, state):
        held, lost, count, places, start = state
        open_mass = jnp.where(count == block, jnp.inf, held)
        j = jnp.argmin(jnp.where(open_mass == jnp.min(open_mass), lost, jnp.inf))
        sum_, rest = _add((held[j], lost[j]), (waiting[start], waiting_low[start]))
        places = places.at[start].set((j * block + count[j]).astype(places.dtype))
        return held.at[j].set(sum_), lost.at[j].set(rest), count.at[j].add(1), places, start + 1

    def many(state):
        # The k-th lightest block takes the k-th channel if by then all lighter ones have become heavier than it.
        held, lost, count, places, start = state
        keys = jnp.where(count == block, jnp.inf, held), lost, jnp.arange(n)
        top, rest, to = jax.lax.sort(keys, num_keys=2, is_stable=True)
        sums, rests = _add((top, rest), tuple(jax.lax.dynamic_slice(a, (start,), (n,)) for a in (waiting, waiting_low)))
        heavier = (jax.lax.cummin(sums)[:-1] > top[1:]) & jnp.isfinite(top[1:])
        taken = jnp.minimum(1 + jnp.cumprod(heavier.astype(jnp.int32)).sum(), left - start)
        at, place = start + jnp.arange(n), to * block + count[to]
        at, to = (jnp.where(jnp.arange(n) < taken, a, d) for a in (at, to))  # d: past the end, dropped
        held, lost = held.at[to].set(sums, mode="drop"), lost.at[to].set(rests, mode="drop")
        places = places.at[at].set(place.astype(places.dtype), mode="drop")
        start = (start + taken).astype(start.dtype)
        # Where most blocks are far heavier than the next channels, turns of one are cheaper than sorting for each.
        alone = jnp.where(taken < ALONE, jnp.minimum(ALONE, left - start), 0)
        return jax.lax.fori_loop(0, alone, one, (held, lost, count.at[to].add(1, mode="drop"), places, start))

    begun = mass[:n], low[:n], jnp.ones((n,), jnp.int32), jnp.zeros((left,), jnp.int32), jnp.zeros((), jnp.int32)
    places = jax.lax.while_loop(lambda state: state[-1] < left, many, begun)[3]
    idx = jnp.zeros((d,), order.dtype).at[jnp.arange(n) * block].set(order[:n])
    return idx.at[places].set(order[n:])


def zigzag(absmax: Float[Array, " d"], block: int) -> Int[Array, " d"]:
    """Deal channels from the largest ``max |x|`` down to the blocks, back and forth. Raises: as ``massdiff``."""
    _check(absmax, block, "absmax")
    d = absmax.shape[0]
    if d == block:
        return jnp.arange(d)
    rows = jnp.argsort(-absmax, stable=True).reshape(block, d // block)
    return rows.at[1::2].set(rows[1::2, ::-1]).T.reshape(-1)


def absmax_order(absmax: Float[Array, " d"]) -> Int[Array, " d"]:
    """Channels from the largest ``max |x|`` down: outliers together, the adversary among the baselines."""
    check_numbers(absmax, "absmax")
    return jnp.argsort(-absmax, stable=True)


def random_perm(key: Key[Array, ""], d: int) -> Int[Array, " d"]:
    """A uniformly random order; consumes ``key``."""
    return jax.random.permutation(key, d)


# --- the same as strategies ------------------------------------------------------------------------------------------


def by_mass(stats: MassState, block: int) -> Int[Array, " d"]:
    """PeRQ's order: ``massdiff`` of the sums of |x|."""
    return massdiff(stats.total, block, stats.low)


def by_zigzag(stats: MassState, block: int) -> Int[Array, " d"]:
    """``zigzag`` of max |x|."""
    return zigzag(stats.peak, block)


def by_absmax(stats: MassState, block: int) -> Int[Array, " d"]:
    """``absmax_order``, unless one block holds all."""
    return absmax_order(stats.peak) if block < stats.peak.shape[-1] else jnp.arange(block)


def by_identity(stats: MassState, block: int) -> Int[Array, " d"]:
    """Channels as they are."""
    return jnp.arange(stats.peak.shape[-1])


def by_chance(seed: int) -> Permute:
    """A uniformly random order, another for each layer's statistics; the same seed gives the same orders."""

    def permute(stats: MassState, block: int) -> Int[Array, " d"]:
        d = stats.peak.shape[-1]
        if block == d:
            return jnp.arange(d)
        # The layers share one call of the seam, so the layer enters through what differs: its statistics.
        layer = jax.lax.bitcast_convert_type(stats.total.sum().astype(jnp.float32), jnp.uint32)
        return random_perm(jax.random.fold_in(jax.random.key(seed), layer), d)

    return permute


def block_masses(mass: Float[Array, "*l d"], block: int) -> Float[Array, "*l n"]:
    """The mass of each block: what ``massdiff`` makes equal. Raises: ConfigError where block does not divide d."""
    check_divides(mass.shape[-1], block)
    return mass.reshape(*mass.shape[:-1], -1, block).sum(-1)
