"""What the DHSA experiment reads: windows of a text, and prompts with a number hidden in them."""

from typing import Any

import numpy as np

from experiments import core, perq_text


def corpus(cfg: core.Config, tokenizer: Any) -> tuple[np.ndarray, str]:
    """Tokens of ``cfg.text``, or of Python's help topics, and what they are."""
    if cfg.text:
        try:
            text, source = cfg.text.read_text(encoding="utf-8"), cfg.text.name
        except (OSError, UnicodeDecodeError) as error:
            raise core.ConfigError(f"text: cannot read {cfg.text} ({error}), expected a text file") from None
    else:
        text, source = perq_text.help_topics()
    return np.asarray(tokenizer.encode(text).ids, np.int32), source


def windows(ids: np.ndarray, count: int, length: int, part: slice = slice(None)) -> np.ndarray:
    """``count`` windows spread evenly over the text."""
    if len(ids) < length:
        raise core.ConfigError(f"text: found {len(ids)} tokens, expected at least {length}")
    starts = np.linspace(0, len(ids) - length, count + 1).astype(int)[1:]
    return np.stack([ids[s : s + length] for s in starts[part]])


def needles(cfg: core.Config, tokenizer: Any, ids: np.ndarray) -> tuple[np.ndarray, list[str]]:
    """Prompts [depths x needles, length], a number at each depth of a text, a question at the end; the numbers.

    Raises: ConfigError where the text is shorter than a prompt.
    """
    rng = np.random.default_rng(cfg.seed)
    encode = lambda text: np.asarray(tokenizer.encode(text).ids, np.int32)  # noqa: E731
    question = encode("\nQuestion: What is the secret number?\nAnswer: The secret number is")
    prompts, answers = [], []
    for depth in np.linspace(0, 1, cfg.depths):
        for _ in range(cfg.needles):
            number = str(rng.integers(1000, 10000))
            needle = encode(f"\nThe secret number is {number}. Remember it.\n")
            room = cfg.needle_length - len(question) - len(needle)
            if len(ids) <= room:
                raise core.ConfigError(f"text: found {len(ids)} tokens, expected more than {room} (needle_length)")
            start = rng.integers(0, len(ids) - room)
            filler, at = ids[start : start + room], int(depth * room)
            prompts.append(np.concatenate([filler[:at], needle, filler[at:], question]))
            answers.append(number)
    return np.stack(prompts), answers
