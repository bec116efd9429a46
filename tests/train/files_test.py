"""Files replaced whole or not at all, and the lock of a folder."""

import os
import socket
import subprocess
import sys

import pytest

from jaxmeth.train.files import acquire_lock, write_atomically
from jaxmeth.types import ConfigError


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "x.json"
    write_atomically(path, lambda file: file.write(b"{}"))

    def half(file):
        file.write(b"{")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, half)
    assert path.read_bytes() == b"{}"
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_a_lock_dies_with_its_process(tmp_path):
    """A killed process leaves the file; the next run on this host takes it over, one on another host does not."""
    path = tmp_path / "lock"
    code = f"import os; from jaxmeth.train.files import acquire_lock as a; a({str(path)!r}); os.kill(os.getpid(), 9)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == -9
    assert path.read_text().endswith(f"host {socket.gethostname()}\n")
    os.close(acquire_lock(path))
    path.write_text("pid 1 host another-machine\n")
    with pytest.raises(
        ConfigError, match=r"in use by pid 1 host another-machine, .* delete .*lock if that process is gone"
    ):
        acquire_lock(path)
