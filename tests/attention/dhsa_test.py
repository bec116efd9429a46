"""The invariants of DHSA, and DHSA inside a decoder."""

import functools
import importlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import compiled
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmeth import models
from jaxmeth.attention import dhsa
from jaxmeth.attention.dense import blocked, dense
from jaxmeth.types import AttendContext, ConfigError

RULES = ("topk", "ashape", "vs", "vsb", "chunk")

# Compiled once for each shape and configuration: run as they stand, every operation of theirs would be compiled alone.
STATIC = ("cfg", "scale", "softcap", "backend")
prefill = compiled(dhsa.prefill, static_argnames=STATIC)
decode = compiled(dhsa.decode, static_argnames=STATIC)
select_blocks = compiled(dhsa.select_blocks, static_argnames=("cfg",))
dense_from_blocks = compiled(dhsa.dense_from_blocks, static_argnums=1)
boundaries = compiled(dhsa.select_boundaries, static_argnums=(1, 2, 3, 4))
block_sparse_attention = compiled(
    dhsa.block_sparse_attention, static_argnames=("bq", "bk", "causal", "scale", "softcap", "return_lse", "backend")
)


def tensors(length=128, heads=6, kv=2, dim=16, batch=1, seed=0):
    r = np.random.default_rng(seed)
    shapes = ((batch, heads, length, dim), (batch, kv, length, dim), (batch, kv, length, dim))
    return [jnp.asarray(r.normal(size=s), jnp.float32) for s in shapes]


def config(**fields):
    return dhsa.DHSAConfig(**{"bq": 32, "bk": 16, "density": 0.25, "dense_last": 0} | fields)


