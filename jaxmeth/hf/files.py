"""Hugging Face weight folders: one safetensors file, or shards named by an index; read lazily, written atomically."""

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from jaxmeth.hf.safetensors import Plan, TensorSource, open_safetensors, plan_tensors, write_safetensors
from jaxmeth.hf.weights import PICKLE_SUFFIXES, TensorInfo, Weights, read_json, read_text, refuse_pickle, show
from jaxmeth.types import WeightsError

__all__ = [
    "TensorInfo",
    "TensorSource",
    "Weights",
    "open_folder",
    "open_safetensors",
    "read_json",
    "read_text",
    "refuse_pickle",
    "show",
    "write_folder",
]

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# Each mapped shard holds a file descriptor, of which a process has about a thousand.
MAX_SHARDS = 1000


def _shard_path(folder: Path, shard: str) -> Path:
    """The shard's path, if it stays in the folder.

    The hub's own cache is the exception: its snapshot folders hold links into the blobs folder beside them.
    """
    where = f"{folder / INDEX_FILE}: weight_map entry {show(shard)}"
    if not shard or "\0" in shard:
        raise WeightsError(f"{where}: expected a file name")
    if "://" in shard:
        raise WeightsError(f"{where}: a URL, expected a file in the folder")
    if shard.startswith(("/", "\\", "~")) or re.match(r"[A-Za-z]:", shard):
        raise WeightsError(f"{where}: an absolute path, expected a file in the folder")
    if ".." in re.split(r"[/\\]", shard):
        raise WeightsError(f"{where}: leaves the folder")
    refuse_pickle(shard)
    if not shard.endswith(".safetensors"):
        raise WeightsError(f"{where}: expected a .safetensors file")
    path = folder / shard
    try:
        real, home = path.resolve(), folder.resolve()
        path.exists()
    except (OSError, RuntimeError, ValueError):  # too long, a loop of links, not a file name at all
        raise WeightsError(f"{where}: cannot be resolved") from None
    blobs = home.parent.parent / "blobs"
    if not real.is_relative_to(home) and not (home.parent.name == "snapshots" and real.parent == blobs):
        raise WeightsError(f"{where}: a link that leaves the folder")
    return path


def _open_index(folder: Path) -> Weights:
    index = folder / INDEX_FILE
    weight_map = read_json(index, error=WeightsError).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightsError(f"{index}: weight_map: found {show(weight_map)}, expected an object of tensor: file")
    for name, shard in weight_map.items():
        if not isinstance(shard, str):
            raise WeightsError(f"{index}: weight_map {show(name)}: found {show(shard)}, expected a file name")
    distinct = dict.fromkeys(weight_map.values())
    if len(distinct) > MAX_SHARDS:
        raise WeightsError(f"{index}: weight_map: {len(distinct)} files, expected at most {MAX_SHARDS}")
    # All entries are checked before the first file is opened.
    paths = {shard: _shard_path(folder, shard) for shard in distinct}
    shards = {shard: open_safetensors(path) for shard, path in paths.items() if path.exists()}

    faults = [f"shard {show(shard)} is missing" for shard in paths if shard not in shards]
    for name, shard in weight_map.items():
        if shard in shards and name not in shards[shard].tensors:
            faults.append(f"tensor {show(name)} is not in its shard {show(shard)}")
    tensors: dict[str, TensorInfo] = {}
    readers: dict[str, Callable[[], np.ndarray]] = {}
    for shard, part in shards.items():
        for name in sorted(part.tensors.keys() & tensors.keys()):
            faults.append(f"tensor {show(name)} is in two shards, {show(tensors[name].file.name)} and {show(shard)}")
        tensors |= part.tensors
        readers |= part._readers
    if faults:
        raise WeightsError(f"{index}: {'; '.join(faults)}")
    return Weights(tensors, readers)


def open_folder(path: str | os.PathLike) -> Weights:
    """The weights of a Hugging Face folder: ``model.safetensors``, or shards named by their index. Headers only.

    Shards must lie in the folder (links of the hub's own cache, from a snapshot to its blobs, are followed). Every
    tensor of every shard is offered, also one that the index forgot: the caller decides about unexpected names.

    Raises:
      WeightsError: no such folder; no safetensors in it (where it holds only pickles it says so); a malformed header;
        an index entry that leaves the folder; shards or tensors missing or present twice, all of them listed.
    """
    folder = Path(path)
    if not folder.is_dir():
        refuse_pickle(folder)
        raise WeightsError(f"{folder}: found {'a file' if folder.exists() else 'nothing'}, expected a folder")
    if (folder / SINGLE_FILE).exists():
        return open_safetensors(folder / SINGLE_FILE)
    if (folder / INDEX_FILE).exists():
        return _open_index(folder)
    names = sorted(p.name for p in folder.iterdir())
    pickles = [n for n in names if n.lower().endswith(PICKLE_SUFFIXES)]
    if pickles:
        raise WeightsError(
            f"{folder}: holds only {', '.join(map(show, pickles))}: untrusted pickle, never opened; "
            f"expected {SINGLE_FILE} or {INDEX_FILE}"
        )
    raise WeightsError(f"{folder}: found {show(names)}, expected {SINGLE_FILE} or {INDEX_FILE}")


def _shards(plans: list[Plan], limit: float) -> list[list[Plan]]:
    shards: list[list[Plan]] = [[]]
    used = 0
    for p in plans:
        if shards[-1] and used + p.bytes > limit:
            shards.append([])
            used = 0
        shards[-1].append(p)
        used += p.bytes
    return shards


def write_folder(path: str | os.PathLike, tensors: Iterable[TensorSource], max_shard_bytes: float = 5e9) -> None:
    """Write safetensors as Hugging Face lays them out, holding one tensor in memory at a time.

    One ``model.safetensors`` if everything fits in ``max_shard_bytes``, else ``model-00001-of-0000N.safetensors`` and
    their index. Files are written under temporary names and renamed when all are complete, the index last: a folder
    that opens is whole.

    Raises:
      WeightsError: the folder already holds weights or cannot be written, a name is given twice, a type that
        safetensors lacks, or a tensor that is not of the announced shape and type.
    """
    folder = Path(path)
    plans = plan_tensors(tensors)
    shards = _shards(plans, max_shard_bytes)
    for taken in (SINGLE_FILE, INDEX_FILE):
        if (folder / taken).exists():
            raise WeightsError(f"{folder}: already holds {taken}, expected a folder without weights")
    n = len(shards)
    names = [SINGLE_FILE] if n == 1 else [f"model-{i + 1:05d}-of-{n:05d}.safetensors" for i in range(n)]
    temporary = {name: folder / f".{name}.{os.getpid()}.tmp" for name in [*names, INDEX_FILE]}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, shard in zip(names, shards, strict=True):
            write_safetensors(temporary[name], shard)
        if n > 1:
            weight_map = {p.name: name for name, shard in zip(names, shards, strict=True) for p in shard}
            index = {"metadata": {"total_size": sum(p.bytes for p in plans)}, "weight_map": weight_map}
            temporary[INDEX_FILE].write_text(json.dumps(index, indent=2), encoding="utf-8")
            names.append(INDEX_FILE)
        for name in names:
            os.replace(temporary[name], folder / name)
    except OSError as e:
        raise WeightsError(f"{folder}: cannot be written: {e.strerror}") from None
    finally:
        for leftover in temporary.values():
            with contextlib.suppress(OSError):
                leftover.unlink(missing_ok=True)
