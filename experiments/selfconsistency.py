"""Self-consistency as a reasoning budget: a model samples K answers to a question, and each is a checkpoint.

The provisional answer after a sample is the majority of all so far. Worked examples and question are computed once; the
K samples of a question share that cache, so that a sample costs no more than its own few tokens.
"""

import math
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from experiments import core, questions
from experiments.gathering import Prompts, batches, full_layers, stop_tokens
from jaxmeth.errors import ConfigError

SIGNALS = ("majority", "vote_entropy", "token_prob", "rauq")


class Samples(NamedTuple):
    """``texts`` [n][K]; [n, K] arrays: tokens made, their mean probability, and ``exp(-RAUQ)``."""

    texts: list[list[str]]
    tokens: np.ndarray
    prob: np.ndarray
    trust: np.ndarray


class Votes(NamedTuple):
    """Trajectories [n, K]: signals by name (higher = surer), correctness of the majority, cumulative tokens."""

    signals: dict[str, np.ndarray]
    correct: np.ndarray
    tokens: np.ndarray


def prefix(items: list[questions.Item]) -> str:
    """Worked examples with bare answers: short samples, and equal answers are equal strings."""
    shown = [i for i in items if i.split == "exemplar" and i.id.endswith("-000")]
    return "".join(f"Question: {i.question}\nAnswer: {i.answer}\n" for i in shown)


class _Loop(NamedTuple):
    step: Any
    active: Any
    logits: Any
    tokens: Any
    spent: Any
    prob: Any
    online: Any
    cache: Any
    state: Any


@lru_cache
def _sampler():
    """``sample(params, cache, tokens [Q,T], mask, key, temperature, stop, *, cfg, attend, layers, samples, new)``.

    The cache holds the worked examples, one row. Returns a dict of arrays [Q, K, ...]. The token that ends a sample is
    part of its count and scores, so that no sample is empty.
    """
    import jax
    import jax.numpy as jnp

    from jaxmeth import models
    from jaxmeth.uncertainty import rauq_finalize, rauq_init, rauq_step

    def repeat(cache, times):
        k, v = (jnp.repeat(x, times, axis=1) for x in cache[:2])
        return cache._replace(
            k=k, v=v, pos=jnp.repeat(cache.pos, times, axis=0), valid=jnp.repeat(cache.valid, times, axis=0)
        )

    @partial(jax.jit, static_argnames=("cfg", "attend", "layers", "samples", "new"))
    def sample(params, cache, tokens, mask, key, temperature, stop, *, cfg, attend, layers, samples, new):
        rows = tokens.shape[0] * samples
        chosen = np.asarray(layers)
        start = (None, jnp.zeros((cfg.num_layers, tokens.shape[0], cfg.num_heads), jnp.float32))
        out = models.apply(
            params, cfg, tokens, mask=mask, cache=repeat(cache, tokens.shape[0]), attend=attend, state=start
        )
        advance = jax.vmap(rauq_step, in_axes=(0, 0, 1, 0))
        online = jax.tree.map(lambda x: jnp.zeros((rows, *x.shape), x.dtype), rauq_init(len(layers), cfg.num_heads))

        def body(loop):
            logp = jax.nn.log_softmax(loop.logits)
            token = jax.random.categorical(jax.random.fold_in(key, loop.step), loop.logits / temperature, axis=-1)
            chance = jnp.take_along_axis(logp, token[:, None], axis=1)[:, 0]
            kept = jnp.where(loop.active, token, 0).astype(tokens.dtype)
            out = models.apply(params, cfg, kept[:, None], cache=loop.cache, attend=attend, state=loop.state)
            return _Loop(
                loop.step + 1,
                loop.active & ~(token[:, None] == stop[None]).any(1),
                out.logits[:, -1],
                loop.tokens.at[:, loop.step].set(kept),
                loop.spent + loop.active,
                loop.prob + jnp.where(loop.active, jnp.exp(chance), 0.0),
                advance(loop.online, chance, loop.state[1][chosen], loop.active),
                out.cache,
                out.state,
            )

        loop = _Loop(
            jnp.zeros((), jnp.int32),
            jnp.ones((rows,), bool),
            jnp.repeat(out.logits[:, -1], samples, axis=0),
            jnp.zeros((rows, new), tokens.dtype),
            jnp.zeros((rows,), jnp.int32),
            jnp.zeros((rows,), jnp.float32),
            online,
            repeat(out.cache, samples),
            (None, jnp.repeat(out.state[1], samples, axis=1)),
        )
        loop = jax.lax.while_loop(lambda s: (s.step < new) & s.active.any(), body, loop)
        score = jax.vmap(lambda s: rauq_finalize(s, layers=tuple(range(len(layers)))).score)(loop.online)
        found = {
            "tokens": loop.tokens,
            "spent": loop.spent,
            "prob": loop.prob / loop.spent,
            "trust": jnp.exp(-score),
        }
        return jax.tree.map(lambda x: x.reshape(-1, samples, *x.shape[1:]), found)

    return sample


