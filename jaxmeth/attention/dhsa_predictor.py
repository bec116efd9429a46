"""The learnt boundary predictor of DHSA: one small attention over the 2w keys around each gap, then an MLP.

Reference: arXiv 2510.24606, section 3.2 and the authors' public code.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float

from jaxmeth.types import ConfigError, Params


def boundary_predictor_init(key: Array, width: int, d_h: int = 256, heads: int = 4, gated: bool = False) -> Params:
    """Random parameters for keys of ``width`` channels (Hkv * D); consumes ``key``.

    Weights are [out, in]: ``attn.{qkv,out}``, ``norm``, ``hidden``, ``logit`` and, with ``gated``, ``gate``.

    Raises: ConfigError where ``heads`` does not divide ``width``.
    """
    if width < 1 or d_h < 1 or heads < 1 or width % heads:
        raise ConfigError(f"width, d_h, heads: found {width}, {d_h}, {heads}, expected heads to divide width")
    keys = jax.random.split(key, 5)

    def dense(key: Array, out: int, into: int) -> Params:
        bound = into**-0.5
        return {"weight": jax.random.uniform(key, (out, into), minval=-bound, maxval=bound), "bias": jnp.zeros(out)}

    params = {
        "attn": {"qkv": dense(keys[0], 3 * width, width), "out": dense(keys[1], width, width)},
        "norm": {"scale": jnp.ones(width), "bias": jnp.zeros(width)},
        "hidden": dense(keys[2], d_h, 4 * width + 1),
        "logit": dense(keys[3], 1, d_h),
    }
    return params | ({"gate": {"weight": dense(keys[4], 1, width)["weight"]}} if gated else {})


def boundary_logits(params: Params, keys: Float[Array, "B L C"], w: int = 4, heads: int = 4) -> Float[Array, "B L"]:
    """Logit of a boundary after each position, raw: the caller sets the ends to -100 (``dhsa.at_ends``).

    The 2w keys around gap p (p-w+1 .. p and p+1 .. p+w, zeros outside) attend to one another and are normalised; each
    half is pooled (mean, or softmax-gated where the parameters hold a gate) to l and r; the features
    ``[l, r, |l - r|, l * r, cos(l, r)]`` go through one hidden layer with ReLU. Keys are head-concatenated.
    """
    dtype = params["norm"]["scale"].dtype
    batch, length, width = keys.shape
    padded = jnp.pad(keys.astype(dtype), ((0, 0), (w - 1, w), (0, 0)))
    x = jnp.stack([padded[:, i : i + length] for i in range(2 * w)], axis=2)

    def linear(p: Params, x: Array) -> Array:
        return x @ p["weight"].T + p["bias"].reshape((1,) * (x.ndim - 1) + (-1,))

    qkv = linear(params["attn"]["qkv"], x).reshape(batch, length, 2 * w, 3, heads, width // heads)
    q, k, v = (qkv[:, :, :, i] for i in range(3))
    attn = jax.nn.softmax(jnp.einsum("blqhd,blkhd->blhqk", q, k) * (width // heads) ** -0.5, axis=-1)
    x = linear(params["attn"]["out"], jnp.einsum("blhqk,blkhd->blqhd", attn, v).reshape(batch, length, 2 * w, width))
    centred = x - jnp.mean(x, -1, keepdims=True)
    x = centred * jax.lax.rsqrt(jnp.mean(centred * centred, -1, keepdims=True) + 1e-5)
    scale, bias = (params["norm"][n][None, None, None] for n in ("scale", "bias"))
    x = x * scale + bias

    def pool(half: Array) -> Array:
        if "gate" not in params:
            return jnp.mean(half, axis=2)
        weight = jax.nn.softmax(half @ params["gate"]["weight"].T, axis=2)
        return jnp.sum(weight * half, axis=2)

    left, right = pool(x[:, :, :w]), pool(x[:, :, w:])

    def norm(a: Array) -> Array:
        return jnp.maximum(jnp.sqrt(jnp.maximum(jnp.sum(a * a, -1, keepdims=True), 1e-24)), 1e-6)

    cosine = jnp.sum(left * right, -1, keepdims=True) / (norm(left) * norm(right))
    features = jnp.concatenate([left, right, jnp.abs(left - right), left * right, cosine], axis=-1)
    return linear(params["logit"], jax.nn.relu(linear(params["hidden"], features)))[..., 0]


def boundary_targets(ratio: Float[Array, "*S"], alpha: float = 2.0, beta: float = 2.0) -> Float[Array, "*S"]:
    """``sigmoid(alpha (log(max(ratio, 1) + 1e-6) - log(beta + 1e-6)))``; at least 0.5 = a boundary (ratio >= beta)."""
    return jax.nn.sigmoid(alpha * (jnp.log(jnp.maximum(ratio, 1) + 1e-6) - jnp.log(beta + 1e-6)))


def boundary_loss(
    logits: Float[Array, "*S"],
    ratio: Float[Array, "*S"],
    mask: Bool[Array, "*S"],
    alpha: float = 2.0,
    beta: float = 2.0,
    gamma: float = 2.0,
    pos_weight: float = 1.3,
    soft: bool = False,
) -> Float[Array, ""]:
    r"""Focal cross entropy with the targets of ``boundary_targets`` (hard by default), mean over ``mask``.

    .. math:: \mathrm{mean}\,(1 - p_t)^\gamma\,[-w y \log p - (1 - y) \log(1 - p)], \quad p_t = p y + (1 - p)(1 - y)

    An empty mask gives 0. Reconstruction: the weight and focus are the public code's; the paper's text says plain BCE.
    """
    y = boundary_targets(jnp.where(mask, ratio, 1), alpha, beta)
    y = y if soft else (y >= 0.5).astype(logits.dtype)
    logits = jnp.where(mask, logits, 0)
    p = jax.nn.sigmoid(logits)
    bce = -(pos_weight * y * jax.nn.log_sigmoid(logits) + (1 - y) * jax.nn.log_sigmoid(-logits))
    loss = (1 - (p * y + (1 - p) * (1 - y))) ** gamma * bce
    return jnp.sum(jnp.where(mask, loss, 0)) / jnp.maximum(jnp.sum(mask), 1)


@dataclasses.dataclass(frozen=True)
class PredictorTraining:
    """How the predictor is trained; the paper's values.

    Args:
      learning_rate: of Adam.
      epochs: passes over the sequences.
      heads: of the encoder.
      w: keys on each side of a gap.
      soft: soft targets.
    """

    learning_rate: float = 1e-4
    epochs: int = 2
    heads: int = 4
    w: int = 4
    soft: bool = False


@functools.partial(jax.jit, static_argnames="cfg")
def train_boundary_predictor(
    key: Array,
    params: Params,
    keys: Float[Array, "N M L C"],
    ratio: Float[Array, "N M L"],
    cfg: PredictorTraining = PredictorTraining(),
) -> tuple[Params, Float[Array, " steps"]]:
    """Train one predictor for all layers: a step a sequence, the losses of its M layers summed.

    Args:
      key: consumed; orders the sequences of each epoch.
      params: where to start, see ``boundary_predictor_init``.
      keys: head-concatenated keys of N sequences and M layers.
      ratio: their labels, see ``boundary_labels``.
      cfg: static.

    Returns:
      The parameters and the loss of each of the N * epochs steps.
    """
    length = keys.shape[2]
    place = jnp.arange(length)
    mask = jnp.broadcast_to(((place >= 2 * cfg.w - 1) & (place < length - 2 * cfg.w))[None], keys.shape[1:3])
    optimizer = optax.adam(cfg.learning_rate)
    order = jnp.concatenate([jax.random.permutation(k, keys.shape[0]) for k in jax.random.split(key, cfg.epochs)])

    def objective(params, x, y):
        logits = boundary_logits(params, x, cfg.w, cfg.heads)
        return jnp.sum(jax.vmap(functools.partial(boundary_loss, soft=cfg.soft))(logits, y, mask))

    def step(carry, n):
        params, state = carry
        loss, gradient = jax.value_and_grad(objective)(params, keys[n], ratio[n])
        updates, state = optimizer.update(gradient, state)
        return (optax.apply_updates(params, updates), state), loss

    (params, _), losses = jax.lax.scan(step, (params, optimizer.init(params)), order)
    return params, losses
