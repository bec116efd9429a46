"""The folder of a run: chunks, metrics, lock, continuation."""

import os
import socket

import numpy as np
import pytest

from experiments.jsonio import read_json, write_json
from experiments.rundir import RunDir, open_run
from jaxmeth.types import CheckpointError, ConfigError


@pytest.fixture
def opened(toy, tmp_path):
    """``opened(items=3, name="") -> RunDir``, closed at the end."""
    folders = []

    def make(name="", fresh=False, data=None, **options):
        folders.append(open_run(tmp_path, "toy", toy.Config(**options), "smoke", data=data, name=name, fresh=fresh))
        return folders[-1]

    yield make
    for folder in folders:
        folder.close()


@pytest.mark.parametrize("stored", [True, False])
def test_chunks(opened, stored):
    folder = opened() if stored else RunDir()
    assert not folder.done("a-1")
    calls = []

    def compute():
        calls.append(1)
        return {"x": np.arange(3, dtype=np.float32), "text": ["é", "b"], "n": 4}

    for _ in range(2):
        chunk = folder.cached("a-1", compute)
        np.testing.assert_array_equal(chunk["x"], np.arange(3, dtype=np.float32))
        assert chunk["x"].dtype == np.float32
        assert list(chunk["text"]) == ["é", "b"]
        assert chunk["n"] == 4
    assert calls == [1]
    assert folder.done("a-1")
    assert folder.chunks() == 1
    with pytest.raises(TypeError, match="x is an array of objects"):
        folder.save("b", x=[None])


def test_runs_from_python_do_not_share_chunks():
    RunDir().save("a", x=1)
    assert not RunDir().done("a")


@pytest.mark.parametrize("key", ["", "../a", "a/b", ".hidden", "a b", "x" * 121])
def test_chunk_keys_stay_in_the_folder(opened, key):
    with pytest.raises(ValueError, match="chunk key"):
        opened().done(key)


def test_a_damaged_chunk_is_refused(opened):
    folder = opened()
    folder.save("a", x=np.arange(1000))
    path = folder.path / "chunks" / "a.npz"
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 16
    for damaged in (b"", whole[:100], whole[:-1], bytes(flipped), b"\x80\x04K\x01."):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"a\.npz: damaged chunk"):
            folder.load("a")


def test_an_unfinished_run_is_continued_and_a_finished_one_left(opened):
    first = opened(items=3)
    first.save("a", x=1)
    first.close()
    again = opened(items=3)
    assert again.path == first.path
    assert again.continued
    assert again.done("a")
    write_json(again.path / "result.json", {})
    again.close()
    second = opened(items=3)
    assert second.path.name == f"{first.path.name}-2"
    assert not second.continued
    second.close()
    assert opened(items=3).path == second.path
    assert opened(items=3, fresh=True).path.name == f"{first.path.name}-3"
    assert opened(items=4).path.name.startswith("smoke-")
    assert opened(items=4, fresh=True).hash != first.hash


def test_a_named_folder_belongs_to_one_configuration(opened, tmp_path):
    first = opened(items=3, name="mine")
    first.save("a", x=1)
    first.log(0, loss=1.0)
    write_json(first.path / "result.json", {})
    first.close()
    again = opened(items=3, name="mine")
    assert again.finished
    assert again.path == tmp_path / "toy" / "mine"
    again.close()
    with pytest.raises(ConfigError, match=r"another configuration: items=3 \(this run: 4\); give another --name"):
        opened(items=4, name="mine")
    with pytest.raises(ConfigError, match=r"JAXMETH_DATA=null \(this run: "):
        opened(items=3, name="mine", data=tmp_path)
    emptied = opened(items=3, name="mine", fresh=True)
    assert not emptied.finished
    assert not emptied.continued
    assert not emptied.done("a")
    assert not (emptied.path / "metrics.csv").exists()


def test_a_folder_of_other_files_is_left_alone(opened, tmp_path):
    (tmp_path / "toy" / "mine").mkdir(parents=True)
    (tmp_path / "toy" / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(ConfigError, match=r"found files but no config\.json"):
        opened(name="mine")
    assert [p.name for p in (tmp_path / "toy" / "mine").iterdir()] == ["thesis.tex"]


def test_config_json_reads_back(opened, toy):
    folder = opened(items=3, levels=(0.5,))
    record = read_json(folder.path / "config.json")
    assert record["experiment"] == "toy"
    assert record["preset"] == "smoke"
    assert record["hash"] == folder.hash
    assert record["config"]["levels"] == [0.5]


def test_a_run_that_stored_nothing_leaves_no_folder(opened, tmp_path):
    folder = opened()
    folder.discard_if_empty()
    folder.close()
    assert not folder.path.exists()
    kept = opened()
    kept.log(0, loss=1)
    kept.discard_if_empty()
    assert kept.path.exists()


def test_the_second_run_in_a_folder_is_refused(opened):
    first = opened(items=3)
    text = (first.path / "lock").read_text()
    assert text == f"pid {os.getpid()} host {socket.gethostname()}\n"
    with pytest.raises(ConfigError, match=f"in use by pid {os.getpid()} host {socket.gethostname()}"):
        opened(items=3)
    first.close()
    assert not (first.path / "lock").exists()
    opened(items=3)
