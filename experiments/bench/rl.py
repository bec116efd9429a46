"""Speed of the policy losses against torch expressions of TRL and verl, and of the methods against GRPO, interleaved.

``python -m experiments.bench.rl [--rounds 40]``, two threads, float32, 64 rollouts (8 prompts of 8) of 1,024 tokens.
``pip install torch==2.13.0`` for the peers; without it their rows are left out.

The peers are their published formulas, written here with torch operations: the loss from given log-probabilities and
advantages, its clip fractions and mean log-ratio, and the gradient with respect to the log-probabilities. Advantages
are computed inside ours, not inside theirs.

Targets: value and gradient not slower than either peer; a training step (forward and backward of a small decoder, the
loss, SGD) with any of the five methods <= 1.05x GRPO's (the loss alone is printed beside, without a target);
lambda-GRPO's process sets of 64 groups of 16 at least 20 times a prefix tree of Python dictionaries. Exit code 1 where
a target is missed. Last, without a target: the speed of a rollout beside what the memory bandwidth allows.
"""

import argparse
import os
from collections.abc import Callable

import numpy as np

from experiments.timing import interleaved

PROMPTS, GROUP, TOKENS = 8, 8, 1024
STEP_TOKENS, VOCABULARY = 128, 64


def line(name: str, value: float, target: float) -> bool:
    met = value <= target
    print(f"{name:<58} {value:7.3f} x  target <= {target:<5} {'ok' if met else 'MISSED'}", flush=True)
    return met


