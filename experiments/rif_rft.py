"""RIF-RFT: does reinforcement fine-tuning forget less than supervised, and does filtering instances save rollouts?

A tiny character model, warm-started on four tasks, goes through three of them one after the other: supervised (SFT) on
the reference answers, plain, with KL or with replay, rejection-sampling SFT on its own right ones, GRPO, plain or with
KL, and GRPO on the instances that it sometimes solves at the start of the task (RIF-RFT); SFT on all three at once is
the bound. Every learning rate is a point of gain against forgetting; claims are at matched gain, since who learns less
forgets less. Countdown is never trained: the general ability.

Claim: RFT forgets less than SFT, and filtering makes it cheaper (arXiv 2507.05386; arXiv 2607.04364 reports forgetting
by RL too).
Command: python -m experiments run rif_rft --preset laptop
Expected, laptop, pass rate .166 before, 8 seeds (each arm at its rate of the largest gain; forgetting below 0: lost):

    SFT                     gain .145   forgetting -.019   KL(new || old) 1.61   rate 3e-4
    SFT with replay              .146              -.027                  1.49        3e-4
    multi-task SFT               .142              -.004                   .55        3e-4
    rejection-sampling SFT       .165              -.010                  1.60        3e-4
    GRPO                         .160              -.013                  1.74        3e-4
    GRPO with KL                 .105              -.005                   .19        1e-4
    RIF-RFT                      .137              -.005                   .86        3e-4

Whether GRPO forgets less than SFT at matched gain is undecided (.007 [-.005, .047]; RIF-RFT .037 [-.000, .065]), and so
it is for SFT on one's own right answers: little is forgotten by anyone below the highest rate. Filtering costs
more than it saves (1.17x GRPO's rollouts) because 24 steps a task are few beside 8 answers to each of 128 instances; in
the simulation, 300 steps long, it takes .59 [.57, .61].

SmolLM2 (--preset smollm2: 2 seeds, which settle nothing): gain .227 by SFT, .133 by GRPO; the filter keeps a tenth of
the problems, RIF-RFT then gains nothing and samples 1.19 times as much as GRPO.
Minutes: smoke 1, smollm2 10 (estimated; 28 on a busy machine), laptop 25.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from experiments import core, rl_tables
from experiments.rl_config import SMOLLM2, TINY, Training

ABOUT = core.About(
    claim="Reinforcement fine-tuning forgets less than supervised at matched gain; a filter saves rollouts.",
    minutes={"smoke": 1, "smollm2": 10, "laptop": 25},
    needs="nothing",
    knob="rollouts",
)
PAPER = "Qwen2.5-VL-7B-Instruct on seven multimodal tasks; MMMU and MMLU-Pro as general benchmarks."
SEQUENCE, GENERAL = ("chain_sum", "letter_counting", "spell_backward"), "countdown"


class Kind(NamedTuple):
    """How an arm learns: from reference answers, its own right ones, or its own by their advantages.

    ``kl``: a KL term to the start of the task; ``replay``: some problems of earlier tasks; ``joint``: all tasks at
    once; ``filtered``: only instances that were solved at the start of the task. Deviation: all arms take the mean
    over tokens, the RFT ones too, where the preset ``grpo`` takes the mean over answers of each one's mean.
    """

    answers: str
    kl: bool = False
    replay: bool = False
    joint: bool = False
    filtered: bool = False


KINDS = {
    "SFT": Kind("reference"),
    "SFT with KL": Kind("reference", kl=True),
    "SFT with replay": Kind("reference", replay=True),
    "multi-task SFT": Kind("reference", joint=True),
    "rejection-sampling SFT": Kind("right"),
    "GRPO": Kind("advantage"),
    "GRPO with KL": Kind("advantage", kl=True),
    "RIF-RFT": Kind("advantage", filtered=True),
}
ARMS = tuple(KINDS)
ON_SMOLLM2 = ("SFT", "rejection-sampling SFT", "GRPO", "RIF-RFT")
"""The arms without KL, replay or all tasks at once."""
METRICS = ("avg_acc", "gain", "forgetting", "backward_transfer", "general", "general loss", "KL")


@dataclass(frozen=True, kw_only=True)
class Config(Training):
    """The shared options, by task of the sequence; ``task``, ``epochs`` and ``selection_seeds`` play no part."""

    filter_rollouts: int = 8
    """Answers to each instance by which the filter decides; counted in every budget."""
    min_successes: int = 1
    """Right ones among them for an instance to be kept."""
    beta: float = 0.5
    """Weight of the KL a token to the start of the task, in the arms with one."""
    replay: float = 0.05
    """Share of problems of earlier tasks, in the arm with replay."""
    rates: tuple[float, ...] = (1e-4, 3e-4, 1e-3)
    """Learning rates of every arm; each is a point of gain against forgetting."""

    def __post_init__(self):
        super().__post_init__()
        self.require(filter_rollouts=(1, None), min_successes=(0, None), beta=(0, None), replay=(0, 1))


PRESETS = {
    "smoke": Config(**{**TINY, "selection_seeds": 1}),
    "laptop": Config(warm_steps=900, rollouts=64, steps=24, train_problems=128, test_samples=2),
    "smollm2": Config(**{**SMOLLM2, "train_problems": 16, "test_samples": 2}, filter_rollouts=4),
    "paper": Config(group_size=8, rollouts=1024, rates=(1e-6,), shapes_only=True),
}


def matched(gain: np.ndarray, forgetting: np.ndarray, at: float) -> float:
    """Forgetting at a gain, along the line through (0, 0) and the rates' means [rates], by rising gain."""
    order = np.argsort(gain)
    useful = [i for i in order if gain[i] > 0]
    return float(np.interp(at, [0, *gain[useful]], [0, *forgetting[useful]]))


