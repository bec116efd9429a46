"""The training loop: pure functions around one jitted ``train_step(state, batch)``.

An objective is two functions, ``denominator(batch)`` and ``loss(params, batch, denominator)``: with the denominator of
the whole batch given to each part, losses and gradients of the parts add up to those of the whole, however it is split
into microbatches or over devices.
"""

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

from jaxmeth.attention.dense import dense
from jaxmeth.models.config import DecoderConfig
from jaxmeth.models.decoder import build
from jaxmeth.rl._common import LARGEST, check_number
from jaxmeth.rl.advantages import adv_batch_std
from jaxmeth.rl.policy_loss import PolicyLoss, RolloutBatch, function_of
from jaxmeth.train import checkpoint
from jaxmeth.train.lora import join, split
from jaxmeth.train.rollout import Rollouts, check_temperature, completion_logprobs
from jaxmeth.train.sinks import CsvSink, Sink
from jaxmeth.types import Attend, ConfigError, Params, whole_number

LOG = logging.getLogger(__name__)
Metrics = dict[str, Array]


class Objective(NamedTuple):
    """What is minimised; static.

    ``denominator(batch) -> scalar``, additive over parts of a batch. ``loss(params, batch, denominator) -> (scalar,
    metrics)``, the part's share. ``combine(stacked metrics [m]) -> metrics`` of the whole batch. ``indivisible(batch)
    -> why it cannot be cut into parts``, None where it can.
    """

    denominator: Callable[[Any], Array]
    loss: Callable[[Params, Any, Array], tuple[Array, Metrics]]
    combine: Callable[[Metrics], Metrics]
    indivisible: Callable[[Any], str | None] = lambda batch: None


class TrainState(NamedTuple):
    """``params`` holds what is trained, None elsewhere; ``frozen`` the rest (None: everything is trained)."""

    params: Params
    frozen: Params | None
    opt_state: optax.OptState
    step: Int[Array, ""]

    def whole(self) -> Params:
        """The parameters of the model."""
        return join(self.params, self.frozen)


class SFTBatch(NamedTuple):
    """Sequences to imitate: ``real`` = not padding, ``target`` = to be predicted (never the first token)."""

    tokens: Int[Array, "N T"]
    real: Bool[Array, "N T"]
    target: Bool[Array, "N T"]


class PolicyBatch(NamedTuple):
    """Prompts of the N rollouts, padded on the left, and the rollouts themselves."""

    prompt: Int[Array, "N S"]
    prompt_mask: Bool[Array, "N S"]
    rollout: RolloutBatch


def adamw(
    learning_rate: float | Float[Array, ""] | optax.Schedule,
    *,
    max_grad_norm: float | Float[Array, ""] | None = 1.0,
    weight_decay: float = 0.0,
    b1: float = 0.9,
    b2: float = 0.999,
) -> optax.GradientTransformation:
    """Optax's AdamW after clipping by the global norm of the gradient (None: no clipping).

    Either may be traced (a grid of rates under ``vmap``); its value is then not checked.

    Raises: ConfigError for a learning rate or a norm that is NaN, infinite or not positive, a weight decay below 0,
      b1 or b2 outside [0, 1).
    """
    for name, value in (("learning_rate", learning_rate), ("max_grad_norm", max_grad_norm)):
        if not callable(value) and (value is not None or name == "learning_rate"):
            check_number(name, value, 0, LARGEST, above=True)
    below_one = float(np.nextafter(1, 0))
    for name, value, most in (("weight_decay", weight_decay, LARGEST), ("b1", b1, below_one), ("b2", b2, below_one)):
        check_number(name, value, 0, most)
    clip = optax.identity() if max_grad_norm is None else optax.clip_by_global_norm(max_grad_norm)
    return optax.chain(clip, optax.adamw(learning_rate, b1=b1, b2=b2, weight_decay=weight_decay))


def train_init(
    params: Params, optimizer: optax.GradientTransformation, trained: Callable[[str], bool] | None = None
) -> TrainState:
    """The state at step 0.

    Args:
      trained: which leaves to train, by their path joined with dots (``lora.is_lora``); None = all.
    """
    chosen, rest = (params, None) if trained is None else split(params, trained)
    return TrainState(chosen, rest, optimizer.init(chosen), jnp.zeros((), jnp.int32))


