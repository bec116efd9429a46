"""Arms of a reinforcement-learning experiment: same warm start, prompts, keys and rollouts, another loss or reward.

All seeds of an arm train in one compiled call: rollouts, verifier, loss and update stay on the device, and the arm and
the learning rate are arguments, so that an experiment compiles once. Each arm's learning rate is chosen on seeds of its
own (by the held-out pass rate at the end); what is reported comes from other seeds, paired between arms.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments import core, rl_tasks
from experiments.rl_config import Training
from jaxmeth import models, rl, train
from jaxmeth.types import Params

METRICS = ("clip_low", "clip_high", "token_weight", "kl_old")
"""Metrics of a policy loss that are always recorded, NaN where a loss has none."""


class Judged(NamedTuple):
    """The rollouts of K models on P prompts, n each: tokens, mask, logp [K, P, n, T]; ``right`` [K, P, n] are labels.

    ``first``: tokens and mask of as many answers by the models as they were before training, where ``Arm.past`` asks.
    """

    tokens: Any
    mask: Any
    right: Any
    logp: Any = None
    first: Any = None


class Given(NamedTuple):
    """What a reward rule gives: rewards and whether the rollout trains, [K, P, n]."""

    reward: Any
    keep: Any


def verified(judged: Judged) -> Given:
    """The verifier's reward: 1 for a right answer."""
    return Given(judged.right.astype(jnp.float32), jnp.ones_like(judged.right))


class Arm(NamedTuple):
    """``loss``: a policy loss, or a function of the step that makes ``(logp, batch) -> (loss, metrics)``.

    ``reward``: Judged -> Given. ``past``: whether it reads ``Judged.first``. ``metrics``: names recorded besides
    ``METRICS``.
    """

    name: str
    loss: rl.PolicyLoss | Callable[[Any], Callable[..., Any]]
    reward: Callable[[Judged], Given] = verified
    past: bool = False
    metrics: tuple[str, ...] = ()


class Curves(NamedTuple):
    """By metric [runs, evaluations + 1]; the first evaluation is of the warm start, where training metrics are NaN."""

    held: dict[str, Any]
    training: dict[str, Any]


