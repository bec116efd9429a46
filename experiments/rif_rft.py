"""RIF-RFT: does reinforcement fine-tuning forget less than supervised, and does filtering instances save rollouts?

A tiny character model, warm-started on four tasks, goes through three of them one after the other: supervised (SFT) on
the reference answers, rejection-sampling SFT on its own right ones, GRPO, and GRPO on the instances that it sometimes
solves at the start of the task (RIF-RFT). Every learning rate is a point of gain against forgetting; claims are at
matched gain, since who learns less forgets less. Countdown is never trained: the general ability.

Claim: RFT forgets less than SFT, and filtering makes it cheaper (arXiv 2507.05386; arXiv 2607.04364 reports forgetting
by RL too).
Command: python -m experiments run rif_rft --preset laptop
Expected: not measured yet at laptop size; smoke shows that it runs, not who wins.
Minutes: smoke 1, laptop 8.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments import core, rl_tables, rl_tasks
from experiments.rl_config import TINY, Training

ABOUT = core.About(
    claim="Reinforcement fine-tuning forgets less than supervised at matched gain; a filter saves rollouts.",
    minutes={"smoke": 1, "laptop": 8},
    needs="nothing",
    knob="rollouts",
)
PAPER = "Qwen2.5-VL-7B-Instruct on seven multimodal tasks; MMMU and MMLU-Pro as general benchmarks."
SEQUENCE, GENERAL = ("chain_sum", "letter_counting", "spell_backward"), "countdown"
ARMS = ("SFT", "rejection-sampling SFT", "GRPO", "RIF-RFT")
FILTERED = ARMS.index("RIF-RFT")


@dataclass(frozen=True, kw_only=True)
class Config(Training):
    """The shared options, by task of the sequence; ``task``, ``epochs`` and ``selection_seeds`` play no part."""

    filter_rollouts: int = 8
    """Answers to each instance by which the filter decides; counted in every budget."""
    min_successes: int = 1
    """Right ones among them for an instance to be kept."""

    def __post_init__(self):
        super().__post_init__()
        self.require(filter_rollouts=(1, None), min_successes=(0, None))


PRESETS = {
    "smoke": Config(**{**TINY, "selection_seeds": 1}),
    "laptop": Config(warm_steps=900, steps=40, train_problems=128, test_samples=2),
    "paper": Config(group_size=8, rollouts=1024, rates=(1e-6,), shapes_only=True),
}


def learner(cfg: Config, bench: Any) -> Any:
    """``(arm, params [R], keys [R], rates [R], pools [3, X], held [4, Y]) -> accuracies, rollouts, kept``, compiled."""
    import jax
    import jax.numpy as jnp

    from experiments import rl_arms
    from jaxmeth import rl, train

    # On-policy with one update, GRPO's gradient is that of advantages times log-probabilities; SFT's that of ones.
    loss = rl.PolicyLoss(advantage=rl.adv_reinforce, ratio=rl.reinforce)
    objective = train.policy_objective(loss, bench.model, temperature=cfg.temperature)
    size = cfg.train_problems

    def accuracy(params: Any, held: Any, key: Any) -> Any:
        keys = jax.random.split(key, len(SEQUENCE) + 1)

        def one(each: tuple[Any, Any]) -> Any:
            return rl_arms.roll(params, bench, each[0], each[1], cfg.test_samples, cfg.temperature)[1].mean()

        return jax.lax.map(one, (held, keys))

    def batch_of(arm: Any, rows: Any, made: Any, right: Any) -> tuple[Any, Any, Any, Any]:
        """Tokens, mask and weights of the arm."""
        own = right.astype(jnp.float32)
        each = jax.tree.map(lambda a: jnp.repeat(a, cfg.group_size, axis=0), rows)
        shown = (each.answer, each.answer != rl_tasks.PAD, jnp.ones_like(own), jnp.ones_like(right))
        # Wrong answers of one's own leave the divisor too.
        better = (made.tokens, made.mask, own, right)
        grouped = (made.tokens, made.mask, rl.adv_grpo(own), jnp.ones_like(right))
        return jax.lax.switch(arm, [lambda: shown, lambda: better, lambda: grouped, lambda: grouped])

    def one(arm: Any, params: Any, key: Any, rate: Any, pools: Any, held: Any) -> tuple[Any, Any, Any]:
        optimizer = train.adamw(rate, max_grad_norm=cfg.max_grad_norm)
        update = train.make_train_step(objective, optimizer)
        tests, learning = jax.random.split(key)

        def task(params: Any, each: tuple[Any, Any]) -> tuple[Any, tuple[Any, Any, Any]]:
            number, pool = each
            sift, draws = jax.random.split(jax.random.fold_in(learning, number))
            # The filter sees the model at the start of the task.
            right = rl_arms.roll(params, bench, pool, sift, cfg.filter_rollouts, cfg.temperature)[1]
            found = rl.rif_filter(right.astype(jnp.float32), min_successes=cfg.min_successes).keep
            keep = jnp.where(arm == FILTERED, found, True)
            # As many passes over what is kept as the others make over everything.
            limit = jnp.where(keep.any(), jnp.ceil(cfg.steps * keep.mean()), 0).astype(jnp.int32)

            def step(i: Any, state: Any) -> Any:
                which, roll_key = jax.random.split(jax.random.fold_in(draws, i))
                order = jax.random.uniform(which, (size,)) + jnp.where(keep, 0.0, 2.0)
                at = jnp.argsort(order)[: cfg.prompts]
                rows = rl_arms.take(pool, at)
                made, right = rl_arms.roll(state.params, bench, rows, roll_key, cfg.group_size, cfg.temperature)
                tokens, mask, weight, used = batch_of(arm, rows, made, right)
                batch = train.policy_batch(
                    made._replace(tokens=tokens, mask=mask), weight, jnp.ones_like(used), on_policy=True
                )
                chosen = used & keep[at][:, None]
                new = update(state, batch._replace(rollout=rl.keep_rollouts(batch.rollout, chosen)))[0]
                return jax.tree.map(lambda a, b: jnp.where(i < limit, a, b), new, state)

            state = jax.lax.fori_loop(0, cfg.steps, step, train.train_init(params, optimizer))
            filtering = jnp.where(arm == FILTERED, size * cfg.filter_rollouts, 0)
            sampled = jnp.where(arm == 0, 0, limit * cfg.rollouts) + filtering
            scores = accuracy(state.params, held, jax.random.fold_in(tests, number + 1))
            return state.params, (scores, sampled, keep.mean())

        before = accuracy(params, held, jax.random.fold_in(tests, 0))
        numbers = jnp.arange(len(SEQUENCE))
        scores, sampled, kept = jax.lax.scan(task, params, (numbers, pools))[1]
        return jnp.concatenate([before[None], scores]), sampled.sum(), kept.mean()

    return jax.jit(jax.vmap(one, in_axes=(None, 0, 0, 0, None, None)))


def matched(gain: np.ndarray, forgetting: np.ndarray, at: float) -> float:
    """Forgetting at a gain, along the line through (0, 0) and the rates' means [rates], by rising gain."""
    order = np.argsort(gain)
    useful = [i for i in order if gain[i] > 0]
    return float(np.interp(at, [0, *gain[useful]], [0, *forgetting[useful]]))


