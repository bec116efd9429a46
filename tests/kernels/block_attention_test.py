"""Block attention: every implementation against the reference, from one table."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from jaxmeth import kernels
from jaxmeth.kernels.block_attention import _check as check_blocks
from jaxmeth.kernels.block_attention import gpu, tpu
from jaxmeth.kernels.block_attention.shapes import Static, transpose_lists
from jaxmeth.types import ConfigError

BACKENDS = {
    "xla": {"backend": "xla"},
    "tpu": {"backend": "tpu", "interpret": True},
    "gpu": {"backend": "gpu", "interpret": True},
}
# name: batch, heads, kv heads, lists a row (None = kv heads), queries, slots, dim, bq, bk, width, options
TABLE = {
    "grouped heads": (2, 6, 2, None, 64, 64, 16, 32, 16, 3, {}),
    "a list for each query head": (1, 6, 2, 6, 64, 64, 16, 32, 32, 2, {}),
    "eight heads share, dim 80": (1, 8, 1, None, 40, 56, 80, 16, 16, 2, {}),
    "as many heads, dim 128": (1, 2, 2, None, 33, 70, 128, 32, 16, 3, {}),
    "dim 64, window": (1, 3, 1, None, 70, 70, 64, 32, 16, 4, {"window": 20}),
    "soft cap": (1, 3, 1, None, 64, 64, 16, 32, 16, 3, {"softcap": 1.5, "scale": 0.5}),
    "both directions": (1, 4, 2, None, 64, 90, 16, 32, 32, 2, {"causal": False, "window": 40}),
    "padding": (2, 2, 1, None, 48, 48, 16, 16, 16, 3, {"pad": True}),
    "dim 65": (1, 2, 1, None, 33, 37, 65, 16, 16, 2, {}),
    "one token": (1, 3, 1, None, 1, 1, 16, 16, 16, 1, {}),
    "queries at the end of a cache": (1, 3, 1, None, 20, 90, 16, 16, 16, 5, {"start": 60}),
}


def made(row, seed=0):
    """Arguments and options of a row; counts from 0 (an empty list) to the width."""
    batch, heads, kv_heads, lists, length, slots, dim, bq, bk, width, options = row
    r = np.random.default_rng(seed)
    q, k, v = (
        jnp.asarray(r.normal(size=(batch, h, n, dim)), jnp.float32)
        for h, n in ((heads, length), (kv_heads, slots), (kv_heads, slots))
    )
    idx, count = random_lists(r, batch, lists or kv_heads, -(-length // bq), -(-slots // bk), width)
    options = dict(options)
    if options.pop("pad", False):
        options["kv_valid"] = jnp.asarray(r.random((batch, slots)) < 0.7)
    return (q, k, v, idx, count), {"bq": bq, "bk": bk} | options


def random_lists(r, batch, lists, rows, blocks, width):
    order = np.argsort(r.random((batch, lists, rows, blocks)))[..., :width]
    count = r.integers(0, order.shape[-1] + 1, order.shape[:-1])
    used = np.arange(order.shape[-1]) < count[..., None]
    idx = np.sort(np.where(used, order, blocks + 1), axis=-1)
    last = np.take_along_axis(idx, np.maximum(count - 1, 0)[..., None], -1) % (blocks + 1)
    idx = np.where(used, idx, last)
    return jnp.asarray(idx, jnp.int32), jnp.asarray(count, jnp.int32)


def jitted(options, **how):
    return jax.jit(functools.partial(kernels.block_attention, **options, **how, return_lse=True))


def attend(arguments, options, **how):
    return jitted(options, **how)(*arguments)


GRADIENTS = ["grouped heads", "a list for each query head", "soft cap", "padding", "dim 64, window", "one token"]


def weighed(q, k, v, idx, count, call):
    """A scalar that depends on every output and every finite lse, and the two."""
    out, lse = call(q, k, v, idx, count)
    wave = jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape)
    finite = jnp.where(jnp.isneginf(lse), 0, jnp.where(jnp.isneginf(lse), 0, lse) ** 2)
    return jnp.sum(out * wave) + jnp.sum(finite), (out, lse)


def both(arguments, options, **how):
    """Output and lse, and the gradients of ``weighed``, from one compilation."""
    call = functools.partial(kernels.block_attention, **options, **how, return_lse=True)
    gradients, outputs = jax.jit(jax.grad(functools.partial(weighed, call=call), (0, 1, 2), has_aux=True))(*arguments)
    return outputs, gradients


@functools.cache
def results(backend, row):
    """``(out, lse)`` of a row, and its gradients where they are asked for; computed once."""
    arguments, options = made(TABLE[row])
    how = BACKENDS.get(backend, {"backend": backend})
    return both(arguments, options, **how) if row in GRADIENTS else (attend(arguments, options, **how), None)


@pytest.mark.parametrize("row", TABLE)
@pytest.mark.parametrize("backend", BACKENDS)
def test_equals_the_reference(backend, row):
    (out, lse), (expected, expected_lse) = (results(name, row)[0] for name in (backend, "reference"))
    np.testing.assert_allclose(out, expected, atol=2e-6)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("causal", [True, False])
def test_every_start_and_window_equals_the_reference(causal):
    """Which blocks are masked at all is told by their corners; here each corner lies on each side of each limit."""
    (q, k, v, *_), _ = made((1, 2, 1, None, 16, 40, 4, 8, 4, 10, {}))
    lists = jnp.broadcast_to(jnp.arange(10, dtype=jnp.int32), (1, 1, 2, 10)), jnp.full((1, 1, 2), 10)
    calls = [jitted({"bq": 8, "bk": 4, "causal": causal}, backend=name) for name in ("xla", "reference")]
    for start, window in itertools.product(range(0, 25, 3), [*range(1, 21), 40]):
        found, expected = (call(q, k, v, *lists, start=jnp.int32(start), window=jnp.int32(window)) for call in calls)
        np.testing.assert_allclose(found[1], expected[1], atol=2e-6, err_msg=f"start {start}, window {window}")
        np.testing.assert_allclose(found[0], expected[0], atol=2e-6)


@pytest.mark.parametrize("row", GRADIENTS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_equal_those_of_masked_dense_attention(backend, row):
    for found, expected in zip(results(backend, row)[1], results("reference", row)[1], strict=True):
        assert np.isfinite(found).all()
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def by_loop(q, k, v, idx, count, bq, bk, start):
    out = np.zeros(q.shape)
    for b, h, t in np.ndindex(q.shape[:3]):
        g, s, i = h // (q.shape[1] // k.shape[1]), h // (q.shape[1] // idx.shape[1]), t // bq
        blocks = idx[b, s, i, : count[b, s, i]]
        keys = [n for j in blocks for n in range(j * bk, min((j + 1) * bk, k.shape[2])) if n <= t + start]
        if keys:
            scores = k[b, g, keys].astype(float) @ q[b, h, t] / q.shape[-1] ** 0.5
            p = np.exp(scores - scores.max())
            out[b, h, t] = p / p.sum() @ v[b, g, keys]
    return out


@pytest.mark.parametrize("backend", ["reference", "xla"])
def test_equals_a_loop(backend):
    for row in ("grouped heads", "a list for each query head", "queries at the end of a cache"):
        arguments, options = made(TABLE[row])
        out, lse = results(backend, row)[0]
        expected = by_loop(*map(np.asarray, arguments), options["bq"], options["bk"], options.get("start", 0))
        np.testing.assert_allclose(out, expected, atol=2e-6)
        np.testing.assert_array_equal(np.isneginf(lse), ~np.any(expected, axis=-1))


@functools.cache
def compiled(backend):
    """Compiled once: lists, counts, the first slot and which slots are real are data."""
    call = functools.partial(kernels.block_attention, bq=16, bk=16, return_lse=True, backend=backend)
    return jax.jit(lambda q, k, v, idx, count, start, valid: call(q, k, v, idx, count, start=start, kv_valid=valid))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 70), st.integers(0, 40), st.sampled_from([1, 3, 8]))
def test_random_lists_and_odd_lengths(seed, length, before, group):
    (q, k, v, idx, count), _ = made((1, group, 1, None, 37, 70, 16, 16, 16, 4, {}), seed)
    # A length is a matter of which slots are real: whatever lies after it must change nothing.
    valid = np.arange(70)[None] < length
    bad_k, bad_v = (np.where(valid[:, None, :, None], x, np.nan) for x in (k, v))
    found = compiled("xla")(q, bad_k, bad_v, idx, count, before, valid)
    for a, b in zip(found, compiled("reference")(q, k, v, idx, count, before, valid), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_full_lists_are_dense_attention(backend):
    arguments, _ = made((1, 6, 2, None, 70, 90, 16, 32, 16, 1, {}))
    q, k, v = arguments[:3]
    idx, count = kernels.dense_lists(1, 70, 90, 32, 16, start=20)
    idx, count = (jnp.repeat(x, 2, axis=1) for x in (idx, count))
    out, _ = attend((q, k, v, idx, count), {"bq": 32, "bk": 16, "start": 20}, **BACKENDS[backend])
    visible = jnp.arange(90)[None] <= jnp.arange(70)[:, None] + 20
    expected = jax.nn.dot_product_attention(*(jnp.swapaxes(x, 1, 2) for x in (q, k, v)), mask=visible[None, None])
    np.testing.assert_allclose(out, jnp.swapaxes(expected, 1, 2), atol=2e-6)


def test_tpu_reads_nothing_unwritten_and_does_not_race(capfd):
    """Uninitialised memory is NaN, and the interpreter prints any race it finds, forward and backward."""
    arguments, options = made((1, 2, 1, None, 32, 32, 16, 16, 16, 2, {}))
    how = {"backend": "tpu", "interpret": pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True)}
    try:
        (out, _), gradients = both(arguments, options, **how)
        jax.block_until_ready(gradients)
    finally:
        pltpu.reset_tpu_interpret_mode_state()
    (expected, _), expected_gradients = both(arguments, options, backend="reference")
    np.testing.assert_allclose(out, expected, atol=2e-6)
    for a, b in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    assert "RACE" not in "".join(capfd.readouterr()).upper()


@pytest.mark.parametrize("dim", [64, 80, 128])
@pytest.mark.parametrize(("platform", "call"), [("tpu", "tpu_custom_call"), ("cuda", "__gpu$xla.gpu.triton")])
def test_lowers_without_the_hardware(platform, call, dim):
    module = {"tpu": tpu, "cuda": gpu}[platform]
    static = Static(bq=128, bk=64, causal=True, scale=0.1, softcap=30.0)
    dtype = jnp.bfloat16 if dim == 64 else jnp.float32
    shape = jax.ShapeDtypeStruct
    q, k = shape((1, 6, 256, dim), dtype), shape((1, 2, 256, dim), dtype)
    lists = shape((1, 2, 2, 3), jnp.int32), shape((1, 2, 2), jnp.int32), shape((1, 256), bool), shape((2,), jnp.int32)
    row = shape((1, 6, 256), jnp.float32)
    for function, more, calls in ((module.forward, (), 1), (module.backward, (q, row, row), 2)):
        traced = jax.jit(functools.partial(function, static)).trace(q, k, k, *lists, *more)
        assert traced.lower(lowering_platforms=(platform,)).as_text().count(call) == calls


def test_exports_to_tpu():
    static = Static(bq=128, bk=128, causal=True, scale=0.1, softcap=None)
    shape = jax.ShapeDtypeStruct
    q, k = shape((1, 6, 256, 64), jnp.float32), shape((1, 2, 256, 64), jnp.float32)
    lists = shape((1, 2, 2, 2), jnp.int32), shape((1, 2, 2), jnp.int32), shape((1, 256), bool), shape((2,), jnp.int32)
    exported = jax.export.export(jax.jit(functools.partial(tpu.forward, static)), platforms=["tpu"])(q, k, k, *lists)
    assert exported.platforms == ("tpu",)
    assert "tpu_custom_call" in exported.mlir_module()


def test_low_precision_sums_in_float32():
    arguments, options = made(TABLE["grouped heads"])
    low = [x.astype(jnp.bfloat16) for x in arguments[:3]]
    expected, _ = attend([*(x.astype(jnp.float32) for x in low), *arguments[3:]], options)
    for how in BACKENDS.values():
        out, _ = attend((*low, *arguments[3:]), options, **how)
        assert out.dtype == jnp.bfloat16
        np.testing.assert_allclose(out.astype(jnp.float32), expected, atol=2e-2)


@pytest.mark.usefixtures("x64")
def test_float64_stays_float64():
    arguments, options = made(TABLE["grouped heads"])
    wide = [x.astype(jnp.float64) for x in arguments[:3]]
    out, lse = attend((*wide, *arguments[3:]), options, backend="xla")
    expected, expected_lse = attend((*wide, *arguments[3:]), options, backend="reference")
    assert out.dtype == lse.dtype == jnp.float64
    np.testing.assert_allclose(out, expected, atol=1e-14)
    np.testing.assert_allclose(lse, expected_lse, atol=1e-14)


@pytest.mark.parametrize("backend", BACKENDS)
def test_values_after_the_count_change_nothing(backend):
    (q, k, v, idx, count), options = made(TABLE["grouped heads"])
    used = np.arange(idx.shape[-1]) < np.asarray(count)[..., None]
    other = jnp.where(used, idx, (idx + 1) % 4)
    assert not np.array_equal(other, idx)
    call = jitted(options, **BACKENDS[backend])
    np.testing.assert_array_equal(call(q, k, v, idx, count)[0], call(q, k, v, other, count)[0])


@functools.cache
def few_blocks(backend):
    """Four query blocks which count key blocks 0, 1, none and 0 with 2; places that do not count name block 3."""
    (q, k, v, _, _), options = made((1, 2, 1, None, 64, 64, 16, 16, 16, 1, {}))
    idx, count = jnp.asarray([[[[0, 3], [1, 3], [3, 3], [0, 2]]]]), jnp.asarray([[[1, 1, 0, 2]]])
    call = functools.partial(kernels.block_attention, **options, **BACKENDS.get(backend, {"backend": backend}))
    call = jax.jit(jax.grad(functools.partial(weighed, call=functools.partial(call, return_lse=True)), (0, 1, 2), True))

    def results(q, k, v):
        gradients, (out, lse) = call(q, k, v, idx, count)
        return [np.asarray(x) for x in (out, lse[..., None], *gradients)]

    return (q, k, v), results


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_reaches_no_further_than_said(backend, bad):
    arguments, call = few_blocks(backend)
    clean = call(*arguments)
    slots = np.arange(64)
    block, sees = slots // 16, (slots < 16) & (slots >= 10) | (slots >= 48)
    # Which argument, at which slot: where the output, and the gradients of q and of k and v, may change.
    cases = [
        (0, 5, slots == 5, slots == 5, block == 0),
        (1, 10, sees, (block == 0) | (block == 3), (block == 0) | (block == 2)),
        (2, 10, sees, (block == 0) | (block == 3), (block == 0) | (block == 2)),
        (2, 50, slots < 0, slots < 0, slots < 0),
        (1, 50, slots < 0, slots < 0, slots < 0),
    ]
    for which, at, out, dq, dkv in cases:
        changed = list(arguments)
        changed[which] = changed[which].at[:, :, at].set(bad)
        lse = out if which < 2 else slots < 0
        out = out if which < 2 or backend == "reference" else dq
        reach = [out, lse, dq, dkv, dkv]
        for n, (x, y, may) in enumerate(zip(call(*changed), clean, reach, strict=True)):
            if n < 2 or backend != "reference":
                np.testing.assert_array_equal(x[:, :, ~may], y[:, :, ~may])
            if n == 0:
                assert not np.isfinite(x[:, :, may]).all(-1).any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_nan_stays_where_it_is_seen(backend):
    (q, k, v, _, _), options = made((1, 2, 1, None, 64, 64, 16, 16, 16, 1, {}))
    idx, count = kernels.dense_lists(1, 64, 64, 16, 16)
    call = jitted(options, **BACKENDS[backend])
    clean = np.asarray(call(q, k, v, idx, count)[0])
    bad_q = np.asarray(call(q.at[0, 0, 5, 0].set(jnp.nan), k, v, idx, count)[0])
    other = np.ones(clean.shape[:3], bool)
    other[0, 0, 5] = False
    np.testing.assert_array_equal(np.isnan(bad_q).any(-1), ~other)
    np.testing.assert_array_equal(bad_q[other], clean[other])
    bad_k = np.asarray(call(q, k.at[0, 0, 37, 0].set(jnp.nan), v, idx, count)[0])
    np.testing.assert_array_equal(bad_k[:, :, :37], clean[:, :, :37])
    assert np.isnan(bad_k[:, :, 37:]).all()


def test_vmap_equals_a_loop():
    arguments, options = made(TABLE["padding"])
    valid = options.pop("kv_valid")

    def one(q, k, v, idx, count, valid):
        batched = (x[None] for x in (q, k, v, idx, count))
        return kernels.block_attention(*batched, **options, kv_valid=valid[None])[0]

    expected, _ = attend(arguments, options | {"kv_valid": valid}, backend="xla")
    np.testing.assert_allclose(jax.jit(jax.vmap(one))(*arguments, valid), expected, atol=1e-6)


def test_partial_results_merge():
    (q, k, v, _, _), options = made((1, 3, 1, None, 64, 64, 16, 16, 16, 1, {"causal": False}))
    halves = [jnp.broadcast_to(jnp.arange(2, dtype=jnp.int32) + 2 * i, (1, 1, 4, 2)) for i in range(2)]
    count = jnp.full((1, 1, 4), 2, jnp.int32)
    parts = [attend((q, k, v, idx, count), options) for idx in halves]
    total = jnp.logaddexp(parts[0][1], parts[1][1])
    merged = sum(jnp.exp(lse - total)[..., None] * out for out, lse in parts)
    whole = attend((q, k, v, *kernels.dense_lists(1, 64, 64, 16, 16, causal=False)), options)
    np.testing.assert_allclose(merged, whole[0], atol=2e-6)
    np.testing.assert_allclose(total, whole[1], atol=2e-6)


def test_new_lists_do_not_recompile():
    arguments, options = made(TABLE["grouped heads"])
    traces = []

    @jax.jit
    def call(*arguments):
        traces.append(1)
        return kernels.block_attention(*arguments, **options)

    for seed in range(3):
        call(*arguments[:3], *made(TABLE["grouped heads"], seed)[0][3:])
    assert len(traces) == 1


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6))
def test_transposed_lists_equal_a_loop(seed):
    mask = np.random.default_rng(seed).random((2, 5, 7)) < 0.4
    idx, count = (np.asarray(x) for x in jax.jit(transpose_lists)(mask))
    for r, j in np.ndindex(2, 7):
        rows = np.flatnonzero(mask[r, :, j])
        assert list(idx[r, j, : count[r, j]]) == list(rows)
        assert set(idx[r, j, count[r, j] :]) <= ({rows[-1]} if rows.size else set(range(5)))


def test_bad_input_is_refused():
    (q, k, v, idx, count), options = made(TABLE["grouped heads"])
    call = functools.partial(kernels.block_attention, **options)
    with pytest.raises(ConfigError, match="expected one of auto"):
        call(q, k, v, idx, count, backend="cuda")
    for backend in ("tpu", "gpu"):
        with pytest.raises(ConfigError, match="on a machine with only cpu") as raised:
            call(q, k, v, idx, count, backend=backend)
        assert "\n" not in str(raised.value)
    with pytest.raises(ConfigError, match=r"idx\[0, 0, 0, 0\]: found block 9, expected 0 to 3"):
        call(q, k, v, idx.at[0, 0, 0, 0].set(9), count.at[0, 0, 0].set(1), debug=True)
    with pytest.raises(ConfigError, match=r"idx\[0, 0, 1\]: found a block twice"):
        call(q, k, v, idx.at[0, 0, 1].set(2), count.at[0, 0, 1].set(2), debug=True)
    with pytest.raises(ConfigError, match=r"count\[1, 0, 0\]: found 7, expected 0 to 3"):
        call(q, k, v, idx, count.at[1, 0, 0].set(7), debug=True)
    with pytest.raises(ConfigError, match="idx: found shape"):
        call(q, k, v, idx[:, :, :1], count[:, :, :1])
    with pytest.raises(ConfigError, match="H a multiple of Hkv"):
        call(q[:, :5], k, v, idx, count)
    with pytest.raises(ConfigError, match="powers of two"):
        kernels.block_attention(q, k, v, idx, count, bq=32, bk=24, backend="gpu", interpret=True)
    for name, blocks in (("bq", {"bq": 5, "bk": 16}), ("bk", {"bq": 16, "bk": 7})):
        lists = kernels.dense_lists(2, 64, 64, **blocks)
        lists = [jnp.repeat(x, 2, axis=1) for x in lists]
        with pytest.raises(ConfigError, match=f"{name}: found [57], expected a multiple of 8 on a TPU"):
            kernels.block_attention(q, k, v, *lists, **blocks, backend="tpu", interpret=True)
    with pytest.raises(ConfigError, match="at least 1"):
        kernels.block_attention(q, k, v, idx, count, bq=32, bk=0)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"q": (3, 6, 64, 16)}, r"q, k: found shapes \(3, .* expected \[B, H, T, D\], \[B, Hkv, S, D\]"),
        ({"k": (2, 2, 64, 8)}, r"q, k: found shapes .* \(2, 2, 64, 8\)"),
        ({"q": (2, 6, 64)}, "q, k: found shapes"),
        ({"v": (2, 2, 32, 16)}, r"v: found shape \(2, 2, 32, 16\) of float32, expected floating \(2, 2, 64, 16\)"),
        ({"v": (2, 1, 64, 16)}, "v: found shape"),
        (
            {"idx": jnp.zeros((2, 2, 2, 3))},
            r"idx: found .* of float32, expected integer \(2, 2, 2, 3\) or \(2, 6, 2, 3",
        ),
        ({"idx": jnp.zeros((1, 2, 2, 3), int)}, r"idx: found shape \(1, 2, 2, 3\)"),
        ({"idx": jnp.zeros((2, 2, 2, 0), int)}, r"idx: .* expected integer \(2, 2, 2, 1\)"),
        ({"count": (2, 1, 2)}, r"count: found shape \(2, 1, 2\)"),
        ({"count": (2, 2)}, r"count: found shape \(2, 2\)"),
        ({"kv_valid": jnp.ones((2, 63), bool)}, r"kv_valid: found .* expected bool \(2, 64\)"),
        ({"bq": 16.0}, "bq: found 16.0, expected a whole number of at least 1"),
        ({"bk": 0}, "bk: found 0"),
    ],
)
def test_what_does_not_fit_is_refused(change, match):
    """What a caller sees whose shapes nothing checks."""
    (q, k, v, idx, count), options = made(TABLE["grouped heads"])
    good = {"q": q, "k": k, "v": v, "idx": idx, "count": count, "kv_valid": None} | options
    check_blocks(**good)
    change = {n: jnp.zeros(x, good[n].dtype) if isinstance(x, tuple) else x for n, x in change.items()}
    with pytest.raises(ConfigError, match=match):
        check_blocks(**good | change)
