"""The safetensors format: one file read lazily, one file written tensor by tensor.

A file is 8 bytes of header length, a JSON header, then the tensors' bytes without gaps. The header is parsed here and
not by the ``safetensors`` package, which accepts duplicate names and says neither which file nor which tensor is at
fault, and whose numpy writer scrambles transposed arrays.

Reference: safetensors project, "Format" and the checks of its Rust parser.
"""

import json
import math
import mmap
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jaxmeth.hf.weights import TensorInfo, Weights, map_file, parse_json, refuse_pickle, show, view
from jaxmeth.types import WeightsError

MAX_HEADER_BYTES = 100_000_000
MAX_DIMS = 32

# Little-endian by the format's definition.
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
    # Python's integers do not overflow, numpy's strides do, and there a zero dimension counts as one.
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
    """The tensors of one safetensors file; only its header is read.

    Raises:
      WeightsError: a missing file, a malformed header (length, JSON, duplicate name, type, shape, offsets), or data
        that the header does not describe exactly.
    """
    path = Path(path)
    refuse_pickle(path)
    mapped = map_file(path)
    size = len(mapped)
    length = _header_length(path, mapped[:8], size)
    raw = parse_json(mapped[8 : 8 + length], f"{path}: safetensors header", WeightsError)
    raw.pop("__metadata__", None)
    entries = {name: _parse_entry(f"{path}: tensor {show(name)}", value) for name, value in raw.items()}
    start = 8 + length
    _check_layout(path, entries, size - start)
    tensors = {n: TensorInfo(DTYPES[e.code].name, e.shape, path, e.code) for n, e in entries.items()}
    return Weights(tensors, {n: _reader(mapped, path, n, e, start) for n, e in entries.items()})


TensorSource = tuple[str, tuple[int, ...], Any, Callable[[], np.ndarray]]
"""``(name, shape, dtype, make)``; ``make`` is called once, when the tensor's turn to be written comes."""


class Plan(NamedTuple):
    """One tensor to be written: its size is known before it is made."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    bytes: int
    make: Callable[[], np.ndarray]


def plan_tensors(tensors: Iterable[TensorSource]) -> list[Plan]:
    """The tensors to be written, in the order given, none of them made yet.

    Raises:
      WeightsError: a name given twice or reserved, or a type that safetensors lacks.
    """
    plans: dict[str, Plan] = {}
    for name, shape, dtype, make in tensors:
        dtype = np.dtype(dtype)
        if dtype.name not in CODES:
            raise WeightsError(f"tensor {show(name)}: dtype {dtype}, expected one of {', '.join(CODES)}")
        if name in plans or name == "__metadata__":
            raise WeightsError(f"tensor {show(name)}: name given twice or reserved")
        shape = tuple(int(d) for d in shape)
        plans[name] = Plan(name, shape, dtype, math.prod(shape) * dtype.itemsize, make)
    return list(plans.values())


def _header(plans: list[Plan]) -> bytes:
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


def write_safetensors(path: Path, plans: list[Plan]) -> None:
    """Write one file, making one tensor at a time.

    Raises:
      WeightsError: a tensor that is not of the announced shape and type.
    """
    # Widest type first, so that every tensor is aligned to its own item size.
    plans = sorted(plans, key=lambda p: (-p.dtype.itemsize, p.name))
    with path.open("wb") as f:
        f.write(_header(plans))
        for p in plans:
            array = np.asarray(p.make())
            if array.shape != p.shape or array.dtype.name != p.dtype.name:
                found, expected = f"{array.dtype.name} {array.shape}", f"{p.dtype.name} {p.shape}"
                raise WeightsError(f"tensor {show(p.name)}: found {found}, expected {expected}")
            # A transposed or strided array must be laid out anew: the bytes of its buffer are in another order.
            array = np.ascontiguousarray(array).astype(DTYPES[CODES[p.dtype.name]], copy=False)
            f.write(array.reshape(-1).view(np.uint8).data)
        f.flush()
        os.fsync(f.fileno())
