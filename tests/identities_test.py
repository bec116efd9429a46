"""Every method at its neutral setting equals its baseline: one row a method.

A row is ``name: function``; the function returns ``(method at the neutral setting, baseline)``, two trees of arrays.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmeth import attention, quant, risk, rl, scaling, uncertainty


def rauq():
    """RAUQ with alpha 1 looks at no attention: it is perplexity."""
    keys = jax.random.split(jax.random.key(0), 2)
    logp = jnp.log(jax.random.uniform(keys[0], (5, 8)))
    prev_attn = jax.random.uniform(keys[1], (5, 6, 4, 7))
    gen_len = jnp.asarray([1, 2, 5, 7, 8])
    config = uncertainty.RAUQConfig(alpha=1.0)
    return uncertainty.rauq(logp, prev_attn, gen_len, config=config).score, uncertainty.perplexity(logp, gen_len)


def budget():
    """A lower schedule at minus infinity never gives up: the dual rule is the upper one."""
    keys = jax.random.split(jax.random.key(0), 2)
    signal, length = jax.random.uniform(keys[0], (20, 9)), jax.random.randint(keys[1], (20,), 1, 10)
    tokens = jnp.broadcast_to(jnp.arange(9)[None], (20, 9))
    never = risk.budget.LowerParams(jnp.zeros(1), jnp.zeros(1), jnp.full(1, -jnp.inf), jnp.full(1, -jnp.inf))
    upper = risk.budget.upper_exit(signal, length, jnp.asarray([0.8]))
    lower = risk.budget.lower_exit(signal, length, never, tokens, 1.0, 0.0)
    return risk.budget.dual_exit(upper, lower, length)[0], upper


def judge():
    """A confidence that weighs all views alike is that of simulated annotators."""
    probs = jax.random.uniform(jax.random.key(0), (20, 5, 2), minval=0.01)
    views, label = uncertainty.judge.features(probs)
    return (views.mean(1), label), uncertainty.judge.aggregate_annotators(probs)


def shannon():
    """The Shannon law without growing noise, at low SNR: the power law ``ln 2 e / (a b N^alpha D^beta)``."""
    n, d = jnp.asarray([0.1, 1.0, 10.0]), jnp.asarray([3.0, 30.0, 300.0])
    params = scaling.ShannonParams(a=0.2, b=1e-9, c=0.0, d=0.0, e=0.5, alpha=0.3, beta=0.4, gamma=0.6, delta=0.7)
    return scaling.loss(params, n, d), jnp.log(2.0) * 0.5 / (0.2 * 1e-9 * n**0.3 * d**0.4)


def rollouts(first_tokens=(0, 1, 2, 3)):
    """Log-probabilities and a batch of three prompts, four rollouts each, with these first tokens."""
    keys = jax.random.split(jax.random.key(0), 4)
    logp = -jax.random.exponential(keys[0], (12, 5))
    tokens = jnp.ones((12, 5), jnp.int32).at[:, 0].set(jnp.tile(jnp.asarray(first_tokens), 3))
    old = logp + 0.3 * jax.random.normal(keys[1], logp.shape)
    mask = jax.random.bernoulli(keys[2], 0.8, logp.shape).at[:, 0].set(True)
    return logp, rl.RolloutBatch(jax.random.uniform(keys[3], (3, 4)), None, tokens, mask, old)


def value_and_gradient(loss, logp, batch):
    return jax.jit(jax.value_and_grad(lambda x: loss(x, batch)[0]))(logp)


def asymmetric():
    """Every prompt at weight 1; and GRPO's own weight with the sample standard deviation."""
    logp, batch = rollouts()
    rewards = jnp.asarray([[0.0, 1.0, 0.0, 0.0], [0.0, 1.0, 1.0, 0.0]])
    weighted = rl.presets.grpo(prompt_weight=lambda rewards, valid: jnp.ones(rewards.shape[0]))
    return (
        (value_and_gradient(weighted, logp, batch), rl.adv_prompt_weighted(rewards, weight="grpo", ddof=1)),
        (value_and_gradient(rl.presets.grpo(), logp, batch), rl.adv_grpo(rewards, eps=0.0)),
    )


