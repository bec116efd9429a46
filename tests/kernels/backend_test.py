"""Which implementation runs, and what it costs to have the others."""

import subprocess
import sys

import pytest

from jaxmeth.kernels.backend import resolve
from jaxmeth.types import ConfigError


def test_an_unknown_or_absent_backend_is_refused():
    assert resolve("auto") == "xla"
    with pytest.raises(ConfigError, match="backend: found 'cuda', expected one of auto"):
        resolve("cuda")
    with pytest.raises(ConfigError, match="backend: found 'tpu' on a machine with only cpu"):
        resolve("tpu")
    assert resolve("tpu", interpret=True) == "tpu"


def test_the_decoder_does_not_import_pallas():
    code = (
        "import sys; from jaxmeth import kernels, models; models.apply, kernels.block_attention;"
        "print([m for m in sys.modules if m.startswith('jax.experimental.pallas')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"
