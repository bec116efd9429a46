"""Checkpoints: Orbax arrays, beside them a manifest of what they are and a digest of every file.

::

    <folder>/step_00000100/state/**         written by Orbax
                           manifest.json    line 1: step, config, tree (path, shape, dtype), files (size, SHA-256);
                                            line 2: the SHA-256 of line 1
    <folder>/lock                           pid and host of the process that trains here

A step's folder appears by one rename, after everything in it is on disk. Orbax restores a checkpoint with a flipped
bit, and casts types, without a word: hence the digests and the table of types, checked before an array is read.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxmeth.train.files import acquire_lock
from jaxmeth.train.lora import path_name
from jaxmeth.types import CheckpointError, ConfigError, whole_number

MANIFEST = "manifest.json"
MANIFEST_BYTES = 1 << 26
STEP = re.compile(r"step_(\d{8,})")
UNFINISHED = ".saving-"


def steps(folder: str | os.PathLike) -> list[int]:
    """The steps that are saved in ``folder``, ascending; what a killed save left behind is not among them."""
    folder = Path(folder)
    found = (STEP.fullmatch(p.name) for p in folder.iterdir()) if folder.is_dir() else ()
    return sorted(int(m[1]) for m in found if m)


def latest(folder: str | os.PathLike) -> int | None:
    """The last saved step, or None."""
    return max(steps(folder), default=None)


@contextlib.contextmanager
def held(folder: str | os.PathLike | None) -> Iterator[None]:
    """Make ``folder`` and keep other processes from training in it; None: nothing to hold.

    Raises: ConfigError when it cannot be made or written, or another process holds it.
    """
    if folder is None:
        yield
        return
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = acquire_lock(folder / "lock")
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written ({error.strerror}), expected a writable folder") from None
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.unlink(folder / "lock")
        os.close(handle)


def save(folder: str | os.PathLike, step: int, state: Any, *, config: Any = None, keep: int = 2) -> Path:
    """Save a PyTree of arrays as ``step`` and drop all but the last ``keep`` steps up to it; later ones stay.

    Args:
      state: arrays on any devices of this host; typed random keys too.
      config: a frozen dataclass or a dict of plain values, compared at ``restore``.

    Raises:
      ConfigError: step negative, keep below 1, no whole numbers.
      CheckpointError: it could not be written (a full disk, say); earlier steps are as they were.
    """
    step, keep = whole_number("step", step, 0), whole_number("keep", keep, 1)
    import orbax.checkpoint as ocp

    folder = Path(folder).absolute()
    final, temporary = folder / f"step_{step:08d}", folder / f"{UNFINISHED}{step}-{os.getpid()}"
    leaves = _leaves(state)
    try:
        for stale in folder.glob(f"{UNFINISHED}*"):
            shutil.rmtree(stale)
        temporary.mkdir(parents=True)
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(temporary / "state", leaves)
        manifest = {"step": step, "config": _plain(config), "tree": _describe(leaves), "files": _digests(temporary)}
        line = json.dumps(manifest)
        _write_synced(temporary / MANIFEST, f"{line}\n{hashlib.sha256(line.encode()).hexdigest()}\n")
        if final.exists():
            shutil.rmtree(final)
        os.rename(temporary, final)
        _sync_folder(folder)
    except Exception as error:
        shutil.rmtree(temporary, ignore_errors=True)
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(
            f"{folder}: step {step} could not be saved ({reason}); steps {steps(folder)} are untouched"
        ) from error
    for old in [s for s in steps(folder) if s <= step][:-keep]:
        shutil.rmtree(folder / f"step_{old:08d}")
    return final


def restore(
    folder: str | os.PathLike,
    like: Any,
    *,
    step: int | None = None,
    config: Any = None,
    cast: bool = False,
    allow_previous: bool = False,
) -> tuple[int, Any]:
    """Read a checkpoint back into the structure, types and devices of ``like``.

    Args:
      like: a PyTree of arrays (their values are not read); each leaf comes back with its sharding.
      step: None = the last one.
      config: must equal what was saved, unless None.
      cast: allow other float or integer types than those saved.
      allow_previous: where the last step is damaged take the one before; never a step of another configuration.

    Returns:
      The step and the state.

    Raises:
      CheckpointError: no checkpoint; a file that is missing, truncated or altered (it is named); another configuration,
        structure, shape or type (the fields or leaves are named). Checked before an array is read.
    """
    folder = Path(folder).absolute()
    found = steps(folder)
    wanted = found[::-1] if step is None else [step]
    if not found or (step is not None and step not in found):
        raise CheckpointError(f"{folder}: found steps {found}, expected {'one' if step is None else step}")
    for number in wanted:
        try:
            manifest = _checked_manifest(folder / f"step_{number:08d}")
        except CheckpointError:
            if not allow_previous or number == wanted[-1]:
                raise
            continue
        return number, _read(folder / f"step_{number:08d}", manifest, like, config, cast)
    raise AssertionError("unreachable: the last step either returned or raised")


def _read(path: Path, manifest: dict, like: Any, config: Any, cast: bool) -> Any:
    import orbax.checkpoint as ocp

    ours = _plain(config)
    if config is not None and ours != manifest["config"]:
        raise CheckpointError(f"{path}: saved with another configuration: {_differences(manifest['config'], ours)}")
    wanted, stored = _leaves(like), manifest["tree"]
    expected = _describe(wanted)
    problems = [f"{p}: missing" for p in expected if p not in stored] + [
        f"{p}: not expected" for p in stored.keys() - expected.keys()
    ]
    for leaf in expected.keys() & stored.keys():
        (shape, dtype), (other, kind) = expected[leaf], stored[leaf]
        if shape != other:
            problems.append(f"{leaf}: found shape {tuple(other)}, expected {tuple(shape)}")
        elif dtype != kind and not (cast and "key" not in (dtype + kind)):
            problems.append(f"{leaf}: found type {kind}, expected {dtype}")
    if problems:
        more = f" and {len(problems) - 6} more" if len(problems) > 6 else ""
        raise CheckpointError(f"{path}: {'; '.join(sorted(problems)[:6])}{more}")
    target = {
        name: jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(stored[name][1]), sharding=leaf.sharding)
        for name, leaf in wanted.items()
    }
    with ocp.StandardCheckpointer() as checkpointer:
        arrays = checkpointer.restore(path / "state", target)
    paths, treedef = jax.tree_util.tree_flatten_with_path(like)
    leaves = []
    for key_path, leaf in paths:
        leaf = jnp.asarray(leaf)
        array = arrays[path_name(key_path)]
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaves.append(jax.random.wrap_key_data(array, impl=jax.random.key_impl(leaf)))
        else:
            leaves.append(array.astype(leaf.dtype))
    return jax.tree_util.tree_unflatten(treedef, leaves)


def _leaves(state: Any) -> dict[str, jax.Array]:
    """Arrays by path; random keys as their data."""
    out = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        leaf = jnp.asarray(leaf)
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        out[path_name(path)] = jax.random.key_data(leaf) if is_key else leaf
    return out


def _describe(leaves: dict[str, jax.Array]) -> dict[str, list]:
    return {name: [list(leaf.shape), leaf.dtype.name] for name, leaf in leaves.items()}


def _plain(config: Any) -> Any:
    """What JSON keeps of a configuration."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        config = dataclasses.asdict(config)
    return json.loads(json.dumps(config, default=str, sort_keys=True))


