"""The Shannon law against golden values, its algebra, and what is derived from it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmeth import scaling
from jaxmeth.scaling.shannon import log_softplus
from jaxmeth.types import ConfigError

pytestmark = pytest.mark.filterwarnings("error")
FOLDER = "10-shannon-scaling-law"


SLOPES = jax.jit(jax.vmap(jax.value_and_grad(scaling.loss), (None, 0, 0)))


@pytest.fixture
def forward(golden):
    return np.load(golden / FOLDER / "forward.npz")


def surfaces(function, forward, dtype):
    """The function on the grid for every parameter set, [4, 8, 10]."""
    n, d = (jnp.asarray(forward[k], dtype) for k in "nd")
    params = scaling.ShannonParams(*jnp.asarray(forward["params"], dtype).T)
    return jax.jit(jax.vmap(lambda p: function(p, n, d)))(params)


def everything(p, n, d):
    return {"capacity": scaling.capacity(p, n, d), "snr": scaling.snr(p, n, d), "loss": scaling.loss(p, n, d)}


@pytest.mark.parametrize(("dtype", "rtol"), [(jnp.float64, 1e-9), (jnp.float32, 2e-5)])
def test_golden_values(forward, x64, dtype, rtol):
    for name, out in surfaces(everything, forward, dtype).items():
        assert out.dtype == dtype
        np.testing.assert_allclose(out, forward[name], rtol=rtol, err_msg=name)


def test_golden_gradients(forward, x64):
    jacobian = surfaces(jax.jacfwd(scaling.loss), forward, jnp.float64)
    out = np.stack([np.asarray(v) for v in jacobian], axis=1)
    np.testing.assert_allclose(out, forward["dloss_dparams"], rtol=1e-9, atol=1e-12)


def test_golden_gradients_by_reverse_mode_are_the_same(forward, x64):
    n, d = forward["n"][2, 3], forward["d"][2, 3]
    for i, row in enumerate(forward["params"]):
        gradient = jax.grad(scaling.loss)(scaling.ShannonParams(*jnp.asarray(row)), n, d)
        np.testing.assert_allclose(gradient, forward["dloss_dparams"][i, :, 2, 3], rtol=1e-9, atol=1e-12)


def test_golden_optimal_tokens(forward, x64):
    n, d = jnp.asarray(forward["n"][:, 0]), forward["d"]
    params = scaling.ShannonParams(*jnp.asarray(forward["params"]).T)
    find = jax.vmap(lambda p: scaling.optimal_tokens(p, n, d.min() / 10, 1000 * d.max()))
    np.testing.assert_allclose(find(params), forward["optimal_d"], rtol=1e-5)


def turning(**changes):
    base = {"a": 0.12, "b": 5.0, "c": 0.02, "d": 0.03, "e": 0.5, "alpha": 0.1, "beta": 0.35, "gamma": 0.3, "delta": 0.6}
    return scaling.ShannonParams(**{k: jnp.asarray(v) for k, v in (base | changes).items()})


def test_loss_is_the_inverse_of_capacity(forward, x64):
    product = surfaces(scaling.loss, forward, jnp.float64) * surfaces(scaling.capacity, forward, jnp.float64)
    np.testing.assert_allclose(product, 1.0, rtol=1e-14)


@pytest.mark.parametrize(("n0", "d0"), [(1e3, 1e-3), (1e-9, 1e9), (7.0, 0.2)])
def test_units_change_nothing(x64, n0, d0):
    n, d = jnp.asarray([0.07, 1.0, 12.0])[:, None], jnp.asarray([2.0, 100.0, 3000.0])[None]
    before = scaling.loss(turning(), n, d)
    after = scaling.loss(scaling.rescale(turning(), n0, d0), n / n0, d / d0)
    np.testing.assert_allclose(after, before, rtol=1e-10)


def test_a_common_factor_of_the_noise_and_signal_changes_nothing(x64):
    n, d = jnp.asarray([0.07, 1.0, 12.0])[:, None], jnp.asarray([2.0, 100.0, 3000.0])[None]
    p = turning()
    scaled = p._replace(**{k: getattr(p, k) * 37.5 for k in "bcde"})
    np.testing.assert_allclose(scaling.loss(scaled, n, d), scaling.loss(p, n, d), rtol=1e-10)
    np.testing.assert_allclose(scaling.fix_gauge(scaled), scaling.fix_gauge(p), rtol=1e-12)
    assert scaling.fix_gauge(scaled).b == 1


@settings(max_examples=30, deadline=None)
@given(st.floats(0.05, 2), st.floats(0, 1), st.floats(0, 1), st.floats(0.01, 2))
def test_monotone_in_tokens_when_signal_outgrows_noise(beta, share_c, share_d, n):
    p = turning(beta=beta, gamma=beta * share_c, delta=beta * share_d)
    loss = np.asarray(scaling.loss(p, n, jnp.logspace(-3, 4, 40)))
    assert np.all(np.diff(loss) <= 1e-6 * loss[:-1])
    assert np.isnan(scaling.optimal_tokens(p, n, 1e-6, 1e6))


def test_no_growing_noise_means_monotone_in_both():
    p = turning(c=0.0, d=0.0)
    grid = jnp.logspace(-2, 4, 30)
    loss = np.asarray(scaling.loss(p, grid[:, None], grid[None]))
    assert np.all(np.diff(loss, axis=0) < 0)
    assert np.all(np.diff(loss, axis=1) < 0)


@pytest.mark.parametrize(
    "changes",
    [{"c": 0.0}, {"d": 0.0, "gamma": 0.5}, {"e": 0.0}, {"e": 0.0, "gamma": 0.7, "delta": 0.2}],
    ids=["c=0", "d=0", "e=0, data noise wins", "e=0, interaction wins"],
)
def test_closed_form_of_critical_tokens_is_the_root(x64, changes):
    n = jnp.asarray([0.1, 1.0, 10.0])
    closed = scaling.critical_tokens(turning(**changes), n)
    assert np.all(np.isfinite(closed))
    np.testing.assert_allclose(closed, scaling.optimal_tokens(turning(**changes), n, 1e-9, 1e12), rtol=1e-10)


def test_closed_form_without_interaction_is_the_spec_formula(x64):
    p = turning(c=0.0)
    expected = (p.beta * p.e / ((p.delta - p.beta) * p.d)) ** (1 / p.delta)
    np.testing.assert_allclose(scaling.critical_tokens(p, jnp.asarray([0.1, 10.0])), [expected] * 2, rtol=1e-12)


@pytest.mark.parametrize("changes", [{}, {"c": 0.0, "delta": 0.2}, {"c": 0.0, "e": 0.0}, {"c": 0.0, "d": 0.0}])
def test_no_closed_form_or_no_turn_is_nan(changes):
    assert np.isnan(scaling.critical_tokens(turning(**changes), 1.0))


def test_interaction_makes_bigger_models_turn_earlier(x64):
    p = turning(c=0.5, gamma=0.5)
    tokens = scaling.optimal_tokens(p, jnp.asarray([0.1, 1.0, 10.0]), 1e-9, 1e9)
    assert np.all(np.diff(tokens) < 0)


def test_optimal_tokens_has_the_gradient_of_the_closed_form(x64):
    p = turning(c=0.0)
    exact = jax.grad(lambda q: scaling.critical_tokens(q, 1.0))(p)
    found = jax.grad(lambda q: scaling.optimal_tokens(q, 1.0, 1e-6, 1e9))(p)
    for name in ("b", "d", "e", "beta", "delta"):
        np.testing.assert_allclose(getattr(found, name), getattr(exact, name), rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize(("lo", "hi"), [(0.0, 1.0), (2.0, 1.0), (-1.0, 1.0)])
def test_optimal_tokens_refuses_an_empty_interval(lo, hi):
    with pytest.raises(ConfigError, match="lo, hi"):
        scaling.optimal_tokens(turning(), 1.0, lo, hi)


def test_model_scaling_slope_is_the_derivative(forward, x64):
    def by_autodiff(p, n, d):
        return jax.jvp(
            lambda log_n: jnp.log(scaling.capacity(p, jnp.exp(log_n), d)), (jnp.log(n),), (jnp.ones_like(n),)
        )[1]

    slope = surfaces(scaling.model_scaling_slope, forward, jnp.float64)
    np.testing.assert_allclose(slope, surfaces(by_autodiff, forward, jnp.float64), rtol=1e-9, atol=1e-12)


def test_scaling_the_model_hurts_when_gamma_exceeds_alpha_under_noise(x64):
    noisy = turning(b=1e-4, c=1.0, d=1e-9, e=1e-9, alpha=0.2, gamma=0.4)
    assert scaling.model_scaling_sign(noisy, 100.0, 100.0) == -1
    assert scaling.model_scaling_sign(noisy._replace(gamma=jnp.asarray(0.1)), 100.0, 100.0) == 1
    np.testing.assert_allclose(scaling.model_scaling_slope(noisy, 1e3, 1e3), 0.2 - 0.4, atol=1e-5)


def test_high_snr_limit(x64):
    p = turning(b=1e40)
    ratio = scaling.snr(p, 2.0, 50.0)
    np.testing.assert_allclose(scaling.loss(p, 2.0, 50.0), np.log(2) / (0.12 * 2**0.1 * np.log(ratio)), rtol=1e-10)


def test_low_snr_keeps_relative_precision_in_float32():
    x = jnp.asarray([-80.0, -40.0, -15.1, -14.9, -1.0, 0.0, 30.0, 90.0], jnp.float32)
    exact = np.log(np.log1p(np.exp(np.asarray(x, np.float64))))
    np.testing.assert_allclose(log_softplus(x), exact, rtol=2e-6, atol=1e-6)
    slope = jax.vmap(jax.grad(log_softplus))(x)
    wide = np.asarray(x, np.float64)
    np.testing.assert_allclose(slope, 1 / (1 + np.exp(-wide)) / np.log1p(np.exp(wide)), rtol=3e-6)


@pytest.mark.parametrize("changes", [{}, {"c": 0.0, "d": 0.0}, {"e": 0.0}, {"gamma": 5.0, "delta": 5.0}], ids=str)
def test_extreme_inputs_give_no_nan_in_value_or_gradient(changes):
    n, d = jnp.asarray([1e-4, 1e6, 1e-6, 1e6]), jnp.asarray([1e-4, 1e6, 1e6, 1e-4])
    value, gradient = SLOPES(turning(**changes), n, d)
    assert not np.isnan(value).any()
    # A loss of e^138 is infinite in float32, rightly, and so are its slopes.
    fits = np.asarray(value) < 1e30
    assert fits.sum() >= 3
    assert np.isfinite(np.stack(gradient)[:, fits]).all()


def test_no_tokens_means_infinite_loss():
    assert scaling.loss(turning(), 1.0, 0.0) == jnp.inf


def test_zero_strength_is_the_implicit_law_and_strength_raises_the_loss():
    kappas = {"kappa_c": 0.5, "kappa_d": 1.0, "kappa_e": 2.0}
    p = scaling.NoisyShannonParams(*turning(), **{k: jnp.asarray(v) for k, v in kappas.items()})
    n, d = jnp.asarray([0.1, 1.0]), jnp.asarray([10.0, 30.0])
    np.testing.assert_array_equal(scaling.loss(scaling.at_strength(p, 0.0), n, d), scaling.loss(turning(), n, d))
    stronger = [scaling.loss(scaling.at_strength(p, x), n, d) for x in (0.0, 0.5, 1.0)]
    assert np.all(np.diff(stronger, axis=0) > 0)
    raised = scaling.at_strength(p, 2.0)
    np.testing.assert_allclose(raised.e / p.e, np.exp(4.0), rtol=1e-6)


def test_jit_equals_eager_and_vmap_equals_a_loop():
    p, n, d = turning(), jnp.asarray([0.1, 1.0, 10.0]), jnp.asarray([10.0, 100.0, 30.0])
    np.testing.assert_allclose(jax.jit(scaling.loss)(p, n, d), scaling.loss(p, n, d), rtol=1e-6)
    mapped = jax.vmap(scaling.loss, (None, 0, 0))(p, n, d)
    np.testing.assert_allclose(mapped, [scaling.loss(p, n[i], d[i]) for i in range(3)], rtol=1e-6)
