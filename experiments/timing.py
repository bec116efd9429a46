"""Seconds of calls that take turns, and the memory of a process: what benches and experiments measure with."""

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np


def interleaved(calls: Mapping[str, Callable[[], object]], rounds: int, uncounted: int = 1) -> dict[str, np.ndarray]:
    """Seconds of each call in each counted round, taken in turns so that all meet the same load.

    The order turns with the rounds, so that no call always follows the same one; the first ``uncounted`` compile.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for turn in range(rounds + uncounted):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            start = time.perf_counter()
            calls[name]()
            if turn >= uncounted:
                seconds[name].append(time.perf_counter() - start)
    return {name: np.array(values) for name, values in seconds.items()}


def peak_megabytes() -> float:
    """The most memory that this process has held, MiB."""
    if sys.platform == "linux":  # ru_maxrss would count a parent's
        return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) / 2**10
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
