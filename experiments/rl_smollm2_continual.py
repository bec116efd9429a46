"""The RIF-RFT experiment on SmolLM2-135M-Instruct with LoRA: two tasks one after the other, loops on the host."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import core, rl_smollm2, rl_tasks
from experiments.rif_rft import ARMS, KINDS, ON_SMOLLM2, Config
from jaxmeth import hf, rl, train

SEQUENCE, GENERAL = ("chain_sum", "letter_counting"), "spell_backward"
TASKS = (*SEQUENCE, GENERAL)


def prepare(cfg: Config) -> list[rl_smollm2.Bench]:
    """The problems of each task, the general one last, all with prompts as wide as the widest."""
    model = hf.default()
    found = [rl_smollm2.prepare(dataclasses.replace(cfg, task=task), model) for task in TASKS]
    for bench, task in zip(found, TASKS, strict=True):
        if len(bench.pool) < cfg.train_problems or len(bench.held) < cfg.test_problems:
            shown = f"{len(bench.pool)} and {len(bench.held)} problems of {task}"
            raise core.ConfigError(f"train_problems: found {shown}, expected {cfg.train_problems}, {cfg.test_problems}")
    return [b._replace(width=max(b.width for b in found)) for b in found]


def references(bench: rl_smollm2.Bench, problems: Sequence[rl_tasks.Problem]) -> train.Rollouts:
    """Reference answers [P, T] as if they had been sampled."""
    model, width = bench.model, bench.new_tokens
    tokens, mask = np.zeros((len(problems), width), np.int32), np.zeros((len(problems), width), bool)
    for row, p in enumerate(problems):
        ids = model.tokenizer.encode(p.answer.rsplit(",", 1)[-1], add_special_tokens=False).ids
        ids = [*ids[: width - 1], model.cfg.eos_token_ids[0]]
        tokens[row, : len(ids)], mask[row, : len(ids)] = ids, True
    prompt, shown = bench.tokens(problems)
    return train.Rollouts(prompt, shown, jnp.asarray(tokens), jnp.asarray(mask), jnp.zeros(mask.shape))


def learner(cfg: Config, benches: Sequence[rl_smollm2.Bench]) -> Callable[[str, int, float], dict[str, Any]]:
    """``(arm, seed, rate) -> what rl_continual.learner measures``, of one seed; compiled pieces, loops on the host."""
    model = benches[0].model.cfg
    # On-policy with one update, GRPO's gradient is that of advantages times log-probabilities; SFT's that of ones.
    policy = rl.PolicyLoss(advantage=rl.adv_reinforce, ratio=rl.reinforce)
    objective = train.policy_objective(policy, model, temperature=cfg.temperature)
    sample = rl_smollm2.sampler(cfg, benches[0])

    @jax.jit
    def logp(params: Any, base: Any, made: train.Rollouts) -> Any:
        whole = train.join(params, base)
        return train.completion_logprobs(whole, model, *made[:4], temperature=cfg.temperature)

    @jax.jit
    def update(rate: Any, state: train.TrainState, batch: train.PolicyBatch) -> train.TrainState:
        return train.make_train_step(objective, train.adamw(rate, max_grad_norm=cfg.max_grad_norm))(state, batch)[0]

    def roll(state: Any, bench: Any, problems: Any, key: Any, count: int) -> tuple[train.Rollouts, np.ndarray]:
        one = jax.tree.map(lambda a: a[None], state._replace(frozen=None))
        made = sample(one, state.frozen, *bench.tokens(problems), key[None], count)
        made = jax.tree.map(lambda a: a[0], made)
        return made, bench.right(problems, made.tokens, made.mask) > 0

    def accuracy(state: Any, key: Any) -> list[float]:
        keys = jax.random.split(key, len(benches))
        return [
            float(roll(state, b, b.held, k, cfg.test_samples)[1].mean()) for b, k in zip(benches, keys, strict=True)
        ]

    def general_loss(state: Any) -> float:
        shown = references(benches[-1], benches[-1].held)
        return -float(rl.aggregate(logp(state.params, state.frozen, shown), shown.mask))

    def drift(state: Any, start: Any, bench: Any, key: Any) -> float:
        """KL(new || old) of whole answers, nats: the mean over answers of the new model."""
        made = roll(state, bench, bench.held, key, cfg.test_samples)[0]
        return float((made.logp - logp(start.params, start.frozen, made)).sum(1).mean())

    def learn(arm: str, seed: int, rate: float) -> dict[str, Any]:
        kind = KINDS[arm]
        first, tests, learning = jax.random.split(jax.random.fold_in(jax.random.key(cfg.seed), seed), 3)
        states, base = rl_smollm2.adapted(
            cfg, benches[0], first, train.adamw(rate, max_grad_norm=cfg.max_grad_norm), 1
        )  # fmt: skip
        state = jax.tree.map(lambda a: a[0], states)._replace(frozen=base)
        fresh = state.opt_state
        scores, before = [accuracy(state, jax.random.fold_in(tests, 0))], general_loss(state)
        moved, sampled, kept, skipped = [], 0, [], 0
        for number, bench in enumerate(benches[:-1]):
            rng = np.random.default_rng([cfg.seed, 7, seed, number])
            sift, draws = jax.random.split(jax.random.fold_in(learning, number))
            start, keep = state, np.ones(len(bench.pool), bool)
            if kind.filtered:
                # The filter sees the model at the start of the task.
                right = roll(state, bench, bench.pool, sift, cfg.filter_rollouts)[1]
                keep = np.asarray(rl.rif_filter(jnp.float32(right), min_successes=cfg.min_successes).keep)
                sampled += right.size
            # As many passes over what is kept as the others make over everything.
            limit = math.ceil(cfg.steps * keep.mean())
            state = state._replace(opt_state=fresh)
            for step in range(limit):
                at = np.argsort(rng.random(len(keep)) + np.where(keep, 0.0, 2.0))[: cfg.prompts]
                problems = [bench.pool[i] for i in at]
                if kind.answers == "reference":
                    made, weight = references(bench, problems), np.ones((len(problems), 1), bool)
                    used = weight
                else:
                    key = jax.random.fold_in(draws, step)
                    made, weight = roll(state, bench, problems, key, cfg.group_size)
                    sampled += weight.size
                    # Wrong answers of one's own leave the divisor too.
                    used = weight if kind.answers == "right" else np.ones_like(weight)
                reward = jnp.float32(weight)
                reward = rl.adv_grpo(reward) if kind.answers == "advantage" else reward
                batch = train.policy_batch(made, reward, jnp.ones(reward.shape, bool), on_policy=True)
                chosen = rl.keep_rollouts(batch.rollout, jnp.asarray(used & keep[at][:, None]))
                state = update(rate, state, batch._replace(rollout=chosen))
            testing, drifting = jax.random.split(jax.random.fold_in(tests, number + 1))
            scores.append(accuracy(state, testing))
            moved.append(drift(state, start, bench, drifting))
            kept.append(keep.mean())
            skipped += not keep.any()
        return {
            "scores": np.array(scores), "general loss": general_loss(state) - before, "KL": np.mean(moved),
            "sampled": sampled, "kept": np.mean(kept), "skipped": skipped,
        }  # fmt: skip

    return learn


def train_all(cfg: Config, folder: core.RunDir) -> dict[str, list[dict[str, np.ndarray]]]:
    """By arm and rate, what was measured [seeds, ...]; every seed is stored."""
    learn = learner(cfg, prepare(cfg))
    trials = [(arm, rate, seed) for arm in ON_SMOLLM2 for rate in cfg.rates for seed in range(cfg.seeds)]
    found: dict[str, list[list[dict[str, np.ndarray]]]] = {arm: [[] for _ in cfg.rates] for arm in ON_SMOLLM2}
    for arm, rate, seed in core.progress(trials, description="training"):
        key = f"smollm2-arm{ARMS.index(arm)}-rate{rate:g}-seed{seed}"
        stored = folder.cached(key, lambda arm=arm, rate=rate, seed=seed: learn(arm, seed, rate))
        found[arm][cfg.rates.index(rate)].append(stored)
        folder.log(seed, f"{arm} rate {rate:g}", end=stored["scores"][-1, :-1].mean())
    return {
        arm: [{name: np.stack([s[name] for s in seeds]) for name in seeds[0]} for seeds in rates]
        for arm, rates in found.items()
    }


def notes(cfg: Config) -> list[str]:
    """What a reader of the table needs."""
    left_out = [arm for arm in ARMS if arm not in ON_SMOLLM2]
    return [
        f"SmolLM2-135M-Instruct with LoRA, {cfg.steps} steps a task of {cfg.rollouts} rollouts. Tasks in order: "
        f"{', '.join(SEQUENCE)}; general: {GENERAL}. Not on SmolLM2: {', '.join(left_out)}.",
        f"general loss: change of the loss a token on reference answers of {GENERAL}. KL: new || old, of an answer to "
        "the new task's held-out prompts, nats, a mean over sampled answers.",
    ]
