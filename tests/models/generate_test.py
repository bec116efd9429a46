"""Generation against step-by-step ``apply``; stopping, observing, sampling, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import FAMILIES
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmeth import models
from jaxmeth.attention import dense
from jaxmeth.models.generate import truncate
from jaxmeth.types import ConfigError

LLAMA = FAMILIES["llama"]
PARAMS = models.init(LLAMA, jax.random.key(0))


def prompts(cfg=LLAMA, batch=3, length=6, seed=0):
    tokens = jnp.asarray(np.random.default_rng(seed).integers(0, cfg.vocab_size, (batch, length)), jnp.int32)
    mask = jnp.arange(length)[None] >= jnp.arange(batch)[:, None]
    return tokens, mask


def run(**kwargs):
    tokens, mask = prompts()
    arguments = {"key": jax.random.key(1), "max_new_tokens": 8, **kwargs}
    return models.generate(PARAMS, LLAMA, tokens, mask, **arguments)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_greedy_equals_argmax_without_a_cache(name):
    cfg = FAMILIES[name]
    params = models.init(cfg, jax.random.key(0))
    tokens, mask = prompts(cfg)
    made = models.generate(params, cfg, tokens, mask, key=jax.random.key(1), max_new_tokens=5)
    for step in range(5):
        logits = models.apply(params, cfg, tokens, mask=mask).logits[:, -1]
        logp = jax.nn.log_softmax(logits)
        best = jnp.argmax(logits, axis=-1)
        np.testing.assert_array_equal(made.tokens[:, step], best)
        np.testing.assert_allclose(made.logprobs[:, step], logp[jnp.arange(3), best], atol=1e-5)
        np.testing.assert_allclose(made.entropy[:, step], -jnp.sum(jnp.exp(logp) * logp, axis=-1), atol=1e-5)
        tokens = jnp.concatenate([tokens, best[:, None].astype(jnp.int32)], axis=1)
        mask = jnp.concatenate([mask, jnp.ones((3, 1), bool)], axis=1)


def test_same_key_same_tokens_and_logprobs_before_temperature():
    first, again = run(temperature=0.7, top_p=0.9), run(temperature=0.7, top_p=0.9)
    np.testing.assert_array_equal(first.tokens, again.tokens)
    assert np.any(first.tokens != run(temperature=0.7, top_p=0.9, key=jax.random.key(2)).tokens)
    tokens, mask = prompts()
    whole = jnp.concatenate([tokens, first.tokens], axis=1)
    logits = models.apply(PARAMS, LLAMA, whole, mask=jnp.concatenate([mask, jnp.ones((3, 8), bool)], axis=1)).logits
    logp = jax.nn.log_softmax(logits[:, 5:-1])
    np.testing.assert_allclose(
        first.logprobs, jnp.take_along_axis(logp, first.tokens[..., None], axis=-1)[..., 0], atol=1e-5
    )


def test_rows_alone_equal_the_batch():
    tokens, mask = prompts()
    together = run()
    for row in range(3):
        one, real = tokens[row : row + 1, row:], mask[row : row + 1, row:]
        alone = models.generate(PARAMS, LLAMA, one, real, key=jax.random.key(1), max_new_tokens=8)
        np.testing.assert_array_equal(alone.tokens[0], together.tokens[row])


def test_stop_token_counts_and_the_rest_is_zero():
    free = run()
    stop = int(free.tokens[0, 3])
    made = run(stop=(stop,))
    for row in range(3):
        hits = np.flatnonzero(free.tokens[row] == stop)
        length = hits[0] + 1 if hits.size else 8
        assert int(made.lengths[row]) == length
        np.testing.assert_array_equal(made.tokens[row, :length], free.tokens[row, :length])
        for field in (made.tokens, made.logprobs, made.entropy):
            assert not np.any(field[row, length:])


def test_observer_counts_and_stops_inside_the_loop():
    def observe(carry, info):
        carry = carry + info.active
        return carry, carry >= jnp.array([2, 5, 99])

    made = run(observe=observe, carry=jnp.zeros((3,), jnp.int32))
    np.testing.assert_array_equal(made.lengths, [2, 5, 8])
    np.testing.assert_array_equal(made.carry, [2, 5, 8])
    np.testing.assert_array_equal(made.tokens[2], run().tokens[2])


def newest_slot(q, k, v, ctx, state):
    """Writes down the slot of the newest query: shows which forward pass a state belongs to."""
    return dense(q, k, v, ctx, None)[0], jnp.broadcast_to(ctx.q_slot[-1], state.shape)


def test_observer_sees_the_state_of_the_pass_that_gave_its_token():
    def observe(carry, info):
        seen, step = carry
        return (seen.at[step].set(info.state[0]), step + 1), jnp.zeros(info.token.shape, bool)

    carry = (jnp.zeros((8,), jnp.int32), jnp.int32(0))
    made = run(attend=newest_slot, state=jnp.zeros((3,), jnp.int32), observe=observe, carry=carry)
    # The last prompt token lies in slot 5 and gives token 0; token i is given by slot 5 + i.
    np.testing.assert_array_equal(made.carry[0], np.arange(5, 13))
    np.testing.assert_array_equal(made.state, [12, 12, 12])


def test_second_prompt_of_the_same_shape_does_not_retrace():
    traced = []

    def counting(q, k, v, ctx, state):
        traced.append(1)
        return dense(q, k, v, ctx, state)

    def once(seed, **kwargs):
        tokens, mask = prompts(seed=seed)
        models.generate(
            PARAMS, LLAMA, tokens, mask, key=jax.random.key(seed), max_new_tokens=4, attend=counting, **kwargs
        )
        return len(traced)

    first = once(0, temperature=0.5, stop=(1,))
    assert once(1, temperature=0.9, stop=(2, 3)) == first > 0


def test_single_token_runs_no_second_pass():
    made = run(max_new_tokens=1)
    np.testing.assert_array_equal(made.tokens, run().tokens[:, :1])


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 12), st.floats(0.01, 1.0))
def test_truncation_keeps_the_smallest_nucleus(seed, top_k, top_p):
    logits = jnp.asarray(np.random.default_rng(seed).normal(size=(2, 12)) * 3, jnp.float32)
    kept = np.isfinite(truncate(logits, top_k, None))
    assert np.all(kept.sum(-1) == top_k)
    kept = np.isfinite(truncate(logits, None, top_p))
    probs = np.asarray(jax.nn.softmax(logits), np.float64)
    for row in range(2):
        inside = probs[row][kept[row]]
        assert kept[row][probs[row].argmax()]
        assert inside.min() >= probs[row][~kept[row]].max(initial=0.0)
        assert inside.sum() >= top_p - 1e-5
        assert inside.sum() - inside.min() < top_p + 1e-5


def test_sampling_follows_the_distribution():
    tokens, _ = prompts()
    many = jnp.tile(tokens[:1], (4000, 1))
    made = models.generate(
        PARAMS, LLAMA, many, jnp.ones_like(many), key=jax.random.key(5), max_new_tokens=1, temperature=0.5
    )
    expected = jax.nn.softmax(models.apply(PARAMS, LLAMA, many[:1]).logits[0, -1] / 0.5)
    observed = np.bincount(made.tokens[:, 0], minlength=61) / 4000
    assert np.all(np.abs(observed - expected) < 5 * np.sqrt(expected / 4000) + 1e-3)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": 60}, "max_positions 64"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": 62}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
    ],
)
def test_arguments_out_of_range_are_refused(kwargs, message):
    with pytest.raises(ConfigError, match=message):
        run(**kwargs)


def test_right_padding_and_wrong_masks_are_refused():
    tokens, mask = prompts()
    with pytest.raises(ConfigError, match="row 1"):
        models.generate(PARAMS, LLAMA, tokens, mask.at[1, -1].set(False), key=jax.random.key(0), max_new_tokens=2)
    with pytest.raises(ConfigError, match="shape"):
        models.generate(PARAMS, LLAMA, tokens, np.asarray(mask)[:, 1:], key=jax.random.key(0), max_new_tokens=2)


def test_float64_and_known_tokens_inside_jit():
    tokens, mask = prompts()
    expected = run()
    with jax.enable_x64(True):
        params = jax.tree.map(lambda a: a.astype(jnp.float64), PARAMS)
        found = models.generate(params, LLAMA, tokens, mask, key=jax.random.key(0), max_new_tokens=8)
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    known = jnp.asarray(tokens)
    inside = jax.jit(lambda p: models.apply(p, LLAMA, known, mask=mask).logits)(PARAMS)
    np.testing.assert_allclose(inside, models.apply(PARAMS, LLAMA, known, mask=mask).logits, atol=1e-5)
