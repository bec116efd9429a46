"""What an experiment module is made of.

A module ``experiments/<name>.py`` holds a docstring (claim, command, expected figure, minutes) and four names::

    ABOUT = core.About(claim="...", minutes={"smoke": 1, "laptop": 12}, needs="SmolLM2-135M", knob="batch")

    @dataclass(frozen=True, kw_only=True)
    class Config(core.Config):
        batch: int = 64
        \"\"\"Answers decoded at once; every field has such a docstring: they are the ``--help``.\"\"\"

        def __post_init__(self):
            super().__post_init__()
            self.require(batch=(1, None))

    PRESETS = {"smoke": Config(batch=8), "laptop": Config(), "paper": Config(batch=512)}

    def run(cfg: Config, folder: core.RunDir | None = None) -> core.Result:
        folder = folder or core.RunDir()  # from Python: in memory
        ...

    if __name__ == "__main__":
        core.main(__file__)

The list and every ``--help`` read ``ABOUT`` without importing the module, and ``Config`` without importing JAX: import
JAX and jaxmeth inside ``run`` and the functions it calls. The arguments of ``ABOUT`` are literals.
"""

import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import numpy as np

from experiments.rundir import RunDir
from jaxmeth.errors import ConfigError

__all__ = [
    "About",
    "Claim",
    "Config",
    "Estimate",
    "Result",
    "RunDir",
    "bootstrap_interval",
    "data_file",
    "main",
    "progress",
]

T = TypeVar("T")
Rows = list[dict[str, Any]]


def main(name: str | None = None, argv: list[str] | None = None) -> None:
    """Run the command line and exit; ``name`` (or a module's ``__file__``) makes it ``run <name>``."""
    from experiments import cli

    cli.main(argv, name=Path(name).stem if name else None)


@dataclass(frozen=True, kw_only=True)
class About:
    """What the list shows. ``minutes`` by preset, measured on two cores; ``needs`` in a few words.

    ``knob`` names the ``Config`` field to lower when memory runs out.
    """

    claim: str
    minutes: Mapping[str, float] = field(default_factory=dict)
    needs: str = "nothing"
    knob: str = ""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Base of every experiment's configuration."""

    seed: int = 0
    """Seed of every random draw."""

    def __post_init__(self):
        self.require(seed=(0, 2**32 - 1))

    def require(self, **bounds: tuple[float | None, float | None]) -> None:
        """Check ``field=(low, high)``, ends included, ``None`` for no bound; NaN never passes, an unset field does.

        Raises: ConfigError naming the field, what was found and what was expected.
        """
        for name, (low, high) in bounds.items():
            found = getattr(self, name)
            for value in found if isinstance(found, tuple | list) else (found,):
                inside = value is None or ((low is None or value >= low) and (high is None or value <= high))
                if inside and value == value:
                    continue
                expected = f"at least {low:g}" if high is None else f"at most {high:g}"
                if low is not None and high is not None:
                    expected = f"{low:g} to {high:g}"
                raise ConfigError(f"{name}: found {value}, expected {expected}")


class Estimate(NamedTuple):
    """A statistic with its interval; a table cell shows it as ``0.743 [0.701, 0.780]``."""

    value: Any
    lo: Any
    hi: Any


Comparison = Literal[">=", "<=", ">", "<"]
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    ">=": lambda x, t: x >= t,
    "<=": lambda x, t: x <= t,
    ">": lambda x, t: x > t,
    "<": lambda x, t: x < t,
}


