"""The rival laws against golden values, units, compute-optimal sizes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmeth import scaling
from jaxmeth.types import ConfigError

FOLDER = "10-shannon-scaling-law"
EVERY = (*scaling.LAWS, scaling.SHANNON_NOISE)

PARAMS = {
    "Shannon": (0.12, 5.0, 0.02, 0.03, 0.5, 0.1, 0.35, 0.3, 0.6),
    "Shannon simplified": (0.12, 1.0, 0.02, 0.03, 0.0, 0.1, 0.35, 0.3, 0.6),
    "Shannon with strength": (0.12, 5.0, 0.02, 0.03, 0.5, 0.1, 0.35, 0.3, 0.6, 0.1, 0.2, 0.3),
    "Chinchilla": (0.45, 1.17, 1.04, 0.34, 0.28),
    "OpenAI": (8.8e4, 5.4e4, 0.076, 0.095),
    "Chinchilla+QiD": (0.45, 1.17, 1.04, 0.34, 0.28, 0.017, 0.23, 0.52, 1.5),
    "Precision": (0.45, 1.17, 1.04, 0.34, 0.28, 0.06, 0.5, 0.34, 0.6),
}


def example(law):
    return law.params(*(jnp.asarray(v) for v in PARAMS[law.name]))


@pytest.fixture
def forward(golden):
    return np.load(golden / FOLDER / "forward.npz")


@pytest.mark.parametrize(("dtype", "rtol"), [(jnp.float64, 1e-9), (jnp.float32, 2e-5)])
def test_golden_baselines(forward, x64, dtype, rtol):
    n, d, bits = (jnp.asarray(forward[k], dtype) for k in ("n", "d", "bits"))

    def params(kind, key):
        return kind(*jnp.asarray(forward[key], dtype))

    chinchilla = scaling.chinchilla_loss(params(scaling.ChinchillaParams, "chinchilla_params"), n, d)
    openai = scaling.openai_loss(params(scaling.OpenAIParams, "openai_params"), n, d)
    qid = scaling.qid_delta(params(scaling.QiDParams, "qid_params"), n[None], d[None], bits[:, None, None])
    ptq = scaling.ptq_delta(params(scaling.PTQParams, "ptq_params"), n[None], d[None], bits[:, None, None])
    for name, out in (("chinchilla_loss", chinchilla), ("openai_loss", openai), ("qid_delta", qid), ("ptq_delta", ptq)):
        assert out.dtype == dtype
        np.testing.assert_allclose(out, forward[name], rtol=rtol, err_msg=name)


def test_golden_r2(forward, x64):
    target = jnp.asarray(forward["loss"][0])
    np.testing.assert_allclose(
        scaling.r2_score(target, jnp.asarray(forward["r2_pred"])), forward["r2_pooled"], rtol=1e-9
    )
    rows = jax.vmap(scaling.r2_score)(target, jnp.asarray(forward["r2_pred"]))
    np.testing.assert_allclose(rows, forward["r2_per_row"], rtol=1e-9)
    bad = scaling.r2_score(target, jnp.asarray(forward["r2_bad_pred"]))
    np.testing.assert_allclose(bad, forward["r2_bad_pooled"], rtol=1e-9)


def test_laws_are_the_functions_they_name(x64):
    n, d = jnp.asarray([0.1, 1.0, 7.0]), jnp.asarray([5.0, 50.0, 300.0])
    functions = {"Shannon": scaling.loss, "Chinchilla": scaling.chinchilla_loss, "OpenAI": scaling.openai_loss}
    for law in scaling.LAWS:
        if law.name in functions:
            p = example(law)
            np.testing.assert_allclose(law(p, n, d), functions[law.name](p, n, d), rtol=1e-12)


@pytest.mark.parametrize(
    ("law", "delta", "kind"),
    [
        (scaling.CHINCHILLA_QID, scaling.qid_delta, scaling.QiDParams),
        (scaling.PRECISION, scaling.ptq_delta, scaling.PTQParams),
    ],
)
@pytest.mark.parametrize("bits", [None, 3.0])
def test_degraded_laws_are_chinchilla_plus_their_delta(x64, law, delta, kind, bits):
    n, d = jnp.asarray([0.1, 1.0, 7.0]), jnp.asarray([5.0, 50.0, 300.0])
    p = example(law)
    extra = kind(p.k, p.qa, p.qb, p.g) if kind is scaling.QiDParams else kind(p.C, p.gD, p.gN, p.gP)
    chinchilla = scaling.ChinchillaParams(p.A, p.B, p.E, p.a, p.b)
    expected = scaling.chinchilla_loss(chinchilla, n, d) + delta(extra, n, d, *(() if bits is None else (bits,)))
    np.testing.assert_allclose(law(p, n, d, bits), expected, rtol=1e-12)


def test_a_vanishing_degradation_is_chinchilla(x64):
    n, d = jnp.asarray([0.1, 1.0]), jnp.asarray([5.0, 300.0])
    p = example(scaling.CHINCHILLA_QID)._replace(k=jnp.asarray(0.0))
    clean = scaling.ChinchillaParams(p.A, p.B, p.E, p.a, p.b)
    np.testing.assert_allclose(scaling.CHINCHILLA_QID(p, n, d, 3.0), scaling.chinchilla_loss(clean, n, d), rtol=1e-14)


@pytest.mark.parametrize("law", EVERY, ids=lambda law: law.name)
def test_units_change_nothing(x64, law):
    n, d, x = jnp.asarray([0.1, 1.0, 7.0]), jnp.asarray([5.0, 50.0, 300.0]), jnp.asarray([2.0, 3.0, 4.0])
    moved = law.rescale(example(law), 1e-3, 40.0)
    np.testing.assert_allclose(law(moved, n / 1e-3, d / 40.0, x), law(example(law), n, d, x), rtol=1e-10)


@pytest.mark.parametrize("law", EVERY, ids=lambda law: law.name)
def test_gradients_are_finite_where_coefficients_vanish(law):
    p = example(law)
    for name in law.coefficients:
        if name in ("a", "b", "Nc", "Dc") and law.name != "Chinchilla":
            continue
        gradient = jax.grad(lambda q: law(q, 2.0, 70.0, 3.0))(p._replace(**{name: jnp.asarray(0.0)}))
        assert all(np.isfinite(v) for v in gradient), name


def test_compute_optimal_is_chinchillas_closed_form(x64):
    p = example(scaling.CHINCHILLA)
    flops = jnp.asarray([1e20, 1e22, 1e24])
    best = scaling.compute_optimal(scaling.CHINCHILLA, p, flops)
    budget = flops / 6 / 1e18
    expected = (p.a * p.A / (p.b * p.B)) ** (1 / (p.a + p.b)) * budget ** (p.b / (p.a + p.b)) * 1e9
    np.testing.assert_allclose(best.n, expected, rtol=1e-10)
    np.testing.assert_allclose(6 * best.n * best.d, flops, rtol=1e-12)
    np.testing.assert_allclose(best.loss, scaling.chinchilla_loss(p, best.n / 1e9, best.d / 1e9), rtol=1e-10)


@pytest.mark.parametrize("law", [scaling.SHANNON, scaling.OPENAI, scaling.CHINCHILLA_QID], ids=lambda law: law.name)
def test_compute_optimal_is_the_least_of_a_grid(x64, law):
    p, flops = example(law), 1e21
    best = scaling.compute_optimal(law, p, flops)
    n = jnp.logspace(4, 15, 4001)
    losses = law(p, n / 1e9, flops / 6 / n / 1e9)
    inside = 0 < int(jnp.argmin(losses)) < 4000
    assert np.isfinite(best.n) == inside
    if inside:
        assert best.loss <= losses.min() * (1 + 1e-12)
        np.testing.assert_allclose(best.n, n[jnp.argmin(losses)], rtol=0.01)


def test_compute_optimal_without_an_optimum_is_nan_and_bad_budgets_are_refused():
    p = example(scaling.CHINCHILLA)._replace(B=jnp.asarray(0.0))
    assert np.isnan(scaling.compute_optimal(scaling.CHINCHILLA, p, 1e21).n)
    with pytest.raises(ConfigError, match="flops"):
        scaling.compute_optimal(scaling.CHINCHILLA, p, 0.0)
