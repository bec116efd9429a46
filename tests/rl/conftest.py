"""These tests compile many small functions once each; without LLVM's optimisations that takes half the time."""

import jax
import pytest


@pytest.fixture(scope="module", autouse=True)
def _compile_quickly():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