def advantage(first: np.ndarray, second: np.ndarray) -> core.Estimate:
    """How much more of a metric the first has at the largest gain that both reach; [seeds, rates, (gain, metric)]."""

    def statistic(a: np.ndarray, b: np.ndarray) -> float:
        a, b = a.mean(0), b.mean(0)
        at = min(a[:, 0].max(), b[:, 0].max())
        return matched(*a.T, at) - matched(*b.T, at) if at > 0 else np.nan

    return core.bootstrap_interval(statistic, first, second)


def run(cfg: Config, folder: core.RunDir | None = None) -> core.Result:
    """All arms at all rates, then gain against forgetting."""
    folder = folder or core.RunDir()
    if cfg.shapes_only:
        from experiments.rl_shapes import policy_shapes
        from jaxmeth import rl

        return policy_shapes([("GRPO", rl.presets.grpo())], prompts=128, group=8, prompt=1024, new=2048)
    from experiments import rl_linear

    simulated = rl_linear.simulate(cfg, folder)
    if cfg.model == "smollm2":
        from experiments import rl_smollm2_continual

        stored = rl_smollm2_continual.train_all(cfg, folder)
        points = {
            arm: {k: np.stack([p[k] for p in of], axis=1) for k in of[0]}
            for arm, of in ((arm, [measures(s) for s in each]) for arm, each in stored.items())
        }
        return _result(cfg, points, simulated, "SmolLM2-135M", rl_smollm2_continual.notes(cfg))
    import jax
    import jax.numpy as jnp

    from experiments import rl_arms, rl_continual
    from jaxmeth import models

    bench, pools, held = rl_continual.prepare(cfg)
    leaves = rl_arms.warm_seeds(cfg, folder, bench, seeds=cfg.seeds)
    structure = jax.tree.structure(models.abstract_params(bench.model))
    params = jax.tree.unflatten(structure, [jnp.asarray(leaf[:, 0]) for leaf in leaves])
    train = rl_continual.learner(cfg, bench)
    found: dict[str, list[dict[str, np.ndarray]]] = {name: [] for name in ARMS}
    trials = [(i, rate) for i in range(len(ARMS)) for rate in cfg.rates]
    for i, rate in core.progress(trials, description="training"):

        def compute(i: int = i, rate: float = rate) -> dict[str, Any]:
            # The same keys for every arm and rate.
            keys = jax.random.split(jax.random.fold_in(jax.random.key(cfg.seed), 3), cfg.seeds)
            return train(i, params, keys, jnp.full((cfg.seeds,), rate, jnp.float32), pools, held)

        point = measures(folder.cached(f"arm{i}-rate{rate:g}", compute))
        found[ARMS[i]].append(point)
        folder.log(i * len(cfg.rates) + cfg.rates.index(rate), ARMS[i], **{k: v.mean() for k, v in point.items()})
    points = {arm: {k: np.stack([p[k] for p in of], axis=1) for k in of[0]} for arm, of in found.items()}
    return _result(
        cfg,
        points,
        simulated,
        "tiny model",
        [
            f"Tasks in order: {', '.join(SEQUENCE)}; general: {GENERAL}.",
            f"general loss: change of the loss a token on reference answers of {GENERAL}, in place of a text sample, "
            "which would mean nothing to a character model. KL: new || old, of an answer to the new task's held-out "
            f"prompts, nats. KL terms weigh {cfg.beta:g}; replay is {cfg.replay:.0%} of the problems.",
        ],
    )


