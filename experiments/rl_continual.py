"""Continual fine-tuning for the RIF-RFT experiment: a sequence of tasks, all arms in one compiled function."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments import core, rl_arms, rl_tasks
from experiments.rif_rft import GENERAL, KINDS, SEQUENCE, Config, Kind
from jaxmeth import models, rl, train


class Batch(NamedTuple):
    """Rows to learn from: prompts, answers with weights as rewards, log-probabilities [N, T, V] to stay close to."""

    prompt: Any
    prompt_mask: Any
    rollout: Any
    reference: Any


def log_policy(cfg: Config, model: Any, params: Any, prompt: Any, prompt_mask: Any, tokens: Any, mask: Any) -> Any:
    """Log-probabilities of every next token at each position of the answers, [N, T, V]."""
    ids = jnp.concatenate([prompt, jnp.where(mask, tokens, 0)], axis=1)[:, :-1]
    seen = jnp.concatenate([prompt_mask, mask], axis=1)[:, :-1]
    logits = models.apply(params, model, ids, mask=seen).logits[:, prompt.shape[1] - 1 :]
    return jax.nn.log_softmax(logits / cfg.temperature)


def divergence(now: Any, before: Any) -> Any:
    """KL(now || before) of each token's distribution, exactly: [N, T, V] twice -> [N, T]."""
    return (jnp.exp(now) * (now - before)).sum(-1)


def objective(cfg: Config, model: Any, beta: Any) -> Any:
    """Mean over tokens of minus weight x log-probability, and beta times the mean KL to the reference.

    Deviation: the RFT arms too, where the preset ``grpo`` takes the mean over answers of each one's mean over tokens.
    """
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
                "skipped": ~keep.any(),
            }

        before = accuracy(params, held, jax.random.fold_in(tests, 0))
        found = jax.lax.scan(task, params, (jnp.arange(tasks), pools))[1]
        return {
            "scores": jnp.concatenate([before[None], found["scores"]]),
            "general loss": found["general loss"][-1] - general_loss(params, held),
            "KL": found["KL"].mean(),
            "sampled": found["sampled"].sum(),
            "kept": found["kept"].mean(),
            "skipped": found["skipped"].sum(),
        }

    return jax.jit(jax.vmap(one, in_axes=(None, 0, 0, 0, None, None)))


def prepare(cfg: Config) -> tuple[rl_arms.Bench, Any, Any]:
    """What the arms share, problems to train on by task [3, X], and held-out ones [4, Y]."""
    kinds = {"terms": cfg.terms, "digits": cfg.digits, "steps": cfg.running_sums}
    found = [
        rl_tasks.pools(t, cfg.train_problems, cfg.test_problems, seed=cfg.seed, data=cfg.data, **kinds)
        for t in (*SEQUENCE, GENERAL)
    ]
    for (pool, test), name in zip(found, (*SEQUENCE, GENERAL), strict=True):
        if len(pool) < cfg.train_problems or len(test) < cfg.test_problems:
            shown = f"{len(pool)} and {len(test)} problems of {name}"
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
