"""PeRQ: permute, rotate, then quantise a decoder; function composition of this package's parts."""

import dataclasses
import functools
from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxmeth.models import DecoderConfig
from jaxmeth.models.decoder import check_tokens
from jaxmeth.quant import layerwise
from jaxmeth.quant.hadamard import check_block, hadamard, has_hadamard
from jaxmeth.quant.learn import CayleyConfig, learn_rotations
from jaxmeth.quant.permute import Permute, block_masses, by_mass, merge_mass
from jaxmeth.quant.qtensor import QTensor, check_bits, dequantize, pack
from jaxmeth.quant.regions import (
    RotationPlan,
    check_finite,
    fold_norms,
    get,
    hidden_region,
    permute_params,
    plain,
    put,
    refuses_r1,
    rotate_params,
    stream_region,
)
from jaxmeth.quant.rounding import Rounding, by_qronos, rtn
from jaxmeth.types import ConfigError, Params

ALL_LINEAR = ("attn.q", "attn.k", "attn.v", "attn.o", "mlp.gate", "mlp.up", "mlp.down")
# Weights that share an input, in the order in which a layer uses them.
STAGES = (("attn.q", "attn.k", "attn.v"), ("attn.o",), ("mlp.gate", "mlp.up"), ("mlp.down",))


@dataclasses.dataclass(frozen=True)
class PerqConfig:
    """What to permute, rotate and round; the default is PeRQ*.

    Attributes:
      weight_bits: of the targets' weights, 2 to 8 (up to 4 are packed two a byte); None keeps floats.
      act_bits: of the targets' inputs, 2 to 8; None keeps floats.
      rounding: strategy; ``rtn()``, ``by_gptq()``, ``by_qronos()``.
      permute: strategy for the MLP's hidden channels; ``by_mass``, ``by_zigzag``, ``by_absmax``, ``by_identity``,
        ``by_chance(seed)``.
      r1: rotate the residual stream (left out, and said so, where the family does not admit it).
      r1_block: its block; None = full width. A smaller block comes with an order of the stream's channels.
      r2: rotate each value head.
      r3: block of the online rotation before the down projection; None = no rotation and no order.
      group: columns that share a weight scale; None = all of a row.
      targets: weights to round; those that a family lacks are passed over.
      learn: learn R1 and R2 from this start; None = Hadamard matrices.
    """

    weight_bits: int | None = 4
    act_bits: int | None = 4
    rounding: Rounding = dataclasses.field(default_factory=by_qronos)
    permute: Permute = by_mass
    r1: bool = True
    r1_block: int | None = None
    r2: bool = True
    r3: int | None = 32
    group: int | None = None
    targets: tuple[str, ...] = ALL_LINEAR
    learn: CayleyConfig | None = None

    def __post_init__(self):
        for name in ("weight_bits", "act_bits"):
            if getattr(self, name) is not None:
                check_bits(getattr(self, name), name)
        for name in ("r3", "r1_block", "group"):
            found = getattr(self, name)
            if found is not None and (isinstance(found, bool) or not isinstance(found, int) or found < 1):
                raise ConfigError(f"{name}: found {found!r}, expected a whole number above 0, or None")
        if not isinstance(self.rounding, Rounding):
            raise ConfigError(f"rounding: found {self.rounding!r}, expected a strategy such as rtn() or by_qronos()")
        if not callable(self.permute):
            raise ConfigError(f"permute: found {self.permute!r}, expected a strategy such as by_mass")
        unknown = [t for t in self.targets if t not in ALL_LINEAR]
        if unknown or not self.targets:
            raise ConfigError(f"targets: found {self.targets!r}, expected some of {', '.join(ALL_LINEAR)}")


def perq_star(**changes) -> PerqConfig:
    """R1, R2 Hadamard, R3 in blocks of 32 after MassDiff, Qronos."""
    return PerqConfig(**changes)


def perq_dagger(**changes) -> PerqConfig:
    """R1, R2 learnt by Cayley SGD, R3 in blocks of 32 after MassDiff, round to nearest."""
    return PerqConfig(**{"rounding": rtn(), "learn": CayleyConfig(), **changes})


class PerqReport(NamedTuple):
    """What was done.

    Attributes:
      cfg: the configuration that the returned parameters belong to (a tied head may have been untied).
      order: of the MLP's hidden channels, ``[L, F]``, or None.
      imbalance: heaviest block over mean block of the down projection's input, before and after, ``[2, L]``, or None.
      weight_error: ``||dq - W||_F / ||W||_F`` of each target, ``[L]``; W permuted and rotated.
      losses: of the learnt rotations, one a step, or None.
      skipped: what was left out and why.
    """

    cfg: DecoderConfig
    order: Int[Array, "L F"] | None
    imbalance: Float[Array, "2 L"] | None
    weight_error: dict[str, Float[Array, " L"]]
    losses: Float[Array, " S"] | None
    skipped: tuple[str, ...]


