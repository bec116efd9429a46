"""Dense attention against a plain numpy loop; the mask of the seam; rows that may attend nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmeth.attention import dense
from jaxmeth.types import AttendContext


def context(batch=2, length=7, slots=7, first=0, window=None, valid=None, **static):
    valid = np.ones((batch, slots), bool) if valid is None else valid
    return AttendContext(
        q_pos=jnp.zeros((batch, length), jnp.int32),
        kv_pos=jnp.zeros((batch, slots), jnp.int32),
        q_slot=jnp.arange(length, dtype=jnp.int32) + first,
        kv_valid=jnp.asarray(valid),
        layer=jnp.int32(0),
        window=jnp.int32(slots if window is None else window),
        **{"scale": 0.3, **static},
    )


def tensors(seed=0, batch=2, heads=6, kv=2, length=7, slots=7, dim=5):
    r = np.random.default_rng(seed)
    return [r.normal(size=s).astype(np.float32) for s in
            ((batch, heads, length, dim), (batch, kv, slots, dim), (batch, kv, slots, dim))]  # fmt: skip


def by_hand(q, k, v, valid, first, window, scale, softcap, causal):
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out = np.zeros((*q.shape[:3], v.shape[-1]))
    for b, h, t in np.ndindex(q.shape[:3]):
        g = h // (q.shape[1] // k.shape[1])
        take = [
            s for s in range(k.shape[2])
            if valid[b, s] and (0 <= t + first - s < window if causal else abs(t + first - s) < window)
        ]  # fmt: skip
        if not take:
            continue
        scores = np.array([scale * float(q[b, h, t] @ k[b, g, s]) for s in take])
        scores = scores if softcap is None else softcap * np.tanh(scores / softcap)
        p = np.exp(scores - scores.max())
        out[b, h, t] = p / p.sum() @ v[b, g, take]
    return out


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 5), st.integers(1, 9), st.sampled_from([None, 2.0]), st.booleans(), st.integers(0, 2**14 - 1))
def test_equals_a_loop_over_rows(first, window, softcap, causal, bits):
    slots = 7 + first
    valid = np.array([(bits >> i) & 1 for i in range(2 * slots)], bool).reshape(2, slots)
    q, k, v = map(jnp.asarray, tensors(slots=slots))
    ctx = context(slots=slots, first=first, window=window, valid=valid, softcap=softcap, causal=causal)
    out, state = dense(q, k, v, ctx, "untouched")
    expected = by_hand(q, k, v, valid, first, window, 0.3, softcap, causal)
    np.testing.assert_allclose(out, expected, atol=2e-6)
    assert state == "untouched"


def test_fully_masked_row_is_zero_with_zero_gradient():
    q, k, v = map(jnp.asarray, tensors())
    valid = np.ones((2, 7), bool)
    valid[0, :3] = False
    out, pull = jax.vjp(lambda q, k, v: dense(q, k, v, context(valid=valid), None)[0], q, k, v)
    assert np.all(np.asarray(out[0, :, :3]) == 0)
    for gradient in pull(jnp.ones_like(out)):
        assert np.all(np.isfinite(gradient))
        assert not np.any(np.asarray(gradient)[0, :, :3])


def test_huge_scores_stay_finite():
    q, k, v = (x * 1e15 for x in map(jnp.asarray, tensors()))
    assert np.all(np.isfinite(dense(q, k, v, context(), None)[0]))


def test_low_precision_keeps_its_dtype_and_float32_softmax():
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in tensors())
    out, _ = dense(q, k, v, context(), None)
    exact, _ = dense(*(x.astype(jnp.float32) for x in (q, k, v)), context(), None)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(jnp.float32), exact, atol=2e-2)


@pytest.mark.parametrize("causal", [True, False])
def test_vmap_and_jit_equal_the_plain_call(causal):
    q, k, v = map(jnp.asarray, tensors())
    ctx = context(causal=causal, window=4)
    plain = dense(q, k, v, ctx, None)[0]
    np.testing.assert_allclose(jax.jit(lambda *a: dense(*a, None)[0])(q, k, v, ctx), plain, atol=1e-6)
    stacked = jax.vmap(lambda x: dense(x, k, v, ctx, None)[0])(jnp.stack([q, 2 * q]))
    np.testing.assert_allclose(stacked[0], plain, atol=1e-6)