@dataclass(frozen=True)
class Claim:
    """One claim of a spec and what was measured: ``measured <comparison> threshold``.

    With an interval the claim holds when the whole interval satisfies it, does not when none of it does, and is
    undecided between; without one the measured value decides. A measured NaN is undecided. ``measured`` may be an
    ``Estimate``, which brings its interval.
    """

    statement: str
    measured: Any
    comparison: Comparison
    threshold: float
    interval: tuple[float, float] | None = None

    def __post_init__(self):
        if self.comparison not in _COMPARE:
            raise ValueError(f"comparison: found {self.comparison!r}, expected one of {', '.join(_COMPARE)}")
        measured, interval = self.measured, self.interval
        if isinstance(measured, Estimate):
            measured, interval = measured.value, (measured.lo, measured.hi)
        object.__setattr__(self, "measured", float(measured))
        object.__setattr__(self, "interval", None if interval is None else (float(interval[0]), float(interval[1])))
        object.__setattr__(self, "threshold", float(self.threshold))

    @property
    def holds(self) -> Literal["yes", "no", "undecided"]:
        """The verdict; never rounded and never loosened."""
        values = (self.measured,) if self.interval is None else self.interval
        if math.isnan(self.measured) or any(math.isnan(v) for v in values):
            return "undecided"
        verdicts = {_COMPARE[self.comparison](v, self.threshold) for v in values}
        return "undecided" if len(verdicts) == 2 else "yes" if verdicts.pop() else "no"


@dataclass(frozen=True)
class Result:
    """What ``run`` returns.

    ``rows``: every baseline side by side, one dict a row, or a dict of such tables by title; a cell is a number, a
    string, ``None`` or an ``Estimate``. ``figures``: name -> a function that draws on an empty matplotlib ``Figure``
    (``ax = figure.subplots()``), or a finished ``Figure``; functions are never called where matplotlib is missing.
    ``notes``: sentences that a reader of the table needs (which data, what the paper used).
    """

    rows: Rows | dict[str, Rows]
    claims: Iterable[Claim] = ()
    figures: Mapping[str, Any] = field(default_factory=dict)
    notes: Iterable[str] = ()

    def tables(self) -> dict[str, Rows]:
        """The rows by title; the only table has the title ''."""
        return self.rows if isinstance(self.rows, dict) else {"": self.rows}


def bootstrap_interval(
    statistic: Callable[..., Any],
    *arrays: Any,
    resamples: int = 2000,
    level: float = 0.95,
    seed: int = 0,
    batched: bool = False,
) -> Estimate:
    """Percentile bootstrap interval of ``statistic(*arrays)`` over the shared first axis (n items): a paired bootstrap.

    Every array is resampled by the same indices, so a difference of two methods is an interval of paired differences;
    a statistic that returns a vector [k] gives k intervals from the same resamples (lo, hi [k], float64).
    ``batched=True`` hands over stacks ``[r, n, ...]`` and takes ``[r]`` or ``[r, k]`` back, for a vmapped statistic
    (r takes at most three values: a jitted one is traced at most three times). Resamples where the statistic is NaN
    (a class is missing) are left out; where more than half are, the interval is NaN. An infinite statistic counts, so
    an end of the interval may be infinite. n = 0: ConfigError.
    Reference: Efron and Tibshirani, An Introduction to the Bootstrap, chapter 13.
    """
    data = [np.asarray(a) for a in arrays]
    n = len(data[0]) if data and data[0].ndim else 0
    if n == 0 or resamples < 1 or not 0 < level < 1:
        found = f"n={n}, resamples={resamples}, level={level}"
        raise ConfigError(f"bootstrap: found {found}, expected n and resamples of at least 1, level in (0, 1)")
    if any(len(a) != n for a in data):
        raise ConfigError(f"bootstrap: arrays of lengths {[len(a) for a in data]}, expected equal")
    rng = np.random.default_rng(seed)
    draws = []
    for start in range(0, resamples, 100):
        index = rng.integers(0, n, size=(min(100, resamples - start), n))
        if batched:
            draws.append(np.asarray(statistic(*(a[index] for a in data)), dtype=np.float64))
        else:
            draws.append(np.asarray([statistic(*(a[i] for a in data)) for i in index], dtype=np.float64))
    value = np.asarray(statistic(*(a[None] for a in data))[0] if batched else statistic(*data), dtype=np.float64)
    drawn = np.concatenate(draws)
    bad = np.isnan(drawn)
    usable = bad.mean(axis=0) <= 0.5
    drawn = np.where(bad & ~usable, 0.0, drawn)  # keeps an all-NaN column out of nanquantile; masked just below
    # Between two infinities there is no line: they stand in as numbers, and what is near one is one.
    most = np.finfo(np.float64).max / 4
    ends = np.nanquantile(np.clip(drawn, -most, most), [(1 - level) / 2, (1 + level) / 2], axis=0)
    lo, hi = np.where(np.abs(ends) > most / 1e9, np.copysign(np.inf, ends), ends)
    lo, hi = np.where(usable, lo, np.nan), np.where(usable, hi, np.nan)
    return Estimate(float(value), float(lo), float(hi)) if value.ndim == 0 else Estimate(value, lo, hi)


