"""Hugging Face in and out: ``load``, ``save``, and ``default``, a real model out of an installed package.

Names load on first use, so that ``python -m jaxmeth.hf --help`` does not wait for JAX.
"""

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxmeth.hf.chat import render
    from jaxmeth.hf.config import config_from_hf, config_to_hf
    from jaxmeth.hf.load import Checkpoint, cache_folder, default, load
    from jaxmeth.hf.save import save

__all__ = ["Checkpoint", "cache_folder", "config_from_hf", "config_to_hf", "default", "load", "render", "save"]

_HOMES = {
    "Checkpoint": "load",
    "cache_folder": "load",
    "config_from_hf": "config",
    "config_to_hf": "config",
    "default": "load",
    "load": "load",
    "render": "chat",
    "save": "save",
}


class _Package(types.ModuleType):
    """``hf.load`` and ``hf.save`` stay the functions when the modules of the same name are imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOMES and isinstance(value, types.ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
