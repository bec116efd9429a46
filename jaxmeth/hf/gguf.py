"""GGUF files: metadata and tensors, read lazily; quantised tensors are dequantised to float32 when they are read.

The header is parsed here, with every count and length held against the size of the file before anything is allocated.
Only the arithmetic of the quantised types comes from the ``gguf`` package (extra ``jaxmeth[hf]``).

Reference: ggml project, "GGUF", docs/gguf.md, versions 2 and 3 (little-endian).
"""

import math
import mmap
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jaxmeth.hf.weights import TensorInfo, Weights, map_file, show, view
from jaxmeth.types import WeightsError

MAX_DIMS = 4
MAX_NESTING = 4
MAX_NAME_BYTES = 65_535
# Larger than any published vocabulary; without a bound a small file could become a hundred times its size in memory.
MAX_VALUES = 4_000_000
MAX_ENTRIES = 65_536
# Values dequantised at a time: the temporaries stay small beside the tensor.
CHUNK_VALUES = 1 << 22

PLAIN = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16)}
# name: (type id, values a block, bytes a block)
TYPES = {
    "F32": (0, 1, 4),
    "F16": (1, 1, 2),
    "Q4_0": (2, 32, 18),
    "Q4_1": (3, 32, 20),
    "Q5_0": (6, 32, 22),
    "Q5_1": (7, 32, 24),
    "Q8_0": (8, 32, 34),
    "Q4_K": (12, 256, 144),
    "Q5_K": (13, 256, 176),
    "Q6_K": (14, 256, 210),
    "BF16": (30, 1, 2),
}
TYPE_NAMES = {number: name for name, (number, _, _) in TYPES.items()}

