"""Asymmetric prompt weights: do weights that favour hard prompts learn sooner than GRPO's and RLOO's?

Theory first: the time to raise one prompt's success rate under each weight, counted in updates and in rollouts a
success. Then a tiny character model: RLOO, GRPO and DAPO against the asymmetric weights, and two ways to treat prompts
that were never solved.

Claim: from scratch, weights that favour hard prompts reach high accuracy sooner; after fine-tuning they do not
(arXiv 2602.11128).
Command: python -m experiments run asymmetric --preset laptop
Expected, laptop, pass rate .089 before, 8 seeds (every arm's best rate is 3e-4, inside the grid):

    grpo       .236
    rloo       .242   over grpo  .006 [-.015, .029]
    dapo       .250              .014 [-.001, .029]
    linear_r   .230             -.006 [-.024, .016]   .250 with unsolved prompts dropped, .250 with a warm-up
    sqrt_r     .247              .011 [-.004, .026]
    uniform_r  .231             -.005 [-.022, .015]
    plateau_r  .234             -.002 [-.017, .012]

Each with its best rate, no asymmetric weight learns sooner than GRPO: the best of them reaches a fifth in .98
[.82, 1.08] of GRPO's rollouts, and pushing unsolved prompts down costs linear_r .019 [.001, .037]. Success is not rare
here (one answer in eleven); `--task countdown` starts at .003, too rarely right for 60 steps. In the simulation, from
scratch and at equal small rates, linear_r needs .36 [.34, .37] of GRPO's steps; each at its best rate 1.04 [.99, 1.09].

SmolLM2 (--preset smollm2: 2 seeds, which settle nothing), from .141: GRPO and RLOO .195, linear_r .234, sqrt_r .258,
uniform_r and plateau_r .242.
Minutes: smoke 1, smollm2 9, laptop 10.
"""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments import core, rl_tables
from experiments.rl_config import SMOLLM2, TINY, Training

if TYPE_CHECKING:
    from experiments.rl_arms import Arm

ABOUT = core.About(
    claim="Prompt weights that favour hard prompts learn sooner than GRPO's when success is rare.",
    minutes={"smoke": 1, "smollm2": 9, "laptop": 10},
    needs="nothing",
    knob="rollouts",
)
PAPER = "Countdown with Qwen2.5-3B and GSM8K with Llama-3.1-8B from scratch, 16 rollouts, about 300 steps."
WEIGHTS = ("rloo", "grpo", "linear_r", "sqrt_r", "uniform_r", "plateau_r")
ASYMMETRIC = ("linear_r", "sqrt_r", "uniform_r", "plateau_r")
ON_SMOLLM2 = (*WEIGHTS, "linear_r, unsolved dropped")
"""The arms that carry the claims."""


@dataclass(frozen=True, kw_only=True)
class Config(Training):
    """The shared options; most demonstrations of the late warm start are wrong, so that success is rare at first."""

    warm_errors: float = 0.6
    """Share of wrong answers (other problems' ones) in the last eighth of the supervised steps: what is unlearnt."""
    zero_warmup: int = 10
    """Steps in which prompts that were never solved are skipped, in the arm with a warm-up."""

    def __post_init__(self):
        super().__post_init__()
        self.require(zero_warmup=(0, None))


PRESETS = {
    "smoke": Config(**TINY, zero_warmup=2),
    "laptop": Config(),
    "smollm2": Config(**SMOLLM2),
    "paper": Config(group_size=16, rollouts=2048, steps=300, evaluations=30, rates=(1e-6, 2e-6), shapes_only=True),
}


def arms(zero_warmup: int = 10) -> "list[Arm]":
    """Advantages of each weight, the mean over tokens; DAPO drops the groups that are all right or all wrong."""
    from experiments.rl_arms import Arm
    from jaxmeth import rl

    def loss(**kinds: Any) -> rl.PolicyLoss:
        return rl.PolicyLoss(advantage=partial(rl.adv_prompt_weighted, **kinds))

    def warming(step: Any) -> rl.PolicyLoss:
        return loss(weight="linear_r", zero_success_scale=rl.zero_success_warmup(step, zero_warmup))

    return [
        *[Arm(name, loss(weight=name)) for name in WEIGHTS],
        Arm("dapo", rl.presets.dapo()),
        Arm("linear_r, unsolved dropped", loss(weight="linear_r", zero_success="drop")),
        Arm("linear_r, warm-up", warming),
    ]


