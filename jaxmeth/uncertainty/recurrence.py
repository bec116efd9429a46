"""The recurrence of RAUQ and its variants: token signals and attention to the previous token in, confidences out.

Two domains. Where c stays positive the recurrence runs on logarithms: no token probability and no product of attentions
underflows. Where attention minus a mean may turn c negative it runs on c itself.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float

DIFFERENCES = ("minus_mean", "minus_last5")
"""Recurrences whose c may be negative and has no logarithm."""


def signal_from_entropy(entropy: Array, vocab_size: ArrayLike) -> Array:
    """``log s`` with ``s = log V - entropy``; at least log 1e-10, also where rounding puts the entropy above log V."""
    return jnp.log(jnp.maximum(jnp.log(jnp.asarray(vocab_size, entropy.dtype)) - entropy, 1e-10))


def log_mix(log_s: Array, log_prev: Array, a: Array, alpha: float) -> Array:
    """``log(alpha s + (1 - alpha) a prev)`` from the logarithms of s and prev, broadcast together.

    a itself stays linear: its gradient at 0 is finite. With alpha = 1 the result is log s exactly.
    """
    own = log_s + (math.log(alpha) if alpha > 0 else -math.inf)
    passed = log_prev + (math.log1p(-alpha) if alpha < 1 else -math.inf)
    limits = jnp.finfo(own.dtype)
    # Without the lower limit two impossible tokens would give inf - inf.
    top = jax.lax.stop_gradient(jnp.maximum(jnp.maximum(own, passed), limits.min))
    # The floor is met only where a is 0 and, beside what came before, the token's own probability underflows.
    return top + jnp.log(jnp.maximum(jnp.exp(own - top) + a * jnp.exp(passed - top), limits.tiny))


# log c from (log c_prev, log s, log s_prev, a, alpha).
_LOG_STEP: dict[str, Callable[..., Array]] = {
    "full": lambda c, s, s_prev, a, alpha: log_mix(s, c, a, alpha),
    "no_recurrence": lambda c, s, s_prev, a, alpha: log_mix(s, jnp.zeros_like(c), a, alpha),
    "no_attention": lambda c, s, s_prev, a, alpha: log_mix(s, c, jnp.ones_like(a), alpha),
    "previous_prob": lambda c, s, s_prev, a, alpha: log_mix(s, s_prev, a, alpha),
    "product": lambda c, s, s_prev, a, alpha: log_mix(s, s, a, 0.0),
}


def _running_mean(a: Array) -> Array:
    return jnp.cumsum(a, axis=-1) / jnp.arange(1, a.shape[-1] + 1, dtype=a.dtype)[None, None]


def _last5_mean(a: Array) -> Array:
    steps = a.shape[-1]
    padded = jnp.pad(a, ((0, 0), (0, 0), (4, 0)))
    total = sum(padded[..., shift : shift + steps] for shift in range(5))
    return total / jnp.minimum(jnp.arange(1, steps + 1), 5).astype(a.dtype)[None, None]


_REWEIGHT: dict[str, Callable[[Array], Array]] = {
    "minus_mean": lambda a: a - _running_mean(a),
    "minus_last5": lambda a: a - _last5_mean(a),
    "ratio": lambda a: a / (_running_mean(a) + 1e-10),
}


RECURRENCES = (*_LOG_STEP, *_REWEIGHT)
"""All recurrences by name; ``RAUQConfig`` describes them."""


def confidences(
    log_s: Float[Array, "B N"], a: Float[Array, "B L P"], valid: Bool[Array, "B N"], recurrence: str, alpha: float
) -> tuple[Float[Array, "B L N"], Float[Array, "B L N"] | None]:
    """c and log c (None for a difference) from log s and the chosen heads' a (P = N - 1); carried on past the end.

    ``recurrence`` is one of ``RECURRENCES``, each with ``c(1) = s_1``.
    """
    a = _REWEIGHT[recurrence](a) if recurrence in _REWEIGHT else a
    log_step = _LOG_STEP.get(recurrence, _LOG_STEP["full"])
    linear = recurrence in DIFFERENCES
    signal = jnp.exp(log_s) if linear else log_s

    def step(c, inputs):
        s, s_prev, a, valid = inputs
        new = alpha * s + (1 - alpha) * a * c if linear else log_step(c, s, s_prev, a, alpha)
        new = jnp.where(valid, new, c)
        return new, new

    first = jnp.broadcast_to(signal[:, :1], a.shape[:2])
    inputs = signal[:, 1:, None], signal[:, :-1, None], a.swapaxes(1, 2), valid[:, 1:, None]
    _, rest = jax.lax.scan(step, first, jax.tree.map(lambda x: x.swapaxes(0, 1), inputs))
    c = jnp.concatenate([first[None], rest]).transpose(1, 2, 0)
    return (c, None) if linear else (jnp.exp(c), c)


def median(x: Array, count: Array) -> Array:
    """Median over the last axis of the ``count`` values below +inf; of an even count the mean of the central two."""
    ordered = jnp.sort(x, axis=-1)
    central = [jnp.take_along_axis(ordered, k[..., None], axis=-1)[..., 0] for k in ((count - 1) // 2, count // 2)]
    return 0.5 * (central[0] + central[1])


def over_tokens(c: Array, log_c: Array | None, valid: Array, n: Array, token_agg: str) -> Array:
    """Layer scores [B, L] of c [B, L, N]; ``valid`` [B, 1, N], n [B, 1] at least 1."""
    if token_agg in ("meanlog", "sumlog", "mean"):
        total = -jnp.where(valid, c if token_agg == "mean" else log_c, 0).sum(-1)
        return total if token_agg == "sumlog" else total / n
    if token_agg == "max":
        return -jnp.where(valid, c, -jnp.inf).max(-1)
    above = jnp.where(valid, c, jnp.inf)
    return -(above.min(-1) if token_agg == "min" else median(above, jnp.broadcast_to(n, above.shape[:-1])))
