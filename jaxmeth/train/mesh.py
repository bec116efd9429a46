"""Sharding by parameter path: one mesh from ``data=4,model=2``, one table of rules."""

import re
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxmeth.train.lora import path_name
from jaxmeth.types import ConfigError

# The last axes of a leaf, on the mesh axis "model". Column-parallel projections split what they make, row-parallel
# ones what they read, so that a block needs one sum over devices; everything else is replicated.
RULES: tuple[tuple[str, tuple[str | None, ...]], ...] = (
    (r"(attn\.[qkv]|mlp\.(gate|up))\.weight(\.base)?$", ("model", None)),
    (r"(attn\.[qkv]|mlp\.(gate|up))\.bias$", ("model",)),
    (r"(attn\.o|mlp\.down)\.weight(\.base)?$", (None, "model")),
    (r"(^|\.)(embed\.embedding|head\.weight)$", ("model", None)),
)


def make_mesh(axes: str) -> Mesh:
    """``make_mesh("data=4,model=2")``: axes in that order over all devices, sharding left to the compiler (Auto).

    Raises: ConfigError for other text, or when the sizes do not multiply to the number of devices.
    """
    found = re.findall(r"(?:^|,)\s*(\w+)\s*=\s*([1-9]\d*)\s*(?=,|$)", axes)
    names, sizes = tuple(n for n, _ in found), tuple(int(s) for _, s in found)
    if not found or axes.count("=") != len(found) or len(set(names)) != len(names):
        raise ConfigError(f"mesh: found {axes!r}, expected axes and sizes such as data=4,model=2")
    total = 1
    for size in sizes:
        total *= size
    if total != jax.device_count():
        raise ConfigError(f"mesh: found {axes!r} for {total} devices, expected {jax.device_count()} as there are here")
    return jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))


def param_shardings(params: Any, mesh: Mesh, rules: tuple[tuple[str, tuple[str | None, ...]], ...] = RULES) -> Any:
    """The sharding of each leaf: the first rule whose pattern its path matches, else replicated.

    Args:
      params: arrays or ``jax.ShapeDtypeStruct``s; also an optimizer state, whose paths end in the parameters' own.
      rules: (pattern, mesh axes of the last array axes). An axis that the mesh lacks, or whose size does not divide
        the array's, is left whole.
    """

    def sharding(path, leaf):
        for pattern, axes in rules:
            if re.search(pattern, path_name(path)) and len(leaf.shape) >= len(axes):
                whole = (None,) * (len(leaf.shape) - len(axes))
                sizes = leaf.shape[len(whole) :]
                spec = [
                    a if a in mesh.shape and n % mesh.shape[a] == 0 else None for a, n in zip(axes, sizes, strict=True)
                ]
                return NamedSharding(mesh, PartitionSpec(*whole, *spec))
        return NamedSharding(mesh, PartitionSpec())

    return jax.tree_util.tree_map_with_path(sharding, params)


def batch_sharding(mesh: Mesh, axis: str = "data") -> NamedSharding:
    """The leading axis over ``axis`` (replicated if the mesh has none)."""
    return NamedSharding(mesh, PartitionSpec(axis if axis in mesh.shape else None))
