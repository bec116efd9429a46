"""A softmax bandit for RIPO: a rare right action, several updates on each batch of rollouts."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import core, rl_tables
from experiments.rl_arms import Arm
from experiments.rl_config import Training
from experiments.rl_simulation import NOTHING, Simulated, compiled, draw, learning, ratio, seed_keys
from jaxmeth import rl

STATES, ACTIONS, GROUP, UPDATES, STEPS = 64, 100, 16, 4, 60
RATES, FLIPS = (1.0, 6.0, 24.0), (0.0, 0.1)
RARE = 0.01
PPO, FREE, RIPO = "PPO 0.2", "no clip", "RIPO 0.05"


def start(key: Any, spread: float = 1.0) -> tuple[Any, Any]:
    """Logits and right actions [STATES, ACTIONS]: action 0 has probability RARE, one other is right too."""
    noise, other = jax.random.split(key)
    logits = spread * jax.random.normal(noise, (STATES, ACTIONS))
    rest = jax.nn.logsumexp(logits[:, 1:], axis=1)
    logits = logits.at[:, 0].set(rest + jnp.log(RARE / (1 - RARE)))
    second = jax.random.randint(other, (STATES,), 1, ACTIONS)
    place = jnp.arange(ACTIONS)[None]
    return logits, (place == 0) | (place == second[:, None])


def bandit(arms: Sequence[Arm], steps: int = STEPS, updates: int = UPDATES) -> Any:
    """``(arm, keys [R], rate, flips) -> dict of curves [R, steps]``, compiled once; steps of gradient descent.

    Accuracy and entropy are the policy's own, before each step; clip shares are means over the updates of a step.
    """
    gradient = learning(arms)

    def one(arm: Any, key: Any, rate: Any, flips: Any) -> dict[str, Any]:
        first, draws = jax.random.split(key)
        logits, right = start(first)

        def step(logits: Any, number: Any) -> tuple[Any, dict[str, Any]]:
            sampling, noise = jax.random.split(jax.random.fold_in(draws, number))
            p = jax.nn.softmax(logits)
            action = draw(sampling, p, GROUP)
            found = jnp.take_along_axis(right, action, axis=1) ^ jax.random.bernoulli(noise, flips, action.shape)

            def logp(logits: Any) -> Any:
                return jnp.take_along_axis(jax.nn.log_softmax(logits), action, axis=1).reshape(-1, 1)

            reward, mask = found.astype(jnp.float32), jnp.ones((action.size, 1), bool)
            batch = rl.RolloutBatch(reward, jnp.ones_like(found), action.reshape(-1, 1), mask, logp(logits))

            def update(logits: Any, _: None) -> tuple[Any, Any]:
                now, back = jax.vjp(logp, logits)
                slope, metrics = gradient(arm, 0, now, batch)
                # The sum over rollouts / GROUP: each state is learnt as if alone.
                return logits - rate * STATES * back(slope)[0], metrics["clip_low"] + metrics["clip_high"]

            after, clipped = jax.lax.scan(update, logits, None, length=updates)
            entropy = -(p * jax.nn.log_softmax(logits)).sum(1).mean()
            return after, {"accuracy": (p * right).sum(1).mean(), "entropy": entropy, "clipped": clipped.mean()}

        return jax.lax.scan(step, logits, jnp.arange(steps))[1]

    return compiled(jax.vmap(one, in_axes=(None, 0, None, None)))


def simulate(cfg: Training, folder: core.RunDir, arms: Sequence[Arm]) -> Simulated:
    """All arms at all rates, with and without flipped rewards."""
    if not cfg.simulation_seeds:
        return NOTHING
    trials = [(flips, rate, i) for flips in FLIPS for rate in RATES for i in range(len(arms))]

    def compute() -> dict[str, Any]:
        run = bandit(arms)
        found = [run(i, seed_keys(cfg, 10), rate, flips) for flips, rate, i in trials]
        return jax.tree.map(lambda *a: jnp.stack(a), *found)

    stored = folder.cached("simulation", compute)
    curves = {
        (flips, rate, arms[i].name): {name: v[row] for name, v in stored.items()}
        for row, (flips, rate, i) in enumerate(trials)
    }
    rows = [
        {"flipped": flips, "rate": rate, "arm": name}
        | {f"accuracy@{at}": rl_tables.mean(found["accuracy"][:, at]) for at in (10, 30, STEPS - 1)}
        | {f"entropy@{STEPS - 1}": rl_tables.mean(found["entropy"][:, -1]), "clipped": float(found["clipped"].mean())}
        for (flips, rate, name), found in curves.items()
    ]
    return Simulated({"simulation: bandit": rows}, _claims(curves), [_NOTE])


_NOTE = (
    f"Simulation: {STATES} states of {ACTIONS} actions, action 0 right with probability {RARE} at first and one more "
    f"right action, groups of {GROUP}, {UPDATES} updates of gradient descent a step; accuracy is the policy's own."
)


def _claims(curves: dict[tuple[float, float, str], dict[str, np.ndarray]]) -> list[core.Claim]:
    def compared(metric: str, at: int, flips: float, rate: float, other: str, least: float) -> core.Claim:
        text = f"simulation: {metric}@{at} of {RIPO} over {other}, rate {rate:g}, {flips:.0%} flipped"
        pair = [curves[flips, rate, name][metric][:, at] for name in (RIPO, other)]
        return core.Claim(text, ratio(*pair), ">=", least)

    return [
        compared("accuracy", 10, 0.0, 1.0, PPO, 3.0),
        compared("entropy", STEPS - 1, 0.0, 6.0, PPO, 1.4),
        *[compared("accuracy", STEPS - 1, flips, rate, FREE, 1.0) for flips, rate in ((0.0, 24.0), (0.1, 24.0))],
    ]