@compiled
def by_dense(q, k, v):
    length = q.shape[2]
    k, v = (jnp.repeat(x, q.shape[1] // k.shape[1], axis=1) for x in (k, v))
    s = jnp.einsum("bhtd,bhsd->bhts", q, k) * q.shape[-1] ** -0.5
    mask = jnp.tril(jnp.ones((length, length), bool))[None, None]
    return jnp.einsum("bhts,bhsd->bhtd", jax.nn.softmax(jnp.where(mask, s, -jnp.inf), -1), v)


# 1


@pytest.mark.parametrize("group", ["kv", "head"])
@pytest.mark.parametrize("rule", RULES)
def test_density_one_is_dense(rule, group):
    q, k, v = tensors(length=100)
    out = prefill(q, k, v, config(rule=rule, density=1.0, group_select=group))[0]
    np.testing.assert_allclose(out, by_dense(q, k, v), atol=1e-5)


def test_a_budget_of_all_tokens_is_dense():
    q, k, v = tensors(length=100)
    edges = dhsa.fixed_boundaries(1, 100, 7)
    idx, count = dhsa.select_tokens(q, k, *edges, block_size=32, budget=100, global_tokens=8, local_tokens=8)
    out = dhsa.token_attention(q, k, v, idx, count, block_size=32)
    np.testing.assert_allclose(out, by_dense(q, k, v), atol=1e-5)


# 2


def changed(x, at):
    return x.at[:, :, at].add(3.0)


@pytest.mark.parametrize("rule", ["ashape", "chunk"])
def test_rows_of_causal_rules_depend_on_no_later_token(rule):
    cfg = config(rule=rule)
    assert cfg.causal
    call = lambda q, k, v: prefill(q, k, v, cfg)[0]  # noqa: E731
    q, k, v = tensors()
    before, after = call(q, k, v), call(changed(q, 70), changed(k, 70), changed(v, 70))
    np.testing.assert_array_equal(before[:, :, :64], after[:, :, :64])
    assert np.any(before[:, :, 70:] != after[:, :, 70:])


def test_given_the_lists_no_output_depends_on_a_later_token():
    q, k, v = tensors()
    blocks = select_blocks(q, k, config(rule="vs"))
    call = functools.partial(block_sparse_attention, blocks=blocks, bq=32, bk=16)
    np.testing.assert_array_equal(call(q, k, v)[:, :, :70], call(q, changed(k, 70), changed(v, 70))[:, :, :70])


@pytest.mark.parametrize(
    "fields", [{"rule": "vs"}, {"rule": "vsb"}, {"rule": "topk"}, {"boundaries": "similarity"}, {"bk": 64}]
)
def test_noncausal_rules_refuse_gradients_unless_told(fields):
    cfg = config(**fields)
    assert not cfg.causal
    q, k, v = tensors()

    def loss(q, cfg):
        return jnp.sum(dhsa.prefill(q, k, v, cfg)[0] ** 2)

    with pytest.raises(ConfigError, match="noncausal_training=True"):
        jax.grad(loss)(q, cfg)
    told = config(**fields, noncausal_training=True)
    assert np.isfinite(jax.jit(jax.grad(loss), static_argnums=1)(q, told)).all()


# 3


@pytest.mark.parametrize("fields", [{"rule": "ashape", "bk": 32}, {"rule": "vsb"}, {"rule": "chunk"}])
def test_every_query_sees_itself(fields):
    q, k, _ = tensors()
    cfg = config(**fields, density=0.1)
    blocks = select_blocks(q, k, cfg)
    mask = np.asarray(dense_from_blocks(blocks, 128 // cfg.bk))
    for i in range(4):
        assert mask[:, :, i, i * 32 // cfg.bk : (i + 1) * 32 // cfg.bk].all()


def test_a_query_without_its_own_block_gives_zero_not_nan():
    q, k, v = tensors()
    cfg = config(rule="topk", density=0.1)
    blocks = select_blocks(q, k, cfg)
    out, lse = block_sparse_attention(q, k, v, blocks, bq=32, bk=16, return_lse=True)
    empty = np.isneginf(lse)
    assert empty.any()
    assert not np.any(np.asarray(out)[empty])
    assert np.isfinite(out).all()


# 4 and 7


@pytest.mark.parametrize("rule", RULES)
def test_lists_are_ascending_distinct_padded_and_within_the_budget(rule):
    q, k, _ = tensors(length=250, batch=2)
    cfg = config(rule=rule)
    idx, count = (np.asarray(x) for x in select_blocks(q, k, cfg))
    budget, blocks = 4, 16
    widths = {"topk": budget, "ashape": budget, "chunk": budget, "vs": blocks, "vsb": blocks}
    assert idx.shape == (2, 2, 8, widths[rule])
    for at in np.ndindex(*count.shape):
        n, i = count[at], at[-1]
        available = min((i + 1) * 32 - 1, 249) // 16 + 1
        assert n >= 1
        assert (np.diff(idx[at][:n]) > 0).all()
        assert (idx[at][n:] == idx[at][n - 1]).all()
        if rule == "topk":
            assert n == budget
            continue
        assert idx[at][:n].max() < available
        dense_row = available <= budget or (rule in ("vs", "vsb") and (i < 2 or i == 7))
        assert n == available if dense_row else n <= max(budget, 3)


def test_more_is_forced_than_the_budget_holds():
    q, k, _ = tensors()
    blocks = select_blocks(q, k, config(bq=64, density=0.1, sink_blocks=2))
    np.testing.assert_array_equal(blocks.count[0, 0], [4, 6])
    np.testing.assert_array_equal(blocks.idx[0, 0, 1, :6], [0, 1, 4, 5, 6, 7])


# 5 and 6


def test_the_root_keeps_the_norm_of_independent_keys():
    k = tensors(length=4096, kv=1, dim=32)[1]
    norms = {}
    for pooling in ("avgpool_norm", "avgpool"):
        for size in (4, 16, 64):
            chunks = dhsa.chunk_repr(k, *dhsa.fixed_boundaries(1, 4096, size), pooling)
            norms[pooling, size] = float(jnp.mean(jnp.sum(chunks**2, -1)))
    np.testing.assert_allclose([norms["avgpool_norm", s] for s in (4, 16, 64)], 32, rtol=0.15)
    np.testing.assert_allclose([norms["avgpool", s] * s for s in (4, 16, 64)], 32, rtol=0.15)


def test_chunks_of_one_token_give_token_scores():
    q, k, _ = tensors(length=64)
    chunks = dhsa.chunk_repr(k, *dhsa.fixed_boundaries(1, 64, 1), "avgpool")
    np.testing.assert_allclose(chunks, jnp.mean(k, 1), atol=1e-6)
    rows = dhsa.query_repr(q, 16, "avgpool")
    scores = dhsa.upsample(jnp.einsum("bid,bcd->bic", rows, chunks), dhsa.fixed_boundaries(1, 64, 1)[0], 64)
    means = jnp.mean(q, 1).reshape(1, 4, 16, -1).mean(2)
    np.testing.assert_allclose(scores, jnp.einsum("bid,btd->bit", means, jnp.mean(k, 1)), atol=1e-5)


# 8


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("rule", RULES)
def test_padding_changes_nothing_of_the_rest(rule, side):
    """Padded by whole blocks, the real rows are as without padding; padding rows give zeros on the left."""
    q, k, v = tensors(length=128)
    cfg = config(rule=rule, density=0.3)
    plain = select_blocks(q, k, cfg)
    before, after = (64, 0) if side == "left" else (0, 64)
    noise = jax.random.normal(jax.random.key(1), (1, 6, 64, 16))
    wide = [
        jnp.concatenate([noise[:, : x.shape[1]], x] if before else [x, noise[:, : x.shape[1]]], 2) for x in (q, k, v)
    ]
    mask = jnp.asarray(np.r_[np.zeros(before), np.ones(128), np.zeros(after)].astype(bool))[None]
    # The same number of blocks: density is a share of all, padding included.
    padded = select_blocks(*wide[:2], config(rule=rule, density=0.3 * 8 / 12), kv_mask=mask)
    rows = slice(2, 6) if before else slice(0, 4)
    expected = np.asarray(dense_from_blocks(plain, 8))
    found = np.asarray(dense_from_blocks(padded, 12))[:, :, rows, (4 if before else 0) : (12 if before else 8)]
    assert not np.asarray(dense_from_blocks(padded, 12))[..., ~np.repeat(np.asarray(mask[0]), 1)[::16]].any()
    if rule in ("ashape", "chunk", "vsb", "topk") or side == "right":
        np.testing.assert_array_equal(found, expected)
    out = block_sparse_attention(*wide, padded, bq=32, bk=16, kv_valid=mask)
    assert np.isfinite(out).all()
    if before:
        assert not np.any(out[:, :, :64])


# 9


@pytest.mark.parametrize("rule", ["ashape", "chunk"])
def test_gradients_are_those_of_masked_dense_attention(rule):
    q, k, v = tensors(length=96)
    cfg = config(rule=rule)
    blocks = jax.tree.map(jnp.asarray, select_blocks(q, k, cfg))
    wave = jnp.sin(jnp.arange(q.size, dtype=jnp.float32)).reshape(q.shape)

    def masked(q, k, v):
        attention = functools.partial(dhsa.block_sparse_attention, bq=32, bk=16, backend="reference")
        return jnp.sum(wave * attention(q, k, v, blocks))

    sparse = lambda *a: jnp.sum(wave * dhsa.prefill(*a, cfg)[0])  # noqa: E731
    found, expected = (jax.jit(jax.grad(f, (0, 1, 2)))(q, k, v) for f in (sparse, masked))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


# 10 and 11


# length, heads, kv heads, dim, bq, bk
ODD = [
    (33, 8, 1, 80, 32, 16),
    (1, 3, 1, 16, 16, 16),
    (5, 2, 2, 64, 16, 16),
    (16, 3, 1, 128, 16, 16),
    (50, 2, 1, 16, 16, 32),
]


@pytest.mark.parametrize(
    ("rule", "length", "heads", "kv", "dim", "bq", "bk"),
    [
        pytest.param(rule, *size, marks=() if rule == "chunk" or size in ODD[:2] else pytest.mark.slow)
        for size in ODD
        for rule in RULES
    ],
)
def test_odd_sizes(rule, length, heads, kv, dim, bq, bk):
    q, k, v = tensors(length, heads, kv, dim)
    cfg = config(rule=rule, density=0.01, bq=bq, bk=bk)
    out, state = prefill(q, k, v, cfg)
    assert out.shape == q.shape
    assert np.isfinite(out).all()
    assert int(state.count.sum()) == length
    whole = prefill(q, k, v, config(rule=rule, density=1.0, bq=bq, bk=bk))[0]
    np.testing.assert_allclose(whole, by_dense(q, k, v), atol=1e-5)


def by_tokens(q, k, v, start, mask):
    edges = dhsa.select_boundaries(dhsa.similarity_scores(k[:, 0]), 6, 0.0)
    how = {"block_size": 16, "start": start}
    lists = dhsa.select_tokens(q[:, :, :96], k, *edges, budget=40, local_tokens=8, global_tokens=8, kv_mask=mask, **how)
    return dhsa.token_attention(q[:, :, :96], k, v, *lists, **how)


def by_steps(q, k, v, start, mask):
    cfg = config(decode_budget=48)
    state = dhsa.prefill(q[:, :, :96], k, v, cfg, kv_mask=mask)[1]
    return dhsa.decode(q[:, :, -1:], k, v, state, cfg, slot=96 + start, kv_mask=mask)[0]


def by_prefill(cfg):
    return lambda q, k, v, start, mask: dhsa.prefill(q[:, :, :96], k, v, cfg, start=start, kv_mask=mask)[0]


CALLS = {rule: by_prefill(config(rule=rule)) for rule in RULES} | {
    "similarity": by_prefill(config(boundaries="similarity")),
    "tokens": by_tokens,
    "decoding": by_steps,
}


@pytest.mark.parametrize("name", CALLS)
def test_one_compilation_serves_all_data(name):
    """Shapes depend on (T, S, cfg) alone: lists, masks and slots are data."""
    chex.clear_trace_counter()
    call = jax.jit(chex.assert_max_traces(CALLS[name], 1))
    shapes = {call(*tensors(seed=s), jnp.int32(8 * s), jnp.arange(128)[None] >= 5 * s).shape for s in range(3)}
    assert len(shapes) == 1


def test_memory_of_a_prompt_is_bounded_by_the_blocks():
    def temporary(length):
        q, k = (jax.ShapeDtypeStruct((1, heads, length, 64), jnp.float32) for heads in (2, 1))
        f = jax.jit(lambda q, k, v: dhsa.prefill(q, k, v, dhsa.DHSAConfig(density=1024 / length))[0])
        return f.lower(q, k, k).compile().memory_analysis().temp_size_in_bytes

    short, long = temporary(8192), temporary(16384)
    assert 0 < long <= 2 * short
    assert long < 4 * 16384**2 / 32  # of one head's scores


def test_vmap_equals_the_batch():
    q, k, v = tensors(batch=3)
    cfg = config()
    one = jax.jit(jax.vmap(lambda q, k, v: dhsa.prefill(q[None], k[None], v[None], cfg)[0][0]))
    np.testing.assert_allclose(one(q, k, v), prefill(q, k, v, cfg)[0], atol=1e-6)


# Boundaries


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([1, 3, 9]), st.sampled_from([0, 3, 8]), st.booleans())
def test_boundaries_equal_a_greedy_loop(seed, most, nms, ending):
    score = np.random.default_rng(seed).integers(0, 6, 40) / 2.0
    instr = 7 if ending else None
    accepted = [40 - 7] if ending else []
    for p in np.argsort(-score, kind="stable"):
        if score[p] > 1.1 and len(accepted) < most and all(abs(p - a) > nms for a in accepted):
            if ending and p > 40 - 7:
                continue
            accepted.append(int(p))
    expected = sorted({0, 40, *(p + 1 for p in accepted)})
    edges, number = boundaries(jnp.asarray(score, jnp.float32)[None], most, 1.1, nms, instr)
    assert edges.shape == (1, most + 2)
    assert int(number[0]) == len(expected) - 1
    np.testing.assert_array_equal(edges[0], expected + [40] * (most + 2 - len(expected)))


def test_no_boundary_passes():
    edges, number = dhsa.select_boundaries(jnp.full((1, 20), jnp.nan), 3)
    np.testing.assert_array_equal(edges, [[0, 20, 20, 20, 20]])
    np.testing.assert_array_equal(number, [1])


def test_similarity_finds_where_keys_turn():
    r = np.random.default_rng(0)
    topics = np.repeat(r.normal(size=(4, 12)), 16, axis=0)
    keys = jnp.asarray(topics + 0.05 * r.normal(size=(64, 12)), jnp.float32)[None]
    edges, number = dhsa.select_boundaries(dhsa.similarity_scores(keys), 3, 0.0, 8)
    np.testing.assert_array_equal(edges[0], [0, 16, 32, 48, 64])
    assert number == 4


def test_training_learns_where_keys_turn():
    r = np.random.default_rng(0)
    turn = r.random((24, 2, 48)) < 0.15
    topic = np.cumsum(np.roll(turn, 1, -1), -1)
    table = r.normal(size=(24, 2, 60, 8))
    keys = np.take_along_axis(table, topic[..., None], 2) + 0.05 * r.normal(size=(24, 2, 48, 8))
    ratio = jnp.asarray(np.where(turn, 4.0, 1.0), jnp.float32)
    params = dhsa.boundary_predictor_init(jax.random.key(0), 8, d_h=32, heads=2)
    how = dhsa.PredictorTraining(learning_rate=3e-3, epochs=12)
    _, losses = dhsa.train_boundary_predictor(jax.random.key(1), params, jnp.asarray(keys, jnp.float32), ratio, how)
    assert losses.shape == (24 * 12,)
    assert losses[-24:].mean() < 0.6 * losses[:24].mean()


# Decoding


def test_decoding_with_the_whole_budget_is_dense_and_state_is_that_of_the_prompt():
    q, k, v = tensors(length=70)
    for budget in (-1, 128):
        cfg = config(decode_budget=budget)
        _, state = prefill(q, k, v, cfg, kv_mask=jnp.arange(70)[None] < 69)
        out, state = decode(q[:, :, -1:], k, v, state, cfg, slot=jnp.int32(69))
        np.testing.assert_allclose(out, by_dense(q, k, v)[:, :, -1:], atol=1e-5)
        whole = prefill(q, k, v, cfg)[1]
        np.testing.assert_array_equal(state.count, whole.count)
        np.testing.assert_allclose(state.total, whole.total, atol=1e-5)


def test_decoding_keeps_sink_tail_and_the_best_blocks():
    _, k, v = tensors(length=96, heads=2, kv=1)
    q = 10 * k[:, :, 40:41].repeat(2, axis=1)
    cfg = config(decode_budget=48)
    state = prefill(jnp.zeros((1, 2, 96, 16)), k, v, cfg, kv_mask=jnp.arange(96)[None] < 95)[1]
    state = jax.tree.map(jnp.asarray, state)
    out, _ = decode(q, k, v, state, cfg, slot=jnp.int32(95))
    number = state.count[0, :, None].at[5].add(1)
    mean = (state.total[0, 0].at[5].add(k[0, 0, 95])) * number**-0.5
    best = int(jnp.argmax((mean @ q[0].mean(0)[0])[1:5])) + 1
    slots = np.r_[0:16, best * 16 : best * 16 + 16, 80:96]
    np.testing.assert_allclose(out, by_dense_last(q, k[:, :, slots], v[:, :, slots]), atol=1e-5)


def by_dense_last(q, k, v):
    k, v = (jnp.repeat(x, q.shape[1] // k.shape[1], axis=1) for x in (k, v))
    return jnp.einsum("bhts,bhsd->bhtd", jax.nn.softmax(jnp.einsum("bhtd,bhsd->bhts", q, k) / 4, -1), v)


# Inside a decoder

MODEL = models.DecoderConfig("llama", 96, 32, 2, 4, 2, 8, 48, 256)


@pytest.fixture(scope="module")
def params():
    return models.init(MODEL, jax.random.key(0))


def test_a_decoder_at_density_one_is_the_dense_decoder(params):
    tokens = jax.random.randint(jax.random.key(1), (2, 90), 0, 96)
    mask = jnp.arange(90)[None] >= jnp.asarray([0, 20])[:, None]
    whole = models.apply(params, MODEL, tokens, mask=mask)
    sparse = models.apply(params, MODEL, tokens, mask=mask, attend=dhsa.attend(config(density=1.0, dense_last=8)))
    np.testing.assert_allclose(np.asarray(sparse.logits)[mask], np.asarray(whole.logits)[mask], atol=1e-5)
    some = models.apply(params, MODEL, tokens, mask=mask, attend=dhsa.attend(config(density=0.2)))
    assert np.abs(np.asarray(some.logits - whole.logits)[mask]).max() > 1e-4
    assert np.isfinite(some.logits).all()


def test_generation_with_state_at_full_budget_is_dense(params):
    tokens = jax.random.randint(jax.random.key(1), (2, 40), 0, 96)
    mask = jnp.arange(40)[None] >= jnp.asarray([0, 11])[:, None]
    how = {"key": jax.random.key(0), "max_new_tokens": 6}
    plain = models.generate(params, MODEL, tokens, mask, **how)
    cfg = config(density=1.0, decode_budget=64)
    state = dhsa.init_state(cfg, 2, 2, 2, 46, 8)
    sparse = models.generate(params, MODEL, tokens, mask, **how, attend=dhsa.attend(cfg), state=state)
    np.testing.assert_array_equal(sparse.tokens, plain.tokens)
    np.testing.assert_allclose(sparse.logprobs, plain.logprobs, atol=1e-5)
    # All but the last new token went through the model: its key never entered the cache.
    np.testing.assert_array_equal(sparse.state.count.sum(-1), [[45, 34]] * 2)


def test_windows_and_soft_caps_are_kept():
    q, k, v = tensors(length=96)
    ctx = AttendContext(
        q_pos=jnp.zeros((1, 96), jnp.int32), kv_pos=jnp.zeros((1, 96), jnp.int32),
        q_slot=jnp.arange(96, dtype=jnp.int32), kv_valid=jnp.ones((1, 96), bool), layer=jnp.int32(0),
        window=jnp.int32(20), scale=0.3, softcap=2.0,
    )  # fmt: skip
    # Four blocks hold all that a row of 32 queries sees through a window of 20; the sink lies outside of it.
    sparse, whole = (compiled(lambda *a, f=f: f(*a, ctx, None)[0]) for f in (dhsa.attend(config(density=0.7)), dense))
    np.testing.assert_allclose(sparse(q, k, v), whole(q, k, v), atol=1e-5)


def test_blocked_dense_attention_is_the_default_for_long_prompts(monkeypatch):
    module = importlib.import_module("jaxmeth.attention.dense")  # the package gives the function this name

    q, k, v = tensors(length=200, batch=2)
    valid = jnp.arange(230)[None] >= jnp.asarray([0, 30])[:, None]
    k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, 30), (0, 0)), constant_values=0.5) for x in (k, v))
    ctx = AttendContext(
        q_pos=jnp.zeros((2, 200), jnp.int32), kv_pos=jnp.zeros((2, 230), jnp.int32),
        q_slot=jnp.arange(200, dtype=jnp.int32) + 10, kv_valid=valid, layer=jnp.int32(0), window=jnp.int32(150),
        scale=0.3, softcap=3.0,
    )  # fmt: skip
    whole = dense(q, k, v, ctx, None)[0]
    calls = []
    monkeypatch.setattr(module, "BLOCKED_FROM", 128)
    monkeypatch.setattr(module, "blocked", lambda *a, **kw: calls.append(1) or blocked(*a, **kw))
    np.testing.assert_allclose(dense(q, k, v, ctx, None)[0], whole, atol=2e-6)
    assert calls


# Bad input


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"density": 0.0}, "density: found 0.0"),
        ({"density": 1.1}, "density: found 1.1"),
        ({"density": float("nan")}, "density: found nan"),
        ({"bq": 0}, "bq: found 0"),
        ({"bk": 48}, "one to divide the other"),
        ({"rule": "best"}, "rule: found 'best'"),
        ({"decode_budget": -2}, "decode_budget: found -2"),
        ({"vs_ratio": 2.0}, "vs_ratio"),
        ({"decode_budget": 0}, "decode_budget: found 0, expected -1"),
        ({"theta": float("nan")}, "theta: found nan"),
        ({"bq": True}, "bq: found True"),
    ],
)
def test_bad_configurations_are_refused(fields, named):
    with pytest.raises(ConfigError, match=named) as raised:
        config(**fields)
    assert "\n" not in str(raised.value)