# Metadata value types by id; 8 is a string, 9 an array.
SCALARS = {
    0: np.dtype("u1"),
    1: np.dtype("i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
STRING, ARRAY = 8, 9


def _gguf() -> Any:
    try:
        import gguf
    except ImportError as e:
        raise ImportError("reading a .gguf file needs the gguf package: pip install 'jaxmeth[hf]'") from e
    return gguf


class _Cursor:
    """Reads little-endian values from a mapped file and refuses to pass its end."""

    def __init__(self, mapped: mmap.mmap, path: Path):
        self.mapped, self.path, self.at, self.values = mapped, path, 0, 0

    def fail(self, what: str) -> WeightsError:
        return WeightsError(f"{self.path}: GGUF header: {what}")

    def take(self, count: int, what: str) -> int:
        """The offset of ``count`` bytes, which are then behind."""
        left = len(self.mapped) - self.at
        if count > left:
            raise self.fail(f"{what} needs {count} bytes, {left} are left (truncated file)")
        at = self.at
        self.at += count
        return at

    def check_count(self, elements: int, smallest: int, what: str) -> None:
        """Refuse a number of elements that cannot fit in the rest of the file, before any of them is read."""
        left = len(self.mapped) - self.at
        if elements * smallest > left:
            raise self.fail(f"{what}: {elements} of at least {smallest} bytes each, {left} bytes are left")

    def u32(self, what: str) -> int:
        return struct.unpack_from("<I", self.mapped, self.take(4, what))[0]

    def u64(self, what: str) -> int:
        return struct.unpack_from("<Q", self.mapped, self.take(8, what))[0]

    def string(self, what: str) -> str:
        length = self.u64(what)
        at = self.take(length, f"{what} (string of {length} bytes)")
        try:
            return self.mapped[at : at + length].decode("utf-8")
        except UnicodeDecodeError:
            raise self.fail(f"{what}: {show(self.mapped[at : at + length])} is not UTF-8") from None

    def name(self, what: str) -> str:
        name = self.string(what)
        if not name or len(name) > MAX_NAME_BYTES:
            raise self.fail(f"{what}: {len(name)} characters, expected 1 to {MAX_NAME_BYTES}")
        return name

    def value(self, kind: int, what: str, depth: int = 0) -> Any:
        if kind == STRING:
            return self.string(what)
        if kind == ARRAY:
            return self.array(what, depth)
        if kind not in SCALARS:
            raise self.fail(f"{what}: value type {kind}, expected one of 0 to 12")
        return self.numbers(kind, 1, what)[0]

    def numbers(self, kind: int, length: int, what: str) -> list:
        dtype = SCALARS[kind]
        at = self.take(length * dtype.itemsize, what)
        raw = np.frombuffer(self.mapped, np.dtype("u1") if kind == 7 else dtype, length, at)
        if kind == 7 and (raw > 1).any():
            raise self.fail(f"{what}: a bool that is neither 0 nor 1")
        return (raw == 1).tolist() if kind == 7 else raw.tolist()

    def strings(self, length: int, what: str) -> list[str]:
        # One loop without calls: a vocabulary and its merges are a hundred thousand strings and more.
        mapped, at, size, unpack = self.mapped, self.at, len(self.mapped), struct.Struct("<Q").unpack_from
        out = []
        for i in range(length):
            end = at + 8
            end += unpack(mapped, at)[0] if end <= size else size
            if end > size:
                raise self.fail(f"{what}: string {i} of {length} passes the end of the file (truncated file)")
            try:
                out.append(mapped[at + 8 : end].decode("utf-8"))
            except UnicodeDecodeError:
                raise self.fail(f"{what}: string {i}, {show(mapped[at + 8 : end])}, is not UTF-8") from None
            at = end
        self.at = at
        return out

    def array(self, what: str, depth: int) -> list:
        if depth >= MAX_NESTING:
            raise self.fail(f"{what}: arrays nested more than {MAX_NESTING} deep")
        kind = self.u32(what)
        if kind not in SCALARS and kind not in (STRING, ARRAY):
            raise self.fail(f"{what}: array of value type {kind}, expected one of 0 to 12")
        length = self.u64(what)
        smallest = SCALARS[kind].itemsize if kind in SCALARS else 8 if kind == STRING else 12
        self.check_count(length, smallest, f"{what} (array)")
        self.values += length
        if self.values > MAX_VALUES:
            raise self.fail(f"{what}: {self.values} array values so far, expected at most {MAX_VALUES}")
        if kind in SCALARS:
            return self.numbers(kind, length, what)
        if kind == STRING:
            return self.strings(length, what)
        return [self.value(kind, what, depth + 1) for _ in range(length)]


class _Tensor(NamedTuple):
    name: str
    shape: tuple[int, ...]
    kind: str
    offset: int
    bytes: int


def _metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for i in range(count):
        key = cursor.name(f"metadata key {i}")
        if key in metadata:
            raise cursor.fail(f"duplicate metadata key {show(key)}")
        metadata[key] = cursor.value(cursor.u32(f"metadata {show(key)}"), f"metadata {show(key)}")
    return metadata


def _tensor(cursor: _Cursor, i: int) -> _Tensor:
    name = cursor.name(f"tensor {i} name")
    what = f"tensor {show(name)}"
    dims = cursor.u32(what)
    if dims > MAX_DIMS:
        raise cursor.fail(f"{what}: {dims} dimensions, expected at most {MAX_DIMS}")
    # GGUF lists the innermost dimension first, numpy last.
    shape = tuple(cursor.u64(what) for _ in range(dims))[::-1]
    number = cursor.u32(what)
    offset = cursor.u64(what)
    if number not in TYPE_NAMES:
        raise cursor.fail(f"{what}: type {number} is unknown here, expected one of {', '.join(TYPES)}")
    kind = TYPE_NAMES[number]
    _, block, block_bytes = TYPES[kind]
    if math.prod(max(d, 1) for d in shape) >= 2**60:
        raise cursor.fail(f"{what}: shape {shape} overflows")
    if (shape[-1] if shape else 1) % block:
        raise cursor.fail(f"{what}: rows of {shape[-1] if shape else 1} values, {kind} has blocks of {block}")
    return _Tensor(name, shape, kind, offset, math.prod(shape) // block * block_bytes)


def _check_layout(cursor: _Cursor, tensors: dict[str, _Tensor], start: int, alignment: int) -> None:
    size, end = len(cursor.mapped), 0
    for t in sorted(tensors.values(), key=lambda t: (t.offset, t.bytes)):
        what = f"tensor {show(t.name)}"
        if t.offset % alignment:
            raise cursor.fail(f"{what}: offset {t.offset} is not a multiple of the alignment {alignment}")
        if t.offset < end:
            raise cursor.fail(f"{what}: offset {t.offset} overlaps the tensor before it, which ends at {end}")
        end = t.offset + t.bytes
        if start + end > size:
            raise cursor.fail(f"{what}: ends at byte {start + end} of {size} (truncated file)")


def _parse(path: Path, mapped: mmap.mmap) -> tuple[dict[str, Any], dict[str, _Tensor], int]:
    cursor = _Cursor(mapped, path)
    cursor.take(4, "magic")
    magic = mapped[:4]
    if magic != b"GGUF":
        raise cursor.fail(f"magic {magic!r}, expected b'GGUF'")
    version = cursor.u32("version")
    if version not in (2, 3):
        raise cursor.fail(f"version {version}, expected 2 or 3 (little-endian)")
    tensor_count, kv_count = cursor.u64("tensor count"), cursor.u64("metadata count")
    for what, count, smallest in (("tensors", tensor_count, 24), ("metadata entries", kv_count, 13)):
        cursor.check_count(count, smallest, what)
        if count > MAX_ENTRIES:
            raise cursor.fail(f"{what}: {count}, expected at most {MAX_ENTRIES}")
    metadata = _metadata(cursor, kv_count)
    tensors: dict[str, _Tensor] = {}
    for i in range(tensor_count):
        tensor = _tensor(cursor, i)
        if tensor.name in tensors:
            raise cursor.fail(f"duplicate tensor name {show(tensor.name)}")
        tensors[tensor.name] = tensor
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 0 < alignment <= 2**20 or alignment % 8:
        raise cursor.fail(f"general.alignment {show(alignment)}, expected a multiple of 8 up to {2**20}")
    start = -(-cursor.at // alignment) * alignment
    _check_layout(cursor, tensors, start, alignment)
    return metadata, tensors, start


def _reader(mapped: mmap.mmap, tensor: _Tensor, start: int, gguf: Any) -> Callable[[], np.ndarray]:
    def plain() -> np.ndarray:
        return view(mapped, PLAIN[tensor.kind], tensor.shape, start + tensor.offset)

    def quantised() -> np.ndarray:
        _, block, block_bytes = TYPES[tensor.kind]
        rows, columns = math.prod(tensor.shape[:-1]), tensor.shape[-1]
        raw = view(mapped, np.dtype("u1"), (rows, columns // block * block_bytes), start + tensor.offset)
        out = np.empty((rows, columns), np.float32)
        step = max(1, CHUNK_VALUES // max(1, columns))
        # A scale may be inf or NaN: reading reports what the file holds, judging it is the caller's.
        with np.errstate(all="ignore"):
            for i in range(0, rows if columns else 0, step):
                out[i : i + step] = gguf.quants.dequantize(raw[i : i + step], gguf.GGMLQuantizationType[tensor.kind])
        return out.reshape(tensor.shape)

    return plain if tensor.kind in PLAIN else quantised


def open_gguf(path: str | os.PathLike) -> tuple[dict[str, Any], Weights]:
    """The metadata of a GGUF file as Python values, and its tensors under GGUF's names (``blk.0.attn_q.weight``).

    Shapes are in numpy's order, (out, in) for a linear layer. F32, F16 and BF16 tensors are views of the file in their
    own type; Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K and Q6_K become new float32 arrays when they are read.
    llama.cpp's permutation of the query and key rows is left as it is in the file.

    Raises:
      ImportError: the ``gguf`` package is missing; the message names the extra.
      WeightsError: a missing file, bad magic, another version, counts or lengths beyond the file, an unknown value or
        tensor type, a duplicate name, overlapping or truncated data.
    """
    gguf = _gguf()
    path = Path(path)
    mapped = map_file(path)
    metadata, tensors, start = _parse(path, mapped)
    infos = {
        t.name: TensorInfo(PLAIN[t.kind].name if t.kind in PLAIN else "float32", t.shape, path, t.kind)
        for t in tensors.values()
    }
    return metadata, Weights(infos, {t.name: _reader(mapped, t, start, gguf) for t in tensors.values()})
