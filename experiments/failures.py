"""How a command ends when it cannot go on: one line for the user, an exit code, no traceback but for bugs."""

import difflib
import errno
import re
import sys
from collections.abc import Iterable
from typing import Any

from rich.text import Text

from experiments import show
from experiments.core import About
from jaxmeth.errors import JaxmethError


class Stop(Exception):
    """The command ends here: exit code, one line for the user, and the usage line where the command was wrong."""

    def __init__(self, code: int, message: str, usage: str = ""):
        super().__init__(message)
        self.code, self.message, self.usage = code, message, usage


class Terminated(BaseException):
    """SIGTERM, raised in the main thread so that ``finally`` blocks run."""


def fail(code: int, message: str, usage: str = "") -> int:
    """Print the usage and one line, hand the exit code back."""
    shown = show.console(stderr=True)
    if usage:
        shown.print(Text(f"usage: {usage}", style="dim"), soft_wrap=True)
    mark = ("stopped: ", "bold yellow") if code in (130, 143) else ("error: ", "bold red")
    shown.print(Text.assemble(mark, " ".join(message.split())), soft_wrap=True)
    return code


def explain(error: Exception, about: About | None = None, config: Any = None) -> tuple[int, str]:
    """Exit code and line of a foreseeable failure; an empty line for a bug, which keeps its traceback."""
    text = str(error)
    if isinstance(error, JaxmethError):
        return 2, text
    exhausted = type(error).__name__ in ("JaxRuntimeError", "XlaRuntimeError") and re.search(
        r"RESOURCE_EXHAUSTED|bad_alloc|[Oo]ut of memory|[Cc]annot allocate|YNNPACK operation failed", text
    )
    if exhausted or isinstance(error, MemoryError):
        size = re.search(r"[\d.]+ ?[KMGT]i?B\b|\d+ bytes", text)
        knob = about.knob if about else ""
        size = f"could not allocate {_bytes(size.group())}" if size else "an allocation failed"
        advice = f"lower --{knob.replace('_', '-')} (now {getattr(config, knob)})" if knob else "use a smaller preset"
        return 1, f"out of memory: {size} with {_in_use()} in use; {advice}"
    if isinstance(error, RuntimeError) and "initialize backend" in text:
        return 2, f"JAX cannot use the device asked for: {text.splitlines()[0]}; unset JAX_PLATFORMS or install it"
    if isinstance(error, ImportError) and "jaxmeth[" in text:  # the library's own: it names the extra
        return 2, text
    package = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if package not in ("", "jaxmeth", "experiments"):
        return 2, f"{text}; install the package {package}"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
        return 1, f"{error.filename or 'results'}: {error.strerror}; what was finished is kept"
    return 1, ""


def _in_use() -> str:
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return _bytes(f"{peak * (1 if sys.platform == 'darwin' else 1024)} bytes")


def _bytes(size: str) -> str:
    if not size.endswith(" bytes"):
        return size.replace(". ", " ")
    number, units = float(size.split()[0]), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while number >= 1024 and len(units) > 1:
        number, units = number / 1024, units[1:]
    return f"{number:.3g} {units[0]}"


def unknown(kind: str, found: str, known: Iterable[str]) -> str:
    """``unknown command 'runn'; did you mean run?``"""
    close = difflib.get_close_matches(found, known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"expected one of {', '.join(known) or 'none: there are none'}"
    return f"unknown {kind} {found!r}; {hint}"
