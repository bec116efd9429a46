"""A decoder of one layer and batches for it, shared by the tests of training."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxmeth import models, rl, train

CFG = models.DecoderConfig("llama", 24, 16, 1, 2, 1, 8, 24, 32)
STOP = 3


def params():
    return models.init(CFG, jax.random.key(0))


def prompts():
    """Two left-padded prompts of 4."""
    tokens = np.array([[0, 0, 5, 6], [7, 8, 9, 10]], np.int32)
    return tokens, np.array([[0, 0, 1, 1], [1, 1, 1, 1]], bool)


def policy_batch(weights, group_size=4):
    tokens, mask = prompts()
    made = train.sample_rollouts(
        weights, CFG, tokens, mask, key=jax.random.key(1), group_size=group_size, max_new_tokens=5, stop=(STOP,)
    )
    rewards = jnp.asarray(np.random.default_rng(0).integers(0, 2, (2, group_size)), jnp.float32)
    return made, train.policy_batch(made, rewards, jnp.ones((2, group_size), bool))


def sft_batch(seed=0, rows=4, length=6):
    tokens = np.random.default_rng(seed).integers(1, 24, (rows, length)).astype(np.int32)
    real = np.ones((rows, length), bool)
    real[0, :2] = False
    return train.SFTBatch(jnp.asarray(tokens), jnp.asarray(real), jnp.asarray(real & (np.arange(length) > 2)))


GRPO = rl.make_policy_loss()
