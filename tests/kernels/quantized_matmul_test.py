"""K6: every backend against the definition, and lowering for accelerators on a machine without one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jaxmeth import quant
from jaxmeth.kernels.hadamard_quantize import hadamard_quantize
from jaxmeth.kernels.quantized_matmul import quantized_matmul
from jaxmeth.kernels.quantized_matmul.pallas import gpu, tpu
from jaxmeth.types import ConfigError

# rows, K, N, group
SHAPES = [(1, 64, 8, None), (5, 96, 130, None), (20, 37, 16, None), (3, 128, 20, 32), (17, 600, 9, None)]
BACKENDS = ["xla", "tpu", "gpu"]


def made(shape, bits):
    rows, k, n, group = shape
    keys = jax.random.split(jax.random.key(0))
    weight = quant.quantize_weight(jax.random.normal(keys[0], (n, k)), bits, group=group)
    return jax.random.normal(keys[1], (rows, k)), quant.pack(weight)


def run(backend, x, w, **more):
    return quantized_matmul(x, w.q, w.scale, backend=backend, interpret=backend in ("tpu", "gpu"), **more)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bits", [4, 8])
def test_backends_are_the_definition(backend, shape, bits):
    x, w = made(shape, bits)
    expected = run("reference", x, w)
    np.testing.assert_allclose(expected, x @ quant.dequantize(w).T, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(run(backend, x, w), expected, rtol=1e-5, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bits", [4, 8])
def test_codes_times_codes_are_exact(backend, bits):
    """Integers in, integers summed: equal to the last bit, but for the scales."""
    x, w = made((18, 64, 20, None), bits)
    codes, scale, _ = hadamard_quantize(x, quant.hadamard(16), backend="xla")
    found = quantized_matmul(codes, w.q, w.scale, x_scale=scale, backend=backend, interpret=backend in ("tpu", "gpu"))
    whole = np.asarray(codes, np.int64) @ np.asarray(quant.unpack(w).q, np.int64).T
    expected = whole * np.asarray(w.scale, np.float64).T * np.asarray(scale, np.float64)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bfloat16(backend):
    x, w = made((16, 128, 128, None), 4)
    low = x.astype(jnp.bfloat16)
    expected = run("reference", low, w)
    np.testing.assert_allclose(run(backend, low, w), expected, atol=1e-4 * np.abs(expected).max())


def test_no_read_of_unwritten_memory_and_no_race():
    x, w = made((5, 70, 12, None), 4)
    params = pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True)
    found = quantized_matmul(x, w.q, w.scale, backend="tpu", interpret=params)
    np.testing.assert_allclose(found, run("reference", x, w), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int8])
@pytest.mark.parametrize(("kernel", "platform", "call"), [(tpu, "tpu", "tpu_custom_call"), (gpu, "cuda", "gpu.triton")])
def test_lowering(kernel, platform, call, packed, dtype):
    x, scale = jnp.zeros((20, 1536), dtype), jnp.ones((576, 1))
    q = jnp.zeros((576, 768), jnp.uint8) if packed else jnp.zeros((576, 1536), jnp.int8)
    text = jax.jit(kernel).trace(x, q, scale).lower(lowering_platforms=(platform,)).as_text()
    assert call in text


def test_degenerate_and_refused():
    x, w = made((1, 64, 8, None), 4)
    assert quantized_matmul(x[:0], w.q, w.scale).shape == (0, 8)
    with pytest.raises(ConfigError, match="q: found"):
        quantized_matmul(x[:, :60], w.q, w.scale)
    with pytest.raises(ConfigError, match="scale: found"):
        quantized_matmul(x, w.q, w.scale[:7])
    with pytest.raises(ConfigError, match="backend: found 'gpu'"):
        quantized_matmul(x, w.q, w.scale, backend="gpu")
    with pytest.raises(ConfigError, match="groups of 8"):
        run("tpu", *made((1, 64, 8, 8), 4))
