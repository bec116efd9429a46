"""Rounding weights and activations: golden values, the identities between the methods, degenerate input."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmeth import quant
from jaxmeth.quant import qtensor, rounding
from jaxmeth.quant.rounding import _grid
from jaxmeth.types import ConfigError


@pytest.fixture(scope="module")
def stored():
    from conftest import GOLDEN

    return np.load(GOLDEN / "09-perq" / "quantizers.npz")


def case(stored, name):
    return {k[3:]: stored[k] for k in stored.files if k.startswith(name)}


def near(a, b, tolerance=1e-6):
    np.testing.assert_allclose(a, b, atol=tolerance * np.abs(b).max(), rtol=0)


@pytest.mark.parametrize("name", ["c0", "c1"])
def test_golden_activations(stored, name):
    c = case(stored, name)
    x = jnp.asarray(c["X"])
    q = quant.quantize_act(x)
    near(quant.dequantize(q), c["act_dq"])
    used = np.abs(c["X"]).max(1) > 0
    near(q.scale[used], c["act_scale"][used])
    np.testing.assert_array_equal(q.zero[used], c["act_zp"][used])
    assert q.q.dtype == jnp.uint8
    np.testing.assert_array_equal(quant.dequantize(q), quant.fake_quantize_act(x, 4))


@pytest.mark.parametrize("name", ["c0", "c1"])
def test_golden_weights(stored, name):
    c = case(stored, name)
    w = jnp.asarray(c["W"])
    q = quant.quantize_weight(w)
    near(quant.dequantize(q), c["w_rtn"])
    used = np.abs(c["W"]).max(1) > 0
    near(q.scale[used], c["w_rtn_scale"][used])
    assert q.q.dtype == jnp.int8
    assert int(jnp.abs(q.q).max()) == 7
    loss = lambda dq: float(np.square(c["W"] - np.asarray(dq)).sum())  # noqa: E731
    ours = loss(quant.dequantize(quant.quantize_weight(w, scale="mse")))
    assert ours <= loss(c["w_rtn"])
    assert ours <= 1.05 * loss(c["w_rtn_mse"])


def problem(c, dtype):
    """The stored statistics, checked against their definition."""
    x, xq = (np.asarray(c[k], np.float64) for k in ("X", "act_dq"))
    near(xq.T @ xq / len(x), c["H"], 1e-12)
    near(x.T @ xq / len(x), c["G"], 1e-12)
    return (jnp.asarray(c[k], dtype) for k in ("W", "H", "G"))


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("name", ["c0", "c1"])
def test_golden_second_order_in_float64(stored, name, act_order, x64):
    c = case(stored, name)
    w, h, g = problem(c, jnp.float64)
    suffix = f"ao{int(act_order)}"
    near(quant.dequantize(quant.quantize_weight(w)), c["rtn64"], 1e-12)
    near(quant.dequantize(quant.gptq(w, h, act_order=act_order)), c[f"gptq_{suffix}"], 1e-12)
    near(quant.dequantize(quant.qronos(w, h, g, act_order=act_order)), c[f"qronos_{suffix}"], 1e-12)


@pytest.mark.parametrize("name", ["c0", "c1"])
def test_golden_second_order_in_float32(stored, name):
    c = case(stored, name)
    w, h, g = problem(c, jnp.float32)
    found = [quant.quantize_weight(w)]
    found += [quant.gptq(w, h, act_order=a) for a in (False, True)]
    found += [quant.qronos(w, h, g, act_order=a) for a in (False, True)]
    names = ("rtn64", "gptq_ao0", "gptq_ao1", "qronos_ao0", "qronos_ao1")
    for q, name_, error in zip(found, names, c["relerr"], strict=True):
        dq = np.asarray(quant.dequantize(q))
        same = np.isclose(dq, c[name_], atol=1e-5 * np.abs(c["W"]).max(), rtol=0)
        assert same.mean() >= 0.99, name_
        assert abs(float(rounding.relative_error(w, q, jnp.asarray(c["X"]), jnp.asarray(c["act_dq"]))) - error) <= 1e-3


def made(seed, out=10, n=24, tokens=60, dead=()):
    keys = jax.random.split(jax.random.key(seed), 3)
    x = jax.random.normal(keys[0], (tokens, n)) @ jax.random.normal(keys[1], (n, n))
    for column in dead:
        x = x.at[:, column].set(0)
    return jax.random.normal(keys[2], (out, n)), x


@pytest.mark.parametrize("dead", [(), (5,), (0, 7)])
@pytest.mark.parametrize("act_order", [False, True])
def test_qronos_without_activation_error_is_gptq(dead, act_order, x64):
    w, x = made(0, dead=dead)
    h = x.T @ x / len(x)
    lam = 1e-3 * jnp.linalg.eigvalsh(h)[-1]
    settled = jnp.where(jnp.diag(h) == 0, 1, jnp.diag(h))
    ours = quant.qronos(w, h, h, act_order=act_order)
    theirs = quant.gptq(w, h, damp=float(lam / settled.mean()), act_order=act_order)
    np.testing.assert_array_equal(ours.q, theirs.q)
    assert not np.asarray(ours.q)[:, list(dead)].any()


def test_transposing_the_cross_product_matters(x64):
    w, x = made(1)
    xq = quant.dequantize(quant.quantize_act(x))
    h, g = xq.T @ xq / len(x), x.T @ xq / len(x)
    right, wrong = quant.qronos(w, h, g), quant.qronos(w, h, g.T)
    assert rounding.relative_error(w, right, x, xq) < rounding.relative_error(w, wrong, x, xq)


def test_each_method_improves_on_the_one_before(x64):
    w, x = made(2, out=40, n=130, tokens=400)
    xq = quant.dequantize(quant.quantize_act(x))
    h, g = xq.T @ xq / len(x), x.T @ xq / len(x)
    errors = [
        float(rounding.relative_error(w, q, x, xq))
        for q in (quant.quantize_weight(w), quant.gptq(w, h), quant.qronos(w, h, g))
    ]
    assert errors[0] > errors[1] > errors[2]


def naive_gptq(w, h, damp, bits=4):
    """The recursion as written, one column at a time over the whole rest."""
    w, h = np.array(w, np.float64), np.array(h, np.float64)
    top = 2 ** (bits - 1) - 1
    s = np.abs(w).max(1) / top
    h += damp * np.diag(h).mean() * np.eye(len(h))
    upper = np.linalg.cholesky(np.linalg.inv(h)).T
    codes = np.zeros(w.shape)
    for t in range(w.shape[1]):
        codes[:, t] = np.clip(np.round(w[:, t] / s), -top, top)
        e = (w[:, t] - codes[:, t] * s) / upper[t, t]
        w[:, t:] -= e[:, None] * upper[t, t:][None]
    return codes


@pytest.mark.parametrize("bits", [2, 3, 8])
def test_lazy_updates_are_the_recursion(bits, x64):
    w, x = made(3, n=150, tokens=300)  # more than two runs of columns, the last one incomplete
    h = x.T @ x / len(x)
    found = quant.gptq(w, h, bits=bits, act_order=False)
    np.testing.assert_array_equal(found.q, naive_gptq(w, h, 0.01, bits))


def test_groups_share_scales_by_original_index():
    w, x = made(4)
    h = x.T @ x / len(x)
    nearest = quant.quantize_weight(w, group=6)
    assert nearest.scale.shape == (10, 4)
    for j in range(4):
        alone = quant.quantize_weight(w[:, 6 * j : 6 * j + 6])
        np.testing.assert_array_equal(nearest.q[:, 6 * j : 6 * j + 6], alone.q)
        np.testing.assert_allclose(quant.dequantize(nearest)[:, 6 * j : 6 * j + 6], quant.dequantize(alone), rtol=1e-6)
    np.testing.assert_array_equal(quant.gptq(w, h, group=6).scale, nearest.scale)
    with pytest.raises(ConfigError, match="group: found 7"):
        quant.quantize_weight(w, group=7)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("width", [1, 6, 7])
def test_packing_loses_nothing(bits, width):
    w = jax.random.normal(jax.random.key(0), (2, 3, width))
    q = jax.vmap(lambda w: quant.quantize_weight(w, bits))(w)
    packed = quant.pack(q)
    np.testing.assert_array_equal(quant.dequantize(packed), quant.dequantize(q))
    np.testing.assert_array_equal(quant.unpack(packed).q, q.q)
    assert packed.q.shape[-1] == (-(-width // 2) if bits <= 4 else width)
    assert packed.q.dtype.itemsize == 1
    assert quant.pack(packed) is packed


def test_the_leaf_is_what_it_says():
    """A stacked leaf under scan, with rotated and rounded inputs, equals the formula."""
    w = jax.random.normal(jax.random.key(0), (3, 10, 48))
    x = jax.random.normal(jax.random.key(1), (5, 48))
    q = quant.pack(jax.vmap(quant.quantize_weight)(w)).replace(rotate=12, act_bits=4)
    _, y = jax.lax.scan(lambda c, leaf: (c, leaf.matmul(x)), 0, q)
    inputs = quant.dequantize(quant.quantize_act(quant.block_hadamard(x, 12)))
    expected = jnp.einsum("ti,loi->lto", inputs, quant.dequantize(q), precision="highest")
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)


KINDS = [(4, 16, 4), (8, None, 8), (4, 256, 4), (3, 16, None), (4, None, None)]


@pytest.mark.parametrize(("bits", "rotate", "act_bits"), KINDS)
@pytest.mark.parametrize("backend", ["auto", "tpu", "gpu"])
def test_kernels_are_the_formula_with_its_gradient(backend, bits, rotate, act_bits):
    keys = jax.random.split(jax.random.key(0), 3)
    x, g = jax.random.normal(keys[0], (2, 3, 256)), jax.random.normal(keys[1], (2, 3, 10))
    leaf = quant.pack(quant.quantize_weight(jax.random.normal(keys[2], (10, 256)), bits))
    leaf = leaf.replace(rotate=rotate, act_bits=act_bits)

    def formula(x, scale):
        inputs = x if rotate is None else quant.block_hadamard(x, rotate)
        inputs = inputs if act_bits is None else quant.fake_quantize_act(inputs, act_bits)
        codes = quant.unpack(leaf).q.astype(x.dtype)
        return jnp.einsum("bti,oi->bto", inputs, codes * scale, precision="highest")

    def ours(x, scale):
        return qtensor.by_kernels(leaf.replace(scale=scale), x, backend, backend != "auto")

    (expected, pull), (found, mine) = (jax.vjp(f, x, leaf.scale) for f in (formula, ours))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-5 * np.abs(expected).max())
    for a, b in zip(mine(g), pull(g), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * np.abs(b).max())
    if backend == "auto":
        np.testing.assert_array_equal(leaf.matmul(x), found)


@pytest.mark.parametrize(("platform", "call"), [("tpu", "tpu_custom_call"), ("cuda", "gpu.triton")])
def test_an_accelerator_runs_both_kernels(platform, call, monkeypatch):
    leaf = quant.pack(quant.quantize_weight(jnp.ones((128, 256)))).replace(rotate=32, act_bits=4)
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    traced = jax.jit(leaf.matmul).trace(jnp.ones((4, 16, 256), jnp.bfloat16))
    monkeypatch.undo()
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert text.count(call) == 2


def test_float64_stays_float64(x64):
    leaf = quant.quantize_weight(jax.random.normal(jax.random.key(0), (3, 16), jnp.float64)).replace(rotate=16)
    x = jax.random.normal(jax.random.key(1), (2, 16), jnp.float64)
    y = leaf.matmul(x)
    assert y.dtype == jnp.float64
    np.testing.assert_allclose(y, quant.block_hadamard(x, 16) @ quant.dequantize(leaf).T, rtol=1e-12)


def test_gradients_go_straight_through():
    x = jax.random.normal(jax.random.key(1), (5, 16))
    w = jax.random.normal(jax.random.key(2), (3, 16))
    leaf = quant.quantize_weight(w).replace(act_bits=8)
    gradient = jax.grad(lambda x: leaf.matmul(x).sum())(x)
    np.testing.assert_allclose(
        gradient, jnp.broadcast_to(quant.dequantize(leaf).sum(0)[None], x.shape), rtol=0.2, atol=0.1
    )
    through = jax.grad(lambda w: (quant.fake_quantize_weight(w, 4) * w).sum())(w)
    assert np.isfinite(through).all()
    assert np.abs(through).max() > 0
    np.testing.assert_allclose(quant.fake_quantize_weight(w, 4), quant.dequantize(quant.quantize_weight(w)), rtol=1e-6)


def test_degenerate_input():
    zero = quant.quantize_act(jnp.zeros((2, 6)))
    np.testing.assert_array_equal(quant.dequantize(zero), 0)
    np.testing.assert_array_equal(quant.dequantize(quant.quantize_weight(jnp.zeros((2, 6)))), 0)
    huge = jnp.ones((1, 6)).at[0, 2].set(1e30)
    for q in (quant.quantize_act(huge), quant.quantize_weight(huge)):
        np.testing.assert_allclose(quant.dequantize(q), jnp.zeros((1, 6)).at[0, 2].set(1e30), rtol=1e-6)
    # A range beyond float32 and weights without rows or columns.
    wide = quant.dequantize(quant.quantize_act(jnp.asarray([[3e38, -3e38, 0.0]])))
    assert np.isfinite(wide).all()
    for shape in ((0, 4), (3, 0)):
        assert quant.dequantize(quant.quantize_weight(jnp.ones(shape))).shape == shape
    one = jnp.asarray([[3.0]])
    for q in (quant.quantize_act(one), quant.quantize_weight(one), quant.gptq(one, one), quant.qronos(one, one, one)):
        np.testing.assert_allclose(quant.dequantize(q), one, rtol=1e-6)
    np.testing.assert_array_equal(quant.gptq(one, jnp.zeros((1, 1))).q, 0)
    w, x = made(5, tokens=1)
    single = x.T @ x
    for q in (quant.gptq(w, single), quant.qronos(w, single, single)):
        assert np.isfinite(quant.dequantize(q)).all()
    low = quant.quantize_act(jnp.ones((2, 6), jnp.bfloat16))
    assert low.scale.dtype == jnp.float32
    assert quant.fake_quantize_act(jnp.ones((2, 6), jnp.bfloat16), 4).dtype == jnp.bfloat16
    assert quant.quantize_act(jnp.zeros((0, 6))).q.shape == (0, 6)


@pytest.mark.parametrize("bits", [1, 9, 0, -1])
def test_bits_are_checked(bits):
    w = jnp.ones((2, 4))
    for call in (quant.quantize_weight, quant.fake_quantize_weight, quant.quantize_act, quant.fake_quantize_act):
        with pytest.raises(ConfigError, match=rf"bits: found {bits}, expected 2 to 8"):
            call(w, bits)
    with pytest.raises(ConfigError, match=rf"bits: found {bits}, expected 2 to 8"):
        quant.gptq(w, jnp.eye(4), bits=bits)


def test_what_is_not_finite_or_does_not_fit_is_refused():
    w, h = jnp.ones((2, 4)), jnp.eye(4)
    bad = w.at[0, 1].set(jnp.nan)
    for value in (jnp.nan, jnp.inf):
        with pytest.raises(ConfigError, match="x: found NaN or infinity"):
            quant.quantize_act(w.at[0, 1].set(value))
    for call in (
        lambda: quant.gptq(w, -h),
        lambda: quant.gptq(w, h, damp=float("nan")),
        lambda: quant.qronos(w, -h, h),
        lambda: quant.qronos(w, h, h, alpha=-2.0),
    ):
        with pytest.raises(ConfigError, match=r"H: found no Cholesky factor with (damp|alpha)"):
            call()
    with pytest.raises(ConfigError, match="w: found NaN"):
        quant.quantize_weight(bad)
    with pytest.raises(ConfigError, match="w: found NaN"):
        quant.gptq(bad, h)
    with pytest.raises(ConfigError, match="H: found NaN"):
        quant.gptq(w, h.at[0, 0].set(jnp.inf))
    with pytest.raises(ConfigError, match="G: found NaN"):
        quant.qronos(w, h, h.at[0, 0].set(jnp.nan))
    with pytest.raises(ConfigError, match="H: found shape"):
        quant.gptq(w, jnp.eye(3))
    with pytest.raises(ConfigError, match="G: found shape"):
        quant.qronos(w, h, jnp.eye(3))
    with pytest.raises(ConfigError, match=r"w: found shape \(6,\), expected \[out, in\]"):
        inspect.unwrap(_grid)(jnp.ones(6), 4, None)
    with pytest.raises(ConfigError, match="scale: found 'best'"):
        quant.quantize_weight(w, scale="best")
