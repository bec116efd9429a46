"""jaxmeth: recent methods for large language models as small pure JAX functions that compose.

Subpackages load on first use (``jaxmeth.models``, ``from jaxmeth import uncertainty``): importing this costs nothing.
"""

import importlib
import pkgutil

__version__ = "0.1.0"


def __getattr__(name: str):
    if name in __dir__():
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([m.name for m in pkgutil.iter_modules(__path__)] + ["__version__"])
