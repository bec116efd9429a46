"""The composed loss: presets against TRL, batches in parts and over devices, degenerate batches, wrong input."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxmeth import rl
from jaxmeth.rl import presets
from jaxmeth.types import ConfigError

P, G, T = 8, 4, 6
N = P * G

LINEAR = rl.as_prompt_weight("linear_r")
PLAIN = presets.grpo()
# Between them every choice, each mode of aggregation and both ways to normalise.
LOSSES = {
    "grpo": presets.grpo(beta=0.04),
    "lambda, weights": rl.make_policy_loss(
        token_weight=rl.lambda_grpo_weight, normalise="weights", weight_kl=True, beta=0.1, kl_bias_correction=True
    ),
    "ripo, asymmetric": rl.make_policy_loss(
        advantage=rl.adv_prompt_weighted, ratio=rl.ripo, aggregation="group_token_mean"
    ),
    "prompt weight": presets.dr_grpo(max_len=9, prompt_weight=rl.as_prompt_weight("sqrt_r")),
    "dapo": presets.dapo(),
    "gspo, sums": presets.gspo(aggregation="seq_mean_token_sum", advantage=rl.adv_rloo),
}


FEW = {name: LOSSES[name] for name in ("lambda, weights", "ripo, asymmetric", "gspo, sums")}


def values(losses, logp, batch):
    """(loss, metrics), gradient of each."""
    return {name: jax.value_and_grad(loss, has_aux=True)(logp, batch) for name, loss in losses.items()}


every = jax.jit(partial(values, LOSSES))


def make(seed=0, prompts=P, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    n = prompts * G
    logp = -np.abs(rng.normal(1, 0.7, (n, T)))
    rewards = rng.integers(0, 2, (prompts, G)).astype(float)
    rewards[0] = 0
    rewards[1] = [0, 1, 1, 1]
    mask = rng.uniform(size=(n, T)) < 0.8
    mask[3] = False
    floats = (rewards, logp + 0.3 * rng.normal(size=(n, T)), logp + 0.3 * rng.normal(size=(n, T)), logp)
    rewards, old, ref, logp = (jnp.asarray(x, dtype) for x in floats)
    valid = jnp.asarray(rng.uniform(size=(prompts, G)) < 0.9)
    tokens = jnp.asarray(rng.integers(0, 2, (n, T)), jnp.int32)
    alive = jnp.ones((n, T), bool)
    return logp, rl.RolloutBatch(rewards, valid, tokens, jnp.asarray(mask), old, ref, alive)


@pytest.fixture(scope="module")
def made():
    return make()


@pytest.fixture(scope="module")
def whole(made):
    return every(*made)


def part_of(logp, batch, prompts):
    """The rows of some prompts."""
    rows = slice(prompts.start * G, prompts.stop * G)
    per_prompt, per_row = batch._replace(rewards=batch.rewards[prompts], valid=batch.valid[prompts]), ()
    per_row = {k: getattr(batch, k)[rows] for k in ("tokens", "mask", "logp_old", "logp_ref", "alive")}
    return logp[rows], per_prompt._replace(**per_row)


def test_composition_is_the_sum_of_its_parts(made, whole):

    @jax.jit
    def by_hand(logp, b):
        adv = rl.adv_prompt_weighted(b.rewards, b.valid).reshape(-1)
        s = rl.ripo(logp, b.logp_old, adv, b.mask)
        ids = jnp.repeat(jnp.arange(P), G)
        first = rl.aggregate(-s.value, b.mask, "group_token_mean", group_ids=ids)
        u = rl.lambda_grpo_weight(b.tokens, b.alive, G)
        value = -rl.ppo_clip(logp, b.logp_old, rl.adv_grpo(b.rewards, b.valid).reshape(-1), b.mask).value
        value += 0.1 * rl.kl(logp, b.logp_ref) * jnp.exp(logp - b.logp_old)
        return first, (value * u * b.mask).sum() / (u * b.mask).sum()

    found = [whole[name][0][0] for name in ("ripo, asymmetric", "lambda, weights")]
    np.testing.assert_allclose(found, by_hand(*made), rtol=1e-5)


@pytest.mark.parametrize("double", [False, True], ids=["float32", "float64"])
def test_presets_of_the_stored_batch(golden, double):
    """GRPO with KL, DAPO's clip without its filter, Dr. GRPO's divisor, GSPO: through the whole composition."""
    with jax.enable_x64(double), np.load(golden / "00-rl-core" / "binary_p4g4t7.npz") as g:
        dtype = jnp.float64 if double else jnp.float32
        logp, old, ref, rewards = (jnp.asarray(g[k], dtype) for k in ("logp", "logp_old", "logp_ref", "rewards"))
        batch = rl.RolloutBatch(rewards, None, None, jnp.asarray(g["mask"]), old, ref)
        losses = {
            "trl_grpo_beta0.04": presets.grpo(beta=0.04),
            "trl_dapo_cliphigher": presets.dapo(group_filter=None),
            "trl_dr_grpo": presets.dr_grpo(max_len=7, advantage=rl.adv_grpo),
            "trl_gspo_3e-4_4e-4": presets.gspo(),
        }
        found = jax.jit(lambda x: {k: jax.value_and_grad(f, has_aux=True)(x, batch) for k, f in losses.items()})(logp)
        for name, ((loss, _), grad) in found.items():
            np.testing.assert_allclose(loss, g[f"loss_{name}"], rtol=1e-5, atol=1e-9 if double else 1e-6)
            tolerance = (1e-9 if double else 1e-5) * np.abs(g[f"grad_{name}"]).max()
            np.testing.assert_allclose(grad, g[f"grad_{name}"], rtol=0, atol=tolerance)
        metrics = found["trl_dapo_cliphigher"][0][1]
        for flag in ("low", "high"):
            stored = g[f"metric_trl_dapo_cliphigher/clip_ratio/{flag}_mean"]
            np.testing.assert_allclose(metrics[f"clip_{flag}"], stored, rtol=1e-5)
        np.testing.assert_allclose(metrics["kl_old"], g["metric_verl_0.2_0.28_c10/actor/ppo_kl"], rtol=1e-5)
        np.testing.assert_allclose(metrics["kl_ref"], g["metric_trl_kl_k3_tokenmean"], rtol=1e-5)


# --- parts and devices -----------------------------------------------------------------------------------------------


@jax.jit
def denominators(batch):
    return {name: loss.denominator(batch) for name, loss in LOSSES.items()}


@jax.jit
def over(logp, batch, total):
    return {n: jax.value_and_grad(f, has_aux=True)(logp, batch, total[n]) for n, f in LOSSES.items()}


def test_four_microbatches(made, whole):
    parts = [part_of(*made, slice(i, i + 2)) for i in range(0, P, 2)]
    total = jax.tree.map(lambda *d: sum(d), *[denominators(batch) for _, batch in parts])
    found = [over(*part, total) for part in parts]
    for name, ((loss, _), grad) in whole.items():
        np.testing.assert_allclose(sum(f[name][0][0] for f in found), loss, rtol=0, atol=1e-6)
        np.testing.assert_allclose(np.concatenate([f[name][1] for f in found]), grad, rtol=0, atol=1e-6)
        assert np.asarray(grad).any()


def mesh():
    return jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


def test_eight_devices_by_shard_map(made, whole):
    """Explicit collectives: each device takes one prompt and the psum of the denominators."""
    assert jax.device_count() == 8
    rows = PartitionSpec("data")

    @partial(jax.shard_map, mesh=mesh(), in_specs=(rows, rows), out_specs=(PartitionSpec(), rows))
    def parts(logp, batch):
        found = {}
        for name, loss in LOSSES.items():
            total = jax.lax.psum(loss.denominator(batch), "data")
            (value, _), grad = jax.value_and_grad(loss, has_aux=True)(logp, batch, total)
            found[name] = (jax.lax.psum(value, "data"), grad)
        return {n: v for n, (v, _) in found.items()}, {n: g for n, (_, g) in found.items()}

    values, grads = jax.jit(parts)(*made)
    for name, ((loss, _), grad) in whole.items():
        np.testing.assert_allclose(values[name], loss, rtol=0, atol=1e-6, err_msg=name)
        np.testing.assert_allclose(grads[name], grad, rtol=0, atol=1e-6, err_msg=name)


def test_eight_devices_by_sharding(made, whole):
    """The compiler's own partitioning of the same function."""
    found = jax.jit(partial(values, FEW))(*jax.device_put(made, NamedSharding(mesh(), PartitionSpec("data"))))
    for name in FEW:
        (loss, _), grad = whole[name]
        assert len(found[name][1].sharding.device_set) == 8
        np.testing.assert_allclose(found[name][0][0], loss, rtol=0, atol=1e-6, err_msg=name)
        np.testing.assert_allclose(found[name][1], grad, rtol=0, atol=1e-6, err_msg=name)


