"""Weight files on disk: safetensors read lazily and written one tensor at a time; everything else refused by name.

Opening reads headers only. A tensor is a read-only view of the mapped file, so a model larger than memory can be
walked. The header is parsed here and not by the ``safetensors`` package, which accepts duplicate names and says neither
which file nor which tensor is at fault. Pickle files are refused by their name and never opened: unpickling runs code.
"""

import contextlib
import json
import math
import mmap
import os
import re
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jaxmeth.types import ConfigError, JaxmethError, WeightsError

MAX_HEADER_BYTES = 100_000_000
MAX_JSON_BYTES = 64_000_000
MAX_DIMS = 32
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".npy", ".npz")

# Little-endian by the format's definition; the two names of one type are equal on the usual hosts.
DTYPES = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"),
    "U32": np.dtype("<u4"),
    "U16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
CODES = {dtype.name: code for code, dtype in DTYPES.items()}


class TensorInfo(NamedTuple):
    """What a header says of one tensor, known without reading it.

    ``dtype`` is the numpy (or ml_dtypes) name of what ``Weights.read`` returns, ``shape`` its shape, ``file`` where it
    lies, ``stored`` the file format's own name of the stored type (``BF16``, ``Q4_1``, ...).
    """

    dtype: str
    shape: tuple[int, ...]
    file: Path
    stored: str = ""