def made(tokens: int) -> dict[str, np.ndarray]:
    """A batch in NumPy: ragged lengths, a shared beginning, log-ratios that reach the clip bounds."""
    rng = np.random.default_rng(0)
    rows = PROMPTS * GROUP
    logp = -np.abs(rng.normal(1, 0.7, (rows, tokens)))
    sampled = rng.integers(0, VOCABULARY, (rows, tokens))
    sampled[:, : tokens // 16] = 1
    lengths = rng.integers(tokens // 4, tokens + 1, rows)
    return {
        "logp": logp.astype(np.float32),
        "old": (logp + 0.15 * rng.normal(size=logp.shape)).astype(np.float32),
        "rewards": rng.integers(0, 2, (PROMPTS, GROUP)).astype(np.float32),
        "mask": np.arange(tokens)[None] < lengths[:, None],
        "tokens": sampled.astype(np.int32),
    }


def methods(prompts: int, group: int) -> dict[str, tuple[object, Callable]]:
    """Loss and what it does to the batch beforehand, for GRPO and each of the five methods."""
    import jax.numpy as jnp

    from jaxmeth import rl

    def keep(batch):
        return batch

    def votes(batch):
        """RLER with two models' rollouts in one pool: the reward takes the verifier's place."""
        answers = batch.tokens[:, -1].reshape(prompts, 2, group // 2) % 4
        found = rl.rler_rewards(answers, None, 4, group // 2, share_pool=True)
        return rl.keep_rollouts(batch._replace(rewards=found.rewards), found.selected)

    def learnable(batch):
        kept = rl.rif_filter(batch.rewards, batch.valid).keep
        return rl.keep_rollouts(batch, jnp.broadcast_to(kept[:, None], batch.rewards.shape))

    grpo = rl.presets.grpo
    return {
        "grpo": (grpo(), keep),
        "rler": (grpo(), votes),
        "rif": (grpo(), learnable),
        "asymmetric": (grpo(advantage=rl.adv_prompt_weighted), keep),
        "ripo": (grpo(ratio=rl.ripo), keep),
        "lambda_grpo": (grpo(token_weight=rl.lambda_grpo_weight), keep),
    }


def torch_peers(data: dict[str, np.ndarray]) -> dict[str, Callable[[], float]]:
    """Calls that compute the loss, metrics and gradient with torch; none without the package."""
    try:
        import torch
    except ImportError:
        print("torch is not installed: the peers are left out (pip install torch==2.13.0)")
        return {}
    torch.set_num_threads(2)
    old, mask = torch.tensor(data["old"]), torch.tensor(data["mask"], dtype=torch.float32)
    leaf = torch.tensor(data["logp"], requires_grad=True)
    rewards = torch.tensor(data["rewards"])
    centred = rewards - rewards.mean(1, keepdim=True)
    adv = (centred / (rewards.std(1, keepdim=True) + 1e-4)).reshape(-1)

    def trl() -> torch.Tensor:
        """TRL 1.x, loss type grpo: no clamp; mean over rows of token means; clip fractions."""
        ratio = torch.exp(leaf - old)
        clipped = torch.clamp(ratio, 1 - 0.2, 1 + 0.2)
        per_token = -torch.min(ratio * adv.unsqueeze(1), clipped * adv.unsqueeze(1))
        loss = ((per_token * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()
        with torch.no_grad():
            tokens = mask.sum().clamp(min=1.0)
            low = (ratio < 1 - 0.2) & (adv.unsqueeze(1) < 0)
            high = (ratio > 1 + 0.2) & (adv.unsqueeze(1) > 0)
            for flag in (low, high, low | high):
                (flag.float() * mask).sum() / tokens
        return loss

    def verl() -> torch.Tensor:
        """verl's vanilla loss: clamp at 20, dual clip 3, advantages [N, T], seq-mean-token-mean; its three metrics."""
        advantages = adv.unsqueeze(-1) * mask
        log_ratio = torch.clamp(leaf - old, min=-20.0, max=20.0)
        ratio = torch.exp(log_ratio)
        tokens = mask.sum() + 1e-8
        (-log_ratio * mask).sum() / tokens
        first = -advantages * ratio
        second = -advantages * torch.clamp(ratio, 1 - 0.2, 1 + 0.2)
        clipped = torch.maximum(first, second)
        (torch.gt(second, first).float() * mask).sum() / tokens
        third = -advantages * 3.0
        (torch.gt(clipped, third) * (advantages < 0).float() * mask).sum() / tokens
        losses = torch.where(advantages < 0, torch.min(third, clipped), clipped)
        lengths = mask.sum(-1)
        rows = (losses * mask).sum(-1) / (lengths + 1e-8)
        return (rows * (lengths > 0).float()).sum() / (lengths > 0).float().sum()

    def step(loss: Callable[[], torch.Tensor]) -> Callable[[], float]:
        def call() -> float:
            leaf.grad = None
            value = loss()
            value.backward()
            return float(value.detach())

        return call

    return {"trl": step(trl), "verl": step(verl)}


def speed_of_the_loss(rounds: int) -> list[bool]:
    import jax
    import jax.numpy as jnp

    from jaxmeth import rl

    data = made(TOKENS)
    logp, old, rewards, mask, tokens = (jnp.asarray(data[k]) for k in ("logp", "old", "rewards", "mask", "tokens"))
    batch = rl.RolloutBatch(rewards, None, tokens, mask, old)

    def call(loss, prepare) -> Callable[[], float]:
        step = jax.jit(jax.value_and_grad(lambda x, b: loss(x, prepare(b)), has_aux=True))
        return lambda: float(jax.block_until_ready(step(logp, batch))[0][0])

    calls = {name: call(*parts) for name, parts in methods(PROMPTS, GROUP).items()}
    peers = torch_peers(data)
    values = {name: peer() for name, peer in peers.items()} | {"grpo": calls["grpo"]()}
    if any(abs(value - values["grpo"]) > 1e-5 for value in values.values()):
        raise AssertionError(f"the losses disagree: {values}")
    taken = interleaved(calls | peers, rounds, uncounted=2)
    print(f"value and gradient, {PROMPTS * GROUP} rollouts of {TOKENS} tokens")
    for name, seconds in taken.items():
        extra = "" if name in peers else f"  {np.median(seconds / taken['grpo']):6.2f}x grpo"
        print(f"  {name:<56} {np.median(seconds) * 1e3:9.3f} ms (min {seconds.min() * 1e3:.3f}){extra}")
    names = {"trl": "GRPO loss, time over TRL's expression", "verl": "GRPO loss, time over verl's expression"}
    return [line(names[peer], float(np.median(taken["grpo"] / taken[peer])), 1.0) for peer in peers]


def prefix_tree(tokens: np.ndarray, lengths: np.ndarray, group: int) -> list[list[int]]:
    """|L(i,t)| by a tree of dictionaries in Python, O(total tokens), as public code does it."""
    rows, sizes = tokens.tolist(), []
    for start in range(0, len(rows), group):
        root: dict = {}
        paths = []
        for row, length in zip(rows[start : start + group], lengths[start : start + group], strict=True):
            node, path = root, []
            for token in row[:length]:
                node = node.setdefault(token, {"count": 0})
                node["count"] += 1
                path.append(node)
            paths.append(path)
        sizes.extend([node["count"] for node in path] for path in paths)
    return sizes


def speed_of_process_sets(rounds: int) -> list[bool]:
    import jax
    import jax.numpy as jnp

    from jaxmeth import rl

    group, rng = 16, np.random.default_rng(1)
    tokens = rng.integers(0, VOCABULARY, (64 * group, TOKENS)).astype(np.int32)
    tokens[:, : TOKENS // 16] = 1
    lengths = rng.integers(TOKENS // 4, TOKENS + 1, len(tokens))
    device, alive = jnp.asarray(tokens), jnp.arange(TOKENS)[None] < jnp.asarray(lengths)[:, None]
    ours = jax.jit(lambda t, a: rl.process_set_size(t, a, group))
    found = np.asarray(ours(device, alive))
    for row, length, expected in zip(found, lengths, prefix_tree(tokens, lengths, group), strict=True):
        np.testing.assert_array_equal(row[:length], expected)
    calls = {
        "ours": lambda: jax.block_until_ready(ours(device, alive)),
        "tree": lambda: prefix_tree(tokens, lengths, group),
    }
    taken = interleaved(calls, rounds, uncounted=2)
    for name, seconds in taken.items():
        print(f"  process sets, {name:<42} {np.median(seconds) * 1e3:9.2f} ms (min {seconds.min() * 1e3:.2f})")
    return [line("process sets, time over a Python tree's", float(np.median(taken["ours"] / taken["tree"])), 0.05)]


def speed_of_the_step(rounds: int) -> list[bool]:
    """A whole step of a small decoder (0.1 M parameters): what a method costs where it is used."""
    import jax
    import jax.numpy as jnp

    from jaxmeth import models, rl

    data = made(STEP_TOKENS)
    config = models.DecoderConfig("llama", VOCABULARY, 64, 2, 4, 4, 16, 128, STEP_TOKENS)
    params = models.init(config, jax.random.key(0))
    tokens, mask, old, rewards = (jnp.asarray(data[k]) for k in ("tokens", "mask", "old", "rewards"))
    batch = rl.RolloutBatch(rewards, None, tokens, mask, old)

    def call(loss, prepare) -> Callable[[], object]:
        def objective(params, batch):
            logits = models.apply(params, config, batch.tokens).logits
            # The first token is predicted from a constant; the rest from their past.
            before = jnp.pad(logits[:, :-1], ((0, 0), (1, 0), (0, 0)))
            chosen = jnp.take_along_axis(jax.nn.log_softmax(before), batch.tokens[..., None], -1)[..., 0]
            return loss(chosen, prepare(batch))

        @jax.jit
        def step(params, batch):
            (value, metrics), grads = jax.value_and_grad(objective, has_aux=True)(params, batch)
            return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads), value, metrics

        return lambda: jax.block_until_ready(step(params, batch))

    taken = interleaved({name: call(*parts) for name, parts in methods(PROMPTS, GROUP).items()}, rounds, uncounted=2)
    print(f"training step, {PROMPTS * GROUP} rollouts of {STEP_TOKENS} tokens")
    for name, seconds in taken.items():
        print(f"  {name:<56} {np.median(seconds) * 1e3:9.1f} ms (min {seconds.min() * 1e3:.1f})")
    return [
        line(f"step with {name}, time over GRPO's", float(np.median(seconds / taken["grpo"])), 1.05)
        for name, seconds in taken.items()
        if name != "grpo"
    ]


def speed_of_the_rollout(rounds: int) -> None:
    """256 rollouts of 32 tokens of a 1 M-parameter model, against what the memory bandwidth allows; no target.

    A decode step reads every weight once and the cache of every row, half full on average; the bandwidth is that of one
    float32 matrix-vector product over 256 MB in the same run.
    """
    import jax
    import jax.numpy as jnp

    from jaxmeth import models, train

    prompts, group, prompt, new = 32, 8, 16, 32
    config = models.DecoderConfig("llama", VOCABULARY, 128, 6, 8, 8, 16, 256, prompt + new, tie_embeddings=True)
    params = models.init(config, jax.random.key(0))
    ids = jnp.ones((prompts, prompt), jnp.int32)
    matrix, vector = jnp.ones((8192, 8192), jnp.float32), jnp.ones((8192,), jnp.float32)
    product = jax.jit(jnp.matmul)

    def sample() -> object:
        made = train.sample_rollouts(
            params, config, ids, jnp.ones_like(ids), key=jax.random.key(1), group_size=group, max_new_tokens=new
        )
        return jax.block_until_ready(made)

    calls = {"rollout": sample, "product": lambda: jax.block_until_ready(product(matrix, vector))}
    taken = interleaved(calls, rounds, uncounted=2)
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    cache = 2 * config.num_layers * config.num_kv_heads * config.head_dim * (prompt + new / 2) * prompts * group
    read = 4 * new * (size + cache)
    bandwidth = matrix.nbytes / np.median(taken["product"])
    tokens, bound = prompts * group * new / np.median(taken["rollout"]), prompts * group * new * bandwidth / read
    print(f"rollout of {prompts * group} sequences x {new} tokens, {size / 1e6:.2f} M parameters")
    print(
        f"  {tokens:.0f} tokens/s; {bound:.0f} by memory bandwidth ({bandwidth / 1e9:.1f} GB/s): {tokens / bound:.0%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40, help="counted rounds of each call (default 40)")
    rounds = parser.parse_args().rounds
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    few = max(5, rounds // 4)
    met = speed_of_the_loss(rounds) + speed_of_process_sets(few) + speed_of_the_step(rounds)
    speed_of_the_rollout(few)
    raise SystemExit(0 if all(met) else 1)


if __name__ == "__main__":
    main()
