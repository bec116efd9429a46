"""RLER against stored values of its reconstruction, its invariants, and votes at the edges."""

import inspect
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import compiled

from jaxmeth import rl
from jaxmeth.types import ConfigError

FIELDS = {
    "freq": "freq",
    "fbar": "fbar",
    "astar": "majority",
    "conf": "conf",
    "disagreement": "disagreement",
    "alpha": "alpha",
}
K, n, A = 2, 6, 4  # one shape in the hand-made cases


def vote(answers, valid, num_answers, n_sel, cross):
    def prompt(a, v):
        ens = rl.ensemble_reward(a, v, num_answers, cross=cross)
        return ens, *rl.select_rollouts(a, v, ens, n_sel)

    return jax.vmap(prompt)(answers, valid)


everything = compiled(vote, static_argnames=("num_answers", "n_sel", "cross"))


# Without the checks of annotations that only the tests have.
raw = inspect.unwrap(rl.ensemble_reward)
metrics = compiled(rl.bias_metrics, static_argnames="selfbias_kind")


@pytest.mark.parametrize("double", [False, True], ids=["float32", "float64"])
@pytest.mark.parametrize("file", ["k2n8", "k3n6"])
def test_stored_values(golden, file, double):
    with jax.enable_x64(double), np.load(golden / "02-rler" / f"{file}.npz") as g:
        rtol = 1e-9 if double else 1e-5
        close = partial(np.testing.assert_allclose, rtol=rtol, atol=rtol)
        dtype = jnp.float64 if double else jnp.float32
        answers, valid = jnp.asarray(g["answers"]), jnp.asarray(g["valid"])
        ok = g["valid"] > 0
        correct = (g["answers"] == g["gold"][:, None, None]) & (g["answers"] >= 0)
        own = jnp.asarray(g["own_confidence"], dtype)

        @compiled
        def everything_stored(answers, valid, correct, own):
            results = {}
            for name in ("pooled", "cross"):
                ens, *rest = vote(answers, valid, int(g["num_answers"]), int(g["n_sel"]), name == "cross")
                results[name] = ens, *rest, rl.bias_metrics(ens.reward, correct, own, valid)
            alone, *_ = vote(answers[:, :1], valid[:, :1], int(g["num_answers"]), 1, False)
            one = correct[:, :1], own[:, :1], valid[:, :1]
            return results | {f"self_{k}": rl.bias_metrics(getattr(alone, k), *one) for k in ("hard", "soft")}

        found = everything_stored(answers, valid, correct, own)
        for name in ("pooled", "cross"):
            ens, selected, score, bias = found[name]
            for stored, field in FIELDS.items():
                close(getattr(ens, field), g[f"{name}/{stored}"], err_msg=f"{name}/{stored}")
            for field, value in (("hard", ens.hard), ("soft", ens.soft), ("reward", ens.reward), ("score", score)):
                close(np.asarray(value)[ok], g[f"{name}/{field}"][ok], err_msg=f"{name}/{field}")
            np.testing.assert_array_equal(selected, g[f"{name}/selected"] > 0)
            for field, value in bias._asdict().items():
                close(value, g[f"{name}/metric_{field}"], err_msg=f"{name}/metric_{field}")
        for name in ("self_hard", "self_soft"):
            for field, value in found[name]._asdict().items():
                close(value, g[f"{name}/metric_{field}"], err_msg=f"{name}/metric_{field}")


def votes(seed, prompts=6):
    rng = np.random.default_rng(seed)
    answers = rng.integers(-1, A, (prompts, K, n)).astype(np.int32)
    return jnp.asarray(answers), jnp.asarray(rng.uniform(size=answers.shape) < 0.8)


one = jax.jit(partial(rl.ensemble_reward, num_answers=A), static_argnames=("cross", "alpha_fn"))


def test_one_model():
    """K = 1: no disagreement, alpha = c^gamma, the hard reward is TTRL's, and its soft reward is the share."""

    @compiled
    @jax.vmap
    def four(a, v):
        settings = ({}, {"gamma": 2.0}, {"alpha_fn": _always}, {"alpha_fn": _never})
        return [rl.ensemble_reward(a, v, A, **k) for k in settings]

    answers, valid = (np.asarray(x)[:, :1] for x in votes(0))
    ens, squared, hard, soft = four(answers, valid)
    assert not ens.disagreement.any()
    np.testing.assert_allclose(squared.alpha, ens.conf**2, rtol=1e-6)
    np.testing.assert_allclose(hard.reward, ens.hard)
    np.testing.assert_allclose(soft.reward, ens.soft)
    winner = ens.majority[:, None, None]
    np.testing.assert_array_equal(ens.hard == 1, (answers == winner) & (answers >= 0) & valid)
    assert ens.hard.any()


