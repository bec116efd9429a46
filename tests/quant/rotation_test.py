"""Hadamard matrices, block rotations and channel orders: golden values and invariants."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmeth import quant
from jaxmeth.quant.hadamard import by_butterfly, by_factors, by_matmul, check_divides
from jaxmeth.quant.permute import _check as check_order
from jaxmeth.types import ConfigError

CASES = ["c0", "c1", "c2", "c3", "c4"]
# Widths of released models beside the orders the definition names.
ORDERS = (1, 2, 12, 16, 20, 24, 28, 36, 40, 64, 72, 80, 112, 144, 160, 296, 576, 1536)


@pytest.fixture(scope="module")
def stored():
    from conftest import GOLDEN

    return np.load(GOLDEN / "09-perq" / "permute_rotate.npz")


def case(stored, name):
    return {k[3:]: stored[k] for k in stored.files if k.startswith(name)}


@pytest.mark.parametrize("n", ORDERS)
def test_hadamard_is_orthonormal(n):
    h = np.asarray(quant.hadamard(n), np.float64)
    np.testing.assert_allclose(h @ h.T, np.eye(n), atol=1e-6)
    np.testing.assert_allclose(np.abs(h), n**-0.5, rtol=1e-6)


@pytest.mark.parametrize(("n", "symmetric"), [(8, True), (12, False), (20, False), (28, True), (36, True)])
def test_which_orders_are_symmetric(n, symmetric):
    h = np.asarray(quant.hadamard(n))
    assert np.array_equal(h, h.T) == symmetric


@pytest.mark.parametrize("n", [0, 3, 6, 10, 92, 172])
def test_an_order_without_a_construction_is_refused(n):
    with pytest.raises(ConfigError, match="n: found"):
        quant.hadamard(n)


@pytest.mark.parametrize("form", [by_matmul, by_factors, by_butterfly, quant.block_hadamard])
@pytest.mark.parametrize("block", [1, 2, 12, 16, 36, 64, 256, 576, 1536])
def test_all_forms_are_one_rotation(form, block):
    x = jax.random.normal(jax.random.key(0), (3, 5, 2 * block))
    h = np.asarray(quant.hadamard(block, jnp.float32), np.float64)
    expected = np.einsum("...nb,bc->...nc", np.asarray(x, np.float64).reshape(3, 5, 2, block), h)
    y = form(x, block)
    np.testing.assert_allclose(y, expected.reshape(x.shape), atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(y, axis=-1), np.linalg.norm(x, axis=-1), rtol=1e-5)


@pytest.mark.parametrize("block", [12, 64, 256, 1536])
def test_rotated_weights_undo_rotated_inputs(block):
    keys = jax.random.split(jax.random.key(1))
    x, w = jax.random.normal(keys[0], (7, 1536)), jax.random.normal(keys[1], (9, 1536))
    rotated = jnp.matmul(quant.block_hadamard(x, block), quant.block_hadamard(w, block).T, precision="highest")
    np.testing.assert_allclose(rotated, jnp.matmul(x, w.T, precision="highest"), atol=5e-4)


def test_rotation_under_transformations():
    x = jax.random.normal(jax.random.key(2), (4, 96))
    y = quant.block_hadamard(x, 32)
    np.testing.assert_allclose(jax.jit(quant.block_hadamard, static_argnums=1)(x, 32), y, atol=1e-6)
    np.testing.assert_allclose(jax.vmap(lambda r: quant.block_hadamard(r, 32))(x), y, atol=1e-6)
    np.testing.assert_allclose(quant.block_hadamard(y, 32), x, atol=1e-6)  # its own inverse
    # The gradient of <v, x R> in x is v R^T, for the matrix that is not symmetric too.
    v = jax.random.normal(jax.random.key(3), (4, 96))
    gradient = jax.grad(lambda x: jnp.vdot(v, quant.block_hadamard(x, 48)))(x)
    r = np.kron(np.eye(2), quant.hadamard(48))
    np.testing.assert_allclose(gradient, v @ r.T, atol=1e-5)
    assert quant.block_hadamard(x.astype(jnp.bfloat16), 32).dtype == jnp.bfloat16
    assert quant.block_hadamard(x[:0], 32).shape == (0, 96)


def test_rotation_keeps_float64(x64):
    x = jax.random.normal(jax.random.key(2), (4, 512), jnp.float64)
    y = quant.block_hadamard(x, 512)
    assert y.dtype == jnp.float64
    np.testing.assert_allclose(quant.block_hadamard(y, 512), x, atol=1e-13)


@pytest.mark.parametrize("name", CASES)
def test_golden_orders(stored, name):
    c = case(stored, name)
    block, x = int(c["block"]), jnp.asarray(c["x"])
    mass, peak = quant.channel_mass(x), jnp.abs(x).max(0)
    found = {
        "perm_massdiff": quant.massdiff(mass, block),
        "perm_zigzag": quant.zigzag(peak, block),
        "perm_absmax": quant.by_absmax(quant.update_mass(quant.mass_init(x.shape[1]), x), block),
    }
    for key, idx in found.items():
        np.testing.assert_array_equal(np.sort(idx), np.arange(x.shape[1]))
        if name in ("c0", "c1", "c2"):
            np.testing.assert_array_equal(idx, c[key])
    if "perm_massdiff_f64" in c and name != "c2":
        stats = quant.update_mass(quant.mass_init(x.shape[1]), x)
        np.testing.assert_array_equal(quant.by_mass(stats, block), c["perm_massdiff_f64"])
        masses = np.sort(quant.block_masses(mass[found["perm_massdiff"]], block))
        expected = np.sort(np.asarray(mass, np.float64)[c["perm_massdiff_f64"]].reshape(-1, block).sum(1))
        np.testing.assert_allclose(masses, expected, rtol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_golden_rotations_and_bounds(stored, name):
    c = case(stored, name)
    block, x = int(c["block"]), jnp.asarray(c["x"])
    near = lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max(), rtol=0)  # noqa: E731
    rotated = quant.block_hadamard(x, block)
    near(rotated, c["rot"])
    if name == "c2":
        return
    near(quant.block_masses(quant.channel_mass(x), block), c["blockmass_identity"])
    idx = c["perm_massdiff_f64"]
    near(quant.block_hadamard(x[:, idx], block), c["perm_rot"])
    near(quant.outlier_bound(x, block), c["bound"])
    near(jnp.abs(rotated).max(1), c["linf_rot"])
    near(jnp.abs(quant.block_hadamard(x[:, idx], block)).max(1), c["linf_permrot"])


@settings(max_examples=25, deadline=None)
@given(st.sampled_from([(24, 12), (32, 8), (48, 4), (64, 64), (40, 1)]), st.integers(0, 2**31))
def test_the_bound_holds_and_massdiff_is_a_greedy_schedule(size, seed):
    d, block = size
    x = jnp.asarray(np.random.default_rng(seed).standard_t(2, (3, d)), jnp.float32)
    y = quant.block_hadamard(x, block)
    assert (jnp.abs(y).max(-1) <= quant.outlier_bound(x, block) * (1 + 1e-5)).all()
    assert (quant.outlier_bound(x, block) * (1 + 1e-5) >= block**0.5 / d * jnp.abs(x).sum(-1)).all()
    mass = np.asarray(quant.channel_mass(x))
    np.testing.assert_array_equal(quant.massdiff(jnp.asarray(mass), block), greedy(mass, block))


def greedy(mass, block):
    """The definition, step by step, in float64."""
    mass = np.asarray(mass, np.float64)
    d = len(mass)
    if d == block:
        return np.arange(d)
    n = d // block
    order = np.argsort(-mass, kind="stable")
    blocks = [[i] for i in order[:n]]
    held = mass[order[:n]].copy()
    for i in order[n:]:
        j = min((j for j in range(n) if len(blocks[j]) < block), key=lambda j: (held[j], j))
        blocks[j].append(i)
        held[j] += mass[i]
    return np.concatenate(blocks)


@pytest.mark.parametrize("kind", ["even", "heavy", "equal", "few values", "mostly zero"])
def test_massdiff_joins_many_at_once_as_it_would_one_by_one(kind):
    """Equal and vanishing masses, and blocks so heavy that channels must join one by one; 80 blocks of 12."""
    random = np.random.default_rng(3)
    d, block = 960, 12
    mass = {
        "even": lambda: random.random(d),
        "heavy": lambda: np.exp(4 * random.normal(size=d)),
        "equal": lambda: np.ones(d),
        "few values": lambda: random.integers(0, 5, d),
        "mostly zero": lambda: random.random(d) * (random.random(d) < 0.3),
    }[kind]()
    # Few digits, so that float64 sums, the reference, are exact and ties are ties.
    mass = np.round(mass * 2**10) / 2**10
    found = quant.massdiff(jnp.asarray(mass, jnp.float32), block)
    np.testing.assert_array_equal(found, greedy(np.float32(mass), block))


@pytest.mark.parametrize("block", [2, 3, 8])
def test_massdiff_is_a_permutation_whatever_the_masses(block):
    """Sums past the largest float are found in smaller units; under jit NaN and infinity count as nothing."""
    random = np.random.default_rng(block)
    huge = jnp.asarray(random.random(24) * 3.4e38, jnp.float32)
    np.testing.assert_array_equal(quant.massdiff(huge, block), greedy(huge, block))
    broken = huge.at[::5].set(jnp.nan).at[1].set(jnp.inf)
    found = jax.jit(quant.massdiff, static_argnums=1)(broken, block)
    np.testing.assert_array_equal(np.sort(found), np.arange(24))
    np.testing.assert_array_equal(found, greedy(np.where(np.isfinite(broken), broken, 0), block))


def test_massdiff_in_float64(x64):
    mass = np.random.default_rng(0).standard_t(2, 96) ** 2
    np.testing.assert_array_equal(quant.massdiff(jnp.asarray(mass), 8), greedy(mass, 8))
    np.testing.assert_array_equal(quant.massdiff(jnp.asarray(mass, jnp.float32), 8), greedy(np.float32(mass), 8))


def test_one_layer_at_a_time():
    """What a caller sees whose shapes nothing checks."""
    with pytest.raises(ConfigError, match=r"mass: found shape \(2, 4\), expected one layer"):
        check_order(quant.mass_init(2, 4).total, 2, "mass")
    for state, x in ((quant.mass_init(2, 4), jnp.ones((3, 4))), (quant.mass_init(4), jnp.ones((3, 1)))):
        with pytest.raises(ConfigError, match=r"x: found shape \(3, [14]\), expected \[..., 4\], as the state"):
            quant.update_mass(state, x)
    with pytest.raises(ConfigError, match=r"low: found shape \(1,\), expected that of mass, \(8,\)"):
        inspect.unwrap(quant.massdiff)(jnp.ones(8), 2, jnp.zeros(1))


def token_loop(x, block):
    """The public code's way: each block carries the sum of its token vectors and takes the mean; in float64."""
    size = np.abs(x.astype(np.float64))
    order = np.argsort(-size.mean(0), kind="stable")
    blocks = [[i] for i in order[: x.shape[1] // block]]
    held = size[:, order[: len(blocks)]].T.copy()
    for i in order[len(blocks) :]:
        open_ = np.array([len(b) < block for b in blocks])
        j = int(np.where(open_, (held + size[:, i][None]).mean(1), np.inf).argmin())
        blocks[j].append(i)
        held[j] += size[:, i]
    return np.concatenate(blocks)


def test_massdiff_is_the_loop_over_token_vectors():
    """At this width float32 masses already pick other blocks; the carried digits do not."""
    order = jax.jit(lambda x: quant.by_mass(quant.update_mass(quant.mass_init(1024), x), 16))
    rounded = jax.jit(lambda x: quant.massdiff(quant.channel_mass(x), 16))
    moved = 0
    for seed in range(12):
        random = np.random.default_rng(seed)
        x = random.standard_t(3, (24, 1024)).astype(np.float32) * random.choice([1, 30], 1024, p=[0.9, 0.1])[None]
        x = jnp.asarray(x, jnp.bfloat16 if seed % 3 == 2 else jnp.float32)
        expected = token_loop(np.asarray(x, np.float64), 16)
        np.testing.assert_array_equal(order(x), expected)
        moved += not np.array_equal(rounded(x), expected)
    assert moved > 0


def test_sums_over_tokens_keep_twice_the_digits():
    x = np.random.default_rng(0).lognormal(0, 6, (1000, 5)).astype(np.float32)
    parts = quant.mass_init(5)
    for piece in np.split(x, [1, 300, 777]):
        parts = quant.update_mass(parts, jnp.asarray(piece))
    for stats in (parts, jax.jit(quant.update_mass)(quant.mass_init(5), jnp.asarray(x))):
        total = np.asarray(stats.total, np.float64) + np.asarray(stats.low, np.float64)
        np.testing.assert_allclose(total, x.astype(np.float64).sum(0), rtol=1e-13)


def test_the_bound_is_reached():
    x = quant.hadamard(16)[5][None] * 4
    np.testing.assert_allclose(jnp.abs(quant.block_hadamard(x, 16)).max(-1), quant.outlier_bound(x, 16), rtol=1e-6)


def test_clustered_outliers_are_spread():
    x = np.random.default_rng(0).normal(size=(64, 256)).astype(np.float32)
    x[:, :16] *= 30
    stats = quant.update_mass(quant.mass_init(256), jnp.asarray(x))
    heaviest = {
        f.__name__: float(quant.block_masses(stats.mean[f(stats, 16)], 16).max())
        for f in (quant.by_mass, quant.by_zigzag, quant.by_absmax)
    }
    assert heaviest["by_mass"] <= heaviest["by_zigzag"] <= heaviest["by_absmax"]
    assert heaviest["by_mass"] < 1.4 * float(stats.mean.sum()) / 16


def test_equal_masses_make_equal_blocks_and_whole_width_nothing():
    ones = jnp.ones(48)
    np.testing.assert_array_equal(quant.block_masses(ones[quant.massdiff(ones, 8)], 8), np.full(6, 8.0))
    stats = quant.update_mass(quant.mass_init(16), jax.random.normal(jax.random.key(0), (3, 16)))
    for f in (quant.by_mass, quant.by_zigzag, quant.by_absmax, quant.by_identity, quant.by_chance(0)):
        np.testing.assert_array_equal(f(stats, 16), np.arange(16))


def test_silent_channels_join_last():
    mass = jnp.asarray([0.0, 3.0, 0.0, 1.0, 2.0, 0.0, 4.0, 0.0])
    idx = np.asarray(quant.massdiff(mass, 4)).reshape(2, 4)
    assert (np.asarray(mass)[idx][:, :2] > 0).all()
    assert (np.asarray(mass)[idx][:, 2:] == 0).all()


def test_chance_differs_between_layers_and_repeats():
    a, b = (quant.update_mass(quant.mass_init(64), jax.random.normal(jax.random.key(i), (3, 64))) for i in (0, 1))
    order = quant.by_chance(3)
    np.testing.assert_array_equal(order(a, 8), order(a, 8))
    assert not np.array_equal(order(a, 8), order(b, 8))
    assert not np.array_equal(order(a, 8), quant.by_chance(4)(a, 8))


def test_statistics_stream():
    x = jax.random.normal(jax.random.key(0), (10, 6))
    whole = quant.update_mass(quant.mass_init(6), x)
    parts = quant.update_mass(quant.update_mass(quant.update_mass(quant.mass_init(6), x[:3]), x[3:3]), x[3:])
    for a, b in zip(whole, parts, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    np.testing.assert_allclose(whole.mean, quant.channel_mass(x), rtol=1e-6)
    low = quant.update_mass(quant.mass_init(6), jnp.full((4096, 6), 1.0, jnp.bfloat16))
    np.testing.assert_array_equal(low.mean, 1.0)  # bfloat16 sums would have stopped at 256
    assert quant.mass_init(6).mean.sum() == 0


@pytest.mark.parametrize("block", [5, 0, -4])
def test_a_block_that_does_not_divide_is_refused(block):
    ones = jnp.ones(16)
    for call in (quant.massdiff, quant.zigzag, quant.block_hadamard, quant.outlier_bound, quant.block_masses):
        with pytest.raises(ConfigError, match=f"block: found {block}, expected .* 16"):
            call(ones, block)


def test_a_block_is_a_whole_number():
    check = inspect.unwrap(check_divides)
    for block in (2.0, True, "2", None):
        with pytest.raises(ConfigError, match=f"block: found {block!r}, expected a whole number"):
            check(16, block)
    check(16, np.int64(4))


def test_what_is_not_finite_is_refused():
    for bad in (jnp.nan, jnp.inf):
        x = jnp.ones((2, 8)).at[0, 3].set(bad)
        with pytest.raises(ConfigError, match="x: found NaN or infinity"):
            quant.channel_mass(x)
        with pytest.raises(ConfigError, match="mass: found NaN or infinity"):
            quant.massdiff(x[0], 4)
        with pytest.raises(ConfigError, match="absmax: found NaN or infinity"):
            quant.zigzag(x[0], 4)
    with pytest.raises(ConfigError, match="no tokens"):
        quant.channel_mass(jnp.ones((0, 8)))


def test_orders_under_jit():
    mass = jax.random.uniform(jax.random.key(0), (64,))
    for f in (quant.massdiff, quant.zigzag):
        np.testing.assert_array_equal(jax.jit(f, static_argnums=1)(mass, 16), f(mass, 16))
