"""A tree of tokens for lambda-GRPO: softmax policies by prefix, whose rollouts share beginnings."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments import core, rl_tables
from experiments.rl_arms import Arm
from experiments.rl_config import Training
from experiments.rl_simulation import NOTHING, Simulated, compiled, first_at, learning, seed_keys, steps_ratio
from jaxmeth import rl

PROMPTS, TOKENS, LENGTH, GROUP, STEPS = 8, 3, 8, 16, 150
NODES = (TOKENS**LENGTH - 1) // (TOKENS - 1)
LEVEL = 0.6
REWARDS = ("first two tokens", "random leaves")
OPTIMISERS = (("SGD", 8.0), ("SGD", 32.0), ("Adam", 0.03), ("Adam", 0.1))
BASE, WEIGHTED, SHUFFLED, PROCESS = "GRPO", "lambda, per weight", "shuffled weights", "process advantages"
HEADLINE = (REWARDS[0], 3.0, "SGD", 32.0)
"""Where the spec's claim is made: much sharing, gradient descent."""


def answers(key: Any, kind: Any) -> Any:
    """Which leaves are right [P, TOKENS^LENGTH]: those that begin with two given tokens, or a fifth at random."""
    which, some = jax.random.split(key)
    share = TOKENS ** (LENGTH - 2)
    begin = jnp.arange(TOKENS**LENGTH)[None] // share == jax.random.randint(which, (PROMPTS, 1), 0, TOKENS**2)
    return jnp.where(kind == 0, begin, jax.random.bernoulli(some, 0.2, begin.shape))


def reached(logits: Any, right: Any) -> Any:
    """The probability of a right leaf [P], from logits [P, NODES, TOKENS] and leaves [P, TOKENS^LENGTH]; exact."""
    p, value = jax.nn.softmax(logits), right.astype(logits.dtype)
    for depth in reversed(range(LENGTH)):
        first, count = (TOKENS**depth - 1) // (TOKENS - 1), TOKENS**depth
        value = (p[:, first : first + count] * value.reshape(-1, count, TOKENS)).sum(2)
    return value[:, 0]


def sample(key: Any, logits: Any) -> tuple[Any, Any, Any]:
    """Rollouts of every prompt: tokens and their nodes [P, GROUP, LENGTH], leaves [P, GROUP]."""

    def step(place: Any, x: tuple[Any, Any]) -> tuple[Any, tuple[Any, Any]]:
        depth, u = x
        node = (TOKENS**depth - 1) // (TOKENS - 1) + place
        p = jax.nn.softmax(jnp.take_along_axis(logits, node[..., None], axis=1))
        token = (u[..., None] > jnp.cumsum(p, axis=2)[..., :-1]).sum(2)
        return place * TOKENS + token, (token, node)

    u = jax.random.uniform(key, (LENGTH, PROMPTS, GROUP))
    leaf, found = jax.lax.scan(step, jnp.zeros((PROMPTS, GROUP), jnp.int32), (jnp.arange(LENGTH), u))
    tokens, node = (jnp.moveaxis(a, 0, 2) for a in found)
    return tokens, node, leaf


def tree(arms: Sequence[Arm], steps: int = STEPS) -> Any:
    """``(arm, keys [R], reward, scale, adam, rate) -> curves [R, steps]``, compiled once.

    Accuracy is the policy's own, before each step; weight is the mean token weight of its rollouts.
    """
    gradient, adaptive = learning(arms), optax.scale_by_adam()

    def one(arm: Any, key: Any, kind: Any, scale: Any, adam: Any, rate: Any) -> dict[str, Any]:
        first, leaves, draws = jax.random.split(key, 3)
        logits = scale * jax.random.normal(first, (PROMPTS, NODES, TOKENS))
        right = answers(leaves, kind)

        def step(carry: tuple[Any, Any], number: Any) -> tuple[Any, dict[str, Any]]:
            logits, state = carry
            tokens, node, leaf = sample(jax.random.fold_in(draws, number), logits)
            reward = jnp.take_along_axis(right, leaf, axis=1)

            def logp(logits: Any) -> Any:
                at = jnp.take_along_axis(logits, node.reshape(PROMPTS, -1, 1), axis=1)
                chosen = tokens.reshape(PROMPTS, -1, 1)
                return jnp.take_along_axis(jax.nn.log_softmax(at), chosen, axis=2).reshape(-1, LENGTH)

            flat = tokens.reshape(-1, LENGTH)
            batch = rl.RolloutBatch(reward.astype(jnp.float32), None, flat, jnp.ones(flat.shape, bool))
            now, back = jax.vjp(logp, logits)
            slope, metrics = gradient(arm, number, now, batch)
            slope = back(slope)[0]
            slope, state = jax.lax.cond(adam, lambda: adaptive.update(slope, state), lambda: (slope, state))
            found = {"accuracy": reached(logits, right).mean(), "weight": metrics["token_weight"]}
            return (logits - rate * slope, state), found

        return jax.lax.scan(step, (logits, adaptive.init(logits)), jnp.arange(steps))[1]

    return compiled(jax.vmap(one, in_axes=(None, 0, None, None, None, None)))


