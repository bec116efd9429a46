"""RLER: do rewards from an ensemble's votes drift less than a model's own majority answer?

Two tiny character models, warm-started on different halves of the demonstrations, train without labels: each model's
own majority (TTRL), vote share or confidence, the ensemble's hard, soft and mixed rewards, votes of the models as they
were at first, RLER with and without its parts, one model with the rollouts of both, and the verifier as a bound. Bias
of each reward is measured on held-out problems; labels reach nothing else.

Claim: the ensemble's reward is less noisy and less skewed, and training with it ends higher (arXiv 2510.08977). Every
formula is a Reconstruction.
Command: python -m experiments run rler --preset laptop
Expected, laptop, pass rate .356 before, 8 seeds; end, and noise and skew of the first reward:

    verifier           .347                                         0     0
    self majority      .324                                      .305   .42
    own confidence     .340  over self majority .016 [.007, .026]  .465   .56
    frozen votes       .354                     .030 [.014, .048]  .206  -.02
    ensemble hard      .339                     .014 [-.003, .032] .212   .28
    ensemble, alpha .5 .351                     .027 [.013, .042]  .274  -.01
    RLER               .344                     .020 [.005, .036]  .293  -.10
    RLER cross         .347                     .023 [.009, .037]
    one model, all     .324                     .000 [-.033, .039]

No arm gains, the verifier neither: 24 steps of 64 rollouts are too few, and every label-free arm is best at the lowest
rate of the grid, 3e-5, where it does least harm. RLER loses less than self majority, and a fixed mixture or frozen
votes lose no more than RLER. Its first reward is less skewed (.25 [.12, .41] of self majority's) but hardly less noisy
(.96 [.91, 1.02]); in the simulations both hold.

SmolLM2 (--preset smollm2: 2 seeds, 3 steps of 16 rollouts, from .091; two seeds settle nothing): verifier .273, RLER
.258, without selection .203, self majority .188, one model .148; first noise .66 and skew .67 of self majority's.
Minutes: smoke 1, smollm2 12 (estimated; 31 on a busy machine), laptop 24 (on a busy machine).
"""

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments import core, rl_tables
from experiments.rl_config import SMOLLM2, TINY, Training

if TYPE_CHECKING:
    from experiments.rl_arms import Arm, Given, Judged, Measured

ABOUT = core.About(
    claim="Rewards from the votes of an ensemble are less biased than a model's own majority, and train better.",
    minutes={"smoke": 1, "smollm2": 12, "laptop": 24},
    needs="nothing",
    knob="rollouts",
)
PAPER = "two Qwen2.5-Math-1.5B/7B, DAPO-Math-17k without labels, 16 rollouts; Avg@16 on MATH500, AMC and AIME."
SELF, RLER, ORACLE, SINGLE = "self majority", "RLER", "verifier", "one model, all rollouts"
ON_SMOLLM2 = (ORACLE, SELF, "RLER, no selection", RLER)
"""The arms that carry the claims. The models of an ensemble start alike there and differ by their own rollouts."""


@dataclass(frozen=True, kw_only=True)
class Config(Training):
    """The shared options, and the ensemble."""

    models: int = 2
    """Models K that vote together, each trained on its own rollouts."""
    keep: float = 0.5
    """Share of all rollouts of a prompt that RLER's selection keeps."""
    warm_errors: float = 0.1
    """Share of wrong answers (other problems' ones) in the last eighth of the supervised steps: what is unlearnt."""
    test_problems: int = 64
    """Held-out problems of every evaluation."""
    test_samples: int = 8
    """Answers of each model to each held-out problem; they vote there as in training."""

    def __post_init__(self):
        super().__post_init__()
        self.require(models=(1, None), keep=(1e-6, 1))