def test_bad_calls_are_refused():
    q, k, v = tensors()
    with pytest.raises(ConfigError, match="predictor: found none"):
        dhsa.attend(config(boundaries="predicted"))
    with pytest.raises(ConfigError, match="a multiple"):
        select_blocks(q[:, :5], k, config())
    with pytest.raises(ConfigError, match="nothing empty"):
        select_blocks(q[:, :, :0], k, config())
    with pytest.raises(ConfigError, match="slot 127 over 100 keys"):
        select_blocks(q, k[:, :, :100], config())
    with pytest.raises(ConfigError, match="on a machine with only cpu"):
        blocked(q, k, v, backend="tpu")
    for fields, named in (({"epochs": 0}, "epochs: found 0"), ({"learning_rate": -1.0}, "learning_rate: found -1.0")):
        with pytest.raises(ConfigError, match=named):
            dhsa.PredictorTraining(**fields)
    dhsa.attend(config(rule="topk", boundaries="predicted"))
    with pytest.raises(ConfigError, match="on a machine with only cpu"):
        prefill(q, k, v, config(), backend="tpu")
    with pytest.raises(ConfigError, match="heads to divide"):
        dhsa.boundary_predictor_init(jax.random.key(0), 10, heads=4)


def test_a_nan_in_a_key_leaves_earlier_rows_alone():
    q, k, v = tensors()
    cfg = config()
    bad = k.at[0, 0, 70, 0].set(jnp.nan)
    clean, found = (prefill(q, x, v, cfg)[0] for x in (k, bad))
    np.testing.assert_array_equal(found[:, :, :64], clean[:, :, :64])
    assert np.isfinite(found[:, 3:]).all()
