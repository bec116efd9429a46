"""What only a process of its own shows: exit codes, signals, memory limits, start time."""

import json
import resource
import signal
import subprocess
import sys
import time

import pytest


def start(environment, *argv, module="experiments", **options):
    words = [sys.executable, "-m", module, *map(str, argv)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(words, env=environment, **pipes | options)


def finish(process, timeout=120):
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


@pytest.mark.parametrize("argv", [[], ["run", "toy", "--help"]])
def test_list_and_help_take_less_than_three_seconds(environment, argv):
    def processor_time():  # of finished children: what the command costs, whatever else the machine is doing
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    before = processor_time()
    code, out, err = finish(start(environment, *argv))
    assert (code, err) == (0, "")
    assert "toy" in out
    assert processor_time() - before < 3


def test_a_module_runs_by_itself_and_wrong_flags_exit_2(environment, tmp_path):
    code, out, err = finish(start(environment, "--preset", "smoke", "--out", tmp_path, module="experiments.toy"))
    assert (code, err) == (0, "")
    assert "does not hold" in out
    code, _, err = finish(start(environment, "--items", -1, module="experiments.toy"))
    assert code == 2
    assert "Traceback" not in err
    assert err.splitlines()[-1] == "error: items: found -1, expected at least 1"


@pytest.fixture
def interruptible():
    """A process started in the background by a script ignores SIGINT, and so would its children: not here."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_stopped_run_continues_where_it_was(environment, tmp_path, sent, code):
    argv = ("run", "toy", "--preset", "smoke", "--mode", "slow", "--items", 8, "--out", tmp_path)
    process = start(environment, *argv)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("toy/*/chunks/item-3.npz")) and time.monotonic() < deadline:
        time.sleep(0.02)
    (folder,) = (tmp_path / "toy").iterdir()
    process.send_signal(sent)
    found, _, err = finish(process)
    assert found == code
    assert "Traceback" not in err
    if sent != signal.SIGKILL:
        assert "the same command continues it" in err
        assert not (folder / "lock").exists()
    done = {p.name: p.stat().st_mtime_ns for p in folder.glob("chunks/*.npz")}
    assert 4 <= len(done) < 8
    found, out, err = finish(start(environment, *argv))
    assert (found, err) == (0, "")
    assert f"continuing an unfinished run ({len(done)} chunks are done)" in out
    assert all((folder / "chunks" / name).stat().st_mtime_ns == written for name, written in done.items())
    assert len((folder / "metrics.csv").read_text().splitlines()) == 1 + 2 * 8
    assert not (folder / "lock").exists()


def test_two_runs_in_one_folder(environment, tmp_path):
    argv = ("run", "toy", "--preset", "smoke", "--mode", "slow", "--items", 600, "--out", tmp_path)
    process = start(environment, *argv)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("toy/*/chunks/item-3.npz")) and time.monotonic() < deadline:
        time.sleep(0.02)
    code, _, err = finish(start(environment, *argv))
    process.terminate()
    assert finish(process)[0] == 143
    assert code == 2
    assert f"in use by pid {process.pid} host" in err.splitlines()[-1]
    assert len(err.splitlines()) == 1


def test_out_of_memory_gives_the_size_and_the_knob(environment, tmp_path):
    items = 1 << 23  # 512 TiB, four times what a process can address: no limit has to be set for it to fail
    code, _, err = finish(start(environment, "run", "toy", "--mode", "xla", "--items", items, "--out", tmp_path))
    assert code == 1
    assert "Traceback" not in err
    line = err.splitlines()[-1]
    assert line.startswith("error: out of memory: could not allocate 512 TiB with ")
    assert line.endswith(f"lower --items (now {items})")


def test_a_local_sweep_runs_processes(environment, tmp_path):
    argv = ("sweep", "toy", "--preset", "smoke", "--items", 5, "--grid", "mode=run,refuse", "--jobs", 2)
    code, out, err = finish(start(environment, *argv, "--out", tmp_path))
    assert code == 1
    (result,) = tmp_path.glob("toy/*/result.json")
    assert json.loads(result.read_text())["config"]["items"] == 5
    assert "failed: weights: found none, expected a folder" in " ".join(out.split())
    assert "Traceback" not in err
    assert len(list(tmp_path.glob("toy/*/log.txt"))) == 2


def test_a_closed_pipe_is_no_error(environment):
    process = start(environment, "list", stderr=subprocess.PIPE)
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    assert process.wait() in (0, 1, 141)
    assert "Traceback" not in err
