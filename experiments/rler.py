"""RLER: do rewards from an ensemble's votes drift less than a model's own majority answer?

Two tiny character models, warm-started on different halves of the demonstrations, train without labels: each model's
own majority (TTRL), vote share or confidence, the ensemble's hard, soft and mixed rewards, votes of the models as they
were at first, RLER with and without its parts, one model with the rollouts of both, and the verifier as a bound. Bias
of each reward is measured on held-out problems; labels reach nothing else.

Claim: the ensemble's reward is less noisy and less skewed, and training with it ends higher (arXiv 2510.08977). Every
formula is a Reconstruction.
Command: python -m experiments run rler --preset laptop
Expected, laptop, pass rate .356 before, 8 seeds; end, noise and skew of the first reward, and the ends of the two
selection seeds at larger rates:

                       end   over self majority   noise  skew   3e-5  1e-4  3e-4
    verifier           .373  .023 [.016, .030]    0      0      .370  .361  .367
    self majority      .351                       .305   .42    .302  .247  .060
    own confidence     .353  .002 [-.003, .007]   .465   .56    .299  .159  .041
    frozen votes       .358  .007 [.004, .011]    .206   -.02   .353  .353  .304
    ensemble hard      .358  .007 [.003, .012]    .212   .28    .328  .229  .055
    ensemble, alpha .5 .358  .007 [.000, .014]    .274   -.01   .313  .250  .075
    RLER               .357  .006 [.000, .012]    .293   -.10   .303  .232  .059
    RLER cross         .356  .005 [-.002, .014]   .278   -.42   .331  .251  .087
    one model, all     .346  -.005 [-.033, .026]  .277   .31    .271  .109  .083

The verifier gains .017, no label-free arm does: each is best at the lowest rate, 1e-5, where next to nothing is learnt
(RLER is then ahead of self majority by a hair), and falls at larger ones, RLER as far as self majority; only votes that
cannot drift, the frozen ones, hold. RLER's first reward is less skewed (.25 [.12, .41] of self majority's) but hardly
less noisy (.96 [.91, 1.02]); in the simulations both hold.

SmolLM2 (--preset smollm2: 2 seeds, 3 steps of 16 rollouts, from .091; two seeds settle nothing): verifier .273, RLER
.258, without selection .203, self majority .188, one model .148; first noise .66 and skew .67 of self majority's.
Minutes: smoke 1, smollm2 12 (estimated; 31 on a busy machine), laptop 18.
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
    minutes={"smoke": 1, "smollm2": 12, "laptop": 18},
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
    "laptop": Config(rates=(1e-5, 3e-5, 1e-4, 3e-4)),
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

    bench = rl_arms.prepare(cfg)
    simulated = rl_votes.simulate(cfg, folder, chosen)
    chosen, left_out = cfg.trained(chosen, ON_SMOLLM2)
    measured = rl_arms.compare(cfg, folder, bench, chosen, models_each=cfg.models, probe=True)
    rl_arms.join(measured, _single(cfg, folder, bench))
    return core.Result(
        rows={**rl_tables.table(cfg, measured, SELF), "bias of the reward on held-out problems": _bias_rows(measured)}
        | simulated.tables,
        claims=rl_tables.decided(cfg, _claims(measured), simulated.claims),
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
