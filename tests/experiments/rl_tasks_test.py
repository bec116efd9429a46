"""The verifiable tasks: generators, pools, and the two verifiers, which agree and never raise."""

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import rl_tasks as tasks
from experiments.rl_config import Training
from jaxmeth.errors import ConfigError


def judged(problem, *answers, end=True, width=14):
    """The token verifier on texts."""
    ids = [[*tasks.encode(a), *([tasks.END] if end else [])] for a in answers]
    tokens = np.zeros((len(ids), width), np.int32)
    for row, these in enumerate(ids):
        tokens[row, : len(these)] = these
    mask = np.arange(width)[None] < np.array([len(i) for i in ids])[:, None]
    rows = tasks.stack([problem] * len(ids))
    rows = jax.tree.map(jnp.asarray, rows)
    return np.asarray(jax.jit(tasks.correct)(rows, jnp.asarray(tokens), jnp.asarray(mask))).tolist()


@pytest.mark.parametrize("task", [*tasks.TASKS, "mixed"])
def test_reference_answers_are_right_and_others_wrong(task):
    problems = tasks.make(task, 40, np.random.default_rng(0), terms=3, steps=True)
    problems = [p for p in problems if tasks.fits(p)]
    assert len(problems) > 20
    rows = jax.tree.map(jnp.asarray, tasks.stack(problems))
    mask = rows.answer != tasks.PAD
    assert np.asarray(tasks.correct(rows, rows.answer, mask)).all()
    assert all(tasks.correct_text(p.answer.rsplit(",", 1)[-1], p) == 1 for p in problems)
    shifted = jnp.where(mask & (rows.answer != tasks.END), rows.answer % 11 + 2, rows.answer)
    assert np.asarray(tasks.correct(rows, shifted, mask)).mean() < 0.2
    assert not np.asarray(tasks.correct(rows, jnp.where(rows.answer == tasks.END, 2, rows.answer), mask)).any()


def test_what_follows_the_last_comma_counts():
    problem = tasks.Problem("chain_sum", "67+75-8=", "142,134")
    answers = ["142,134", "7,134", "134", "134,142", "142,1342", "142,13", "", ",", "142,134,", ",,134"]
    assert judged(problem, *answers) == [True, True, True, False, False, False, False, False, False, True]
    assert judged(problem, "142,134", end=False) == [False]


COUNTDOWN = tasks.Problem("countdown", "6,3,10>28=", "6*3+10", numbers=(6, 3, 10), target=28)


@pytest.mark.parametrize(
    ("target", "answer", "right"),
    [
        (28, "6*3+10", True),
        (28, "10+6*3", True),
        (28, "10+3*6", True),
        (2, "6/3", True),
        (3, "3", True),
        (12, "10+6/3", True),
        (5, "3*10/6", True),
        (-7, "3-10", True),
        (-8, "10-6*3", True),
        (1, "10-6-3", True),
        (12, "6+6", False),
        (28, "28", False),
        (28, "6*3+10+", False),
        (28, "+6*3+10", False),
        (28, "6*3++10", False),
        (28, "6*3)+10", False),
        (28, "6*3,10", False),
        (28, "", False),
        (3, "10/3", False),
        (3, "003", True),
        (3, "0003", False),
        (28, "a", False),
        (0, "6/0", False),
    ],
)
def test_countdown_is_evaluated(target, answer, right):
    assert judged(COUNTDOWN._replace(target=target), answer) == [right]


def test_both_countdown_verifiers_agree():
    """Random strings of the grammar's characters; the text verifier alone knows brackets and fractions."""
    rng = np.random.default_rng(0)
    for _ in range(30):
        answers = ["".join(rng.choice(list("36+-*/"), int(rng.integers(1, 8)))) for _ in range(20)]
        answers = [a for a in answers if "/" not in a and "**" not in a and a[0] not in "+-" and "--" not in a]
        answers = [a for a in answers if not any(x + y in a for x in "+-*" for y in "+-")]
        if not answers:
            continue
        for target in (3, 6, 9, 18, -3):
            problem = COUNTDOWN._replace(target=target)
            host = [tasks.evaluate(a, problem.numbers) == target for a in answers]
            assert judged(problem, *answers) == host, answers


def test_text_verifier_takes_brackets_and_survives_anything():
    problem = tasks.Problem("countdown", "18,3,5>36=", "", numbers=(18, 3, 5), target=36)
    assert tasks.correct_text("18*(5 - 3)", problem) == 1
    assert tasks.correct_text("The answer: 18 * (5 - 3) = 36", problem) == 1
    for text in ("", "((((((", "1/0", "36", "18*(5-3)*1", "9" * 500, "__import__('os')", "\x00", "18**18**18"):
        assert tasks.correct_text(text, problem) == 0, text
    number = tasks.Problem("chain_sum", "1000+1=", "1001")
    assert tasks.correct_text("It is 1,001.", number) == 1
    assert tasks.correct_text("", number) == 0