def data_root(data: str | os.PathLike | None = None) -> Path | None:
    """The folder of real extracts: ``data`` (the ``--data`` option), else ``JAXMETH_DATA``, else None."""
    root = data or os.environ.get("JAXMETH_DATA")
    return Path(root) if root else None


def data_folder() -> Path | None:
    """``JAXMETH_DATA`` made absolute: part of a run's identity, as runs with and without it differ."""
    root = data_root()
    return root and root.resolve()


def data_file(method_folder: str, file: str, data: str | os.PathLike | None = None) -> Path | None:
    """``<root>/<method_folder>/<file>``, or None when neither ``--data`` nor ``JAXMETH_DATA`` is set.

    Raises: ConfigError when a root is set but lacks the file: a run never falls back to other data silently.
    """
    root = data_root(data)
    if root is None:
        return None
    path = root / method_folder / file
    if not path.is_file():
        source = "--data" if data else "JAXMETH_DATA"
        raise ConfigError(f"{source}: found no file {method_folder}/{file} in {root}, expected one there")
    return path


class progress(Generic[T]):
    """Iterate with a progress bar on a terminal, and at most a line every ten seconds elsewhere.

    ``bar = progress(items, description="train")``; ``bar.note("loss 2.31")`` inside the loop shows beside it.
    """

    interval = 10.0

    def __init__(self, iterable: Iterable[T], total: int | None = None, description: str = "working"):
        self._items = iterable
        self._total = len(iterable) if total is None and hasattr(iterable, "__len__") else total
        self._description = description
        self._note = ""

    def note(self, text: str) -> None:
        """Show ``text`` beside the bar."""
        self._note = text

    def __iter__(self) -> Iterator[T]:
        return self._bar() if sys.stderr.isatty() else self._lines()

    def _bar(self) -> Iterator[T]:
        from rich import progress as bars
        from rich.console import Console

        columns = (
            bars.TextColumn("{task.description}", style="bold"),
            bars.BarColumn(bar_width=None),
            bars.MofNCompleteColumn(),
            bars.TimeElapsedColumn(),
            bars.TextColumn("left"),
            bars.TimeRemainingColumn(),
            bars.TextColumn("{task.fields[note]}", style="dim"),
        )
        with bars.Progress(*columns, console=Console(stderr=True), transient=True) as shown:
            task = shown.add_task(self._description, total=self._total, note="")
            for item in self._items:
                yield item
                shown.update(task, advance=1, note=self._note)

    def _lines(self) -> Iterator[T]:
        start = said = time.monotonic()
        done = 0
        for item in self._items:
            yield item
            done += 1
            now = time.monotonic()
            if now - said >= self.interval:
                said = now
                self._say(done, now - start)
        if said != start:
            self._say(done, time.monotonic() - start)

    def _say(self, done: int, seconds: float) -> None:
        line = f"{self._description}: {done}" + (f" of {self._total}" if self._total else "") + f", {seconds:.0f} s"
        if self._total and done < self._total:
            line += f", about {seconds / done * (self._total - done):.0f} s left"
        print(line + (f", {self._note}" if self._note else ""), file=sys.stderr, flush=True)
