"""What the judge experiment judges: the real table of three judges, and made data whose law is known."""

import csv
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments import core

JUDGES = ("mistral7b", "gpt35", "gpt4")
LENGTHS = ("instruction_chars", "output1_chars", "output2_chars")


class Rows(NamedTuple):
    """Judged comparisons: views ``s`` [n, T], agreement of the judge in question [n], heuristic confidences by name.

    ``each`` holds (confidence, error) of every judge in order of cost, for cascades; empty where there is one judge.
    """

    s: np.ndarray
    agree: np.ndarray
    heuristics: dict[str, np.ndarray]
    each: list[tuple[np.ndarray, np.ndarray]]


def _rows(probs: np.ndarray, human: np.ndarray, lengths: np.ndarray) -> Rows:
    """From probabilities [n, 3, 2] of the two answers; the last judge is the one in question.

    Everything is seen from its verdict: swapping the answers changes nothing.
    """
    probs = probs / probs.sum(-1, keepdims=True)
    label = probs[:, -1].argmax(1)
    chosen = np.take_along_axis(probs, label[:, None, None], axis=2)[..., 0]
    logs = (np.log1p(lengths) - 6.0) / 2.0  # of the order of one
    better = np.where(label == 0, logs[:, 1], logs[:, 2])
    other = np.where(label == 0, logs[:, 2], logs[:, 1])
    s = np.column_stack([chosen, logs[:, 0], better, other]).astype(np.float32)
    each = [(p.max(1).astype(np.float32), p.argmax(1) != human) for p in np.moveaxis(probs, 1, 0)]
    heuristics = {
        "simulated annotators": chosen[:, -1].astype(np.float32),
        "mean of the judges": chosen.mean(1).astype(np.float32),
    }
    return Rows(s, label == human, heuristics, each)


def read(path: Path) -> Rows:
    """The table of real judge probabilities. Raises: ConfigError naming the file, line and column."""
    names = ["human_label", *(f"{j}_p{k}" for j in JUDGES for k in (1, 2)), *LENGTHS]
    try:
        with open(path, encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            missing = [n for n in names if n not in (reader.fieldnames or ())]
            if missing:
                raise core.ConfigError(f"{path}: found no column {missing[0]}, expected {', '.join(names)}")
            table = []
            for line, row in enumerate(reader, 2):
                table.append([_number(path, line, name, row[name]) for name in names])
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise core.ConfigError(f"{path}: cannot be read ({error}), expected a CSV file") from None
    values = np.array(table).reshape(-1, len(names))
    human, probs, lengths = values[:, 0] - 1, values[:, 1:7].reshape(-1, 3, 2), values[:, 7:]
    empty = np.flatnonzero(~(probs.sum(-1) > 0).all(1))
    if len(empty):
        raise core.ConfigError(f"{path}, line {empty[0] + 2}: found no probability above 0 for a judge, expected one")
    if len(values) < 20:
        raise core.ConfigError(f"{path}: found {len(values)} rows, expected at least 20")
    return _rows(probs, human, lengths)


def _number(path: Path, line: int, name: str, cell: str | None) -> float:
    """The cell as a number of the range of its column."""
    if name == "human_label":
        allowed, said = (1.0, 2.0).__contains__, "1 or 2"
    elif name.endswith(("_p1", "_p2")):
        allowed, said = (lambda v: 0 <= v <= 1), "a probability"
    else:
        allowed, said = (lambda v: 0 <= v < float("inf")), "a count of characters"
    try:
        value = float(cell)
        if allowed(value):
            return value
    except (TypeError, ValueError):
        pass
    raise core.ConfigError(f"{path}, line {line}, column {name}: found {cell!r}, expected {said}")


def made_table(n: int, seed: int) -> Rows:
    """Three made judges of growing skill in place of the real ones: overconfident, with errors in common."""
    rng = np.random.default_rng(seed)
    human = rng.integers(0, 2, n)
    truth, hard = 2.0 * human - 1, rng.normal(size=n)
    logits = np.stack([skill * truth + 0.8 * hard + 1.2 * rng.normal(size=n) for skill in (0.9, 1.0, 1.2)], axis=1)
    second = 1 / (1 + np.exp(-2.5 * logits))
    lengths = np.exp(rng.normal(6, 1, size=(n, 3)))
    return _rows(np.stack([1 - second, second], axis=-1), human, lengths)


def made_views(key: Any, n: int, annotators: int = 5, shots: int = 5):
    """``probs [n, T, 2], human [n]`` of a judge with T = annotators x shots nested views, whose law is known.

    An item has a reliability r, uniform: the judge agrees with the human with probability 0.55 + 0.43 r. The MEAN view
    is as high for the least reliable items as for the most (0.6 + 0.35 |2r - 1|), so the heuristic confidence is not
    monotone. What betrays them: with more examples the views of unreliable items fall, and their annotators differ.
    """
    import jax
    import jax.numpy as jnp

    keys = jax.random.split(key, 5)
    r = jax.random.uniform(keys[0], (n,))
    human = jax.random.bernoulli(keys[1], 0.5, (n,)).astype(jnp.int32)
    agree = jax.random.bernoulli(keys[2], 0.55 + 0.43 * r)
    label = jnp.where(agree, human, 1 - human)
    middle = jnp.arange(shots) - (shots - 1) / 2
    trend = 0.02 * (2 * r - 1)[:, None, None] * middle[None, None]
    apart = 0.12 * (1 - r)[:, None, None] * jax.random.normal(keys[3], (n, annotators, 1))
    noise = 0.06 * jax.random.normal(keys[4], (n, annotators, shots))
    own = 0.6 + 0.35 * jnp.abs(2 * r - 1)[:, None, None] + trend + apart + noise
    own = jnp.clip(own, 0.01, 0.99).reshape(n, -1)
    # The mean view decides the verdict; it must be the label's even where noise is large.
    own = own + jnp.maximum(0.501 - own.mean(1, keepdims=True), 0.0)
    first = jnp.where(label[:, None] == 0, own, 1 - own)
    return jnp.stack([first, 1 - first], axis=-1), human


def made_rows(key: Any, n: int) -> dict[str, Any]:
    """``s, agree`` and the heuristic confidences of made views."""
    from jaxmeth.uncertainty import judge

    probs, human = made_views(key, n)
    s, label = judge.features(probs)
    mean, _ = judge.aggregate_annotators(probs)
    single, _ = judge.aggregate_annotators(probs[:, :1])
    return {"s": s, "agree": label == human, "predictive probability": single, "simulated annotators": mean}