class Weights:
    """The tensors of a checkpoint by name, opened lazily; also a context manager.

    ``tensors`` maps names to ``TensorInfo``. Views handed out by ``read`` stay valid after ``close``: the mapping goes
    when the last of them does.
    """

    def __init__(self, tensors: dict[str, TensorInfo], readers: dict[str, Callable[[], np.ndarray]]):
        self.tensors = tensors
        self._readers = readers

    def read(self, name: str) -> np.ndarray:
        """The values of one tensor: a read-only view of the file, or a new array where the file holds another type.

        Raises:
          WeightsError: no tensor of that name, the weights are closed, or its bytes cannot be its type.
        """
        if name not in self.tensors:
            raise WeightsError(f"tensor {show(name)}: not found among {len(self.tensors)} tensors")
        if name not in self._readers:
            raise WeightsError(f"tensor {show(name)}: read after the weights were closed")
        return self._readers[name]()

    def close(self) -> None:
        """Let go of the mapped files."""
        self._readers = {}

    def __enter__(self) -> "Weights":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def show(value: Any, limit: int = 120) -> str:
    """``repr`` for an error message, cut to ``limit`` characters: names in a hostile file can be megabytes long."""
    text = repr(value[: limit + 1] if isinstance(value, str | bytes) else value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def refuse_pickle(path: str | os.PathLike) -> None:
    """Refuse a file that may hold a pickle, by its name alone.

    Raises:
      WeightsError: the suffix is one of ``PICKLE_SUFFIXES``.
    """
    if Path(path).suffix.lower() in PICKLE_SUFFIXES:
        raise WeightsError(f"{path}: untrusted pickle, never opened; expected a .safetensors or .gguf file")


def map_file(path: Path) -> mmap.mmap:
    """A regular, non-empty file mapped read-only.

    Raises:
      WeightsError: missing, not a regular file (a pipe would hang), empty, or not readable.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise WeightsError(f"{path}: not a regular file")
        with path.open("rb") as f:
            if os.fstat(f.fileno()).st_size == 0:
                raise WeightsError(f"{path}: 0 bytes, expected a weight file")
            return mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise WeightsError(f"{path}: file not found") from None
    except OSError as e:
        raise WeightsError(f"{path}: cannot be read: {e.strerror}") from None


def view(mapped: mmap.mmap, dtype: np.dtype, shape: tuple[int, ...], offset: int) -> np.ndarray:
    """A read-only array over a mapped file; the file need not align it."""
    return np.ndarray(shape, dtype, buffer=mapped, offset=offset)


class _DuplicateKey(ValueError):
    pass


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        seen: set[str] = set()
        name = next(k for k, _ in pairs if k in seen or seen.add(k))
        raise _DuplicateKey(f"duplicate name {show(name)}")
    return out


def _parse_json(data: bytes, what: str, error: type[JaxmethError]) -> dict[str, Any]:
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique_pairs)
    except _DuplicateKey as e:
        raise error(f"{what}: {e}") from None
    except RecursionError:
        raise error(f"{what}: not valid JSON: nested too deeply") from None
    except UnicodeDecodeError as e:
        raise error(f"{what}: not valid JSON: not UTF-8 at byte {e.start}") from None
    except ValueError as e:
        raise error(f"{what}: not valid JSON: {str(e)[:200]}") from None
    if not isinstance(value, dict):
        raise error(f"{what}: found a JSON {type(value).__name__}, expected an object")
    return value


def read_text(
    path: str | os.PathLike, *, error: type[JaxmethError] = ConfigError, max_bytes: int = MAX_JSON_BYTES
) -> bytes:
    """The bytes of a regular file of at most ``max_bytes``.

    Raises:
      error: missing, not a regular file, too large, or not readable.
    """
    path = Path(path)
    try:
        info = path.stat()
        if not stat.S_ISREG(info.st_mode):
            raise error(f"{path}: not a regular file")
        if info.st_size > max_bytes:
            raise error(f"{path}: {info.st_size} bytes, expected at most {max_bytes}")
        return path.read_bytes()
    except FileNotFoundError:
        raise error(f"{path}: file not found") from None
    except OSError as e:
        raise error(f"{path}: cannot be read: {e.strerror}") from None


def read_json(
    path: str | os.PathLike, *, error: type[JaxmethError] = ConfigError, max_bytes: int = MAX_JSON_BYTES
) -> dict[str, Any]:
    """The object in a JSON file of at most ``max_bytes``.

    Raises:
      error: the file is missing, too large, not UTF-8, not JSON, not an object, or names a key twice.
    """
    return _parse_json(read_text(path, error=error, max_bytes=max_bytes), str(path), error)


# ---------------------------------------------------------------------------------------------- reading safetensors


class _Entry(NamedTuple):
    code: str
    shape: tuple[int, ...]
    begin: int
    end: int


def _is_count(x: Any) -> bool:
    return type(x) is int and 0 <= x < 2**63


def _header_length(path: Path, head: bytes, size: int) -> int:
    def fail(found: str) -> WeightsError:
        # A pickle's first bytes, read as a length, are nearly always out of range.
        if re.match(rb"PK\x03\x04|\x80[\x02-\x05]|\x93NUMPY", head):
            return WeightsError(f"{path}: untrusted pickle under another name, never opened; expected safetensors")
        return WeightsError(f"{path}: safetensors header: {found}")

    if len(head) < 8:
        raise fail(f"file of {size} bytes, expected at least 8")
    length = int.from_bytes(head, "little")
    if length > MAX_HEADER_BYTES:
        raise fail(f"header of {length} bytes, expected at most {MAX_HEADER_BYTES}")
    if 8 + length > size:
        raise fail(f"header of {length} bytes in a file of {size} bytes")
    return length


def _parse_entry(where: str, raw: Any) -> _Entry:
    if not isinstance(raw, dict) or not {"dtype", "shape", "data_offsets"} <= raw.keys():
        raise WeightsError(f"{where}: found {show(raw)}, expected dtype, shape and data_offsets")
    code, shape, offsets = raw["dtype"], raw["shape"], raw["data_offsets"]
    if not isinstance(code, str) or code not in DTYPES:
        raise WeightsError(f"{where}: dtype {show(code)}, expected one of {', '.join(DTYPES)}")
    if not isinstance(shape, list) or len(shape) > MAX_DIMS or not all(map(_is_count, shape)):
        raise WeightsError(f"{where}: shape {show(shape)}, expected at most {MAX_DIMS} non-negative integers")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        raise WeightsError(f"{where}: data_offsets {show(offsets)}, expected two non-negative integers")
    begin, end = offsets
    if begin > end:
        raise WeightsError(f"{where}: data_offsets begin at {begin} after their end {end}")
    itemsize = DTYPES[code].itemsize
    # numpy counts a zero dimension as one when it checks for overflow; Python's integers themselves do not overflow.
    if math.prod(max(d, 1) for d in shape) * itemsize >= 2**63:
        raise WeightsError(f"{where}: shape {show(shape)} overflows")
    expected = math.prod(shape) * itemsize
    if end - begin != expected:
        raise WeightsError(f"{where}: {end - begin} bytes, expected {expected} for {code} {show(shape)}")
    return _Entry(code, tuple(shape), begin, end)


def _check_layout(path: Path, entries: dict[str, _Entry], data_bytes: int) -> None:
    """The tensors' bytes must tile the data section: no hole, no overlap, nothing before, between or after."""
    at = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1][2:]):
        where = f"{path}: tensor {show(name)}"
        if entry.begin != at:
            fault = "overlaps the tensor before it" if entry.begin < at else "leaves a hole before it"
            raise WeightsError(f"{where}: begins at byte {entry.begin} and {fault}, expected {at}")
        if entry.end > data_bytes:
            raise WeightsError(f"{where}: ends at byte {entry.end} of {data_bytes} data bytes (truncated file)")
        at = entry.end
    if at != data_bytes:
        raise WeightsError(f"{path}: {data_bytes - at} trailing bytes after the last tensor")


def _reader(mapped: mmap.mmap, path: Path, name: str, entry: _Entry, start: int) -> Callable[[], np.ndarray]:
    def read() -> np.ndarray:
        array = view(mapped, DTYPES[entry.code], entry.shape, start + entry.begin)
        if entry.code == "BOOL" and (array.view(np.uint8) > 1).any():
            raise WeightsError(f"{path}: tensor {show(name)}: a BOOL byte that is neither 0 nor 1")
        return array

    return read


