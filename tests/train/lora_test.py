"""Low-rank adapted weights and the split into trained and frozen leaves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small

from jaxmeth import models, train
from jaxmeth.models.layers import linear
from jaxmeth.types import ConfigError, LinearWeight

TARGETS = ("attn.q", "mlp.down")


def test_the_product_is_that_of_the_merged_weight():
    key = jax.random.split(jax.random.key(0), 4)
    w, a, b, x = (jax.random.normal(k, s) for k, s in zip(key, [(5, 7), (2, 7), (5, 2), (3, 7)], strict=True))
    leaf = train.LoRA(w, a, b, 0.5)
    assert isinstance(leaf, LinearWeight)
    np.testing.assert_allclose(linear(x, leaf), x @ (w + 0.5 * b @ a).T, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        train.LoRA(leaf, a, -b, 0.5).matmul(x), x @ w.T, rtol=1e-5, atol=1e-5, err_msg="a LoRA on a LoRA"
    )


def test_a_fresh_adapter_changes_nothing_and_merging_a_trained_one_neither():
    params, (tokens, mask) = small.params(), small.prompts()
    adapted = train.lora_init(params, jax.random.key(1), rank=2, targets=TARGETS)
    before = models.apply(params, small.CFG, tokens, mask=mask).logits
    np.testing.assert_array_equal(models.apply(adapted, small.CFG, tokens, mask=mask).logits, before)
    moved = jax.tree.map(lambda x: x + 0.05, adapted)
    merged = train.lora_merge(moved)
    assert jax.tree.structure(merged) == jax.tree.structure(params)
    found = models.apply(moved, small.CFG, tokens, mask=mask).logits
    assert np.abs(found - before).max() > 1e-3
    np.testing.assert_allclose(found, models.apply(merged, small.CFG, tokens, mask=mask).logits, atol=1e-5)


def test_split_and_join():
    adapted = train.lora_init(small.params(), jax.random.key(1), rank=2, targets=TARGETS)
    trained, frozen = train.split(adapted, train.is_lora)
    assert len(jax.tree.leaves(trained)) == 4
    assert len(jax.tree.leaves(trained)) + len(jax.tree.leaves(frozen)) == len(jax.tree.leaves(adapted))
    whole = train.join(trained, frozen)
    assert jax.tree.structure(whole) == jax.tree.structure(adapted)
    jax.tree.map(np.testing.assert_array_equal, whole, adapted)
    assert train.join(trained, None) is trained


def test_refused():
    params, keys = small.params(), (jax.random.key(i) for i in range(9))
    with pytest.raises(ConfigError, match=r"targets: found 'attn.x', expected some of attn.k, attn.o, .*mlp.up"):
        train.lora_init(params, next(keys), targets=("attn.x",))
    with pytest.raises(ConfigError, match="targets: found 'attn', expected"):
        train.lora_init(params, next(keys), targets=("attn",))
    with pytest.raises(ConfigError, match="rank: found 0"):
        train.lora_init(params, next(keys), rank=0)
    adapted = train.lora_init(params, next(keys))
    with pytest.raises(ConfigError, match=r"targets: found a LoRA at 'attn.q', expected a plain weight"):
        train.lora_init(adapted, next(keys))
    with pytest.raises(ConfigError, match="trained: found no leaf"):
        train.split(params, train.is_lora)
    nested = train.LoRA(adapted["layers"]["attn"]["q"]["weight"], jnp.ones((2, 3)), jnp.ones((3, 2)), 1.0)
    with pytest.raises(ConfigError, match="lora_merge: found a base of type LoRA"):
        train.lora_merge({"x": nested})
