"""What the weight readers share: the lazy ``Weights``, mapped files, bounded text and JSON, refusals.

Opening reads headers only. A tensor is a read-only view of the mapped file, so a model larger than memory can be
walked. Pickle files are refused by their name and never opened: unpickling runs code.
"""

import json
import mmap
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxmeth.types import ConfigError, JaxmethError, WeightsError

MAX_JSON_BYTES = 64_000_000
# Bounds time and memory: about 250,000 entries of a safetensors header, a second of parsing.
MAX_JSON_VALUES = 2_000_000
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".npy", ".npz")


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


def parse_json(data: bytes, what: str, error: type[JaxmethError]) -> dict[str, Any]:
    """The object in JSON text; ``what`` opens the message.

    Raises:
      error: not UTF-8, not JSON, nested too deeply, too many values, not an object, or a key named twice.
    """
    values = data.count(b",") + data.count(b"{") + data.count(b"[")
    if values > MAX_JSON_VALUES:
        raise error(f"{what}: up to {values} JSON values, expected at most {MAX_JSON_VALUES}")
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
    return parse_json(read_text(path, error=error, max_bytes=max_bytes), str(path), error)
