"""PeRQ at the papers' scale without weights: shapes are traced, nothing is computed."""

from experiments import core
from experiments.shapes import qwen3_8b


def perq_shapes(batch: int = 1, length: int = 2048, block: int = 32) -> core.Result:
    """Qwen3-8B rotated (R1, R2, R3), rounded to nearest in four bits, packed, applied to one window."""
    import jax
    import jax.numpy as jnp

    from jaxmeth import models, quant

    cfg = qwen3_8b()
    rounded_cfg = cfg

    def path(params, tokens):
        nonlocal rounded_cfg
        plan = quant.RotationPlan(quant.hadamard(cfg.hidden_size), quant.hadamard(cfg.head_dim), block)
        params, rounded_cfg = quant.rotate_params(params, cfg, plan)
        chosen = quant.perq_star(rounding=quant.rtn())
        params, _ = quant.round_params(params, rounded_cfg, [], chosen)
        return params, models.apply(params, rounded_cfg, tokens).logits

    tokens = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    params, logits = jax.eval_shape(path, models.abstract_params(cfg), tokens)
    packed = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(params["layers"]))
    floats = sum(a.size * 2 for a in jax.tree.leaves(models.abstract_params(cfg)["layers"]))
    down = params["layers"]["mlp"]["down"]["weight"]
    table = {
        "logits": (str(list(logits.shape)), logits.size),
        "down projection, packed": (str(list(down.q.shape)), down.q.size),
        "bytes of all layers, four bits": ("", packed),
        "bytes of all layers, bfloat16": ("", floats),
    }
    return core.Result(
        rows=[{"array": k, "shape": shape, "numbers": int(size)} for k, (shape, size) in table.items()],
        notes=[
            "Shapes only, nothing was computed. To run: --model with a folder of Llama-3.2-1B-Instruct (the paper: "
            "W4A4, 128 calibration sequences, WikiText2 windows of 2048 tokens, blocks of 16 to the full width).",
        ],
    )
