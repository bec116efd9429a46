"""RAUQ: one pass, no labels, no sampling: token probabilities passed on through the attention to the previous token.

Shapes: B answers, L layers, H query heads, N tokens (right-padded), Lset the L' layers that are scored.

Reference: "Efficient Hallucination Detection for LLMs Using Uncertainty-Aware Attention Heads", arXiv 2505.20045, and
its two public implementations.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Int, Num

from jaxmeth.types import ConfigError, is_concrete
from jaxmeth.uncertainty.baselines import check_lengths
from jaxmeth.uncertainty.recurrence import (
    DIFFERENCES,
    RECURRENCES,
    confidences,
    median,
    over_tokens,
    signal_from_entropy,
)

_NAMES = {
    "signal": ("prob", "entropy"),
    "token_agg": ("meanlog", "sumlog", "mean", "median", "min", "max"),
    "layer_agg": ("max", "mean", "median"),
    "recurrence": RECURRENCES,
}


@dataclass(frozen=True)
class RAUQConfig:
    """How token signals become one score. The defaults are the paper's for base models.

    Attributes:
      alpha: weight of a token's own signal in [0, 1]; 1 is perplexity. The paper takes 0.2 (``prob``) or 0.5
        (``entropy``) for base models, 0.6 (``prob``) or 0.9 (``entropy``) for instruction-tuned ones.
      signal: ``prob``: s = exp(logp); ``entropy``: s = log V - entropy, at least 1e-10, which may exceed 1, so that a
        negative score is nothing unusual.
      token_agg: ``meanlog``: -(1/N) sum log c; ``sumlog``, and minus the ``mean``, ``median``, ``min``, ``max`` of c.
      layer_agg: over Lset. A median of an even count, here and over tokens, is the mean of the two central values.
      recurrence: with c(1) = s_1, ``full``: alpha s + (1-alpha) a c_prev; ``no_recurrence``: alpha s + (1-alpha) a;
        ``no_attention``: alpha s + (1-alpha) c_prev; ``previous_prob``: alpha s + (1-alpha) a s_prev; ``product``: s a;
        and ``full`` with a replaced, once the head is chosen, by a minus its running mean (``minus_mean``), minus the
        mean of its last five or fewer, itself included (``minus_last5``), or over its running mean (``ratio``).
      offset: added to every layer score; 1 gives the numbers of the public code.
      empty_score: the score of an answer without tokens.

    Raises:
      ConfigError: an unknown name, alpha outside [0, 1], offset not finite, or a logarithm of ``minus_mean`` or
        ``minus_last5``, whose c may be negative.
    """

    alpha: float = 0.2
    signal: str = "prob"
    token_agg: str = "meanlog"
    layer_agg: str = "max"
    recurrence: str = "full"
    offset: float = 0.0
    empty_score: float = math.inf

    def __post_init__(self):
        if not 0 <= self.alpha <= 1:
            raise ConfigError(f"alpha: found {self.alpha}, expected a value in [0, 1]")
        if not math.isfinite(self.offset):
            raise ConfigError(f"offset: found {self.offset}, expected a finite value")
        for field, names in _NAMES.items():
            value = getattr(self, field)
            if value not in names:
                raise ConfigError(f"{field}: found {value!r}, expected one of {', '.join(names)}")
        if self.recurrence in DIFFERENCES and self.token_agg in ("meanlog", "sumlog"):
            raise ConfigError(
                f"token_agg: found {self.token_agg!r} with recurrence {self.recurrence!r}, whose c may be negative, "
                "expected one without a logarithm: mean, median, min, max"
            )


class RAUQResult(NamedTuple):
    """Scores of answers; the batch axis is missing in the online form, as is ``confidence`` (None)."""

    score: Float[Array, "*B"]
    layer_scores: Float[Array, "*B Lset"]
    heads: Int[Array, "*B Lset"]
    confidence: Float[Array, "*B Lset N"] | None


def middle_layers(num_layers: int, *, full: Sequence[bool] | None = None) -> tuple[int, ...]:
    """The middle layers, 0-based: ``range(L // 3, ceil(2 L / 3) + 1)``, cut at L for models of one or two layers.

    Args:
      full: for hybrid and sliding-window models, whether each layer has a full attention map. Those without are left
        out; the middle remains that of the original numbering.

    Raises:
      ConfigError: no layer, or not one flag a layer.
    """
    if num_layers < 1:
        raise ConfigError(f"num_layers: found {num_layers}, expected at least 1")
    if full is not None and len(full) != num_layers:
        raise ConfigError(f"full: found {len(full)} flags, expected {num_layers}")
    middle = range(num_layers // 3, min(math.ceil(2 * num_layers / 3) + 1, num_layers))
    return tuple(i for i in middle if full is None or full[i])


def select_heads(prev_attn: Float[Array, "B L H P"], gen_len: Int[Array, " B"]) -> Int[Array, "B L"]:
    """The head of each layer with the largest mean of ``prev_attn`` over an answer; the lowest of equals.

    Entries from ``gen_len - 1`` on are not read. Answers of one token or none have no attention: head 0.
    """
    inside = jnp.arange(prev_attn.shape[-1])[None] < gen_len[:, None] - 1
    dtype = jnp.result_type(jnp.float32, prev_attn.dtype)
    # The heads of an answer share its length: the largest sum is the largest mean.
    total = jnp.where(inside[:, None, None], prev_attn.astype(dtype), 0).sum(-1)
    return jnp.argmax(total, axis=-1).astype(jnp.int32)


def finish(layer_scores: Array, n: Array, config: RAUQConfig) -> tuple[Array, Array]:
    """(score, layer scores), with the offset and with ``empty_score`` where there is no token."""
    layer_scores = layer_scores + config.offset
    size = jnp.full(layer_scores.shape[:-1], layer_scores.shape[-1])
    over_layers = {"max": lambda u: u.max(-1), "mean": lambda u: u.mean(-1), "median": lambda u: median(u, size)}
    score = over_layers[config.layer_agg](layer_scores)
    return jnp.where(n > 0, score, config.empty_score), jnp.where(n[..., None] > 0, layer_scores, config.empty_score)


def check_layers(layers: tuple[int, ...] | None, num_layers: int) -> tuple[int, ...]:
    """``layers``, by default the middle ones, checked."""
    layers = middle_layers(num_layers) if layers is None else tuple(layers)
    if not layers or not all(0 <= layer < num_layers for layer in layers):
        raise ConfigError(f"layers: found {layers}, expected indices in [0, {num_layers}), at least one")
    return layers


def check_signal(
    entropy: Array | None, vocab_size: ArrayLike | None, shape: tuple[int, ...], config: RAUQConfig
) -> None:
    """What ``signal = "entropy"`` needs."""
    if config.signal != "entropy":
        return
    if entropy is None or vocab_size is None:
        raise ConfigError("entropy, vocab_size: found None, expected both with signal 'entropy'")
    if entropy.shape != shape:
        raise ConfigError(f"entropy: found shape {entropy.shape}, expected {shape}")
    if is_concrete(vocab_size) and vocab_size < 1:
        raise ConfigError(f"vocab_size: found {vocab_size}, expected at least 1")


@partial(jax.jit, static_argnames=("layers", "config"))
def _rauq(logp, prev_attn, gen_len, entropy, vocab_size, layers, config):
    tokens = logp.shape[1]
    dtype = jnp.result_type(jnp.float32, *[x.dtype for x in (logp, prev_attn, entropy) if x is not None])
    n = jnp.clip(gen_len, 0, tokens)
    valid = jnp.arange(tokens)[None] < n[:, None]
    a = jnp.take(prev_attn, jnp.asarray(layers), axis=1).astype(dtype)
    heads = select_heads(a, n)
    a = jnp.take_along_axis(a, heads[:, :, None, None], axis=2)[:, :, 0]
    a = jnp.where(valid[:, None, 1:], a, 0)
    log_s = jnp.where(valid, logp.astype(dtype), 0)
    if config.signal == "entropy":
        log_s = signal_from_entropy(jnp.where(valid, entropy.astype(dtype), 0), vocab_size)
    c, log_c = confidences(log_s, a, valid, config.recurrence, config.alpha)
    valid = valid[:, None]
    layer_scores = over_tokens(c, log_c, valid, jnp.maximum(n, 1)[:, None], config.token_agg)
    score, layer_scores = finish(layer_scores, n, config)
    return RAUQResult(score, layer_scores, heads, jnp.where(valid, c, 0))


def rauq(
    logp: Float[Array, "B N"],
    prev_attn: Float[Array, "B L H P"],
    gen_len: Int[Array, " B"],
    *,
    entropy: Float[Array, "B N2"] | None = None,
    vocab_size: Num[ArrayLike, ""] | None = None,
    layers: tuple[int, ...] | None = None,
    config: RAUQConfig = RAUQConfig(),
) -> RAUQResult:
    """Recurrent attention-based uncertainty: one number an answer, higher = more likely wrong.

    In each layer the head ``h_l`` with the largest mean attention on the previous token is followed:
    ``c_l(1) = s_1``, ``c_l(i) = alpha s_i + (1 - alpha) a[l, h_l, i] c_l(i-1)``; ``u_l = -(1/N) sum_i log c_l(i)``;
    ``u = max_l u_l`` over Lset. The recurrence runs in the log domain: no probability is clipped, alpha = 1 is
    perplexity, and alpha = 0, a product of attentions, does not underflow.

    Args:
      logp: log-probabilities of the answer's tokens, nats; the end-of-sequence token counts if it was produced.
      prev_attn: a[l, h, i] for the tokens i = 2..N (P = N - 1), any float type: ``previous_token_attention`` or the
        slices of ``rauq_tap`` from the second token on.
      gen_len: tokens of each answer. What stands past the end, NaN included, changes nothing.
      entropy: of the full next-token distributions, nats; with ``vocab_size`` needed by the entropy signal only.
      layers: static; indices into the L axis of ``prev_attn``. None: ``middle_layers(L)``; a slice that holds only the
        middle layers passes ``tuple(range(L))``.

    Returns:
      ``RAUQResult``, float32 (float64 for float64 inputs). N = 1: no attention enters, ``-log s_1``, head 0. N = 0:
      ``empty_score``. ``confidence`` is c, 0 past the end. A NaN inside an answer gives NaN.

    Raises:
      ConfigError: shapes that do not fit, layers out of range, no entropy for the entropy signal, or a length outside
        [0, N] (under ``jit`` lengths are clipped, as they cannot be read).

    Reference: arXiv 2505.20045 (signals, head choice, recurrence, maximum over layers); head ties and Lset from the
    public code, which reports ``u + 1`` (``offset = 1``) and adds 1e-10 to the entropy signal, here a floor.
    """
    rows, tokens = logp.shape
    steps = max(tokens - 1, 0)
    if prev_attn.shape[0] != rows or prev_attn.shape[3] != steps:
        raise ConfigError(f"prev_attn: found shape {prev_attn.shape}, expected [{rows}, L, H, {steps}]")
    check_lengths(gen_len, tokens)
    check_signal(entropy, vocab_size, logp.shape, config)
    layers = check_layers(layers, prev_attn.shape[1])
    if config.signal == "prob":
        entropy = vocab_size = None
    if tokens == 0:
        empty = jnp.full((rows, len(layers)), config.empty_score, jnp.result_type(jnp.float32, logp.dtype))
        return RAUQResult(
            empty[:, 0], empty, jnp.zeros(empty.shape, jnp.int32), jnp.zeros((*empty.shape, 0), empty.dtype)
        )
    return _rauq(logp, prev_attn, gen_len, entropy, vocab_size, layers, config)
