"""The product of five choices: which combinations of the reinforcement-learning methods are legal, and do they learn?

Every legal combination of {grpo, rloo} x {no, linear, sqrt prompt weight} x {no, lambda token weight} x {PPO, RIPO} x
{verifier, RLER reward} takes training steps; the illegal ones are listed with the library's reason. Eight are compared.

Claim: any combination is legal unless it scales twice, and all of them take training steps, with finite losses and a
gradient above 0 (no paper; the library's own).
Command: python -m experiments run rl_compose --preset laptop
Expected, laptop, pass rate .159 before, 8 seeds: all 32 legal combinations have finite losses and gradients above 0, 16
are refused. Of the eight compared, the six with the verifier's reward end at .211 to .222 (grpo .215; every difference
from it is undecided); without labels (RLER), at the lowest rate, grpo ends at .173, with lambda and ripo at .168.

SmolLM2 (--preset smollm2): 32 finite, 16 refused; after 2 steps (2 seeds, which settle nothing) .211 for GRPO and for
rloo sqrt lambda ripo, .133 and .094 for the two with the RLER reward.
Minutes: smoke 1, smollm2 10, laptop 10.
"""

import dataclasses
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from experiments import core, rl_tables
from experiments.rl_config import SMOLLM2, TINY, Training

if TYPE_CHECKING:
    from experiments.rl_arms import Arm, Bench

ABOUT = core.About(
    claim="The five methods compose: every legal combination trains, the illegal ones are refused by name.",
    minutes={"smoke": 1, "smollm2": 10, "laptop": 10},
    needs="nothing",
    knob="rollouts",
)
CHOICES = {
    "advantage": ("grpo", "rloo"),
    "prompt weight": ("none", "linear", "sqrt"),
    "token weight": ("none", "lambda"),
    "ratio": ("ppo", "ripo"),
    "reward": ("verifier", "RLER"),
}
COMPARED = (
    "grpo none none ppo verifier",
    "rloo none none ppo verifier",
    "rloo linear none ppo verifier",
    "rloo sqrt lambda ripo verifier",
    "grpo none lambda ppo verifier",
    "grpo none none ripo verifier",
    "grpo none none ppo RLER",
    "grpo none lambda ripo RLER",
)
BASELINE = COMPARED[0]
ON_SMOLLM2 = (BASELINE, COMPARED[3], *COMPARED[6:])
"""Compared there: all choices differ from the baseline's somewhere."""


@dataclass(frozen=True, kw_only=True)
class Config(Training):
    """The shared options; two updates a batch, so that the ratios differ, and two models, so that there are votes."""

    models: int = 2
    """Models a seed, which vote together where the reward is RLER's."""
    epochs: int = 2
    """Updates on each batch; from the second on the ratio of probabilities matters."""
    trial_steps: int = 2
    """Training steps of every legal combination."""
    compared: int = 8
    """How many of the eight are compared, from the first."""

    def __post_init__(self):
        super().__post_init__()
        self.require(models=(1, None), trial_steps=(1, None), compared=(1, len(COMPARED)))


PRESETS = {
    "smoke": Config(**TINY, compared=3),
    "laptop": Config(rollouts=64, steps=24),
    "smollm2": Config(**{**SMOLLM2, "steps": 2, "test_samples": 2}, trial_steps=1),
    "paper": Config(group_size=16, rollouts=2048, rates=(1e-6,), shapes_only=True),
}


def combinations() -> "tuple[dict[str, Arm], dict[str, str]]":
    """The legal combinations as arms, and the illegal ones with the reason that the library gives."""
    from experiments.rl_arms import Arm, verified
    from experiments.rler import votes
    from jaxmeth import rl
    from jaxmeth.types import ConfigError

    advantages = {"grpo": rl.adv_grpo, "rloo": rl.adv_rloo}
    weights = {"none": None, "linear": rl.as_prompt_weight("linear_r"), "sqrt": rl.as_prompt_weight("sqrt_r")}
    tokens = {"none": None, "lambda": rl.lambda_grpo_weight}
    ratios = {"ppo": rl.ppo_clip, "ripo": rl.ripo}
    rewards = {"verifier": verified, "RLER": votes}
    legal, illegal = {}, {}
    for advantage, weight, token, ratio, reward in itertools.product(*CHOICES.values()):
        name = " ".join((advantage, weight, token, ratio, reward))
        try:
            loss = rl.PolicyLoss(
                advantage=advantages[advantage], prompt_weight=weights[weight], token_weight=tokens[token],
                ratio=ratios[ratio], weight_kl=token == "lambda",
            )  # fmt: skip
        except ConfigError as error:
            illegal[name] = str(error)
            continue
        legal[name] = Arm(name, loss, rewards[reward])
    return legal, illegal