def test_vmap_is_a_loop():
    batches = [make(seed) for seed in range(3)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *batches)
    found = jax.jit(jax.vmap(partial(values, FEW)))(*stacked)
    for i, one in enumerate(batches):
        expected = {name: value for name, value in every(*one).items() if name in FEW}
        jax.tree.map(lambda a, b, i=i: np.testing.assert_allclose(a[i], b, rtol=1e-5, atol=1e-6), found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo", "lambda, weights"])
def test_eager_is_jit(made, whole, name):
    loss, metrics = LOSSES[name](*made)
    np.testing.assert_allclose(loss, whole[name][0][0], rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), metrics, whole[name][0][1])


def test_ragged_groups(made):
    """Without the absent rollouts, by group_ids, the loss and gradient are those of the padded form."""
    logp, batch = made
    keep = np.flatnonzero(np.asarray(batch.valid).reshape(-1))
    padded = rl.keep_rollouts(batch, batch.valid)
    rows = {k: getattr(batch, k)[keep] for k in ("tokens", "mask", "logp_old", "logp_ref", "alive")}
    ids = jnp.asarray(np.repeat(np.arange(P), G)[keep])
    ragged = batch._replace(rewards=batch.rewards.reshape(-1)[keep], valid=None, group_ids=ids, **rows)
    names = ("lambda, weights", "ripo, asymmetric", "dapo", "prompt weight")
    losses = {name: dataclasses.replace(LOSSES[name], num_groups=P) for name in names}
    found = jax.jit(partial(values, losses))(logp[keep], ragged)
    expected = every(logp, padded)
    for name in names:
        (loss, metrics), grad = expected[name]
        # Dr. GRPO's divisor counts rows, absent ones included.
        scale = N / len(keep) if name == "prompt weight" else 1
        np.testing.assert_allclose(found[name][0][0], scale * loss, rtol=1e-5, err_msg=name)
        np.testing.assert_allclose(found[name][1], scale * np.asarray(grad)[keep], rtol=1e-5, atol=1e-7, err_msg=name)
        np.testing.assert_allclose(found[name][0][1]["tokens"], metrics["tokens"])


