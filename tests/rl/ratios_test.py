"""Ratio transforms and KL estimators against TRL and verl, values and gradients; their invariants; padding."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import compiled

from jaxmeth import rl
from jaxmeth.types import ConfigError

FILES = ["binary_p4g4t7", "real_p4g6t9_awkward"]
SEQ = {"mode": "seq_mean_token_mean"}
VERL_SEQ = SEQ | {"count_empty_rows": False}
trl = partial(rl.ppo_clip, log_ratio_clamp=None)
verl = partial(rl.ppo_clip, dual_clip=3.0)
# setting: ratio transform, aggregation; T stands for the padded length.
SETTINGS = {
    "trl_grpo": (trl, SEQ),
    "trl_bnpo": (trl, {}),
    "trl_dr_grpo": (trl, {"mode": "token_sum_norm", "max_len": "T"}),
    "trl_dapo": (trl, {}),
    "trl_dapo_tokenadv": (trl, {}),
    "trl_dapo_cliphigher": (partial(trl, eps_high=0.28), {}),
    "trl_grpo_beta0.04": (trl, SEQ),
    "trl_dapo_delta1.5": (partial(trl, delta=1.5), {}),
    "trl_gspo_3e-4_4e-4": (rl.gspo, SEQ),
    "trl_cispo_epshigh2.0": (partial(rl.cispo, eps_high=1.0, log_ratio_clamp=None), {}),
    "trl_dapo_onpolicy": (trl, {}),
    "verl_vanilla_token-mean": (verl, {}),
    "verl_vanilla_seq-mean-token-sum": (verl, {"mode": "seq_mean_token_sum"}),
    "verl_vanilla_seq-mean-token-mean": (verl, VERL_SEQ),
    "verl_vanilla_seq-mean-token-sum-norm": (verl, {"mode": "token_sum_norm", "denominator": "T"}),
    "verl_vanilla_token-mean_0.2_0.28_c10": (partial(verl, eps_high=0.28, dual_clip=10.0), {}),
    "verl_gspo_3e-4_4e-4": (rl.gspo_token, VERL_SEQ),
    "verl_gmpo_0.4": (rl.gmpo, SEQ),
    "verl_cispo_1.0_1.0": (partial(rl.cispo, eps_low=1.0, eps_high=1.0), {}),
}
KL = {"k1": {}, "abs": {}, "k2": {}, "k3": {"clamp": (20.0, 10.0)}}
RATIOS = [rl.ppo_clip, rl.gspo, rl.gspo_token, rl.gmpo, rl.cispo, rl.reinforce, rl.ripo, rl.dcpo]
N, T = 6, 5  # one shape in the hand-made cases


def of(name, g, dtype):
    """Loss of one setting as a function of logp."""
    ratio, aggregation = SETTINGS[name]
    mask, old, ref = (jnp.asarray(g[key], dtype) for key in ("mask", "logp_old", "logp_ref"))
    adv = jnp.asarray(g["adv_used_token" if name.endswith("tokenadv") else "adv_used"], dtype)
    old = None if name.endswith("onpolicy") else old
    width = mask.shape[1]
    aggregation = {key: width if value == "T" else value for key, value in aggregation.items()}

    def loss(logp):
        total = rl.aggregate(-ratio(logp, old, adv, mask).value, mask, **aggregation)
        return total + 0.04 * rl.aggregate(rl.kl(logp, ref), mask, **aggregation) if "beta" in name else total

    return loss


@pytest.fixture(scope="module", params=FILES)
def g(request, pytestconfig):
    with np.load(pytestconfig.rootpath / "tests" / "golden" / "00-rl-core" / f"{request.param}.npz") as stored:
        return dict(stored)


@pytest.fixture(scope="module", params=[False, True], ids=["float32", "float64"])
def found(request, g):
    """Losses, gradients and KL estimates of every setting, compiled at once."""
    dtype = jnp.float64 if request.param else jnp.float32

    @jax.jit
    def everything(logp, ref):
        losses = {name: jax.value_and_grad(of(name, g, dtype))(logp) for name in SETTINGS}
        estimates = {kind: rl.kl(logp, ref, kind, **clamp) for kind, clamp in KL.items()}
        return losses, estimates, jax.value_and_grad(lambda x: rl.kl(x, ref, "k3+", (20.0, 10.0)).sum())(logp)

    with jax.enable_x64(request.param):
        yield request.param, everything(jnp.asarray(g["logp"], dtype), jnp.asarray(g["logp_ref"], dtype))


@pytest.mark.parametrize("name", SETTINGS)
def test_stored_losses_and_gradients(g, found, name):
    double, (losses, _, _) = found
    loss, grad = losses[name]
    # verl adds 1e-8 to token counts.
    rtol = 1e-7 if "verl" in name and ("seq-mean" in name or "gmpo" in name or "gspo" in name) else 1e-9
    expected = g[f"loss_{name}"]
    if double:
        np.testing.assert_allclose(loss, expected, rtol=rtol, atol=1e-10)
        np.testing.assert_allclose(grad, g[f"grad_{name}"], rtol=rtol, atol=1e-9 * np.abs(g[f"grad_{name}"]).max())
    else:
        np.testing.assert_allclose(loss, expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(grad, g[f"grad_{name}"], rtol=0, atol=1e-5 * np.abs(g[f"grad_{name}"]).max())
    assert np.asarray(grad).any()


@pytest.mark.parametrize("kind", KL)
def test_stored_kl(g, found, kind):
    double, (_, estimates, _) = found
    expected = g[f"kl_verl_{kind}"]
    tolerance = {"rtol": 1e-9, "atol": 1e-12} if double else {"rtol": 0, "atol": 1e-5 * np.abs(expected).max()}
    np.testing.assert_allclose(estimates[kind], expected, **tolerance)


def test_straight_through_kl(g, found):
    double, (_, estimates, (value, grad)) = found
    np.testing.assert_allclose(value, estimates["k3"].sum(), rtol=1e-5)
    expected = g["kl_k3plus_grad"]
    np.testing.assert_allclose(grad, expected, rtol=0, atol=(1e-9 if double else 1e-5) * np.abs(expected).max())


def test_stored_clip_fractions(g):
    logp, old, adv, mask = (jnp.asarray(g[k], jnp.float32) for k in ("logp", "logp_old", "adv_used", "mask"))
    s = compiled(partial(rl.ppo_clip, eps_high=0.28))(logp, old, adv, mask)
    low, high = (flag.sum() / g["mask"].sum() for flag in (s.clipped_low, s.clipped_high))
    np.testing.assert_allclose(low, g["metric_trl_dapo_cliphigher/clip_ratio/low_mean"], rtol=1e-5)
    np.testing.assert_allclose(high, g["metric_trl_dapo_cliphigher/clip_ratio/high_mean"], rtol=1e-5)
    np.testing.assert_allclose(low + high, g["metric_verl_0.2_0.28_c10/actor/pg_clipfrac"], rtol=1e-5)


# --- invariants ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made():
    rng = np.random.default_rng(0)
    logp = -np.abs(rng.normal(1, 0.7, (N, T)))
    mask = rng.uniform(size=(N, T)) < 0.7
    mask[1] = False
    mask[0, 0] = True
    return tuple(
        jnp.asarray(a, b)
        for a, b in (
            (logp, jnp.float32),
            (logp + 0.4 * rng.normal(size=(N, T)), jnp.float32),
            (rng.normal(size=N), jnp.float32),
            (mask, bool),
        )
    )


def losses(logp, old, adv, mask, aggregation="seq_mean_token_mean"):
    return {f.__name__: rl.aggregate(-f(logp, old, adv, mask).value, mask, aggregation) for f in RATIOS}


@compiled
def both(logp, *rest):
    """Value and gradient of each."""

    def twice(x):
        values = losses(x, *rest)
        return values, values

    grads, values = jax.jacrev(twice, has_aux=True)(logp)
    return values, grads


def test_on_policy_gradient(made):
    """r = 1: every ratio transform has gradient A mask / denominator."""
    logp, _, adv, mask = made
    _, grads = both(logp, logp, adv, mask)
    expected = -adv[:, None] * mask / jnp.maximum(mask.sum(1), 1)[:, None] / N
    for name, grad in grads.items():
        np.testing.assert_allclose(grad, expected, rtol=1e-5, atol=1e-7, err_msg=name)
    _, absent = both(logp, None, adv, mask)
    for name, grad in absent.items():
        np.testing.assert_allclose(grad, expected, rtol=1e-5, atol=1e-7, err_msg=name)


@pytest.mark.parametrize("junk", [1e4, -1e4, np.nan, np.inf, -np.inf], ids=str)
def test_masked_positions_play_no_part(made, junk):
    """Case 27, at padding: not in the loss, not in the gradient."""
    logp, old, adv, mask = made
    expected, expected_grads = both(logp, old, adv, mask)
    spoilt = (jnp.asarray(np.where(mask, x, y), jnp.float32) for x, y in ((logp, junk), (old, -junk)))
    found, grads = both(*spoilt, adv, mask)
    for name in found:
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)
        np.testing.assert_array_equal(grads[name], expected_grads[name], err_msg=name)


@pytest.mark.parametrize("size", [1e4, -1e4, 87.0, -300.0], ids=str)
def test_huge_log_ratios_stay_finite(made, size):
    """Case 27, at tokens that count."""
    logp, _, adv, mask = made
    found, grads = both(logp, logp - size, adv, mask)
    for name in found:
        assert np.isfinite(found[name]).all(), name
        assert np.isfinite(grads[name]).all(), name


UNCLAMPED = (rl.ppo_clip, rl.gspo, rl.gmpo, rl.cispo, rl.ripo)


@compiled
def unclamped(logp, old, adv, mask):
    def stacked(x):
        return jnp.stack([rl.aggregate(-f(x, old, adv, mask, log_ratio_clamp=None).value, mask) for f in UNCLAMPED])

    return stacked(logp), jax.jacrev(stacked)(logp)


@pytest.mark.parametrize("size", [1e4, -1e4], ids=str)
def test_huge_log_ratios_without_a_clamp(made, size):
    logp, _, adv, mask = made
    for f, value, grad in zip(UNCLAMPED, *unclamped(logp, logp - size, adv, mask), strict=True):
        assert np.isfinite(value), f.__name__
        assert np.isfinite(grad).all(), f.__name__


def test_masked_advantages_play_no_part():
    """NaN in an advantage of tokens that do not count, or of a row without any."""
    zeros, mask = jnp.zeros((2, 2)), jnp.asarray([[1, 1], [1, 0]])
    per_token, per_row = jnp.asarray([[1, 1], [-1, jnp.nan]]), jnp.asarray([1, jnp.nan])

    @compiled
    @jax.jacrev
    def grads(x):
        tokens = [f(x, zeros, per_token, mask).value.sum() for f in RATIOS]
        return tokens + [f(x, zeros, per_row, mask * jnp.asarray([[1], [0]])).value.sum() for f in RATIOS]

    for f, grad in zip(RATIOS * 2, grads(zeros), strict=True):
        assert np.isfinite(grad).all(), f.__name__
        assert grad.any(), f.__name__


def test_infinite_bounds_are_importance_sampling(made):
    logp, old, adv, mask = made
    s = compiled(partial(rl.ppo_clip, eps_low=np.inf, eps_high=np.inf))(*made)
    logp, old, adv, mask = map(np.asarray, made)
    np.testing.assert_allclose(s.value, np.where(mask, np.exp(logp - old) * adv[:, None], 0), rtol=1e-6)
    assert not s.clipped_low.any()
    assert not s.clipped_high.any()


def test_zero_bounds_keep_what_pulls_back(made):
    logp, old, adv, mask = made
    grad = compiled(jax.grad(lambda x: rl.ppo_clip(x, old, adv, mask, eps_low=0.0).value.sum()))(logp)
    logp, old, adv, mask = map(np.asarray, made)
    back = mask & ((logp - old) * adv[:, None] < 0)
    np.testing.assert_array_equal(grad != 0, back)
    assert back.any()


@pytest.mark.parametrize(
    "keywords", [{}, {"delta": 1.5}, {"dual_clip": 1.3}, {"eps_low": 0.1, "eps_high": 0.3}], ids=str
)
def test_definition_of_the_clip(made, keywords):
    """The choice of branch against the formulas with min and max, as printed."""
    logp, old, adv, mask = (np.asarray(a, np.float64) for a in made)
    r, a = np.exp(logp - old), adv[:, None]
    low = keywords.get("eps_low", 0.2)
    clipped = np.clip(r, 1 - low, 1 + keywords.get("eps_high", low))
    expected = np.minimum(np.minimum(r, keywords.get("delta", np.inf)) * a, clipped * a)
    if "dual_clip" in keywords:
        expected = np.where(a < 0, np.maximum(expected, keywords["dual_clip"] * a), expected)
    found = compiled(partial(rl.ppo_clip, **keywords))(*made).value
    np.testing.assert_allclose(found, np.where(mask > 0, expected, 0), rtol=1e-5)


def test_gradients_of_gspo_and_gspo_token_agree(made):
    _, grads = both(*made[:2], made[2], made[3])
    # The two differ where a bound lies between their roundings; not in these numbers.
    np.testing.assert_allclose(grads["gspo"], grads["gspo_token"], rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("kind", ["k1", "kl", "abs", "k2", "mse", "k3", "low_var_kl", "k3+"])
def test_kl_is_zero_at_equality(made, kind):
    value = jax.jit(lambda x, y: jax.value_and_grad(lambda z: rl.kl(z, y, kind).sum())(x))
    assert value(made[0], made[0])[0] == 0
    assert np.isfinite(value(made[0], made[0] + 1e4)[1]).all()


def test_kl_estimators_in_expectation():
    """E_p[k1] = E_p[k3] = KL(p || ref); over samples held fixed, k2 has the gradient of the KL and k3 does not."""
    with jax.enable_x64(True):
        logits, ref = (jnp.asarray(np.random.default_rng(s).normal(size=6)) for s in (1, 2))
        p, logq = jax.nn.softmax(logits), jax.nn.log_softmax(ref)

        def mean(x, kind):
            return (p * rl.kl(jax.nn.log_softmax(x)[None], logq[None], kind)[0]).sum()

        def exact(x):
            return (jax.nn.softmax(x) * (jax.nn.log_softmax(x) - logq)).sum()

        kinds = ("k2", "k3+", "k1", "k3")
        values = jax.jit(lambda x: [exact(x)] + [mean(x, kind) for kind in kinds])
        value, grads = values(logits), jax.jit(jax.jacrev(values))(logits)
        np.testing.assert_allclose(value[3:], value[0], rtol=1e-12)
        for grad, right in zip(grads[1:], (True, True, False, False), strict=True):
            assert np.allclose(grad, grads[0], rtol=1e-9, atol=1e-12) == right


def test_finite_differences(made):
    """Away from kinks: a directional derivative in float64."""
    with jax.enable_x64(True):
        logp, old, adv = (jnp.asarray(a, jnp.float64) for a in made[:3])
        way = jnp.asarray(np.random.default_rng(3).normal(size=(N, T)))
        f = jax.jit(lambda x: jnp.stack(list(losses(x, old, adv, made[3]).values())[:5]))
        slope = jax.jit(lambda x: jax.jvp(f, (x,), (way,))[1])(logp)
        step = 1e-5
        # CISPO's stop-gradient makes its derivative another function's.
        kept = [i for i, r in enumerate(RATIOS[:5]) if r not in (rl.cispo, rl.gspo_token)]
        difference = (f(logp + step * way) - f(logp - step * way)) / (2 * step)
        np.testing.assert_allclose(np.asarray(slope)[kept], np.asarray(difference)[kept], rtol=1e-6, atol=1e-8)


def test_low_precision_is_subtracted_in_float32(made):
    logp, old, adv, mask = made
    low = logp.astype(jnp.bfloat16)
    loss = compiled(jax.value_and_grad(lambda x: rl.ppo_clip(x, old, adv, mask).value.sum()))
    (value, grad), (expected, _) = loss(low), loss(low.astype(jnp.float32))
    assert value.dtype == np.float32
    assert grad.dtype == jnp.bfloat16
    assert value == expected


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda a: rl.ppo_clip(a[0], a[1][:, 1:], a[2], a[3]), "logp_old"),
        (lambda a: rl.ppo_clip(a[0], a[1], a[2], a[3][1:]), "mask"),
        (lambda a: rl.gspo(a[0], a[1], a[2][1:], a[3]), "adv"),
        (lambda a: rl.gmpo(a[0], a[1], a[0][:, 1:], a[3]), "adv"),
        (lambda a: rl.ppo_clip(*a, eps_low=-0.1), "eps_low"),
        (lambda a: rl.ppo_clip(*a, eps_high=float("nan")), "eps_high"),
        (lambda a: rl.ppo_clip(*a, dual_clip=1.0), "dual_clip"),
        (lambda a: rl.ppo_clip(*a, delta=1.1), "delta"),
        (lambda a: rl.ppo_clip(*a, log_ratio_clamp=0.0), "log_ratio_clamp"),
        (lambda a: rl.gspo_token(*a, log_ratio_clamp=-1.0), "log_ratio_clamp"),
        (lambda a: rl.cispo(*a, eps_low=-1.0), "eps_low"),
        (lambda a: rl.kl(a[0], a[1], "k4"), "kind"),
        (lambda a: rl.kl(a[0], a[1][1:]), "logp_ref"),
        (lambda a: rl.kl(a[0], a[1], "k2", (20.0, 10.0)), "clamp"),
        (lambda a: rl.kl(a[0], a[1], "k3", (0.0, 10.0)), "clamp"),
    ],
)
def test_bad_input_names_the_field(made, call, field):
    with pytest.raises(ConfigError, match=f"^{field}: found"):
        call(made)
