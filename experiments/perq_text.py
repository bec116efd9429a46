"""Calibration and evaluation text of the PeRQ experiment: disjoint ends of Python's own help topics."""

import hashlib
from pathlib import Path

import numpy as np

from experiments import core

CHARACTERS = {"calibration.txt": 60_000, "eval.txt": 100_000}


def help_topics() -> tuple[str, str]:
    """Python's own help topics as one text, and what to call it."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics)), "help topics of this Python (pydoc_data.topics)"


def texts(data: Path | None) -> tuple[tuple[str, str], str]:
    """``((calibration, evaluation), source)``: files of a data folder, or built from the standard library.

    Raises: ConfigError where a data folder is named but lacks a file.
    """
    paths = [core.data_file("09-perq", name, data) for name in CHARACTERS]
    if all(paths):
        found = tuple(p.read_text(encoding="utf-8") for p in paths)
        source = "09-perq, calibration.txt and eval.txt"
    else:
        whole, source = help_topics()
        first, last = CHARACTERS.values()
        found = whole[:first], whole[-last:]
    digest = hashlib.sha256("\0".join(found).encode()).hexdigest()[:12]
    return found, f"{source}, sha256 {digest}"


def windows(tokenizer, text: str, count: int, window: int, name: str) -> np.ndarray:
    """The first ``count`` tokens (or all there are) as whole windows [n, T]; one shorter window where they make none.

    Raises: ConfigError where the text has fewer than two tokens.
    """
    ids = np.asarray(tokenizer.encode(text).ids[:count], np.int32)
    if len(ids) < 2:
        raise core.ConfigError(f"{name}: found {len(ids)} tokens, expected at least 2")
    window = min(window, len(ids))
    return ids[: len(ids) // window * window].reshape(-1, window)