# --- degenerate batches ----------------------------------------------------------------------------------------------


def finite(found):
    for name, ((loss, metrics), grad) in found.items():
        for value in (loss, grad, *metrics.values()):
            assert np.isfinite(value).all(), name
    return found


@pytest.mark.parametrize("change", ["masked", "constant", "padding", "ratios", "invalid"])
def test_degenerate_batches(made, change):
    """Cases 26, 27, 28: finite everywhere, and exactly 0 where there is nothing to learn from."""
    logp, batch = made
    batch = {
        "masked": lambda: batch._replace(mask=jnp.zeros_like(batch.mask)),
        "constant": lambda: batch._replace(rewards=jnp.full_like(batch.rewards, 0.3), valid=jnp.ones_like(batch.valid)),
        "padding": lambda: batch._replace(logp_old=jnp.where(batch.mask, batch.logp_old, 1e4)),
        "ratios": lambda: batch._replace(logp_old=batch.logp_old + jnp.where(jnp.arange(T) % 2, 1e4, -1e4)[None]),
        "invalid": lambda: batch._replace(valid=jnp.zeros_like(batch.valid)),
    }[change]()
    if change == "padding":
        logp, expected = jnp.where(batch.mask, logp, -1e4), every(*made)
    found = finite(every(logp, batch))
    if change == "padding":
        for name in found:
            np.testing.assert_array_equal(found[name][1], expected[name][1])
    for name in ("dapo", "gspo, sums", "prompt weight") if change in ("constant", "invalid") else ():
        assert found[name][0][0] == 0
        assert not np.asarray(found[name][1]).any()
    if change == "masked":
        for (loss, _), grad in found.values():
            assert loss == 0
            assert not np.asarray(grad).any()