def advantage(first: np.ndarray, second: np.ndarray) -> core.Estimate:
    """How much less the first forgets at the largest gain that both reach; [seeds, rates, (gain, forgetting)] each."""

    def statistic(a: np.ndarray, b: np.ndarray) -> float:
        a, b = a.mean(0), b.mean(0)
        at = min(a[:, 0].max(), b[:, 0].max())
        return matched(*a.T, at) - matched(*b.T, at) if at > 0 else np.nan

    return core.bootstrap_interval(statistic, first, second)


def _prepare(cfg: Config) -> tuple[Any, Any, Any]:
    import jax
    import jax.numpy as jnp

    from experiments import rl_arms

    kinds = {"terms": cfg.terms, "digits": cfg.digits, "steps": cfg.running_sums}
    found = [
        rl_tasks.pools(t, cfg.train_problems, cfg.test_problems, seed=cfg.seed, data=cfg.data, **kinds)
        for t in (*SEQUENCE, GENERAL)
    ]
    for (train, test), name in zip(found, (*SEQUENCE, GENERAL), strict=True):
        if len(train) < cfg.train_problems or len(test) < cfg.test_problems:
            shown = f"{len(train)} and {len(test)} problems of {name}"
            raise core.ConfigError(f"train_problems: found {shown}, expected {cfg.train_problems}, {cfg.test_problems}")
    taken = {p.prompt for _, test in found for p in test}
    warm = rl_tasks.make("mixed", 16 * cfg.train_problems, np.random.default_rng([cfg.seed, 2]), **kinds)
    warm = [p for p in warm if p.prompt not in taken and rl_tasks.fits(p)]
    stacks = rl_arms.device([rl_tasks.stack(p) for p in (*(f[0] for f in found), *(f[1] for f in found), warm)])
    count = len(SEQUENCE) + 1
    pools = jax.tree.map(lambda *a: jnp.stack(a), *stacks[: count - 1])
    held = jax.tree.map(lambda *a: jnp.stack(a), *stacks[count : 2 * count])
    new = stacks[0].answer.shape[1]
    model = rl_arms.model_config(cfg, stacks[0].prompt.shape[1] + new)
    return rl_arms.Bench(model, stacks[0], stacks[count], stacks[-1], new), pools, held