def theory(points: int = 40) -> tuple[np.ndarray, dict[str, dict[str, np.ndarray]], core.Rows]:
    """Times from a success rate p0 to 0.9, by clock and weight, over the least possible; and a table at three p0."""
    import jax
    import jax.numpy as jnp

    from jaxmeth import rl

    start = np.geomspace(1e-3, 0.5, points)
    over: dict[str, dict[str, np.ndarray]] = {}
    found: core.Rows = []
    with jax.enable_x64(True):
        for clock in ("regular", "effective"):
            best = jax.vmap(lambda p, c=clock: rl.optimal_time(p, 0.9, 1.0, c))(jnp.asarray(start))
            over[clock] = {}
            for name in WEIGHTS:
                times = jax.vmap(lambda p, c=clock, w=name: rl.time_to_target(w, p, 0.9, 1.0, c))(jnp.asarray(start))
                over[clock][name] = np.asarray(times / best)
                at = {f"from {p:g}": float(np.interp(p, start, over[clock][name])) for p in (0.001, 0.05, 0.5)}
                found.append({"clock": clock, "weight": name} | at)
    return start, over, found


def _draw_theory(figure: Any, start: np.ndarray, over: dict[str, dict[str, np.ndarray]]) -> None:
    for axes, (clock, weights) in zip(figure.subplots(1, len(over)), over.items(), strict=True):
        for name, ratio in weights.items():
            axes.plot(start, ratio, label=name)
        axes.set(xscale="log", yscale="log", xlabel="success rate at the start", title=f"{clock} clock")
        axes.set_ylabel("time to 0.9, over the least possible")
        axes.legend(fontsize=7)


def run(cfg: Config, folder: core.RunDir | None = None) -> core.Result:
    """Theory, then all arms."""
    folder = folder or core.RunDir()
    chosen = arms(cfg.zero_warmup)
    if cfg.shapes_only:
        from experiments.rl_shapes import policy_shapes
        from jaxmeth import rl

        losses = [(a.name, a.loss) for a in chosen if isinstance(a.loss, rl.PolicyLoss)]
        return policy_shapes(losses, prompts=cfg.prompts, group=cfg.group_size, prompt=256, new=1024)
    from experiments import rl_arms, rl_tabular

    bench = rl_arms.prepare(cfg)
    simulated = rl_tabular.simulate(cfg, folder, arms(rl_tabular.WARMUP))
    start, over, times = theory()
    chosen, left_out = cfg.trained(chosen, ON_SMOLLM2)
    measured = rl_arms.compare(cfg, folder, bench, chosen)
    # GRPO's weight is the optimum of the regular clock, sqrt_r of the effective one: the quadrature must show it.
    claims = [
        core.Claim(
            f"theory: worst time of {name} over the least, {clock} clock", over[clock][name].max(), "<=", 1 + 1e-6
        )
        for clock, name in (("regular", "grpo"), ("effective", "sqrt_r"))
    ]
    claims += [rl_tables.quicker(measured, name, "grpo") for name in ASYMMETRIC]
    claims.append(rl_tables.sooner_to(measured, ASYMMETRIC, "grpo", 0.2, 0.8))
    claims += [rl_tables.ahead(measured, "linear_r", other) for other in ("grpo", "rloo", "linear_r, unsolved dropped")]
    return core.Result(
        rows={**rl_tables.table(cfg, measured, "grpo"), "theory: time over the least possible": times}
        | simulated.tables,
        claims=rl_tables.decided(cfg, claims, simulated.claims),
        figures={
            "theory": lambda f: _draw_theory(f, start, over),
            "learning_curves": lambda f: rl_tables.draw_curves(f, measured),
        },
        notes=[*rl_tables.notes(cfg, measured, PAPER), *left_out, *simulated.notes],
    )


if __name__ == "__main__":
    core.main(__file__)
