"""Checkpoints: what was saved comes back, and what was altered does not."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxmeth import train
from jaxmeth.types import CheckpointError, ConfigError


@dataclass(frozen=True)
class Settings:
    width: int = 8
    name: str = "small"


def state(seed=0):
    key = jax.random.key(seed)
    params = {"w": jax.random.normal(key, (4, 8)), "b": jnp.arange(8, dtype=jnp.bfloat16)}
    return {"params": params, "opt": optax.adam(1e-3).init(params), "step": jnp.asarray(3), "key": key, "none": None}


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        np.testing.assert_array_equal(x, y)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    train.save(folder, 3, state(), config=Settings())
    return folder


@pytest.fixture
def copy(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "copy")
    return tmp_path / "copy"


def test_round_trip(saved):
    step, found = train.restore(saved, state(seed=1), config=Settings())
    assert step == 3
    same(found, state())
    assert sorted(p.name for p in saved.iterdir()) == ["step_00000003"]


def test_keeps_the_last_and_overwrites_the_same(tmp_path):
    for step in (1, 2, 3, 3):
        train.save(tmp_path, step, {"x": jnp.full(2, step)}, keep=2)
    assert train.steps(tmp_path) == [2, 3]
    assert train.latest(tmp_path) == 3
    step, found = train.restore(tmp_path, {"x": jnp.zeros(2, int)}, step=2)
    assert step == 2
    np.testing.assert_array_equal(found["x"], 2)


def test_an_earlier_step_is_kept_and_drops_no_later_one(tmp_path):
    """As after a step that is damaged, when the run goes on from the one before."""
    for step in (10, 20, 12, 14, 16):
        train.save(tmp_path, step, {"x": jnp.full(2, step)}, keep=2)
    assert train.steps(tmp_path) == [14, 16, 20]
    assert train.restore(tmp_path, {"x": 0 * np.arange(2)})[0] == 20


def test_nothing_saved(tmp_path):
    assert train.steps(tmp_path / "none") == []
    assert train.latest(tmp_path) is None
    with pytest.raises(CheckpointError, match="found steps \\[\\], expected one"):
        train.restore(tmp_path, state())
    for step, keep, named in (
        (-1, 1, "step: found -1"),
        (0, 0, "keep: found 0, expected a whole number of at least 1"),
    ):
        with pytest.raises(ConfigError, match=named):
            train.save(tmp_path, step, state(), keep=keep)


def test_unfinished_saves_are_never_listed_and_are_cleaned_up(copy):
    shutil.copytree(copy / "step_00000003", copy / ".saving-4-123")
    assert train.steps(copy) == [3]
    train.save(copy, 5, state())
    assert sorted(p.name for p in copy.iterdir()) == ["step_00000003", "step_00000005"]


def files(folder):
    return sorted(p for p in folder.rglob("*") if p.is_file())


def test_every_flipped_bit_is_refused_naming_the_file(copy):
    rng = np.random.default_rng(0)
    all_files = files(copy)
    sizes = np.array([p.stat().st_size for p in all_files])
    for number in range(1000):
        # Each file first, then by size: manifests, metadata and arrays alike.
        path = (
            all_files[number] if number < len(all_files) else all_files[rng.choice(len(sizes), p=sizes / sizes.sum())]
        )
        content = path.read_bytes()
        if not content:
            continue
        at = int(rng.integers(len(content)))
        altered = bytearray(content)
        altered[at] ^= 1 << int(rng.integers(8))
        path.write_bytes(altered)
        with pytest.raises(CheckpointError, match=path.name.replace(".", r"\.")):
            train.restore(copy, state())
        path.write_bytes(content)
    same(train.restore(copy, state())[1], state())


def test_truncated_removed_empty_and_added_files(copy):
    for path in files(copy):
        content = path.read_bytes()
        for left in (content[:-1], b"", None):
            if not content:
                continue
            os.unlink(path) if left is None else path.write_bytes(left)
            with pytest.raises(CheckpointError, match=path.name.replace(".", r"\.")):
                train.restore(copy, state())
            path.write_bytes(content)
    (copy / "step_00000003" / "more").write_text("x")
    with pytest.raises(CheckpointError, match="more: unexpected file"):
        train.restore(copy, state())


def test_the_step_before_is_taken_only_when_allowed(copy):
    train.save(copy, 9, state(seed=1), config=Settings())
    (copy / "step_00000009" / "manifest.json").write_text("{}\n")
    with pytest.raises(CheckpointError, match=r"manifest\.json: damaged"):
        train.restore(copy, state())
    step, found = train.restore(copy, state(), allow_previous=True)
    assert step == 3
    same(found, state())
    shutil.rmtree(copy / "step_00000003")
    with pytest.raises(CheckpointError, match=r"manifest\.json: damaged"):
        train.restore(copy, state(), allow_previous=True)


def test_other_configurations_structures_shapes_and_types(saved):
    with pytest.raises(CheckpointError, match="another configuration: width: found 8, expected 9"):
        train.restore(saved, state(), config=Settings(width=9))
    like = state()
    wider = like | {"params": like["params"] | {"w": jnp.zeros((4, 9))}}
    with pytest.raises(CheckpointError, match=r"params.w: found shape \(4, 8\), expected \(4, 9\)"):
        train.restore(saved, wider)
    with pytest.raises(CheckpointError, match="more: missing"):
        train.restore(saved, like | {"more": jnp.zeros(1)})
    with pytest.raises(CheckpointError, match="step: not expected"):
        train.restore(saved, {k: v for k, v in like.items() if k != "step"})
    half = like | {"params": like["params"] | {"w": jnp.zeros((4, 8), jnp.bfloat16)}}
    with pytest.raises(CheckpointError, match=r"params\.w: found type float32, expected bfloat16"):
        train.restore(saved, half)
    _, found = train.restore(saved, half, cast=True)
    np.testing.assert_array_equal(found["params"]["w"], np.asarray(like["params"]["w"]).astype(ml_dtypes.bfloat16))


def test_saved_on_eight_devices_restored_on_one_and_back(tmp_path):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    x = jnp.arange(64.0).reshape(8, 8)
    spread = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))
    train.save(tmp_path, 1, {"x": spread})
    _, one = train.restore(tmp_path, {"x": x})
    np.testing.assert_array_equal(one["x"], x)
    assert len(one["x"].devices()) == 1
    train.save(tmp_path, 2, one)
    _, back = train.restore(tmp_path, {"x": spread})
    np.testing.assert_array_equal(back["x"], x)
    assert back["x"].sharding == spread.sharding


def test_a_failed_save_leaves_the_step_before(copy, monkeypatch):
    """A full disk: the write raises, the new step is gone, the old one whole."""

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(train.checkpoint, "_write_synced", full)
    with pytest.raises(CheckpointError, match=r"step 4 could not be saved .*No space left.*steps \[3\] are untouched"):
        train.save(copy, 4, state())
    assert [p.name for p in copy.iterdir()] == ["step_00000003"]
    same(train.restore(copy, state())[1], state())


def test_a_manifest_can_be_read_by_people(saved):
    line, digest = (saved / "step_00000003" / "manifest.json").read_text().splitlines()
    manifest = json.loads(line)
    assert manifest["config"] == {"width": 8, "name": "small"}
    assert manifest["tree"]["params.w"] == [[4, 8], "float32"]
    assert len(digest) == 64


KILLED = """
import jax.numpy as jnp, os, sys, threading, time
from jaxmeth import train
folder, delay = sys.argv[1], float(sys.argv[2])
train.save(folder, 1, {"x": jnp.arange(100_000.0)})
threading.Thread(target=lambda: (time.sleep(delay), os.kill(os.getpid(), 9)), daemon=True).start()
for step in range(2, 1000):
    train.save(folder, step, {"x": jnp.arange(100_000.0) + step})
"""


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.005, 0.03, 0.1, 0.2, 0.35])
def test_killed_while_saving(tmp_path, delay):
    code = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), str(delay)]).returncode
    assert code == -9
    step, found = train.restore(tmp_path, {"x": jnp.zeros(100_000)})
    np.testing.assert_array_equal(found["x"], jnp.arange(100_000.0) + (step if step > 1 else 0))
