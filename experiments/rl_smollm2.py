"""The arms on SmolLM2-135M-Instruct with LoRA: rollouts and updates on the device, the verifier reads text on the host.

``--model smollm2`` puts :func:`prepare` and :func:`compare` in the place of the tiny model's. Seeds train one after the
other, all from the released model: there is no warm start. Small runs first, for instance
``python -m experiments run lambda_grpo --preset smoke --model smollm2 --rates 3e-4 --temperatures 0.75``.
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

    def right(self, problems: Sequence[rl_tasks.Problem], tokens: Any, mask: Any) -> np.ndarray:
        """Whether each of the answers [P count, T] to P problems is right, read as text: [P, count]."""
        tokens, count = np.asarray(jnp.where(mask, tokens, 0)), len(tokens) // len(problems)
        texts = [
            self.model.tokenizer.decode(row[: int(n)].tolist()) for row, n in zip(tokens, mask.sum(1), strict=True)
        ]
        each = [p for p in problems for _ in range(count)]
        found = [rl_tasks.correct_text(text, p) for text, p in zip(texts, each, strict=True)]
        return np.array(found, np.float32).reshape(-1, count)


def prepare(cfg: Training) -> Bench:
    """The model and its problems in chat form."""
    model = hf.default()
    pool, held = rl_tasks.pools(
        cfg.task, cfg.train_problems, cfg.test_problems, seed=cfg.seed, data=cfg.data, terms=cfg.terms,
        digits=cfg.digits,
    )  # fmt: skip

    def prompt(question: str) -> list[int]:
        text = hf.render(model.chat_template, [{"role": "user", "content": question}])
        return model.tokenizer.encode(text, add_special_tokens=False).ids

    prompts = {p.question: prompt(p.question) for p in (*pool, *held)}
    return Bench(model, pool, held, prompts, max(map(len, prompts.values())))


class _Compiled(NamedTuple):
    """Sampling, and an update of the arm whose number is traced."""

    sample: Any
    update: Any


def _compiled(cfg: Training, bench: Bench, arms: Sequence[rl_arms.Arm]) -> _Compiled:
    model = bench.model.cfg

    def sample(state: train.TrainState, ids: Any, mask: Any, key: Any, count: int) -> train.Rollouts:
        return train.sample_rollouts(
            train.join(state.params, state.frozen), model, ids, mask, key=key, group_size=count,
            max_new_tokens=bench.new_tokens, temperature=cfg.temperature, stop=model.eos_token_ids,
        )  # fmt: skip

    def update(arm: Any, step: Any, rate: Any, state: train.TrainState, batch: train.PolicyBatch) -> Any:
        objective = rl_arms.objective(arms, arm, step, model, cfg.temperature)
        return train.make_train_step(objective, train.adamw(rate, max_grad_norm=cfg.max_grad_norm))(state, batch)

    return _Compiled(jax.jit(sample, static_argnums=4), jax.jit(update))


def _train(
    cfg: Training, bench: Bench, run: _Compiled, arms: Sequence[rl_arms.Arm], arm: int, seed: int, rate: float
) -> dict[str, np.ndarray]:
    """One arm on one seed: curves by metric [evaluations + 1], NaN for those of training before it."""
    first, draws, tests = jax.random.split(jax.random.fold_in(jax.random.key(cfg.seed), seed), 3)
    adapted = train.lora_init(bench.model.params, first, rank=RANK, alpha=2 * RANK, targets=TARGETS)
    optimizer = train.adamw(rate, max_grad_norm=cfg.max_grad_norm)
    state = train.train_init(adapted, optimizer, train.is_lora)
    rng = np.random.default_rng([cfg.seed, 4, seed])
    names = (*rl_arms.recorded(arms), "loss", "grad_norm", "reward")
    curves: list[dict[str, float]] = []

    def evaluate(seen: list[dict[str, float]]) -> None:
        key = jax.random.fold_in(tests, len(curves))
        made = run.sample(state, *bench.tokens(bench.held), key, cfg.test_samples)
        right = bench.right(bench.held, made.tokens, made.mask)
        held = {"pass": right.mean(), "pass@k": right.any(1).mean()}
        held["entropy"] = -float(made.logp.sum()) / max(int(made.mask.sum()), 1)
        curves.append(held | {n: np.mean([s[n] for s in seen]) if seen else np.nan for n in names})

    evaluate([])
    seen: list[dict[str, float]] = []
    for step in range(cfg.steps):
        problems = [bench.pool[i] for i in rng.choice(len(bench.pool), cfg.prompts, replace=False)]
        made = run.sample(state, *bench.tokens(problems), jax.random.fold_in(draws, step), cfg.group_size)
        reward = jnp.asarray(bench.right(problems, made.tokens, made.mask))
        batch = train.policy_batch(made, reward, jnp.ones(reward.shape, bool), on_policy=cfg.epochs == 1)
        for _ in range(cfg.epochs):
            state, metrics = run.update(arm, step, rate, state, batch)
        seen.append({n: float(v) for n, v in metrics.items()} | {"reward": float(reward.mean())})
        if (step + 1) % (cfg.steps // cfg.evaluations) == 0:
            evaluate(seen)
            seen = []
    return {n: np.array([c[n] for c in curves]) for n in curves[0]}


def compare(
    cfg: Training, folder: core.RunDir, bench: Bench, arms: Sequence[rl_arms.Arm], prefix: str = ""
) -> rl_arms.Measured:
    """As :func:`experiments.rl_arms.compare`: a rate for each arm on its own seeds, then the seeds that are reported.

    The verifier is the reward. Every run of a seed is stored.
    """
    run = _compiled(cfg, bench, arms)
    chosen = range(cfg.seeds, cfg.seeds + cfg.selection_seeds) if len(cfg.rates) > 1 else ()
    searched = [(rate, seed) for rate in cfg.rates for seed in chosen]
    bar = iter(core.progress(range(len(arms) * (len(searched) + cfg.seeds)), description="training"))

    def trained(arm: int, seed: int, rate: float) -> dict[str, np.ndarray]:
        next(bar)
        key = f"{prefix}smollm2-arm{arm}-seed{seed}-rate{rate:g}"
        return folder.cached(key, lambda: _train(cfg, bench, run, arms, arm, seed, rate))

    out = rl_arms.Measured({}, {}, {}, {}, np.arange(cfg.evaluations + 1) * (cfg.steps // cfg.evaluations))
    for i, arm in enumerate(arms):
        best, out.selection[arm.name] = 0, np.array([np.nan])
        if searched:
            scores = [trained(i, seed, rate)["pass"][-1] for rate, seed in searched]
            best, out.selection[arm.name] = rl_arms.choose(cfg, np.array(scores))
        out.rates[arm.name], out.edge[arm.name] = cfg.rates[best], best in (0, len(cfg.rates) - 1)
        seeds = [trained(i, seed, cfg.rates[best]) for seed in range(cfg.seeds)]
        out.curves[arm.name] = {n: np.stack([s[n] for s in seeds]) for n in seeds[0]}
        for step, passed in zip(out.steps, out.curves[arm.name]["pass"].mean(0), strict=True):
            folder.log(step, prefix + arm.name, **{"pass": passed})
    next(bar, None)
    return out


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
