"""The process in which chat templates run: one JSON request a line in, one JSON answer a line out.

It is started by path and imports neither JAX nor this library. A template is a program, and Jinja's sandbox bounds what
it may touch but not how long it runs or how much it builds; a process of its own can be ended, whatever it is doing.
"""

import functools
import json
import signal
import sys
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY_BYTES = 1 << 30


class Refused(Exception):
    """The template itself called ``raise_exception``, or its output is too long."""


class Generation(Extension):
    """``{% generation %}`` marks the assistant's part for training masks; for a prompt it is its body."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration)

    def parse(self, parser: Any) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: Any) -> NoReturn:
    raise Refused(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML, which a prompt must not be.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@functools.lru_cache(maxsize=8)
def _compile(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, LoopControlExtension]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(template)


def _render(request: dict[str, Any]) -> str:
    parts, length, limit = [], 0, request["max_chars"]
    for part in _compile(request["template"]).generate(request["variables"]):
        length += len(part)
        if length > limit:
            raise Refused(f"output of more than {limit} characters")
        parts.append(part)
    return "".join(parts)


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"text": _render(request)}
    except jinja2.TemplateSyntaxError as e:
        return {"error": f"line {e.lineno}: {e.message}"}
    except MemoryError:
        return {"error": f"needs more than {MEMORY_BYTES} bytes of memory"}
    except RecursionError:
        return {"error": "recursion too deep"}
    except Refused as e:
        return {"error": str(e)}
    except Exception as e:
        return {"error": f"{type(e).__name__}: {e}"}


def _limit_memory() -> None:
    try:
        import resource
    except ImportError:  # not a Unix
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, hard))


def _arm(seconds: float) -> None:
    # Processor time, so that a busy machine stops nobody; the default action ends the process even inside a C call.
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides; it closes the pipe
    _limit_memory()
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        _arm(request["time_limit"])
        text = json.dumps(_answer(request))
        _arm(0)
        print(text, flush=True)


if __name__ == "__main__":
    main()
