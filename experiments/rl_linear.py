"""A linear softmax that learns three related tasks in turn: supervised against reinforced, for RIF-RFT."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import core, rl_tables
from experiments.rif_rft import matched
from experiments.rl_config import Training
from experiments.rl_simulation import NOTHING, Simulated, compiled, draw, ratio, seed_keys
from jaxmeth import rl

FEATURES, LABELS, SAME, TASKS = 48, 10, 4, 3
TRAIN, TEST, BATCH, GROUP, FILTER = 256, 512, 32, 8, 8
PRETRAIN, PRETRAIN_RATE, STEPS = 1500, 8.0, 300
RATES = (3.0, 10.0, 30.0, 60.0)
RELATED, GAIN = 0.4, 0.11
ARMS = ("SFT", "RFT", "RIF-RFT")


def tasks(key: Any) -> tuple[Any, Any]:
    """Inputs [1 + TASKS, TRAIN + TEST, FEATURES] of the base and the tasks, and their labels; answers are 4 a label."""
    base, own, inputs = jax.random.split(key, 3)
    common = jax.random.normal(base, (1, FEATURES, LABELS))
    change = jax.random.normal(own, (TASKS, FEATURES, LABELS))
    rules = jnp.concatenate([common, RELATED**0.5 * common + (1 - RELATED) ** 0.5 * change])
    x = jax.random.normal(inputs, (1 + TASKS, TRAIN + TEST, FEATURES)) / FEATURES**0.5
    return x, jnp.einsum("tnf,tfl->tnl", x, rules).argmax(-1)


def reinforced(scores: Any, answer: Any, adv: Any) -> Any:
    """The gradient by the scores [N, A] of minus the mean over rollouts [N, G] of advantage times log-probability."""
    taken = (adv[..., None] * jax.nn.one_hot(answer, scores.shape[1])).mean(1)
    return adv.mean(1)[:, None] * jax.nn.softmax(scores) - taken


def descent(weights: Any, x: Any, rate: Any, slope: Any) -> Any:
    """One step along the mean of ``slope`` [N, answers], the gradient of the loss by the scores."""
    return weights - rate * x.T @ slope / len(x)


def learner(steps: int = STEPS) -> Any:
    """``(arm, keys [R], rate) -> accuracy [R, 1 + TASKS, 1 + TASKS], rollouts [R], kept [R]``, compiled once a length.

    Accuracy: rows before and after each task, columns the tasks and the base.
    """

    def one(arm: Any, key: Any, rate: Any) -> dict[str, Any]:
        made, first, draws = jax.random.split(key, 3)
        x, label = tasks(made)

        def accuracy(weights: Any) -> Any:
            p = jax.nn.softmax(x[:, TRAIN:] @ weights).reshape(1 + TASKS, TEST, LABELS, SAME).sum(3)
            right = jnp.take_along_axis(p, label[:, TRAIN:, None], axis=2)[..., 0].mean(1)
            return jnp.roll(right, -1)

        def supervised(weights: Any, x: Any, answer: Any) -> Any:
            return jax.nn.softmax(x @ weights) - jax.nn.one_hot(answer, LABELS * SAME)

        def pretrain(weights: Any, number: Any) -> tuple[Any, None]:
            which, same = jax.random.split(jax.random.fold_in(first, number))
            at = jax.random.randint(which, (BATCH,), 0, TRAIN)
            answer = label[0, at] * SAME + jax.random.randint(same, at.shape, 0, SAME)
            return descent(weights, x[0, at], PRETRAIN_RATE, supervised(weights, x[0, at], answer)), None

        def sample(key: Any, weights: Any, x: Any, count: int) -> Any:
            return draw(key, jax.nn.softmax(x @ weights), count)

        def task(weights: Any, this: tuple[Any, Any, Any]) -> tuple[Any, tuple[Any, Any]]:
            x, label, number = this
            x, label = x[:TRAIN], label[:TRAIN]
            sift, learning = jax.random.split(jax.random.fold_in(draws, number))
            solved = sample(sift, weights, x, FILTER) // SAME == label[:, None]
            keep = rl.rif_filter(solved.astype(jnp.float32)).keep | (arm != 2)

            def step(i: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
                weights, rollouts = carry
                which, own = jax.random.split(jax.random.fold_in(learning, i))
                at = jax.random.randint(which, (BATCH,), 0, TRAIN)
                inputs, kept = x[at], keep[at]
                shown = supervised(weights, inputs, label[at] * SAME)
                answer = sample(own, weights, inputs, GROUP)
                adv = rl.adv_grpo((answer // SAME == label[at, None]).astype(jnp.float32))
                own_slope = jnp.where(kept[:, None], reinforced(inputs @ weights, answer, adv), 0)
                slope = jnp.where(arm == 0, shown, own_slope)
                return descent(weights, inputs, rate, slope), rollouts + GROUP * kept.sum() * (arm != 0)

            filtering = jnp.where(arm == 2, TRAIN * FILTER, 0)
            after, rollouts = jax.lax.fori_loop(0, steps, step, (weights, filtering))
            return after, (accuracy(after), rollouts, keep.mean())

        before = jax.lax.scan(pretrain, jnp.zeros((FEATURES, LABELS * SAME)), jnp.arange(PRETRAIN))[0]
        found = jax.lax.scan(task, before, (x[1:], label[1:], jnp.arange(TASKS)))[1]
        scores = jnp.concatenate([accuracy(before)[None], found[0]])
        return {"accuracy": scores, "rollouts": found[1].sum(), "kept": found[2].mean()}

    return compiled(jax.vmap(one, in_axes=(None, 0, None)))


def simulate(cfg: Training, folder: core.RunDir) -> Simulated:
    """All arms at all rates: gain against forgetting."""
    if not cfg.simulation_seeds:
        return NOTHING
    trials = [(i, rate) for i in range(len(ARMS)) for rate in RATES]

    def compute() -> dict[str, Any]:
        run = learner()
        found = [run(i, seed_keys(cfg, 14), rate) for i, rate in core.progress(trials, description="simulation")]
        return {name: jnp.stack([f[name] for f in found]) for name in ("accuracy", "rollouts", "kept")}

    stored = folder.cached("simulation", compute)
    points = {arm: [] for arm in ARMS}
    rows = []
    for (i, rate), scores, sampled, kept in zip(trials, *stored.values(), strict=True):
        found = jax.vmap(rl.continual_metrics)(jnp.asarray(scores[:, 1:, :-1]), jnp.asarray(scores[:, 0, :-1]))
        columns = {name: np.asarray(v) for name, v in found._asdict().items()}
        columns["general"] = scores[:, -1, -1] - scores[:, 0, -1]
        points[ARMS[i]].append(columns | {"rollouts": sampled})
        rows.append(
            {"arm": ARMS[i], "rate": rate}
            | {name.replace("_", " "): rl_tables.mean(v) for name, v in columns.items()}
            | {"rollouts": float(sampled.mean()), "kept": float(kept.mean())}
        )
    tables = {arm: {k: np.stack([p[k] for p in of], axis=1) for k in of[0]} for arm, of in points.items()}
    start = stored["accuracy"][0, :, 0].mean(0)
    note = (
        f"Simulation: linear softmax, {FEATURES} features, {LABELS} labels of {SAME} equal answers, taught first a "
        f"base ({start[-1]:.3f}; the general ability), then {TASKS} tasks (before: {start[:-1].mean():.3f}) of {STEPS} "
        "steps; SFT shows one of the equal answers."
    )
    return Simulated({"simulation: a linear softmax": rows}, _claims(tables), [note])


def _claims(points: dict[str, dict[str, np.ndarray]]) -> list[core.Claim]:
    def apart(first: str, second: str, metric: str) -> core.Claim:
        pairs = [np.stack([points[a]["gain"], points[a][metric]], axis=2) for a in (first, second)]

        def statistic(a: np.ndarray, b: np.ndarray) -> float:
            a, b = a.mean(0), b.mean(0)
            reached = min(a[:, 0].max(), b[:, 0].max()) >= GAIN
            return matched(*a.T, GAIN) - matched(*b.T, GAIN) if reached else np.nan

        text = f"simulation: {metric} at gain {GAIN:g}, {first} less {second}"
        return core.Claim(text, core.bootstrap_interval(statistic, *pairs), ">=", 0)

    saved = ratio(*[points[a]["rollouts"].mean(1) for a in ("RIF-RFT", "RFT")])
    return [
        apart("RFT", "SFT", "forgetting"),
        apart("RFT", "SFT", "general"),
        core.Claim("simulation: rollouts of RIF-RFT over RFT's, the filter's included", saved, "<=", 0.7),
    ]
