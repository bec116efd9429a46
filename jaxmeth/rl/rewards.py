"""Rewards from verifiers: rules that judge an answer, on the host."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from jaxtyping import Bool, Float32

from jaxmeth.types import ConfigError


def verify(
    verifier: Callable[[Any, Any], float], answers: Iterable[Iterable[Any]], references: Iterable[Any]
) -> tuple[Float32[np.ndarray, "P G"], Bool[np.ndarray, "P G"]]:
    """Score the G answers of each of P prompts: ``reward = verifier(answer, reference)``.

    A verifier that raises on a malformed answer, or returns None or NaN, leaves that rollout invalid with reward 0; the
    others are untouched. (A malformed answer that should count as wrong must be scored 0 by the verifier itself.)
    Iterators are read once, to their end.

    Returns:
      (rewards, valid), both [P, G].

    Raises:
      ConfigError: another number of references than of prompts, groups of unequal size, no groups at all (None, a
        number), a verifier that is no function.
    """
    if not callable(verifier):
        raise ConfigError(f"verifier: found {verifier!r}, expected a function")
    answers = [_listed("answers", group) for group in _listed("answers", answers)]
    references = _listed("references", references)
    if len(answers) != len(references):
        raise ConfigError(f"references: found {len(references)}, expected {len(answers)}, one a prompt")
    sizes = {len(group) for group in answers}
    if len(sizes) > 1:
        raise ConfigError(f"answers: found groups of {sorted(sizes)}, expected one size")
    rewards = np.full((len(answers), *(sizes or {0})), np.nan, np.float32)
    for row, (group, reference) in enumerate(zip(answers, references, strict=True)):
        for column, answer in enumerate(group):
            rewards[row, column] = _score(verifier, answer, reference)
    valid = np.isfinite(rewards)
    return np.where(valid, rewards, np.float32(0)), valid


def _listed(name: str, values: Any) -> list[Any]:
    try:
        return list(values)
    except TypeError as error:
        raise ConfigError(f"{name}: found {values!r}, expected a list for each prompt") from error


def _score(verifier: Callable[[Any, Any], float], answer: Any, reference: Any) -> float:
    try:
        score = verifier(answer, reference)
        return np.nan if score is None else float(score)
    except Exception:  # whatever a verifier stumbles over is that answer's fault, not the batch's
        return np.nan
