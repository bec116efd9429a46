"""Verifiable tasks for the reinforcement-learning experiments, as characters: generators, pools and verifiers.

=============== ================== ===============================================================
task            prompt             right answer
=============== ================== ===============================================================
chain_sum       ``67+75-8=``       ``134``; with running sums ``142,134``: what follows the last comma counts
letter_counting ``e:seven tree=``  ``4``
spell_backward  ``<stadia=``       ``aidats``
countdown       ``15,10,5>30=``    any of + - * / on each number at most once that gives 30, no brackets
=============== ================== ===============================================================

An answer ends with ``END``. One that never ends, or is malformed in whatever way, is wrong: verifiers never raise.
Problems are made here; the held-out ones and those to train on come from ``00-rl-core/reasoning_tasks.json`` instead
where ``--data`` or ``JAXMETH_DATA`` is given (made with reasoning-gym; too long ones are left out).
"""

import ast
import json
import operator
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments import core
from jaxmeth.errors import ConfigError

TASKS = ("chain_sum", "letter_counting", "spell_backward", "countdown")
PAD, END = 0, 1
CHARACTERS = "0123456789+-*/()=,><: abcdefghijklmnopqrstuvwxyz"
VOCABULARY = 2 + len(CHARACTERS)
PROMPT, ANSWER = 24, 12
"""Most characters of a prompt, and of an answer with its end."""
_IDS = {c: i + 2 for i, c in enumerate(CHARACTERS)}
COMMA = _IDS[","]
_NUMBERS = 3


class Problem(NamedTuple):
    """One problem; ``numbers`` and ``target`` are of countdown, ``question`` is the wording for a chat model."""

    task: str
    prompt: str
    answer: str
    question: str = ""
    numbers: tuple[int, ...] = ()
    target: int = 0


class Problems(NamedTuple):
    """Problems as arrays [X, ...]: prompts padded on the left, answers and their last part padded on the right."""

    prompt: Any
    prompt_mask: Any
    answer: Any
    final: Any
    numbers: Any
    target: Any
    countdown: Any


def encode(text: str) -> list[int]:
    """Character ids. Raises: ConfigError naming a character that is not in the vocabulary."""
    unknown = sorted(set(text) - set(CHARACTERS))
    if unknown:
        raise ConfigError(f"text: found {unknown[0]!r} in {text!r}, expected characters of {CHARACTERS!r}")
    return [_IDS[c] for c in text]


def decode(ids: Sequence[int]) -> str:
    """The text up to ``END``; padding vanishes."""
    shown = []
    for i in ids:
        if i == END:
            break
        shown.append("" if i == PAD else CHARACTERS[i - 2])
    return "".join(shown)


# --- making problems -------------------------------------------------------------------------------------------------


def _chain_sum(rng: np.random.Generator, terms: int, digits: int, steps: bool) -> Problem:
    values = rng.integers(1, 10 ** rng.integers(1, digits + 1, terms), endpoint=False).tolist()
    signs = [1, *rng.choice([1, -1], terms - 1).tolist()]
    sums = np.cumsum(np.multiply(values, signs)).tolist()
    shown = str(values[0]) + "".join(f"{'+' if s > 0 else '-'}{v}" for s, v in zip(signs[1:], values[1:], strict=True))
    answer = ",".join(map(str, sums[1:])) if steps else str(sums[-1])
    return Problem("chain_sum", shown + "=", answer, f"What is {shown}? Answer with the number only.")


def _word(rng: np.random.Generator, low: int, high: int) -> str:
    """Consonants and vowels in turns."""
    length, start = int(rng.integers(low, high + 1)), int(rng.integers(2))
    return "".join(str(rng.choice(list("aeiou" if (i + start) % 2 else "bdfglmnprst"))) for i in range(length))


def _letter_counting(rng: np.random.Generator) -> Problem:
    text = " ".join(_word(rng, 2, 6) for _ in range(int(rng.integers(2, 4))))
    letter = str(rng.choice(sorted(set(text) - {" "})))
    question = f'How often does the letter "{letter}" occur in "{text}"? Answer with the number only.'
    return Problem("letter_counting", f"{letter}:{text}=", str(text.count(letter)), question)


