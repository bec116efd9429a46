"""Tables of softmax answers for RLER: models with partly shared errors that vote, and a verifier that errs."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import core, rl_tables, rl_tasks
from experiments.rl_arms import Arm, Given, Judged, bias
from experiments.rl_config import Training
from experiments.rl_simulation import NOTHING, Simulated, compiled, draw, ratio, seed_keys
from jaxmeth import rl

PROMPTS, ANSWERS, GROUP, STEPS, RATE = 48, 12, 16, 40, 2.0
SPREAD, KNOWN = 1.3, 1.0
SETTINGS = {"high, K=2": (2, 0.5), "low, K=2": (2, 0.0), "high, K=4": (4, 0.5)}
"""Models, and the share of their errors' variance that they have in common."""
FIRST = next(iter(SETTINGS))
FLIPS = ("both ways", "false positives", "false negatives", "by confidence")
FLIP_RATES = (0.1, 0.2, 0.3, 0.4, 0.5)
SELF, PLAIN = "self majority", "RLER, no selection"
SOME = ("verifier", SELF, "ensemble hard", PLAIN, "RLER cross")


def flipped(kind: str) -> Callable[..., Given]:
    """The verifier's reward with flips at a rate; ``by confidence``: an answer's chance grows with its probability."""

    def reward(judged: Judged, key: Any, rate: Any) -> Given:
        right = judged.right
        p = jnp.exp(judged.logp[..., 0])
        chance = jnp.broadcast_to(rate, right.shape)
        if kind == "by confidence":
            chance = jnp.minimum(rate * p / p.mean(), 1.0)
        hit = jax.random.bernoulli(key, chance)
        hit &= {"false positives": ~right, "false negatives": right}.get(kind, True)
        return Given((right ^ hit).astype(jnp.float32), jnp.ones_like(right))

    return reward


def voting(arms: Sequence[Arm], models: int, steps: int = STEPS) -> Any:
    """``(arm, keys [R], shared, flips) -> curves [R, steps]``, compiled once a number of models.

    ``arm`` counts through ``arms``, then through ``FLIPS``. Accuracy is the policies' own, before each step; the
    reward's bias is that on the step's rollouts.
    """
    rewards = [lambda judged, key, rate, a=a: a.reward(judged) for a in arms] + [flipped(kind) for kind in FLIPS]
    letters = jnp.asarray(rl_tasks.encode("abcdefghijkl"))
    policy = rl.PolicyLoss(advantage=rl.adv_grpo)

    def answered(key: Any, logits: Any) -> tuple[Any, Any, Any]:
        """Answers [K, P, n], and as tokens with the end and mask [K, P, n, 2]."""
        keys = jax.random.split(key, models)
        answer = jax.vmap(lambda k, x: draw(k, jax.nn.softmax(x), GROUP))(keys, logits)
        tokens = jnp.stack([letters[answer], jnp.full(answer.shape, rl_tasks.END)], axis=-1)
        return answer, tokens, jnp.ones(tokens.shape, bool)

    def learn(logits: Any, answer: Any, reward: Any, keep: Any) -> Any:
        """A step of gradient descent of one model, on the sum over rollouts / n where all are kept."""

        def loss(logits: Any) -> Any:
            logp = jnp.take_along_axis(jax.nn.log_softmax(logits), answer, axis=1).reshape(-1, 1)
            batch = rl.RolloutBatch(reward, None, answer.reshape(-1, 1), jnp.ones(logp.shape, bool))
            return PROMPTS * policy(logp, rl.keep_rollouts(batch, keep))[0]

        return logits - RATE * jax.grad(loss)(logits)

    def one(arm: Any, key: Any, shared: Any, flips: Any) -> dict[str, Any]:
        common, own, draws = jax.random.split(key, 3)
        errors = jnp.sqrt(shared) * jax.random.normal(common, (1, PROMPTS, ANSWERS))
        errors += jnp.sqrt(1 - shared) * jax.random.normal(own, (models, PROMPTS, ANSWERS))
        start = (SPREAD * errors).at[..., 0].add(KNOWN)

        def step(logits: Any, number: Any) -> tuple[Any, dict[str, Any]]:
            now, before, noise = jax.random.split(jax.random.fold_in(draws, number), 3)
            answer, tokens, mask = answered(now, logits)
            logp = jnp.take_along_axis(jax.nn.log_softmax(logits), answer, axis=2)
            logp = jnp.stack([logp, jnp.zeros_like(logp)], axis=-1)
            judged = Judged(tokens, mask, answer == 0, logp, answered(before, start)[1:])
            given = jax.lax.switch(arm, rewards, judged, noise, flips)
            found = bias(judged, given) | {"accuracy": jax.nn.softmax(logits)[..., 0].mean()}
            return jax.vmap(learn)(logits, answer, *given), found

        return jax.lax.scan(step, start, jnp.arange(steps))[1]

    return compiled(jax.vmap(one, in_axes=(None, 0, None, None)))


