"""The toy experiment in ``plugin/``, visible in this process and to processes that tests start."""

import os
import sys
from pathlib import Path

import pytest

import experiments
from experiments import cli

PLUGIN = Path(__file__).parent / "plugin"


@pytest.fixture(autouse=True)
def _plugin(monkeypatch):
    monkeypatch.setattr(experiments, "__path__", [*experiments.__path__, str(PLUGIN / "experiments")])
    monkeypatch.delenv("JAXMETH_DATA", raising=False)
    yield
    sys.modules.pop("experiments.toy", None)


@pytest.fixture
def toy():
    """The toy experiment's module."""
    import importlib

    return importlib.import_module("experiments.toy")


@pytest.fixture
def command(capfd):
    """``command(*argv) -> (exit code, stdout, stderr)`` in this process."""

    def run(*argv):
        capfd.readouterr()
        code = cli.guarded([str(a) for a in argv])
        return code, *capfd.readouterr()

    return run


@pytest.fixture
def environment():
    """The environment of a process that sees the toy experiment."""
    path = os.pathsep.join(p for p in (str(PLUGIN), os.environ.get("PYTHONPATH")) if p)
    return {k: v for k, v in os.environ.items() if k != "JAXMETH_DATA"} | {"PYTHONPATH": path}
