"""Files of a run: replaced whole or not at all, in a folder that one process holds at a time. Imports no JAX."""

import contextlib
import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from jaxmeth.errors import ConfigError

try:
    import fcntl
except ImportError:  # Windows: no exclusion there
    fcntl = None


def write_atomically(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    """``write`` into a temporary file beside ``path``, sync, rename."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def acquire_lock(path: Path) -> int:
    """Hold ``path`` for this process (its pid and host inside) until it is closed or the process ends, however it ends.

    Raises: ConfigError when another process holds it, or when its text names another host (locks of network file
    systems are not trusted across hosts: delete the file if that run is gone).
    """
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        held = False
        try:
            if fcntl:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            held = True
        except OSError:  # a file system without locks: the text below is all there is
            pass
        text = os.read(handle, 256).decode(errors="replace").strip()
        host = text.rpartition(" host ")[2]
        if held or (text and host != socket.gethostname()):
            os.close(handle)
            hint = "wait for it, or give this run another --name"
            hint = hint if held else f"delete {path} if that process is gone"
            raise ConfigError(f"{path.parent}: in use by {text or 'another process'}, expected a free folder; {hint}")
        with contextlib.suppress(FileNotFoundError):
            if os.stat(path).st_ino == os.fstat(handle).st_ino:  # else the holder removed it between open and lock
                os.ftruncate(handle, 0)
                os.pwrite(handle, f"pid {os.getpid()} host {socket.gethostname()}\n".encode(), 0)
                return handle
        os.close(handle)
