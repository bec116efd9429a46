"""Chat templates: Jinja in an immutable sandbox, in a process of its own that is stopped when it runs too long.

A template comes with the weights and is a program by a stranger. The sandbox keeps it from reaching Python's objects;
only a separate process can be stopped inside one long operation or a loop nested in a loop, and held to a bound of
memory. The process is started at the first ``render``, kept for the next ones, and ends with this one.
"""

import atexit
import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxmeth.hf.weights import read_json, read_text, show
from jaxmeth.types import ConfigError

MAX_TEMPLATE_BYTES = 1_000_000
MAX_CHARS = 4_000_000
START_SECONDS = 60.0
# A stopped process answers nothing, so the clock only has to catch one that sleeps; generous, as machines are shared.
CLOCK_FACTOR = 10.0

_SANDBOX = Path(__file__).with_name("_sandbox.py")


class _Worker:
    """The process, and who started it: after a fork the pipes belong to the parent."""

    def __init__(self) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        self.pid = os.getpid()
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-X", "utf8", str(_SANDBOX)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                encoding="utf-8",
                env=environment,
            )
        except OSError as e:
            raise ConfigError(f"chat template: cannot start its process: {e.strerror}") from None
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        if self.ask("", START_SECONDS) != "ready\n":
            self.close()
            raise ConfigError("chat template: its process did not start (is jinja2 installed?)")

    def ask(self, line: str, seconds: float) -> str:
        """Send a line and wait for one; the empty string if the process ended or was ended first."""
        timer = threading.Timer(seconds, self.process.kill)
        timer.daemon = True
        timer.start()
        try:
            self.stdin.write(line)
            self.stdin.flush()
            return self.stdout.readline()
        except OSError:
            return ""
        finally:
            timer.cancel()

    def gone(self) -> bool:
        return self.pid != os.getpid() or self.process.poll() is not None

    def close(self) -> None:
        if self.pid == os.getpid():
            self.process.kill()
            with contextlib.suppress(OSError):
                self.stdin.close()
            self.stdout.close()
            self.process.wait()


_lock = threading.Lock()
_worker: _Worker | None = None


@atexit.register
def _stop() -> None:
    global _worker
    if _worker is not None:
        _worker.close()
    _worker = None


@contextlib.contextmanager
def _running() -> Iterator[_Worker]:
    global _worker
    with _lock:
        if _worker is not None and _worker.gone():
            _worker.close()
            _worker = None
        if _worker is None:
            _worker = _Worker()
        yield _worker


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    bos_token: str = "",
    eos_token: str = "",
    time_limit: float = 1.0,
    **variables: Any,
) -> str:
    """The prompt that a chat template makes of messages.

    As transformers renders it: block newlines trimmed, ``raise_exception``, ``strftime_now`` (a template that writes
    the day's date gives another prompt tomorrow), ``tojson`` without HTML escapes, loop controls, ``{% generation %}``.

    Args:
      template: Jinja source, see ``chat_template_from_folder``.
      messages: ``{"role": ..., "content": ...}`` each; plain JSON values.
      add_generation_prompt: end with the opening of the assistant's turn.
      bos_token, eos_token: texts that the template may use.
      time_limit: seconds of processor time (of the clock: ten times that) before the template is stopped.
      variables: more names for the template (``tools``, ``enable_thinking``, ...); plain JSON values.

    Raises:
      ConfigError: bad syntax, an operation that the sandbox forbids, ``raise_exception`` of the template, more time
        than ``time_limit``, more than ``MAX_CHARS`` characters or about 1 GB of memory, or values that are not JSON.
    """
    global _worker
    if len(template) > MAX_TEMPLATE_BYTES:
        raise ConfigError(f"chat template: {len(template)} characters, expected at most {MAX_TEMPLATE_BYTES}")
    if not 0 < time_limit < float("inf"):
        raise ConfigError(f"time_limit: found {time_limit}, expected a positive number of seconds")
    values = {
        **variables,
        "messages": messages,
        "add_generation_prompt": add_generation_prompt,
        "bos_token": bos_token,
        "eos_token": eos_token,
    }
    request = {"template": template, "variables": values, "time_limit": time_limit, "max_chars": MAX_CHARS}
    try:
        line = json.dumps(request)
    except (TypeError, ValueError, RecursionError) as e:
        raise ConfigError(f"chat template: its variables are not plain JSON values: {e}") from None
    with _running() as worker:
        reply = worker.ask(line + "\n", CLOCK_FACTOR * time_limit)
        if not reply.endswith("\n"):
            worker.close()
            _worker = None
            raise ConfigError(f"chat template: stopped, expected it to finish within {time_limit} s and 1 GB")
    answer = json.loads(reply)
    if "error" in answer:
        raise ConfigError(f"chat template: {show(answer['error'], 400)}")
    return answer["text"]


def chat_template_from_folder(folder: str | os.PathLike) -> str | None:
    """``chat_template.jinja``, else the ``chat_template`` of ``tokenizer_config.json`` (the one named "default").

    None where the folder has neither.

    Raises:
      ConfigError: a file that cannot be read, a template that is no text, or one of over a million bytes.
    """
    folder = Path(folder)
    own, config = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    if own.exists():
        try:
            return read_text(own, max_bytes=MAX_TEMPLATE_BYTES).decode("utf-8")
        except UnicodeDecodeError:
            raise ConfigError(f"{own}: not UTF-8 text") from None
    if not config.exists():
        return None
    found = read_json(config).get("chat_template")
    if isinstance(found, list):
        named = {t.get("name"): t.get("template") for t in found if isinstance(t, dict)}
        found = named.get("default")
    if found is not None and not isinstance(found, str):
        raise ConfigError(f"{config}: chat_template: found {show(found)}, expected text")
    return found
