"""lambda-GRPO: does counting a step that rollouts share only once make GRPO learn faster?

A tiny character model adds up with running sums, so that rollouts of a prompt share beginnings. GRPO against the
process-set weight 1/|L| with both divisors (tokens, sum of weights), and three controls: the same weights shuffled over
tokens, their mean everywhere, and the process advantages themselves as token advantages (GRPO in another order, so its
distance from GRPO is what rounding makes of a run). GRPO and lambda-GRPO also at other sampling temperatures.

Claim: about twice as fast to the best validation accuracy, and a higher one, at negligible cost (arXiv 2509.21154).
Command: python -m experiments run lambda_grpo --preset laptop
Expected, laptop, pass rate .163 before, 8 seeds (mean token weight .58: much sharing):

    GRPO                .262   rate 1e-4
    lambda, per token   .289   over GRPO .027 [.013, .041]   rate 3e-4
    lambda, per weight  .285             .023 [.010, .034]   rate 3e-4
    shuffled weights    .263             .001 [-.006, .008]  rate 1e-4
    mean weight         .271             .009 [-.005, .022]  rate 3e-4
    process advantages  .284             .021 [.010, .032]   rate 3e-4

lambda-GRPO is ahead of GRPO, but so are the process advantages, whose gradient is GRPO's: on the two seeds that choose
it, 1e-4 and 3e-4 tie, GRPO drew the one and they the other. Against them lambda is .006 [-.006, .016] ahead: undecided,
so most of the gain is the rate's. GRPO's final pass rate takes .61 [.46, .82] of its steps ("twice as fast" undecided).
At temperatures .75 and 1.5 there is no gain (.001, -.001). Trees: with plain gradient descent, much sharing and the sum
of weights as divisor .69 [.40, .90] of GRPO's steps; with Adam none saved.

SmolLM2 (--preset smollm2: 2 seeds, which settle nothing): GRPO .195 from .141, per token .172. Answers of a few tokens
at temperature 1 hardly share prefixes (mean weight .94); 16 rollouts at .75 do (.77).
Minutes: smoke 1, smollm2 9, laptop 15.
"""

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments import core, rl_tables
from experiments.rl_config import SMOLLM2, TINY, Training

if TYPE_CHECKING:
    from experiments.rl_arms import Arm, Measured

ABOUT = core.About(
    claim="Weighing each token by 1 / (rollouts that share its prefix) makes GRPO learn faster.",
    minutes={"smoke": 1, "smollm2": 9, "laptop": 15},
    needs="nothing",
    knob="rollouts",
)
PAPER = "Qwen2.5-3B-Instruct with LoRA, groups of 6 at temperature 0.75, 1,200 new tokens, Adam at 1e-6, one update."
GRPO, LAMBDA, CONTROL, PROCESS = "GRPO", "lambda, per token", "shuffled weights", "process advantages"


@dataclass(frozen=True, kw_only=True)
class Config(Training):
    """The shared options."""

    evaluations: int = 6
    """Times that an arm is evaluated after training has begun; divides the steps."""
    temperatures: tuple[float, ...] = (0.75, 1.5)
    """Other temperatures at which GRPO and lambda-GRPO are compared; the lower, the more is shared."""

    def __post_init__(self):
        super().__post_init__()
        self.require(temperatures=(1e-3, 100))


