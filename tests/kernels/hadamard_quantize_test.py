"""K5: every backend against the definition, and lowering for accelerators on a machine without one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jaxmeth import quant
from jaxmeth.kernels.hadamard_quantize import _half_even, hadamard_quantize
from jaxmeth.kernels.hadamard_quantize.pallas import gpu, tpu
from jaxmeth.types import ConfigError

# rows, width, block, bits
SHAPES = [(1, 32, 16, 4), (5, 96, 16, 4), (20, 256, 128, 4), (33, 128, 64, 7), (16, 512, 256, 2)]
BACKENDS = ["xla", "tpu", "gpu"]


def run(backend, x, h, bits, **more):
    return hadamard_quantize(x, h, bits=bits, backend=backend, interpret=backend in ("tpu", "gpu"), **more)


def compare(found, expected, x, h):
    """Codes agree but where the sums' last bits tip a rounding; the value is never off by more than half a step."""
    codes, scale, zero = (np.asarray(a, np.float64) for a in found)
    np.testing.assert_allclose(scale, expected[1], rtol=1e-5)
    assert np.abs(zero - np.asarray(expected[2])).max() <= 1
    assert (codes == np.asarray(expected[0])).mean() > 0.98
    whole = np.kron(np.eye(x.shape[1] // h.shape[0]), np.asarray(h, np.float64))
    assert (np.abs(codes * scale - np.asarray(x, np.float64) @ whole) <= 1.001 * scale).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_backends_are_the_definition(backend, shape, dtype):
    rows, width, block, bits = shape
    x = jax.random.normal(jax.random.key(0), (rows, width)).astype(dtype)
    h = quant.hadamard(block)
    compare(run(backend, x, h, bits), run("reference", x, h, bits), x.astype(jnp.float32), h)


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_it_is_the_library_s_quantiser(backend):
    x = jax.random.normal(jax.random.key(1), (16, 64)).at[3].set(0)
    codes, scale, zero = run(backend, x, quant.hadamard(16), 4)
    expected = quant.quantize_act(quant.block_hadamard(x, 16))
    same = codes.astype(jnp.float32) + zero == expected.q.astype(jnp.float32)
    assert same.mean() > 0.98
    np.testing.assert_allclose(scale, expected.scale, rtol=1e-5)
    np.testing.assert_array_equal(codes[3], 0)


def test_rounding_is_half_to_even():
    x = jnp.asarray([-2.5, -1.5, -0.5, 0.0, 0.4999, 0.5, 1.5, 2.5, 7.3, -7.7])
    np.testing.assert_array_equal(_half_even(x), jnp.round(x))


def test_a_block_that_is_no_power_of_two():
    x, h = jax.random.normal(jax.random.key(2), (4, 48)), quant.hadamard(12)
    compare(run("tpu", x, h, 4), run("reference", x, h, 4), x, h)
    with pytest.raises(ConfigError, match="found a block of 12"):
        run("gpu", x, h, 4)


def test_no_read_of_unwritten_memory_and_no_race():
    x, h = jax.random.normal(jax.random.key(3), (20, 64)), quant.hadamard(16)
    params = pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True)
    found = hadamard_quantize(x, h, backend="tpu", interpret=params)
    compare(found, run("reference", x, h, 4), x, h)


@pytest.mark.parametrize(("kernel", "platform", "call"), [(tpu, "tpu", "tpu_custom_call"), (gpu, "cuda", "gpu.triton")])
def test_lowering(kernel, platform, call):
    x, h = jnp.zeros((20, 1536), jnp.bfloat16), quant.hadamard(32)
    text = jax.jit(lambda x, h: kernel(x, h, 4)).trace(x, h).lower(lowering_platforms=(platform,)).as_text()
    assert call in text


def test_degenerate_and_refused():
    h = quant.hadamard(16)
    assert hadamard_quantize(jnp.zeros((0, 32)), h)[0].shape == (0, 32)
    with pytest.raises(ConfigError, match="bits: found 8"):
        hadamard_quantize(jnp.zeros((1, 32)), h, bits=8)
    with pytest.raises(ConfigError, match="h: found shape"):
        hadamard_quantize(jnp.zeros((1, 33)), h)
    with pytest.raises(ConfigError, match="backend: found 'tpu'"):
        hadamard_quantize(jnp.zeros((1, 32)), h, backend="tpu")