def _always(conf, disagreement):
    return 1.0


def _never(conf, disagreement):
    return 0.0


def test_unanimous_and_divided():
    same = one(jnp.full((K, n), 2), jnp.ones((K, n)))
    np.testing.assert_allclose([same.disagreement, same.conf, same.alpha], [0, 1, 1], atol=1e-6)
    np.testing.assert_allclose(same.reward, 1, rtol=1e-6)
    assert not rl.adv_grpo(same.reward.reshape(1, -1)).any()
    divided = one(jnp.asarray([[0] * n, [3] * n]), jnp.ones((K, n)))
    np.testing.assert_allclose([divided.disagreement, divided.alpha], [1, 0], atol=1e-6)
    np.testing.assert_allclose(divided.reward, 1 / K, rtol=1e-6)
    assert divided.majority == 0


def test_invariants():
    answers, valid = votes(1)
    ens, selected, _ = everything(answers, valid, A, 5, False)
    assert float(ens.reward.min()) >= 0
    assert float(ens.reward.max()) <= 1
    full, *_ = everything(answers, jnp.ones_like(valid), A, 5, False)
    np.testing.assert_allclose(full.soft.mean((1, 2)), jnp.square(full.fbar[:, :A]).sum(1), rtol=1e-5)
    swapped, chosen, _ = everything(answers[:, ::-1], valid[:, ::-1], A, 5, False)
    np.testing.assert_allclose(swapped.reward[:, ::-1], ens.reward, rtol=1e-5, atol=1e-6)
    assert (chosen.sum((1, 2)) == selected.sum((1, 2))).all()
    # Relabelling answers: where the majority is not a tie.
    names = np.asarray([2, 3, 1, 0, -1])
    renamed, *_ = everything(jnp.asarray(names[np.asarray(answers)]), valid, A, 5, False)
    shares = np.sort(ens.fbar[:, :A], 1)
    clear = shares[:, -1] - shares[:, -2] > 1e-3
    assert clear.sum() >= 2
    np.testing.assert_allclose(renamed.reward[clear], ens.reward[clear], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("n_sel", [4, 5, *(pytest.param(m, marks=pytest.mark.slow) for m in (1, K * n + 3))])
def test_selection(n_sel):
    answers, valid = votes(2, prompts=12)
    ens, selected, _ = everything(answers, valid, A, n_sel, False)
    count = np.asarray(valid.sum((1, 2)))
    np.testing.assert_array_equal(selected.sum((1, 2)), np.minimum(n_sel, count))
    assert not (selected & ~valid).any()
    positive = np.asarray(valid & (answers == ens.majority[:, None, None]) & (ens.majority >= 0)[:, None, None])
    both = positive.any((1, 2)) & (np.asarray(valid) & ~positive).any((1, 2))
    assert both.any()
    if n_sel >= 4:
        assert (np.asarray(selected) & positive).any((1, 2))[both].all()
        assert (np.asarray(selected) & ~positive).any((1, 2))[both].all()


def test_ties_of_selection_are_round_robin():
    answers = jnp.zeros((K, n), int)
    chosen, _ = rl.select_rollouts(answers, None, one(answers, jnp.ones((K, n))), 3)
    np.testing.assert_array_equal(chosen, [[1, 1, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0]])


def test_cross_judges_by_the_others():
    answers = jnp.asarray([[0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 2, -1]])
    ens = one(answers, jnp.ones((K, n)), cross=True, alpha_fn=_never)
    np.testing.assert_allclose(ens.soft[0], [0, 0, 0, 4 / 6, 4 / 6, 4 / 6], rtol=1e-6)
    np.testing.assert_allclose(ens.soft[1], [0.5, 0.5, 0.5, 0.5, 0, 0], rtol=1e-6)
    np.testing.assert_array_equal(ens.hard, [[0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, 0]])
    alone = one(answers, jnp.asarray([[1] * n, [0] * n]), cross=True)
    np.testing.assert_allclose(alone.soft[0], 0.5, rtol=1e-6)  # no other active model: pooled
    assert not alone.reward[1].any()


def test_nothing_to_vote_on():
    for answers, valid in (((jnp.full((K, n), -1)), jnp.ones((K, n))), (jnp.zeros((K, n), int), jnp.zeros((K, n)))):
        ens = one(answers, valid)
        assert ens.majority == -1
        assert not any(np.asarray(x).any() for x in (ens.conf, ens.hard, ens.soft, ens.reward))
        assert all(np.isfinite(x).all() for x in ens)
        chosen, score = rl.select_rollouts(answers, valid, ens, 3)
        assert chosen.sum() == min(3, int(valid.sum()))
        assert np.isfinite(score).all()


def test_layout_for_the_core():
    answers, valid = votes(3, prompts=4)
    ens, selected, _ = everything(answers, valid, A, 5, False)
    by_model = rl.rler_rewards(answers, valid, A, 5)
    np.testing.assert_allclose(by_model.rewards, jnp.swapaxes(ens.reward, 0, 1), rtol=1e-6)
    np.testing.assert_array_equal(by_model.selected, jnp.swapaxes(selected, 0, 1))
    pool = rl.rler_rewards(answers, valid, A, share_pool=True)
    np.testing.assert_allclose(pool.rewards, ens.reward.reshape(4, K * n), rtol=1e-6)
    np.testing.assert_array_equal(pool.selected, valid.reshape(4, K * n))


def test_stacked_models_train_in_one_call():
    """Any K: one loss under vmap over models; rollouts that are not selected play no part."""
    answers, valid = votes(4, prompts=3)
    found = rl.rler_rewards(answers, valid, A, 8)
    rows, width = 3 * n, 2
    logp = -jnp.ones((K, rows, width))
    batch = rl.RolloutBatch(found.rewards, jnp.swapaxes(valid, 0, 1), None, jnp.ones((K, rows, width), bool))

    @jax.jit
    @jax.vmap
    def grads(x, b, keep):
        return jax.grad(lambda y: rl.presets.dr_grpo(max_len=2)(y, rl.keep_rollouts(b, keep))[0])(x)

    grad = np.asarray(grads(logp, batch, found.selected)).reshape(K, 3, n, width)
    assert grad.any()
    assert not grad[~np.asarray(found.selected)].any()


# --- metrics ---------------------------------------------------------------------------------------------------------


def test_oracle_has_no_bias_and_soft_self_reward_is_all_coupling():
    z = jnp.asarray([1.0, 0.0, 0.0, 1.0])
    share = jnp.asarray([0.6, 0.3, 0.3, 0.1])
    oracle = metrics(z, z, share)
    assert oracle.rho_noise == oracle.rho_symbias == 0
    np.testing.assert_allclose(metrics(share, z, share).rho_selfbias, 1, rtol=1e-6)
    over = metrics(jnp.asarray([1.0, 1.0, 0.0, 1.0]), z, share)
    np.testing.assert_allclose([over.over, over.under, over.rho_symbias], [0.25, 0, 1])
    residual = metrics(share, z, share, selfbias_kind="residual").rho_selfbias
    np.testing.assert_allclose(residual, np.corrcoef(share, share - z)[0, 1], rtol=1e-5)


def test_degenerate_metrics():
    """Constant reward, one rollout, none, a NaN reward (left out), rewards of 1e30."""
    z, share = jnp.asarray([1, 0, 0, 1]), jnp.asarray([0.6, 0.3, 0.3, 0.1])
    assert metrics(jnp.full(4, 0.3), z, share).rho_selfbias == 0
    spoilt = metrics(jnp.asarray([0.2, jnp.nan, 0.4, 0.9]), z, share)
    absent = metrics(jnp.asarray([0.2, 0.5, 0.4, 0.9]), z, share, jnp.asarray([1, 0, 1, 1]))
    jax.tree.map(np.testing.assert_array_equal, spoilt, absent)
    for reward, valid in ((jnp.asarray([1e30, 0, 1e30, 0]), None), (share, jnp.zeros(4)), (share, z * jnp.arange(4))):
        assert all(np.isfinite(value) for value in metrics(reward, z, share, valid))
    assert all(np.isfinite(value) for value in rl.bias_metrics(jnp.zeros(0), jnp.zeros(0), jnp.zeros(0)))


def test_clusters():
    found = rl.cluster_answers([["42", " 42. ", "forty  two"], [None, "Forty Two", ""]])
    np.testing.assert_array_equal(found, [[0, 0, 1], [-1, 1, -1]])
    assert found.dtype == np.int32
    np.testing.assert_array_equal(rl.cluster_answers(["x²", "x2", "y"]), [0, 0, 1])
    np.testing.assert_array_equal(rl.cluster_answers(["3", "3...", "3 .", "3. .", ".3", ". ."]), [0, 0, 0, 0, 1, -1])
    assert rl.cluster_answers([]).shape == (0,)


@pytest.mark.parametrize("answers", [[["a", "b"], ["c"]], [1, 2], [[["a"]], [["b"], ["c"]]], ["a", b"a"]], ids=str)
def test_clusters_of_no_strings(answers):
    with pytest.raises(ConfigError, match=r"^answers: found"):
        rl.cluster_answers(answers)


def test_alpha_that_is_no_number():
    """Clipped to [0, 1]; NaN counts as 0, the soft reward."""
    answers = jnp.asarray([[0, 0, 0, 1, 1, 2]] * K)
    for alpha, expected in ((np.nan, 0), (np.inf, 1), (-3.0, 0), (0.25, 0.25)):
        ens = rl.ensemble_reward(answers, None, A, alpha_fn=lambda c, d, alpha=alpha: alpha)
        assert ens.alpha == expected
        np.testing.assert_allclose(ens.reward, expected * ens.hard + (1 - expected) * ens.soft)


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda a, v: raw(a[0], None, A), "answers"),
        (lambda a, v: raw(a[None], None, A), "answers"),
        (lambda a, v: raw(a.astype(float), None, A), "answers"),
        (lambda a, v: raw(a, v, 4.5), "num_answers"),
        (lambda a, v: rl.ensemble_reward(a[:0], v[:0], A), "answers"),
        (lambda a, v: rl.ensemble_reward(a, v, 0), "num_answers"),
        (lambda a, v: rl.ensemble_reward(a.at[0, 0].set(A), v, A), "answers"),
        (lambda a, v: rl.ensemble_reward(a.at[0, 0].set(-2), v, A), "answers"),
        (lambda a, v: rl.ensemble_reward(a, v[:, 1:], A), "valid"),
        (lambda a, v: rl.ensemble_reward(a, v, A, gamma=-1.0), "gamma"),
        (lambda a, v: rl.ensemble_reward(a, v, A, gamma=float("nan")), "gamma"),
        (lambda a, v: rl.select_rollouts(a, v, one(a, v), 0), "n_sel"),
        (lambda a, v: rl.select_rollouts(a, v, one(a, v), 3, q_min=0.6), "q_min"),
        (lambda a, v: rl.select_rollouts(a, v, one(a, v), 3, kappa=-1.0), "kappa"),
        (lambda a, v: rl.select_rollouts(a[:, 1:], None, one(a, v), 3), "ens.reward"),
        (lambda a, v: rl.rler_rewards(a[None, :0], None, A), "answers"),
        (lambda a, v: rl.rler_rewards(a[None], v[None, :1], A), "valid"),
        (lambda a, v: rl.rler_rewards(a[None], None, 1), "answers"),
        (lambda a, v: rl.bias_metrics(jnp.ones(3), jnp.ones(2), jnp.ones(3)), "correct"),
        (lambda a, v: rl.bias_metrics(jnp.ones(3), jnp.ones(3), jnp.ones(2)), "confidence"),
        (lambda a, v: rl.bias_metrics(jnp.ones(3), jnp.ones(3), jnp.ones(3), selfbias_kind="x"), "selfbias_kind"),
    ],
)
def test_bad_input_names_the_field(call, field):
    answers, valid = votes(5)
    with pytest.raises(ConfigError, match=f"^{field}: found"):
        call(answers[0].at[0, 0].set(2), valid[0])


def test_votes_known_while_tracing():
    """Answers that a jitted function closes over are checked, not traced."""
    answers = jnp.asarray([[0, 1], [1, 1]])
    assert compiled(lambda gamma: rl.ensemble_reward(answers, None, 2, gamma=gamma))(1.0).majority == 1
    with pytest.raises(ConfigError, match=r"^answers: found"):
        jax.jit(lambda gamma: rl.ensemble_reward(answers, None, 1, gamma=gamma))(1.0)
