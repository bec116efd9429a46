"""What each field of DHSA's configuration chooses, against choices worked out by hand."""

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from compiled import compiled

from jaxmeth.attention import dhsa
from jaxmeth.types import AttendContext, ConfigError

STATIC = ("cfg", "scale", "softcap", "backend")
prefill = compiled(dhsa.prefill, static_argnames=STATIC)
decode = compiled(dhsa.decode, static_argnames=STATIC)
select_blocks = compiled(dhsa.select_blocks, static_argnames=("cfg",))
find_boundaries = compiled(dhsa.find_boundaries, static_argnames=("cfg",))


def config(**fields):
    return dhsa.DHSAConfig(**{"bq": 32, "bk": 16, "density": 0.25, "dense_last": 0} | fields)


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def attention(q, k, v, slots, scale=None):
    """Of one query over some slots, in NumPy."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k, v = (np.repeat(x[:, :, slots], q.shape[1] // k.shape[1], axis=1) for x in (k, v))
    s = np.einsum("bhtd,bhsd->bhts", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    p = np.exp(s - s.max(-1, keepdims=True))
    return np.einsum("bhts,bhsd->bhtd", p / p.sum(-1, keepdims=True), v)


def listed(blocks, row, head=0):
    return blocks.idx[0, head, row, : blocks.count[0, head, row]].tolist()


def test_only_the_last_queries_attend_densely():
    q, k, v = normal(1, 2, 128, 16), normal(1, 2, 128, 16, seed=1), normal(1, 2, 128, 16, seed=2)
    sparse, tailed = (prefill(q, k, v, config(density=0.2, dense_last=n))[0] for n in (0, 5))
    np.testing.assert_array_equal(tailed[:, :, :-5], sparse[:, :, :-5])
    for t in range(123, 128):
        np.testing.assert_allclose(
            tailed[:, :, t : t + 1], attention(q[:, :, t : t + 1], k, v, range(t + 1)), atol=1e-5
        )
        assert np.abs(tailed[:, :, t] - sparse[:, :, t]).max() > 1e-3


def test_boundaries_come_from_the_source_asked_for():
    k = normal(1, 2, 64, 4) + 1
    predictor = dhsa.boundary_predictor_init(jax.random.key(0), 8, 16)

    @compiled
    def by_parts(k):
        keys = jnp.moveaxis(k, 1, 2).reshape(1, 64, 8)
        similar, logits = dhsa.similarity_scores(keys), dhsa.at_ends(dhsa.boundary_logits(predictor, keys))
        similar, logits = (dhsa.select_boundaries(x, 8, t, 3) for x, t in ((similar, 0.0), (logits, -50.0)))
        return {"fixed": dhsa.fixed_boundaries(1, 64, 16), "similarity": similar, "predicted": logits}

    expected = by_parts(k)
    for name, (edges, number) in expected.items():
        found = find_boundaries(k, config(boundaries=name, theta=-50.0, nms=3, chunk_beta=2), predictor)
        np.testing.assert_array_equal(found[0], edges)
        np.testing.assert_array_equal(found[1], number)
    assert len({str(edges) for edges, _ in expected.values()}) == 3
    # The threshold is the predictor's: similarity takes 0.
    found = find_boundaries(k, config(boundaries="similarity", nms=3, chunk_beta=2))
    np.testing.assert_array_equal(found[0], expected["similarity"][0])


def test_every_head_chooses_alone_or_its_group_does():
    q, k = normal(1, 4, 128, 16), normal(1, 2, 128, 16, seed=1)
    alone = select_blocks(q, k, config(group_select="head", density=0.5))
    together = select_blocks(q, k, config(group_select="kv", density=0.5))
    assert alone.count.shape == (1, 4, 4)
    assert together.count.shape == (1, 2, 4)
    for h in range(4):
        one = select_blocks(q[:, h : h + 1], k[:, h // 2 : h // 2 + 1], config(density=0.5))
        np.testing.assert_array_equal(alone.idx[:, h], one.idx[:, 0])
    for h in range(2):
        mean = select_blocks(q[:, 2 * h : 2 * h + 2].mean(1, keepdims=True), k[:, h : h + 1], config(density=0.5))
        np.testing.assert_array_equal(together.idx[:, h], mean.idx[:, 0])
    assert (alone.idx[:, 0] != alone.idx[:, 1]).any()


def test_local_last_forces_one_block_where_band_forces_all():
    q, k = normal(1, 1, 128, 16), normal(1, 1, 128, 16, seed=1)
    # Row 3 holds blocks 6 and 7; block 6 scores worst.
    q = q.at[:, :, 96:].set(1.0)
    k = k.at[:, :, 96:112].set(-3.0)
    band, last = (select_blocks(q, k, config(local=name)) for name in ("band", "last"))
    assert {0, 6, 7} == set(listed(band, 3))
    assert {0, 7} == set(listed(last, 3))


@pytest.mark.parametrize("source", ["blocks", "chunks"])
def test_pooling_weighs_long_chunks_by_their_root_or_not(source):
    """Block 2 of 8 keys scores 3 a key, block 3 of 2 keys 4: the root prefers the first, the mean the second."""
    mask = np.ones((1, 64), bool)
    mask[0, 26:32] = False
    k = jnp.zeros((1, 1, 64, 4)).at[:, :, 16:24, 0].set(3.0).at[:, :, 24:32, 0].set(4.0)
    q = jnp.ones((1, 1, 64, 4))
    # Rows of 8; the last keeps sink, its own block, and one more.
    fields = {"bq": 8, "bk": 8, "density": 3 / 8}
    edges = (jnp.arange(0, 65, 8, dtype=jnp.int32)[None], jnp.asarray([8])) if source == "chunks" else None
    for pooling, best in (("avgpool_norm", 2), ("avgpool", 3)):
        found = select_blocks(q, k, config(pooling=pooling, **fields), edges, jnp.asarray(mask))
        assert listed(found, 7) == [0, best, 7]


def test_decoding_scores_by_the_mean_of_the_heads_and_the_root_of_the_count():
    """The first head wants block 1, the sum of the keys block 2, root times mean block 3, the mean block 4."""
    mask = np.ones((1, 96), bool)
    mask[0, 52:64] = mask[0, 65:80] = False
    k = normal(1, 1, 96, 4, seed=3) * 0.01
    for block, (channel, size) in {1: (0, 2.0), 2: (1, 1.0), 3: (1, 2.5), 4: (1, 4.0)}.items():
        k = k.at[0, 0, 16 * block : 16 * block + 16, channel].add(size)
    v = normal(1, 1, 96, 4, seed=4)
    q = jnp.asarray([[[[1.0, 0, 0, 0]], [[-1.0, 3.0, 0, 0]]]])
    cfg = config(decode_budget=48)
    before = jnp.asarray(mask & (np.arange(96) < 95)[None])
    state = jax.tree.map(jnp.asarray, prefill(jnp.zeros((1, 2, 96, 4)), k, v, cfg, kv_mask=before)[1])
    out, _ = decode(q, k, v, state, cfg, slot=jnp.int32(95), kv_mask=jnp.asarray(mask))
    np.testing.assert_allclose(out, attention(q, k, v, np.r_[0:16, 48:52, 80:96]), atol=1e-5)


def test_decoding_heads_choose_alone_or_together():
    q, k, v = normal(1, 4, 1, 16), normal(1, 2, 160, 16, seed=1), normal(1, 2, 160, 16, seed=2)
    together, alone = (config(decode_budget=48, group_select=name) for name in ("kv", "head"))
    state = jax.tree.map(jnp.asarray, prefill(jnp.zeros((1, 4, 160, 16)), k, v, alone)[1])
    found, _ = decode(q, k, v, state, alone, slot=jnp.int32(159))
    for h in range(4):
        cut = slice(h // 2, h // 2 + 1)
        one = (q[:, h : h + 1], k[:, cut], v[:, cut], dhsa.DHSAState(state.total[:, cut], state.count))
        np.testing.assert_allclose(found[:, h : h + 1], decode(*one, together, slot=jnp.int32(159))[0], atol=1e-6)
    assert np.abs(found - decode(q, k, v, state, together, slot=jnp.int32(159))[0]).max() > 1e-2


def test_a_decoding_budget_of_the_window_is_dense_within_it():
    q, k, v = normal(1, 2, 1, 4), normal(1, 1, 128, 4, seed=1), normal(1, 1, 128, 4, seed=2)
    state = jax.tree.map(jnp.asarray, prefill(jnp.zeros((1, 2, 128, 4)), k, v, config())[1])
    ctx = AttendContext(
        q_pos=jnp.zeros((1, 1), jnp.int32), kv_pos=jnp.zeros((1, 128), jnp.int32),
        q_slot=jnp.asarray([100], jnp.int32), kv_valid=jnp.arange(128)[None] <= 100, layer=jnp.int32(0),
        window=jnp.int32(32), scale=0.5,
    )  # fmt: skip
    # Slots 69 to 100 touch three blocks of 16; those before hold more keys and would score.
    out, _ = compiled(dhsa.attend(config(decode_budget=32)))(q, k, v, ctx, state)
    np.testing.assert_allclose(out, attention(q, k, v, range(69, 101)), atol=1e-5)


@pytest.mark.parametrize("rule", ["topk", "ashape", "vs", "vsb", "chunk"])
def test_the_empty_rest_of_a_cache_adds_nothing_to_the_budget(rule):
    q, k = normal(1, 1, 128, 16), normal(1, 1, 128, 16, seed=1)
    plain = select_blocks(q, k, config(rule=rule, density=0.5))
    wide = jnp.pad(k, ((0, 0), (0, 0), (0, 128), (0, 0)))
    cached = select_blocks(q, wide, config(rule=rule, density=0.5), kv_mask=jnp.arange(256)[None] < 128)
    for row in range(4):
        assert listed(cached, row) == listed(plain, row)


def test_a_predictor_brings_its_own_heads_and_width():
    k = normal(1, 1, 32, 8)
    predictor = dhsa.boundary_predictor_init(jax.random.key(0), 8, 16, heads=2, w=3)

    @compiled
    def logits(params):
        bare = {name: p for name, p in params.items() if name != "encoder"}
        by_hand = dhsa.boundary_logits(bare, k[:, 0], w=3, heads=2)
        return (
            dhsa.boundary_logits(params, k[:, 0]),
            by_hand,
            dhsa.select_boundaries(dhsa.at_ends(by_hand, 3), 4, -50.0),
        )

    carried, by_hand, edges = logits(predictor)
    np.testing.assert_array_equal(carried, by_hand)
    cfg = config(boundaries="predicted", theta=-50.0, chunk_beta=2)
    np.testing.assert_array_equal(find_boundaries(k, cfg, predictor)[0], edges[0])
    with pytest.raises(ConfigError, match="predictor's own 2, 3"):
        dhsa.boundary_logits(predictor, k[:, 0], heads=4)
    with pytest.raises(ConfigError, match="found 4 channels"):
        dhsa.boundary_logits(predictor, k[:, 0, :, :4])


def test_what_does_not_fit_together_is_refused(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    q, k = normal(2, 1, 32, 8), normal(1, 1, 32, 8)
    with pytest.raises(ConfigError, match="one batch"):
        dhsa.prefill(q, k, k, config())
    for density in ("a", None):
        with pytest.raises(ConfigError, match="density: found"):
            config(density=density)
    assert config(bq=np.int64(32)) == config()
    predictor = dhsa.boundary_predictor_init(jax.random.key(0), 8, 16)
    with pytest.raises(ConfigError, match="keys, ratio: found"):
        dhsa.train_boundary_predictor(jax.random.key(1), predictor, jnp.zeros((4, 1, 32, 8)), jnp.zeros((2, 1, 32)))


@pytest.mark.parametrize("rule", ["vs", "vsb", "ashape", "chunk"])
def test_tokens_with_a_nan_choose_as_if_masked_and_in_their_head_alone(rule):
    q, k = 3 * normal(1, 2, 128, 4), normal(1, 2, 128, 4, seed=1)
    # The last token of rows 2 and 3 stays; the keys of block 3 suit that of row 2.
    k = k.at[:, :, 48:64].add(2 * q[:, :, [95]] if rule in ("ashape", "chunk") else 0)
    lost = np.r_[80:95, 98:127]
    edges = (jnp.asarray([[0, 16, 48, 64, 96, 128]], jnp.int32), jnp.asarray([5])) if rule == "chunk" else None
    choose = lambda q, k, mask: select_blocks(q, k, config(rule=rule, density=0.5), edges, mask)  # noqa: E731
    whole, rest = jnp.ones((1, 128), bool), jnp.ones((1, 128), bool).at[:, lost].set(False)
    clean, masked = choose(q, k, whole), choose(q, k, rest)
    found = choose(*(x.at[0, 0, lost, 2].set(jnp.nan) for x in (q, k)), whole)
    np.testing.assert_array_equal(found.idx[:, 1], clean.idx[:, 1])
    assert rule in ("vs", "vsb") or 3 in listed(masked, 2)
    for row in (2, 3):
        assert listed(found, row) == listed(masked, row)


def test_chunk_vectors_leave_out_tokens_that_are_not_finite():
    k = normal(1, 2, 32, 4)
    edges, number = jnp.asarray([[0, 8, 20, 32]], jnp.int32), jnp.asarray([3])
    bad = k.at[0, 0, 9].set(jnp.nan)
    found, clean = (compiled(lambda x: dhsa.chunk_repr(x, edges, number, heads="each"))(x) for x in (bad, k))
    np.testing.assert_allclose(found[0, :, [0, 2]], clean[0, :, [0, 2]], atol=1e-5)
    np.testing.assert_allclose(found[0, 1, 1], clean[0, 1, 1], atol=1e-5)
    rest = np.delete(np.asarray(k[0, 0, 8:20]), 1, axis=0)
    np.testing.assert_allclose(found[0, 0, 1], rest.mean(0) * 11**0.5, atol=1e-5)


def test_scores_that_overflow_never_displace_what_is_forced():
    q, k = jnp.ones((1, 1, 64, 4)), jnp.ones((1, 1, 64, 4)).at[:, :, 16:48].set(3e38)
    found = select_blocks(q, k, config(bq=16, density=0.5))
    assert listed(found, 3) == [0, 3]


def test_choosing_by_later_tokens_is_refused_under_a_gradient_by_parts_too():
    q, k = normal(1, 1, 64, 4), normal(1, 1, 64, 4, seed=1)

    def loss(q):
        blocks = dhsa.select_blocks(q, k, config(rule="vs"))
        return jnp.sum(dhsa.block_sparse_attention(q, k, k, blocks, bq=32, bk=16))

    with pytest.raises(ConfigError, match="noncausal_training=True"):
        jax.grad(loss)(q)


def test_the_dense_tail_runs_on_the_backend_asked_for(monkeypatch):
    asked = []
    monkeypatch.setattr(dhsa, "blocked", lambda q, k, v, backend="auto", **rest: (asked.append(backend) or q, None))
    q = normal(1, 1, 32, 4)
    jax.eval_shape(lambda q: dhsa.prefill(q, q, q, config(dense_last=8), backend="reference")[0], q)
    assert asked == ["reference"]
