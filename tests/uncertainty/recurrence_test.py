"""The recurrence's numerics: padding that holds NaN, gradients, underflow, floors, low precision."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from jaxmeth.uncertainty import RAUQConfig, rauq
from jaxmeth.uncertainty.recurrence import RECURRENCES, log_mix


def made(seed, rows=4, layers=6, heads=3, tokens=7, floor=1e-3):
    """Random logp [B,N], prev_attn [B,L,H,N-1] in (0, 1) and gen_len in 1..N."""
    rng = np.random.default_rng(seed)
    logp = jnp.asarray(np.log(rng.uniform(floor, 1, (rows, tokens))), jnp.float32)
    prev_attn = jnp.asarray(rng.uniform(0, 1, (rows, layers, heads, tokens - 1)), jnp.float32)
    return logp, prev_attn, jnp.asarray(rng.integers(1, tokens + 1, rows), jnp.int32)


def spoiled(logp, prev_attn, gen_len):
    """NaN past the end of each answer."""
    valid = jnp.arange(logp.shape[1])[None] < gen_len[:, None]
    return jnp.where(valid, logp, jnp.nan), jnp.where(valid[:, None, None, 1:], prev_attn, jnp.nan)


@pytest.mark.parametrize(
    ("recurrence", "token_agg"),
    [(name, "mean") for name in RECURRENCES] + [("full", "median")],
)
def test_nan_past_the_end_changes_nothing(recurrence, token_agg):
    logp, prev_attn, _ = made(3)
    gen_len = jnp.asarray([0, 1, 3, 6], jnp.int32)
    config = RAUQConfig(recurrence=recurrence, token_agg=token_agg)
    plain = rauq(logp, prev_attn, gen_len, config=config)
    dirty = rauq(*spoiled(logp, prev_attn, gen_len), gen_len, config=config)
    jax.tree.map(np.testing.assert_array_equal, plain, dirty)


@pytest.mark.parametrize(
    ("recurrence", "token_agg", "alpha"),
    [("full", "meanlog", alpha) for alpha in (0.0, 0.2, 1.0)]
    + [("full", "median", 0.0), ("ratio", "min", 0.0), ("minus_last5", "mean", 0.0)]
    + [
        pytest.param(name, agg, 0.0, marks=pytest.mark.slow)
        for name in RECURRENCES
        for agg in ("mean", "median", "min", "max")
    ],
)
def test_gradients_are_finite(recurrence, token_agg, alpha):
    """N of 0, 1 and full, NaN in the padding, a probability of 0 in float32, and attention of exactly 0."""
    logp, prev_attn, _ = made(7)
    gen_len = jnp.asarray([0, 1, 5, 7], jnp.int32)
    logp, prev_attn = spoiled(logp.at[2, 2].set(-400.0), prev_attn.at[3].set(0.0), gen_len)
    config = RAUQConfig(alpha=alpha, recurrence=recurrence, token_agg=token_agg)

    def total(logp, prev_attn):
        score = rauq(logp, prev_attn, gen_len, config=config).score
        return jnp.where(gen_len > 0, score, 0).sum()

    value, grads = jax.jit(jax.value_and_grad(total, argnums=(0, 1)))(logp, prev_attn)
    assert jnp.isfinite(value)
    assert all(jnp.isfinite(grad).all() for grad in grads)
    past = jnp.arange(7)[None] >= gen_len[:, None]
    assert (grads[0][past] == 0).all()
    assert (grads[0] != 0).any()


def test_gradient_against_finite_differences(x64):
    logp, prev_attn, _ = (jnp.asarray(x, jnp.float64) for x in made(11))
    gen_len = jnp.asarray([1, 3, 6, 7], jnp.int32)

    # Differences come as numpy arrays.
    @jax.jit
    def total(logp, prev_attn):
        return rauq(logp, prev_attn, gen_len, config=RAUQConfig(layer_agg="mean")).score.sum()

    check_grads(total, (logp, prev_attn), order=1, modes=["rev"])


def test_alpha_zero_does_not_underflow():
    """The product of 299 attentions of 0.1 is 1e-299; its logarithm is nothing special."""
    logp = jnp.full((1, 300), -0.5)
    prev_attn = jnp.full((1, 3, 2, 299), 0.1)
    result = rauq(logp, prev_attn, jnp.asarray([300]), config=RAUQConfig(alpha=0.0))
    expected = 0.5 + math.log(10) * sum(range(300)) / 300
    np.testing.assert_allclose(result.score, [expected], rtol=1e-5)


def test_improbable_tokens_are_not_clipped():
    """exp(-200) is 0 in float32; in the log domain the first token and alpha = 1 keep it."""
    logp = jnp.asarray([[-200.0, -150.0, -300.0]])
    prev_attn = jnp.full((1, 3, 2, 2), 0.5)
    gen_len = jnp.asarray([3])
    exact = rauq(logp, prev_attn, gen_len, config=RAUQConfig(alpha=1.0)).score
    np.testing.assert_allclose(exact, [650 / 3], rtol=1e-6)
    # c = s1, then 0.2 s2 (0.4 s1 is e^-50 of it), then 0.4 of that.
    expected = (200 + (150 - math.log(0.2)) + (150 - math.log(0.2) - math.log(0.4))) / 3
    np.testing.assert_allclose(rauq(logp, prev_attn, gen_len).score, [expected], rtol=1e-6)


def test_a_zero_probability_or_a_nan_is_not_hidden():
    logp, prev_attn, _ = made(19)
    gen_len = jnp.full(4, 7)
    impossible = rauq(logp.at[0, 0].set(-jnp.inf), prev_attn, gen_len, config=RAUQConfig(alpha=1.0)).score
    np.testing.assert_array_equal(np.isposinf(impossible), [True, False, False, False])
    broken = rauq(logp.at[0, 3].set(jnp.nan), prev_attn.at[1, 3, :, 2].set(jnp.nan), gen_len).score
    np.testing.assert_array_equal(np.isnan(broken), [True, True, False, False])


def test_bfloat16_attention_is_raised_to_float32():
    logp, prev_attn, gen_len = made(23)
    low = prev_attn.astype(jnp.bfloat16)
    result = rauq(logp, low, gen_len)
    assert result.score.dtype == jnp.float32
    np.testing.assert_array_equal(result.score, rauq(logp, low.astype(jnp.float32), gen_len).score)


def test_a_certain_distribution_and_a_uniform_one():
    """Entropy above log V by rounding gives the floor of 1e-10, not the log of a negative number."""
    logp, prev_attn, _ = made(29, tokens=1)
    most = math.log(50)
    entropy = jnp.asarray([[0.0], [1.0], [most + 1e-6], [most + 1e-6]])
    config = RAUQConfig(signal="entropy")
    score = rauq(logp, prev_attn, jnp.ones(4, jnp.int32), entropy=entropy, vocab_size=50, config=config).score
    expected = [-math.log(most), -math.log(most - 1), -math.log(1e-10), -math.log(1e-10)]
    np.testing.assert_allclose(score, expected, rtol=1e-5)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_log_mix_is_the_logarithm_of_the_mixture(x64, alpha):
    rng = np.random.default_rng(41)
    s, prev, a = rng.uniform(0.01, 1, (3, 50))
    found = log_mix(jnp.log(s), jnp.log(prev), jnp.asarray(a), alpha)
    np.testing.assert_allclose(found, np.log(alpha * s + (1 - alpha) * a * prev), rtol=1e-12, atol=1e-14)


def test_log_mix_at_the_edge_of_float32():
    """No attention and an impossible token after a certain one: the floor, 87 nats down, and never NaN."""
    lowest = log_mix(jnp.float32(-jnp.inf), jnp.float32(0), jnp.float32(0), 0.2)
    np.testing.assert_allclose(lowest, math.log(0.8) + math.log(np.finfo(np.float32).tiny), rtol=1e-6)
    kept = log_mix(jnp.float32(-500), jnp.float32(-600), jnp.float32(0.5), 0.2)
    np.testing.assert_allclose(kept, math.log(0.2) - 500, rtol=1e-6)
    assert log_mix(jnp.float32(-jnp.inf), jnp.float32(-jnp.inf), jnp.float32(1), 0.2) < -1e38