def perq(
    params: Params, cfg: DecoderConfig, calibration: Iterable, config: PerqConfig | None = None
) -> tuple[Params, PerqReport]:
    """Permute, rotate and round a decoder.

    1. Stream the statistics of the float model's down-projection inputs and order the MLP's hidden channels by them.
    2. Merge R1 and R2 (Hadamard, or learnt), put R3 in front of the down projection.
    3. Round layer by layer, in the order in which a layer uses its weights; a second-order rounding meets the inputs of
       the float model and those of the model rounded so far.

    Steps 1 and 2 leave the function of the model as it is.

    Args:
      params: floats, of ``models.init`` or ``hf.load``.
      cfg: of a decoder.
      calibration: batches of token windows ``[B, T]`` without padding, at least one. Held at a time: the residual
        streams of all windows (float and rounded, width C), moments ``[in, in]``, and one batch's layer.
      config: None = ``perq_star()``.

    Returns:
      Parameters whose targets are ``QTensor``, for ``models.apply`` and ``generate`` with ``report.cfg``; the report.

    Raises:
      ConfigError: no calibration batch, tokens outside the vocabulary, a model quantised already, activations that are
        not finite, bits or blocks out of range. A width that no block divides is skipped and reported.
      WeightsError: parameters that are not finite.
    Reference: Pushing the Limits of Block Rotations in Post-Training Quantization, arXiv 2601.22347.
    """
    config = config or perq_star()
    batches = _batches(cfg, calibration)
    targets = _targets(params, config)
    for target in targets:
        plain(params, f"layers.{target}.weight")
    check_finite(params)
    skipped: list[str] = []
    params, order, imbalance, r3 = _permute_hidden(params, cfg, batches, config, skipped)
    params, cfg, plan = _plan(params, cfg, batches, config, skipped)
    losses = None
    if config.learn is not None:
        plan, losses = learn_rotations(params, cfg, batches, plan, config.learn, _fake(targets, config, r3))
    params, cfg = rotate_params(params, cfg, plan._replace(r3=r3))
    params, errors = round_params(params, cfg, batches, config)
    return params, PerqReport(cfg, order, imbalance, errors, losses, tuple(skipped))


def _targets(params: Params, config: PerqConfig) -> list[str]:
    """Those of the configured targets that the model has, in the order in which a layer uses them."""
    return [t for t in ALL_LINEAR if t in config.targets and t.split(".")[1] in params["layers"][t.split(".")[0]]]


def _permute_hidden(params, cfg, batches, config: PerqConfig, skipped: list[str]):
    """Step 1: ``(params, order, imbalance, block of R3)``."""
    width, block = cfg.intermediate_size, config.r3
    if block is None:
        return params, None, None, None
    if width % block or not has_hadamard(block):
        skipped.append(f"R3, P3: found a width of {width}, expected Hadamard blocks of {block} to divide it")
        return params, None, None, None
    stats = layerwise.masses(params, cfg, batches, "mlp.down")
    if not bool(jnp.isfinite(stats.total).all()):
        raise ConfigError("calibration: found activations that are not finite, expected a working model")
    order = jnp.stack([config.permute(stats.layer(i), block) for i in range(cfg.num_layers)])
    mass = stats.mean
    balance = []
    for m in (mass, jnp.take_along_axis(mass, order, axis=1)):
        blocks = block_masses(m, block)
        balance.append(blocks.max(-1) / jnp.maximum(blocks.mean(-1), jnp.finfo(m.dtype).tiny))
    return permute_params(params, hidden_region(cfg), order), order, jnp.stack(balance), block