def test_pools_do_not_overlap():
    train, test = tasks.pools("chain_sum", 200, 50, seed=0)
    assert len(train) == len({p.prompt for p in train}) == 200
    assert len(test) == 50
    assert not {p.prompt for p in train} & {p.prompt for p in test}
    assert [p.prompt for p in tasks.pools("chain_sum", 200, 50, seed=0)[0]] == [p.prompt for p in train]


def test_too_few_problems_are_refused_by_name(tmp_path):
    """A sum of two numbers of one digit is one of 162."""
    wanted = (
        r"train_problems: found 14\d different problems of chain_sum beside 16 held out, expected at least 200 and 16"
    )
    with pytest.raises(ConfigError, match=wanted):
        tasks.pools("chain_sum", 200, 16, seed=0, terms=2, digits=1)
    with pytest.raises(ConfigError, match="found 0 different problems"):
        tasks.pools("chain_sum", 20, 200, seed=0, terms=2, digits=1)
    stored(tmp_path / "00-rl-core")
    with pytest.raises(
        ConfigError, match="found 7 different problems of chain_sum beside 3 held out, expected at least 8"
    ):
        tasks.pools("chain_sum", 100, 50, seed=0, data=tmp_path, least=8)


def test_sums_that_may_be_too_long_are_refused_by_name():
    assert tasks.widest(3, 1, True) == (len("1-9-9="), len("-8,-17"))
    assert tasks.widest(3, 1, False) == (len("1-9-9="), len("-17"))
    too_long = {(5, 1), (6, 1), (4, 2), (5, 2), (6, 2), (4, 3), (5, 3), (6, 3)}
    for terms, digits, steps in itertools.product(range(2, 7), range(1, 4), (True, False)):
        made = tasks.make("chain_sum", 100, np.random.default_rng(0), terms=terms, digits=digits, steps=steps)
        most = tasks.widest(terms, digits, steps)
        assert max(len(p.prompt) for p in made) <= most[0]
        assert max(len(p.answer) for p in made) <= most[1]
        options = {"terms": terms, "digits": digits, "running_sums": steps}
        if not steps or (terms, digits) not in too_long:
            assert all(map(tasks.fits, made))
            Training(**options)
            continue
        with pytest.raises(ConfigError, match=f"terms: found terms {terms} with digits {digits}, up to"):
            Training(**options)


def stored(path):
    """A file in the layout of the reasoning tasks, made by hand."""
    words = [{"q": f"Spell this word backward (example: sun -> nus): w{c}rd", "a": f"dr{c}w"} for c in "abcdefghij"]
    items = {
        "chain_sum": [{"q": f"State the answer: {a} - 7 + 12 =", "a": str(a + 5)} for a in range(10, 20)],
        "letter_counting": [{"q": 'How many times does the letter "j" appear in the text: "in J oy"?', "a": "0"}],
        "spell_backward": words,
        "countdown": [
            {"q": "Make 30", "a": "15 + 10 + 5", "numbers": [15, 10, 5], "target": 30},
            {"q": "Make 36", "a": "18*(5 - 3)", "numbers": [18, 3, 5], "target": 36},
        ],
    }
    path.mkdir(parents=True)
    file = path / "reasoning_tasks.json"
    file.write_text(json.dumps({k: {"train": v, "test": v[:3]} for k, v in items.items()}))
    return file


def test_problems_come_from_a_file(tmp_path):
    file = stored(tmp_path / "00-rl-core")
    train, test = tasks.pools("chain_sum", 100, 50, seed=0, data=tmp_path)
    assert {p.prompt for p in train + test} == {f"{a}-7+12=" for a in range(10, 20)}
    assert len(test) == 3
    assert [p.prompt for p in tasks.read(file, "letter_counting", "train")] == ["j:in j oy="]
    assert [p.prompt for p in tasks.read(file, "countdown", "train")] == ["15,10,5>30="]
    assert all(tasks.correct_text(p.answer, p) == 1 for p in tasks.read(file, "mixed", "train"))


def test_bad_files_and_tasks_are_named(tmp_path):
    (tmp_path / "00-rl-core").mkdir()
    (tmp_path / "00-rl-core" / "reasoning_tasks.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"reasoning_tasks\.json"):
        tasks.pools("chain_sum", 4, 4, seed=0, data=tmp_path)
    with pytest.raises(ConfigError, match="task: found 'sudoku'"):
        tasks.make("sudoku", 1, np.random.default_rng(0))
    with pytest.raises(ConfigError, match="'é'"):
        tasks.encode("é")
