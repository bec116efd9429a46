"""RLER: do rewards from an ensemble's votes drift less than a model's own majority answer?

Two tiny character models, warm-started on different halves of the demonstrations, train without labels: each model's
own majority (TTRL) or vote share, the ensemble's hard and soft rewards, RLER with and without its parts, and the
verifier as a bound. Bias of each reward is measured on held-out problems; labels reach nothing else.

Claim: the ensemble's reward is less noisy and less skewed, and training with it ends higher (arXiv 2510.08977). Every
formula is a Reconstruction.
Command: python -m experiments run rler --preset laptop
Expected: not measured yet at laptop size; smoke shows that it runs, not who wins.
Minutes: smoke 1, laptop 8.
"""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments import core, rl_tables
from experiments.rl_config import TINY, Training

if TYPE_CHECKING:
    from experiments.rl_arms import Arm, Given, Judged, Measured

ABOUT = core.About(
    claim="Rewards from the votes of an ensemble are less biased than a model's own majority, and train better.",
    minutes={"smoke": 1, "laptop": 8},
    needs="nothing",
    knob="rollouts",
)
PAPER = "two Qwen2.5-Math-1.5B/7B, DAPO-Math-17k without labels, 16 rollouts; Avg@16 on MATH500, AMC and AIME."
SELF, RLER, ORACLE = "self majority", "RLER", "verifier"


@dataclass(frozen=True, kw_only=True)
class Config(Training):
    """The shared options, and the ensemble."""

    models: int = 2
    """Models K that vote together, each trained on its own rollouts."""
    keep: float = 0.5
    """Share of all rollouts of a prompt that RLER's selection keeps."""
    test_samples: int = 8
    """Answers of each model to each held-out problem; they vote there as in training."""

    def __post_init__(self):
        super().__post_init__()
        self.require(models=(1, None), keep=(1e-6, 1))


PRESETS = {
    "smoke": Config(**{**TINY, "test_samples": 4}),
    "laptop": Config(rollouts=64, steps=40),
    "paper": Config(group_size=16, rollouts=2048, steps=300, evaluations=30, rates=(1e-6,), shapes_only=True),
}


def votes(judged: "Judged", *, alone: bool = False, keep: float | None = None, **kinds: Any) -> "Given":
    """The label-free reward of :func:`jaxmeth.rl.rler_rewards`; ``alone``: each model is its own ensemble."""
    import jax.numpy as jnp

    from experiments.rl_arms import Given, same_answers
    from jaxmeth import rl

    ids = same_answers(judged)
    p, k, n = ids.shape
    if alone:
        ids = ids.reshape(p * k, 1, n)
    selected = None if keep is None else max(1, round(keep * ids.shape[1] * n))
    found = rl.rler_rewards(ids, None, k * n, selected, **kinds)
    reward, kept = found.rewards, found.selected
    if alone:
        reward, kept = (jnp.moveaxis(a.reshape(p, k, n), 1, 0) for a in (reward, kept))
    return Given(reward, kept)


def _one(conf: Any, disagreement: Any) -> float:
    return 1.0


def _none(conf: Any, disagreement: Any) -> float:
    return 0.0


def arms(keep: float = 0.5) -> "list[Arm]":
    """One loss for all, GRPO with the mean over tokens; only the reward differs."""
    from experiments.rl_arms import Arm, verified
    from jaxmeth import rl

    loss = rl.PolicyLoss(advantage=rl.adv_grpo)
    rewards = {
        ORACLE: verified,
        SELF: partial(votes, alone=True, alpha_fn=_one),
        "self frequency": partial(votes, alone=True, alpha_fn=_none),
        "ensemble hard": partial(votes, alpha_fn=_one),
        "ensemble soft": partial(votes, alpha_fn=_none),
        "RLER, no selection": votes,
        RLER: partial(votes, keep=keep),
        "RLER cross": partial(votes, cross=True),
    }
    return [Arm(name, loss, reward) for name, reward in rewards.items()]


def _bias_rows(measured: "Measured") -> core.Rows:
    return [
        {"reward": arm}
        | {f"{name}, first": rl_tables.mean(curves[name][:, 0]) for name in ("noise", "symbias", "selfbias")}
        | {f"{name}, last": rl_tables.mean(curves[name][:, -1]) for name in ("noise", "symbias", "selfbias")}
        for arm, curves in measured.curves.items()
    ]


def _claims(measured: "Measured") -> list[core.Claim]:
    first = {a: {k: np.abs(c[k][:, 0]) for k in ("noise", "symbias")} for a, c in measured.curves.items()}
    drop = {a: c["pass"].max(1) - c["pass"][:, -1] for a, c in measured.curves.items()}
    plain = "RLER, no selection"

    def ratio(name: str) -> core.Estimate:
        pairs = first[plain][name], first[SELF][name]
        return core.bootstrap_interval(lambda a, b: a.mean(1) / b.mean(1), *pairs, batched=True)

    return [
        core.Claim(f"noise of the first reward, {plain} over {SELF}", ratio("noise"), "<=", 0.8),
        core.Claim(f"|symbias| of the first reward, {plain} over {SELF}", ratio("symbias"), "<=", 0.5),
        rl_tables.ahead(measured, RLER, SELF),
        rl_tables.ahead(measured, plain, SELF),
        core.Claim(f"fall from the peak, {SELF} less {RLER}", rl_tables.difference(drop[SELF], drop[RLER]), ">", 0),
    ]


def run(cfg: Config, folder: core.RunDir | None = None) -> core.Result:
    """Train all arms, compare rewards and pass rates."""
    folder = folder or core.RunDir()
    chosen = arms(cfg.keep)
    if cfg.shapes_only:
        from experiments.rl_shapes import policy_shapes

        losses = [(chosen[0].name, chosen[0].loss)]
        return policy_shapes(losses, prompts=cfg.prompts, group=cfg.group_size, prompt=512, new=3072)
    from experiments import rl_arms

    measured = rl_arms.compare(cfg, folder, rl_arms.prepare(cfg), chosen, models_each=cfg.models, probe=True)
    return core.Result(
        rows={**rl_tables.table(cfg, measured, SELF), "bias of the reward on held-out problems": _bias_rows(measured)},
        claims=_claims(measured),
        figures={
            "learning_curves": lambda f: rl_tables.draw_curves(f, measured),
            "noise": lambda f: rl_tables.draw_curves(f, measured, "noise", "noise of the reward"),
        },
        notes=[
            *rl_tables.notes(cfg, measured, PAPER),
            f"{cfg.models} models a seed, {cfg.rollouts} rollouts each a step; pass rates are their mean. Selection "
            f"trains on {cfg.keep:g} of the rollouts that were drawn.",
        ],
    )


if __name__ == "__main__":
    core.main(__file__)