def simulate(cfg: Training, folder: core.RunDir, arms: Sequence[Arm]) -> Simulated:
    """All arms in the first setting and some in the others; then the erring verifier, by kind and rate of its flips."""
    if not cfg.simulation_seeds:
        return NOTHING
    runs = {models: voting(arms, models) for models, _ in SETTINGS.values()}
    trials = [
        (setting, a.name, i, 0.0)
        for setting in SETTINGS
        for i, a in enumerate(arms)
        if setting == FIRST or a.name in SOME
    ]
    trials += [(FIRST, kind, len(arms) + i, rate) for i, kind in enumerate(FLIPS) for rate in FLIP_RATES]

    def compute() -> dict[str, Any]:
        bar = core.progress(trials, description="simulation")
        found = [runs[SETTINGS[s][0]](arm, seed_keys(cfg, 13), SETTINGS[s][1], rate) for s, _, arm, rate in bar]
        return jax.tree.map(lambda *a: jnp.stack(a), *found)

    stored = folder.cached("simulation", compute)
    curves = {
        (setting, name, rate): {k: v[row] for k, v in stored.items()}
        for row, (setting, name, _, rate) in enumerate(trials)
    }
    rows = [
        {"shared errors": setting, "reward": name} | _ends(found)
        for (setting, name, rate), found in curves.items()
        if not rate
    ]
    flips = [
        {"flips": kind, "rate": rate, "noise": rl_tables.mean(curves[FIRST, kind, rate]["noise"].mean(1))}
        | {"last accuracy": rl_tables.mean(curves[FIRST, kind, rate]["accuracy"][:, -1])}
        for kind in FLIPS
        for rate in FLIP_RATES
    ]
    return Simulated({"simulation: votes": rows, "simulation: a verifier that errs": flips}, _claims(curves), [_NOTE])


_NOTE = (
    f"Simulation: {PROMPTS} prompts of {ANSWERS} answers, {GROUP} rollouts a model, {STEPS} GRPO steps of gradient "
    "descent; accuracy is the policies' own, a reward's bias is that on the rollouts it trains."
)


def _ends(found: dict[str, np.ndarray]) -> dict[str, Any]:
    ends = (("first", 0), ("last", -1))
    return {f"{name}, {end}": rl_tables.mean(v[:, at]) for name, v in found.items() for end, at in ends}


def _claims(curves: dict[tuple[str, str, float], dict[str, np.ndarray]]) -> list[core.Claim]:
    def last(name: str, rate: float = 0.0, setting: str = FIRST) -> np.ndarray:
        return curves[setting, name, rate]["accuracy"][:, -1]

    found = []
    for setting in SETTINGS:
        for metric, most in (("noise", 0.8), ("symbias", 0.5)):
            pair = [np.abs(curves[setting, name, 0.0][metric][:, 0]) for name in (PLAIN, SELF)]
            text = f"simulation: first {metric} of {PLAIN} over {SELF}, {setting}"
            found.append(core.Claim(text, ratio(*pair), "<=", most))
        gained = rl_tables.difference(last(PLAIN, setting=setting), last(SELF, setting=setting))
        found.append(core.Claim(f"simulation: last accuracy, {PLAIN} less {SELF}, {setting}", gained, ">", 0))
    collapse = ratio(last(FLIPS[0], 0.5), last(FLIPS[0], 0.4))
    found.append(core.Claim("simulation: last accuracy with half of the rewards flipped over 0.4", collapse, "<=", 0.5))
    for better, worse in ((FLIPS[2], FLIPS[1]), (FLIPS[0], FLIPS[3])):
        pair = [np.mean([last(kind, rate) for rate in FLIP_RATES[:-1]], axis=0) for kind in (better, worse)]
        text = f"simulation: last accuracy, mean over rates to 0.4, {better} less {worse}"
        found.append(core.Claim(text, rl_tables.difference(*pair), ">", 0))
    return found
