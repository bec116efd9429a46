"""Tokenizers of a checkpoint: ``tokenizer.json``, or rebuilt from the metadata of a GGUF file."""

import os
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from jaxmeth.hf.weights import read_text, show
from jaxmeth.types import WeightsError

MAX_TOKENIZER_BYTES = 256_000_000

# GGUF's token types.
CONTROL, USER_DEFINED = 3, 4

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def load_tokenizer(folder: str | os.PathLike) -> Tokenizer | None:
    """The folder's ``tokenizer.json``, or None where it has none.

    Padding and truncation stored in the file are switched off: batches are padded by the caller, on the left.

    Raises:
      WeightsError: the file is not a tokenizer, or larger than ``MAX_TOKENIZER_BYTES``.
    """
    path = Path(folder) / "tokenizer.json"
    if not path.exists():
        return None
    data = read_text(path, error=WeightsError, max_bytes=MAX_TOKENIZER_BYTES)
    try:
        tokenizer = Tokenizer.from_buffer(data)
    # The bindings raise a bare Exception for every fault of the file.
    except Exception as e:
        raise WeightsError(f"{path}: not a tokenizer: {show(str(e), 200)}") from None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer | None:
    """How text is cut before the merges, by llama.cpp's name for it; None for a name that is not known here."""
    if name in ("gpt-2", "gpt2"):
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if name == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    if name in ("llama-bpe", "llama3", "llama-v3", "qwen2"):
        words = Regex(_WORDS % ("" if name == "qwen2" else "{1,3}"))
        cut = pre_tokenizers.Split(words, behavior="isolated")
        return pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    return None


def _strings(metadata: dict[str, Any], key: str) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, list) or not value or not all(isinstance(v, str) for v in value):
        raise WeightsError(f"GGUF metadata {key}: found {show(value)}, expected a list of strings")
    return value


def _vocabulary(metadata: dict[str, Any]) -> tuple[list[str], list[int]]:
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    if len(set(tokens)) != len(tokens):
        seen: set[str] = set()
        twice = next(t for t in tokens if t in seen or seen.add(t))
        raise WeightsError(f"GGUF metadata tokenizer.ggml.tokens: token {show(twice)} is listed twice")
    kinds = metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        found = len(kinds) if isinstance(kinds, list) else show(kinds)
        raise WeightsError(f"GGUF metadata tokenizer.ggml.token_type: found {found}, expected {len(tokens)} types")
    return tokens, kinds


def _merges(metadata: dict[str, Any], vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    merges = []
    for i, text in enumerate(_strings(metadata, "tokenizer.ggml.merges")):
        pair = text.split(" ")
        if len(pair) != 2 or not all(p in vocabulary for p in (*pair, "".join(pair))):
            where = f"GGUF metadata tokenizer.ggml.merges[{i}]"
            raise WeightsError(f"{where}: found {show(text)}, expected two tokens that join to a third")
        merges.append((pair[0], pair[1]))
    return merges


def _bos(metadata: dict[str, Any], tokens: list[str]) -> processors.PostProcessor | None:
    if not metadata.get("tokenizer.ggml.add_bos_token", False):
        return None
    number = metadata.get("tokenizer.ggml.bos_token_id")
    if type(number) is not int or not 0 <= number < len(tokens):
        raise WeightsError(
            f"GGUF metadata tokenizer.ggml.bos_token_id: found {show(number)}, expected 0 to {len(tokens) - 1}"
        )
    # By id, as a token's own text may hold the template's separators.
    bos = {"id": "bos", "ids": [number], "tokens": [tokens[number]]}
    template = processors.TemplateProcessing(
        single=["bos", "$A"], pair=["bos", "$A", "bos:1", "$B:1"], special_tokens=[bos]
    )
    return processors.Sequence([processors.ByteLevel(trim_offsets=False), template])


def tokenizer_from_gguf(metadata: dict[str, Any]) -> Tokenizer | None:
    """A byte-level BPE tokenizer from ``tokenizer.ggml.*``.

    Control tokens become special added tokens and user-defined ones plain added tokens, so both are found in the text
    before it is cut. BOS is put in front where the file says ``add_bos_token``.

    None where there is no tokenizer, where it is not byte-level BPE (``tokenizer.ggml.model`` other than ``gpt2``: the
    SentencePiece vocabularies of Llama 1 and 2, Gemma and Mistral), or where the pre-tokenizer ``tokenizer.ggml.pre``
    is not one of gpt-2, smollm, llama-bpe and qwen2: a tokenizer that cuts text otherwise gives wrong ids silently.
    Take ``tokenizer.json`` from the model's folder instead.

    Raises:
      WeightsError: a field that is missing or of the wrong type, a token listed twice, a merge of unknown tokens.
    """
    if metadata.get("tokenizer.ggml.model") != "gpt2":
        return None
    pre = metadata.get("tokenizer.ggml.pre", "gpt-2")
    cut = _pre_tokenizer(pre) if isinstance(pre, str) else None
    if cut is None:
        return None
    tokens, kinds = _vocabulary(metadata)
    vocabulary = {token: i for i, token in enumerate(tokens)}
    whole_words = pre in ("llama-bpe", "llama3", "llama-v3")
    tokenizer = Tokenizer(models.BPE(vocabulary, _merges(metadata, vocabulary), ignore_merges=whole_words))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = cut
    tokenizer.decoder = decoders.ByteLevel()
    bos = _bos(metadata, tokens)
    if bos is not None:
        tokenizer.post_processor = bos
    named = list(zip(tokens, kinds, strict=True))
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t, kind in named if kind == CONTROL])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t, kind in named if kind == USER_DEFINED])
    return tokenizer
