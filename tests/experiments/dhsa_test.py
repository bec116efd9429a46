"""The DHSA experiment: its rules on a tiny model, and the paper's shapes."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import core, dhsa, dhsa_rules, dhsa_text
from jaxmeth import models
from jaxmeth.attention import dhsa as library


def tensors(length=512):
    keys = jax.random.split(jax.random.key(0), 2)
    return jax.random.normal(keys[0], (1, 4, length, 8)), jax.random.normal(keys[1], (1, 2, length, 8))


def test_block_mass_is_attention_by_hand():
    q, k = tensors(256)
    mass, mean = dhsa_rules.block_mass(q[0], k[0], 0.4)
    scores = 0.4 * np.einsum("htd,hsd->hts", q[0], np.repeat(k[0], 2, axis=0))
    p = np.where(np.tril(np.ones((256, 256), bool)), np.exp(scores), 0)
    p /= p.sum(-1, keepdims=True)
    np.testing.assert_allclose(mean, p.mean(0), atol=1e-6)
    np.testing.assert_allclose(mass, p.reshape(4, 2, 128, 4, 64).sum((2, 4)) / 128, atol=1e-6)
    np.testing.assert_allclose(mass.sum(-1), 1, atol=1e-5)


@pytest.mark.parametrize("name", [n for n in dhsa_rules.RULES if n != "predicted"])
def test_every_rule_keeps_the_budget_and_its_own_block(name):
    q, k = tensors()
    idx, count = (np.asarray(x) for x in dhsa_rules.lists(name, 0.5, q, k, None, jnp.int32(0), 0.4))
    mask = np.asarray(library.dense_from_blocks(library.BlockList(jnp.asarray(idx), jnp.asarray(count)), 8))
    last = mask[0, :, 3]
    if name in ("vs", "vsb"):
        assert last.all()
    else:
        assert (last.sum(-1) == 4).all()
    if name != "topk" and name != "oracle":
        assert mask[:, :, :, 0].all()
        assert all(mask[0, :, i, 2 * i + 1].all() for i in range(4))


def test_the_default_rule_is_the_librarys_prefill():
    """Same lists, and the last queries dense."""
    q, k = tensors()
    v = jax.random.normal(jax.random.key(2), k.shape)
    ctx = SimpleNamespace(layer=jnp.int32(0), scale=q.shape[-1] ** -0.5)
    found, _ = dhsa_rules.attend("fixed", 0.5)(q, k, v, ctx, None)
    expected, _ = library.prefill(q, k, v, library.DHSAConfig(density=0.5))
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("budget", [2, 3])
def test_random_lists_hold_their_own_blocks_first(budget):
    q, k = tensors()
    chosen = dhsa_rules.lists("random", budget / 8, q, k, None, jnp.int32(0), 0.4)
    mask = np.asarray(library.dense_from_blocks(chosen, 8))[0, :, 1:]
    assert all(mask[:, i - 1, 2 * i : 2 * i + 2].all() for i in (1, 2, 3))
    assert mask[..., 0].all() == (budget == 3)


def test_the_oracle_covers_the_most_mass():
    q, k = tensors()
    mass, _ = dhsa_rules.block_mass(q[0], k[0], 0.4)
    covered = {}
    for name in ("oracle", "fixed", "sink+window", "random", "ashape"):
        chosen = dhsa_rules.lists(name, 0.25, q, k, None, jnp.int32(0), 0.4)
        mask = jnp.repeat(library.dense_from_blocks(chosen, 8)[0], 2, axis=0)
        # The last row holds two blocks under every rule, but for forced ones beyond the budget.
        covered[name] = float(jnp.where(mask, mass, 0)[:, 3].sum()) / float(mask[:, 3].sum())
    assert covered["oracle"] == max(covered.values())


def test_the_taps_in_a_decoder():
    cfg = models.DecoderConfig("llama", 64, 32, 2, 4, 2, 8, 48, 256)
    params = models.init(cfg, jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (1, 256), 0, 64)
    names = ("sink+window", "fixed", "oracle")
    tap = dhsa_rules.recall_tap(names, (0.5, 1.0), None)
    out = models.apply(params, cfg, tokens, attend=tap, state=jnp.zeros((2, 2, 3)))
    dense = models.apply(params, cfg, tokens)
    np.testing.assert_array_equal(out.logits, dense.logits)
    np.testing.assert_allclose(out.state[:, 1], 1, atol=1e-5)
    assert (np.asarray(out.state[:, 0]) < 1).all()
    full = models.apply(params, cfg, tokens, attend=dhsa_rules.attend("fixed", 1.0))
    np.testing.assert_allclose(full.logits, dense.logits, atol=1e-5)
    sizes = dhsa_rules.size_tap(names, (0.5, 1.0), None)
    kept = models.apply(params, cfg, tokens, attend=sizes, state=jnp.zeros((2, 2, 3))).state
    # Two blocks in the first row; in the second the budget, or three that chunks force.
    np.testing.assert_array_equal(kept[0], [[2, 2.5, 2], [3, 3, 3]])
    state = (jnp.zeros((2, 256, 16)), jnp.zeros((2, 256)))
    keys, ratio = models.apply(params, cfg, tokens, attend=dhsa_rules.label_tap(), state=state).state
    assert keys.shape == (2, 256, 16)
    assert (np.asarray(ratio[:, 7:248]) >= 1).all()


def test_what_does_not_fit_is_refused_before_anything_is_computed(tmp_path):
    for options, named in (
        ({"lengths": (9000,)}, "lengths: found 9000 tokens, expected at most 8192"),
        ({"needle_length": 8190}, "needle_length: found 8198 tokens with the answer, expected at most 8192"),
        ({"text": tmp_path / "none.txt"}, r"text: cannot read .*none\.txt"),
    ):
        with pytest.raises(core.ConfigError, match=named):
            dhsa.run(dhsa.Config(**options))
    with pytest.raises(core.ConfigError, match="lengths, densities: found none"):
        dhsa.Config(lengths=())


def test_needles_need_text():
    words = SimpleNamespace(encode=lambda text: SimpleNamespace(ids=[1] * len(text.split())))
    prompts, answers = dhsa_text.needles(dhsa.Config(needle_length=256, needles=2), words, np.arange(300))
    assert prompts.shape == (10, 256)
    assert len(set(answers)) == 10
    with pytest.raises(core.ConfigError, match="text: found 99 tokens, expected more than"):
        dhsa_text.needles(dhsa.Config(needle_length=256), words, np.arange(99))


def test_the_paper_preset_checks_shapes():
    result = dhsa.run(dhsa.PRESETS["paper"])
    assert {"vs: lists", "chunk: output"} <= {r["array"] for r in result.rows}
    assert not list(result.claims)
