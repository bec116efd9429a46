"""``python -m jaxmeth.hf``."""

import subprocess
import sys
import time

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxmeth import hf
from jaxmeth.hf.__main__ import main


@pytest.fixture
def call(capsys):
    """Run the command in this process: exit code, stdout, stderr."""

    def call(*argv):
        try:
            code = main([str(a) for a in argv])
        except SystemExit as end:
            code = end.code or 0
        said = capsys.readouterr()
        assert "Traceback" not in said.err
        return code, said.out, said.err

    return call


def test_converts_and_says_so(call, golden, tmp_path):
    code, out, err = call(golden / "hf" / "phi3", tmp_path / "out")
    assert (code, err) == (0, "")
    for part in ("embed.embedding", "layers.attn.q.weight", "float32", "phi3: 21,664 parameters in 12 leaves"):
        assert part in out
    assert f"parity: 15 tensors (86,656 bytes) read back from {tmp_path / 'out'} are equal byte for byte" in out
    assert hf.load(tmp_path / "out").cfg == hf.load(golden / "hf" / "phi3").cfg


def test_type_and_quiet(call, golden, tmp_path):
    code, out, _ = call(golden / "hf" / "llama", tmp_path / "out", "--dtype", "bfloat16", "--quiet")
    assert code == 0
    assert len(out.splitlines()) == 2
    assert {w.dtype.name for w in load_file(tmp_path / "out" / "model.safetensors").values()} == {"bfloat16"}


def test_nothing_is_claimed_about_a_folder_that_changed(golden, tmp_path):
    """The parity note rests on a comparison that can fail."""
    from jaxmeth.hf import convert
    from jaxmeth.types import WeightsError

    checkpoint = hf.load(golden / "hf" / "llama")
    hf.save(tmp_path, checkpoint)
    assert convert.compare(checkpoint.cfg, checkpoint.params, tmp_path)[0] == 21
    data = bytearray((tmp_path / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(WeightsError, match="differs from what was written"):
        convert.compare(checkpoint.cfg, checkpoint.params, tmp_path)


def test_flags_of_strictness(call, golden, tmp_path):
    folder = tmp_path / "odd"
    hf.save(folder, hf.load(golden / "hf" / "llama"))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][0] = np.nan
    tensors["extra"] = np.zeros(1, np.float32)
    save_file(tensors, folder / "model.safetensors")
    code, _, err = call(folder, tmp_path / "a")
    assert code == 2
    assert "unexpected tensors (1): 'extra'" in err
    assert len(err.splitlines()) == 1
    code, _, err = call(folder, tmp_path / "b", "--no-strict")
    assert code == 0
    assert "unexpected tensors (1): 'extra'" in err
    assert "NaN or infinite numbers in tensors (1): 'model.norm.weight'" in err
    assert [line.startswith(f"warning: {folder}") for line in err.splitlines()] == [True, True]
    code, _, err = call(folder, tmp_path / "c", "--no-strict", "--strict-finite")
    assert code == 2
    assert "error:" in err
    assert "model.norm.weight" in err
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ((), "SOURCE"),
        (("folder",), "OUT"),
        (("folder", "out", "--bogus"), "--bogus"),
        (("folder", "out", "more"), "more"),
        (("folder", "out", "--dtype", "int3"), "int3"),
        (("nosuch", "out"), "found 'nosuch'"),
        (("owner/none", "out"), "hub model 'owner/none'"),
        (("weights.bin", "out"), "untrusted pickle"),
    ],
)
def test_wrong_commands(call, monkeypatch, tmp_path, argv, said):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    code, out, err = call(*argv)
    assert (code, out) == (2, "")
    error, *usage = err.splitlines()
    assert error.startswith("error: ")
    assert said in error
    assert not usage or (len(usage) == 1 and usage[0].startswith("usage: "))
    assert not (tmp_path / "out").exists()


def test_a_taken_folder(call, golden, tmp_path):
    call(golden / "hf" / "llama", tmp_path / "out", "--quiet")
    code, _, err = call(golden / "hf" / "llama", tmp_path / "out")
    assert code == 2
    assert "already holds weights" in err


def test_help_is_quick_and_says_what_it_does():
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "jaxmeth.hf", "--help"], capture_output=True, text=True, timeout=60)
    assert time.perf_counter() - start < 3
    assert (done.returncode, done.stderr) == (0, "")
    for part in ("SOURCE", "OUT", "--dtype", "--strict-finite", "--no-strict", "gguf", "byte for byte"):
        assert part in done.stdout


def test_importing_the_package_loads_no_jax():
    code = "import sys, jaxmeth.hf; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_functions_win_over_modules_of_their_name():
    import importlib

    importlib.import_module("jaxmeth.hf.load")
    importlib.import_module("jaxmeth.hf.save")
    assert callable(hf.load)
    assert callable(hf.save)
    with pytest.raises(AttributeError, match="nothing"):
        _ = hf.nothing
    assert set(hf.__all__) <= set(dir(hf))