def _spell_backward(rng: np.random.Generator) -> Problem:
    word = _word(rng, 3, 6)
    return Problem("spell_backward", f"<{word}=", word[::-1], f"Spell the word {word} backward. Answer with it only.")


def _countdown(rng: np.random.Generator) -> Problem:
    while True:
        numbers = rng.integers(1, 31, _NUMBERS).tolist()
        order = rng.permutation(_NUMBERS)
        expression = str(numbers[order[0]])
        for place in order[1 : int(rng.integers(2, _NUMBERS + 1))]:
            expression += f"{rng.choice(list('+-*'))}{numbers[place]}"
        target = evaluate(expression)
        if target is not None and 1 <= target <= 99:
            shown = ",".join(map(str, numbers))
            question = f"Make {int(target)} out of {shown}, each used at most once. Answer with the expression only."
            return Problem("countdown", f"{shown}>{int(target)}=", expression, question, tuple(numbers), int(target))


def make(
    task: str, count: int, rng: np.random.Generator, *, terms: int = 2, digits: int = 2, steps: bool = False
) -> list[Problem]:
    """Problems of a task (``mixed``: of all in turns); they may repeat. Raises: ConfigError for an unknown task."""
    makers: dict[str, Callable[[], Problem]] = {
        "chain_sum": lambda: _chain_sum(rng, terms, digits, steps),
        "letter_counting": lambda: _letter_counting(rng),
        "spell_backward": lambda: _spell_backward(rng),
        "countdown": lambda: _countdown(rng),
    }
    names = TASKS if task == "mixed" else (task,)
    if task != "mixed" and task not in makers:
        raise ConfigError(f"task: found {task!r}, expected one of {', '.join((*TASKS, 'mixed'))}")
    return [makers[names[i % len(names)]]() for i in range(count)]


def widest(terms: int, digits: int, steps: bool) -> tuple[int, int]:
    """Most characters of a sum's prompt and of its answer: all numbers but the first subtracted, each of nines."""
    sums = [str(1 - i * (10**digits - 1)) for i in range(1, terms)]
    return terms * (digits + 1), len(",".join(sums) if steps else sums[-1])


def fits(problem: Problem) -> bool:
    """Whether it is short enough and made of known characters."""
    known = not set(problem.prompt + problem.answer) - set(CHARACTERS)
    return known and len(problem.prompt) <= PROMPT and len(problem.answer) < ANSWER


_READ = {
    "chain_sum": re.compile(r":\s*([-+0-9 ]+)="),
    "letter_counting": re.compile(r'letter "(.)" appear in the text: "(.*)"'),
    "spell_backward": re.compile(r":\s*(\S+)\s*$"),
}


def _compact(task: str, item: dict[str, Any]) -> Problem:
    question, answer = item["q"], str(item["a"]).strip()
    if task == "countdown":
        numbers, target = tuple(int(n) for n in item["numbers"]), int(item["target"])
        prompt = ",".join(map(str, numbers)) + f">{target}="
        return Problem(task, prompt, answer.replace(" ", ""), question, numbers, target)
    found = _READ[task].search(question)
    if found is None:
        raise ValueError(f"question {question!r}")
    if task == "chain_sum":
        return Problem(task, found[1].replace(" ", "") + "=", answer, question)
    if task == "letter_counting":
        return Problem(task, f"{found[1]}:{found[2]}=".lower(), answer, question)
    return Problem(task, f"<{found[1]}=".lower(), answer.lower(), question)