def test_empty_batch_and_group_of_one():
    """Cases 28 and 31."""
    logp, batch = make(prompts=2)
    few = jax.jit(partial(values, FEW | {"no KL": dataclasses.replace(LOSSES["lambda, weights"], beta=0.0)}))
    for (loss, _), grad in finite(few(logp[:0], jax.tree.map(lambda x: x[:0], batch))).values():
        assert loss == 0
        assert grad.shape == (0, T)
    single = finite(few(logp, batch._replace(rewards=batch.rewards.reshape(-1, 1), valid=None)))
    for name in ("no KL", "gspo, sums"):
        (loss, _), grad = single[name]
        assert loss == 0
        assert not np.asarray(grad).any()


def test_nan_reward_counts_as_invalid(made, whole):
    """Case 30: counted, and the same as an invalid rollout; no other row moves."""
    logp, batch = made
    assert batch.valid[2, 1]
    spoilt = finite(every(logp, batch._replace(rewards=batch.rewards.at[2, 1].set(jnp.nan))))
    absent = every(logp, batch._replace(valid=batch.valid.at[2, 1].set(False)))
    for name, ((loss, metrics), grad) in spoilt.items():
        np.testing.assert_array_equal(loss, absent[name][0][0])
        np.testing.assert_array_equal(grad, absent[name][1])
        assert metrics["invalid"] == whole[name][0][1]["invalid"] + 1
        if name != "dapo":  # whether DAPO keeps the group, and so its divisor, may depend on the rollout
            others = np.arange(N) // G != 2
            np.testing.assert_array_equal(np.asarray(grad)[others], np.asarray(whole[name][1])[others])


def test_huge_rewards(made):
    """Case 31: 1e30 and -1e30 with ordinary ratios."""
    logp, batch = made
    for scale in (1e30, -1e30):
        finite(every(logp, batch._replace(rewards=batch.rewards * scale)))


LARGE = 25.0  # of a log-ratio: e^25 times 1e30 overflows
EXTREME = {
    "unclamped": presets.rloo(ratio=partial(rl.ppo_clip, log_ratio_clamp=None)),
    "unclipped": presets.rloo(ratio=partial(rl.ppo_clip, eps_low=np.inf)),
    "rloo": presets.rloo(),
    "dr_grpo": presets.dr_grpo(max_len=3),
    "gspo": presets.gspo(advantage=rl.adv_prompt_weighted),
    "gmpo": presets.rloo(ratio=rl.gmpo),
    "reinforce": rl.make_policy_loss(advantage=rl.adv_reinforce, ratio=rl.reinforce),
    "cispo": presets.rloo(ratio=partial(rl.cispo, eps_high=np.inf, log_ratio_clamp=None)),
    "kl": presets.rloo(advantage=rl.adv_grpo, beta=0.04, kl_bias_correction=True),
}


def test_huge_rewards_and_huge_ratios():
    """Cases 27 and 31 together: no overflow, and so no NaN, in value or gradient; the push is kept."""
    logp, mask = -jnp.ones((4, 3)), jnp.ones((4, 3), bool)
    rewards = jnp.asarray([[1e30, -1e30, 0, 0]])
    run = jax.jit(partial(values, EXTREME))
    for d in (LARGE, -LARGE, 1e4, -1e4, LARGE * (-1.0) ** jnp.arange(3)[None]):
        found = finite(run(logp, rl.RolloutBatch(rewards, None, None, mask, logp - d, logp + 1e4)))
        assert np.abs(found["reinforce"][1]).max() > 1e28
        if d is LARGE:
            assert np.abs(found["unclamped"][1]).max() > 1e28


def test_filter_takes_groups_out_of_the_divisor(made):
    logp, batch = made
    keep = np.repeat(rl.group_filter(batch.rewards, batch.valid), G)
    _, metrics = LOSSES["dapo"](logp, batch)
    assert metrics["tokens"] == (np.asarray(batch.mask) & keep[:, None]).sum() < np.asarray(batch.mask).sum()
    np.testing.assert_allclose(metrics["kept_groups"], keep.mean())


def test_only_logp_has_a_gradient(made):
    logp, batch = made

    def of_constants(rewards, old, ref):
        return LOSSES["lambda, weights"](logp, batch._replace(rewards=rewards, logp_old=old, logp_ref=ref))[0]

    for grad in jax.grad(of_constants, argnums=(0, 1, 2))(batch.rewards, batch.logp_old, batch.logp_ref):
        assert not np.asarray(grad).any()


