"""Every method at its neutral setting equals its baseline: one row a method.

A row is ``name: function``; the function returns ``(method at the neutral setting, baseline)``, two trees of arrays.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmeth import uncertainty


def rauq():
    """RAUQ with alpha 1 looks at no attention: it is perplexity."""
    keys = jax.random.split(jax.random.key(0), 2)
    logp = jnp.log(jax.random.uniform(keys[0], (5, 8)))
    prev_attn = jax.random.uniform(keys[1], (5, 6, 4, 7))
    gen_len = jnp.asarray([1, 2, 5, 7, 8])
    config = uncertainty.RAUQConfig(alpha=1.0)
    return uncertainty.rauq(logp, prev_attn, gen_len, config=config).score, uncertainty.perplexity(logp, gen_len)


IDENTITIES = {
    "rauq: alpha 1 = perplexity": rauq,
}


@pytest.mark.parametrize("row", IDENTITIES)
def test_neutral_setting_is_the_baseline(row):
    method, baseline = IDENTITIES[row]()
    leaves = jax.tree.leaves(baseline)
    # An identity between empty, zero or infinite arrays would say nothing.
    assert leaves
    assert all(leaf.size and jnp.isfinite(leaf).all() and jnp.any(leaf != 0) for leaf in leaves)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), method, baseline)
