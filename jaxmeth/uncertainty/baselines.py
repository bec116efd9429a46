"""The scores that RAUQ is compared with. Answers [B, N] right-padded; what stands past ``gen_len`` is never read.

An empty answer scores ``empty_score`` (+inf): nothing was said, so nothing is to be trusted.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Int

from jaxmeth.types import ConfigError, is_concrete


def check_lengths(gen_len: Array, tokens: int) -> None:
    """Raise ``ConfigError`` for a readable ``gen_len`` outside ``[0, tokens]``."""
    if not is_concrete(gen_len):
        return
    lengths = np.asarray(gen_len)
    outside = lengths[(lengths < 0) | (lengths > tokens)]
    if outside.size:
        raise ConfigError(f"gen_len: found {outside[0]}, expected values in [0, {tokens}]")


def _masked(x: Array, gen_len: Array) -> tuple[Array, Array]:
    """x in float32 or better with zeros past the end, and the number of tokens."""
    valid = jnp.arange(x.shape[1])[None] < gen_len[:, None]
    return jnp.where(valid, x.astype(jnp.result_type(jnp.float32, x.dtype)), 0), jnp.clip(gen_len, 0, x.shape[1])


@jax.jit
def _total(x: Array, gen_len: Array, empty_score: ArrayLike) -> Array:
    x, n = _masked(x, gen_len)
    return jnp.where(n > 0, x.sum(1), empty_score)


@jax.jit
def _mean(x: Array, gen_len: Array, empty_score: ArrayLike) -> Array:
    x, n = _masked(x, gen_len)
    return jnp.where(n > 0, x.sum(1) / jnp.maximum(n, 1), empty_score)


def perplexity(
    logp: Float[Array, "B N"], gen_len: Int[Array, " B"], *, empty_score: float = math.inf
) -> Float[Array, " B"]:
    """Perplexity, as its logarithm: ``-(1/N) sum_i logp_i`` in nats.

    Raises:
      ConfigError: a readable length outside [0, N].

    Reference: arXiv 2505.20045, baselines; the name for the logarithm follows the public code (lm-polygraph).
    """
    check_lengths(gen_len, logp.shape[1])
    return _mean(-logp, gen_len, empty_score)


def msp(logp: Float[Array, "B N"], gen_len: Int[Array, " B"], *, empty_score: float = math.inf) -> Float[Array, " B"]:
    """Maximum sequence probability: ``-sum_i logp_i`` in nats. Grows with the length of the answer.

    Raises:
      ConfigError: a readable length outside [0, N].

    Reference: arXiv 2505.20045, baselines.
    """
    check_lengths(gen_len, logp.shape[1])
    return _total(-logp, gen_len, empty_score)


def mean_token_entropy(
    entropy: Float[Array, "B N"], gen_len: Int[Array, " B"], *, empty_score: float = math.inf
) -> Float[Array, " B"]:
    """Mean over the answer's tokens of the entropy (nats) of the distribution each was drawn from.

    Raises:
      ConfigError: a readable length outside [0, N].

    Reference: M. Fomicheva et al., "Unsupervised quality estimation for neural machine translation", arXiv 2005.10608.
    """
    check_lengths(gen_len, entropy.shape[1])
    return _mean(entropy, gen_len, empty_score)


@jax.jit
def attention_score(
    diag: Float[Array, "B H T"], mask: Bool[Array, "B T"], *, empty_score: float | Array = math.inf
) -> Float[Array, " B"]:
    """Attention Score: ``-(1/H) sum_h sum_q log(A[h, q, q] + 1e-12)`` at one layer.

    Each position adds a term that is hardly ever negative, so a longer text scores higher by construction.

    Args:
      diag: self-weights of one layer, the middle one (L // 2) in the public code: of prompt and answer, or of the
        answer alone, ``prev_attn[:, L // 2]`` with the mask ``arange(N - 1) < gen_len - 1``.
      mask: True where a position takes part; a row without any scores ``empty_score``.

    Reference: G. Sriramanan et al., "LLM-Check" (NeurIPS 2024), in the form of lm-polygraph.
    """
    dtype = jnp.result_type(jnp.float32, diag.dtype)
    weight = jnp.where(mask[:, None], diag.astype(dtype), 1)
    total = jnp.where(mask[:, None], jnp.log(weight + 1e-12), 0).sum(2)
    return jnp.where(mask.any(1), -total.mean(1), empty_score)


def simple_focus(
    logp: Float[Array, "B N"],
    answer_attn: Float[Array, "B N2 N2"],
    gen_len: Int[Array, " B"],
    gamma: float = 0.9,
    *,
    empty_score: float = math.inf,
) -> Float[Array, " B"]:
    """Simple Focus: every token inherits a share of the doubt about the tokens it attends to.

    ``r_i = -logp_i + gamma sum_{j<i} w_ij r_j``, score ``(1/N) sum_i r_i``, with the rows of ``answer_attn`` below the
    diagonal divided by their sum + 1e-6 as w. In matrices ``(I - gamma w) r = -logp``, a triangular system. gamma = 0
    is perplexity.

    Args:
      answer_attn: [b, i, j] the largest weight over layers and heads that the query generating token i gives to token
        j; ``answer_attention_tap`` yields it row by row. Only j < i < gen_len is read.
      gamma: in [0, 1].

    Raises:
      ConfigError: gamma outside [0, 1], answer_attn not [B, N, N], a readable length outside [0, N].

    Reference: T. Zhang et al., "Enhancing uncertainty-based hallucination detection with stronger focus",
    arXiv 2311.13230. Reconstruction of the simplified form compared in arXiv 2505.20045: Focus without its keyword
    selection, inverse document frequencies and entropy term.
    """
    if not 0 <= gamma <= 1:
        raise ConfigError(f"gamma: found {gamma}, expected a value in [0, 1]")
    rows, tokens = logp.shape
    if answer_attn.shape != (rows, tokens, tokens):
        raise ConfigError(f"answer_attn: found shape {answer_attn.shape}, expected {(rows, tokens, tokens)}")
    check_lengths(gen_len, tokens)
    return _simple_focus(logp, answer_attn, gen_len, gamma, empty_score)


@jax.jit
def _simple_focus(logp: Array, answer_attn: Array, gen_len: Array, gamma: ArrayLike, empty_score: ArrayLike) -> Array:
    own, n = _masked(-logp, gen_len)
    tokens = logp.shape[1]
    index = jnp.arange(tokens)
    read = (index[None, :] < index[:, None])[None] & (index[None] < n[:, None])[:, :, None]
    w = jnp.where(read, answer_attn.astype(own.dtype), 0)
    w = w / (w.sum(2, keepdims=True) + 1e-6)
    r = jax.scipy.linalg.solve_triangular(
        jnp.eye(tokens, dtype=own.dtype)[None] - gamma * w, own[..., None], lower=True, unit_diagonal=True
    )
    return jnp.where(n > 0, r[..., 0].sum(1) / jnp.maximum(n, 1), empty_score)
