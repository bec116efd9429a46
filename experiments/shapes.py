"""The papers' scale without weights: shapes are traced, nothing is computed."""

import numpy as np

from experiments import core


def qwen3_8b():
    """Qwen3-8B, from its published configuration."""
    from jaxmeth.hf import config_from_hf

    return config_from_hf(
        {
            "model_type": "qwen3",
            "vocab_size": 151936,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 40960,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "bos_token_id": 151643,
            "eos_token_id": 151645,
        },
        "Qwen3-8B",
    )


def budget_shapes(batch: int = 16, prompt: int = 512, new: int = 30_000, every: int = 200) -> core.Result:
    """A 30,000-token budget, a checkpoint every 200 tokens, each row stopped by the policy inside the loop."""
    import jax
    import jax.numpy as jnp

    from jaxmeth.models import abstract_params, generate
    from jaxmeth.risk import budget

    cfg = qwen3_8b()
    params = abstract_params(cfg)
    policy = budget.Policy(*[jnp.float32(v) for v in (0.9, 1e-3, 0.5, -1.0, 0.5, new, 200.0, 0.2)])
    observe = budget.observe(policy, every=every)

    def path(params, tokens, mask, key):
        return generate(
            params, cfg, tokens, mask, key=key, max_new_tokens=new, temperature=0.6, top_p=0.95, observe=observe,
            carry=budget.observe_init(batch),
        )  # fmt: skip

    def searched(signal, correct, length, tokens):
        params = budget.lower_grid(*[jnp.zeros(k) for k in (100, 25, 20, 1)])
        return budget.lower_summary(signal, correct, length, tokens, params, float(new), levels=20)

    ids = jax.ShapeDtypeStruct((batch, prompt), jnp.int32)
    mask = jax.ShapeDtypeStruct((batch, prompt), jnp.bool_)
    made = jax.eval_shape(path, params, ids, mask, jax.eval_shape(lambda: jax.random.key(0)))
    n, steps = 1000, new // every
    rows = [jax.ShapeDtypeStruct((n, steps), t) for t in (jnp.float32, jnp.bool_)]
    summary = jax.eval_shape(
        searched, *rows, jax.ShapeDtypeStruct((n,), jnp.int32), jax.ShapeDtypeStruct((n, steps), jnp.int32)
    )
    table = {
        "parameters": ("", sum(p.size for p in jax.tree.leaves(params))),
        "tokens": (str(list(made.tokens.shape)), made.tokens.size),
        "reason for stopping": (str(list(made.carry.action.shape)), made.carry.action.size),
        f"lower candidates searched on {n} x {steps} checkpoints": (str(list(summary.total.shape)), summary.total.size),
    }
    return core.Result(
        rows=[{"array": k, "shape": shape, "numbers": int(size)} for k, (shape, size) in table.items()],
        notes=[
            "Shapes only, nothing was computed. To run on questions of your own: --model with a folder of Qwen3-8B and "
            "--file with a CSV file of questions (the paper: AIME, GPQA-diamond, MathVision).",
        ],
    )


def judge_shapes(views: int = 155, items: int = 3000) -> core.Result:
    """Five annotators with all subsets of five examples, 3,000 training items, 5,000 pairs, six judges at once."""
    import jax
    import jax.numpy as jnp

    from jaxmeth.uncertainty import judge

    def path(keys, s, agree):
        return jax.vmap(lambda key, s, agree: judge.fit(key, s, agree, judge.FitConfig()))(keys, s, agree)

    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 6))
    rows = jax.ShapeDtypeStruct((6, items, views), jnp.float32)
    made = jax.eval_shape(path, keys, rows, jax.ShapeDtypeStruct((6, items), jnp.bool_))
    table = {"views": rows, "margin by epoch": made.history.gamma} | {
        f"{layer} {name}": value for layer, part in made.params.items() for name, value in part.items()
    }
    return core.Result(
        rows=[{"array": k, "shape": str(list(v.shape)), "numbers": int(np.prod(v.shape))} for k, v in table.items()],
        notes=[
            "Shapes only, nothing was computed. The paper: six judges on AlpacaEval, Chatbot Arena, TL;DR and HH-RLHF.",
        ],
    )
