"""Safetensors folders: every malformed file is one typed error, and what is written reads back bit for bit."""

import json
import os
import time
import tracemalloc
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from jaxmeth.hf import files
from jaxmeth.hf.safetensors import DTYPES
from jaxmeth.types import ConfigError, WeightsError

ONE = {"w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}


def pack(header: dict | bytes, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def two(first: tuple[int, int], second: tuple[int, int], shape: tuple[int, ...] = (4,)) -> dict:
    return {
        name: {"dtype": "U8", "shape": list(shape), "data_offsets": list(offsets)}
        for name, offsets in (("a", first), ("b", second))
    }


def entry(**changes: object) -> dict:
    return {"w": ONE["w"] | changes}


def refused(call, *expected: str, seconds: float = 1.0, peak_bytes: float = 2e6) -> str:
    """The message of the one WeightsError that ``call`` must raise, quickly and in little memory."""
    tracemalloc.start()
    began = time.perf_counter()
    try:
        with pytest.raises(WeightsError) as error:
            call()
        took = time.perf_counter() - began
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    message = str(error.value)
    for part in expected:
        assert part in message
    assert "\n" not in message
    assert took < seconds
    assert peak < peak_bytes
    return message


DATA = bytes(24)
MALFORMED = {
    "empty": (b"", "0 bytes"),
    "seven bytes": (bytes(7), "expected at least 8"),
    "length 2**63": ((2**63).to_bytes(8, "little") + bytes(64), str(2**63)),
    "length beyond the file": ((500).to_bytes(8, "little") + b"{}", "header of 500 bytes in a file of 10 bytes"),
    "header over 100 MB": ((100_000_001).to_bytes(8, "little") + bytes(64), "at most 100000000"),
    "bad JSON": (pack(b'{"w": nope}'), "not valid JSON"),
    "truncated": (pack(ONE, DATA[:20]), "'w'"),
    "trailing bytes": (pack(ONE, DATA + b"!"), "1 trailing bytes"),
    "overlap": (pack(two((0, 4), (2, 6)), bytes(6)), "'b': begins at byte 2 and overlaps"),
    "hole": (pack(two((0, 4), (6, 10)), bytes(10)), "'b': begins at byte 6 and leaves a hole"),
    "wrong size": (pack(entry(shape=[2, 4]), DATA), "'w': 24 bytes, expected 32"),
    "shape overflow": (pack(entry(shape=[2**62, 2**62, 2**62]), DATA), "overflows"),
    "negative offset": (pack(entry(data_offsets=[-24, 0]), DATA), "'w': data_offsets"),
    "begin after end": (pack(entry(data_offsets=[24, 0]), DATA), "begin at 24 after their end 0"),
    "unknown dtype": (pack(entry(dtype="F33"), DATA), "'w': dtype 'F33'"),
    "renamed pickle": (b"PK\x03\x04" + bytes(60), "untrusted pickle"),
    "renamed old pickle": (b"\x80\x04\x95" + bytes([9] * 61), "untrusted pickle"),
    "renamed npy": (b"\x93NUMPY\x01\x00" + bytes(64), "untrusted pickle"),
    "duplicate names": (pack(b'{"w":1,"v":2,"w":3}'), "duplicate name 'w'"),
    "duplicate keys within": (pack(b'{"w":{"dtype":"F32","dtype":"I32"}}'), "duplicate name 'dtype'"),
    "not an object": (pack(b"[1]"), "list"),
    "not UTF-8": (pack(b'{"\xff": 1}'), "UTF-8"),
    "nested": (pack(b"[" * 500_000), "not valid JSON"),
    "too many values": (pack(b"[" + b"1," * 2_000_001 + b"1]"), "at most 2000000"),
    "integer of 5,000 digits": (pack(b'{"w": {"dtype": "F32", "shape": [' + b"9" * 5000 + b"]}}"), "not valid JSON"),
    "entry of another kind": (pack({"w": 3}), "'w': found 3"),
    "missing offsets": (pack({"w": {"dtype": "F32", "shape": [6]}}), "'w'"),
    "true as a size": (pack(entry(shape=[True, 6]), DATA), "'w': shape"),
    "float as a size": (pack(entry(shape=[2.0, 3]), DATA), "'w': shape"),
    "negative size": (pack(entry(shape=[-2, -3]), DATA), "'w': shape"),
    "33 dimensions": (pack(entry(shape=[1] * 33), DATA), "'w': shape"),
    "zero times overflow": (pack(entry(shape=[0, 2**62], data_offsets=[0, 0])), "overflows"),
    "three offsets": (pack(entry(data_offsets=[0, 12, 24]), DATA), "'w': data_offsets"),
}


@pytest.mark.parametrize(("content", "expected"), MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_file_is_refused(tmp_path, content, expected):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    refused(lambda: files.open_folder(tmp_path), str(path), expected, peak_bytes=max(2e6, 3 * len(content)))


def test_huge_file_is_refused_without_reading_it(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(pack(ONE, DATA))
    os.truncate(path, 8 << 30)  # sparse
    refused(lambda: files.open_folder(tmp_path), "trailing bytes", peak_bytes=1e5)


def test_valid_header_of_the_table_opens(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(pack(ONE | {"__metadata__": {"format": "pt"}}, np.arange(6, dtype="<f4").tobytes()))
    with files.open_folder(tmp_path) as weights:
        assert weights.tensors == {"w": files.TensorInfo("float32", (2, 3), path, "F32")}
        np.testing.assert_array_equal(weights.read("w"), np.arange(6, dtype=np.float32).reshape(2, 3))
        with pytest.raises(WeightsError, match="'v': not found"):
            weights.read("v")
    with pytest.raises(WeightsError, match="closed"):
        weights.read("w")


def test_hostile_name_does_not_flood_the_message(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(pack({"x" * 100_000: 3}))
    assert len(refused(lambda: files.open_folder(tmp_path))) < 500 + len(str(tmp_path))


def test_boolean_bytes_are_checked(tmp_path):
    header = {"ok": {"dtype": "BOOL", "shape": [2], "data_offsets": [0, 2]}}
    header["bad"] = {"dtype": "BOOL", "shape": [1], "data_offsets": [2, 3]}
    (tmp_path / "model.safetensors").write_bytes(pack(header, b"\0\1\2"))
    weights = files.open_folder(tmp_path)
    assert weights.read("ok").tolist() == [False, True]
    refused(lambda: weights.read("bad"), "'bad'")


# ------------------------------------------------------------------------------------------------------------ folders


def shard(folder: Path, name: str, **tensors: np.ndarray) -> None:
    save_file(tensors, folder / name)


def index(folder: Path, weight_map: object) -> None:
    (folder / files.INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


LEAVING = {
    "parent": ("../../etc/passwd", "leaves the folder"),
    "parent in the middle": ("a/../../secret.safetensors", "leaves the folder"),
    "parent, backslash": ("..\\secret.safetensors", "leaves the folder"),
    "absolute": ("/etc/passwd", "absolute"),
    "drive": ("C:\\secret.safetensors", "absolute"),
    "URL": ("https://example.org/a.safetensors", "URL"),
    "file URL": ("file:///etc/passwd", "URL"),
    "pickle": ("pytorch_model.bin", "untrusted pickle"),
    "another suffix": ("passwd", ".safetensors"),
    "empty": ("", "file name"),
    "zero byte": ("a\0.safetensors", "file name"),
    "too long": ("a" * 5000 + ".safetensors", "cannot be resolved"),
    "lone surrogate": ("\ud800.safetensors", "cannot be resolved"),
    "a number": (3, "expected a file name"),
    "a list": (["a.safetensors"], "expected a file name"),
}


@pytest.mark.parametrize(("target", "expected"), LEAVING.values(), ids=LEAVING.keys())
def test_index_entry_that_leaves_the_folder_is_refused(tmp_path, target, expected):
    folder = tmp_path / "model"
    folder.mkdir()
    shard(tmp_path, "secret.safetensors", w=np.ones(1))
    index(folder, {"w": target})
    refused(lambda: files.open_folder(folder), expected)


def test_index_link_outside_the_folder_is_refused_and_inside_followed(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    shard(tmp_path, "secret.safetensors", w=np.ones(1))
    (folder / "a.safetensors").symlink_to("../secret.safetensors")
    index(folder, {"w": "a.safetensors"})
    refused(lambda: files.open_folder(folder), files.INDEX_FILE, "'a.safetensors'", "leaves the folder")
    (folder / "a.safetensors").unlink()
    shard(folder, "b.safetensors", w=np.ones(1))
    (folder / "a.safetensors").symlink_to("b.safetensors")
    assert set(files.open_folder(folder).tensors) == {"w"}
    (folder / "a.safetensors").unlink()
    (folder / "a.safetensors").symlink_to("a.safetensors")
    refused(lambda: files.open_folder(folder), "'a.safetensors'")


def test_links_of_the_hub_cache_are_followed_into_its_blobs_only(tmp_path):
    snapshot, blobs = tmp_path / "models--o--m" / "snapshots" / "0123", tmp_path / "models--o--m" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    shard(blobs, "abcd", w=np.ones(1))
    (snapshot / "a.safetensors").symlink_to("../../blobs/abcd")
    index(snapshot, {"w": "a.safetensors"})
    assert set(files.open_folder(snapshot).tensors) == {"w"}
    shard(tmp_path, "secret", w=np.ones(1))
    (blobs / "efgh").symlink_to("../../secret")
    (snapshot / "a.safetensors").unlink()
    (snapshot / "a.safetensors").symlink_to("../../blobs/efgh")
    refused(lambda: files.open_folder(snapshot), "leaves the folder")


def test_all_faults_of_an_index_are_listed(tmp_path):
    shard(tmp_path, "a.safetensors", first=np.ones(1), both=np.ones(1), twice=np.ones(1))
    shard(tmp_path, "b.safetensors", second=np.ones(1), both=np.ones(1), twice=np.ones(1))
    names = {"first": "a", "second": "b", "both": "a", "absent": "a", "gone": "b", "lost": "c", "missing": "d"}
    index(tmp_path, {name: f"{file}.safetensors" for name, file in names.items()})
    message = refused(lambda: files.open_folder(tmp_path), files.INDEX_FILE)
    for fault in (
        "shard 'c.safetensors' is missing",
        "shard 'd.safetensors' is missing",
        "tensor 'absent' is not in its shard 'a.safetensors'",
        "tensor 'gone' is not in its shard 'b.safetensors'",
        "tensor 'both' is in two shards, 'a.safetensors' and 'b.safetensors'",
        "tensor 'twice' is in two shards, 'a.safetensors' and 'b.safetensors'",
    ):
        assert fault in message
    assert "first" not in message
    assert "second" not in message


@pytest.mark.parametrize("weight_map", [None, [], {}, "a.safetensors"])
def test_index_without_a_map_is_refused(tmp_path, weight_map):
    index(tmp_path, weight_map)
    refused(lambda: files.open_folder(tmp_path), files.INDEX_FILE, "weight_map")


def test_index_of_too_many_files_is_refused_quickly(tmp_path):
    index(tmp_path, {f"w{i}": f"{i}.safetensors" for i in range(5000)})
    refused(lambda: files.open_folder(tmp_path), "5000 files", peak_bytes=1e7)


def test_tensor_that_the_index_forgot_is_offered(tmp_path):
    shard(tmp_path, "a.safetensors", w=np.ones(1), extra=np.ones(2))
    index(tmp_path, {"w": "a.safetensors"})
    assert set(files.open_folder(tmp_path).tensors) == {"w", "extra"}


PICKLES = ("w.bin", "w.pt", "w.pth", "w.pkl", "w.PKL", "w.ckpt", "w.npy", "w.npz")


@pytest.mark.parametrize("name", PICKLES)
def test_pickles_are_refused_and_never_opened(tmp_path, name):
    # A pipe without a writer: whoever opens it waits for ever.
    os.mkfifo(tmp_path / name)
    refused(lambda: files.open_folder(tmp_path), "untrusted pickle, never opened", name)
    refused(lambda: files.open_folder(tmp_path / name), "untrusted pickle, never opened", name)
    refused(lambda: files.open_safetensors(tmp_path / name), "untrusted pickle, never opened", name)
    refused(lambda: files.refuse_pickle(tmp_path / name), name)


def test_pickles_beside_safetensors_are_left_alone(tmp_path):
    os.mkfifo(tmp_path / "pytorch_model.bin")
    shard(tmp_path, "model.safetensors", w=np.ones(1))
    assert set(files.open_folder(tmp_path).tensors) == {"w"}
    files.refuse_pickle(tmp_path / "model.safetensors")


def test_what_is_no_weight_folder_is_refused(tmp_path):
    refused(lambda: files.open_folder(tmp_path / "none"), "found nothing, expected a folder")
    refused(lambda: files.open_folder(tmp_path), "found [], expected model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    refused(lambda: files.open_folder(tmp_path / "config.json"), "found a file, expected a folder")
    os.mkfifo(tmp_path / "model.safetensors")
    refused(lambda: files.open_folder(tmp_path), "not a regular file")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "not valid JSON"),
        (b"[]", "expected an object"),
        (b'{"a": 1, "a": 2}', "duplicate name 'a'"),
        (b"\xff", "not UTF-8"),
        (b'{"a":' * 100_000, "not valid JSON"),
    ],
)
def test_read_json_gives_a_typed_error(tmp_path, content, expected):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=expected) as error:
        files.read_json(path)
    assert str(path) in str(error.value)


def test_read_json_is_bounded(tmp_path):
    path = tmp_path / "config.json"
    with pytest.raises(ConfigError, match="not found"):
        files.read_json(path)
    path.write_text('{"a": [1, {"b": null}]}')
    assert files.read_json(path) == {"a": [1, {"b": None}]}
    with pytest.raises(WeightsError, match="expected at most 10"):
        files.read_json(path, error=WeightsError, max_bytes=10)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="not a regular file"):
        files.read_json(path)


# ------------------------------------------------------------------------------------------------------------ writing


def sources(tensors: dict[str, np.ndarray]) -> list[files.TensorSource]:
    return [(name, a.shape, a.dtype, lambda a=a: a) for name, a in tensors.items()]


def same(found: np.ndarray, expected: np.ndarray) -> None:
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert np.ascontiguousarray(found).tobytes() == np.ascontiguousarray(expected).tobytes()


def example(rng: np.random.Generator, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    raw = rng.integers(0, 256, (*shape, dtype.itemsize), dtype=np.uint8)
    return (raw[..., 0] > 127) if dtype.kind == "b" else raw.view(dtype)[..., 0]  # any bits, NaN included


@pytest.mark.parametrize("limit", [1, 100, 5e9])
def test_every_type_reads_back_bit_for_bit(tmp_path, limit):
    rng = np.random.default_rng(0)
    tensors = {code: example(rng, dtype, (3, 5)) for code, dtype in DTYPES.items()}
    tensors |= {"scalar": np.array(2.5, np.float32), "none": np.zeros((0, 4), np.int64), "t": tensors["F32"].T}
    tensors |= {"strided": tensors["I16"][::2, ::-1], "naïve ☃": tensors["BF16"].T}
    files.write_folder(tmp_path / "deep" / "model", sources(tensors), limit)
    weights = files.open_folder(tmp_path / "deep" / "model")
    assert weights.tensors.keys() == tensors.keys()
    for name, expected in tensors.items():
        same(weights.read(name), expected)
        assert weights.tensors[name].dtype == expected.dtype.name
        assert weights.tensors[name].shape == expected.shape
        assert not weights.read(name).flags.writeable
    parts = {info.file for info in weights.tensors.values()}
    assert (len(parts) == 1) == (limit == 5e9)
    theirs = {name: a for part in parts for name, a in load_file(part).items()}
    for name, expected in tensors.items():
        same(theirs[name], expected)


@settings(deadline=None)
@given(data=st.data())
def test_written_arrays_of_any_layout_read_back(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("model")
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    tensors = {}
    for i in range(data.draw(st.integers(1, 4))):
        shape = tuple(data.draw(st.lists(st.integers(0, 4), max_size=4)))
        dtype = data.draw(st.sampled_from(list(DTYPES.values())))
        order = data.draw(st.permutations(range(len(shape))))
        tensors[f"t{i}"] = example(rng, dtype, shape).transpose(order)
    files.write_folder(folder, sources(tensors), data.draw(st.integers(1, 200)))
    with files.open_folder(folder) as weights:
        assert weights.tensors.keys() == tensors.keys()
        for name, expected in tensors.items():
            same(weights.read(name), expected)


@settings(deadline=None)
@given(data=st.data())
def test_damaged_header_opens_or_is_refused(tmp_path_factory, data):
    """Any byte of the header changed, any length: WeightsError or the same tensors' names and sizes, nothing else."""
    content = bytearray(pack(two((0, 4), (4, 8)) | {"__metadata__": {"a": "b"}}, bytes(8)))
    for _ in range(data.draw(st.integers(0, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("model") / "model.safetensors"
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    try:
        weights = files.open_safetensors(path)
    except WeightsError:
        return
    assert sum(weights.read(name).nbytes for name in weights.tensors if weights.tensors[name].dtype != "bool") <= 8


def test_tensors_are_made_one_at_a_time(tmp_path):
    alive = {"now": 0, "most": 0}

    class Counted(np.ndarray):
        def __del__(self):
            alive["now"] -= 1

    def make() -> np.ndarray:
        alive["now"] += 1
        alive["most"] = max(alive["most"], alive["now"])
        return np.zeros(1000, np.float32).view(Counted)

    files.write_folder(tmp_path, [(f"w{i}", (1000,), "float32", make) for i in range(20)], 8000)
    assert alive["most"] <= 2
    assert len(files.open_folder(tmp_path).tensors) == 20


def test_layout_is_that_of_hugging_face(tmp_path):
    tensors = {f"w{i}": np.full(4, i, np.float32) for i in range(3)}
    files.write_folder(tmp_path, sources(tensors), 32)
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert sorted(p.name for p in tmp_path.iterdir()) == [*names, files.INDEX_FILE]
    assert json.loads((tmp_path / files.INDEX_FILE).read_text()) == {
        "metadata": {"total_size": 48},
        "weight_map": {"w0": names[0], "w1": names[0], "w2": names[1]},
    }
    raw = (tmp_path / names[0]).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    assert length % 8 == 0
    assert json.loads(raw[8 : 8 + length])["__metadata__"] == {"format": "pt"}


def test_failed_write_leaves_nothing(tmp_path):
    def fail() -> np.ndarray:
        raise RuntimeError("no more")

    good = ("a", (2,), "float32", lambda: np.zeros(2, np.float32))
    with pytest.raises(RuntimeError, match="no more"):
        files.write_folder(tmp_path, [good, ("b", (2,), "float32", fail)], 8)
    assert list(tmp_path.iterdir()) == []
    for wrong in (np.zeros(3, np.float32), np.zeros(2, np.float64)):
        source = ("b", (2,), "float32", lambda wrong=wrong: wrong)
        refused(lambda source=source: files.write_folder(tmp_path, [good, source], 8), "'b'", "expected float32 (2,)")
    assert list(tmp_path.iterdir()) == []


def test_write_refuses_what_it_cannot_store(tmp_path):
    zeros = np.zeros(2, np.float32)
    refused(lambda: files.write_folder(tmp_path, sources({"c": np.zeros(2, np.complex64)})), "'c'", "complex64")
    refused(lambda: files.write_folder(tmp_path, sources({"w": zeros}) * 2), "'w'", "twice")
    refused(lambda: files.write_folder(tmp_path, sources({"__metadata__": zeros})), "'__metadata__'")
    (tmp_path / "file").write_text("")
    refused(lambda: files.write_folder(tmp_path / "file", sources({"w": zeros})), str(tmp_path / "file"))
    files.write_folder(tmp_path, sources({"w": zeros}))
    refused(lambda: files.write_folder(tmp_path, sources({"w": zeros + 1})), "already holds model.safetensors")
    assert files.open_folder(tmp_path).read("w").tolist() == [0, 0]


def test_unaligned_tensor_is_read(tmp_path):
    header = {"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}
    header["b"] = {"dtype": "BF16", "shape": [3], "data_offsets": [1, 7]}
    values = np.array([1, -2, 3.5], ml_dtypes.bfloat16)
    (tmp_path / "model.safetensors").write_bytes(pack(header, b"\7" + values.tobytes()))
    same(files.open_folder(tmp_path).read("b"), values)