def draw(
    folder: core.RunDir,
    model: Any,
    items: list[questions.Item],
    shown: str,
    *,
    samples: int,
    temperature: float,
    new: int,
    batch: int,
    seed: int,
) -> Samples:
    """K samples of every item, cached batch by batch in the run's folder."""
    import jax
    import jax.numpy as jnp

    from jaxmeth import models
    from jaxmeth.attention import dense
    from jaxmeth.uncertainty import rauq_tap

    if model.tokenizer is None:
        raise ConfigError("model: found no tokenizer, expected a tokenizer.json")
    encode = partial(model.tokenizer.encode, add_special_tokens=False)
    ids = [encode(questions.prompt(i, "")).ids for i in items]
    first = encode(shown).ids or [0]
    longest = max(map(len, ids))
    parts = batches(ids, batch, longest)  # one length, so that the sampler compiles once
    stop = stop_tokens(model.tokenizer, model.cfg.eos_token_ids)
    layers = full_layers(model.cfg)
    cache = models.init_cache(model.cfg, 1, len(first) + longest + new)
    cache = models.apply(model.params, model.cfg, np.asarray([first], np.int32), cache=cache).cache
    sample = partial(_sampler(), cfg=model.cfg, attend=rauq_tap(dense), layers=layers, samples=samples, new=new)
    key = jax.random.key(seed)

    def answer(number: int, part: Prompts) -> dict[str, np.ndarray]:
        found = sample(
            model.params,
            cache,
            part.tokens,
            part.mask,
            jax.random.fold_in(key, number),
            jnp.float32(temperature),
            jnp.asarray(stop),
        )
        return {"rows": part.rows} | {k: np.asarray(v)[: len(part.rows)] for k, v in found.items()}

    texts: list[list[str]] = [[] for _ in items]
    arrays = {k: np.zeros((len(items), samples), t) for k, t in (("spent", int), ("prob", float), ("trust", float))}
    stops = set(stop.tolist())
    for number, part in enumerate(core.progress(parts, description="sampling")):
        done = folder.cached(f"samples-{number:05d}", lambda n=number, p=part: answer(n, p))
        for row, tokens, spent in zip(done["rows"], done["tokens"], done["spent"], strict=True):
            kept = [t[:n] for t, n in zip(tokens.tolist(), spent.tolist(), strict=True)]
            kept = [t[:-1] if t[-1] in stops else t for t in kept]
            texts[row] = [model.tokenizer.decode(t).strip() for t in kept]
        for name, array in arrays.items():
            array[done["rows"]] = done[name]
        folder.log(number, questions=len(done["rows"]), tokens=int(done["spent"].sum()))
    return Samples(texts, arrays["spent"], arrays["prob"], arrays["trust"])


def ballot(text: str) -> str:
    """What is counted: the answer without case, surrounding blanks and full stop."""
    return text.strip().strip(".").strip().casefold()


def votes(samples: Samples, answers: list[str]) -> Votes:
    """The majority after each sample (the earliest of equals), whether it is right, and how sure the samples look.

    ``majority`` is its share and ``vote_entropy`` one minus the normalised entropy, both with an imaginary vote for
    another answer: without it a single sample would always be unanimous. ``token_prob`` and ``rauq`` are of the latest
    sample.
    """
    n, k = samples.tokens.shape
    share, calm = np.zeros((n, k)), np.zeros((n, k))
    right = np.zeros((n, k), bool)
    for i, texts in enumerate(samples.texts):
        count: dict[str, int] = {}
        for t, text in enumerate(texts):
            name = ballot(text)
            count[name] = count.get(name, 0) + 1
            leader = max(count, key=count.__getitem__)
            p = np.array([*count.values(), 1]) / (t + 2)
            share[i, t] = count[leader] / (t + 2)
            calm[i, t] = 1 + (p * np.log(p)).sum() / math.log(k + 1)
            right[i, t] = questions.correct(leader, answers[i])
    signals = (share, calm, samples.prob, samples.trust)
    named = {name: value.astype(np.float32) for name, value in zip(SIGNALS, signals, strict=True)}
    return Votes(named, right, samples.tokens.cumsum(1))