def _result(cfg: Config, points: dict, simulated: Any, title: str, notes: list[str]) -> core.Result:
    start = float(points["SFT"]["before"].mean())
    return core.Result(
        rows={title: _rows(cfg, points), **simulated.tables},
        claims=rl_tables.decided(cfg, _claims(points), simulated.claims),
        figures={
            "gain_forgetting": lambda f: _draw(f, points, "forgetting", "forgetting (negative: lost)"),
            "gain_kl": lambda f: _draw(f, points, "KL", "KL(new || old) of an answer, nats"),
        },
        notes=[
            *notes,
            *skipped(points),
            *rl_tables.few_seeds(cfg),
            f"Pass rate before: {start:.3f}. {cfg.seeds} seeds, every rate of the grid is a row; brackets: 95% "
            "bootstrap over seeds.",
            "Forgetting is negative where accuracy was lost; matched gain: the largest that both arms reach, along the "
            "line through the rates' means.",
            f"The paper's scale: {PAPER}",
            *simulated.notes,
        ],
    )


def measures(stored: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """By metric [seeds], from what one arm at one rate left."""
    import jax.numpy as jnp

    from jaxmeth import rl

    scores = stored["scores"]
    metrics = [rl.continual_metrics(jnp.asarray(s[1:, :-1]), jnp.asarray(s[0, :-1])) for s in scores]
    columns = {name: np.array([float(getattr(m, name)) for m in metrics]) for name in metrics[0]._fields}
    columns |= {"general": scores[:, -1, -1] - scores[:, 0, -1], "before": scores[:, 0, :-1].mean(1)}
    return columns | {name: stored[name] for name in ("general loss", "KL", "kept", "skipped", "sampled")}


def skipped(points: dict[str, dict[str, np.ndarray]]) -> list[str]:
    """A note where the filter kept nothing of a task, which is then not trained."""
    of = points["RIF-RFT"]["skipped"]
    where = f"{int(of.sum())} (seed, task) of the {of.size} trainings of {of.shape[0]} seeds at {of.shape[1]} rate(s)"
    return [f"RIF-RFT: the filter kept nothing, and the task was skipped, in {where}."] if of.any() else []


def _rows(cfg: Config, points: dict[str, dict[str, np.ndarray]]) -> core.Rows:
    return [
        {"arm": arm, "rate": rate}
        | {name.replace("_", " "): rl_tables.mean(of[name][:, i]) for name in METRICS}
        | {"kept": float(of["kept"][:, i].mean()), "rollouts": float(of["sampled"][:, i].mean())}
        for arm, of in points.items()
        for i, rate in enumerate(cfg.rates)
    ]


def _claims(points: dict[str, dict[str, np.ndarray]]) -> list[core.Claim]:
    def compared(metric: str, first: str, second: str) -> core.Claim:
        pair = [np.stack([points[arm]["gain"], points[arm][metric]], axis=-1) for arm in (first, second)]
        return core.Claim(f"{metric} at matched gain, {first} less {second}", advantage(*pair), ">", 0)

    claims = [
        compared("forgetting", a, b)
        for a, b in (
            ("GRPO", "SFT"), ("GRPO", "SFT with KL"), ("GRPO", "SFT with replay"), ("RIF-RFT", "SFT"),
            ("rejection-sampling SFT", "SFT"), ("RIF-RFT", "GRPO"), ("GRPO with KL", "GRPO"),
        )
        if a in points and b in points
    ]  # fmt: skip
    claims += [compared(metric, "SFT", "GRPO") for metric in ("KL", "general loss")]
    sampled = [points[arm]["sampled"].mean(1) for arm in ("RIF-RFT", "GRPO")]
    saved = core.bootstrap_interval(lambda a, b: a.mean(1) / b.mean(1), *sampled, batched=True)
    return [*claims, core.Claim("rollouts of RIF-RFT over GRPO's, the filter's included", saved, "<=", 0.7)]


def _draw(figure: Any, points: dict[str, dict[str, np.ndarray]], metric: str, label: str) -> None:
    axes = figure.subplots()
    for name, of in points.items():
        axes.plot(of["gain"].mean(0), of[metric].mean(0), marker="o", label=name)
    axes.axhline(0, color="0.8")
    axes.set(xlabel="gain on the task just learnt", ylabel=label)
    axes.legend(fontsize=7)


if __name__ == "__main__":
    core.main(__file__)