PRESETS = {
    "smoke": Config(**{**TINY, "test_samples": 4}),
    "laptop": Config(rollouts=64, steps=24),
    "smollm2": Config(**{**SMOLLM2, "steps": 3, "test_samples": 2}),
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


def confidence(judged: "Judged") -> "Given":
    """The geometric mean of a rollout's own token probabilities: rewarding it lowers the entropy, right or wrong."""
    import jax.numpy as jnp

    from experiments.rl_arms import Given

    length = jnp.maximum(judged.mask.sum(-1), 1)
    own = jnp.exp(jnp.where(judged.mask, judged.logp, 0).sum(-1) / length)
    return Given(own, jnp.ones(own.shape, bool))


def frozen_votes(judged: "Judged") -> "Given":
    """1 for the majority answer of the models as they were before training: a judge that cannot drift."""
    import jax
    import jax.numpy as jnp

    from experiments.rl_arms import Given, same_answers
    from jaxmeth import rl

    both = [jnp.concatenate(pair, axis=2) for pair in zip((judged.tokens, judged.mask), judged.first, strict=True)]
    ids = same_answers(judged._replace(tokens=both[0], mask=both[1]))
    own, voters = jnp.split(ids, 2, axis=2)
    majority = jax.vmap(lambda a: rl.ensemble_reward(a, None, ids[0].size).majority)(voters)
    reward = jnp.moveaxis((own == majority[:, None, None]) & (own >= 0), 0, 1).astype(jnp.float32)
    return Given(reward, jnp.ones(reward.shape, bool))


def _one(conf: Any, disagreement: Any) -> float:
    return 1.0


def _half(conf: Any, disagreement: Any) -> float:
    return 0.5


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
        "own confidence": confidence,
        "frozen votes": frozen_votes,
        "ensemble hard": partial(votes, alpha_fn=_one),
        "ensemble soft": partial(votes, alpha_fn=_none),
        "ensemble, alpha 0.5": partial(votes, alpha_fn=_half),
        "RLER, no selection": votes,
        RLER: partial(votes, keep=keep),
        "RLER cross": partial(votes, cross=True),
    }
    return [Arm(name, loss, reward, past=reward is frozen_votes) for name, reward in rewards.items()]


def _single(cfg: Config, folder: core.RunDir, bench: Any) -> "Measured":
    """The first model of each ensemble alone, by its own majority, with all models' rollouts: equal compute."""
    from experiments import rl_arms

    leaves = None
    if cfg.model == "tiny":
        leaves = [leaf[:, :1] for leaf in rl_arms.warm_seeds(cfg, folder, bench, cfg.models)]
    wide = dataclasses.replace(
        cfg, models=1, rollouts=cfg.models * cfg.rollouts, group_size=cfg.models * cfg.group_size,
        test_samples=cfg.models * cfg.test_samples,
    )  # fmt: skip
    arm = next(a for a in arms() if a.name == SELF)._replace(name=SINGLE)
    return rl_arms.compare(wide, folder, bench, [arm], probe=True, leaves=leaves, prefix="single-")


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
        rl_tables.ahead(measured, plain, SINGLE),
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
    from experiments import rl_arms, rl_votes

    simulated = rl_votes.simulate(cfg, folder, chosen)
    chosen, left_out = cfg.trained(chosen, ON_SMOLLM2)
    bench = rl_arms.prepare(cfg)
    measured = rl_arms.compare(cfg, folder, bench, chosen, models_each=cfg.models, probe=True)
    rl_arms.join(measured, _single(cfg, folder, bench))
    return core.Result(
        rows={**rl_tables.table(cfg, measured, SELF), "bias of the reward on held-out problems": _bias_rows(measured)}
        | simulated.tables,
        claims=[*_claims(measured), *simulated.claims],
        figures={
            "learning_curves": lambda f: rl_tables.draw_curves(f, measured),
            "noise": lambda f: rl_tables.draw_curves(f, measured, "noise", "noise of the reward"),
        },
        notes=[
            *rl_tables.notes(cfg, measured, PAPER),
            f"{cfg.models} models a seed, {cfg.rollouts} rollouts each a step; pass rates are their mean. Selection "
            f"trains on {cfg.keep:g} of the rollouts that were drawn. {SINGLE}: the first model of each seed, which "
            "starts where it does, not where the mean does; its votes, and its pass@k, are of all models' answers.",
            *left_out,
            *simulated.notes,
        ],
    )


if __name__ == "__main__":
    core.main(__file__)