def test_left_out_rollouts_are_in_no_process_set(made):
    logp, batch = made
    keep = jnp.ones((P, G), bool).at[:, 0].set(False)
    batch = rl.keep_rollouts(batch._replace(tokens=jnp.ones_like(batch.tokens), mask=jnp.ones_like(batch.mask)), keep)
    _, metrics = LOSSES["lambda, weights"](logp, batch)
    np.testing.assert_allclose(metrics["token_weight"], 1 / (G - 1), rtol=1e-6)
    assert metrics["tokens"] == P * (G - 1) * T


def test_no_columns(made):
    """T = 0: nothing to learn from, whatever the parts."""
    logp, batch = made
    narrow = {k: getattr(batch, k)[:, :0] for k in ("tokens", "mask", "logp_old", "logp_ref", "alive")}
    loss, grad = jax.value_and_grad(LOSSES["lambda, weights"], has_aux=True)(logp[:, :0], batch._replace(**narrow))
    assert loss[0] == 0
    assert grad.shape == (N, 0)


def test_weights_that_do_not_scale_take_a_prompt_weight(made):
    logp, batch = made
    plain = partial(rl.adv_prompt_weighted, weight="rloo")
    found, expected = (
        rl.make_policy_loss(advantage=a, prompt_weight=LINEAR)(logp, batch)[0] for a in (plain, rl.adv_dr_grpo)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5)


# --- wrong input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parts", "field"),
    [
        ({"aggregation": "mean"}, "aggregation"),
        ({"kl_kind": "k9"}, "kl_kind"),
        ({"normalise": "rows"}, "normalise"),
        ({"normalise": "weights", "aggregation": "seq_mean_token_mean"}, "normalise"),
        ({"beta": -0.1}, "beta"),
        ({"beta": float("nan")}, "beta"),
        ({"aggregation": "token_sum_norm"}, "max_len"),
        ({"aggregation": "token_sum_norm", "max_len": 0}, "max_len"),
        ({"ratio": "ppo_clip"}, "ratio"),
        ({"advantage": None}, "advantage"),
        ({"token_weight": "lambda"}, "token_weight"),
        ({"token_weight": rl.lambda_grpo_weight, "ratio": partial(rl.gspo, eps_low=0.1)}, "token_weight"),
        ({"prompt_weight": rl.as_prompt_weight("grpo")}, "prompt_weight"),
        ({"prompt_weight": LINEAR, "advantage": rl.adv_prompt_weighted}, "prompt_weight"),
        ({"prompt_weight": LINEAR, "advantage": partial(rl.adv_prompt_weighted, weight="grpo")}, "prompt_weight"),
        ({"prompt_weight": LINEAR, "advantage": partial(rl.adv_prompt_weighted, weight=abs)}, "prompt_weight"),
    ],
)
def test_wrong_parts(parts, field):
    with pytest.raises(ConfigError, match=f"^{field}: found"):
        rl.make_policy_loss(**parts)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda x, b: (x[1:], b), "logp"),
        (
            lambda x, b: (x[:-1], jax.tree.map(lambda a: a[:-1], b)._replace(rewards=b.rewards, valid=b.valid)),
            "rewards",
        ),
        (lambda x, b: (x, b._replace(rewards=b.rewards[:, :3], valid=b.valid[:, :3])), "rewards"),
        (lambda x, b: (x, b._replace(valid=b.valid[:3])), "valid"),
        (lambda x, b: (x, b._replace(logp_old=b.logp_old[:, 1:])), "logp_old"),
        (lambda x, b: (x, b._replace(logp_ref=None)), "logp_ref"),
        (lambda x, b: (x, b._replace(logp_ref=b.logp_ref[1:])), "logp_ref"),
        (lambda x, b: (x, b._replace(tokens=None)), "tokens"),
        (lambda x, b: (x, b._replace(alive=b.alive[:, 1:])), "alive"),
        (lambda x, b: (x, b._replace(group_ids=jnp.zeros(N, int), rewards=b.rewards.reshape(-1))), "num_groups"),
    ],
)
def test_wrong_batches(made, change, field):
    with pytest.raises(ConfigError, match=f"^{field}: found"):
        LOSSES["lambda, weights"](*change(*made))


def test_group_size_must_divide_the_batch(made):
    logp, batch = made
    with pytest.raises(ConfigError, match="group size must divide"):
        PLAIN(logp[:-1], batch._replace(**{k: getattr(batch, k)[:-1] for k in ("mask", "logp_old", "logp_ref")}))
    with pytest.raises(ConfigError, match=r"^keep: found"):
        rl.keep_rollouts(batch, jnp.ones((P, 1)))
