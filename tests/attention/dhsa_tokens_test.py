"""Token lists: padding, queries from a later slot, and attention over the lists against dense attention."""

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from compiled import compiled

from jaxmeth.attention import dhsa
from jaxmeth.types import ConfigError

SIZE = 16
select_tokens = compiled(
    dhsa.select_tokens,
    static_argnames=("block_size", "budget", "local_tokens", "global_tokens", "window", "pooling", "legacy_pad_mean"),
)
token_attention = compiled(dhsa.token_attention, static_argnames=("block_size", "scale", "window", "softcap"))
OPTIONS = {"block_size": SIZE, "budget": 24, "local_tokens": 5, "global_tokens": 4}


def tensors(length=96, batch=1):
    r = np.random.default_rng(0)
    return [jnp.asarray(r.normal(size=(batch, h, length, 8)), jnp.float32) for h in (4, 2, 2)]


def lists(found, row=0):
    idx, count = found
    return [set(i[:n].tolist()) for i, n in zip(idx[row], count[row], strict=True)]


EDGES = jnp.asarray([[0, 10, 17, 40, 44, 70, 96]], jnp.int32), jnp.asarray([6])


@pytest.mark.parametrize("pooling", ["avgpool_norm", "avgpool", "maxpool"])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_no_list(side, window, pooling):
    """Not even padding of NaN; on the left by two blocks, on the right by part of one."""
    q, k, _ = tensors()
    plain = select_tokens(q, k, *EDGES, **OPTIONS, window=window, pooling=pooling)
    pad, shift = ((32, 0), 32) if side == "left" else ((0, 11), 0)
    wide = [jnp.pad(x, ((0, 0), (0, 0), pad, (0, 0)), constant_values=jnp.nan) for x in (q, k)]
    mask = jnp.pad(jnp.ones((1, 96), bool), ((0, 0), pad))
    edges = EDGES[0] + shift
    edges = edges.at[0, 0].set(0).at[0, -1].set(mask.size)
    found = select_tokens(*wide, edges, EDGES[1], **OPTIONS, window=window, pooling=pooling, kv_mask=mask)
    moved = [{t - shift for t in row} for row in lists(found)]
    first = shift // SIZE
    assert moved[:first] == [set()] * first
    assert moved[first : first + 6] == lists(plain)


def test_rows_of_a_batch_are_padded_apart():
    q, k, _ = tensors(batch=2)
    mask = jnp.ones((2, 96), bool).at[1, :20].set(False)
    edges = jnp.repeat(EDGES[0], 2, axis=0), jnp.repeat(EDGES[1], 2)
    found = select_tokens(q, k, *edges, **OPTIONS, kv_mask=mask)
    alone = select_tokens(q[1:], k[1:], *EDGES, **OPTIONS, kv_mask=mask[1:])
    whole = select_tokens(q[:1], k[:1], *EDGES, **OPTIONS)
    assert lists(found, 1) == lists(alone)
    assert lists(found, 0) == lists(whole)
    rows = lists(found, 1)
    assert rows[0] == set()
    # Block 1 has twelve real tokens, 20 to 31; sinks and locals are counted among the real ones.
    assert rows[1] == set(range(20, 32))
    for i in range(2, 6):
        assert len(rows[i]) == 24
        assert {*range(20, 24), *range(16 * i + 11, 16 * i + 16)} <= rows[i]


@pytest.mark.parametrize("window", [None, 40])
def test_queries_from_a_later_slot_are_the_later_rows(window):
    q, k, v = tensors()
    idx, count = select_tokens(q, k, *EDGES, **OPTIONS, window=window)
    found = select_tokens(q[:, :, 32:], k, *EDGES, **OPTIONS, window=window, start=jnp.int32(32))
    np.testing.assert_array_equal(found[0], idx[:, 2:])
    np.testing.assert_array_equal(found[1], count[:, 2:])
    how = {"block_size": SIZE, "window": window, "softcap": 2.0}
    whole = token_attention(q, k, v, idx, count, **how)
    later = token_attention(q[:, :, 32:], k, v, *found, **how, start=jnp.int32(32))
    np.testing.assert_allclose(later, whole[:, :, 32:], atol=1e-6)


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_attention_is_dense_attention_over_the_lists(softcap):
    q, k, v = tensors()
    idx, count = select_tokens(q, k, *EDGES, **OPTIONS)
    found = token_attention(q, k, v, idx, count, block_size=SIZE, scale=0.7, window=50, softcap=softcap)
    keys, values = (np.repeat(np.asarray(x, np.float64), 2, axis=1) for x in (k, v))
    for t in range(96):
        seen = [s for s in lists((idx, count))[t // SIZE] if t - 50 < s <= t]
        s = np.einsum("hd,hsd->hs", np.asarray(q, np.float64)[0, :, t], keys[0][:, seen]) * 0.7
        p = np.exp(s if softcap is None else softcap * np.tanh(s / softcap))
        expected = np.einsum("hs,hsd->hd", p / p.sum(-1, keepdims=True), values[0][:, seen]) if seen else 0
        np.testing.assert_allclose(found[0, :, t], expected, atol=2e-6)


def test_gradients_are_finite_where_a_query_sees_nothing():
    q, k, v = tensors()

    @compiled
    def gradient(q, k, v):
        lists = dhsa.select_tokens(q, k, *EDGES, **OPTIONS, kv_mask=jnp.arange(96)[None] >= 20)
        f = lambda *x: jnp.sum(dhsa.token_attention(*x, *lists, block_size=SIZE) ** 2)  # noqa: E731
        return jax.grad(f, (0, 1, 2))(q, k, v)

    for g in gradient(q, k, v):
        assert np.isfinite(g).all()
        assert not g[:, :, :20].any()
        assert g[:, :, 20:].any()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"block_size": 0}, "block_size: found 0"),
        ({"budget": 0}, "budget: found 0"),
        ({"local_tokens": -1}, "local_tokens: found -1"),
        ({"global_tokens": -1}, "global_tokens: found -1"),
        ({"pooling": "median"}, "pooling: found 'median'"),
        ({"start": 1}, "slot 96 over 96 keys"),
        ({"kv_mask": jnp.ones((1, 95), bool)}, r"kv_mask: found shape \(1, 95\)"),
    ],
)
def test_bad_calls_are_refused(change, named, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    q, k, _ = tensors()
    with pytest.raises(ConfigError, match=named) as raised:
        dhsa.select_tokens(q, k, *EDGES, **OPTIONS | change)
    assert "\n" not in str(raised.value)


def test_lists_that_do_not_fit_the_queries_are_refused():
    q, k, v = tensors()
    idx, count = jnp.zeros((1, 5, 8), jnp.int32), jnp.zeros((1, 5), jnp.int32)
    with pytest.raises(ConfigError, match="found 5 lists for 96 queries in blocks of 16, expected 6"):
        dhsa.token_attention(q, k, v, idx, count, block_size=SIZE)
