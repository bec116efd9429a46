"""Hadamard matrices, block rotations, and the bound on what a block rotation leaves of an outlier."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxmeth.types import ConfigError

# Measured on two CPU cores (experiments/bench/quant.py): up to ONE_PRODUCT channels a single matrix product is fastest;
# beyond, a product of about FACTOR channels and then additions, RADIX runs at a time (the operands of one fused loop).
ONE_PRODUCT = 128
FACTOR = 64
RADIX = 8
HIGHEST = jax.lax.Precision.HIGHEST


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % i for i in range(2, math.isqrt(n) + 1))


def _jacobsthal(q: int) -> np.ndarray:
    """``Q_ij = chi(i - j)``, chi the quadratic character modulo the prime q."""
    chi = np.full(q, -1, np.int8)
    chi[np.arange(1, q, dtype=np.int64) ** 2 % q] = 1
    chi[0] = 0
    i = np.arange(q)
    return chi[(i[:, None] - i[None, :]) % q]


def _paley_one(q: int) -> np.ndarray:
    """Order q + 1 for a prime q = 3 mod 4: ``I + [[0, 1^T], [-1, Q]]``; not symmetric."""
    h = np.ones((q + 1, q + 1), np.int8)
    h[1:, 0] = -1
    h[1:, 1:] = _jacobsthal(q)
    h[0, 0] = 0
    return h + np.eye(q + 1, dtype=np.int8)


def _paley_two(q: int) -> np.ndarray:
    """Order 2 (q + 1) for a prime q = 1 mod 4: ``C (x) [[1,1],[1,-1]] + I (x) [[1,-1],[-1,-1]]``; symmetric."""
    c = np.ones((q + 1, q + 1), np.int8)
    c[1:, 1:] = _jacobsthal(q)
    c[0, 0] = 0
    two = np.array([[1, 1], [1, -1]], np.int8), np.array([[1, -1], [-1, -1]], np.int8)
    return np.kron(c, two[0]) + np.kron(np.eye(q + 1, dtype=np.int8), two[1])


@functools.cache
def _sylvester(m: int) -> np.ndarray:
    i = np.arange(m)
    bits = np.bitwise_and(i[:, None], i[None, :])
    parity = np.zeros_like(bits)
    while bits.any():
        parity ^= bits & 1
        bits >>= 1
    return (1 - 2 * parity).astype(np.int8)


@functools.cache
def _base(n: int) -> tuple[int, np.ndarray] | None:
    """``(2^m, H_k)`` with ``n = 2^m k``, k as small as a construction allows; None where there is none."""
    if n < 1:
        return None
    k = n & -n
    odd = n // k
    if odd == 1:
        return n, np.ones((1, 1), np.int8)
    for twos in (2**j for j in range(2, k.bit_length())):
        order = odd * twos
        if _is_prime(order - 1):
            return n // order, _paley_one(order - 1)
        q = order // 2 - 1
        if q % 4 == 1 and _is_prime(q):
            return n // order, _paley_two(q)
    return None


def has_hadamard(n: int) -> bool:
    """Whether ``hadamard(n)`` exists here."""
    return _base(n) is not None


def _checked(n: int, name: str) -> tuple[int, np.ndarray]:
    found = _base(n) if isinstance(n, int | np.integer) and not isinstance(n, bool) else None
    if found is None:
        raise ConfigError(f"{name}: found {n!r}, expected an order with a known Hadamard matrix: 2^m, or 2^m k for k "
                          "such as 12, 20, 28, 36")  # fmt: skip
    return found


def hadamard(n: int, dtype: DTypeLike = jnp.float32) -> Float[Array, "n n"]:
    r"""The orthonormal Hadamard matrix of order n: ``H H^T = I``, all entries ``+-1 / sqrt(n)``.

    .. math:: H_n = (S_{2^m} \otimes H_k) / \sqrt n, \qquad S_{2m} = [[S_m, S_m], [S_m, -S_m]]

    ``n = 2^m k``: k = 1 where n is a power of two (then H is symmetric), else the smallest order that Paley's first or
    second construction gives (12 and 20: first, not symmetric; 28 and 36: second, symmetric).

    Raises: ConfigError for an order without one of these constructions.
    Reference: Paley, On Orthogonal Matrices, 1933; Ashkboos et al., QuaRot, arXiv 2404.00456, section 3.
    """
    twos, base = _checked(n, "n")
    return jnp.asarray(np.kron(_sylvester(twos), base) / math.sqrt(n), dtype)


def check_divides(width: int, block: int, name: str = "block") -> None:
    """Raises: ConfigError where blocks of ``block`` channels do not tile ``width``."""
    if isinstance(block, bool) or not isinstance(block, int | np.integer) or block < 1 or width % block:
        raise ConfigError(f"{name}: found {block!r}, expected a whole number that divides the width {width}")


def check_block(width: int, block: int, name: str = "block") -> None:
    """Raises: ConfigError where blocks of ``block`` channels do not tile ``width`` or have no Hadamard matrix."""
    check_divides(width, block, name)
    _checked(int(block), name)


def by_matmul(x: Float[Array, "*n d"], block: int) -> Float[Array, "*n d"]:
    """``block_hadamard`` as one product with the ``[block, block]`` matrix."""
    h = hadamard(block, x.dtype)
    return jnp.matmul(x.reshape(*x.shape[:-1], -1, block), h, precision=HIGHEST).reshape(x.shape)


def by_factors(x: Float[Array, "*n d"], block: int) -> Float[Array, "*n d"]:
    """``block_hadamard`` as a product with a Kronecker factor of H, of order about 64, and additions for the rest."""
    twos, base = _checked(block, "block")
    inner = 1
    while inner < twos and 2 * inner * base.shape[0] <= FACTOR:
        inner *= 2
    right = np.kron(_sylvester(inner), base)
    width = right.shape[0]
    scaled = jnp.asarray(right / math.sqrt(block), x.dtype)
    y = jnp.matmul(x.reshape(-1, width), scaled, precision=HIGHEST)
    while width < block:
        radix = min(RADIX, block // width)
        y = jnp.stack(_added([y.reshape(-1, radix, width)[:, i] for i in range(radix)]), axis=1)
        width *= radix
    return y.reshape(x.shape)


def _added(parts: list[Array]) -> list[Array]:
    """The unscaled Hadamard transform of a list whose length is a power of two."""
    if len(parts) == 1:
        return parts
    half = len(parts) // 2
    pairs = list(zip(parts[:half], parts[half:], strict=True))
    return _added([a + b for a, b in pairs]) + _added([a - b for a, b in pairs])


def by_butterfly(x: Float[Array, "*n d"], block: int) -> Float[Array, "*n d"]:
    """``block_hadamard`` as log2 stages of additions and subtractions around one small product."""
    twos, base = _checked(block, "block")
    k = base.shape[0]
    y = x.reshape(-1, twos, k)
    if k > 1:
        y = jnp.matmul(y, jnp.asarray(base, x.dtype), precision=HIGHEST)
    width = 1
    while width < twos:
        y = y.reshape(-1, 2, width * k)
        y = jnp.stack([y[:, 0] + y[:, 1], y[:, 0] - y[:, 1]], axis=1)
        width *= 2
    return (y / math.sqrt(block)).astype(x.dtype).reshape(x.shape)


def block_hadamard(x: Float[Array, "*n d"], block: int) -> Float[Array, "*n d"]:
    r"""Rotate each run of ``block`` channels by a Hadamard matrix.

    .. math:: y = x R, \qquad R = I_{d / block} \otimes H_{block}

    Computed in float32 or better, returned in the dtype of x; ``||y||_2 = ||x||_2``. Where H is symmetric (powers of
    two) the function is its own inverse. A weight ``[out, in]`` that will meet rotated inputs is rotated by the same
    call: ``(x R)(W R)^T = x W^T``. One matrix product for small blocks, one with a Kronecker factor of H and additions
    for large ones. Safe under jit, vmap and grad; x without rows comes back.

    Raises: ConfigError where ``block`` does not divide d or has no Hadamard matrix.
    Reference: Pushing the Limits of Block Rotations in Post-Training Quantization, arXiv 2601.22347.
    """
    check_block(x.shape[-1], block)
    if x.size == 0 or block == 1:
        return x
    exact = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return (by_matmul if block <= ONE_PRODUCT else by_factors)(exact, block).astype(x.dtype)


def outlier_bound(x: Float[Array, "*n d"], block: int) -> Float[Array, "*n"]:
    r"""The most that one channel can hold after the block rotation, for each token.

    .. math:: \|xR\|_\infty \le \max_j \|x^{(j)}\|_1 / \sqrt{b} \quad\text{(block j of b channels)}

    Reached where the signs of the heaviest block are a row of H. Never below ``||x||_1 sqrt(b) / d``, which blocks of
    equal mass attain. Float32 or better.

    Raises: ConfigError where ``block`` does not divide d.
    Reference: arXiv 2601.22347; the proof is a reconstruction (every entry of H is +-1 / sqrt(b)).
    """
    if block < 1 or x.shape[-1] % block:
        raise ConfigError(f"block: found {block}, expected a whole number that divides the width {x.shape[-1]}")
    exact = jnp.abs(x.astype(jnp.promote_types(x.dtype, jnp.float32)))
    return exact.reshape(*x.shape[:-1], -1, block).sum(-1).max(-1) / math.sqrt(block)