def read(path: Path, task: str, split: str) -> list[Problem]:
    """The problems of a file of reasoning tasks that fit. Raises: ConfigError naming the file and what it lacks."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        names = TASKS if task == "mixed" else (task,)
        problems = [_compact(name, item) for name in names for item in stored[name][split]]
    except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: found no problems of {task} ({error!r}), expected reasoning tasks") from None
    kept = [p for p in problems if fits(p)]
    # Brackets are not in the grammar of the tokens' verifier.
    return [p for p in kept if p.task != "countdown" or evaluate(p.answer) == p.target]


def pools(
    task: str,
    train: int,
    test: int,
    *,
    seed: int,
    data: Path | None = None,
    terms: int = 2,
    digits: int = 2,
    steps: bool = False,
    least: int = 1,
) -> tuple[list[Problem], list[Problem]]:
    """Distinct problems to train on and held-out ones that none of them equals; of a file fewer where it has no more.

    Raises: ConfigError for an unknown task, where fewer can be made than asked for, or where a file leaves fewer than
    ``least`` to train on or none to hold out.
    """
    rng = np.random.default_rng([seed, 1])
    path = core.data_file("00-rl-core", "reasoning_tasks.json", data)
    if path:
        sources = [read(path, task, split) for split in ("test", "train")]
        sources = [[s[i] for i in rng.permutation(len(s))] for s in sources]
    else:
        made = make(task, 4 * (train + test), rng, terms=terms, digits=digits, steps=steps)
        sources = [made, made]
    held = list({p.prompt: p for p in sources[0]}.values())[:test]
    taken = {p.prompt for p in held}
    kept = list({p.prompt: p for p in sources[1] if p.prompt not in taken}.values())[:train]
    wanted = (least, 1) if path else (train, test)
    if len(kept) < wanted[0] or len(held) < wanted[1]:
        found = f"{len(kept)} different problems of {task} beside {len(held)} held out"
        raise ConfigError(f"train_problems: found {found}, expected at least {wanted[0]} and {wanted[1]}")
    return kept, held


def _right(ids: Sequence[Sequence[int]], width: int) -> np.ndarray:
    out = np.full((len(ids), width), PAD, np.int32)
    for row, these in enumerate(ids):
        out[row, : len(these)] = these
    return out


def stack(problems: Sequence[Problem]) -> Problems:
    """As arrays. Raises: ConfigError for a problem that is too long."""
    for p in problems:
        if not fits(p):
            raise ConfigError(f"problem: found {p.prompt!r} -> {p.answer!r}, expected up to {PROMPT} and {ANSWER - 1}")
    prompt = np.full((len(problems), PROMPT), PAD, np.int32)
    for row, p in enumerate(problems):
        prompt[row, PROMPT - len(p.prompt) :] = encode(p.prompt)
    prompt = prompt[:, PROMPT - max(len(p.prompt) for p in problems) :]
    numbers = np.full((len(problems), _NUMBERS), -1, np.int32)
    for row, p in enumerate(problems):
        numbers[row, : len(p.numbers)] = p.numbers[:_NUMBERS]
    answers = [[*encode(p.answer), END] for p in problems]
    finals = [[*encode(p.answer.rsplit(",", 1)[-1]), END] for p in problems]
    longest = max(len(a) for a in answers)
    return Problems(
        prompt=prompt,
        prompt_mask=prompt != PAD,
        answer=_right(answers, longest),
        final=_right(finals, longest),
        numbers=numbers,
        target=np.array([p.target for p in problems], np.int32),
        countdown=np.array([p.task == "countdown" for p in problems]),
    )


# --- verifiers -------------------------------------------------------------------------------------------------------


def correct(problems: Problems, tokens: Any, mask: Any) -> Any:
    """Whether each answer [N, T] to its problem [N, ...] is right: bool[N], on the device, also under ``jit``."""
    import jax.numpy as jnp

    end = mask & (tokens == END)
    ended = end.any(1)
    stop = jnp.argmax(end, axis=1)
    place = jnp.arange(tokens.shape[1])
    comma = jnp.where((tokens == COMMA) & (place[None] < stop[:, None]), place[None] + 1, 0).max(1)
    at = comma[:, None] + jnp.arange(problems.final.shape[1])[None]
    last = jnp.take_along_axis(tokens, jnp.minimum(at, tokens.shape[1] - 1), axis=1)
    same = jnp.where(problems.final != PAD, (last == problems.final) & (at < tokens.shape[1]), True).all(1)
    hit = _reaches(problems, tokens, place[None] < stop[:, None])
    return ended & jnp.where(problems.countdown, hit, same)


class _Reader(NamedTuple):
    """An expression read so far: sum, current product, number being read, what joins it, numbers used, still valid."""

    total: Any
    term: Any
    number: Any
    digits: Any
    joined: Any
    used: Any
    valid: Any


def _reaches(problems: Problems, tokens: Any, inside: Any) -> Any:
    """Countdown's verifier: one pass over the characters, products before sums, exact division only."""
    import jax
    import jax.numpy as jnp

    rows = tokens.shape[0]
    zero = jnp.zeros((rows,), jnp.int32)
    plus, minus, times, over = (_IDS[c] for c in "+-*/")
    # The open product starts as +1 x the first number; a sign opens a new one.
    start = _Reader(zero, zero + 1, zero, zero, zero + times, jnp.zeros(problems.numbers.shape, bool), zero == 0)

    def close(r: _Reader) -> _Reader:
        """Take the number just read into the product, and mark it used."""
        free = (problems.numbers == r.number[:, None]) & ~r.used
        first = free & (jnp.cumsum(free, axis=1) == 1)
        exact = (r.number > 0) & (r.term % jnp.maximum(r.number, 1) == 0)
        term = jnp.where(r.joined == over, r.term // jnp.maximum(r.number, 1), r.term * r.number)
        valid = r.valid & (r.digits > 0) & free.any(1) & ((r.joined != over) | exact)
        return r._replace(term=jnp.clip(term, -(10**6), 10**6), used=r.used | first, valid=valid)

    def read(r: _Reader, x: tuple[Any, Any]) -> tuple[_Reader, None]:
        token, here = x
        digit = token - _IDS["0"]
        is_digit = (digit >= 0) & (digit <= 9)
        sign = (token == plus) | (token == minus)
        joiner = (token == times) | (token == over)
        closed = close(r)
        total = jnp.where(sign, closed.total + closed.term, closed.total)
        term = jnp.where(sign, jnp.where(token == minus, -1, 1), closed.term)
        on_sign = _Reader(
            total, term, zero, zero, jnp.where(sign, times, token).astype(jnp.int32), closed.used, closed.valid
        )
        on_digit = r._replace(number=r.number * 10 + digit, digits=r.digits + 1, valid=r.valid & (r.digits < 3))

        def pick(a: Any, b: Any, old: Any) -> Any:
            shape = (rows,) + (1,) * (old.ndim - 1)
            chosen = jnp.where(is_digit.reshape(shape), a, b)
            return jnp.where(here.reshape(shape), chosen, old)

        new = jax.tree.map(pick, on_digit, on_sign, r)
        return new._replace(valid=new.valid & (~here | is_digit | sign | joiner)), None

    last = close(jax.lax.scan(read, start, (tokens.T, inside.T))[0])
    return last.valid & (last.total + last.term == problems.target)


_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def _value(node: ast.AST, used: list[int]) -> Fraction:
    if isinstance(node, ast.Expression):
        return _value(node.body, used)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left, used), _value(node.right, used))
    if isinstance(node, ast.Constant) and type(node.value) is int and node.value < 1000:
        used.append(node.value)
        return Fraction(node.value)
    raise ValueError("not an expression of numbers")


