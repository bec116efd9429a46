"""The PeRQ experiment: its text, its arms, and the shapes of the full scale. The run itself is a smoke preset."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from experiments import perq, perq_text
from jaxmeth.errors import ConfigError


@pytest.fixture
def tokenizer():
    made = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return made


def test_windows_are_whole_and_shorter_text_is_used_up(tokenizer):
    assert perq_text.windows(tokenizer, "a " * 100, 64, 16, "x").shape == (4, 16)
    assert perq_text.windows(tokenizer, "a " * 100, 1000, 16, "x").shape == (6, 16)
    assert perq_text.windows(tokenizer, "a " * 5, 64, 16, "x").shape == (1, 5)
    with pytest.raises(ConfigError, match="x: found 1 tokens"):
        perq_text.windows(tokenizer, "a", 64, 16, "x")


def test_the_texts_are_disjoint_or_named(tmp_path):
    (calibration, evaluation), source = perq_text.texts(None)
    assert (len(calibration), len(evaluation)) == (60_000, 100_000)
    assert calibration[-2000:] not in evaluation
    assert "sha256" in source
    with pytest.raises(ConfigError, match=r"calibration\.txt"):
        perq_text.texts(tmp_path)


def test_every_arm_has_what_it_is_compared_with():
    found = perq.arms(perq.Config(others=(16, 64)))
    assert len(set(found)) == len(found) == 34
    for arm in found:
        if arm.how == "learnt":
            assert arm._replace(how="nearest") in found
        elif (arm.how, arm.weights) != ("nearest", "all"):
            assert arm._replace(rotation="full", order="none") in found
            assert arm._replace(order="none") in found
    assert len(perq.arms(perq.PRESETS["smoke"])) == 12
    with pytest.raises(ConfigError, match="arms: found"):
        perq.Config(arms="some")


def test_the_paper_preset_checks_shapes():
    rows = {r["array"]: r["numbers"] for r in perq.run(perq.PRESETS["paper"]).rows}
    assert rows["bytes of all layers, four bits"] < 0.26 * rows["bytes of all layers, bfloat16"]
