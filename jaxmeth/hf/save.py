"""``save``: a checkpoint as a Hugging Face folder."""

import json
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxmeth.hf import convert
from jaxmeth.hf.config import config_to_hf
from jaxmeth.hf.files import write_folder
from jaxmeth.types import WeightsError

MAX_SHARD_BYTES = 5e9


def save(path: str | os.PathLike, checkpoint: Any, *, max_shard_bytes: float = MAX_SHARD_BYTES) -> None:
    """Write a checkpoint as a folder that ``load`` reads back byte-equal and that transformers reads.

    ``config.json``, ``model.safetensors`` (shards and an index above ``max_shard_bytes``), and, where the checkpoint
    has them, ``tokenizer.json``, ``tokenizer_config.json`` and ``chat_template.jinja``. One tensor is in memory beside
    the model at a time. The weights come last, and under their final name only when complete.

    Args:
      path: a folder without weights; made if it does not exist.
      checkpoint: a ``Checkpoint``, or anything with ``cfg``, ``params``, ``tokenizer`` and ``chat_template``.
      max_shard_bytes: size at which a new file begins.

    Raises:
      ConfigError: the family's ``config.json`` cannot express the configuration.
      WeightsError: the parameters do not fit the configuration, a leaf is not a plain array, the folder holds weights
        already or cannot be written.
    """
    path = Path(path)
    config = config_to_hf(checkpoint.cfg)
    tensors = list(convert.tensors_to_hf(checkpoint.cfg, checkpoint.params))
    config["torch_dtype"] = _dtype(checkpoint.params)
    texts = {"config.json": _json(config)}
    if checkpoint.tokenizer is not None:
        texts["tokenizer.json"] = checkpoint.tokenizer.to_str()
        texts["tokenizer_config.json"] = _json(_tokenizer_config(checkpoint.cfg, checkpoint.tokenizer))
    if checkpoint.chat_template is not None:
        texts["chat_template.jinja"] = checkpoint.chat_template
    try:
        path.mkdir(parents=True, exist_ok=True)
        if any(path.glob("model*.safetensors*")):
            raise WeightsError(f"{path}: already holds weights, expected a folder without")
        for name, text in texts.items():
            (path / name).write_text(text, encoding="utf-8")
    except OSError as e:
        raise WeightsError(f"{path}: cannot be written: {e.strerror}") from None
    write_folder(path, tensors, max_shard_bytes)


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2, sort_keys=True) + "\n"


def _dtype(params: Any) -> str:
    """The type of most parameters."""
    sizes: dict[str, int] = {}
    for leaf in jax.tree.leaves(params):
        sizes[np.dtype(leaf.dtype).name] = sizes.get(np.dtype(leaf.dtype).name, 0) + leaf.size
    return max(sizes, key=lambda name: sizes[name])


def _tokenizer_config(cfg: Any, tokenizer: Any) -> dict[str, Any]:
    """What transformers needs to take ``tokenizer.json`` as it is."""
    eos = getattr(cfg, "eos_token_ids", ())
    ids = {
        "bos_token": getattr(cfg, "bos_token_id", None),
        "eos_token": eos[0] if eos else None,
        "pad_token": getattr(cfg, "pad_token_id", None),
    }
    named = {name: tokenizer.id_to_token(i) for name, i in ids.items() if i is not None and i >= 0}
    return {"tokenizer_class": "PreTrainedTokenizerFast"} | {k: v for k, v in named.items() if v is not None}
