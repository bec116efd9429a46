"""Tables of softmax answers for the asymmetric prompt weights: rare success at first, or success half of the time."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import core, rl_tables
from experiments.rl_arms import Arm
from experiments.rl_config import Training
from experiments.rl_simulation import (
    NOTHING,
    Simulated,
    compiled,
    draw,
    first_at,
    learning,
    ratio,
    seed_keys,
    steps_ratio,
)
from jaxmeth import rl

PROMPTS, ANSWERS, GROUP, STEPS = 128, 50, 16, 200
RATES, EQUAL, LEVEL = (1.0, 4.0, 8.0, 16.0), (1.0, 4.0), 0.6
STARTS = ("from scratch", "post-SFT")
WARMUP = 50
LOSS, DROP, WARM = "linear_r", "linear_r, unsolved dropped", "linear_r, warm-up"


def tabular(arms: Sequence[Arm], steps: int = STEPS) -> Any:
    """``(arm, keys [R], start, rate) -> {"accuracy": [R, steps + 1], "lost": [R]}``, compiled once.

    Answer 0 is right. Accuracy is the policy's own; lost: prompts that are at the end below a hundredth of their first
    success rate.
    """
    gradient = learning(arms)

    def one(arm: Any, key: Any, start: Any, rate: Any) -> dict[str, Any]:
        first, noise, draws = jax.random.split(key, 3)
        u = jax.random.uniform(first, (PROMPTS,))
        success = jnp.where(start == 0, 0.001 * 50.0**u, 0.3 + 0.4 * u)
        logits = jax.random.normal(noise, (PROMPTS, ANSWERS))
        rest = jax.nn.logsumexp(logits[:, 1:], axis=1)
        logits = logits.at[:, 0].set(rest + jnp.log(success) - jnp.log1p(-success))

        def step(logits: Any, number: Any) -> tuple[Any, Any]:
            answer = draw(jax.random.fold_in(draws, number), jax.nn.softmax(logits), GROUP)

            def logp(logits: Any) -> Any:
                return jnp.take_along_axis(jax.nn.log_softmax(logits), answer, axis=1).reshape(-1, 1)

            reward = (answer == 0).astype(jnp.float32)
            now, back = jax.vjp(logp, logits)
            batch = rl.RolloutBatch(reward, None, answer.reshape(-1, 1), jnp.ones(now.shape, bool))
            # The sum over rollouts / GROUP, where no prompt is dropped: each prompt is learnt as if alone.
            after = logits - rate * PROMPTS * back(gradient(arm, number, now, batch)[0])[0]
            return after, jax.nn.softmax(after)[:, 0].mean()

        last, accuracy = jax.lax.scan(step, logits, jnp.arange(steps))
        lost = jax.nn.softmax(last)[:, 0] < success / 100
        return {"accuracy": jnp.concatenate([success.mean()[None], accuracy]), "lost": lost.mean()}

    return compiled(jax.vmap(one, in_axes=(None, 0, None, None)))


def simulate(cfg: Training, folder: core.RunDir, arms: Sequence[Arm]) -> Simulated:
    """All arms from both starts at all rates; each arm's own best rate has the highest mean accuracy over training."""
    if not cfg.simulation_seeds:
        return NOTHING
    names = [a.name for a in arms]
    trials = [(start, name, rate) for start in STARTS for name in names for rate in RATES]

    def compute() -> dict[str, Any]:
        run = tabular(arms)
        found = [run(names.index(name), seed_keys(cfg, 12), STARTS.index(start), rate) for start, name, rate in trials]
        return jax.tree.map(lambda *a: jnp.stack(a), *found)

    stored = folder.cached("simulation", compute)
    accuracy, lost = (dict(zip(trials, stored[name], strict=True)) for name in ("accuracy", "lost"))
    best = {
        (start, name): max(RATES, key=lambda r: accuracy[start, name, r].mean()) for start in STARTS for name in names
    }
    rows = []
    for (start, name), rate in best.items():
        row: dict[str, Any] = {"start": start, "arm": name}
        row |= {f"steps at {r:g}": first_at(accuracy[start, name, r], LEVEL) for r in RATES}
        row |= {"best rate": rate, "last": rl_tables.mean(accuracy[start, name, rate][:, -1])}
        rows.append(row | {"lost": rl_tables.mean(lost[start, name, rate])})
    return Simulated({f"simulation: answers in a table, steps to {LEVEL:g}": rows}, _claims(accuracy, best), [_NOTE])


_NOTE = (
    f"Simulation: {PROMPTS} prompts of {ANSWERS} answers, groups of {GROUP}, {STEPS} steps of gradient descent; "
    f"success at first 0.001 to 0.05 (from scratch) or 0.3 to 0.7 (post-SFT); warm-up: {WARMUP} steps. Last and "
    "lost (prompts below a hundredth of their first success) at each arm's best rate."
)


def _claims(accuracy: dict[tuple[str, str, float], np.ndarray], best: dict[tuple[str, str], float]) -> list[core.Claim]:
    scratch, after = STARTS

    def at_best(start: str, name: str) -> np.ndarray:
        return accuracy[start, name, best[start, name]]

    def kept(name: str) -> core.Claim:
        rate = best[scratch, LOSS]
        text = f"simulation (c): last accuracy, {name} less {LOSS}, rate {rate:g}"
        pair = [accuracy[scratch, n, rate][:, -1] for n in (name, LOSS)]
        return core.Claim(text, rl_tables.difference(*pair), ">", 0)

    def sooner(name: str, rate: float) -> core.Claim:
        text = f"simulation (a): steps of {name} over grpo's, both at rate {rate:g}"
        pair = [accuracy[scratch, n, rate] for n in (name, "grpo")]
        return core.Claim(text, steps_ratio(*pair, LEVEL), "<=", 0.5)

    found = [sooner(name, rate) for name in (LOSS, "sqrt_r") for rate in EQUAL]
    tuned = steps_ratio(at_best(scratch, LOSS), at_best(scratch, "grpo"), LEVEL)
    found.append(core.Claim(f"simulation (b): steps of {LOSS} over grpo's, each at its best rate", tuned, ">=", 1))
    relative = ratio(*[at_best(scratch, n)[:, -1] for n in (LOSS, "grpo")])
    found.append(core.Claim(f"simulation (c): last accuracy of {LOSS} over grpo's, best rates", relative, "<", 1))
    found += [kept(DROP), kept(WARM)]
    last = np.stack([at_best(after, name)[:, -1] for start, name in best if start == after], axis=1)
    spread = core.bootstrap_interval(lambda v: np.ptp(v.mean(1), axis=-1), last, batched=True)
    found.append(core.Claim("simulation: range of the arms' last accuracies, post-SFT", spread, "<=", 0.01))
    return found
