"""A quantised model on disk: one folder, two files.

``quant.json``: ``format`` "jaxmeth-quant", ``version`` 1, ``config`` (the fields of the ``DecoderConfig``), ``leaves``
(for each quantised weight, by its path, the static fields of its ``QTensor``). ``model.safetensors``: one tensor a
parameter under its path joined by dots; a quantised weight is ``<path>.q`` and ``<path>.scale``, laid out as in memory
(``QTensor``): with at most 4 bits uint8 ``[L, out, ceil(in / 2)]``, the low half of byte j being column j and the high
half column j + ceil(in / 2), both plus 8; above 4 bits int8 ``[L, out, in]``.
"""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmeth.hf.safetensors import open_safetensors, plan_tensors, write_safetensors
from jaxmeth.models import DecoderConfig, RopeConfig, abstract_params
from jaxmeth.quant.qtensor import QTensor
from jaxmeth.quant.regions import put
from jaxmeth.types import ConfigError, Params, WeightsError

FORMAT, VERSION = "jaxmeth-quant", 1
TENSORS, DESCRIPTION = "model.safetensors", "quant.json"
STATIC = ("bits", "width", "packed", "rotate", "act_bits")


def _flat(params: Params, prefix: str = "") -> dict[str, Any]:
    found = {}
    for name, value in params.items():
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found


def _arrays(path: str, leaf: Any) -> dict[str, Any]:
    if not isinstance(leaf, QTensor):
        return {path: leaf}
    return {f"{path}.q": leaf.q} | ({} if leaf.scale is None else {f"{path}.scale": leaf.scale})


def save(path: str | os.PathLike, params: Params, cfg: DecoderConfig) -> None:
    """Write quantised parameters as a folder that ``load`` reads back byte-equal; four bits take four bits.

    Args:
      path: a folder without weights; made if it does not exist.
      params: of ``perq``; leaves are arrays or ``QTensor``.
      cfg: ``report.cfg``.

    Raises:
      WeightsError: a leaf of another type, a folder that holds weights already or cannot be written.
    """
    path, flat = Path(path), _flat(params)
    for name, leaf in flat.items():
        if not isinstance(leaf, QTensor | jax.Array | np.ndarray):
            raise WeightsError(f"{name}: found a {type(leaf).__name__}, expected an array or a QTensor")
    arrays = {n: a for name, leaf in flat.items() for n, a in _arrays(name, leaf).items()}
    plans = plan_tensors((n, a.shape, np.dtype(a.dtype), lambda a=a: np.asarray(a)) for n, a in arrays.items())
    leaves = {n: {k: getattr(v, k) for k in STATIC} for n, v in flat.items() if isinstance(v, QTensor)}
    text = {"format": FORMAT, "version": VERSION, "config": dataclasses.asdict(cfg), "leaves": leaves}
    temporary = path / f"{TENSORS}.part"
    try:
        path.mkdir(parents=True, exist_ok=True)
        if (path / TENSORS).exists():
            raise WeightsError(f"{path}: already holds weights, expected a folder without")
        (path / DESCRIPTION).write_text(json.dumps(text, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        write_safetensors(temporary, plans)
        os.replace(temporary, path / TENSORS)
    except OSError as e:
        raise WeightsError(f"{path}: cannot be written: {e.strerror}") from None


def _description(path: Path) -> tuple[DecoderConfig, dict[str, dict]]:
    try:
        stored = json.loads((path / DESCRIPTION).read_text(encoding="utf-8"))
    except OSError as e:
        raise WeightsError(f"{path / DESCRIPTION}: cannot be read: {e.strerror}") from None
    except ValueError:
        raise WeightsError(f"{path / DESCRIPTION}: found no JSON, expected what quant.save writes") from None
    if not isinstance(stored, dict) or (stored.get("format"), stored.get("version")) != (FORMAT, VERSION):
        raise WeightsError(f"{path / DESCRIPTION}: found another format, expected {FORMAT} {VERSION}")
    try:
        fields = {k: tuple(v) if isinstance(v, list) else v for k, v in stored["config"].items()}
        cfg = DecoderConfig(**fields | {"ropes": tuple(RopeConfig(**r) for r in fields["ropes"])})
        leaves = {name: {k: leaf[k] for k in STATIC} for name, leaf in stored["leaves"].items()}
    except (KeyError, TypeError, AttributeError, ConfigError) as e:
        raise WeightsError(f"{path / DESCRIPTION}: found a damaged description ({e})") from None
    return cfg, leaves


def load(path: str | os.PathLike) -> tuple[Params, DecoderConfig]:
    """What ``save`` wrote: ``(params, cfg)`` for ``models.apply`` and ``generate``.

    Raises:
      WeightsError: a missing or damaged file, or tensors that do not fit the configuration.
    """
    path = Path(path)
    cfg, leaves = _description(path)
    weights = open_safetensors(path / TENSORS)
    expected = _flat(abstract_params(cfg))
    unknown = set(leaves) - set(expected)
    if unknown:
        raise WeightsError(f"{path}: found a leaf {min(unknown)}, expected parameters of {cfg.model_type}")
    params: Params = {}
    used = set()
    for name, like in expected.items():
        if name in leaves:
            leaf = QTensor(None, **leaves[name])
            names = [f"{name}.q"] + ([] if leaf.bits is None else [f"{name}.scale"])
            arrays = [_read(path, weights, n) for n in names]
            _check_leaf(path, name, leaf, arrays, like.shape)
            value = leaf.replace(q=arrays[0], scale=arrays[1] if len(arrays) > 1 else None)
        else:
            names, value = [name], _read(path, weights, name)
            if value.shape != like.shape:
                raise WeightsError(f"{path}: tensor {name}: found shape {value.shape}, expected {like.shape}")
        used |= set(names)
        params = put(params, name, value)
    extra = set(weights.tensors) - used
    if extra:
        raise WeightsError(f"{path}: found a tensor {min(extra)}, expected those of {DESCRIPTION} only")
    return params, cfg


def _read(path: Path, weights, name: str) -> jax.Array:
    if name not in weights.tensors:
        raise WeightsError(f"{path}: found no tensor {name}, expected those of {DESCRIPTION}")
    return jnp.asarray(np.array(weights.read(name)))


def _check_leaf(path: Path, name: str, leaf: QTensor, arrays: list, shape: tuple[int, ...]) -> None:
    *stack, n_in = shape
    wide = (*stack, -(-n_in // 2)) if leaf.packed else shape
    kind = {None: arrays[0].dtype}.get(leaf.bits, jnp.uint8 if leaf.packed else jnp.int8)
    if arrays[0].shape != wide or arrays[0].dtype != kind or (leaf.packed and leaf.width != n_in):
        raise WeightsError(f"{path}: tensor {name}.q: found {arrays[0].dtype} {arrays[0].shape}, expected {wide}")
    if len(arrays) > 1 and (arrays[1].shape[:-1] != tuple(stack) or n_in % max(arrays[1].shape[-1], 1)):
        raise WeightsError(f"{path}: tensor {name}.scale: found shape {arrays[1].shape}, expected {(*stack, 1)}")
