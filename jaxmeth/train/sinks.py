"""Where metrics go: a CSV file always; TensorBoard, Weights & Biases and Trackio if installed. Imports no JAX."""

import csv
import importlib
import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxmeth.errors import CheckpointError
from jaxmeth.train.files import write_atomically


class CsvSink:
    """Metric rows appended to a CSV file as they come; columns join when they first appear.

    A row is identified by (part, step). In a continued run the first step logged for a part drops that part's rows
    from that step on, so an interruption leaves neither gaps nor duplicates; a half-written last line is dropped.

    Raises: CheckpointError for a file that holds something else.
    """

    def __init__(self, path: Path):
        self.path = path
        self.columns = ["step", "part"]
        self._parts: set[str] = set()
        self._continued = path.exists()
        if self._continued:
            self._rewrite(self.rows())

    def write(self, step: int, part: str, values: Mapping[str, Any]) -> None:
        """Append one row; numbers keep the shortest text that reads back equal in their own type."""
        new = [k for k in values if k not in self.columns]
        stale = self._continued and part not in self._parts
        self._parts.add(part)
        if new or stale:
            rows = self.rows()
            self.columns += new
            self._rewrite([r for r in rows if not stale or r["part"] != part or int(r["step"]) < step])
        row = {"step": step, "part": part} | {k: str(np.asarray(v)[()]) for k, v in values.items()}
        with open(self.path, "a", encoding="utf-8", newline="") as file:
            file.write(self._lines([row]))

    def rows(self) -> list[dict[str, str]]:
        """The complete rows so far."""
        if not self.path.exists():
            return []
        try:
            text = self.path.read_text(encoding="utf-8").rpartition("\n")[0]
            reader = csv.DictReader(io.StringIO(text))
            rows = [r for r in reader if None not in r.values() and None not in r]
            for row in rows:
                int(row["step"]), row["part"]
        except (ValueError, KeyError, csv.Error) as error:
            reason = f"{type(error).__name__}: {error}"
            raise CheckpointError(f"{self.path}: no table of metrics ({reason}), expected step and part") from None
        self.columns = list(dict.fromkeys([*self.columns, *(reader.fieldnames or ())]))
        return rows

    def _lines(self, rows: list[dict], header: bool = False) -> str:
        text = io.StringIO()
        writer = csv.DictWriter(text, self.columns, restval="", lineterminator="\n")
        if header:
            writer.writeheader()
        writer.writerows(rows)
        return text.getvalue()

    def _rewrite(self, rows: list[dict]) -> None:
        write_atomically(self.path, lambda file: file.write(self._lines(rows, header=True).encode()))


Sink = Callable[[int, Mapping[str, Any]], None]
"""``(step, metrics) -> None``; ``partial`` of ``CsvSink.write`` is one: ``lambda step, m: csv.write(step, "", m)``."""


def fan_out(*sinks: Sink) -> Sink:
    """One sink that feeds several."""

    def write(step: int, metrics: Mapping[str, Any]) -> None:
        for sink in sinks:
            sink(step, metrics)

    return write


def _need(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError:
        raise ImportError(f"{package} is not installed: pip install 'jaxmeth[track]'") from None


def tensorboard_sink(folder: str | Path) -> Sink:
    """Scalars for TensorBoard, through tensorboardX. Raises: ImportError naming the extra ``track``."""
    writer = _need("tensorboardX").SummaryWriter(str(folder))

    def write(step: int, metrics: Mapping[str, Any]) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, float(value), step)
        writer.flush()

    return write


def _tracker(package: str, **arguments: Any) -> Sink:
    run = _need(package).init(**arguments)
    return lambda step, metrics: run.log({name: float(value) for name, value in metrics.items()}, step=step)


def wandb_sink(**arguments: Any) -> Sink:
    """Weights & Biases; the arguments are ``wandb.init``'s. Raises: ImportError naming the extra ``track``."""
    return _tracker("wandb", **arguments)


def trackio_sink(**arguments: Any) -> Sink:
    """Trackio; the arguments are ``trackio.init``'s. Raises: ImportError naming the extra ``track``."""
    return _tracker("trackio", **arguments)
