"""The folder of one run: configuration, metrics as they come, finished chunks, result; one process at a time.

::

    results/<experiment>/<run>/config.json   the configuration and its hash, written first
                               metrics.csv   step, part, and whatever the run logs, a line at a time
                               chunks/*.npz  finished pieces of a long loop
                               figures/*.png
                               result.json   written last: a folder without it is unfinished and can be continued
                               lock          pid and host of the process that works here

A folder belongs to one configuration: its hash covers the experiment's name, every field and the data folder, so
chunks of another configuration are never picked up. Files are replaced atomically; a kill leaves the old or the new.
"""

import contextlib
import json
import os
import re
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from experiments.jsonio import config_hash, encode, read_json, write_json
from jaxmeth.errors import CheckpointError, ConfigError
from jaxmeth.train.files import acquire_lock, write_atomically
from jaxmeth.train.sinks import CsvSink


class RunDir:
    """Where a run keeps what it has: ``done``/``save``/``load`` or ``cached`` for chunks, ``log`` for metrics.

    ``RunDir()`` has no folder and keeps everything in memory, so ``run(cfg)`` works from Python without writing.
    """

    def __init__(self, path: Path | None = None, digest: str = ""):
        self.path = path
        self.hash = digest
        self.continued = False
        self.finished = False
        self._lock: int | None = None
        self._memory: dict[str, dict[str, np.ndarray]] = {}
        self._sink: CsvSink | None = None

    def done(self, key: str) -> bool:
        """Whether the chunk ``key`` is stored."""
        return key in self._memory if self.path is None else self._chunk(key).exists()

    def save(self, key: str, **arrays: Any) -> None:
        """Store a finished chunk: named arrays of numbers or strings, atomically. Keys: letters, digits, ``._=,-``."""
        host = {name: np.asarray(a) for name, a in arrays.items()}
        for name, array in host.items():
            if array.dtype == object:
                raise TypeError(f"chunk {key!r}: {name} is an array of objects, expected numbers or strings")
        if self.path is None:
            self._memory[key] = host
            return
        path = self._chunk(key)
        path.parent.mkdir(exist_ok=True)
        write_atomically(path, lambda file: np.savez(file, **host))

    def load(self, key: str) -> dict[str, np.ndarray]:
        """The arrays of a stored chunk. Raises: CheckpointError naming the file when it is damaged."""
        if self.path is None:
            return dict(self._memory[key])
        path = self._chunk(key)
        try:
            with open(path, "rb") as file, np.load(file, allow_pickle=False) as stored:
                return {name: stored[name] for name in stored.files}
        except (zipfile.BadZipFile, ValueError, TypeError, EOFError, OSError) as error:
            raise CheckpointError(f"{path}: damaged chunk ({error}); delete it to compute it again") from None

    def cached(self, key: str, compute: Callable[[], Mapping[str, Any]]) -> dict[str, np.ndarray]:
        """The stored chunk, or ``compute()``, stored: what a long loop calls once an item or a batch."""
        if not self.done(key):
            self.save(key, **compute())
        return self.load(key)

    def log(self, step: int, part: str = "", **metrics: Any) -> None:
        """One row of ``metrics.csv``; ``part`` tells arms of a run apart (a baseline, a seed)."""
        if self.path is not None:
            self._sink = self._sink or CsvSink(self.path / "metrics.csv")
            self._sink.write(int(step), part, metrics)

    def chunks(self) -> int:
        """How many chunks are stored."""
        return len(self._memory) if self.path is None else len(list(self.path.glob("chunks/*.npz")))

    def close(self) -> None:
        """Let go of the folder."""
        if self._lock is None:
            return
        with contextlib.suppress(OSError):
            os.unlink(self.path / "lock")
        os.close(self._lock)
        self._lock = None

    def discard_if_empty(self) -> None:
        """Remove the folder of a run that failed before it stored anything."""
        if self.path and {p.name for p in self.path.iterdir()} <= {"config.json", "lock"}:
            for file in self.path.iterdir():
                file.unlink()
            self.path.rmdir()

    def __enter__(self) -> "RunDir":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _chunk(self, key: str) -> Path:
        if not re.fullmatch(r"[\w.=,-]{1,120}", key) or key.startswith("."):
            raise ValueError(f"chunk key: found {key!r}, expected letters, digits and ._=,-")
        return self.path / "chunks" / f"{key}.npz"


def run_folder(out: Path, experiment: str, stem: str, fresh: bool) -> Path:
    """``<stem>``, ``<stem>-2``, ... : the first that is not finished (``fresh``: that does not exist)."""
    last, number = out / experiment / stem, 1
    while (last if fresh else last / "result.json").exists():
        number += 1
        last = out / experiment / f"{stem}-{number}"
    return last


def make_folder(path: Path, out: Path) -> None:
    """Make ``path`` below ``out`` and try to write there. Raises: ConfigError naming ``--out``."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot write {path} ({error.strerror}), expected a writable folder") from None


def open_run(
    out: Path, experiment: str, config: Any, preset: str, *, data: Path | None, name: str = "", fresh: bool = False
) -> RunDir:
    """Make, or continue, the folder of a run and lock it.

    Without a ``name`` an unfinished run of the same configuration is continued (``fresh``: left alone) and a finished
    one left beside the new one. With a ``name`` that folder is used, and returned as ``finished`` when it is
    (``fresh``: emptied of what an earlier run stored).

    Raises: ConfigError when ``out`` cannot be written, the folder is in use, or it belongs to another configuration.
    """
    digest = config_hash(experiment, config, data)
    path = out / experiment / name if name else run_folder(out, experiment, f"{preset}-{digest}", fresh)
    make_folder(path, out)
    folder = RunDir(path, digest)
    folder._lock = acquire_lock(path / "lock")
    try:
        record = path / "config.json"
        if record.exists():
            stored = read_json(record)
            if stored.get("hash") != digest:
                raise ConfigError(f"{path}: {_difference(stored, experiment, config, data)}; give another --name")
            if fresh:
                for pattern in ("result.json", "metrics.csv", "chunks/*.npz", "figures/*.png"):
                    for file in path.glob(pattern):
                        file.unlink()
            folder.continued = folder.chunks() > 0 or (path / "metrics.csv").exists()
            folder.finished = (path / "result.json").exists()
        elif {p.name for p in path.iterdir()} - {"lock"}:
            raise ConfigError(f"{path}: found files but no config.json, expected a run folder or an empty one")
        else:
            write_json(record, config_record(experiment, config, preset, data))
    except BaseException:
        folder.close()
        raise
    return folder


def config_record(experiment: str, config: Any, preset: str, data: Path | None) -> dict:
    """The content of config.json; ``run <experiment> --config <file>`` reads it back."""
    digest = config_hash(experiment, config, data)
    return {"experiment": experiment, "preset": preset, "hash": digest, "data": data, "config": config}


def _difference(stored: dict, experiment: str, config: Any, data: Path | None) -> str:
    """The first fields in which a folder's configuration differs from this run's."""
    flat = {"experiment": stored.get("experiment"), "JAXMETH_DATA": stored.get("data")} | (stored.get("config") or {})
    ours = {"experiment": experiment, "JAXMETH_DATA": encode(data)} | encode(config)
    differing = [k for k in ours if flat.get(k) != ours[k]]
    shown = ", ".join(f"{k}={json.dumps(flat.get(k))} (this run: {json.dumps(ours[k])})" for k in differing[:4])
    return f"belongs to another configuration: {shown or 'fields that this one lacks'}"
