"""Shared settings: shapes checked by beartype, silent broadcasting refused, key reuse refused, no network."""

import os
from pathlib import Path

# Set before JAX starts its backend. No LLVM optimisation and no MLIR fusion emitters, unless the caller sets flags:
# compiling is most of the tests' time and takes a quarter as long. The slow tests, which .ci/run starts with level 3,
# compile as users do.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true --xla_cpu_use_fusion_emitters=false "
    "--xla_cpu_parallel_codegen_split_count=1",
)
# Eight host devices, so that sharded code is tested on any machine.
os.environ["XLA_FLAGS"] += " --xla_force_host_platform_device_count=8"
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import jax
import jaxtyping
import pytest

jaxtyping.install_import_hook("jaxmeth", "shapes.check")

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_debug_key_reuse", True)

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture
def golden():
    """The folder of reference numbers."""
    return GOLDEN


@pytest.fixture
def x64():
    """Run one test in float64."""
    with jax.enable_x64(True):
        yield