def _trials(cfg: Config, folder: core.RunDir, bench: "Bench", legal: "dict[str, Arm]") -> core.Rows:
    """A few steps of every legal combination on the first seed: all in one compiled function. SmolLM2: one step."""
    import jax
    import jax.numpy as jnp

    from experiments import rl_arms
    from jaxmeth import models

    if cfg.model == "smollm2":
        from experiments import rl_smollm2

        small = dataclasses.replace(cfg, group_size=4, rollouts=4)
        found = rl_smollm2.trials(small, folder, bench, list(legal.values()), cfg.models)
        return [_trial(name, values) for name, values in zip(legal, found, strict=True)]
    short = dataclasses.replace(cfg, steps=cfg.trial_steps, evaluations=1, seeds=1)
    leaves = rl_arms.warm_seeds(cfg, folder, bench, cfg.models)
    structure = jax.tree.structure(models.abstract_params(bench.model))
    params = jax.tree.unflatten(structure, [jnp.asarray(leaf[:1]) for leaf in leaves])
    run = rl_arms.trainer(short, bench, list(legal.values()))
    keys, rates, found = jax.random.split(jax.random.key(cfg.seed), 1), jnp.full((1,), cfg.rates[0]), []
    for i, name in enumerate(core.progress(list(legal), description="every combination")):
        curves = folder.cached(f"trial-{i}", lambda i=i: run(i, params, keys, rates).training)
        found.append(_trial(name, {k: float(curves[k][0, -1]) for k in ("loss", "grad_norm", "reward")}))
    return found


def _trial(name: str, values: dict[str, float]) -> dict[str, object]:
    return {"combination": name} | values | {"finite": "yes" if np.isfinite([*values.values()]).all() else "no"}


def trial_claims(cfg: Config, trials: core.Rows) -> list[core.Claim]:
    """That losses are finite and, with several prompts a step and the verifier's reward, a gradient is above 0.

    Votes, and the answers to one prompt, may well all be alike.
    """
    finite = sum(row["finite"] == "yes" for row in trials)
    claims = [core.Claim(f"legal combinations with finite losses, of {len(trials)}", finite, ">=", len(trials))]
    judged = [row["grad_norm"] > 0 for row in trials if str(row["combination"]).endswith("verifier")]
    if cfg.model == "tiny" and cfg.prompts > 1:
        text = f"legal combinations with the verifier's reward and a gradient above 0 in a trial step, of {len(judged)}"
        claims.append(core.Claim(text, sum(judged), ">=", len(judged)))
    return claims


def run(cfg: Config, folder: core.RunDir | None = None) -> core.Result:
    """Try all, compare eight."""
    folder = folder or core.RunDir()
    legal, illegal = combinations()
    compared = COMPARED[: cfg.compared]
    chosen, left_out = cfg.trained([legal[name] for name in compared], ON_SMOLLM2)
    if cfg.shapes_only:
        from experiments.rl_shapes import policy_shapes

        losses = [(a.name, a.loss) for a in chosen if a.name.endswith("verifier")]
        return policy_shapes(losses, prompts=cfg.prompts, group=cfg.group_size, prompt=512, new=3072)
    from experiments import rl_arms

    bench = rl_arms.prepare(cfg)
    trials = _trials(cfg, folder, bench, legal)
    measured = rl_arms.compare(cfg, folder, bench, chosen, models_each=cfg.models)
    claims = trial_claims(cfg, trials)
    claims += [rl_tables.ahead(measured, name, BASELINE) for name in measured.curves if name != BASELINE]
    return core.Result(
        rows={
            **rl_tables.table(cfg, measured, BASELINE),
            "every legal combination": trials,
            "illegal combinations": [{"combination": n, "reason": reason} for n, reason in illegal.items()],
        },
        claims=rl_tables.decided(cfg, claims, []),
        figures={"learning_curves": lambda f: rl_tables.draw_curves(f, measured)},
        notes=[
            *rl_tables.notes(cfg, measured, "none; the combinations are this library's."),
            *left_out,
            f"Names: {', '.join(CHOICES)}. {len(legal)} combinations are legal, {len(illegal)} are not. "
            f"{sum(row['grad_norm'] > 0 for row in trials)} had a gradient above 0 in the trial steps; it is 0 where "
            "the rewards in each group are alike.",
        ],
    )


if __name__ == "__main__":
    core.main(__file__)