def model_config(cfg: Training, length: int) -> models.DecoderConfig:
    """The tiny character model: a Llama."""
    heads = max(1, cfg.width // 16)
    return models.DecoderConfig(
        "llama", rl_tasks.VOCABULARY, cfg.width, cfg.layers, heads, heads, cfg.width // heads, 2 * cfg.width, length,
        tie_embeddings=True,
    )  # fmt: skip


class Bench(NamedTuple):
    """What the arms share: model, problems on the device, problems of the warm start."""

    model: models.DecoderConfig
    pool: rl_tasks.Problems
    held: rl_tasks.Problems
    warm: rl_tasks.Problems
    new_tokens: int


def take(problems: rl_tasks.Problems, index: Any) -> rl_tasks.Problems:
    """Rows of problems."""
    return jax.tree.map(lambda a: a[index], problems)


def device(stacks: Sequence[rl_tasks.Problems]) -> list[rl_tasks.Problems]:
    """Stacks on the device, all as wide as the widest."""
    sides = {"prompt": 0, "prompt_mask": 0, "answer": 1, "final": 1}
    width = {name: max(getattr(s, name).shape[1] for s in stacks) for name in sides}

    def widened(name: str, a: np.ndarray) -> jax.Array:
        if name not in sides:
            return jnp.asarray(a)
        missing = width[name] - a.shape[1]
        return jnp.asarray(np.pad(a, ((0, 0), (missing, 0) if sides[name] == 0 else (0, missing))))

    return [rl_tasks.Problems(**{n: widened(n, a) for n, a in s._asdict().items()}) for s in stacks]


def prepare(cfg: Training, task: str | None = None) -> Bench:
    """Problems to train on, held-out ones, and those of the warm start, none of which is held out."""
    if cfg.model == "smollm2":
        from experiments import rl_smollm2

        return rl_smollm2.prepare(cfg)
    kinds = {"terms": cfg.terms, "digits": cfg.digits, "steps": cfg.running_sums}
    task = task or cfg.task
    pool, held = rl_tasks.pools(
        task, cfg.train_problems, cfg.test_problems, seed=cfg.seed, data=cfg.data, least=cfg.prompts, **kinds
    )  # fmt: skip
    taken = {p.prompt for p in held}
    warm = rl_tasks.make(task, 8 * cfg.train_problems, np.random.default_rng([cfg.seed, 2]), **kinds)
    warm = [p for p in warm if p.prompt not in taken]
    pool, held, warm = device([rl_tasks.stack(p) for p in (pool, held, warm)])
    new = pool.answer.shape[1]
    return Bench(model_config(cfg, pool.prompt.shape[1] + new), pool, held, warm, new)


def sequences(problems: rl_tasks.Problems) -> train.SFTBatch:
    """Prompts with their answers, for supervised steps."""
    tokens = jnp.concatenate([problems.prompt, problems.answer], axis=1)
    answer = problems.answer != rl_tasks.PAD
    real = jnp.concatenate([problems.prompt_mask, answer], axis=1)
    return train.SFTBatch(tokens, real, jnp.concatenate([jnp.zeros_like(problems.prompt_mask), answer], axis=1))


# --- the compiled pieces ---------------------------------------------------------------------------------------------


def warm_start(cfg: Training, bench: Bench, parts: int = 1) -> Callable[[Any, Any], Params]:
    """``(keys [R], part [R]) -> parameters [R, ...]``: supervised training; part i of ``parts`` sees every parts-th."""
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, cfg.warm_rate, min(20, cfg.warm_steps // 4), max(cfg.warm_steps, 2), 0.1 * cfg.warm_rate
    )
    optimizer = train.adamw(schedule)
    step = train.make_train_step(train.sft_objective(bench.model), optimizer)
    rows = bench.warm.prompt.shape[0] // parts

    def one(key: Any, part: Any) -> Params:
        first, draws = jax.random.split(key)

        def body(i: Any, state: train.TrainState) -> train.TrainState:
            which, other, wrong = jax.random.split(jax.random.fold_in(draws, i), 3)
            at = jax.random.randint(which, (cfg.warm_batch,), 0, rows)
            shown = take(bench.warm, at * parts + part)
            strange = bench.warm.answer[jax.random.randint(other, at.shape, 0, rows) * parts + part]
            late = i >= cfg.warm_steps - cfg.warm_steps // 8
            swap = jax.random.bernoulli(wrong, jnp.where(late, cfg.warm_errors, 0.0), at.shape)
            return step(state, sequences(shown._replace(answer=jnp.where(swap[:, None], strange, shown.answer))))[0]

        state = train.train_init(models.init(bench.model, first), optimizer)
        return jax.lax.fori_loop(0, cfg.warm_steps, body, state).params

    return jax.jit(jax.vmap(one))


def roll(
    params: Params, bench: Bench, problems: rl_tasks.Problems, key: Any, count: int, temperature: float
) -> tuple[train.Rollouts, Any]:
    """``count`` answers to each of P problems, and whether they are right [P, count]."""
    made = train.sample_rollouts(
        params, bench.model, problems.prompt, problems.prompt_mask, key=key, group_size=count,
        max_new_tokens=bench.new_tokens, temperature=temperature, stop=(rl_tasks.END,),
    )  # fmt: skip
    each = jax.tree.map(lambda a: jnp.repeat(a, count, axis=0), problems)
    return made, rl_tasks.correct(each, made.tokens, made.mask).reshape(-1, count)


def distinct(parts: Sequence[Any]) -> tuple[list[Any], Any]:
    """The different ones among the arms' parts, and by arm which of them is its: each is compiled once."""
    kinds = list(dict.fromkeys(parts))
    return kinds, jnp.asarray([kinds.index(p) for p in parts])


def recorded(arms: Sequence[Arm]) -> tuple[str, ...]:
    """Names of the metrics of all arms."""
    return tuple(dict.fromkeys((*METRICS, *(name for a in arms for name in a.metrics))))


def policy(made: Any, names: Sequence[str]) -> Callable[[Any, Any, Any], tuple[Any, dict[str, Any]]]:
    """``(step, logp, batch) -> (loss, metrics of these names)`` of an arm's loss; NaN for a metric it has not."""

    def loss(step: Any, logp: Any, batch: rl.RolloutBatch) -> tuple[Any, dict[str, Any]]:
        value, metrics = (made if isinstance(made, rl.PolicyLoss) else made(step))(logp, batch)
        return value, {name: jnp.asarray(metrics.get(name, jnp.nan), jnp.float32) for name in names}

    return loss


def objective(arms: Sequence[Arm], arm: Any, step: Any, model: models.DecoderConfig, temperature: float) -> Any:
    """The loss of the arm whose number is traced: one forward and backward pass of the model for all of them."""
    losses, which = distinct([a.loss for a in arms])
    branches = [policy(made, recorded(arms)) for made in losses]

    def loss(params: Params, batch: train.PolicyBatch, denominator: Any) -> tuple[Any, dict[str, Any]]:
        rollout = batch.rollout
        logp = train.completion_logprobs(
            params, model, batch.prompt, batch.prompt_mask, rollout.tokens, rollout.mask != 0, temperature=temperature
        )
        return jax.lax.switch(which[arm], branches, step, logp, rollout)

    return train.Objective(lambda batch: jnp.ones(()), loss, lambda m: {name: v[0] for name, v in m.items()})


def same_answers(judged: Judged) -> Any:
    """Ids of the answers of all K n rollouts of a prompt, [P, K, n]: the number of the first equal one; -1: no end.

    Equal means that what follows the last comma is; running sums do not count.
    """
    k, p, n, t = judged.tokens.shape
    tokens = jnp.moveaxis(jnp.where(judged.mask, judged.tokens, rl_tasks.PAD), 0, 1).reshape(p, k * n, t)
    place = jnp.arange(t)
    start = jnp.where(tokens == rl_tasks.COMMA, place[None, None] + 1, 0).max(-1)
    at = start[..., None] + place[None, None]
    last = jnp.where(at < t, jnp.take_along_axis(tokens, jnp.minimum(at, t - 1), axis=-1), rl_tasks.PAD)
    equal = (last[:, :, None] == last[:, None]).all(-1)
    ended = (tokens == rl_tasks.END).any(-1)
    return jnp.where(ended, jnp.argmax(equal, axis=-1), -1).astype(jnp.int32).reshape(p, k, n)


def bias(judged: Judged, given: Given) -> dict[str, Any]:
    """How a reward errs against the labels: noise, skew, and leaning towards a model's own majority."""
    ids = same_answers(judged)
    own = (ids[..., None] == ids[..., None, :]) & (ids >= 0)[..., None]
    share = jnp.moveaxis(own.mean(-1), 0, 1)
    found = rl.bias_metrics(given.reward, judged.right, share, jnp.ones_like(judged.right))
    return {"noise": found.rho_noise, "symbias": found.rho_symbias, "selfbias": found.rho_selfbias}


def trainer(cfg: Training, bench: Bench, arms: Sequence[Arm], probe: bool = False) -> Callable[..., Curves]:
    """``(arm, params [R, K, ...], keys [R], rates [R]) -> Curves [R, ...]``, compiled once for all arms.

    ``probe``: the bias of each arm's reward on the held-out problems is recorded, against the labels.
    """
    every = cfg.steps // cfg.evaluations
    rewards, which_reward = distinct([a.reward for a in arms])
    past, any_past = jnp.asarray([a.past for a in arms]), any(a.past for a in arms)

    def judge(
        arm: Any, params: Params, start: Params, problems: rl_tasks.Problems, key: Any, count: int
    ) -> tuple[train.Rollouts, Judged, Given]:
        size = jax.tree.leaves(params)[0].shape[0]
        shape = (size, -1, count, bench.new_tokens)
        keys = jax.random.split(key, 2 * size if any_past else size)

        def answers(params: Params, keys: Any) -> tuple[train.Rollouts, Any]:
            return jax.vmap(lambda p, k: roll(p, bench, problems, k, count, cfg.temperature))(params, keys)

        made, right = answers(params, keys[:size])
        judged = Judged(*(a.reshape(shape) for a in (made.tokens, made.mask)), right, made.logp.reshape(shape))
        if any_past:

            def voted() -> tuple[Any, Any]:
                by = answers(start, keys[size:])[0]
                return by.tokens.reshape(shape), by.mask.reshape(shape)

            none = jnp.zeros_like(judged.tokens), jnp.zeros_like(judged.mask)
            judged = judged._replace(first=jax.lax.cond(past[arm], voted, lambda: none))
        return made, judged, jax.lax.switch(which_reward[arm], rewards, judged)

    def evaluate(arm: Any, params: Params, start: Params, key: Any) -> dict[str, Any]:
        made, judged, given = judge(arm, params, start, bench.held, key, cfg.test_samples)
        entropy = -made.logp.sum() / jnp.maximum(made.mask.sum(), 1)
        found = {"pass": judged.right.mean(), "pass@k": judged.right.any(-1).mean(), "entropy": entropy}
        return found | (bias(judged, given) if probe else {})

    def one(arm: Any, params: Params, key: Any, rate: Any) -> Curves:
        optimizer = train.adamw(rate, max_grad_norm=cfg.max_grad_norm)
        draws, tests = jax.random.split(key)
        state = jax.vmap(lambda p: train.train_init(p, optimizer))(params)

        def step(i: Any, carry: tuple[Any, dict[str, Any]]) -> tuple[Any, dict[str, Any]]:
            state, total = carry
            which, key = jax.random.split(jax.random.fold_in(draws, i))
            at = jax.random.choice(which, bench.pool.prompt.shape[0], (cfg.prompts,), replace=False)
            made, _, given = judge(arm, state.params, params, take(bench.pool, at), key, cfg.group_size)
            update = train.make_train_step(objective(arms, arm, i, bench.model, cfg.temperature), optimizer)

            def learn(state: Any, made: train.Rollouts, reward: Any, keep: Any) -> tuple[Any, dict[str, Any]]:
                batch = train.policy_batch(made, reward, jnp.ones_like(keep), on_policy=cfg.epochs == 1)
                batch = batch._replace(rollout=rl.keep_rollouts(batch.rollout, keep))
                return jax.lax.scan(lambda s, _: update(s, batch), state, None, length=cfg.epochs)

            state, metrics = jax.vmap(learn)(state, made, *given)
            metrics = {name: v.mean() for name, v in metrics.items()} | {"reward": given.reward.mean()}
            return state, {name: total[name] + metrics[name] / every for name in total}

        def segment(state: Any, number: Any) -> tuple[Any, Curves]:
            names = (*recorded(arms), "loss", "grad_norm", "reward")
            # No step before the first evaluation.
            first = jnp.maximum(number - 1, 0) * every
            state, metrics = jax.lax.fori_loop(
                first, number * every, step, (state, {name: jnp.zeros((), jnp.float32) for name in names})
            )
            metrics = {name: jnp.where(number > 0, v, jnp.nan) for name, v in metrics.items()}
            return state, Curves(evaluate(arm, state.params, params, jax.random.fold_in(tests, number)), metrics)

        return jax.lax.scan(segment, state, jnp.arange(cfg.evaluations + 1))[1]

    return jax.jit(jax.vmap(one, in_axes=(None, 0, 0, 0)))


# --- the comparison --------------------------------------------------------------------------------------------------


class Measured(NamedTuple):
    """By arm: rate, whether it is the grid's first or last, pass rate by rate, curves by metric [seeds, E].

    With a single rate there is no grid: ``edge`` and ``selection`` are empty.
    """

    rates: dict[str, float]
    edge: dict[str, bool]
    selection: dict[str, np.ndarray]
    curves: dict[str, dict[str, np.ndarray]]
    steps: np.ndarray

    def last(self, arm: str, metric: str = "pass") -> np.ndarray:
        """At the end, [seeds]."""
        return self.curves[arm][metric][:, -1]

    def area(self, arm: str, metric: str = "pass") -> np.ndarray:
        """Mean over the evaluations after training has begun, [seeds]."""
        return self.curves[arm][metric][:, 1:].mean(1)


def join(measured: Measured, other: Measured) -> None:
    """Put the arms of another comparison, at the same steps, behind those of this one."""
    for name in ("rates", "edge", "selection", "curves"):
        getattr(measured, name).update(getattr(other, name))


def warm_seeds(
    cfg: Training,
    folder: core.RunDir,
    bench: Bench,
    parts: int = 1,
    description: str = "warm start",
    seeds: int | None = None,
) -> list[np.ndarray]:
    """Leaves [seeds, parts, ...] of all warm-started models, stored in two halves; ``seeds``: None = all there are."""
    total = (seeds or cfg.seeds + cfg.selection_seeds) * parts
    size = -(-total // 2)
    root, run = jax.random.fold_in(jax.random.key(cfg.seed), 0), warm_start(cfg, bench, parts)
    pieces = []
    for start in core.progress(range(0, total, size), description=description):
        which = np.minimum(np.arange(start, start + size), total - 1)

        def compute(which: np.ndarray = which) -> dict[str, Any]:
            keys = jax.vmap(lambda i: jax.random.fold_in(root, i))(jnp.asarray(which))
            leaves = jax.tree.leaves(run(keys, jnp.asarray(which % parts)))
            return {f"leaf{i}": leaf for i, leaf in enumerate(leaves)}

        stored = folder.cached(f"{description.replace(' ', '-')}-{start}", compute)
        pieces.append([stored[f"leaf{i}"] for i in range(len(stored))])
    leaves = [np.concatenate(leaf)[:total] for leaf in zip(*pieces, strict=True)]
    return [leaf.reshape(-1, parts, *leaf.shape[1:]) for leaf in leaves]


def batches(cfg: Training) -> list[list[tuple[int, float]]]:
    """(seed, rate) of the runs that choose a rate, in calls of ``seeds`` runs; the last one is filled up."""
    runs = [(cfg.seeds + s, rate) for rate in cfg.rates for s in range(cfg.selection_seeds)]
    runs += [runs[-1]] * (-len(runs) % cfg.seeds)
    return [runs[i : i + cfg.seeds] for i in range(0, len(runs), cfg.seeds)]


def choose(cfg: Training, scores: np.ndarray) -> tuple[int, np.ndarray]:
    """The index of the best rate, and the mean score of each, from the scores of the runs of ``batches``."""
    table = scores[: len(cfg.rates) * cfg.selection_seeds].reshape(len(cfg.rates), -1)
    mean = np.where(np.isfinite(table), table, 0).mean(1)
    return int(mean.argmax()), mean


def compare(
    cfg: Training,
    folder: core.RunDir,
    bench: Bench,
    arms: Sequence[Arm],
    *,
    models_each: int = 1,
    probe: bool = False,
    leaves: list[np.ndarray] | None = None,
    prefix: str = "",
) -> Measured:
    """Train every arm: rates on the selection seeds, then the best one on the seeds that are reported.

    Every call is stored, so a run that was stopped continues with the next one. ``leaves``: of the models to start
    from, else warm-started here; ``prefix``: of the names of what is stored, for a second comparison of a run.
    """
    if cfg.model == "smollm2":
        from experiments import rl_smollm2

        return rl_smollm2.compare(cfg, folder, bench, arms, models_each=models_each, probe=probe, prefix=prefix)
    leaves = warm_seeds(cfg, folder, bench, models_each) if leaves is None else leaves
    structure = jax.tree.structure(models.abstract_params(bench.model))
    run = trainer(cfg, bench, arms, probe)
    root = jax.random.fold_in(jax.random.key(cfg.seed), 1)

    def call(arm: int, runs: list[tuple[int, float]], key: str) -> dict[str, np.ndarray]:
        def compute() -> dict[str, Any]:
            seeds = np.array([seed for seed, _ in runs])
            params = jax.tree.unflatten(structure, [jnp.asarray(leaf[seeds]) for leaf in leaves])
            keys = jax.vmap(lambda i: jax.random.fold_in(root, i))(jnp.asarray(seeds))
            curves = run(arm, params, keys, jnp.asarray([rate for _, rate in runs], jnp.float32))
            return curves.held | curves.training

        return folder.cached(prefix + key, compute)

    out = Measured({}, {}, {}, {}, np.arange(cfg.evaluations + 1) * (cfg.steps // cfg.evaluations))
    searches = batches(cfg) if len(cfg.rates) > 1 else []
    bar = core.progress([(i, j) for i in range(len(arms)) for j in range(len(searches) + 1)], description="training")
    found: list[np.ndarray] = []
    for i, j in bar:
        name = arms[i].name
        if j < len(searches):
            found.append(call(i, searches[j], f"arm{i}-select{j}")["pass"][:, -1])
            continue
        best = 0
        if searches:
            best, out.selection[name] = choose(cfg, np.concatenate(found))
            out.edge[name] = best in (0, len(cfg.rates) - 1)
        found, out.rates[name] = [], cfg.rates[best]
        out.curves[name] = call(i, [(s, cfg.rates[best]) for s in range(cfg.seeds)], f"arm{i}-report")
        for step, *values in zip(out.steps, *(v.mean(0) for v in out.curves[name].values()), strict=True):
            folder.log(step, prefix + name, **dict(zip(out.curves[name], values, strict=True)))
        bar.note(f"{name}: {out.last(name).mean():.3f}")
    return out
