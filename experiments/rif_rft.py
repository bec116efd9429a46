"""RIF-RFT: does reinforcement fine-tuning forget less than supervised, and does filtering instances save rollouts?

A tiny character model, warm-started on four tasks, goes through three of them one after the other: supervised (SFT) on
the reference answers, plain, with KL or with replay, rejection-sampling SFT on its own right ones, GRPO, plain or with
KL, and GRPO on the instances that it sometimes solves at the start of the task (RIF-RFT); SFT on all three at once is
the bound. Every learning rate is a point of gain against forgetting; claims are at matched gain, since who learns less
forgets less. Countdown is never trained: the general ability.

Claim: RFT forgets less than SFT, and filtering makes it cheaper (arXiv 2507.05386; arXiv 2607.04364 reports forgetting
by RL too).
Command: python -m experiments run rif_rft --preset laptop
Expected: not measured yet at laptop size; smoke shows that it runs, not who wins.
Minutes: smoke 1, laptop 8.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

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


class Kind(NamedTuple):
    """How an arm learns: from reference answers, its own right ones, or its own by their advantages.

    ``kl``: a KL term to the start of the task; ``replay``: some problems of earlier tasks; ``joint``: all tasks at
    once; ``filtered``: only instances that were solved at the start of the task.
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
METRICS = ("avg_acc", "gain", "forgetting", "backward_transfer", "general", "general loss", "KL")


@dataclass(frozen=True, kw_only=True)
class Config(Training):
    """The shared options, by task of the sequence; ``task``, ``epochs`` and ``selection_seeds`` play no part."""

    filter_rollouts: int = 8
    """Answers to each instance by which the filter decides; counted in every budget."""
    min_successes: int = 1
    """Right ones among them for an instance to be kept."""
    beta: float = 0.1
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
    "laptop": Config(warm_steps=900, steps=24, train_problems=128, test_samples=2),
    "paper": Config(group_size=8, rollouts=1024, rates=(1e-6,), shapes_only=True),
}


class Batch(NamedTuple):
    """Rows to learn from: prompts, answers with weights as rewards, log-probabilities [N, T, V] to stay close to."""

    prompt: Any
    prompt_mask: Any
    rollout: Any
    reference: Any


def log_policy(cfg: Config, model: Any, params: Any, prompt: Any, prompt_mask: Any, tokens: Any, mask: Any) -> Any:
    """Log-probabilities of every next token at each position of the answers, [N, T, V]."""
    import jax
    import jax.numpy as jnp

    from jaxmeth import models

    ids = jnp.concatenate([prompt, jnp.where(mask, tokens, 0)], axis=1)[:, :-1]
    seen = jnp.concatenate([prompt_mask, mask], axis=1)[:, :-1]
    logits = models.apply(params, model, ids, mask=seen).logits[:, prompt.shape[1] - 1 :]
    return jax.nn.log_softmax(logits / cfg.temperature)


def divergence(now: Any, before: Any) -> Any:
    """KL(now || before) of each token's distribution, exactly: [N, T, V] twice -> [N, T]."""
    import jax.numpy as jnp

    return (jnp.exp(now) * (now - before)).sum(-1)


def objective(cfg: Config, model: Any, beta: Any) -> Any:
    """Mean over tokens of minus weight x log-probability, and beta times the mean KL to the reference."""
    import jax.numpy as jnp

    from jaxmeth import rl, train

    # On-policy with one update, GRPO's gradient is that of advantages times log-probabilities; SFT's that of ones.
    policy = rl.PolicyLoss(advantage=rl.adv_reinforce, ratio=rl.reinforce)

    def loss(params: Any, batch: Batch, denominator: Any) -> tuple[Any, dict[str, Any]]:
        rollout = batch.rollout
        now = log_policy(cfg, model, params, batch.prompt, batch.prompt_mask, rollout.tokens, rollout.mask != 0)
        picked = jnp.take_along_axis(now, rollout.tokens[..., None], axis=-1)[..., 0]
        value, _ = policy(picked, rollout, denominator)
        return value + beta * rl.aggregate(divergence(now, batch.reference), rollout.mask, "token_mean"), {}

    return train.Objective(lambda batch: policy.denominator(batch.rollout), loss, lambda metrics: metrics)


