"""Sampled completions and the log-probabilities of given ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small

from jaxmeth import models, train
from jaxmeth.types import ConfigError


def test_rollouts_are_prompt_major_and_their_logprobs_the_policys():
    params = small.params()
    made, _ = small.policy_batch(params)
    tokens, mask = small.prompts()
    np.testing.assert_array_equal(made.prompt, np.repeat(tokens, 4, axis=0))
    np.testing.assert_array_equal(made.prompt_mask, np.repeat(mask, 4, axis=0))
    np.testing.assert_array_equal(made.tokens * ~made.mask, 0)
    stopped = np.asarray(made.tokens) == small.STOP
    assert not (np.asarray(made.mask)[:, 1:] & (np.cumsum(stopped, 1)[:, :-1] > 0)).any(), "nothing after a stop token"
    found = train.completion_logprobs(params, small.CFG, *made[:4])
    np.testing.assert_allclose(found, made.logp, atol=1e-5)
    assert np.unique(made.tokens, axis=0).shape[0] > 2, "rollouts of one prompt differ"


def test_logprobs_against_the_whole_models_logits():
    params = small.params()
    made, _ = small.policy_batch(params)
    mask = jnp.concatenate([made.prompt_mask, made.mask], 1)
    logits = models.apply(params, small.CFG, jnp.concatenate([made.prompt, made.tokens], 1), mask=mask).logits
    for temperature in (1.0, 0.7):
        logp = jax.nn.log_softmax(logits[:, 3:-1] / temperature, axis=-1)
        expected = np.where(
            made.mask, np.take_along_axis(np.asarray(logp), np.asarray(made.tokens)[..., None], 2)[..., 0], 0
        )
        found = train.completion_logprobs(params, small.CFG, *made[:4], temperature=temperature)
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_what_is_masked_reaches_neither_value_nor_gradient():
    params = small.params()
    made, _ = small.policy_batch(params)
    gradient = jax.jit(
        jax.value_and_grad(
            lambda p, tokens: train.completion_logprobs(p, small.CFG, *made[:2], tokens, made.mask).sum()
        )
    )
    other = jnp.where(made.mask, made.tokens, 17)
    jax.tree.map(np.testing.assert_array_equal, gradient(params, made.tokens), gradient(params, other))
    nothing = train.completion_logprobs(params, small.CFG, *made[:3], jnp.zeros_like(made.mask))
    np.testing.assert_array_equal(nothing, 0)


def test_sampling_temperature_is_that_of_the_logprobs():
    params, (tokens, mask) = small.params(), small.prompts()
    keywords = {"key": jax.random.key(2), "group_size": 2, "max_new_tokens": 3, "temperature": 0.5}
    made = train.sample_rollouts(params, small.CFG, tokens, mask, **keywords)
    expected = train.completion_logprobs(params, small.CFG, *made[:4], temperature=0.5)
    np.testing.assert_array_equal(made.logp, expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"group_size": 0}, "group_size: found 0"), ({"temperature": 0.0}, "temperature: found 0.0"),
     ({"temperature": float("nan")}, "temperature: found nan"), ({"max_new_tokens": 0}, "max_new_tokens: found 0")],
)  # fmt: skip
def test_refused(changes, message):
    keywords = {"key": jax.random.key(2), "group_size": 2, "max_new_tokens": 3} | changes
    with pytest.raises(ConfigError, match=message):
        train.sample_rollouts(small.params(), small.CFG, *small.prompts(), **keywords)


@pytest.mark.parametrize("temperature", [0, -1.0, float("nan"), float("inf")])
def test_temperatures_refused(temperature):
    made, _ = small.policy_batch(small.params())
    with pytest.raises(ConfigError, match="temperature: found"):
        train.completion_logprobs(small.params(), small.CFG, *made[:4], temperature=temperature)
