"""Decode attention: every implementation against the reference, from one table."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from jaxmeth import kernels
from jaxmeth.kernels.decode_attention import Override, gpu, tpu
from jaxmeth.kernels.decode_attention import _check as check_arrays
from jaxmeth.kernels.decode_attention.shapes import Static
from jaxmeth.types import ConfigError

BACKENDS = {
    "xla": {"backend": "xla"},
    "tpu": {"backend": "tpu", "interpret": True},
    "gpu": {"backend": "gpu", "interpret": True},
}
# name: batch, heads, kv heads, queries, slots, dim, width of the list (None = all), overridden, options
TABLE = {
    "all slots": (2, 6, 2, 1, 60, 16, None, False, {}),
    "listed blocks": (2, 6, 2, 1, 100, 64, 3, False, {}),
    "a few queries, dim 80": (1, 8, 1, 3, 64, 80, 2, False, {}),
    "override": (2, 3, 1, 2, 70, 16, None, True, {}),
    "override of listed blocks, soft cap": (1, 4, 4, 1, 70, 128, 4, True, {"softcap": 2.0}),
    "a list for each head": (2, 6, 2, 1, 100, 16, 3, False, {"lists": 6}),
    "a list for each head, a few queries, override": (1, 4, 2, 3, 70, 64, 4, True, {"lists": 4, "softcap": 2.0}),
    "odd: dim 65, 37 slots": (1, 2, 1, 1, 37, 65, 2, False, {}),
    "one slot": (1, 3, 1, 1, 1, 16, 1, False, {}),
}


def made(row, seed=0, **more):
    batch, heads, kv_heads, queries, slots, dim, width, overridden, options = row
    r = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(r.normal(size=shape), jnp.float32)

    kv = (batch, kv_heads, slots, dim)
    options = options | {"bk": 16, "kv_valid": jnp.asarray(r.random((batch, slots)) < 0.8)}
    lists = options.pop("lists", kv_heads)
    if width is not None:
        order = np.sort(np.argsort(r.random((batch, lists, -(-slots // 16))))[..., :width], -1)
        options |= {"idx": jnp.asarray(order, jnp.int32)}
        options |= {"count": jnp.asarray(r.integers(0, order.shape[-1] + 1, (batch, lists)), jnp.int32)}
    if overridden:
        options["override"] = Override(normal(*kv), normal(*kv), jnp.asarray(r.random((batch, slots)) < 0.5))
    return (normal(batch, heads, queries, dim), normal(*kv), normal(*kv)), options | more


def attend(arguments, options, **how):
    static = {"bk", "softcap", "scale"}
    call = functools.partial(
        kernels.decode_attention, **{n: x for n, x in options.items() if n in static}, **how, return_lse=True
    )
    return jax.jit(call)(*arguments, **{n: x for n, x in options.items() if n not in static})


@pytest.mark.parametrize("row", TABLE)
@pytest.mark.parametrize("backend", BACKENDS)
def test_equals_the_reference(backend, row):
    arguments, options = made(TABLE[row])
    out, lse = attend(arguments, options, **BACKENDS[backend])
    expected, expected_lse = attend(arguments, options, backend="reference")
    np.testing.assert_allclose(out, expected, atol=2e-6)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-6, atol=2e-6)


@functools.cache
def overridden(backend):
    """Arguments whose list leaves blocks out, and the compiled call."""
    arguments, options = made(TABLE["override"], 1)
    idx, count = jnp.asarray([[[0, 2, 1]], [[4, 1, 1]]]), jnp.asarray([[2], [1]])
    call = jax.jit(functools.partial(kernels.decode_attention, bk=16, **BACKENDS.get(backend, {"backend": backend})))
    return arguments, options["kv_valid"], options["override"], functools.partial(call, idx=idx, count=count)


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_reaches_nothing_from_where_it_takes_no_part(backend, bad):
    (q, k, v), valid, (new_k, new_v, use), call = overridden(backend)
    listed = np.zeros((2, 80), bool)
    listed[0, :16] = listed[0, 32:48] = listed[1, 64:] = True
    part = listed[:, :70] & valid
    cached, replaced = ((part & x)[:, None, :, None] for x in (~use, use))
    assert (valid & ~part).any()
    assert (~valid & listed[:, :70] & use).any()
    noisy = [jnp.where(cached, x, bad) for x in (k, v)]
    new = Override(*(jnp.where(replaced, x, bad) for x in (new_k, new_v)), use)
    clean = call(q, k, v, kv_valid=valid, override=Override(new_k, new_v, use))
    np.testing.assert_array_equal(call(q, *noisy, kv_valid=valid, override=new), clean)
    at = tuple(np.argwhere(part & use)[0])
    new = Override(new.k, new.v.at[at[0], :, at[1]].set(bad), use)
    reached = call(q.at[1 - at[0], 0, 0].set(bad), *noisy, kv_valid=valid, override=new)
    bad_rows = np.zeros(q.shape[:3], bool)
    bad_rows[at[0]] = bad_rows[1 - at[0], 0, 0] = True
    np.testing.assert_array_equal(~np.isfinite(reached).all(-1), bad_rows)
    np.testing.assert_array_equal(reached[~bad_rows], clean[~bad_rows])


@pytest.mark.parametrize("backend", BACKENDS)
def test_low_precision_sums_in_float32(backend):
    arguments, options = made(TABLE["all slots"])
    low = [x.astype(jnp.bfloat16) for x in arguments]
    expected, _ = attend([x.astype(jnp.float32) for x in low], options, backend="reference")
    out, lse = attend(low, options, **BACKENDS[backend])
    assert out.dtype == jnp.bfloat16
    assert lse.dtype == jnp.float32
    np.testing.assert_allclose(out.astype(jnp.float32), expected, atol=1e-2)


@pytest.mark.usefixtures("x64")
def test_float64_stays_float64():
    arguments, options = made(TABLE["listed blocks"])
    wide = [x.astype(jnp.float64) for x in arguments]
    (out, lse), expected = (attend(wide, options, backend=name) for name in ("xla", "reference"))
    assert out.dtype == lse.dtype == jnp.float64
    for found, exact in zip((out, lse), expected, strict=True):
        np.testing.assert_allclose(found, exact, atol=1e-14)


def test_vmap_equals_a_loop():
    arguments, options = made(TABLE["listed blocks"])
    arrays = (*arguments, *(options[n] for n in ("kv_valid", "idx", "count")))

    def one(*arrays):
        q, k, v, valid, idx, count = (x[None] for x in arrays)
        return kernels.decode_attention(q, k, v, kv_valid=valid, idx=idx, count=count, bk=16)[0]

    np.testing.assert_allclose(jax.jit(jax.vmap(one))(*arrays), attend(arguments, options)[0], atol=1e-6)


def test_tpu_reads_nothing_unwritten_and_does_not_race(capfd):
    """Uninitialised memory is NaN, and the interpreter prints any race it finds."""
    arguments, options = made(TABLE["override"], 2, idx=jnp.asarray([[[0, 2, 4]], [[3, 1, 1]]]))
    options["count"] = jnp.asarray([[3], [2]])
    how = {"backend": "tpu", "interpret": pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True)}
    try:
        found = jax.block_until_ready(attend(arguments, options, **how))
    finally:
        pltpu.reset_tpu_interpret_mode_state()
    for x, y in zip(found, attend(arguments, options, backend="reference"), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-6)
    assert "RACE" not in "".join(capfd.readouterr()).upper()


@pytest.mark.parametrize("backend", ["tpu", "gpu"])
def test_a_gradient_of_pallas_is_refused(backend):
    arguments, options = made(TABLE["one slot"])
    call = functools.partial(kernels.decode_attention, **options, **BACKENDS[backend])
    with pytest.raises(ConfigError, match=f"backend: found '{backend}' where a gradient is taken"):
        jax.grad(lambda q: call(q, *arguments[1:]).sum())(arguments[0])


@functools.cache
def compiled(backend):
    """Compiled once for each group size: lists, counts, overrides and which slots are real are data."""
    return jax.jit(functools.partial(kernels.decode_attention, bk=16, return_lse=True, backend=backend))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([1, 3, 8]), st.booleans(), st.integers(0, 70))
def test_random_lists(seed, group, whole, length):
    arguments, options = made((2, group, 1, 2, 70, 16, 4, True, {}), seed)
    real = options["kv_valid"] | (seed % 2 == 0)
    options |= {"kv_valid": real & (jnp.arange(70) < length)[None]}
    if whole:
        options["count"] = jnp.full_like(options["count"], 4)
    del options["bk"]
    found, expected = (compiled(name)(*arguments, **options) for name in ("xla", "reference"))
    np.testing.assert_allclose(found[0], expected[0], atol=2e-6)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-6, atol=2e-6)


def test_the_reference_is_a_loop():
    (q, k, v), options = made(TABLE["override of listed blocks, soft cap"], 3)
    out, lse = attend((q, k, v), options, backend="reference")
    new, valid = options["override"], np.asarray(options["kv_valid"])
    for h in range(4):
        blocks = np.asarray(options["idx"])[0, h, : options["count"][0, h]]
        slots = [s for b in blocks for s in range(b * 16, min(b * 16 + 16, 70)) if valid[0, s]]
        rows = [(new.k, new.v) if new.use[0, s] else (k, v) for s in slots]
        keys, values = (np.array([pair[i][0, h, s] for pair, s in zip(rows, slots, strict=True)]) for i in (0, 1))
        scores = 2 * np.tanh(keys.reshape(-1, 128) @ np.asarray(q[0, h, 0]) / 128**0.5 / 2)
        p = np.exp(scores)
        np.testing.assert_allclose(lse[0, h, 0], np.log(p.sum()) if slots else -np.inf, rtol=1e-5)
        np.testing.assert_allclose(out[0, h, 0], p @ values / p.sum() if slots else np.zeros(128), atol=2e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_slot_gives_zero(backend):
    arguments, options = made(TABLE["listed blocks"])
    out, lse = attend(arguments, options | {"kv_valid": jnp.zeros((2, 100), bool)}, **BACKENDS[backend])
    assert not np.any(out)
    assert np.isneginf(lse).all()


@pytest.mark.parametrize("lists", [2, 6])
def test_equals_block_attention_on_the_last_query(lists):
    (q, k, v), _ = made((1, 6, 2, 1, 80, 16, None, False, {}))
    idx = jnp.asarray([[[0, 2, 4], [1, 3, 3], [0, 4, 4], [1, 2, 3], [2, 2, 2], [0, 1, 3]]])[:, :lists]
    count = jnp.asarray([[3, 2, 2, 3, 1, 0]])[:, :lists]
    few = kernels.decode_attention(q, k, v, idx=idx, count=count, bk=16)
    block = kernels.block_attention(q, k, v, idx[:, :, None], count[:, :, None], bq=1, bk=16, start=79)
    np.testing.assert_allclose(few, block, atol=2e-6)


@pytest.mark.parametrize("overridden", [False, True])
@pytest.mark.parametrize(("platform", "call"), [("tpu", "tpu_custom_call"), ("cuda", "__gpu$xla.gpu.triton")])
def test_lowers_without_the_hardware(platform, call, overridden):
    shape = jax.ShapeDtypeStruct
    for dim, dtype, heads in ((64, jnp.bfloat16, 2), (80, jnp.float32, 6), (128, jnp.float32, 2)):
        q, k = shape((1, heads, 3, dim), dtype), shape((1, 2, 256, dim), dtype)
        lists = shape((1, heads, 2), jnp.int32), shape((1, heads), jnp.int32), shape((1, 256), bool)
        override = Override(k, k, shape((1, 256), bool)) if overridden else None
        function = {"tpu": tpu, "cuda": gpu}[platform].forward
        traced = jax.jit(functools.partial(function, Static(64, 0.1, None))).trace(q, k, k, *lists, override)
        assert traced.lower(lowering_platforms=(platform,)).as_text().count(call) == 1


def test_bad_input_is_refused():
    (q, k, v), options = made(TABLE["listed blocks"])
    with pytest.raises(ConfigError, match="expected both or neither"):
        kernels.decode_attention(q, k, v, idx=options["idx"])
    with pytest.raises(ConfigError, match="on a machine with only cpu"):
        kernels.decode_attention(q, k, v, backend="tpu")
    lists = {"idx": options["idx"].at[0, 0, 0].set(7), "count": options["count"].at[0, 0].set(1)}
    with pytest.raises(ConfigError, match="expected 0 to 6"):
        kernels.decode_attention(q, k, v, **lists, bk=16, debug=True)
    with pytest.raises(ConfigError, match="bk: found 12, expected a multiple of 8 on a TPU"):
        kernels.decode_attention(q, k, v, bk=12, backend="tpu", interpret=True)
    with pytest.raises(ConfigError, match="H a multiple of Hkv"):
        kernels.decode_attention(q[:, :5], k, v)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"q": (1, 4, 1, 128), "k": (2, 4, 70, 128)}, "q, k: found shapes"),
        ({"v": (1, 4, 35, 128)}, r"v: found shape \(1, 4, 35, 128\)"),
        ({"idx": (1, 4, 0)}, r"idx: found shape \(1, 4, 0\) .* expected integer \(1, 4, 1\)"),
        ({"idx": (1, 8, 4)}, r"idx: found shape \(1, 8, 4\) .* expected integer \(1, 4, 4\)$"),
        ({"idx": jnp.zeros((1, 4, 4))}, "idx: found shape .* of float32"),
        ({"count": (1, 8)}, "count: found shape"),
        ({"kv_valid": (1, 71)}, "kv_valid: found shape"),
        ({"bk": 16.0}, "bk: found 16.0, expected a whole number"),
        ({"override": Override(jnp.zeros((1, 4, 69, 128)), None, None)}, r"override.k: found shape \(1, 4, 69, 128\)"),
    ],
)
def test_what_does_not_fit_is_refused(change, match):
    """What a caller sees whose shapes nothing checks."""
    (q, k, v), options = made(TABLE["override of listed blocks, soft cap"])
    good = {"q": q, "k": k, "v": v} | options
    del good["softcap"]
    check_arrays(**good)
    shape = {n for n, x in change.items() if type(x) is tuple}
    change = {n: jnp.zeros(x, good[n].dtype) if n in shape else x for n, x in change.items()}
    with pytest.raises(ConfigError, match=match):
        check_arrays(**good | change)
