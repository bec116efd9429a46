"""Hugging Face tensors to our parameter tree and back, tensor by tensor.

Everything that the headers can tell (names, shapes) is checked before the first tensor is read. A stacked leaf is
filled in place, layer by layer, and handed to JAX before the next one begins, so a second copy of the model never
exists.
"""

import dataclasses
import math
import mmap
import os
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmeth.hf import names
from jaxmeth.hf.files import TensorInfo, Weights, open_folder, show
from jaxmeth.hf.names import Entry, Shape
from jaxmeth.models import decoder, encoder
from jaxmeth.types import Params, WeightsError

COMPARE_BYTES = 1 << 24
ALIGNMENT = 64  # bytes
STRIP = 16  # columns


class _Job(NamedTuple):
    """One line of the table for one configuration: its leaves' shapes and the names of its tensors, one a layer."""

    entry: Entry
    shapes: tuple[Shape, ...]
    names: tuple[str, ...]

    def stacked(self) -> bool:
        return "{i}" in self.entry.name

    def tensor_shape(self, cfg) -> Shape:
        inner = [s[1:] if self.stacked() else s for s in self.shapes]
        return self.entry.layout.shape(inner, cfg)


def flatten(tree: Params, prefix: str = "") -> dict[str, Any]:
    """Leaves by their path joined with dots."""
    out: dict[str, Any] = {}
    for key, value in tree.items():
        out |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return out


def unflatten(leaves: dict[str, Any]) -> Params:
    """The inverse of ``flatten``."""
    tree: Params = {}
    for path, leaf in leaves.items():
        *parents, last = path.split(".")
        node = tree
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = leaf
    return tree


def jobs(cfg) -> list[_Job]:
    """The lines of the table that the configuration has leaves for, with the saved names of their tensors."""
    tree = decoder if isinstance(cfg, decoder.DecoderConfig) else encoder
    shapes = {path: tuple(leaf.shape) for path, leaf in flatten(tree.abstract_params(cfg)).items()}
    out = []
    for entry in names.TABLES[cfg.model_type]:
        if all(path in shapes for path in entry.paths):
            leaf_shapes = tuple(shapes[path] for path in entry.paths)
            count = leaf_shapes[0][0] if "{i}" in entry.name else 1
            out.append(_Job(entry, leaf_shapes, tuple(entry.name.format(i=i) for i in range(count))))
    return out


def stored_name(model_type: str, tensors: dict[str, TensorInfo]) -> Callable[[str], str]:
    """Saved name -> the name the same tensor has in this checkpoint (a bare model lacks the prefix, for example)."""
    base, *others = names.PREFIXES.get(model_type, names.DECODER_PREFIXES)
    anchor = next(e.name for e in names.TABLES[model_type] if e.paths[0].endswith("embed.embedding"))
    found = next((p for p in (base, *others) if p + anchor.removeprefix(base) in tensors), base)

    def rename(name: str) -> str:
        if base == "" or name.startswith(base):
            return found + name.removeprefix(base)
        # Only the head lies outside of the prefix.
        return name if name in tensors or names.HEAD_PREFIX + name not in tensors else names.HEAD_PREFIX + name

    return rename


def settle(cfg, weights: Weights):
    """The configuration that the weights really have: tied or not, with or without BERT's pooler.

    Where ``tie_embeddings`` is set and a head is stored that differs from the embedding, the stored head is used, with
    a warning (the choice transformers 5 makes; no number of the checkpoint is lost).
    """
    rename = stored_name(cfg.model_type, weights.tensors)
    if cfg.model_type == "bert":
        return dataclasses.replace(cfg, pooler=rename("pooler.dense.weight") in weights.tensors)
    if not getattr(cfg, "tie_embeddings", False):
        return cfg
    table = {e.paths[0]: e.name for e in names.TABLES[cfg.model_type]}
    embed, head = rename(table["embed.embedding"]), rename(table["head.weight"])
    if head not in weights.tensors or embed not in weights.tensors or _equal(weights, embed, head):
        return cfg
    warnings.warn(
        f"{_where(weights)}: tie_word_embeddings: found true, but {show(head)} differs from {show(embed)}; "
        "the stored head is used",
        stacklevel=2,
    )
    return dataclasses.replace(cfg, tie_embeddings=False)