def _plan(params, cfg, batches, config: PerqConfig, skipped: list[str]):
    """Step 2 without R3: ``(params, cfg, plan)``; a block R1 comes with an order of the stream (P1)."""
    plan = RotationPlan()
    if config.r1:
        reason = refuses_r1(cfg)
        block = config.r1_block or cfg.hidden_size
        if reason is None and (cfg.hidden_size % block or not has_hadamard(block)):
            reason = f"R1: found a hidden size of {cfg.hidden_size}, expected Hadamard blocks of {block} to divide it"
        if reason:
            skipped.append(reason)
        else:
            if block < cfg.hidden_size:
                params, cfg = fold_norms(params, cfg)
                params = permute_params(params, stream_region(cfg), _stream_order(params, cfg, batches, config, block))
            check_block(cfg.hidden_size, block, "r1_block")
            plan = plan._replace(r1=jnp.kron(jnp.eye(cfg.hidden_size // block), hadamard(block)))
    if config.r2:
        if has_hadamard(cfg.head_dim):
            plan = plan._replace(r2=jnp.broadcast_to(hadamard(cfg.head_dim), (cfg.num_layers,) + (cfg.head_dim,) * 2))
        else:
            skipped.append(f"R2: found a head dim of {cfg.head_dim}, expected one with a Hadamard matrix")
    return params, cfg, plan


def _stream_order(params, cfg, batches, config: PerqConfig, block: int) -> Array:
    """One order for all layers, from all that reads the stream."""
    read = [layerwise.masses(params, cfg, batches, name) for name in ("attn.q", "mlp.up")]
    layers = [stats.layer(i) for stats in read for i in range(cfg.num_layers)]
    return config.permute(functools.reduce(merge_mass, layers), block)


def _fake(targets, config: PerqConfig, r3: int | None):
    """``(params, cfg) -> params`` whose targets are rounded to nearest, with straight-through gradients."""
    from jaxmeth.quant.rounding import fake_quantize_weight

    def fake(params: Params, cfg: DecoderConfig) -> Params:
        params, _ = rotate_params(params, cfg, RotationPlan(r3=r3))
        for target in targets:
            path = f"layers.{target}.weight"
            leaf = _leaf(get(params, path), config.act_bits)
            w = leaf.q
            if config.weight_bits is not None:
                w = jax.vmap(lambda w: fake_quantize_weight(w, config.weight_bits, config.group))(w)
            params = put(params, path, leaf.replace(q=w))
        return params

    return fake


def _leaf(weight, act_bits: int | None) -> QTensor:
    """A float weight as a leaf that rounds its input."""
    leaf = weight if isinstance(weight, QTensor) else QTensor(weight, bits=None)
    return leaf.replace(act_bits=act_bits)


def _batches(cfg: DecoderConfig, calibration: Iterable) -> list:
    batches = list(calibration)
    if not batches:
        raise ConfigError("calibration: found no batch, expected at least one")
    for tokens in batches:
        check_tokens(cfg, tokens, 0)
    return batches


def round_params(
    params: Params, cfg: DecoderConfig, calibration: Iterable, config: PerqConfig
) -> tuple[Params, dict[str, Array]]:
    """Step 3 of ``perq`` alone: round the targets of permuted and rotated parameters, the only lossy step.

    Args:
      params: of ``rotate_params``, or plain floats.
      calibration: as in ``perq``; used by a second-order rounding only.
      config: its bits, rounding, group and targets. ``act_bits`` None leaves inputs that are rounded already so.

    Returns:
      Parameters whose targets are ``QTensor``; ``||dq - W||_F / ||W||_F`` by target, ``[L]``.

    Raises: ConfigError for weights rounded already; where calibration is used, as ``perq`` for it.
    """
    used = config.rounding.second_order and config.weight_bits is not None
    batches, targets = _batches(cfg, calibration) if used else [], _targets(params, config)
    for target in targets:
        leaf = get(params, f"layers.{target}.weight")
        if not isinstance(leaf, jax.Array) and getattr(leaf, "bits", 0) is not None:
            raise ConfigError(f"layers.{target}.weight: found a {type(leaf).__name__}, expected a weight to round once")
    exact = params
    for target in targets:
        params = put(params, f"layers.{target}.weight", _leaf(get(exact, f"layers.{target}.weight"), config.act_bits))
    if config.weight_bits is None:
        return params, {}
    if config.rounding.second_order:
        rounded = _layer_by_layer(exact, params, cfg, batches, targets, config)
    else:
        rounded = {t: [_rounded(config, get(params, f"layers.{t}.weight"), i) for i in range(cfg.num_layers)]
                   for t in targets}  # fmt: skip
    errors = {}
    for target, layers in rounded.items():
        path = f"layers.{target}.weight"
        stacked = jax.tree.map(lambda *a: jnp.stack(a), *layers)
        gap, whole = dequantize(stacked) - get(params, path).q, get(params, path).q
        size = lambda a: jnp.sqrt(jnp.square(a).sum((-1, -2)))  # noqa: E731
        errors[target] = size(gap) / jnp.maximum(size(whole), jnp.finfo(whole.dtype).tiny)
        params = put(params, path, pack(stacked))
    return params, errors


def _rounded(config: PerqConfig, leaf: QTensor, layer: int | None = None, h=None, g=None) -> QTensor:
    w = leaf.q if layer is None else leaf.q[layer]
    made = config.rounding.fn(w, h, g, config.weight_bits, config.group)
    return made.replace(rotate=leaf.rotate, act_bits=leaf.act_bits)


def _layer_by_layer(exact, params, cfg, batches, targets, config: PerqConfig) -> dict[str, list[QTensor]]:
    """Second-order rounding; the streams of all windows advance through the float and the rounded layers."""
    tokens = sum(int(np.prod(b.shape)) for b in batches)
    x = [layerwise.embed(exact, cfg, jnp.asarray(b)) for b in batches]
    xq = list(x)
    rounded: dict[str, list[QTensor]] = {t: [] for t in targets}
    for layer in range(cfg.num_layers):
        at = jnp.asarray(layer, jnp.int32)
        clean, here = layerwise.of_layer(exact, layer), layerwise.of_layer(params, layer)
        for stage in STAGES:
            chosen = [t for t in stage if t in targets]
            if not chosen:
                continue
            moments = [
                layerwise.second_moments(cfg, clean, here, at, a, b, chosen[0]) for a, b in zip(x, xq, strict=True)
            ]
            h, g = (sum(m[i] for m in moments) / tokens for i in (0, 1))
            for target in chosen:
                made = _rounded(config, get(here, f"{target}.weight"), None, h, g)
                rounded[target].append(made)
                here = put(here, f"{target}.weight", made)
        x = [layerwise.advance(cfg, clean, at, a) for a in x]
        xq = [layerwise.advance(cfg, here, at, a) for a in xq]
    return rounded
