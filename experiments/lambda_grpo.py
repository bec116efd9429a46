"""lambda-GRPO: does counting a step that rollouts share only once make GRPO learn faster?

A tiny character model adds up with running sums, so that rollouts of a prompt share beginnings. GRPO against the
process-set weight 1/|L| with both divisors (tokens, sum of weights), and three controls: the same weights shuffled over
tokens, their mean everywhere, and the process advantages themselves as token advantages.

Claim: about twice as fast to the best validation accuracy, and a higher one, at negligible cost (arXiv 2509.21154).
Command: python -m experiments run lambda_grpo --preset laptop
Expected, laptop, pass rate .160 before, 8 seeds (mean token weight .57: much sharing):

    GRPO                .273   rate 1e-4
    lambda, per token   .300   over GRPO .027 [.010, .044]   rate 3e-4
    lambda, per weight  .294             .021 [.006, .037]   rate 3e-4
    shuffled weights    .292             .019 [.006, .032]   rate 3e-4
    mean weight         .285             .012 [-.006, .031]  rate 3e-4

lambda-GRPO is ahead of GRPO, but weights shuffled over tokens gain about as much (lambda less shuffled over training
.008 [-.007, .022]): a smaller step at a larger rate, not the process sets, may explain it. GRPO's final pass rate is
reached in .79 [.71, .90] of its steps, not in half of them.
Minutes: smoke 1, laptop 12 (on a busy machine).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments import core, rl_tables
from experiments.rl_config import TINY, Training

if TYPE_CHECKING:
    from experiments.rl_arms import Arm

ABOUT = core.About(
    claim="Weighing each token by 1 / (rollouts that share its prefix) makes GRPO learn faster.",
    minutes={"smoke": 1, "laptop": 12},
    needs="nothing",
    knob="rollouts",
)
PAPER = "Qwen2.5-3B-Instruct with LoRA, groups of 6 at temperature 0.75, 1,200 new tokens, Adam at 1e-6, one update."
CONTROL = "shuffled weights"


@dataclass(frozen=True, kw_only=True)
class Config(Training):
    """The shared options."""


PRESETS = {
    "smoke": Config(**TINY),
    "laptop": Config(),
    "paper": Config(group_size=6, rollouts=48, temperature=0.75, rates=(1e-6,), shapes_only=True),
}


def shuffled_weight(tokens: Any, alive: Any, group_size: int) -> Any:
    """The process-set weights of the batch, dealt out anew among its real tokens: the control for smaller early steps.

    The order is a hash of the batch's own tokens, so that no key is needed and no two batches share one.
    """
    import jax
    import jax.numpy as jnp

    from jaxmeth import rl

    weight, real = rl.lambda_grpo_weight(tokens, alive, group_size).reshape(-1), alive.reshape(-1)
    key = jax.random.key(jnp.where(alive, tokens, 0).sum().astype(jnp.uint32))
    # Real tokens first in both orders: the k-th real place of one gets the k-th real weight of the other.
    dealt = jnp.argsort(jnp.where(real, jax.random.uniform(key, weight.shape), 2.0))
    source = jnp.argsort(jnp.where(real, 0, 1), stable=True)
    return jnp.zeros_like(weight).at[dealt].set(weight[source]).reshape(tokens.shape)


def mean_weight(tokens: Any, alive: Any, group_size: int) -> Any:
    """The mean of the process-set weights everywhere: the control for a smaller step as such."""
    import jax.numpy as jnp

    from jaxmeth import rl

    weight = rl.lambda_grpo_weight(tokens, alive, group_size)
    return jnp.where(alive, weight.sum() / jnp.maximum(alive.sum(), 1), 0)


def arms() -> "list[Arm]":
    """GRPO, lambda-GRPO with both divisors, and the controls. All with the mean over tokens."""
    from experiments.rl_arms import Arm
    from jaxmeth import rl

    base = {"advantage": rl.adv_grpo, "aggregation": "token_mean"}
    weighted = {**base, "weight_kl": True}
    return [
        Arm("GRPO", rl.PolicyLoss(**base)),
        Arm("lambda, per token", rl.PolicyLoss(**weighted, token_weight=rl.lambda_grpo_weight)),
        Arm("lambda, per weight", rl.PolicyLoss(**weighted, token_weight=rl.lambda_grpo_weight, normalise="weights")),
        Arm(CONTROL, rl.PolicyLoss(**weighted, token_weight=shuffled_weight)),
        Arm("mean weight", rl.PolicyLoss(**weighted, token_weight=mean_weight)),
    ]


def run(cfg: Config, folder: core.RunDir | None = None) -> core.Result:
    """Train all arms, compare."""
    folder = folder or core.RunDir()
    if cfg.shapes_only:
        from experiments.rl_shapes import policy_shapes

        chosen = [(a.name, a.loss) for a in arms()]
        return policy_shapes(chosen, prompts=cfg.prompts, group=cfg.group_size, prompt=512, new=1200)
    from experiments import rl_arms

    bench = rl_arms.prepare(cfg)
    measured = rl_arms.compare(cfg, folder, bench, arms())
    shared = float(np.nanmean(measured.curves["lambda, per token"]["token_weight"]))
    claims = [rl_tables.ahead(measured, name, "GRPO") for name in ("lambda, per token", "lambda, per weight")]
    claims += [rl_tables.quicker(measured, name, "GRPO") for name in ("lambda, per token", "lambda, per weight")]
    claims += [rl_tables.sooner(measured, name, "GRPO", 0.5) for name in ("lambda, per token", "lambda, per weight")]
    claims.append(rl_tables.quicker(measured, "lambda, per token", CONTROL))
    return core.Result(
        rows=rl_tables.table(cfg, measured, "GRPO", ("token_weight",)),
        claims=claims,
        figures={"learning_curves": lambda f: rl_tables.draw_curves(f, measured)},
        notes=[
            *rl_tables.notes(cfg, measured, PAPER),
            f"Mean weight of a token over training: {shared:.2f}; the effect needs sharing, a mean well below 1.",
        ],
    )


if __name__ == "__main__":
    core.main(__file__)
