"""RAUQ token by token: equal to the batch form, inside a compiled loop, and its refusals."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmeth import uncertainty
from jaxmeth.types import ConfigError
from jaxmeth.uncertainty import RAUQConfig


def made(seed, rows=5, layers=6, heads=3, tokens=9):
    rng = np.random.default_rng(seed)
    logp = jnp.asarray(np.log(rng.uniform(1e-3, 1, (rows, tokens))))
    entropy = jnp.asarray(rng.uniform(0, 3, (rows, tokens)))
    prev_attn = jnp.asarray(rng.uniform(0, 1, (rows, layers, heads, tokens - 1)))
    return logp, entropy, prev_attn, jnp.asarray([0, 1, 2, 6, 9], jnp.int32)


@partial(jax.jit, static_argnames="config")
def stream(logp, entropy, prev_attn, gen_len, config):
    """The batch fed one token at a time by one scan; the slice of the first token is NaN."""
    layers, heads = prev_attn.shape[1:3]
    step = jax.vmap(partial(uncertainty.rauq_step, vocab_size=50, config=config))
    slices = jnp.concatenate([jnp.full_like(prev_attn[..., :1], jnp.nan), prev_attn], axis=-1)
    state = uncertainty.rauq_init(layers, heads, logp.dtype)
    state = jax.tree.map(lambda x: jnp.broadcast_to(x, (logp.shape[0], *x.shape)), state)

    def body(state, i):
        return step(state, logp[:, i], slices[..., i], i < gen_len, entropy_t=entropy[:, i]), None

    return jax.lax.scan(body, state, jnp.arange(logp.shape[1]))[0]


@pytest.mark.parametrize(
    ("signal", "alpha", "token_agg", "layer_agg"),
    [
        ("prob", 0.2, "meanlog", "max"),
        ("prob", 0.2, "sumlog", "mean"),
        ("prob", 0.2, "mean", "median"),
        ("prob", 0.0, "meanlog", "max"),
        ("prob", 1.0, "meanlog", "max"),
        ("entropy", 0.9, "meanlog", "max"),
        ("entropy", 0.9, "mean", "max"),
    ],
)
def test_online_equals_batch(x64, signal, alpha, token_agg, layer_agg):
    logp, entropy, prev_attn, gen_len = made(1)
    config = RAUQConfig(alpha=alpha, signal=signal, token_agg=token_agg, layer_agg=layer_agg, offset=1.0)
    state = stream(logp, entropy, prev_attn, gen_len, config)
    batch = uncertainty.rauq(logp, prev_attn, gen_len, entropy=entropy, vocab_size=50, config=config)
    online = jax.vmap(partial(uncertainty.rauq_finalize, config=config))(state)
    np.testing.assert_allclose(online.score, batch.score, rtol=1e-10)
    np.testing.assert_allclose(online.layer_scores, batch.layer_scores, rtol=1e-10)
    np.testing.assert_array_equal(online.heads, batch.heads)
    assert online.confidence is None
    assert np.isposinf(online.score[0])


def test_online_equals_batch_in_float32_over_chosen_layers():
    logp, entropy, prev_attn, gen_len = (x.astype(jnp.float32) if x.dtype != jnp.int32 else x for x in made(2))
    state = stream(logp, entropy, prev_attn, gen_len, RAUQConfig())
    assert state.log_c.dtype == jnp.float32
    online = jax.vmap(partial(uncertainty.rauq_finalize, layers=(0, 5)))(state)
    batch = uncertainty.rauq(logp, prev_attn, gen_len, layers=(0, 5))
    np.testing.assert_allclose(online.score, batch.score, rtol=1e-6)
    np.testing.assert_array_equal(online.heads, batch.heads)


def test_an_inactive_step_changes_nothing_and_may_hold_nan():
    state = uncertainty.rauq_init(3, 2)
    state = uncertainty.rauq_step(state, jnp.asarray(-0.3), jnp.full((3, 2), 0.4), jnp.asarray(True))
    after = uncertainty.rauq_step(state, jnp.asarray(jnp.nan), jnp.full((3, 2), jnp.nan), jnp.asarray(False))
    jax.tree.map(np.testing.assert_array_equal, state, after)
    assert int(state.n) == 1


def test_a_fresh_state_scores_as_empty():
    assert np.isposinf(uncertainty.rauq_finalize(uncertainty.rauq_init(3, 2)).score)
    assert np.isnan(
        uncertainty.rauq_finalize(uncertainty.rauq_init(3, 2), config=RAUQConfig(empty_score=float("nan"))).score
    )


def test_a_score_at_every_token():
    """``finalize`` may be called at any time: it is the batch score of the answer so far."""
    logp, entropy, prev_attn, _ = (x.astype(jnp.float32) for x in made(3))
    for n in (1, 4, 9):
        gen_len = jnp.full(5, n, jnp.int32)
        online = jax.vmap(uncertainty.rauq_finalize)(stream(logp, entropy, prev_attn, gen_len, RAUQConfig()))
        np.testing.assert_allclose(online.score, uncertainty.rauq(logp, prev_attn, gen_len).score, rtol=1e-5)


def test_gradient_is_finite():
    logp, entropy, prev_attn, gen_len = (x.astype(jnp.float32) if x.dtype != jnp.int32 else x for x in made(4))

    def total(logp):
        score = jax.vmap(uncertainty.rauq_finalize)(stream(logp, entropy, prev_attn, gen_len, RAUQConfig())).score
        return jnp.where(gen_len > 0, score, 0).sum()

    grad = jax.grad(total)(logp)
    assert jnp.isfinite(grad).all()
    assert (grad[4] != 0).all()


def test_a_step_is_a_handful_of_operations_on_the_state():
    """No work grows with anything but L*H, and no loop or sort hides inside."""
    state = uncertainty.rauq_init(30, 9)
    jaxpr = jax.make_jaxpr(uncertainty.rauq_step)(
        state, jnp.asarray(-0.3), jnp.full((30, 9), 0.4), jnp.asarray(True)
    ).jaxpr
    names = {eqn.primitive.name for eqn in jaxpr.eqns}
    assert not names & {"scan", "while", "sort", "dot_general", "gather"}
    assert max(var.aval.size for eqn in jaxpr.eqns for var in eqn.outvars) == 270
    assert len(jaxpr.eqns) < 60


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (RAUQConfig(token_agg="median"), "token_agg: found 'median'"),
        (RAUQConfig(token_agg="max"), "token_agg: found 'max'"),
        (RAUQConfig(recurrence="product"), "recurrence: found 'product'"),
        (RAUQConfig(recurrence="ratio"), "recurrence: found 'ratio'"),
    ],
)
def test_refusals(config, field):
    state = uncertainty.rauq_init(3, 2)
    with pytest.raises(ConfigError, match=field):
        uncertainty.rauq_step(state, jnp.asarray(-0.3), jnp.full((3, 2), 0.4), jnp.asarray(True), config=config)
    with pytest.raises(ConfigError, match=field):
        uncertainty.rauq_finalize(state, config=config)


def test_arguments_that_do_not_fit():
    state = uncertainty.rauq_init(3, 2)
    with pytest.raises(ConfigError, match="entropy, vocab_size: found None"):
        uncertainty.rauq_step(
            state,
            jnp.asarray(-0.3),
            jnp.full((3, 2), 0.4),
            jnp.asarray(True),
            config=RAUQConfig(signal="entropy"),
        )
    with pytest.raises(ConfigError, match=r"prev_attn_t: found shape \(2, 3\), expected \(3, 2\)"):
        uncertainty.rauq_step(state, jnp.asarray(-0.3), jnp.full((2, 3), 0.4), jnp.asarray(True))
    with pytest.raises(ConfigError, match="layers"):
        uncertainty.rauq_finalize(state, layers=(3,))
