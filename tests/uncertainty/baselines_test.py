"""The baselines: stored values of the public code, definitions by loop, empty answers, NaN past the end."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmeth import uncertainty
from jaxmeth.types import ConfigError

STORED = Path(__file__).parents[1] / "golden" / "12-rauq"
LENGTHS = (0, 1, 4, 6)


@pytest.fixture
def rows():
    rng = np.random.default_rng(1)
    logp = jnp.asarray(np.log(rng.uniform(0.01, 1, (4, 6))), jnp.float32)
    return logp, jnp.asarray(rng.uniform(size=(4, 6, 6)), jnp.float32), jnp.asarray(LENGTHS, jnp.int32)


def dirty(x, gen_len, axis=1):
    """NaN past the end along an axis."""
    index = np.arange(x.shape[axis]).reshape([-1 if a == axis else 1 for a in range(x.ndim)])
    return jnp.asarray(np.where(index < np.asarray(gen_len).reshape([-1] + [1] * (x.ndim - 1)), x, np.float32(np.nan)))


def test_stored_synthetic(x64):
    with np.load(STORED / "synthetic.npz") as g:
        logp, gen_len = jnp.asarray(g["token_logp"]), jnp.asarray(g["gen_len"])
        np.testing.assert_allclose(uncertainty.perplexity(logp, gen_len), g["perplexity"], rtol=0, atol=1e-6)
        np.testing.assert_allclose(uncertainty.msp(logp, gen_len), g["msp_neg_logprob"], rtol=0, atol=1e-6)


def test_stored_answers():
    with np.load(STORED / "smollm2_answers.npz") as s:
        logp, entropy = jnp.asarray(s["token_logp"]), jnp.asarray(s["token_entropy"])
        gen_len = jnp.asarray(s["gen_len"], jnp.int32)
        np.testing.assert_allclose(uncertainty.perplexity(logp, gen_len), s["perplexity"], rtol=0, atol=1e-4)
        np.testing.assert_allclose(uncertainty.msp(logp, gen_len), s["msp"], rtol=0, atol=1e-4)
        found = uncertainty.mean_token_entropy(entropy, gen_len)
        np.testing.assert_allclose(found, s["mean_entropy"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("score", ["perplexity", "msp", "mean_token_entropy"])
def test_sums_padding_empties_and_gradients(rows, score):
    logp, _, gen_len = rows
    function = getattr(uncertainty, score)
    x = -logp if score == "mean_token_entropy" else logp
    found = function(dirty(x, gen_len), gen_len)
    sums = [abs(np.asarray(x[b], np.float64))[:n].sum() for b, n in enumerate(LENGTHS)]
    expected = np.divide(sums, 1 if score == "msp" else np.maximum(LENGTHS, 1))
    np.testing.assert_allclose(found[1:], expected[1:], rtol=1e-6)
    assert np.isposinf(found[0])
    assert np.isnan(function(x, gen_len, empty_score=float("nan"))[0])
    grad = jax.grad(lambda x: function(x, gen_len)[1:].sum())(dirty(x, gen_len))
    assert jnp.isfinite(grad).all()
    assert function(x.astype(jnp.bfloat16), gen_len).dtype == jnp.float32
    assert np.isposinf(function(x[:, :0], gen_len * 0)).all()


def test_attention_score(rows):
    diag = jax.random.uniform(jax.random.key(2), (4, 3, 6))
    mask = jnp.arange(6)[None] < rows[2][:, None]
    found = uncertainty.attention_score(jnp.where(mask[:, None], diag, jnp.nan), mask)
    for b, n in enumerate(LENGTHS[1:], 1):
        expected = -np.log(np.asarray(diag[b, :, :n], np.float64) + 1e-12).sum(-1).mean()
        np.testing.assert_allclose(found[b], expected, rtol=1e-6)
    assert np.isposinf(found[0])
    zero = uncertainty.attention_score(jnp.zeros((1, 2, 3)), jnp.ones((1, 3), bool))
    np.testing.assert_allclose(zero, [-3 * np.log(1e-12)], rtol=1e-6)
    grad = jax.grad(lambda d: uncertainty.attention_score(d, mask)[1:].sum())(jnp.where(mask[:, None], diag, jnp.nan))
    assert jnp.isfinite(grad).all()


def test_attention_score_grows_with_the_text():
    diag = jax.random.uniform(jax.random.key(3), (1, 3, 8))
    scores = [uncertainty.attention_score(diag, (jnp.arange(8) < n)[None])[0] for n in range(1, 9)]
    assert (np.diff(scores) > 0).all()


def focus_by_loop(logp, attn, n, gamma):
    r = np.zeros(n)
    for i in range(n):
        w = attn[i, :i] / (attn[i, :i].sum() + 1e-6)
        r[i] = -logp[i] + gamma * (w * r[:i]).sum()
    return r.mean()


@pytest.mark.parametrize("gamma", [0.0, 0.5, 0.9])
def test_simple_focus(rows, gamma):
    logp, attn, gen_len = rows
    attn = dirty(dirty(attn, gen_len, 1), gen_len, 2)
    found = uncertainty.simple_focus(dirty(logp, gen_len), attn, gen_len, gamma=gamma)
    for b, n in enumerate(LENGTHS[1:], 1):
        expected = focus_by_loop(np.asarray(logp[b], np.float64), np.asarray(rows[1][b], np.float64), n, gamma)
        np.testing.assert_allclose(found[b], expected, rtol=1e-5)
    assert np.isposinf(found[0])
    grads = jax.grad(lambda p, a: uncertainty.simple_focus(p, a, gen_len)[1:].sum(), (0, 1))(dirty(logp, gen_len), attn)
    assert all(jnp.isfinite(grad).all() for grad in grads)


def test_simple_focus_reads_only_the_earlier_keys(rows):
    logp, attn, gen_len = rows
    upper = jnp.triu(jnp.full((6, 6), 5.0))[None]
    np.testing.assert_array_equal(
        uncertainty.simple_focus(logp, attn, gen_len), uncertainty.simple_focus(logp, attn + upper, gen_len)
    )


def test_refusals(rows):
    logp, attn, gen_len = rows
    with pytest.raises(ConfigError, match="gen_len: found 7"):
        uncertainty.perplexity(logp, gen_len.at[0].set(7))
    with pytest.raises(ConfigError, match=r"gamma: found 1\.5"):
        uncertainty.simple_focus(logp, attn, gen_len, gamma=1.5)
    with pytest.raises(ConfigError, match="answer_attn: found shape"):
        uncertainty.simple_focus(logp, attn[:, :5, :5], gen_len)


def test_jit_and_vmap_equal_eager(rows):
    logp, attn, gen_len = rows
    for function, args in (
        (uncertainty.perplexity, (logp, gen_len)),
        (uncertainty.msp, (logp, gen_len)),
        (uncertainty.simple_focus, (logp, attn, gen_len)),
    ):
        plain = function(*args)
        np.testing.assert_allclose(jax.jit(function)(*args), plain, rtol=1e-6)
        np.testing.assert_allclose(jax.vmap(function)(*[x[:, None] for x in args])[:, 0], plain, rtol=1e-6)