PRESETS = {
    "smoke": Config(**TINY, temperatures=()),
    "laptop": Config(),
    "smollm2": Config(**SMOLLM2, temperatures=()),
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


def process_loss(step: Any) -> Any:
    """GRPO in its other form: a token's advantage is that of its process set, the mean over the rollouts that share it.

    On-policy its gradient is GRPO's, summed in another order.
    """
    from jaxmeth import rl

    def loss(logp: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
        alive = batch.mask if batch.alive is None else batch.alive
        # The mean of standardised rewards is the standardised mean.
        adv = rl.process_rewards(rl.adv_grpo(batch.rewards, batch.valid), batch.tokens, alive)
        found = rl.ppo_clip(logp, batch.logp_old, adv, batch.mask)
        return rl.aggregate(-found.value, batch.mask, "token_mean"), {}

    return loss


def arms() -> "list[Arm]":
    """GRPO, lambda-GRPO with both divisors, and the controls. All with the mean over tokens."""
    from experiments.rl_arms import Arm
    from jaxmeth import rl

    base = {"advantage": rl.adv_grpo, "aggregation": "token_mean"}
    weighted = {**base, "weight_kl": True}
    return [
        Arm(GRPO, rl.PolicyLoss(**base)),
        Arm(LAMBDA, rl.PolicyLoss(**weighted, token_weight=rl.lambda_grpo_weight)),
        Arm("lambda, per weight", rl.PolicyLoss(**weighted, token_weight=rl.lambda_grpo_weight, normalise="weights")),
        Arm(CONTROL, rl.PolicyLoss(**weighted, token_weight=shuffled_weight)),
        Arm("mean weight", rl.PolicyLoss(**weighted, token_weight=mean_weight)),
        Arm(PROCESS, process_loss),
    ]


def _temperatures(cfg: Config, folder: core.RunDir, bench: Any) -> "dict[float, Measured]":
    """GRPO and lambda-GRPO at each of the other temperatures, from the same warm start."""
    from experiments import rl_arms

    pair = [a for a in arms() if a.name in (GRPO, LAMBDA)]
    return {
        t: rl_arms.compare(dataclasses.replace(cfg, temperature=t), folder, bench, pair, prefix=f"temperature{t:g}-")
        for t in cfg.temperatures
    }


def _temperature_rows(found: "dict[float, Measured]") -> core.Rows:
    return [
        {"temperature": t, "arm": arm, "rate": measured.rates[arm], "before": rl_tables.mean(curves["pass"][:, 0])}
        | {"pass rate": rl_tables.mean(measured.last(arm)), "steps to 90% of peak": rl_tables.near_peak(measured, arm)}
        | {"mean token weight": float(np.nanmean(measured.curves[LAMBDA]["token_weight"]))}
        | ({} if arm == GRPO else {f"over {GRPO}": rl_tables.difference(measured.last(arm), measured.last(GRPO))})
        for t, measured in found.items()
        for arm, curves in measured.curves.items()
    ]


def run(cfg: Config, folder: core.RunDir | None = None) -> core.Result:
    """Train all arms, compare."""
    folder = folder or core.RunDir()
    if cfg.shapes_only:
        from experiments.rl_shapes import policy_shapes
        from jaxmeth import rl

        chosen = [(a.name, a.loss) for a in arms() if isinstance(a.loss, rl.PolicyLoss)]
        return policy_shapes(chosen, prompts=cfg.prompts, group=cfg.group_size, prompt=512, new=1200)
    from experiments import rl_arms, rl_tree

    bench = rl_arms.prepare(cfg)
    simulated = rl_tree.simulate(cfg, folder, arms())
    measured = rl_arms.compare(cfg, folder, bench, arms())
    others = _temperatures(cfg, folder, bench)
    shared = float(np.nanmean(measured.curves[LAMBDA]["token_weight"]))
    both = (LAMBDA, "lambda, per weight")
    claims = [rl_tables.ahead(measured, name, GRPO) for name in both]
    claims += [rl_tables.quicker(measured, name, GRPO) for name in both]
    claims += [rl_tables.sooner(measured, name, GRPO, 0.5) for name in both]
    claims.append(rl_tables.quicker(measured, LAMBDA, CONTROL))
    # The same gradient as GRPO's: what is left against it does not come from the chance of another rate.
    claims.append(rl_tables.ahead(measured, LAMBDA, PROCESS))
    tables = dict(rl_tables.table(cfg, measured, GRPO, ("token_weight",)))
    for row in next(iter(tables.values())):
        row["steps to 90% of peak"] = rl_tables.near_peak(measured, row["arm"])
    if others:
        tables["other temperatures"] = _temperature_rows(others)
    if cfg.model == "smollm2":
        from experiments import rl_smollm2

        tables["16 rollouts a prompt at temperature 0.75"] = rl_smollm2.sharing(cfg, bench)
    return core.Result(
        rows=tables | simulated.tables,
        claims=rl_tables.decided(cfg, claims, simulated.claims),
        figures={"learning_curves": lambda f: rl_tables.draw_curves(f, measured)},
        notes=[
            *rl_tables.notes(cfg, measured, PAPER),
            f"Mean weight of a token over training: {shared:.2f}; the effect needs sharing, a mean well below 1.",
            *simulated.notes,
        ],
    )


if __name__ == "__main__":
    core.main(__file__)