def open_safetensors(path: str | os.PathLike) -> Weights:
    """One safetensors file: 8 bytes of header length, the JSON header, then the tensors' bytes without gaps.

    Raises:
      WeightsError: a missing file, a malformed header (length, JSON, duplicate name, type, shape, offsets), or data
        that the header does not describe exactly.
    """
    path = Path(path)
    refuse_pickle(path)
    mapped = map_file(path)
    size = len(mapped)
    length = _header_length(path, mapped[:8], size)
    raw = _parse_json(mapped[8 : 8 + length], f"{path}: safetensors header", WeightsError)
    raw.pop("__metadata__", None)
    entries = {name: _parse_entry(f"{path}: tensor {show(name)}", value) for name, value in raw.items()}
    start = 8 + length
    _check_layout(path, entries, size - start)
    tensors = {n: TensorInfo(DTYPES[e.code].name, e.shape, path, e.code) for n, e in entries.items()}
    return Weights(tensors, {n: _reader(mapped, path, n, e, start) for n, e in entries.items()})


def _shard_path(folder: Path, shard: Any) -> Path:
    """The shard's path, if it stays in the folder.

    The hub's own cache is the exception: its snapshot folders hold links into the blobs folder beside them.
    """
    where = f"{folder / INDEX_FILE}: weight_map entry {show(shard)}"
    if not isinstance(shard, str) or not shard or "\0" in shard:
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
    except (OSError, RuntimeError):
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
    # All entries are checked before the first file is opened.
    paths = {shard: _shard_path(folder, shard) for shard in dict.fromkeys(map(_hashable, weight_map.values()))}
    missing = [shard for shard, path in paths.items() if not path.exists()]
    shards = {shard: open_safetensors(path) for shard, path in paths.items() if shard not in missing}

    faults = [f"shard {show(shard)} is missing" for shard in missing]
    for name, shard in weight_map.items():
        if shard in shards and name not in shards[shard].tensors:
            faults.append(f"tensor {show(name)} is not in its shard {show(shard)}")
    tensors: dict[str, TensorInfo] = {}
    readers: dict[str, Callable[[], np.ndarray]] = {}
    for shard, part in shards.items():
        for name in part.tensors.keys() & tensors.keys():
            faults.append(f"tensor {show(name)} is in two shards, {show(tensors[name].file.name)} and {show(shard)}")
        tensors |= part.tensors
        readers |= part._readers
    if faults:
        raise WeightsError(f"{index}: {'; '.join(faults)}")
    return Weights(tensors, readers)


def _hashable(value: Any) -> Any:
    return value if isinstance(value, str) else repr(value)


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


# ---------------------------------------------------------------------------------------------- writing safetensors

TensorSource = tuple[str, tuple[int, ...], Any, Callable[[], np.ndarray]]
"""``(name, shape, dtype, make)``; ``make`` is called once, when the tensor's turn to be written comes."""


class _Plan(NamedTuple):
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    bytes: int
    make: Callable[[], np.ndarray]


def _plan(tensors: Iterable[TensorSource]) -> list[_Plan]:
    plans: dict[str, _Plan] = {}
    for name, shape, dtype, make in tensors:
        dtype = np.dtype(dtype)
        if dtype.name not in CODES:
            raise WeightsError(f"tensor {show(name)}: dtype {dtype}, expected one of {', '.join(CODES)}")
        if name in plans or name == "__metadata__":
            raise WeightsError(f"tensor {show(name)}: name given twice or reserved")
        shape = tuple(int(d) for d in shape)
        plans[name] = _Plan(name, shape, dtype, math.prod(shape) * dtype.itemsize, make)
    return list(plans.values())


def _shards(plans: list[_Plan], limit: float) -> list[list[_Plan]]:
    shards: list[list[_Plan]] = [[]]
    used = 0
    for plan in plans:
        if shards[-1] and used + plan.bytes > limit:
            shards.append([])
            used = 0
        shards[-1].append(plan)
        used += plan.bytes
    return shards


def _header(plans: list[_Plan]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for p in plans:
        header[p.name] = {
            "dtype": CODES[p.dtype.name],
            "shape": list(p.shape),
            "data_offsets": [at, at + p.bytes],
        }
        at += p.bytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # the data starts on a multiple of 8
    return len(text).to_bytes(8, "little") + text


def _write_shard(path: Path, plans: list[_Plan]) -> None:
    # Widest type first, so that every tensor is aligned to its own item size.
    plans = sorted(plans, key=lambda p: (-p.dtype.itemsize, p.name))
    with path.open("wb") as f:
        f.write(_header(plans))
        for plan in plans:
            array = np.asarray(plan.make())
            if array.shape != plan.shape or array.dtype.name != plan.dtype.name:
                raise WeightsError(
                    f"tensor {show(plan.name)}: found {array.dtype.name} {array.shape}, "
                    f"expected {plan.dtype.name} {plan.shape}"
                )
            # A transposed or strided array must be laid out anew: the bytes of its buffer are in another order.
            array = np.ascontiguousarray(array).astype(DTYPES[CODES[plan.dtype.name]], copy=False)
            f.write(array.reshape(-1).view(np.uint8).data)
        f.flush()
        os.fsync(f.fileno())


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
    plans = _plan(tensors)
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
            _write_shard(temporary[name], shard)
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
