"""The train step, objectives, and the loop around them."""

import functools
import os
import signal

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small

from jaxmeth import models, rl, train
from jaxmeth.train.sinks import CsvSink
from jaxmeth.types import CheckpointError, ConfigError

SGD = optax.sgd(0.1)


@functools.cache
def sft_step():
    return train.make_train_step(train.sft_objective(small.CFG), train.adamw(1e-2))


def close(a, b, atol=1e-6):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=atol), a, b)


def test_sft_loss_is_the_mean_over_target_tokens():
    params, batch = small.params(), small.sft_batch()
    logits = models.apply(params, small.CFG, batch.tokens, mask=batch.real).logits
    logp = np.asarray(jax.nn.log_softmax(logits[:, :-1], axis=-1))
    picked = np.take_along_axis(logp, np.asarray(batch.tokens)[:, 1:, None], 2)[..., 0]
    target = np.asarray(batch.target)[:, 1:]
    _, metrics = sft_step()(train.train_init(params, train.adamw(1e-2)), batch)
    np.testing.assert_allclose(metrics["loss"], -picked[target].mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["nll"], metrics["loss"], rtol=1e-6)
    hits = logp.argmax(-1) == np.asarray(batch.tokens)[:, 1:]
    np.testing.assert_allclose(metrics["accuracy"], hits[target].mean(), rtol=1e-6)
    assert metrics["tokens"] == target.sum()


def test_no_target_token_gives_no_gradient():
    batch = small.sft_batch()
    batch = batch._replace(target=jnp.zeros_like(batch.target))
    _, metrics = sft_step()(train.train_init(small.params(), train.adamw(1e-2)), batch)
    assert metrics["loss"] == metrics["grad_norm"] == 0


def test_sft_learns_and_compiles_once():
    state = train.train_init(small.params(), train.adamw(1e-2))
    step = jax.jit(chex.assert_max_traces(sft_step().__wrapped__, n=1))
    for _ in range(30):
        state, metrics = step(state, small.sft_batch())
    assert metrics["nll"] < 1.0, "the batch is learnt by heart"
    assert state.step == 30


@pytest.mark.parametrize(
    "loss",
    [
        pytest.param(small.GRPO, id="grpo"),
        pytest.param(
            rl.make_policy_loss(token_weight=rl.lambda_grpo_weight, beta=0.1), id="lambda, kl", marks=pytest.mark.slow
        ),
    ],
)
def test_microbatches_and_devices_change_nothing(loss):
    """One piece, two pieces, and sharded over two devices."""
    params = small.params()
    made, batch = small.policy_batch(params)
    batch = batch._replace(rollout=batch.rollout._replace(logp_ref=made.logp - 0.1, logp_old=made.logp + 0.05))
    objective = train.policy_objective(loss, small.CFG)
    start = train.train_init(params, SGD)
    whole, metrics = train.make_train_step(objective, SGD)(start, batch)
    parts, cut = train.make_train_step(objective, SGD, microbatches=2)(start, batch)
    close(parts.params, whole.params)
    assert metrics.keys() == cut.keys()
    close(metrics, cut, atol=1e-5)
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))
    spread = jax.device_put(batch, train.batch_sharding(mesh))
    started = jax.device_put(start, train.param_shardings(start, mesh))
    sharded, theirs = train.make_train_step(objective, SGD)(started, spread)
    close(sharded.params, whole.params)
    close(metrics, theirs, atol=1e-5)


def test_what_looks_across_groups_is_not_cut():
    params = small.params()
    _, batch = small.policy_batch(params)
    flat = {name: getattr(batch.rollout, name).reshape(-1) for name in ("rewards", "valid")}
    ragged = batch._replace(rollout=batch.rollout._replace(**flat, group_ids=jnp.arange(8) % 2))
    state = train.train_init(params, SGD)
    for loss, given in ((rl.PolicyLoss(num_groups=2), ragged), (rl.PolicyLoss(advantage=rl.adv_batch_std), batch)):
        objective = train.policy_objective(loss, small.CFG)
        with pytest.raises(ConfigError, match="microbatches: found 2, expected 1: "):
            train.make_train_step(objective, SGD, microbatches=2)(state, given)


def test_dropped_groups_count_alike_in_one_piece_and_in_two():
    params = small.params()
    _, batch = small.policy_batch(params)
    rewards = jnp.array([[1.0, 1, 1, 1], [1, 0, 0, 0]])
    batch = batch._replace(rollout=batch.rollout._replace(rewards=rewards))
    objective, state = train.policy_objective(rl.presets.dapo(), small.CFG), train.train_init(params, SGD)
    found = [train.make_train_step(objective, SGD, microbatches=m)(state, batch)[1]["kept_groups"] for m in (1, 2)]
    assert found == [0.5, 0.5]


def test_only_the_adapters_are_trained():
    adapted = train.lora_init(small.params(), jax.random.key(1), rank=2)
    state = train.train_init(adapted, SGD, train.is_lora)
    after, metrics = train.make_train_step(train.sft_objective(small.CFG), SGD)(state, small.sft_batch())
    jax.tree.map(np.testing.assert_array_equal, after.frozen, state.frozen)
    moved = [not np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (after.params, state.params)), strict=True)]
    assert any(moved)
    assert metrics["grad_norm"] > 0
    assert jax.tree.structure(after.whole()) == jax.tree.structure(adapted)


