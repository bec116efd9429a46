"""Slices of attention: read from full maps, and emitted by a wrapped attend without any map."""

from functools import partial

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmeth import models, uncertainty
from jaxmeth.attention import dense
from jaxmeth.types import AttendContext, ConfigError


@jax.jit
def softmax(q, k, ctx):
    """Every weight [B,H,T,S], the obvious way; zeros in a row that is fully masked."""
    k = jnp.repeat(k, q.shape[1] // k.shape[1], axis=1)
    logits = jnp.einsum("bhtd,bhsd->bhts", q, k, preferred_element_type=jnp.float32) * ctx.scale
    if ctx.softcap is not None:
        logits = ctx.softcap * jnp.tanh(logits / ctx.softcap)
    mask = ctx.mask()
    weights = jax.nn.softmax(jnp.where(mask, logits, -1e30), axis=-1)
    return jnp.where(mask, weights, 0)


def cheap(q, k, v, ctx, state):
    """An attend that makes no T x S array, so that what remains is the tap's."""
    return q * v.mean((1, 2), keepdims=True), state


def context(T, S, start, *, B=2, window=None, softcap=None, causal=True, pad=(0, 3), scale=0.3):
    """T queries at slots start.., S slots of which start + T are written, the first ``pad`` of a row left padding."""
    slots = np.arange(S)
    valid = (slots[None] >= np.asarray(pad)[:B, None]) & (slots[None] < start + T)
    pos = np.maximum(np.cumsum(valid, axis=1) - 1, 0)
    return AttendContext(
        q_pos=jnp.asarray(pos[:, start : start + T]),
        kv_pos=jnp.asarray(pos),
        q_slot=jnp.asarray(start + np.arange(T)),
        kv_valid=jnp.asarray(valid),
        layer=jnp.asarray(0),
        window=jnp.asarray(S if window is None else window),
        scale=scale,
        softcap=softcap,
        causal=causal,
    )


def tensors(seed, T, S, *, B=2, H=4, Hkv=2, D=8, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    shapes = (B, H, T, D), (B, Hkv, S, D), (B, Hkv, S, D)
    return [jnp.asarray(2 * rng.normal(size=shape), dtype) for shape in shapes]


# --- full maps -------------------------------------------------------------------------------------------------------


@pytest.fixture
def g(golden):
    with np.load(golden / "12-rauq" / "synthetic.npz") as stored:
        return dict(stored)


@pytest.fixture
def lengths(g):
    return jnp.asarray(g["prompt_len"], jnp.int32), jnp.asarray(g["gen_len"], jnp.int32)


def test_the_main_diagonal_of_the_generating_query(g, lengths):
    found = uncertainty.previous_token_attention(jnp.asarray(g["attn"]), *lengths, 12)
    np.testing.assert_allclose(found, g["prev_attn"], atol=1e-7)


def test_the_subdiagonal_of_the_next_query(g, lengths):
    prompt_len, gen_len = lengths[0] - 1, lengths[1]
    found = uncertainty.previous_token_attention(jnp.asarray(g["attn"]), prompt_len, gen_len, 12, "next_query")
    for b in range(5):
        for i in range(1, 12):
            q = int(prompt_len[b]) + i
            expected = g["attn"][b, :, :, q, q - 1] if i < int(gen_len[b]) else 0
            np.testing.assert_array_equal(found[b, :, :, i - 1], expected)


def test_past_the_end_is_zero_even_where_the_map_holds_nan(g, lengths):
    attn = jnp.asarray(g["attn"])
    end = (lengths[0] + lengths[1] - 1)[:, None, None, None, None]
    dirty = jnp.where(jnp.arange(16)[None, None, None, :, None] < end, attn, jnp.nan)
    found = uncertainty.previous_token_attention(dirty, *lengths, 12)
    np.testing.assert_allclose(found, g["prev_attn"], atol=1e-7)
    grad = jax.grad(lambda attn: uncertainty.previous_token_attention(attn, *lengths, 12).sum())(dirty)
    assert set(np.unique(grad)) == {0.0, 1.0}


def test_maps_that_are_too_short(g, lengths):
    attn = jnp.asarray(g["attn"])
    uncertainty.previous_token_attention(attn[..., :15, :15], *lengths, 12)
    with pytest.raises(ConfigError, match="attn: found T = 14, expected at least 15"):
        uncertainty.previous_token_attention(attn[..., :14, :14], *lengths, 12)
    with pytest.raises(ConfigError, match="attn: found T = 15, expected at least 16"):
        uncertainty.previous_token_attention(attn[..., :15, :15], *lengths, 12, "next_query")
    under_jit = jax.jit(partial(uncertainty.previous_token_attention, max_gen=12))(attn[..., :14, :14], *lengths)
    assert np.isnan(under_jit).any()
    with pytest.raises(ConfigError, match="reading: found 'diagonal'"):
        uncertainty.previous_token_attention(attn, *lengths, 12, "diagonal")
    with pytest.raises(ConfigError, match="gen_len: found 12, expected values in"):
        uncertainty.previous_token_attention(attn, *lengths, 11)
    assert uncertainty.previous_token_attention(attn, lengths[0], lengths[1] * 0, 0).shape == (5, 6, 4, 0)


# --- token signals ---------------------------------------------------------------------------------------------------


def test_token_signals():
    logits = 3 * jax.random.normal(jax.random.key(0), (2, 5, 17))
    tokens = jnp.asarray([[0, 3, 16, 2, 9], [4, 4, 1, -1, -1]])
    logp, entropy = uncertainty.token_signals(logits, tokens)
    p = np.asarray(jax.nn.softmax(logits), np.float64)
    expected = np.log(np.take_along_axis(p, np.asarray(tokens)[..., None], -1)[..., 0])
    np.testing.assert_allclose(logp, np.where(np.asarray(tokens) < 0, 0, expected), rtol=1e-5)
    np.testing.assert_allclose(entropy, -(p * np.log(p)).sum(-1), rtol=1e-5)


def test_token_signals_of_masked_logits_and_low_precision():
    logits = jnp.asarray([[[0.0, -jnp.inf, 0.0, -jnp.inf]]])
    tokens = jnp.asarray([[2]])
    logp, entropy = uncertainty.token_signals(logits, tokens)
    np.testing.assert_allclose([logp[0, 0], entropy[0, 0]], [-np.log(2), np.log(2)], rtol=1e-6)
    grads = jax.grad(lambda x: sum(s.sum() for s in uncertainty.token_signals(x, tokens)))(logits)
    assert jnp.isfinite(grads).all()
    low = uncertainty.token_signals(jnp.ones((1, 1, 4), jnp.bfloat16), tokens)
    assert all(x.dtype == jnp.float32 for x in low)
    huge = uncertainty.token_signals(jnp.asarray([[[1e30, -1e30, 0.0, 0.0]]]), tokens)
    assert np.isfinite(huge).all()


def test_a_token_outside_the_vocabulary():
    logits = jnp.zeros((1, 1, 4))
    with pytest.raises(ConfigError, match="tokens: found 4, expected below the vocabulary of 4"):
        uncertainty.token_signals(logits, jnp.asarray([[4]]))
    logp, _ = jax.jit(uncertainty.token_signals)(logits, jnp.asarray([[4]]))
    assert np.isnan(logp).all()


# --- taps ------------------------------------------------------------------------------------------------------------

CASES = {
    "decode": (1, 12, 7, {}),
    "prefill": (6, 6, 0, {"pad": (0, 2)}),
    "chunk": (3, 12, 5, {}),
    "window": (1, 12, 9, {"window": 4}),
    "softcap": (1, 12, 7, {"softcap": 2.0}),
    "window and softcap": (4, 16, 8, {"window": 3, "softcap": 5.0}),
    "two-sided": (6, 6, 0, {"causal": False, "window": 3, "pad": (0, 1)}),
}


@pytest.mark.parametrize(
    ("case", "H", "Hkv"), [(case, 4, 2) for case in CASES] + [("decode", 4, 4), ("window and softcap", 6, 1)]
)
def test_the_tap_reads_what_dense_attention_computes(case, H, Hkv):
    T, S, start, options = CASES[case]
    ctx = context(T, S, start, **options)
    q, k, v = tensors(1, T, S, H=H, Hkv=Hkv)

    @jax.jit
    def tapped(q, k, v, ctx):
        out, (inner, seen) = uncertainty.rauq_tap(dense)(q, k, v, ctx, ({"n": jnp.asarray(3)}, jnp.zeros((2, H))))
        _, (_, row) = uncertainty.answer_attention_tap(dense)(q, k, v, ctx, (None, jnp.zeros((2, S))))
        return out, inner, seen, row, dense(q, k, v, ctx, None)[0], softmax(q, k, ctx)[:, :, -1]

    out, inner, seen, row, plain, expected = tapped(q, k, v, ctx)
    np.testing.assert_array_equal(out, plain)
    assert int(inner["n"]) == 3
    assert seen.dtype == row.dtype == jnp.float32
    np.testing.assert_allclose(seen, expected[..., start + T - 1], rtol=1e-5)
    np.testing.assert_allclose(row, expected.max(1), rtol=1e-5)


def test_a_fully_masked_row_is_zero():
    """A row that is all padding attends to nothing; so does its gradient."""
    ctx = context(1, 8, 4, pad=(0, 8))
    q, k, v = tensors(2, 1, 8)

    @jax.jit
    def seen(q, k):
        both = uncertainty.answer_attention_tap(uncertainty.rauq_tap(dense))
        state = ((None, jnp.zeros((2, 4))), jnp.zeros((2, 8)))
        (_, own), row = both(q, k, v, ctx, state)[1]
        return own, row

    own, row = seen(q, k)
    assert (own[0] > 0).all()
    assert (own[1] == 0).all()
    assert (row[1] == 0).all()
    grads = jax.grad(lambda q, k: sum(x.sum() for x in seen(q, k)), argnums=(0, 1))(q, k)
    assert all(jnp.isfinite(grad).all() for grad in grads)


@jax.jit
def own_weight(q, k, v, ctx):
    return uncertainty.rauq_tap(cheap)(q, k, v, ctx, (None, jnp.zeros((2, 4))))[1][1]


def test_bfloat16_is_summed_in_float32():
    # A scale that is a power of two: dense attention, which the tap follows, applies it in the type of q.
    ctx = context(1, 64, 60, scale=0.25)
    q, k, v = tensors(3, 1, 64, dtype=jnp.bfloat16)
    seen = own_weight(q, k, v, ctx)
    assert seen.dtype == jnp.float32
    exact = softmax(q.astype(jnp.float32), k.astype(jnp.float32), ctx)[:, :, -1, 60]
    np.testing.assert_allclose(seen, exact, rtol=1e-4)


def test_large_logits_do_not_overflow():
    ctx = context(1, 8, 5, scale=1.0)
    q, k, v = tensors(4, 1, 8)
    seen = own_weight(100 * q, 100 * k, v, ctx)
    assert jnp.isfinite(seen).all()


def test_wrapping_twice_gives_the_same_object():
    assert uncertainty.rauq_tap(dense) is uncertainty.rauq_tap(dense)
    assert uncertainty.rauq_tap(dense) is not uncertainty.rauq_tap(cheap)
    assert uncertainty.answer_attention_tap(dense) is uncertainty.answer_attention_tap(dense)


@pytest.mark.parametrize("tap", ["rauq_tap", "answer_attention_tap"])
def test_no_array_of_queries_by_keys(tap):
    """Arrays in the traced tap grow with S, not with T times S."""
    B, H, T, S = 2, 4, 96, 160
    ctx = context(T, S, 10)
    q, k, v = tensors(5, T, S)
    state = (None, jnp.zeros((B, H) if tap == "rauq_tap" else (B, S)))
    jaxpr = jax.make_jaxpr(getattr(uncertainty, tap)(cheap))(q, k, v, ctx, state)

    def sizes(jaxpr):
        for eqn in jaxpr.eqns:
            yield from (var.aval.size for var in eqn.outvars)
            for inner in jax.extend.core.jaxprs_in_params(eqn.params):
                yield from sizes(inner)

    assert max(sizes(jaxpr.jaxpr)) <= max(q.size, B * H * S)
    assert q.size < B * T * S


@pytest.mark.parametrize("tap", ["rauq_tap", "answer_attention_tap"])
def test_decoding_multiplies_queries_and_keys_once(tap):
    """With one query the tap's products are those of dense attention, written alike: the compiler shares them."""
    ctx = context(1, 32, 20)
    q, k, v = tensors(6, 1, 32, D=64)
    state = (None, jnp.zeros((2, 4) if tap == "rauq_tap" else (2, 32)))

    def flops(attend, state):
        compiled = jax.jit(lambda q, k, v, state: attend(q, k, v, ctx, state)).lower(q, k, v, state).compile()
        return compiled.cost_analysis()["flops"]

    plain = flops(dense, None)
    assert plain > 2 * (2 * 2 * 4 * 32 * 64)
    assert flops(getattr(uncertainty, tap)(dense), state) < 1.1 * plain


def test_generating_with_the_tap_feeds_the_online_score():
    """A small decoder and left padding: the score at the end of the loop against the full maps of a second pass."""
    B, M, N = 2, 6, 5
    cfg = models.DecoderConfig("llama", 61, 32, 3, 4, 2, 8, 64, 64)
    params = jax.tree.map(lambda p: 4 * p, models.init(cfg, jax.random.key(0)))
    prompt = jnp.asarray(np.random.default_rng(1).integers(0, 61, (B, M)), jnp.int32)
    mask = jnp.arange(M)[None] >= jnp.asarray([[0], [3]])
    step = jax.vmap(uncertainty.rauq_step, in_axes=(0, 0, 1, 0))

    def observe(carry, info):
        _, own = info.state
        return step(carry, info.logprob, own, info.active), jnp.zeros_like(info.active)

    out = models.generate(
        params,
        cfg,
        prompt,
        mask,
        key=jax.random.key(2),
        max_new_tokens=N,
        attend=uncertainty.rauq_tap(dense),
        state=uncertainty.rauq_tap_init(None, 3, B, 4),
        observe=observe,
        carry=jax.tree.map(lambda x: jnp.broadcast_to(x, (B, *x.shape)), uncertainty.rauq_init(3, 4)),
    )
    online = jax.vmap(uncertainty.rauq_finalize)(out.carry)

    def mapped(q, k, v, ctx, state):
        return dense(q, k, v, ctx, state)[0], softmax(q, k, ctx)

    state = jnp.zeros((3, B, 4, M + N, M + N))
    tokens, mask = jnp.hstack([prompt, out.tokens]), jnp.hstack([mask, jnp.ones((B, N), bool)])
    full = models.apply(params, cfg, tokens, mask=mask, attend=mapped, state=state).state.swapaxes(0, 1)
    prev_attn = uncertainty.previous_token_attention(full, jnp.full(B, M), out.lengths, N)
    batch = uncertainty.rauq(out.logprobs, prev_attn, out.lengths)
    np.testing.assert_allclose(online.score, batch.score, rtol=1e-5)
    np.testing.assert_array_equal(online.heads, batch.heads)


def test_initial_states():
    inner = {"x": jnp.ones((3, 5))}
    state, own = uncertainty.rauq_tap_init(inner, 3, 2, 4)
    assert state is inner
    assert own.shape == (3, 2, 4)
    assert own.dtype == jnp.float32
    state, rows = uncertainty.answer_attention_tap_init(None, 3, 2, 11)
    assert state is None
    assert rows.shape == (3, 2, 11)
    assert rows.dtype == jnp.float32
