"""Tables of losses by model size and tokens: the published ones that travel with the code, and a user's own CSV.

``data`` in the functions below is the folder of real extracts, else JAXMETH_DATA, else the packaged copies are read.
"""

import csv
from pathlib import Path
from typing import NamedTuple

import numpy as np

from experiments import core

FOLDER = "10-shannon-scaling-law"
PACKAGED = Path(__file__).parent / "data" / "shannon"
# Earlier checkpoints are warm-up, not a power law (the README of the tables).
FIRST_STEP = 3000
COLUMNS = ("n", "d", "loss")


class Table(NamedTuple):
    """One row a trained model or checkpoint: parameters n, tokens d (counts), loss y (nats); ``lines`` in the file.

    ``group`` splits a table into separate surfaces (a training set, a perturbation); ``run`` says which points come
    from one training run, or None where each is its own.
    """

    name: str
    n: np.ndarray
    d: np.ndarray
    y: np.ndarray
    group: np.ndarray
    run: np.ndarray | None
    lines: np.ndarray

    def where(self, row: int) -> str:
        """How messages name a row; the table's name goes before them."""
        return f"line {self.lines[row]}"

    def take(self, chosen: np.ndarray, name: str | None = None) -> "Table":
        """The chosen rows."""
        run = None if self.run is None else self.run[chosen]
        columns = (v[chosen] for v in (self.n, self.d, self.y, self.group))
        return Table(name or self.name, *columns, run, self.lines[chosen])


def read(path: Path, n: str = "n", d: str = "d", loss: str = "loss", group: str | None = "group") -> tuple[Table, list]:
    """A CSV with a header as a table, and its rows as dicts; the group column may be missing.

    Raises: ConfigError naming file, line and column: a missing column, a cell that is no number above 0, no rows.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise core.ConfigError(f"{path}: cannot be read ({error}), expected a CSV file in UTF-8") from None
    reader = csv.DictReader(text.splitlines())
    found = [name.strip() for name in reader.fieldnames or ()]
    reader.fieldnames = found
    for name in (n, d, loss):
        if name not in found:
            raise core.ConfigError(
                f"{path.name}, line 1: found columns {', '.join(found) or 'none'}, expected a column {name!r} "
                f"(columns {n}, {d}, {loss} and optionally {group or 'group'})"
            )
    rows, lines = [], []
    for row in reader:
        if None in row or any(v is None for v in row.values()):
            count = sum(v is not None for k, v in row.items() if k is not None) + len(row.get(None, ()))
            raise core.ConfigError(
                f"{path.name}, line {reader.line_num}: found {count} cells, expected {len(found)} as in line 1"
            )
        rows.append(row)
        lines.append(reader.line_num)
    if not rows:
        raise core.ConfigError(f"{path.name}: found no rows below the header, expected at least one")
    columns = [
        np.array([_number(path, line, name, row[name]) for row, line in zip(rows, lines, strict=True)])
        for name in (n, d, loss)
    ]
    labels = np.array([(row[group] or "").strip() if group in found else "" for row in rows])
    return Table(path.name, *columns, labels, None, np.array(lines)), rows


def _number(path: Path, line: int, column: str, cell: str) -> float:
    try:
        value = float(cell)
    except ValueError:
        value = np.nan
    if not (np.isfinite(value) and value > 0):
        raise core.ConfigError(f"{path.name}, line {line}, column {column}: found {cell!r}, expected a number above 0")
    return value


def _path(file: str, data: Path | None) -> Path:
    return core.data_file(FOLDER, file, data) or PACKAGED / file


def pythia(deduped: bool, data: Path | None = None) -> Table:
    """Pythia on LAMBADA, zero-shot, from step 3,000 on: 8 sizes of 15 checkpoints; the 1B exists only as deduped."""
    table, rows = _pythia_rows(data)
    keep = [
        row["shots"] == "0"
        and int(row["step"]) >= FIRST_STEP
        and (row["model"] == "1b" or (row["deduped"] == "1") == deduped)
        for row in rows
    ]
    models = np.array([row["model"] for row in rows])
    name = f"Pythia {'deduped' if deduped else 'standard'}"
    return table._replace(run=models).take(np.array(keep), name)


def _pythia_rows(data: Path | None) -> tuple[Table, list]:
    path = _path("pythia_lambada.csv", data)
    with path.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    # Step 0 has no tokens, so the general reader, which wants positive cells, does not fit.
    columns = (np.array([float(row[k]) for row in rows]) for k in ("n_nonembed", "tokens", "lambada_nll"))
    return Table(path.name, *columns, np.full(len(rows), ""), None, np.arange(2, len(rows) + 2)), rows


def repetition(data: Path | None = None) -> Table:
    """Runs with repeated data; groups by the number of unique tokens."""
    path = _path("data_repetition.csv", data)
    table, _ = read(path, "n_params", "tokens", "val_loss", "unique_tokens")
    return table._replace(name="Data repetition")


def chinchilla(data: Path | None = None) -> Table:
    """The points of Chinchilla's figure 4."""
    table, _ = read(_path("chinchilla_fig4.csv", data), "n_params", "tokens_c_over_6n", "loss", None)
    return table._replace(name="Chinchilla figure 4")


def overtraining(data: Path | None = None) -> Table:
    """Overtrained models, loss on C4; groups by the training set."""
    table, _ = read(_path("overtraining_104.csv", data), "n_nonembed", "tokens", "loss_c4", "dataset")
    return table._replace(name="Overtraining")


def groups(table: Table) -> list[Table]:
    """One table a group; a table without groups is one."""
    labels = list(dict.fromkeys(table.group))
    if len(labels) == 1:
        return [table]
    return [table.take(table.group == g, f"{table.name} {g or '(no group)'}") for g in labels]
