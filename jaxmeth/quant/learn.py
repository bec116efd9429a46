"""Rotations learnt by Cayley SGD: gradient steps that stay orthonormal."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from jaxmeth import models
from jaxmeth.models import DecoderConfig
from jaxmeth.quant.regions import RotationPlan, rotate_params
from jaxmeth.types import ConfigError, Params


@dataclasses.dataclass(frozen=True)
class CayleyConfig:
    """Attributes: ``lr`` of the first step (cosine decay to 0), ``steps``; batches are used in turn."""

    lr: float = 1.5
    steps: int = 100

    def __post_init__(self):
        if not self.lr > 0 or self.steps < 1:
            raise ConfigError(f"learn: found lr {self.lr}, steps {self.steps}, expected both above 0")


def _cayley(r: Float[Array, "n n"], gradient: Float[Array, "n n"], lr: Array) -> Float[Array, "n n"]:
    gradient = gradient.astype(r.dtype)
    half = gradient @ r.T - 0.5 * r @ (r.T @ gradient @ r.T)
    w = half - half.T
    step = jnp.minimum(lr, 1 / (jnp.abs(w).sum(0).max() + 1e-8))
    eye = jnp.eye(r.shape[0], dtype=r.dtype)
    return jnp.linalg.solve(eye + step / 2 * w, r - step / 2 * w @ r)


def cayley_sgd(learning_rate: float | optax.Schedule) -> optax.GradientTransformation:
    r"""Steepest descent on orthonormal matrices by the Cayley transform.

    .. math:: W = \hat W - \hat W^\top,\ \hat W = G R^\top - \tfrac12 R (R^\top G R^\top), \quad
       R \leftarrow (I + \tfrac{\alpha}{2} W)^{-1} (I - \tfrac{\alpha}{2} W) R

    Leaves ``[..., n, n]``; the update is new minus old, so ``optax.apply_updates`` gives the new matrix, orthonormal
    as the old one was. alpha is the learning rate, at most ``1 / ||W||_1``.

    Reference: Li, Li, Todorovic, Efficient Riemannian Optimization on the Stiefel Manifold via the Cayley Transform,
      arXiv 2002.01113, algorithm 1. Reconstruction: the linear system is solved instead of iterated, no momentum.
    """

    def init(params):
        return optax.ScaleByScheduleState(jnp.zeros((), jnp.int32))

    def update(gradients, state, params=None):
        lr = learning_rate(state.count) if callable(learning_rate) else jnp.asarray(learning_rate)

        def leaf(g, r):
            if r.ndim == 2:
                return _cayley(r, g, lr) - r
            flat = jax.vmap(_cayley, (0, 0, None))(r.reshape(-1, *r.shape[-2:]), g.reshape(-1, *r.shape[-2:]), lr)
            return flat.reshape(r.shape) - r

        return jax.tree.map(leaf, gradients, params), optax.ScaleByScheduleState(state.count + 1)

    return optax.GradientTransformation(init, update)


def _next_token_loss(logits: Float[Array, "B T V"], tokens: Array) -> Float[Array, ""]:
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()


def learn_rotations(
    params: Params,
    cfg: DecoderConfig,
    batches: list,
    plan: RotationPlan,
    config: CayleyConfig,
    fake: Callable[[Params, DecoderConfig], Params],
) -> tuple[RotationPlan, Float[Array, " S"]]:
    """Learn R1 and R2 against the next-token loss of the rounded model.

    Args:
      plan: where to start; what is None stays out.
      fake: rounds rotated parameters with straight-through gradients.

    Returns:
      The plan with the rotations after the last step, and the loss before each step, nats a token.

    Raises: ConfigError where the plan has neither R1 nor R2, or windows of one token.
    Reference: Liu et al., SpinQuant, arXiv 2405.16406, section 3.2 (rounding inside the loss, Cayley SGD, lr 1.5).
    """
    learnt = {k: v for k, v in (("r1", plan.r1), ("r2", plan.r2)) if v is not None}
    if not learnt:
        raise ConfigError("learn: found neither R1 nor R2 to learn, expected at least one")
    if any(b.shape[1] < 2 for b in batches):
        raise ConfigError("learn: found calibration windows of one token, expected at least two")
    optimizer = cayley_sgd(optax.cosine_decay_schedule(config.lr, config.steps))

    @jax.jit
    def step(learnt, state, tokens):
        def loss(learnt):
            rotated, its_cfg = rotate_params(params, cfg, RotationPlan(**learnt))
            return _next_token_loss(models.apply(fake(rotated, its_cfg), its_cfg, tokens).logits, tokens)

        value, gradient = jax.value_and_grad(loss)(learnt)
        updates, state = optimizer.update(gradient, state, learnt)
        return optax.apply_updates(learnt, updates), state, value

    state = optimizer.init(learnt)
    losses = []
    for i in range(config.steps):
        learnt, state, value = step(learnt, state, jnp.asarray(batches[i % len(batches)]))
        losses.append(value)
    return plan._replace(**learnt), jnp.stack(losses)