def learner(cfg: Config, bench: Any) -> Any:
    """``(arm, params [R], keys [R], rates [R], pools [3, X], held [4, Y]) -> dict of what was measured``, compiled."""
    import jax
    import jax.numpy as jnp

    from experiments import rl_arms
    from jaxmeth import rl, train

    size, tasks = cfg.train_problems, len(SEQUENCE)
    answers = jnp.asarray([("reference", "right", "advantage").index(k.answers) for k in KINDS.values()])
    has = {name: jnp.asarray([getattr(k, name) for k in KINDS.values()]) for name in Kind._fields[1:]}

    def roll(params: Any, problems: Any, key: Any, count: int) -> tuple[Any, Any]:
        return rl_arms.roll(params, bench, problems, key, count, cfg.temperature)

    def policy(params: Any, made: Any) -> Any:
        return log_policy(cfg, bench.model, params, made.prompt, made.prompt_mask, made.tokens, made.mask)

    def repeated(rows: Any, count: int) -> Any:
        """Reference answers as if they had been sampled."""
        each = jax.tree.map(lambda a: jnp.repeat(a, count, axis=0), rows)
        real = each.answer != rl_tasks.PAD
        return train.Rollouts(each.prompt, each.prompt_mask, each.answer, real, jnp.zeros(real.shape))

    def accuracy(params: Any, held: Any, key: Any) -> Any:
        keys = jax.random.split(key, tasks + 1)
        return jax.lax.map(lambda x: roll(params, x[0], x[1], cfg.test_samples)[1].mean(), (held, keys))

    def general_loss(params: Any, held: Any) -> Any:
        shown = repeated(jax.tree.map(lambda a: a[-1], held), 1)
        picked = jnp.take_along_axis(policy(params, shown), shown.tokens[..., None], axis=-1)[..., 0]
        return -rl.aggregate(picked, shown.mask)

    def drift(params: Any, start: Any, problems: Any, key: Any) -> Any:
        """KL(new || old) of whole answers, nats: sampled by the new model, exact token by token."""
        made = roll(params, problems, key, cfg.test_samples)[0]
        found = divergence(policy(params, made), policy(start, made))
        return jnp.where(made.mask, found, 0).sum(1).mean()

    def batch_of(arm: Any, rows: Any, params: Any, start: Any, key: Any) -> tuple[Batch, Any]:
        """What the arm learns from, and which of it counts, [P, G]."""
        shown = repeated(rows, cfg.group_size)
        every = jnp.ones((cfg.prompts, cfg.group_size), bool)
        made, right = jax.lax.cond(
            answers[arm] > 0, lambda: roll(params, rows, key, cfg.group_size), lambda: (shown, every)
        )
        own = right.astype(jnp.float32)
        # Wrong answers of one's own leave the divisor too.
        choices = [lambda: (own, every), lambda: (own, right), lambda: (rl.adv_grpo(own), every)]
        weight, used = jax.lax.switch(answers[arm], choices)
        none = jnp.zeros((*made.tokens.shape, rl_tasks.VOCABULARY))
        reference = jax.lax.cond(has["kl"][arm], lambda: policy(start, made), lambda: none)
        rollout = train.policy_batch(made, weight, jnp.ones_like(used), on_policy=True).rollout
        return Batch(made.prompt, made.prompt_mask, rollout, reference), used

    def one(arm: Any, params: Any, key: Any, rate: Any, pools: Any, held: Any) -> dict[str, Any]:
        optimizer = train.adamw(rate, max_grad_norm=cfg.max_grad_norm)
        beta = jnp.where(has["kl"][arm], cfg.beta, 0.0)
        update = train.make_train_step(objective(cfg, bench.model, beta), optimizer)
        tests, learning = jax.random.split(key)

        def source(key: Any, number: Any) -> Any:
            """The task of each prompt."""
            again, earlier, any_task = jax.random.split(key, 3)
            shape = (cfg.prompts,)
            old = jax.random.bernoulli(again, cfg.replay, shape) & has["replay"][arm] & (number > 0)
            past = jax.random.randint(earlier, shape, 0, jnp.maximum(number, 1))
            mixed = jax.random.randint(any_task, shape, 0, tasks)
            return jnp.where(has["joint"][arm], mixed, jnp.where(old, past, number))

        def task(start: Any, each: tuple[Any, Any]) -> tuple[Any, dict[str, Any]]:
            number, pool = each
            sift, draws = jax.random.split(jax.random.fold_in(learning, number))

            def solved() -> Any:
                right = roll(start, pool, sift, cfg.filter_rollouts)[1]
                return rl.rif_filter(right.astype(jnp.float32), min_successes=cfg.min_successes).keep

            # The filter sees the model at the start of the task.
            keep = jax.lax.cond(has["filtered"][arm], solved, lambda: jnp.ones((size,), bool))
            # As many passes over what is kept as the others make over everything.
            limit = jnp.where(keep.any(), jnp.ceil(cfg.steps * keep.mean()), 0).astype(jnp.int32)

            def step(i: Any, state: Any) -> Any:
                which, key, mixing = jax.random.split(jax.random.fold_in(draws, i), 3)
                order = jax.random.uniform(which, (size,)) + jnp.where(keep, 0.0, 2.0)
                at, of = jnp.argsort(order)[: cfg.prompts], source(mixing, number)
                rows = jax.tree.map(lambda a: a[of, at], pools)
                batch, used = batch_of(arm, rows, state.params, start, key)
                chosen = rl.keep_rollouts(batch.rollout, used & keep[at][:, None])
                new = update(state, batch._replace(rollout=chosen))[0]
                return jax.tree.map(lambda a, b: jnp.where(i < limit, a, b), new, state)

            params = jax.lax.fori_loop(0, cfg.steps, step, train.train_init(start, optimizer)).params
            filtering = jnp.where(has["filtered"][arm], size * cfg.filter_rollouts, 0)
            testing, drifting = jax.random.split(jax.random.fold_in(tests, number + 1))
            return params, {
                "scores": accuracy(params, held, testing),
                "general loss": general_loss(params, held),
                "KL": drift(params, start, jax.tree.map(lambda a: a[number], held), drifting),
                "sampled": jnp.where(answers[arm] > 0, limit * cfg.rollouts, 0) + filtering,
                "kept": keep.mean(),
            }

        before = accuracy(params, held, jax.random.fold_in(tests, 0))
        found = jax.lax.scan(task, params, (jnp.arange(tasks), pools))[1]
        return {
            "scores": jnp.concatenate([before[None], found["scores"]]),
            "general loss": found["general loss"][-1] - general_loss(params, held),
            "KL": found["KL"].mean(),
            "sampled": found["sampled"].sum(),
            "kept": found["kept"].mean(),
        }

    return jax.jit(jax.vmap(one, in_axes=(None, 0, 0, 0, None, None)))


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
    from jaxmeth import models

    bench, pools, held = _prepare(cfg)
    leaves = rl_arms.warm_seeds(cfg, folder, bench, seeds=cfg.seeds)
    structure = jax.tree.structure(models.abstract_params(bench.model))
    params = jax.tree.unflatten(structure, [jnp.asarray(leaf[:, 0]) for leaf in leaves])
    train = learner(cfg, bench)
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
    start = float(points["SFT"]["before"].mean())
    return core.Result(
        rows=_rows(cfg, points),
        claims=_claims(points),
        figures={
            "gain_forgetting": lambda f: _draw(f, points, "forgetting", "forgetting (negative: lost)"),
            "gain_kl": lambda f: _draw(f, points, "KL", "KL(new || old) of an answer, nats"),
        },
        notes=[
            f"Tasks in order: {', '.join(SEQUENCE)}; general: {GENERAL}. Pass rate before: {start:.3f}. {cfg.seeds} "
            "seeds, every rate of the grid is a row; brackets: 95% bootstrap over seeds.",
            "Forgetting is negative where accuracy was lost; matched gain: the largest that both arms reach, along the "
            "line through the rates' means.",
            f"general loss: change of the loss a token on reference answers of {GENERAL}, in place of a text sample, "
            "which would mean nothing to a character model. KL: new || old, of an answer to the new task's held-out "
            f"prompts, nats. KL terms weigh {cfg.beta:g}; replay is {cfg.replay:.0%} of the problems.",
            f"The paper's scale: {PAPER}",
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
    return columns | {name: stored[name] for name in ("general loss", "KL", "kept", "sampled")}


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
    ]  # fmt: skip
    claims += [compared(metric, "SFT", "GRPO") for metric in ("KL", "general loss")]
    sampled = {arm: points[arm]["sampled"].mean() for arm in ("RIF-RFT", "GRPO")}
    saved = sampled["RIF-RFT"] / sampled["GRPO"]
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
