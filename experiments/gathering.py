"""Answers with the slices of attention behind them: batches of prompts, the taps, the observer that fills buffers."""

from typing import Any, NamedTuple

import numpy as np

from jaxmeth.errors import ConfigError


class Prompts(NamedTuple):
    """One batch: rows into the items, and the left-padded ids and mask [B, T]; short batches repeat their last row."""

    rows: np.ndarray
    tokens: np.ndarray
    mask: np.ndarray


def batches(ids: list[list[int]], batch: int, pad: int) -> list[Prompts]:
    """Batches of prompts of similar length, each as long as a multiple of ``pad``."""
    order = np.argsort([len(i) for i in ids], kind="stable")
    made = []
    for start in range(0, len(order), batch):
        rows = order[start : start + batch]
        filled = np.concatenate([rows, np.repeat(rows[-1:], batch - len(rows))])
        length = -(-len(ids[rows[-1]]) // pad) * pad
        tokens, mask = np.zeros((batch, length), np.int32), np.zeros((batch, length), bool)
        for b, row in enumerate(filled):
            tokens[b, length - len(ids[row]) :] = ids[row]
            mask[b, length - len(ids[row]) :] = True
        made.append(Prompts(rows, tokens, mask))
    return made


def stop_tokens(tokenizer: Any, eos: tuple[int, ...]) -> np.ndarray:
    """Ids whose text holds a newline, and those that end a sequence."""
    lines = [i for i in range(tokenizer.get_vocab_size()) if "\n" in tokenizer.decode([i], skip_special_tokens=False)]
    return np.array(sorted({*lines, *eos}), np.int32)


def full_layers(cfg: Any) -> tuple[int, ...]:
    """RAUQ's middle layers, without those of a sliding window."""
    from jaxmeth.uncertainty import middle_layers

    windows = cfg.layer_windows
    layers = middle_layers(cfg.num_layers, full=[not w for w in windows] if windows else None)
    if not layers:
        raise ConfigError("model: found no full attention among its middle layers, expected one or more")
    return layers


class Gathered(NamedTuple):
    """What the observer writes: ``prev_attn`` [B, L', H, N], ``answer_attn`` [B, N, N], the online state, the step."""

    prev_attn: Any
    answer_attn: Any
    online: Any
    step: Any


def gatherer(cfg: Any, layers: tuple[int, ...], stop: np.ndarray, max_new_tokens: int):
    """``(attend, observe, start)``: taps, the observer that fills ``Gathered``, and the initial state and carry.

    ``start(batch, length) -> (state, carry)``. Make it once a run: ``generate`` compiles once for each observer.
    Everything stays on the device, and nothing larger than the slices is kept.
    """
    import jax
    import jax.numpy as jnp

    from jaxmeth.attention import dense
    from jaxmeth.uncertainty import (
        answer_attention_tap,
        answer_attention_tap_init,
        rauq_init,
        rauq_step,
        rauq_tap,
        rauq_tap_init,
    )

    n, heads = max_new_tokens, cfg.num_heads
    chosen = np.asarray(layers)
    step = jax.vmap(rauq_step, in_axes=(0, 0, 1, 0))

    def observe(carry: Gathered, info):
        (_, own), rows = info.state
        own = own[chosen]
        answer = rows.max(0)[:, -n:]
        # The token that stops an answer is not part of it.
        active = info.active & ~(info.token[:, None] == stop[None]).any(1)
        return Gathered(
            carry.prev_attn.at[..., carry.step].set(jnp.moveaxis(own, 0, 1)),
            carry.answer_attn.at[:, carry.step].set(answer),
            step(carry.online, info.logprob, own, active),
            carry.step + 1,
        ), jnp.zeros_like(info.active)

    def start(batch: int, length: int):
        state = rauq_tap_init(None, cfg.num_layers, batch, heads)
        state = answer_attention_tap_init(state, cfg.num_layers, batch, length + n)
        online = jax.tree.map(lambda x: jnp.zeros((batch, *x.shape), x.dtype), rauq_init(len(layers), heads))
        prev_attn = jnp.zeros((batch, len(layers), heads, n), jnp.float32)
        return state, Gathered(prev_attn, jnp.zeros((batch, n, n), jnp.float32), online, jnp.zeros((), jnp.int32))

    return answer_attention_tap(rauq_tap(dense)), observe, start
