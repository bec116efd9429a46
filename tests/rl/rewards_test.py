"""Verifiers: what they score, and what they stumble over."""

import inspect

import numpy as np
import pytest

from jaxmeth import rl
from jaxmeth.types import ConfigError


def exact(answer, reference):
    return float(int(answer) == reference)


def test_a_verifier_that_raises_leaves_one_rollout_invalid():
    rewards, valid = rl.verify(exact, [["4", "four", "5"], ["7", "7", None]], [4, 7])
    np.testing.assert_array_equal(rewards, [[1, 0, 0], [1, 1, 0]])
    np.testing.assert_array_equal(valid, [[True, False, True], [True, True, False]])
    assert rewards.dtype == np.float32


@pytest.mark.parametrize("score", [None, float("nan"), float("inf"), "high"])
def test_a_score_that_is_no_number(score):
    rewards, valid = rl.verify(lambda answer, reference: score if answer == "x" else 0.5, [["x", "y"]], [0])
    np.testing.assert_array_equal(rewards, [[0, 0.5]])
    np.testing.assert_array_equal(valid, [[False, True]])


def test_an_interrupt_is_not_swallowed():
    def stop(answer, reference):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rl.verify(stop, [["x"]], [0])


def test_nothing_to_score():
    assert rl.verify(exact, [], [])[0].shape == (0, 0)
    assert rl.verify(exact, [[], []], [1, 2])[0].shape == (2, 0)


def test_iterators_are_read():
    found = rl.verify(exact, (iter(group) for group in (["1", "2"], ["3", "3"])), iter([1, 3]))[0]
    np.testing.assert_array_equal(found, [[1, 0], [1, 1]])


def test_bad_input_names_the_field():
    verify = inspect.unwrap(rl.verify)
    for answers in ([["1"], None], 3, [1, 2]):
        with pytest.raises(ConfigError, match=r"^answers: found"):
            verify(exact, answers, [1, 2])
    with pytest.raises(ConfigError, match=r"^references: found"):
        verify(exact, [["1"]], 1)
    with pytest.raises(ConfigError, match=r"^references: found 1"):
        rl.verify(exact, [["1"], ["2"]], [1])
    with pytest.raises(ConfigError, match=r"^answers: found"):
        rl.verify(exact, [["1"], ["2", "3"]], [1, 2])
