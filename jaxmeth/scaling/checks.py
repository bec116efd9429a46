"""What a fit refuses, and why: every message names the row and the field.

Row numbers count from 0 as arrays do; a reader of files hands in ``where`` to name lines instead.
"""

from collections.abc import Callable

import numpy as np

from jaxmeth.errors import ConfigError

# Values of one column further apart than this, or with such a hole between neighbours, come from two units.
_SPAN, _HOLE = 1e9, 1e5
# Tokens a parameter, from a large model tuned briefly to a tiny one trained for long.
_RATIO = (1e-5, 1e7)
# The least typical size, over n0: three thousand parameters in counts.
_SMALLEST = 3e-6


def check_points(
    n: np.ndarray,
    d: np.ndarray,
    y: np.ndarray,
    weights: np.ndarray,
    x: np.ndarray | None,
    *,
    free: int,
    law: str,
    n0: float,
    d0: float,
    where: Callable[[int], str] = "row {}".format,
    names: tuple[str, str, str] = ("n", "d", "y"),
) -> None:
    """Refuse data that no fit can mean: see the messages. Rows of weight zero are not looked at, but for weights.

    Raises: ConfigError.
    """
    for name, column in (*zip(names, (n, d, y), strict=True), ("x", x), ("weights", weights)):
        if column is not None and column.shape != n.shape:
            raise ConfigError(f"{name}: found shape {column.shape}, expected {n.shape} as {names[0]}")
    _each(weights, weights >= 0, "weights", where, "at least 0")
    used = np.flatnonzero(weights > 0)
    for name, column in zip(names, (n, d, y), strict=True):
        chosen = np.isin(np.arange(len(n)), used)
        _each(column, ~chosen | (np.isfinite(column) & (column > 0)), name, where, "a finite number above 0")
    if x is not None:
        _each(x, ~np.isin(np.arange(len(n)), used) | np.isfinite(x), "x", where, "a finite number")
    if len(used) < free:
        raise ConfigError(f"{names[2]}: found {len(used)} points, expected at least {free}, the parameters of {law}")
    for name, column in zip(names[:2], (n, d), strict=True):
        if np.unique(column[used]).size < 2:
            only = f"{column[used][0]:g} in all {len(used)} points"
            raise ConfigError(f"{name}: found {only}, expected at least two different values")
    _units(n, d, y, used, n0, d0, where, names)
    _duplicates([v[used] for v in (n, d, y, x) if v is not None], used, where, names)


def _each(column, good, name, where, expected):
    if not good.all():
        row = int(np.flatnonzero(~good)[0])
        raise ConfigError(f"{where(row)}, {name}: found {column[row]:g}, expected {expected}")


def _units(n, d, y, used, n0, d0, where, names):
    """Columns that mix units, or a size in counts beside tokens in billions."""
    for name, column in zip(names, (n, d, y), strict=True):
        rows = used[np.argsort(column[used], kind="stable")]
        values = column[rows]
        hole = int(np.argmax(values[1:] / values[:-1]))
        split = values[hole + 1] / values[hole] >= _HOLE
        if split or values[-1] / values[0] >= _SPAN:
            low, high = (rows[hole], rows[hole + 1]) if split else (rows[0], rows[-1])
            raise ConfigError(
                f"{name}: found {column[low]:g} ({where(low)}) beside {column[high]:g} ({where(high)}), expected one "
                "unit: are counts mixed with billions or millions?"
            )
    sizes, tokens = np.median(n[used]), np.median(d[used])
    ratio = tokens / d0 / (sizes / n0)
    if ratio < _RATIO[0]:
        _suspect(names[1], d[used], f"{ratio:.2g} tokens a parameter")
    if ratio > _RATIO[1]:
        _suspect(names[0], n[used], f"{ratio:.2g} tokens a parameter")
    if sizes / n0 < _SMALLEST:
        _suspect(names[0], n[used], f"below {_SMALLEST * n0:g} parameters")


def _suspect(name, values, why):
    raise ConfigError(
        f"{name}: found {values.min():g} to {values.max():g}, {why}; expected counts: is {name} given in billions or "
        "millions? (n0 and d0 name the units)"
    )


def _duplicates(columns, used, where, names):
    _, first, group = np.unique(np.stack(columns, 1), axis=0, return_index=True, return_inverse=True)
    repeated = np.flatnonzero(first[group.ravel()] != np.arange(len(used)))
    if repeated.size:
        row = int(repeated[0])
        earlier = int(first[group.ravel()[row]])
        raise ConfigError(
            f"{where(used[row])}: found the {', '.join(names)} of {where(used[earlier])} again, "
            "expected each point once (weights count repeats)"
        )