def _equal(weights: Weights, a: str, b: str) -> bool:
    """Whether two tensors are equal byte for byte, without a copy of either."""
    if weights.tensors[a][:2] != weights.tensors[b][:2]:
        return False
    x, y = weights.read(a), weights.read(b)
    step = max(1, COMPARE_BYTES // max(1, x[:1].nbytes))
    return all(x[i : i + step].tobytes() == y[i : i + step].tobytes() for i in range(0, len(x), step))


def check(cfg, weights: Weights, *, strict: bool = True) -> list[_Job]:
    """Hold the headers against the configuration; the jobs carry the names of this checkpoint.

    Raises:
      WeightsError: tensors are missing, or (``strict``) not expected, all of them listed; a tensor has another shape.
    """
    rename = stored_name(cfg.model_type, weights.tensors)
    plan = [job._replace(names=tuple(rename(n) for n in job.names)) for job in jobs(cfg)]
    expected = {name for job in plan for name in job.names}
    missing = sorted(expected - weights.tensors.keys())
    extra = sorted(name for name in weights.tensors.keys() - expected if not re.search(names.BUFFERS, name))
    if getattr(cfg, "tie_embeddings", False):
        heads = {rename(e.name) for e in names.TABLES[cfg.model_type] if e.paths == ("head.weight",)}
        extra = [name for name in extra if name not in heads]  # equal to the embedding, or settle() would have untied
    if cfg.model_type == "gemma3_text":
        image = [name for name in extra if name.startswith(names.OTHER_HALVES)]
        if image:
            warnings.warn(f"only the text model is read, {len(image)} tensors of the image model are not", stacklevel=3)
            extra = [name for name in extra if not name.startswith(names.OTHER_HALVES)]
    problems = [f"missing tensors ({len(missing)}): {', '.join(map(show, missing))}"] if missing else []
    unexpected = f"unexpected tensors ({len(extra)}): {', '.join(map(show, extra))}"
    if extra and strict:
        problems.append(unexpected)
    where = _where(weights)
    if problems:
        raise WeightsError(f"{where}: {'; '.join(problems)}")
    for job in plan:
        for name in job.names:
            _check_shape(cfg, job, name, weights.tensors[name])
    if extra:
        warnings.warn(f"{where}: {unexpected}", stacklevel=3)
    return plan


def _where(weights: Weights) -> str:
    """The file of the weights, or the folder of its shards."""
    files = {info.file for info in weights.tensors.values()}
    if len(files) == 1:
        return str(files.pop())
    return str(files.pop().parent) if files else "weights"


def _check_shape(cfg, job: _Job, name: str, info: TensorInfo) -> None:
    expected = job.tensor_shape(cfg)
    if info.dtype not in ("float64", "float32", "float16", "bfloat16"):
        raise WeightsError(f"{info.file}: tensor {show(name)}: found type {info.dtype}, expected floating numbers")
    if info.shape == expected:
        return
    hint = ""
    if info.shape == expected[::-1]:
        hint = " (it would fit transposed)"
    elif job.entry.paths[0].rpartition(".")[0].endswith(("attn.q", "attn.k", "attn.v")) and len(info.shape) == len(
        expected
    ):
        hint = " (the numbers of attention heads or key-value heads, or the head size, differ)"
    raise WeightsError(f"{info.file}: tensor {show(name)}: found shape {info.shape}, expected {expected}{hint}")


def params_from_hf(
    cfg, weights: Weights, *, dtype: Any = None, strict: bool = True, strict_finite: bool = False
) -> Params:
    """Our parameter tree out of Hugging Face tensors.

    Args:
      cfg: a configuration that went through ``settle``.
      weights: opened lazily; every tensor is read once.
      dtype: of all leaves; None keeps the stored one (the wider one where the layers of a leaf differ).
      strict: refuse tensors that have no place; False warns of them. Missing ones are always refused: a model with
        invented weights is of no use.
      strict_finite: refuse NaN and infinity; False warns, naming the tensors.

    Raises:
      WeightsError: see ``check``; or a tensor that is not finite.
    """
    plan = check(cfg, weights, strict=strict)
    if any(weights.tensors[name].dtype == "float64" for job in plan for name in job.names) and (
        _leaf_dtype(["float64"], dtype) == np.float32 and dtype is None
    ):
        warnings.warn("float64 tensors are kept as float32: 64-bit mode of JAX is off", stacklevel=2)
    leaves: dict[str, jax.Array] = {}
    bad: list[str] = []
    for job in plan:
        for path, array in zip(job.entry.paths, _fill(cfg, job, weights, dtype, strict_finite, bad), strict=True):
            leaves[path] = jax.device_put(array)
    if bad:
        where = _where(weights)
        warnings.warn(
            f"{where}: NaN or infinite numbers in tensors ({len(bad)}): {', '.join(map(show, bad))}", stacklevel=2
        )
    return unflatten(leaves)


def _fill(cfg, job: _Job, weights: Weights, dtype: Any, strict_finite: bool, bad: list[str]) -> list[np.ndarray]:
    """The leaves of one job, filled layer by layer."""
    target = _leaf_dtype([weights.tensors[name].dtype for name in job.names], dtype)
    leaves = [_aligned(shape, target) for shape in job.shapes]
    for i, name in enumerate(job.names):
        tensor = weights.read(name)
        if not _finite(tensor):
            if strict_finite:
                raise WeightsError(f"{weights.tensors[name].file}: tensor {show(name)}: NaN or infinite numbers")
            bad.append(name)
        rows = [leaf[i] for leaf in leaves] if job.stacked() else leaves
        for theirs, ours in job.entry.layout.pairs(tensor, rows, cfg):
            _copy(ours, theirs)
    _let_go(tensor)
    return leaves


def _let_go(tensor: np.ndarray) -> None:
    """Let the system drop the pages of a mapped file that were read so far; they would count as a second copy."""
    base: Any = tensor
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        base.madvise(mmap.MADV_DONTNEED)


def _aligned(shape: Shape, dtype: np.dtype) -> np.ndarray:
    """An empty array that JAX on a CPU takes over as it is; one that is not aligned it would copy."""
    size = math.prod(shape) * dtype.itemsize
    try:
        raw = np.empty(size + ALIGNMENT, np.uint8)
    except MemoryError:
        raise MemoryError(
            f"could not allocate {size:,} bytes for a {dtype.name} leaf of shape {shape}; free memory, or load with "
            "dtype='bfloat16' (half of float32)"
        ) from None
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def _copy(to: np.ndarray, source: np.ndarray) -> None:
    """``to[...] = source``, a few columns at a time where one of them is transposed (ten times faster when large)."""
    if to.ndim != 2 or to.flags.c_contiguous == source.flags.c_contiguous:
        to[...] = source
        return
    if not to.flags.c_contiguous:
        to, source = to.T, source.T
    for at in range(0, to.shape[1], STRIP):
        to[:, at : at + STRIP] = source[:, at : at + STRIP]


def _leaf_dtype(stored: list[str], wanted: Any) -> np.dtype:
    target = jnp.dtype(wanted) if wanted is not None else jnp.dtype(stored[0])
    if wanted is None:
        for other in set(stored):
            target = jnp.promote_types(target, jnp.dtype(other))
    # Without 64-bit mode JAX would narrow the array itself, after a second copy.
    return np.dtype(jax.dtypes.canonicalize_dtype(target))


def _finite(tensor: np.ndarray) -> bool:
    # A sum over finite numbers can overflow, so it only ever proves that all is well.
    with np.errstate(all="ignore"):
        if np.isfinite(tensor.sum(dtype=np.float32)):
            return True
    return bool(np.isfinite(tensor).all())


def tensors_to_hf(cfg, params: Params) -> Iterator[tuple[str, Shape, np.dtype, Callable[[], np.ndarray]]]:
    """Every Hugging Face tensor of a model: name, shape, dtype, and a function that makes it (one at a time).

    Raises:
      WeightsError: ``params`` does not fit ``cfg`` (names the leaf), or holds a leaf that is not a plain array.
    """
    leaves = flatten(params)
    plan = jobs(cfg)
    wanted = {path: shape for job in plan for path, shape in zip(job.entry.paths, job.shapes, strict=True)}
    differing = sorted(leaves.keys() ^ wanted.keys())
    if differing:
        found = ["missing" if path in wanted else "unexpected" for path in differing]
        raise WeightsError("; ".join(f"{f} leaf {p}" for f, p in zip(found, differing, strict=True)))
    for path, shape in wanted.items():
        if not isinstance(leaves[path], jax.Array | np.ndarray):
            raise WeightsError(f"leaf {path}: found {type(leaves[path]).__name__}, only plain arrays can be saved")
        if tuple(leaves[path].shape) != shape:
            raise WeightsError(f"leaf {path}: found shape {tuple(leaves[path].shape)}, expected {shape}")
    for job in plan:
        dtype = leaves[job.entry.paths[0]].dtype
        for i, name in enumerate(job.names):
            yield name, job.tensor_shape(cfg), np.dtype(dtype), _maker(cfg, job, i, leaves, dtype)


def _maker(cfg, job: _Job, i: int, leaves: dict[str, Any], dtype) -> Callable[[], np.ndarray]:
    def make() -> np.ndarray:
        tensor = np.empty(job.tensor_shape(cfg), dtype)
        arrays = [np.asarray(leaves[path]) for path in job.entry.paths]
        rows = [a[i] for a in arrays] if job.stacked() else arrays
        for theirs, ours in job.entry.layout.pairs(tensor, rows, cfg):
            _copy(theirs, ours)
        return tensor

    return make


def tensor_rows(cfg, params: Params) -> list[tuple[str, int, str, Shape, str]]:
    """The table's lines as used: Hugging Face name, how many layers it stands for, our leaves, shape and dtype."""
    leaves = flatten(params)
    return [
        (
            job.entry.name,
            len(job.names),
            " ".join(job.entry.paths),
            job.tensor_shape(cfg),
            np.dtype(leaves[job.entry.paths[0]].dtype).name,
        )
        for job in jobs(cfg)
    ]


def compare(cfg, params: Params, folder: str | os.PathLike) -> tuple[int, int]:
    """Hold a saved folder against the parameters, byte for byte: the numbers of tensors and bytes that are equal.

    Raises:
      WeightsError: a tensor is missing, is not expected, or differs.
    """
    count = size = 0
    with open_folder(folder) as weights:
        check(cfg, weights)
        for name, shape, dtype, make in tensors_to_hf(cfg, params):
            stored = weights.read(name)
            if stored.shape != shape or stored.dtype != dtype or stored.tobytes() != make().tobytes():
                raise WeightsError(f"{folder}: tensor {show(name)}: what was read back differs from what was written")
            count, size = count + 1, size + stored.nbytes
    return count, size
