"""A paper's setting of reinforcement learning as shapes: rollouts, and the gradient of a policy loss on them."""

from typing import Any

import numpy as np

from experiments import core
from experiments.shapes import qwen3_8b


def policy_shapes(arms: list[tuple[str, Any]], *, prompts: int, group: int, prompt: int, new: int) -> core.Result:
    """Traced for Qwen3-8B, nothing computed: sampling, and loss and gradient of each arm's policy loss."""
    import jax
    import jax.numpy as jnp

    from jaxmeth import models, train

    cfg = qwen3_8b()
    params = models.abstract_params(cfg)
    ids = jax.ShapeDtypeStruct((prompts, prompt), jnp.int32)
    mask = jax.ShapeDtypeStruct((prompts, prompt), jnp.bool_)
    rewards = jax.ShapeDtypeStruct((prompts, group), jnp.float32)

    def sample(params: Any, ids: Any, mask: Any) -> Any:
        key = jax.random.key(0)
        return train.sample_rollouts(params, cfg, ids, mask, key=key, group_size=group, max_new_tokens=new, stop=(2,))

    made = jax.eval_shape(sample, params, ids, mask)
    found = [{"what": "parameters", "shape": f"{sum(int(np.prod(p.shape)) for p in jax.tree.leaves(params)):,}"}]
    found.append({"what": "rollouts", "shape": str(list(made.tokens.shape))})
    for name, loss in arms:
        objective = train.policy_objective(loss, cfg)

        def gradient(params: Any, made: Any, rewards: Any, objective: Any = objective) -> Any:
            batch = train.policy_batch(made, rewards, jnp.ones(rewards.shape, bool))
            denominator = objective.denominator(batch)
            return jax.value_and_grad(lambda p: objective.loss(p, batch, denominator)[0])(params)

        value, grads = jax.eval_shape(gradient, params, made, rewards)
        same = all(a.shape == b.shape for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(params), strict=True))
        shape = f"loss {list(value.shape)}, gradient {'of every parameter' if same else 'of other shapes'}"
        found.append({"what": name, "shape": shape})
    return core.Result(found, notes=["Shapes only: nothing was computed."])
