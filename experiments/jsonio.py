"""JSON with types: configurations and results to JSON and back, written atomically."""

import contextlib
import hashlib
import json
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from jaxmeth.errors import ConfigError
from jaxmeth.train.files import write_atomically

_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class Mismatch(ValueError):
    """A JSON value that does not fit its annotation; ``decode_config`` makes a ConfigError of it."""


def encode(value: Any) -> Any:
    """What JSON can hold: dataclasses and named tuples as objects, arrays as lists, NaN and infinities as strings."""
    if value is None or (isinstance(value, bool | int | str) and not isinstance(value, Enum)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: encode(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {k: encode(v) for k, v in value._asdict().items()}
    if isinstance(value, Mapping):
        return {str(k): encode(v) for k, v in value.items()}
    if isinstance(value, tuple | list | set | frozenset):
        return [encode(v) for v in (sorted(value) if isinstance(value, set | frozenset) else value)]
    if isinstance(value, Enum):
        return value.name
    if hasattr(value, "tolist"):
        return encode(value.tolist())
    return str(value)


def decode(hint: Any, value: Any, where: str) -> Any:
    """The inverse of ``encode`` for a type annotation. Raises: Mismatch naming ``where``, found and expected."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return decode(args[0], value, where)
    if origin in (typing.Union, types.UnionType):
        for member in sorted(args, key=lambda a: a is not type(None)):
            with contextlib.suppress(ValueError):
                return decode(member, value, where)
    elif hint is type(None) and value is None:
        return None
    elif origin is typing.Literal and value in args:
        return value
    elif hint is float and isinstance(value, str) and value in _NON_FINITE:
        return _NON_FINITE[value]
    elif hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    elif hint in (bool, int, str) and type(value) is hint:
        return value
    elif origin in (tuple, list) and isinstance(value, list):
        if origin is list or args[-1] is Ellipsis:
            return origin(decode(args[0], v, f"{where}[{i}]") for i, v in enumerate(value))
        if len(args) == len(value):
            return tuple(decode(a, v, f"{where}[{i}]") for i, (a, v) in enumerate(zip(args, value, strict=True)))
    elif origin is dict and isinstance(value, dict):
        return {k: decode(args[1], v, f"{where}.{k}") for k, v in value.items()}
    elif isinstance(hint, type) and issubclass(hint, Enum) and isinstance(value, str) and value in hint.__members__:
        return hint[value]
    elif isinstance(hint, type) and issubclass(hint, Path) and isinstance(value, str):
        return hint(value)
    elif is_dataclass(hint) and isinstance(value, dict):
        return decode_config(hint, value, where=f"{where}.")
    elif hint is Any:
        return value
    expected = getattr(hint, "__name__", None) if isinstance(hint, type) else str(hint).replace("typing.", "")
    raise Mismatch(f"{where}: found {json.dumps(value)}, expected {expected}")


def decode_config(config: type, values: Mapping[str, Any], base: Any = None, where: str = "") -> Any:
    """A ``config`` from JSON values; fields not given come from ``base`` or their defaults."""
    hints = typing.get_type_hints(config, include_extras=True)
    names = [f.name for f in fields(config) if f.init]
    unknown = sorted(set(values) - set(names))
    if unknown:
        raise ConfigError(f"{where}{unknown[0]}: found an unknown field, expected one of {', '.join(names)}")
    try:
        given = {k: decode(hints[k], v, f"{where}{k}") for k, v in values.items()}
    except Mismatch as error:
        raise ConfigError(str(error)) from None
    return config(**({} if base is None else {n: getattr(base, n) for n in names}) | given)


def config_hash(experiment: str, config: Any, data: Path | None = None) -> str:
    """Eight hex digits over the experiment's name, every field, and the folder of real data in use."""
    content = {"experiment": experiment, "config": encode(config), "data": encode(data)}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:8]


def write_json(path: Path, value: Any) -> None:
    """``encode(value)`` as indented JSON, atomically."""
    text = json.dumps(encode(value), indent=1, allow_nan=False, ensure_ascii=False) + "\n"
    write_atomically(path, lambda file: file.write(text.encode()))


def read_json(path: Path) -> dict:
    """The object in ``path``. Raises: ConfigError when it is not one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}), expected a JSON file") from None
    except ValueError as error:
        raise ConfigError(f"{path}: found no JSON ({error}), expected an object") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: found a JSON {type(value).__name__}, expected an object")
    return value
