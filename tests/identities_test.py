"""Every method at its neutral setting equals its baseline: one row a method.

A row is ``name: function``; the function returns ``(method at the neutral setting, baseline)``, two trees of arrays.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmeth import risk, scaling, uncertainty


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


IDENTITIES = {
    "rauq: alpha 1 = perplexity": rauq,
    "budget: no lower schedule = upper rule": budget,
    "judge: equal weights = simulated annotators": judge,
    "shannon: no growing noise, low SNR = a power law": shannon,
}


@pytest.mark.parametrize("row", IDENTITIES)
def test_neutral_setting_is_the_baseline(row):
    method, baseline = IDENTITIES[row]()
    leaves = jax.tree.leaves(baseline)
    # An identity between empty, zero or infinite arrays would say nothing.
    assert leaves
    assert all(leaf.size and jnp.isfinite(leaf).all() and jnp.any(leaf != 0) for leaf in leaves)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), method, baseline)