def lambda_grpo():
    """No rollout shares its first token with another: all process sets have one member."""
    logp, batch = rollouts()
    weighted = rl.presets.grpo(token_weight=rl.lambda_grpo_weight)
    return value_and_gradient(weighted, logp, batch), value_and_gradient(rl.presets.grpo(), logp, batch)


def ripo():
    """All old probabilities are p, and delta = 0.2^2 p: the fixed clip at 0.2."""
    logp, batch = rollouts()
    old = jnp.full_like(logp, jnp.log(0.3))
    batch = batch._replace(logp_old=old)
    bounds = functools.partial(rl.ripo, delta_low=0.04 * 0.3, r_min=None, r_max=None)
    near = old + 0.5 * (logp - logp.mean())
    isometric, fixed = rl.presets.grpo(ratio=bounds), rl.presets.grpo()
    return value_and_gradient(isometric, near, batch), value_and_gradient(fixed, near, batch)


def rler():
    """One model and a hard reward: TTRL's majority vote."""
    answers = jnp.asarray([[2, 0, 2, -1, 1, 2]])
    ensemble = rl.ensemble_reward(answers, None, 3, alpha_fn=lambda confidence, disagreement: 1.0)
    return ensemble.reward, (answers == 2).astype(jnp.float32)


def rif():
    """A filter that asks for no success keeps every instance: the loss is that of the whole batch."""
    logp, batch = rollouts()
    kept = rl.rif_filter(batch.rewards, min_successes=0).keep
    filtered = rl.keep_rollouts(batch, jnp.broadcast_to(kept[:, None], batch.rewards.shape))
    loss = rl.presets.dapo()
    return value_and_gradient(loss, logp, filtered), value_and_gradient(loss, logp, batch)


def dhsa():
    """DHSA that keeps every block is dense attention."""
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, (1, h, 80, 8)) for key, h in zip(keys, (4, 2, 2), strict=True))
    out, _ = attention.dhsa.prefill(q, k, v, attention.dhsa.DHSAConfig(bq=32, bk=16, density=1.0))
    flipped = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
    return out, jnp.swapaxes(jax.nn.dot_product_attention(*flipped, is_causal=True), 1, 2)


def perq():
    """A block as wide as the vector is the full rotation; Qronos without input error is GPTQ with its damping."""
    keys = jax.random.split(jax.random.key(0), 2)
    x, w = jax.random.normal(keys[0], (200, 24)), jax.random.normal(keys[1], (6, 24))
    h = jnp.matmul(x.T, x, precision="highest") / 200
    damp = 1e-3 * jnp.linalg.eigvalsh(h)[-1] / jnp.diag(h).mean()
    rounded = quant.qronos(w, h, h, alpha=1e-3), quant.gptq(w, h, damp=float(damp))
    full = jnp.matmul(x, quant.hadamard(24), precision="highest")
    return (quant.block_hadamard(x, 24), rounded[0].q), (full, rounded[1].q)


IDENTITIES = {
    "rauq: alpha 1 = perplexity": rauq,
    "budget: no lower schedule = upper rule": budget,
    "judge: equal weights = simulated annotators": judge,
    "shannon: no growing noise, low SNR = a power law": shannon,
    "asymmetric: weight 1 = GRPO": asymmetric,
    "lambda-GRPO: process sets of one = GRPO": lambda_grpo,
    "RIPO: equal old probabilities = a fixed clip": ripo,
    "RLER: one model, hard = majority reward": rler,
    "PeRQ: one block = full rotation, Qronos on equal inputs = GPTQ": perq,
    "RIF: no success asked for = the whole batch": rif,
    "DHSA: density 1 = dense attention": dhsa,
}


@pytest.mark.parametrize("row", IDENTITIES)
def test_neutral_setting_is_the_baseline(row):
    method, baseline = IDENTITIES[row]()
    leaves = jax.tree.leaves(baseline)
    # An identity between empty, zero or infinite arrays would say nothing.
    assert leaves
    assert all(leaf.size and jnp.isfinite(leaf).all() and jnp.any(leaf != 0) for leaf in leaves)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), method, baseline)