def run(cfg: Config, folder: core.RunDir | None = None) -> core.Result:
    """All arms at all rates, then gain against forgetting."""
    folder = folder or core.RunDir()
    if cfg.shapes_only:
        from experiments.rl_shapes import policy_shapes
        from jaxmeth import rl

        return policy_shapes([("GRPO", rl.presets.grpo())], prompts=128, group=8, prompt=1024, new=2048)
    import jax
    import jax.numpy as jnp

    from experiments import rl_arms
    from jaxmeth import models, rl

    bench, pools, held = _prepare(cfg)
    leaves = rl_arms.warm_seeds(cfg, folder, bench)
    structure = jax.tree.structure(models.abstract_params(bench.model))
    params = jax.tree.unflatten(structure, [jnp.asarray(leaf[: cfg.seeds, 0]) for leaf in leaves])
    train = learner(cfg, bench)
    points: dict[str, np.ndarray] = {}
    sampled, rows = {}, []
    trials = [(i, rate) for i in range(len(ARMS)) for rate in cfg.rates]
    for i, rate in core.progress(trials, description="training"):

        def compute(i: int = i, rate: float = rate) -> dict[str, Any]:
            # The same keys for every arm and rate.
            keys = jax.random.split(jax.random.fold_in(jax.random.key(cfg.seed), 3), cfg.seeds)
            found = train(i, params, keys, jnp.full((cfg.seeds,), rate, jnp.float32), pools, held)
            return dict(zip(("scores", "sampled", "kept"), found, strict=True))

        stored = folder.cached(f"arm{i}-rate{rate:g}", compute)
        scores = stored["scores"]
        metrics = [rl.continual_metrics(jnp.asarray(s[1:, :-1]), jnp.asarray(s[0, :-1])) for s in scores]
        columns = {name: np.array([float(getattr(m, name)) for m in metrics]) for name in metrics[0]._fields}
        general = scores[:, -1, -1] - scores[:, 0, -1]
        name = ARMS[i]
        pair = np.stack([columns["gain"], columns["forgetting"]], axis=-1)[:, None]
        points[name] = np.concatenate([points[name], pair], axis=1) if name in points else pair
        sampled[name] = float(stored["sampled"].mean())
        rows.append(
            {"arm": name, "rate": rate}
            | {title.replace("_", " "): rl_tables.mean(v) for title, v in columns.items()}
            | {"general": rl_tables.mean(general), "kept": float(stored["kept"].mean()), "rollouts": sampled[name]}
        )
        folder.log(i * len(cfg.rates) + cfg.rates.index(rate), name, **{k: v.mean() for k, v in columns.items()})
    claims = [
        core.Claim(f"forgetting at matched gain, {a} less {b}", advantage(points[a], points[b]), ">", 0)
        for a, b in (("GRPO", "SFT"), ("RIF-RFT", "SFT"), ("rejection-sampling SFT", "SFT"), ("RIF-RFT", "GRPO"))
    ]
    saved = sampled["RIF-RFT"] / sampled["GRPO"]
    claims.append(core.Claim("rollouts of RIF-RFT over GRPO's, the filter's included", saved, "<=", 0.7))
    start = float(np.mean(folder.load(f"arm0-rate{cfg.rates[0]:g}")["scores"][:, 0, :-1]))
    return core.Result(
        rows=rows,
        claims=claims,
        figures={"gain_forgetting": lambda f: _draw(f, points)},
        notes=[
            f"Tasks in order: {', '.join(SEQUENCE)}; general: {GENERAL}. Pass rate before: {start:.3f}. {cfg.seeds} "
            "seeds, every rate of the grid is a row; brackets: 95% bootstrap over seeds.",
            "Forgetting is negative where accuracy was lost; matched gain: the largest that both arms reach, along the "
            "line through the rates' means.",
            f"The paper's scale: {PAPER}",
        ],
    )


def _draw(figure: Any, points: dict[str, np.ndarray]) -> None:
    axes = figure.subplots()
    for name, values in points.items():
        gain, forgetting = values.mean(0).T
        axes.plot(gain, forgetting, marker="o", label=name)
    axes.axhline(0, color="0.8")
    axes.set(xlabel="gain on the task just learnt", ylabel="forgetting (negative: lost)")
    axes.legend()


if __name__ == "__main__":
    core.main(__file__)
