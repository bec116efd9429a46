"""Rollouts: G sampled completions of each prompt, and the log-probabilities a policy gives to given completions."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from jaxmeth import models
from jaxmeth.attention.dense import dense
from jaxmeth.models.config import DecoderConfig
from jaxmeth.models.decoder import build
from jaxmeth.rl._common import LARGEST, check_number
from jaxmeth.types import Attend, Params, whole_number


class Rollouts(NamedTuple):
    """N = P G completions, prompt-major: row i belongs to prompt i // G. Prompts are padded on the left.

    ``logp`` is of the sampled tokens under the sampling temperature, before top-k and top-p; 0 where ``mask`` is False.
    """

    prompt: Int[Array, "N S"]
    prompt_mask: Bool[Array, "N S"]
    tokens: Int[Array, "N T"]
    mask: Bool[Array, "N T"]
    logp: Float[Array, "N T"]


def check_temperature(temperature: float | Float[Array, ""]) -> None:
    """Raises: ConfigError unless it is a finite number above 0 (a traced value passes, unread)."""
    check_number("temperature", temperature, 0, LARGEST, above=True)


def completion_logprobs(
    params: Params,
    cfg: DecoderConfig,
    prompt: Int[Array, "N S"],
    prompt_mask: Bool[Array, "N S"],
    tokens: Int[Array, "N T"],
    mask: Bool[Array, "N T"],
    *,
    temperature: float | Float[Array, ""] = 1.0,
    attend: Attend | None = None,
) -> Float[Array, "N T"]:
    r"""``log softmax(logits / temperature)`` of each completion token given all before it; 0 where ``mask`` is False.

    Differentiable in ``params``; logits are computed at the T positions that predict, never at the prompt's others.
    ``prompt``'s last column must be real in each row.

    Raises: ConfigError for a temperature that is not above 0.
    """
    check_temperature(temperature)
    model = build(cfg, params)
    seen = jnp.concatenate([prompt_mask.astype(bool), mask.astype(bool)], axis=1)
    # The last completion token predicts nothing.
    ids = jnp.concatenate([prompt, jnp.where(mask, tokens, 0)], axis=1)[:, :-1]
    hidden, _, _ = model.trunk(ids, seen[:, :-1], None, None, attend or dense, None)
    logits = model.logits(hidden[:, prompt.shape[1] - 1 :]) / temperature
    picked = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
    return jnp.where(mask, picked - jax.nn.logsumexp(logits, axis=-1), 0)


def sample_rollouts(
    params: Params,
    cfg: DecoderConfig,
    prompt: Int[Array, "P S"] | np.ndarray,
    prompt_mask: Bool[Array, "P S"] | np.ndarray,
    *,
    key: Key[Array, ""],
    group_size: int,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: tuple[int, ...] | Int[Array, " K"] = (),
) -> Rollouts:
    """Sample G completions of each prompt by ``models.generate``; a stop token ends one and belongs to it.

    Consumes ``key``; in a loop over steps pass ``fold_in(key, step)``, so that a resumed run draws the same.

    Raises:
      ConfigError: a group size below 1, temperature 0 (nothing to explore), and what ``models.generate`` refuses.
    """
    group_size = whole_number("group_size", group_size, 1)
    check_temperature(temperature)
    prompt, prompt_mask = (jnp.repeat(jnp.asarray(a), group_size, axis=0) for a in (prompt, prompt_mask))
    made = models.generate(
        params, cfg, prompt, prompt_mask, key=key, max_new_tokens=max_new_tokens, temperature=temperature,
        top_k=top_k, top_p=top_p, stop=stop,
    )  # fmt: skip
    mask = jnp.arange(max_new_tokens)[None] < made.lengths[:, None]
    logp = made.logprobs
    if isinstance(temperature, jax.core.Tracer) or temperature != 1:
        logp = completion_logprobs(params, cfg, prompt, prompt_mask, made.tokens, mask, temperature=temperature)
    return Rollouts(prompt, prompt_mask.astype(bool), made.tokens, mask, logp)