def trials(names: Sequence[str]) -> list[tuple[tuple[str, float, str, float], str]]:
    """(setting, arm): four arms everywhere, the others at the headline setting."""
    core_arms = [n for n in names if n in (BASE, "lambda, per token", WEIGHTED, SHUFFLED)]
    grid = [(REWARDS[0], scale, *optimiser) for scale in (1.0, 3.0) for optimiser in OPTIMISERS]
    grid.append((REWARDS[1], *HEADLINE[1:]))
    return [(setting, n) for setting in grid for n in (names if setting == HEADLINE else core_arms)]


def simulate(cfg: Training, folder: core.RunDir, arms: Sequence[Arm]) -> Simulated:
    """Arms that train the same trees, at two scales of the first logits."""
    if not cfg.simulation_seeds:
        return NOTHING
    names = [a.name for a in arms]
    chosen = trials(names)

    def compute() -> dict[str, Any]:
        run = tree(arms)
        found = [
            run(names.index(name), seed_keys(cfg, 11), REWARDS.index(reward), scale, kind == "Adam", rate)
            for (reward, scale, kind, rate), name in core.progress(chosen, description="simulation")
        ]
        return jax.tree.map(lambda *a: jnp.stack(a), *found)

    stored = folder.cached("simulation", compute)
    accuracy = dict(zip(chosen, stored["accuracy"], strict=True))
    rows = []
    for (setting, name), weight in zip(chosen, stored["weight"], strict=True):
        found, at = accuracy[setting, name], first_at(accuracy[setting, name], LEVEL)
        shown = dict(zip(("right", "scale", "optimiser", "rate"), setting, strict=True))
        rows.append(
            shown
            | {"arm": name, f"steps to {LEVEL:g}": "not reached" if at is None else at}
            | {"mean accuracy": rl_tables.mean(found.mean(1)), "last": rl_tables.mean(found[:, -1])}
            | {"mean weight": float(weight.mean()) if np.isfinite(weight).any() else None}
        )
    return Simulated({"simulation: tree": rows}, _claims(accuracy), [_NOTE])


_NOTE = (
    f"Simulation: trees of {LENGTH} tokens out of {TOKENS}, {PROMPTS} prompts, groups of {GROUP}, {STEPS} steps, "
    "exact accuracy. Right: what begins with two given tokens, or a random fifth of the leaves. Scale: of the first "
    "logits; the larger, the more is shared."
)


def _claims(accuracy: dict[Any, np.ndarray]) -> list[core.Claim]:
    def steps(setting: Any, name: str, comparison: core.Comparison = "<=") -> core.Claim:
        text = f"simulation: steps to {LEVEL:g} of {name} over {BASE}, {_title(setting)}"
        pair = [accuracy[setting, n] for n in (name, BASE)]
        return core.Claim(text, steps_ratio(*pair, LEVEL), comparison, 0.6)

    def means(setting: Any) -> core.Claim:
        pair = [accuracy[setting, n].mean(1) for n in (WEIGHTED, BASE)]
        text = f"simulation: mean accuracy of {WEIGHTED} less {BASE}, {_title(setting)}"
        return core.Claim(text, rl_tables.difference(*pair), ">=", 0)

    claims = [steps(HEADLINE, WEIGHTED), steps((REWARDS[1], *HEADLINE[1:]), WEIGHTED), steps(HEADLINE, SHUFFLED, ">")]
    claims += [means(setting) for setting, name in accuracy if name == WEIGHTED and setting[1] == HEADLINE[1]]
    if (HEADLINE, PROCESS) in accuracy:
        apart = np.abs(accuracy[HEADLINE, PROCESS].mean(1) - accuracy[HEADLINE, BASE].mean(1)).max()
        text = f"simulation: largest difference of mean accuracy, {PROCESS} against {BASE}: the same gradient"
        claims.append(core.Claim(text, apart, "<=", 0.01))
    return claims


def _title(setting: tuple[str, float, str, float]) -> str:
    reward, scale, kind, rate = setting
    return f"{reward}, scale {scale:g}, {kind} {rate:g}"
