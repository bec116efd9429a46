"""Perturbations of trained weights, for loss surfaces that turn: Gaussian noise at an SNR, and rounding to few bits.

Both take any parameter tree and return one of the same structure, shapes and types. In a tree of this library's models
the leaves under ``layers`` hold all layers on a leading axis; each layer counts as a tensor of its own.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from jaxmeth.scaling.shannon import Real
from jaxmeth.types import ConfigError, is_concrete

Path = tuple[str, ...]
Select = Callable[[Path, Array], bool]
"""(path, leaf) -> whether to perturb the leaf; the leaf may be a tracer, so decide by path, shape and type."""


def every_weight(path: Path, leaf: Array) -> bool:
    """All floating leaves."""
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def matrices(path: Path, leaf: Array) -> bool:
    """Floating leaves that are matrices (a layer of them, for stacked layers), not biases, norms or embeddings."""
    rank = leaf.ndim - _is_stacked(path, "layers")
    return jnp.issubdtype(leaf.dtype, jnp.floating) and rank >= 2 and not any("embed" in part for part in path)


def _is_stacked(path: Path, stacked: str | None) -> bool:
    return stacked is not None and stacked in path


def _walk(tree: Any, select: Select, change: Callable[[int, Path, Array], Array]) -> Any:
    """``change(index, path, leaf)`` on the chosen leaves, float32 or wider inside, each returned in its own type."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
    out = []
    for index, (keys, leaf) in enumerate(leaves):
        path = tuple(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in keys)
        leaf = jnp.asarray(leaf)
        if select(path, leaf):
            wide = leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))
            leaf = change(index, path, wide).astype(leaf.dtype)
        out.append(leaf)
    return jax.tree.unflatten(treedef, out)


def perturb_gaussian(
    rng: PRNGKeyArray, tree: Any, snr_db: Real, *, select: Select = every_weight, stacked: str | None = "layers"
) -> Any:
    """Add white noise at a signal-to-noise ratio in dB: variance ``mean(w^2) / 10^(snr_db / 10)``, tensor by tensor.

    Consumes ``rng``; leaf i gets ``fold_in(rng, i)``. ``snr_db`` is a scalar and may be a tracer (``vmap`` over
    levels). An all-zero tensor stays zero; infinite dB changes nothing.

    Raises: ConfigError where ``snr_db`` is NaN or no scalar.

    Reconstruction: the power is that of each tensor; the alternative is one power for the whole model.
    """
    level = jnp.asarray(snr_db)
    if level.ndim or (is_concrete(snr_db) and bool(jnp.isnan(level))):
        raise ConfigError(f"snr_db: found {snr_db}, expected one number, in dB")

    return _noise(rng, tree, level, select, stacked)


@partial(jax.jit, static_argnames=("select", "stacked"))
def _noise(rng, tree, level, select, stacked):
    def noisy(index, path, w):
        axes = tuple(range(int(_is_stacked(path, stacked)), w.ndim))
        power = jnp.mean(w * w, axis=axes, keepdims=True)
        ratio = 10.0 ** (-level.astype(w.dtype) / 20.0)
        noise = jax.random.normal(jax.random.fold_in(rng, index), w.shape, w.dtype)
        return w + jnp.sqrt(power) * ratio * noise

    return _walk(tree, select, noisy)


def perturb_round(tree: Any, bits: Real, *, select: Select = matrices) -> Any:
    """Round to the nearest of ``2^bits`` levels between the extremes of each output channel (weights are [out, in]).

    ``w -> lo + s round((w - lo) / s), s = (hi - lo) / (2^bits - 1)``: weight-only round to nearest. ``bits`` is a
    scalar >= 1 and may be a tracer. A constant channel stays as it is.

    Raises: ConfigError where ``bits`` is below 1 or no scalar.
    """
    width = jnp.asarray(bits)
    if width.ndim or (is_concrete(bits) and not bool(width >= 1)):
        raise ConfigError(f"bits: found {bits}, expected one number of at least 1")

    return _rounded(tree, width, select)


@partial(jax.jit, static_argnames=("select",))
def _rounded(tree, width, select):
    def rounded(index, path, w):
        low, high = w.min(axis=-1, keepdims=True), w.max(axis=-1, keepdims=True)
        step = (high - low) / (2.0 ** width.astype(w.dtype) - 1.0)
        safe = jnp.where(step > 0, step, 1.0)
        return jnp.where(step > 0, low + safe * jnp.round((w - low) / safe), w)

    return _walk(tree, select, rounded)
