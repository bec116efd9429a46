"""Typed reading of JSON fields: every problem is one ``ConfigError`` that names the field."""

import math
from typing import Any

from jaxmeth.hf.files import show
from jaxmeth.types import ConfigError

REQUIRED: Any = object()
LARGEST = 2**31 - 1


class Fields:
    """A JSON object with typed getters. ``null`` counts as absent unless a getter says ``nullable``."""

    def __init__(self, data: Any, source: str, path: str = ""):
        if not isinstance(data, dict):
            raise ConfigError(f"{source}: {path.rstrip('.') or 'top level'}: found {show(data)}, expected an object")
        self.data, self.source, self.path = data, source, path

    def error(self, name: str, expected: str) -> ConfigError:
        """The error of one field."""
        found = show(self.data[name]) if name in self.data else "nothing"
        return ConfigError(f"{self.source}: {self.path}{name}: found {found}, expected {expected}")

    def inner(self, name: str, default: Any = REQUIRED) -> "Fields":
        """The object under ``name``."""
        value = self.data.get(name)
        if value is None and default is not REQUIRED:
            value = default
        if not isinstance(value, dict):
            raise self.error(name, "an object")
        return Fields(value, self.source, f"{self.path}{name}.")

    def integer(self, name: str, default: Any = REQUIRED, *, low: int = 1, high: int = LARGEST, nullable=False):
        """A whole number in [low, high]."""
        value, given = self._value(name, default, nullable)
        if given and (isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high):
            raise self.error(name, f"a whole number from {low} to {high}")
        return value

    def number(self, name: str, default: Any = REQUIRED, *, above: float | None = 0.0, nullable=False):
        """A finite number, greater than ``above`` where that is given; returned as a float."""
        value, given = self._value(name, default, nullable)
        if not given:
            return value
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.error(name, "a finite number")
        if above is not None and value <= above:
            raise self.error(name, f"a number greater than {above:g}")
        return float(value)

    def flag(self, name: str, default: Any = REQUIRED):
        """true or false."""
        value, given = self._value(name, default, False)
        if given and not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def text(self, name: str, default: Any = REQUIRED, *, allowed=None):
        """A string, one of ``allowed`` where that is given."""
        value, given = self._value(name, default, False)
        if given and (not isinstance(value, str) or (allowed is not None and value not in allowed)):
            raise self.error(name, f"one of {', '.join(allowed)}" if allowed is not None else "a string")
        return value

    def many(self, name: str, length: int, allowed) -> list | None:
        """A list of ``length`` values out of ``allowed``, or None where absent."""
        value = self.data.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != length or any(v not in allowed for v in value):
            raise self.error(name, f"a list of {length} values out of {', '.join(map(str, allowed))}")
        return value

    def refuse(self, name: str, *harmless: Any) -> None:
        """Raise unless the field is absent, null or one of the values that change nothing."""
        if self.data.get(name) is not None and self.data[name] not in harmless:
            raise self.error(name, f"{harmless[0]!r} (nothing else is supported)" if harmless else "no such field")

    def _value(self, name: str, default: Any, nullable: bool) -> tuple[Any, bool]:
        if self.data.get(name) is not None:
            return self.data[name], True
        if nullable and name in self.data:
            return None, False
        if default is REQUIRED:
            raise self.error(name, "a value (the field is required)")
        return default, False