def make_train_step(
    objective: Objective, optimizer: optax.GradientTransformation, *, microbatches: int = 1
) -> Callable[[TrainState, Any], tuple[TrainState, Metrics]]:
    """One jitted ``(state, batch) -> (state, metrics)``; compiled once a shape.

    Metrics: the objective's, ``loss``, and ``grad_norm`` before clipping. With microbatches the leading axis of each
    leaf of the batch is cut into that many parts, computed one after the other; loss and gradient are those of the
    whole. (A policy loss sees whole groups, since rows are prompt-major.)

    Raises:
      ConfigError: microbatches that are no whole number of at least 1, or, when called, do not divide a leading axis,
        or cut what must stay together (groups given by ``group_ids``; ``adv_batch_std``, which looks across prompts).
    """
    microbatches = whole_number("microbatches", microbatches, 1)

    @jax.jit
    def train_step(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        reason = objective.indivisible(batch)
        if microbatches > 1 and reason:
            raise ConfigError(f"microbatches: found {microbatches}, expected 1: {reason}")
        denominator = objective.denominator(batch)
        parts = jax.tree.map(partial(_cut, microbatches), batch)

        def gradient(total, part):
            (loss, metrics), grads = jax.value_and_grad(
                lambda p: objective.loss(join(p, state.frozen), part, denominator), has_aux=True
            )(state.params)
            return jax.tree.map(jnp.add, total, (loss, grads)), metrics

        zero = (jnp.zeros((), jnp.float32), jax.tree.map(jnp.zeros_like, state.params))
        zero = jax.tree.map(
            lambda z, like: z.astype(like.dtype), zero, jax.eval_shape(gradient, zero, _first(parts))[0]
        )
        (loss, grads), metrics = jax.lax.scan(gradient, zero, parts)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = objective.combine(metrics) | {"loss": loss, "grad_norm": optax.tree.norm(grads)}
        return TrainState(params, state.frozen, opt_state, state.step + 1), metrics

    return train_step


def _cut(parts: int, leaf: Array) -> Array:
    if leaf.shape[0] % parts:
        raise ConfigError(f"microbatches: found {parts}, expected a divisor of the leading axis {leaf.shape[0]}")
    return leaf.reshape(parts, leaf.shape[0] // parts, *leaf.shape[1:])


def _first(parts: Any) -> Any:
    return jax.tree.map(lambda a: a[0], parts)


def _combine(stacked: Metrics) -> Metrics:
    """Counts add up; ``reward`` is weighted by usable rollouts, ``kept_groups`` not, the other means by tokens."""
    counts = ("tokens", "invalid", "rollouts")
    out = {name: stacked[name].sum() for name in counts if name in stacked}
    for name in stacked.keys() - set(counts):
        by = {"reward": stacked.get("rollouts"), "kept_groups": jnp.ones_like(stacked[name])}
        weight = by.get(name, stacked["tokens"]).astype(stacked[name].dtype)
        out[name] = (stacked[name] * weight).sum() / jnp.maximum(weight.sum(), 1)
    return out


def sft_objective(cfg: DecoderConfig, *, attend: Attend | None = None) -> Objective:
    """Supervised fine-tuning: minus the mean log-probability of the target tokens (0 where there are none).

    Metrics: ``tokens``, ``nll`` (nats a token), ``accuracy`` (of the greedy token).
    """

    def denominator(batch: SFTBatch) -> Array:
        return jnp.maximum(batch.target[:, 1:].sum(), 1).astype(jnp.float32)

    def loss(params: Params, batch: SFTBatch, denominator: Array) -> tuple[Array, Metrics]:
        model = build(cfg, params)
        hidden, _, _ = model.trunk(batch.tokens[:, :-1], batch.real[:, :-1], None, None, attend or dense, None)
        logits, labels, mask = model.logits(hidden), batch.tokens[:, 1:], batch.target[:, 1:]
        nll = jnp.where(mask, optax.softmax_cross_entropy_with_integer_labels(logits, labels), 0)
        tokens = mask.sum()
        hits = jnp.where(mask, jnp.argmax(logits, axis=-1) == labels, False).sum()
        metrics = {"tokens": tokens, "nll": nll.sum() / jnp.maximum(tokens, 1)}
        return nll.sum() / denominator, metrics | {"accuracy": hits / jnp.maximum(tokens, 1)}

    return Objective(denominator, loss, _combine)


def policy_objective(
    policy_loss: PolicyLoss, cfg: DecoderConfig, *, temperature: float = 1.0, attend: Attend | None = None
) -> Objective:
    """A policy loss on the log-probabilities that the model gives to the rollouts, at the sampling temperature.

    The reference policy's log-probabilities, where beta > 0, stand in the batch (``RolloutBatch.logp_ref``).
    Metrics: those of the policy loss and ``rollouts``, the number of usable rewards.

    Raises: ConfigError for a temperature that is not above 0.
    """
    check_temperature(temperature)

    def loss(params: Params, batch: PolicyBatch, denominator: Array) -> tuple[Array, Metrics]:
        rollout = batch.rollout
        logp = completion_logprobs(
            params, cfg, batch.prompt, batch.prompt_mask, rollout.tokens, rollout.mask != 0,
            temperature=temperature, attend=attend,
        )  # fmt: skip
        value, metrics = policy_loss(logp, rollout, denominator)
        return value, metrics | {"rollouts": rollout.rewards.size - metrics["invalid"]}

    def indivisible(batch: PolicyBatch) -> str | None:
        if batch.rollout.group_ids is not None:
            return "a part of a batch with group_ids need not hold whole groups"
        across = function_of(policy_loss.advantage) is adv_batch_std
        return "adv_batch_std is of the whole batch" if across else None

    return Objective(lambda batch: policy_loss.denominator(batch.rollout), loss, _combine, indivisible)


def policy_batch(
    rollouts: Rollouts,
    rewards: Float[Array, "P G"],
    valid: Bool[Array, "P G"],
    *,
    on_policy: bool = False,
    logp_ref: Float[Array, "N T"] | None = None,
) -> PolicyBatch:
    """Scored rollouts as a batch. ``on_policy``: leave ``logp_old`` out, where each batch is used for one update."""
    old = None if on_policy else rollouts.logp
    batch = RolloutBatch(rewards, valid, rollouts.tokens, rollouts.mask, old, logp_ref)
    return PolicyBatch(rollouts.prompt, rollouts.prompt_mask, batch)


@contextlib.contextmanager
def _stop_requested() -> Iterator[Callable[[], bool]]:
    """Whether SIGTERM has come; the previous handler is put back. Only the main thread can listen."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return
    before = signal.signal(signal.SIGTERM, lambda *_: asked.set())
    try:
        yield asked.is_set
    finally:
        signal.signal(signal.SIGTERM, before)


def run(
    train_step: Callable[[TrainState, Any], tuple[TrainState, Metrics]],
    state: TrainState,
    make_batch: Callable[[int, Params], Any],
    *,
    steps: int,
    sink: Sink | None = None,
    folder: str | os.PathLike | None = None,
    config: Any = None,
    save_every: int = 100,
    allow_previous: bool = False,
) -> TrainState:
    """Train to ``steps``, continuing from the last checkpoint in ``folder``.

    SIGTERM ends the loop after the step in progress, saved; a logged warning and ``state.step`` of what is returned
    name the step.

    Args:
      make_batch: ``(step, parameters) -> batch``; draw with ``fold_in(key, step)`` and a resumed run draws the same.
      sink: called with each finished step's number (from 1) and metrics; None = rows in ``folder/metrics.csv``, where
        there is a folder. ``CsvSink`` drops rows that a checkpoint does not cover when a run continues.
      folder: None = no checkpoints. Held by this process alone while training.
      config: what a checkpoint must have been saved with to be continued.

    Raises:
      ConfigError: steps or save_every below 1; the folder is in use or cannot be written.
      CheckpointError: the checkpoint is damaged, or belongs to another configuration.
    """
    steps, save_every = whole_number("steps", steps, 1), whole_number("save_every", save_every, 1)
    with checkpoint.held(folder), _stop_requested() as stop:
        if folder is not None and checkpoint.steps(folder):
            _, state = checkpoint.restore(folder, state, config=config, allow_previous=allow_previous)
        sink = sink or _rows(folder)
        for step in range(int(state.step), steps):
            state, metrics = train_step(state, make_batch(step, state.whole()))
            sink(step + 1, jax.device_get(metrics))
            last = stop() or step + 1 == steps
            if folder is not None and (last or (step + 1) % save_every == 0):
                checkpoint.save(folder, step + 1, state, config=config)
            if last and step + 1 < steps:
                saved = "not saved (no folder)" if folder is None else f"saved in {folder}"
                LOG.warning("SIGTERM: stopped after step %d of %d, %s", step + 1, steps, saved)
                break
    return state


def _rows(folder: str | os.PathLike | None) -> Sink:
    """Rows in ``folder/metrics.csv``; without a folder metrics go nowhere."""
    if folder is None:
        return lambda step, metrics: None
    csv = CsvSink(Path(folder) / "metrics.csv")
    return lambda step, metrics: csv.write(step, "", metrics)