def test_policy_step_raises_the_probability_of_what_was_rewarded():
    params = small.params()
    made, batch = small.policy_batch(params)
    rewards = batch.rollout.rewards
    state, metrics = train.make_train_step(train.policy_objective(small.GRPO, small.CFG), SGD)(
        train.train_init(params, SGD), batch
    )
    after = train.completion_logprobs(state.whole(), small.CFG, *made[:4])
    gain = ((after - made.logp).sum(1) * rl.adv_grpo(rewards, None).reshape(-1)).sum()
    assert gain > 0
    np.testing.assert_allclose(metrics["reward"], rewards.mean(), rtol=1e-6)


def noisy_batch(seed, step, params):
    key = jax.random.fold_in(jax.random.key(seed), step)
    return small.sft_batch(seed=int(jax.random.randint(key, (), 0, 1000)))


def trained(folder, steps, csv, save_every=2, **keywords):
    sink = CsvSink(csv)
    return train.run(
        sft_step(), train.train_init(small.params(), train.adamw(1e-2)), functools.partial(noisy_batch, 5), steps=steps,
        folder=folder, save_every=save_every, sink=lambda step, metrics: sink.write(step, "", metrics), **keywords,
    )  # fmt: skip


def test_a_run_continues_bit_equal_without_duplicate_rows(tmp_path):
    whole = trained(None, 7, tmp_path / "whole.csv")

    class Killed(BaseException):
        pass

    def dies(step, params):
        if step == 5:
            raise Killed
        return noisy_batch(5, step, params)

    sink = CsvSink(tmp_path / "cut.csv")
    with pytest.raises(Killed):
        train.run(
            sft_step(), train.train_init(small.params(), train.adamw(1e-2)), dies, steps=7, folder=tmp_path / "run",
            save_every=2, sink=lambda step, metrics: sink.write(step, "", metrics),
        )  # fmt: skip
    assert train.steps(tmp_path / "run") == [2, 4]
    continued = trained(tmp_path / "run", 7, tmp_path / "cut.csv")
    jax.tree.map(np.testing.assert_array_equal, continued, whole)
    assert (tmp_path / "cut.csv").read_text() == (tmp_path / "whole.csv").read_text()
    assert train.latest(tmp_path / "run") == 7


def test_sigterm_finishes_the_step_and_saves_it(tmp_path, caplog):
    before = signal.getsignal(signal.SIGTERM)

    def terminated(step, params):
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return noisy_batch(5, step, params)

    state = train.run(
        sft_step(), train.train_init(small.params(), train.adamw(1e-2)), terminated, steps=9, folder=tmp_path / "run"
    )
    assert state.step == 3
    assert train.steps(tmp_path / "run") == [3]
    assert caplog.messages == [f"SIGTERM: stopped after step 3 of 9, saved in {tmp_path / 'run'}"]
    steps = [line.split(",")[0] for line in (tmp_path / "run" / "metrics.csv").read_text().splitlines()]
    assert steps == ["step", "1", "2", "3"], "without a sink the rows stand beside the checkpoints"
    assert signal.getsignal(signal.SIGTERM) is before


def test_two_runs_in_one_folder_and_other_configurations(tmp_path):
    with train.checkpoint.held(tmp_path / "run"), pytest.raises(ConfigError, match="in use by pid"):
        trained(tmp_path / "run", 1, tmp_path / "a.csv")
    trained(tmp_path / "run", 1, tmp_path / "a.csv", config={"lr": 0.1})
    with pytest.raises(CheckpointError, match=r"another configuration: lr: found 0.1, expected 0.2"):
        trained(tmp_path / "run", 2, tmp_path / "a.csv", config={"lr": 0.2})


@pytest.mark.parametrize("rate", [float("nan"), float("inf"), 0.0, -1.0])
def test_learning_rates_refused(rate):
    with pytest.raises(ConfigError, match="learning_rate: found"):
        train.adamw(rate)
    with pytest.raises(ConfigError, match="max_grad_norm: found"):
        train.adamw(1e-3, max_grad_norm=rate)


def test_a_traced_rate_is_that_rate():
    grads, params = {"w": jnp.array([3.0, -4.0])}, {"w": jnp.array([1.0, 2.0])}

    def step(rate, norm):
        optimizer = train.adamw(rate, max_grad_norm=norm, weight_decay=0.1)
        return optimizer.update(grads, optimizer.init(params), params)[0]["w"]

    rates = jnp.array([1e-3, 1e-1])
    traced = jax.jit(jax.vmap(lambda r: step(r, r * 10)))(rates)
    np.testing.assert_allclose(traced, [step(1e-3, 1e-2), step(1e-1, 1.0)], rtol=1e-6)


def test_other_refusals(tmp_path):
    state = train.train_init(small.params(), SGD)
    with pytest.raises(ConfigError, match="microbatches: found 0"):
        train.make_train_step(train.sft_objective(small.CFG), SGD, microbatches=0)
    with pytest.raises(ConfigError, match="microbatches: found 3, expected a divisor of the leading axis 4"):
        train.make_train_step(train.sft_objective(small.CFG), SGD, microbatches=3)(state, small.sft_batch())
    with pytest.raises(ConfigError, match="temperature: found 0"):
        train.policy_objective(rl.presets.grpo(), small.CFG, temperature=0)
    for arguments in ({"weight_decay": float("nan")}, {"b1": 1.0}, {"b2": float("nan")}):
        with pytest.raises(ConfigError, match=f"{next(iter(arguments))}: found"):
            train.adamw(1e-3, **arguments)
    with pytest.raises(ConfigError, match="steps: found -1"):
        train.run(sft_step(), state, noisy_batch, steps=-1)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file: cannot be written .*expected a writable folder"):
        train.run(sft_step(), state, noisy_batch, steps=1, folder=tmp_path / "file")
