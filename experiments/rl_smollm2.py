"""The arms on SmolLM2-135M-Instruct with LoRA: rollouts and updates on the device, the verifier reads text on the host.

``--model smollm2`` puts :func:`prepare` and :func:`compare` in the place of the tiny model's; the preset ``smollm2`` is
a run of minutes: ``python -m experiments run lambda_grpo --preset smollm2``. Seeds train one after the other, all from
the released model: there is no warm start. The K models of an ensemble are K sets of adapters over one base.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments import core, rl_arms, rl_tasks
from experiments.rl_config import Training
from jaxmeth import hf, rl, train

NEW_TOKENS = 12
"""Longest answer; the questions ask for a number, a word or an expression only."""
RANK, TARGETS = 8, ("attn.q", "attn.k", "attn.v", "attn.o")


class Bench(NamedTuple):
    """The model, problems to train on and held-out ones, with their prompts as tokens, padded on the left."""

    model: hf.Checkpoint
    pool: list[rl_tasks.Problem]
    held: list[rl_tasks.Problem]
    prompts: dict[str, list[int]]
    width: int
    new_tokens: int = NEW_TOKENS

    def tokens(self, problems: Sequence[rl_tasks.Problem]) -> tuple[Any, Any]:
        """Prompts and mask [P, width]."""
        ids = np.zeros((len(problems), self.width), np.int32)
        mask = np.zeros(ids.shape, bool)
        for row, problem in enumerate(problems):
            these = self.prompts[problem.question]
            ids[row, self.width - len(these) :], mask[row, self.width - len(these) :] = these, True
        return jnp.asarray(ids), jnp.asarray(mask)

    def texts(self, tokens: Any, mask: Any) -> list[str]:
        """Answers [N, T] as texts."""
        tokens, lengths = np.asarray(tokens), np.asarray(mask).sum(1)
        return [self.model.tokenizer.decode(row[:n].tolist()) for row, n in zip(tokens, lengths, strict=True)]

    def right(self, problems: Sequence[rl_tasks.Problem], tokens: Any, mask: Any) -> np.ndarray:
        """Whether each of the answers [P count, T] to P problems is right, read as text: [P, count]."""
        each = [p for p in problems for _ in range(len(tokens) // len(problems))]
        found = [rl_tasks.correct_text(text, p) for text, p in zip(self.texts(tokens, mask), each, strict=True)]
        return np.array(found, np.float32).reshape(len(problems), -1)

    def judged(
        self, problems: Sequence[rl_tasks.Problem], made: train.Rollouts, first: train.Rollouts | None = None
    ) -> rl_arms.Judged:
        """The answers of K models [K, P n, T] as :func:`rl_arms.same_answers` compares them, by what they state.

        An answer becomes two tokens, the number of what it states and the end, each with the answer's mean ``logp``;
        one that states nothing has no end. Right is what the verifier says.
        """
        known: dict[str, int] = {}

        def short(made: train.Rollouts) -> tuple[Any, Any]:
            count = made.tokens.shape[1] // len(problems)
            each = [p for p in problems for _ in range(count)]
            tokens = np.full((*made.tokens.shape[:2], 2), rl_tasks.PAD, np.int32)
            for k in range(len(tokens)):
                for row, (text, p) in enumerate(zip(self.texts(made.tokens[k], made.mask[k]), each, strict=True)):
                    if said := rl_tasks.stated(text, p):
                        tokens[k, row] = rl_tasks.VOCABULARY + known.setdefault(said, len(known)), rl_tasks.END
            shaped = jnp.asarray(tokens.reshape(len(tokens), len(problems), count, 2))
            return shaped, jnp.ones(shaped.shape, bool)

        tokens, mask = short(made)
        right = np.stack([self.right(problems, t, m) for t, m in zip(made.tokens, made.mask, strict=True)])
        mean = made.logp.sum(-1) / jnp.maximum(made.mask.sum(-1), 1)
        logp = jnp.repeat(mean.reshape(right.shape)[..., None], 2, axis=-1)
        return rl_arms.Judged(tokens, mask, jnp.asarray(right > 0), logp, None if first is None else short(first))


def prepare(cfg: Training, model: hf.Checkpoint | None = None) -> Bench:
    """The model and its problems in chat form."""
    pool, held = rl_tasks.pools(
        cfg.task, cfg.train_problems, cfg.test_problems, seed=cfg.seed, data=cfg.data, terms=cfg.terms,
        digits=cfg.digits, least=cfg.prompts,
    )  # fmt: skip
    model = model or hf.default()

    def prompt(question: str) -> list[int]:
        text = hf.render(model.chat_template, [{"role": "user", "content": question}])
        return model.tokenizer.encode(text, add_special_tokens=False).ids

    prompts = {p.question: prompt(p.question) for p in (*pool, *held)}
    return Bench(model, pool, held, prompts, max(map(len, prompts.values())))


class Compiled(NamedTuple):
    """For K models: sampling, the rewards of each arm, and an update of the arm whose number is traced."""

    sample: Any
    rewards: list[Any]
    update: Any


def adapted(cfg: Training, bench: Bench, key: Any, optimizer: Any, count: int) -> tuple[Any, Any]:
    """Training states of ``count`` sets of adapters, stacked, and the base that they share."""
    keys = jax.random.split(key, count)
    states = [
        train.train_init(
            train.lora_init(bench.model.params, k, rank=RANK, alpha=2 * RANK, targets=TARGETS), optimizer, train.is_lora
        )
        for k in keys
    ]
    frozen = states[0].frozen
    return jax.tree.map(lambda *a: jnp.stack(a), *(s._replace(frozen=None) for s in states)), frozen


def sampler(cfg: Training, bench: Bench) -> Any:
    """``(states [K], base, prompts, mask, keys [K], count) -> rollouts [K, P count, ...]``, compiled."""
    model = bench.model.cfg

    def sample(states: Any, base: Any, ids: Any, mask: Any, keys: Any, count: int) -> train.Rollouts:
        def one(params: Any, key: Any) -> train.Rollouts:
            return train.sample_rollouts(
                train.join(params, base), model, ids, mask, key=key, group_size=count,
                max_new_tokens=bench.new_tokens, temperature=cfg.temperature, stop=model.eos_token_ids,
            )  # fmt: skip

        return jax.vmap(one)(states.params, keys)

    return jax.jit(sample, static_argnums=5)


def compiled(cfg: Training, bench: Bench, arms: Sequence[rl_arms.Arm]) -> Compiled:
    """What all arms share."""
    model = bench.model.cfg

    def update(arm: Any, step: Any, rate: Any, states: Any, base: Any, batch: train.PolicyBatch) -> Any:
        objective = rl_arms.objective(arms, arm, step, model, cfg.temperature)
        learn = train.make_train_step(objective, train.adamw(rate, max_grad_norm=cfg.max_grad_norm))

        def one(state: train.TrainState, batch: train.PolicyBatch) -> Any:
            state, metrics = learn(state._replace(frozen=base), batch)
            return state._replace(frozen=None), metrics

        # One model after the other: the logits of a batch are what memory goes to.
        return jax.lax.map(lambda x: one(*x), (states, batch))

    return Compiled(sampler(cfg, bench), [jax.jit(a.reward) for a in arms], jax.jit(update))


def _judge(
    cfg: Training, bench: Bench, run: Compiled, arm: rl_arms.Arm, now: tuple, start: tuple, problems: Any, key: Any,
    count: int,
) -> tuple[train.Rollouts, rl_arms.Judged]:  # fmt: skip
    """Answers of all models to the problems, and where the arm asks those of the models at the start."""
    size = jax.tree.leaves(now[0])[0].shape[0]
    keys, shown = jax.random.split(key, 2 * size), bench.tokens(problems)
    made = run.sample(*now, *shown, keys[:size], count)
    first = run.sample(*start, *shown, keys[size:], count) if arm.past else None
    return made, bench.judged(problems, made, first)


def _batch(cfg: Training, made: train.Rollouts, given: rl_arms.Given) -> train.PolicyBatch:
    def one(made: train.Rollouts, reward: Any, keep: Any) -> train.PolicyBatch:
        batch = train.policy_batch(made, reward, jnp.ones_like(keep), on_policy=cfg.epochs == 1)
        return batch._replace(rollout=rl.keep_rollouts(batch.rollout, keep))

    return jax.vmap(one)(made, *given)


def _train(
    cfg: Training, bench: Bench, run: Compiled, arms: Sequence[rl_arms.Arm], arm: int, seed: int, rate: float,
    count: int, probe: bool,
) -> dict[str, np.ndarray]:  # fmt: skip
    """One arm on one seed: curves by metric [evaluations + 1], NaN for those of training before it."""
    first, draws, tests = jax.random.split(jax.random.fold_in(jax.random.key(cfg.seed), seed), 3)
    states, base = adapted(cfg, bench, first, train.adamw(rate, max_grad_norm=cfg.max_grad_norm), count)
    start = states, base
    rng = np.random.default_rng([cfg.seed, 4, seed])
    names = (*rl_arms.recorded(arms), "loss", "grad_norm", "reward")
    curves: list[dict[str, float]] = []

    def evaluate(seen: list[dict[str, float]]) -> None:
        key = jax.random.fold_in(tests, len(curves))
        asked = arms[arm] if probe else arms[arm]._replace(past=False)
        made, judged = _judge(cfg, bench, run, asked, (states, base), start, bench.held, key, cfg.test_samples)
        held = {"pass": float(judged.right.mean()), "pass@k": float(judged.right.any(-1).mean())}
        held["entropy"] = -float(made.logp.sum()) / max(int(made.mask.sum()), 1)
        if probe:
            held |= {n: float(v) for n, v in rl_arms.bias(judged, run.rewards[arm](judged)).items()}
        curves.append(held | {n: np.mean([s[n] for s in seen]) if seen else np.nan for n in names})

    evaluate([])
    seen: list[dict[str, float]] = []
    for step in range(cfg.steps):
        problems = [bench.pool[i] for i in rng.choice(len(bench.pool), cfg.prompts, replace=False)]
        key = jax.random.fold_in(draws, step)
        made, judged = _judge(cfg, bench, run, arms[arm], (states, base), start, problems, key, cfg.group_size)
        given = run.rewards[arm](judged)
        batch = _batch(cfg, made, given)
        for _ in range(cfg.epochs):
            states, metrics = run.update(arm, step, rate, states, base, batch)
        seen.append({n: float(v.mean()) for n, v in metrics.items()} | {"reward": float(given.reward.mean())})
        if (step + 1) % (cfg.steps // cfg.evaluations) == 0:
            evaluate(seen)
            seen = []
    return {n: np.array([c[n] for c in curves]) for n in curves[0]}


def compare(
    cfg: Training,
    folder: core.RunDir,
    bench: Bench,
    arms: Sequence[rl_arms.Arm],
    *,
    models_each: int = 1,
    probe: bool = False,
    prefix: str = "",
) -> rl_arms.Measured:
    """As :func:`experiments.rl_arms.compare`: a rate for each arm on its own seeds, then the seeds that are reported.

    Every run of a seed is stored.
    """
    run = compiled(cfg, bench, arms)
    chosen = range(cfg.seeds, cfg.seeds + cfg.selection_seeds) if len(cfg.rates) > 1 else ()
    searched = [(rate, seed) for rate in cfg.rates for seed in chosen]
    bar = iter(core.progress(range(len(arms) * (len(searched) + cfg.seeds)), description="training"))

    def trained(arm: int, seed: int, rate: float) -> dict[str, np.ndarray]:
        next(bar)
        key = f"{prefix}smollm2-arm{arm}-seed{seed}-rate{rate:g}"
        return folder.cached(key, lambda: _train(cfg, bench, run, arms, arm, seed, rate, models_each, probe))

    out = rl_arms.Measured({}, {}, {}, {}, np.arange(cfg.evaluations + 1) * (cfg.steps // cfg.evaluations))
    for i, arm in enumerate(arms):
        best = 0
        if searched:
            scores = [trained(i, seed, rate)["pass"][-1] for rate, seed in searched]
            best, out.selection[arm.name] = rl_arms.choose(cfg, np.array(scores))
            out.edge[arm.name] = best in (0, len(cfg.rates) - 1)
        out.rates[arm.name] = cfg.rates[best]
        seeds = [trained(i, seed, cfg.rates[best]) for seed in range(cfg.seeds)]
        out.curves[arm.name] = {n: np.stack([s[n] for s in seeds]) for n in seeds[0]}
        for step, passed in zip(out.steps, out.curves[arm.name]["pass"].mean(0), strict=True):
            folder.log(step, prefix + arm.name, **{"pass": passed})
    next(bar, None)
    return out


def trials(
    cfg: Training, folder: core.RunDir, bench: Bench, arms: Sequence[rl_arms.Arm], count: int
) -> list[dict[str, float]]:
    """Loss, norm of the gradient and reward of every arm after its updates on one small batch, the same for all."""
    run = compiled(cfg, bench, arms)
    key, draws = jax.random.split(jax.random.fold_in(jax.random.key(cfg.seed), 6))
    start = adapted(cfg, bench, key, train.adamw(cfg.rates[0], max_grad_norm=cfg.max_grad_norm), count)
    problems, drawn = bench.pool[: cfg.prompts], []

    def compute(arm: int) -> dict[str, Any]:
        if not drawn:
            drawn.append(_judge(cfg, bench, run, arms[0], start, start, problems, draws, cfg.group_size))
        made, judged = drawn[0]
        given = run.rewards[arm](judged)
        states, batch = start[0], _batch(cfg, made, given)
        for _ in range(cfg.epochs):
            states, metrics = run.update(arm, 0, cfg.rates[0], states, start[1], batch)
        return {n: metrics[n].mean() for n in ("loss", "grad_norm")} | {"reward": given.reward.mean()}

    stored = [
        folder.cached(f"smollm2-trial-{i}", lambda i=i: compute(i))
        for i in core.progress(range(len(arms)), description="every combination")
    ]
    return [{n: float(v) for n, v in s.items()} for s in stored]


def sharing(cfg: Training, bench: Bench, count: int = 16, temperature: float = 0.75) -> core.Rows:
    """How many of ``count`` rollouts of a held-out prompt share a token's prefix, before training: shares of tokens."""
    model = bench.model
    ids, mask = bench.tokens(bench.held)
    made = jax.jit(
        lambda params, key: train.sample_rollouts(
            params, model.cfg, ids, mask, key=key, group_size=count, max_new_tokens=bench.new_tokens,
            temperature=temperature, stop=model.cfg.eos_token_ids,
        )
    )(model.params, jax.random.fold_in(jax.random.key(cfg.seed), 5))  # fmt: skip
    size = np.asarray(rl.process_set_size(made.tokens, made.mask, count))
    stats = {k: float(v) for k, v in rl.process_tree_stats(made.tokens, made.mask, count).items()}
    edges = [1, 2, 3, 5, 9, count, count + 1]
    real = size[size > 0]
    rows = [
        {"rollouts that share the prefix": f"{low}" if high == low + 1 else f"{low} to {high - 1}"}
        | {"share of tokens": float(((real >= low) & (real < high)).mean())}
        for low, high in itertools.pairwise(edges)
    ]
    return [*rows, {"rollouts that share the prefix": "mean weight", "share of tokens": stats["mean_weight"]}]