def _differences(saved: Any, ours: Any) -> str:
    if not isinstance(saved, dict) or not isinstance(ours, dict):
        return f"{saved!r}, expected {ours!r}"
    names = [k for k in sorted(saved.keys() | ours.keys()) if saved.get(k) != ours.get(k)]
    return ", ".join(f"{k}: found {saved.get(k)!r}, expected {ours.get(k)!r}" for k in names)


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digests(folder: Path) -> dict[str, list]:
    """Size and SHA-256 of every file below ``folder``, each forced to disk."""
    out = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
        out[path.relative_to(folder).as_posix()] = [path.stat().st_size, _digest(path)]
    return out


def _write_synced(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _checked_manifest(path: Path) -> dict:
    """The manifest of a step, when it and all files it names are as they were written."""
    manifest = path / MANIFEST
    try:
        if manifest.stat().st_size > MANIFEST_BYTES:
            raise CheckpointError(
                f"{manifest}: found {manifest.stat().st_size} bytes, expected at most {MANIFEST_BYTES}"
            )
        content = manifest.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{manifest}: cannot be read ({error.strerror})") from None
    line, _, rest = content.partition(b"\n")
    if rest != hashlib.sha256(line).hexdigest().encode() + b"\n":
        raise CheckpointError(
            f"{manifest}: damaged, its digest does not fit; delete {path} to continue from an earlier step"
        )
    stored = json.loads(line)
    present = {p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file()} - {MANIFEST}
    for name in sorted(present ^ stored["files"].keys()):
        raise CheckpointError(f"{path / name}: {'unexpected' if name in present else 'missing'} file")
    for name, (size, digest) in stored["files"].items():
        file = path / name
        if file.stat().st_size != size:
            raise CheckpointError(f"{file}: found {file.stat().st_size} bytes, expected {size}: truncated or altered")
        if _digest(file) != digest:
            raise CheckpointError(f"{file}: damaged, its SHA-256 is not the one it was saved with")
    return stored
