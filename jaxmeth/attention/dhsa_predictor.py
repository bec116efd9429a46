"""The learnt boundary predictor of DHSA: one small attention over the 2w keys around each gap, then an MLP.

Reference: arXiv 2510.24606, section 3.2 and the authors' public code.
"""

import dataclasses
import functools
import math
import numbers

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array, Bool, Float

from jaxmeth.types import ConfigError, Params, whole_number


@struct.dataclass
class Encoder:
    """What a predictor's weights don't tell: the heads of its attention, the keys on each side of a gap. No leaves."""

    heads: int = struct.field(pytree_node=False, default=4)
    w: int = struct.field(pytree_node=False, default=4)


def boundary_predictor_init(
    key: Array, width: int, d_h: int = 256, heads: int = 4, gated: bool = False, w: int = 4
) -> Params:
    """Random parameters for keys of ``width`` channels (Hkv * D); consumes ``key``.

    Weights are [out, in]: ``attn.{qkv,out}``, ``norm``, ``hidden``, ``logit`` and, with ``gated``, ``gate``; heads and
    w go along as ``encoder``, an ``Encoder``.

    Raises: ConfigError where ``heads`` does not divide ``width``.
    """
    if width < 1 or d_h < 1 or heads < 1 or width % heads:
        raise ConfigError(f"width, d_h, heads: found {width}, {d_h}, {heads}, expected heads to divide width")
    w = whole_number("w", w, 1)
    keys = jax.random.split(key, 5)

    def dense(key: Array, out: int, into: int) -> Params:
        bound = into**-0.5
        return {"weight": jax.random.uniform(key, (out, into), minval=-bound, maxval=bound), "bias": jnp.zeros(out)}

    params = {
        "attn": {"qkv": dense(keys[0], 3 * width, width), "out": dense(keys[1], width, width)},
        "norm": {"scale": jnp.ones(width), "bias": jnp.zeros(width)},
        "hidden": dense(keys[2], d_h, 4 * width + 1),
        "logit": dense(keys[3], 1, d_h),
        "encoder": Encoder(heads, w),
    }
    return params | ({"gate": {"weight": dense(keys[4], 1, width)["weight"]}} if gated else {})


def encoder_of(params: Params) -> Encoder:
    """Heads and w of a predictor: its ``encoder``; 4 and 4, as in the public code, where it holds none."""
    return params.get("encoder", Encoder())


def boundary_logits(
    params: Params, keys: Float[Array, "B L C"], w: int | None = None, heads: int | None = None
) -> Float[Array, "B L"]:
    """Logit of a boundary after each position, raw: the caller sets the ends to -100 (``dhsa.at_ends``).

    The 2w keys around gap p (p-w+1 .. p and p+1 .. p+w, zeros outside) attend to one another and are normalised; each
    half is pooled (mean, or softmax-gated where the parameters hold a gate) to l and r; the features
    ``[l, r, |l - r|, l * r, cos(l, r)]`` go through one hidden layer with ReLU. Keys are head-concatenated. ``w`` and
    ``heads`` are those the parameters carry (4 and 4 where they carry none, as weights from elsewhere: give them then).

    Raises: ConfigError for a w or heads other than the parameters carry, or keys of another width.
    """
    dtype = params["norm"]["scale"].dtype
    batch, length, width = keys.shape
    made = encoder_of(params)
    w, heads = made.w if w is None else w, made.heads if heads is None else heads
    if "encoder" in params and (heads, w) != (made.heads, made.w):
        raise ConfigError(f"heads, w: found {heads}, {w}, expected the predictor's own {made.heads}, {made.w}")
    if width != params["norm"]["scale"].shape[0] or width % heads:
        expected = f"{params['norm']['scale'].shape[0]}, a multiple of the {heads} heads"
        raise ConfigError(f"keys: found {width} channels, expected {expected}")
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
      soft: soft targets.

    Raises: ConfigError for a field out of range.
    """

    learning_rate: float = 1e-4
    epochs: int = 2
    soft: bool = False

    def __post_init__(self):
        rate = self.learning_rate
        if not isinstance(rate, numbers.Real) or not 0 < rate < math.inf:
            raise ConfigError(f"learning_rate: found {rate!r}, expected a finite number above 0")
        object.__setattr__(self, "epochs", whole_number("epochs", self.epochs, 1))


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

    Raises: ConfigError for labels of other shape than the keys, or no sequence.
    """
    if ratio.shape != keys.shape[:3] or 0 in keys.shape:
        raise ConfigError(f"keys, ratio: found shapes {keys.shape}, {ratio.shape}, expected [N, M, L, C], [N, M, L]")
    length, w = keys.shape[2], encoder_of(params).w
    place = jnp.arange(length)
    mask = jnp.broadcast_to(((place >= 2 * w - 1) & (place < length - 2 * w))[None], keys.shape[1:3])
    optimizer = optax.adam(cfg.learning_rate)
    order = jnp.concatenate([jax.random.permutation(k, keys.shape[0]) for k in jax.random.split(key, cfg.epochs)])

    def objective(params, x, y):
        logits = boundary_logits(params, x)
        return jnp.sum(jax.vmap(functools.partial(boundary_loss, soft=cfg.soft))(logits, y, mask))

    def step(carry, n):
        params, state = carry
        loss, gradient = jax.value_and_grad(objective)(params, keys[n], ratio[n])
        updates, state = optimizer.update(gradient, state)
        return (optax.apply_updates(params, updates), state), loss

    (params, _), losses = jax.lax.scan(step, (params, optimizer.init(params)), order)
    return params, losses
