"""Low-rank adaptation: weight leaves that ``linear`` understands, and the split into trained and frozen leaves."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Key

from jaxmeth.models.layers import linear
from jaxmeth.types import ConfigError, Params, whole_number


@struct.dataclass
class LoRA:
    r"""A frozen weight plus a low-rank update.

    .. math:: y = x W^\top + s\,(x A^\top) B^\top

    Attributes:
      base: W ``[..., out, in]``: an array or any other ``types.LinearWeight``.
      a: A ``[..., r, in]``.
      b: B ``[..., out, r]``.
      scale: s, static; alpha / r.

    Reference: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, arXiv 2106.09685, section 4.1.
    """

    base: Any
    a: Any  # not annotated closer: None, or a shape or sharding, where trees are split and mapped
    b: Any
    scale: float = struct.field(pytree_node=False)

    def matmul(self, x: Float[Array, "*n i"]) -> Float[Array, "*n o"]:
        return linear(x, self.base) + self.scale * linear(linear(x, self.a), self.b)


def lora_init(
    params: Params,
    key: Key[Array, ""],
    *,
    rank: int = 8,
    alpha: float = 16.0,
    targets: tuple[str, ...] = ("attn.q", "attn.v"),
) -> Params:
    """Put a ``LoRA`` in the place of each target's stacked weight; the function computed does not change.

    A is drawn from N(0, 1 / in), B is 0. Consumes ``key``.

    Args:
      params: of ``models.init`` or ``hf.load``.
      rank: at least 1.
      alpha: the update is scaled by alpha / rank.
      targets: paths below ``layers``, for instance all of ``attn.{q,k,v,o}`` and ``mlp.{gate,up,down}``.

    Raises:
      ConfigError: a target that the model lacks or that is adapted already; a rank below 1; an alpha that is not
        finite.
    """
    rank = whole_number("rank", rank, 1)
    if not math.isfinite(alpha):
        raise ConfigError(f"alpha: found {alpha}, expected a finite number")
    layers = params["layers"]
    for key_of, target in zip(jax.random.split(key, max(len(targets), 1)), targets, strict=False):
        part, _, name = target.partition(".")
        weight = layers.get(part, {}).get(name, {}).get("weight") if name else None
        if weight is None:
            known = [
                f"{p}.{n}" for p, v in layers.items() for n, w in v.items() if isinstance(w, dict) and "weight" in w
            ]
            raise ConfigError(f"targets: found {target!r}, expected some of {', '.join(sorted(known))}")
        if not isinstance(weight, jax.Array):
            raise ConfigError(f"targets: found a {type(weight).__name__} at {target!r}, expected a plain weight")
        *stack, n_out, n_in = weight.shape
        a = jax.random.normal(key_of, (*stack, rank, n_in), jnp.float32) * n_in**-0.5
        adapted = LoRA(weight, a, jnp.zeros((*stack, n_out, rank), jnp.float32), alpha / rank)
        layers = layers | {part: layers[part] | {name: layers[part][name] | {"weight": adapted}}}
    return params | {"layers": layers}


def lora_merge(params: Params) -> Params:
    """Plain weights again: ``W + s B A`` in the dtype of W. Raises: ConfigError where W is no plain array."""

    def merge(leaf):
        if not isinstance(leaf, LoRA):
            return leaf
        if not isinstance(leaf.base, jax.Array):
            raise ConfigError(f"lora_merge: found a base of type {type(leaf.base).__name__}, expected an array")
        update = leaf.scale * jnp.matmul(leaf.b, leaf.a, precision="highest")
        return (leaf.base + update).astype(leaf.base.dtype)

    return jax.tree.map(merge, params, is_leaf=lambda x: isinstance(x, LoRA))


def path_name(path: tuple) -> str:
    """A key path joined by dots: ``layers.attn.q.weight.a``."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def is_lora(path: str) -> bool:
    """Whether a leaf is the A or B of a ``LoRA``: a choice for ``split``."""
    return path.endswith((".weight.a", ".weight.b"))


def split(params: Params, trained: Callable[[str], bool]) -> tuple[Params, Params]:
    """Two trees of the same structure, each with None where the other has the leaf: (trained, frozen).

    Args:
      trained: of a leaf's path joined by dots, for instance ``is_lora``.

    Raises:
      ConfigError: no leaf is chosen.
    """
    choose = lambda keep: jax.tree_util.tree_map_with_path(  # noqa: E731
        lambda path, leaf: leaf if trained(path_name(path)) == keep else None, params
    )
    chosen, rest = choose(True), choose(False)
    if not jax.tree.leaves(chosen):
        raise ConfigError("trained: found no leaf to train, expected at least one")
    return chosen, rest


def join(trained: Params, frozen: Params | None) -> Params:
    """The inverse of ``split``; ``frozen`` None: everything is trained."""
    if frozen is None:
        return trained
    return jax.tree.map(lambda a, b: b if a is None else a, trained, frozen, is_leaf=lambda x: x is None)
