"""The rules that the DHSA experiment compares, as key-block lists and as attention functions of a decoder."""

import functools
from typing import Any

import numpy as np

from experiments.timing import interleaved

BQ, BK = 128, 64
TAIL = 64
"""Last queries of a prompt that attend densely under every rule, as in ``dhsa.prefill``."""
# "fixed" is this library's default; "oracle" chooses by the true attention.
RULES = ("sink+window", "topk", "ashape", "vs", "vsb", "random", "fixed", "similarity", "predicted", "oracle")


def config(name: str, density: float):
    """The library's configuration of a rule."""
    from jaxmeth.attention import dhsa

    rule = name if name in ("topk", "ashape", "vs", "vsb") else "chunk"
    boundaries = name if name in ("similarity", "predicted") else "fixed"
    return dhsa.DHSAConfig(bq=BQ, bk=BK, density=density, rule=rule, boundaries=boundaries, dense_last=TAIL)


def block_mass(q: Any, k: Any, scale: float) -> tuple[Any, Any]:
    """True causal attention of one row of the batch, a head at a time: ``(mass [H, nq, nk], mean over heads [T, T])``.

    The mass of a pair of blocks is the attention probability summed over its keys, mean over its queries.
    """
    import jax
    import jax.numpy as jnp

    heads, length, _ = q.shape
    k = jnp.repeat(k, heads // k.shape[0], axis=0)
    seen = jnp.tril(jnp.ones((length, length), bool))

    def one(total, pair):
        p = jax.nn.softmax(jnp.where(seen, pair[0] @ pair[1].T * scale, -jnp.inf), axis=-1)
        padded = jnp.pad(p, ((0, -length % BQ), (0, -length % BK)))
        return total + p, padded.reshape(-(-length // BQ), BQ, -1, BK).sum((1, 3)) / BQ

    total, mass = jax.lax.scan(one, jnp.zeros((length, length)), (q, k))
    return mass, total / heads


def lists(name: str, density: float, q: Any, k: Any, predictor: Any, layer: Any, scale: float, mass: Any = None):
    """``BlockList`` of a rule: T blocks a row, and more where the rule forces more.

    Forced are sink and diagonal by chunks ("fixed", "similarity", "predicted"), the first and last rows of vs and vsb.
    ``mass [B, H, nq, nk]`` is the true attention that "oracle" chooses by; computed where not given.
    """
    import jax
    import jax.numpy as jnp

    from jaxmeth.attention import dhsa
    from jaxmeth.attention.dhsa_blocks import budget_blocks
    from jaxmeth.attention.dhsa_chunks import ascending

    cfg = config(name, density)
    if name in ("sink+window", "random", "oracle"):
        batch, kv_heads, slots, _ = k.shape
        blocks = -(-slots // BK)
        rows = -(-q.shape[2] // BQ)
        budget = min(blocks, budget_blocks(density, blocks))
        j, i = jnp.arange(blocks)[None], jnp.arange(rows)[:, None]
        rec = jnp.minimum(((i + 1) * BQ - 1) // BK, blocks - 1)
        shape = (batch, kv_heads, rows, blocks)
        if name == "sink+window":
            value = jnp.broadcast_to(jnp.where(j == 0, jnp.inf, j * 1.0), shape)
        elif name == "random":
            value = jax.random.uniform(jax.random.fold_in(jax.random.key(0), layer), shape)
            # Its own blocks before the sink, where not all of them fit.
            value = jnp.where(j >= i * BQ // BK, jnp.inf, jnp.where(j == 0, 2.0, value))
        else:
            mass = jax.vmap(lambda q, k: block_mass(q, k, scale)[0])(q, k) if mass is None else mass
            value = mass.reshape(batch, kv_heads, -1, rows, blocks).mean(2)
        _, idx = jax.lax.top_k(jnp.where(j <= rec, value, -jnp.inf), budget)
        count = jnp.broadcast_to(jnp.minimum(rec[:, 0] + 1, budget), shape[:3]).astype(jnp.int32)
        return dhsa.BlockList(ascending(idx.astype(jnp.int32), count), count)
    boundaries = dhsa.find_boundaries(k, cfg, predictor) if cfg.boundaries != "fixed" else None
    return dhsa.select_blocks(q, k, cfg, boundaries)


@functools.lru_cache
def attend(name: str, density: float, box: "Box | None" = None):
    """Attention by a rule for prompts without padding; the last ``TAIL`` queries and single tokens attend densely."""
    import jax.numpy as jnp

    from jaxmeth.attention import dense
    from jaxmeth.attention.dense import blocked
    from jaxmeth.kernels import block_attention

    def function(q, k, v, ctx, state):
        if q.shape[2] == 1:
            return dense(q, k, v, ctx, state)
        length = q.shape[2]
        keys, values = k[:, :, :length], v[:, :, :length]
        chosen = lists(name, density, q, keys, box and box.params, ctx.layer, ctx.scale)
        out = block_attention(q, keys, values, chosen.idx, chosen.count, bq=BQ, bk=BK, scale=ctx.scale)
        start = max(0, length - TAIL)
        tail, _ = blocked(q[:, :, start:], keys, values, start=start, scale=ctx.scale)
        return jnp.concatenate([out[:, :, :start], tail], axis=2), state

    return dense if name == "dense" else function


class Box:
    """A predictor's parameters, hashed by identity so that an attention function can be kept."""

    def __init__(self, params: Any):
        self.params = params


def recall_tap(names: tuple[str, ...], densities: tuple[float, ...], box: Box | None):
    """Dense attention whose state is the share of attention mass that each rule covers, [density, rule]."""
    import jax.numpy as jnp

    from jaxmeth.attention import dense, dhsa

    def function(q, k, v, ctx, state):
        out, _ = dense(q, k, v, ctx, None)
        mass, _ = block_mass(q[0], k[0], ctx.scale)
        blocks = mass.shape[-1]
        found = []
        for density in densities:
            for name in names:
                chosen = lists(name, density, q, k, box and box.params, ctx.layer, ctx.scale, mass[None])
                mask = dhsa.dense_from_blocks(chosen, blocks)[0]
                mask = jnp.repeat(mask, mass.shape[0] // mask.shape[0], axis=0)
                # The last block of queries may be short.
                found.append(jnp.sum(jnp.where(mask, mass, 0)) / jnp.sum(mass))
        return out, jnp.stack(found).reshape(len(densities), len(names))

    return function


def size_tap(names: tuple[str, ...], densities: tuple[float, ...], box: Box | None):
    """Dense attention whose state is the number of blocks that each rule keeps, mean over rows, [density, rule]."""
    import jax.numpy as jnp

    from jaxmeth.attention import dense

    def function(q, k, v, ctx, state):
        out, _ = dense(q, k, v, ctx, None)
        # Whatever the attention, the oracle keeps as many.
        mass = jnp.zeros((1, q.shape[1], -(-q.shape[2] // BQ), -(-k.shape[2] // BK)))
        kept = [
            lists(n, d, q, k, box and box.params, ctx.layer, ctx.scale, mass).count.mean()
            for d in densities
            for n in names
        ]
        return out, jnp.stack(kept).reshape(len(densities), len(names))

    return function


def label_tap():
    """Dense attention whose state is the layer's head-concatenated keys and boundary ratios."""
    import jax.numpy as jnp

    from jaxmeth.attention import dense, dhsa

    def function(q, k, v, ctx, state):
        out, _ = dense(q, k, v, ctx, None)
        _, mean = block_mass(q[0], k[0], ctx.scale)
        return out, (jnp.moveaxis(k[0], 0, 1).reshape(k.shape[2], -1), dhsa.boundary_labels(mean))

    return function


def prompt_costs(model, rules: tuple[str, ...], length: int, density: float, box: Box | None) -> list[dict[str, Any]]:
    """Seconds of a whole-model prompt and megabytes of its temporary arrays, dense and by each rule but the oracle."""
    import jax
    import jax.numpy as jnp

    from jaxmeth import models

    tokens = jnp.ones((1, length), jnp.int32)
    calls, memory = {}, {}
    for name in ("dense", *(n for n in rules if n != "oracle")):
        function = attend(name, density, box)
        hidden = jax.jit(lambda p, t, f=function: models.apply(p, model.cfg, t, attend=f).hidden)
        calls[name] = hidden.lower(model.params, tokens).compile()
        memory[name] = calls[name].memory_analysis().temp_size_in_bytes / 2**20
    runs = {n: (lambda f=f: jax.block_until_ready(f(model.params, tokens))) for n, f in calls.items()}
    taken = interleaved(runs, 3)
    return [
        {"rule": name, "tokens": length, "seconds": float(np.median(seconds)), "temporary MB": memory[name],
         "faster than dense": float(np.median(taken["dense"] / seconds))}
        for name, seconds in taken.items()
    ]  # fmt: skip