def evaluate(expression: str, numbers: Sequence[int] | None = None) -> Fraction | None:
    """The value of an expression of whole numbers with + - * / and, with ``numbers`` given, brackets.

    None where it is malformed, divides by zero, or uses a number that is not (any more) in ``numbers``.
    """
    if len(expression) > 64 or (numbers is None and set(expression) & set("() ")):
        return None
    used: list[int] = []
    try:
        value = _value(ast.parse(expression.strip(), mode="eval"), used)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None
    left = list(numbers if numbers is not None else used)
    for number in used:
        if number not in left:
            return None
        left.remove(number)
    return value


def stated(answer: str, problem: Problem) -> str:
    """What a chat model's answer comes down to: its last number or word, or its longest expression; '' = nothing."""
    text = answer.strip().lower().replace(",", "").rstrip(".!")
    if problem.task == "countdown":
        found = re.findall(r"[-+*/() 0-9]+", text.split("=")[0].replace("x", "*"))
        return max(found, key=len, default="").strip()
    found = re.findall(r"[a-z]+" if problem.task == "spell_backward" else r"-?\d+", text)
    return found[-1] if found else ""


def correct_text(answer: str, problem: Problem) -> float:
    """1.0 where what a chat model's answer states is right. Malformed: 0.0."""
    found = stated(answer, problem)
    if problem.task == "countdown":
        return float(evaluate(found, problem.numbers) == problem.target)
    return float(found == problem.answer.rsplit(",", 1)[-1])
