"""Which implementation of a kernel runs."""

import jax

from jaxmeth.types import ConfigError

BACKENDS = ("auto", "reference", "xla", "tpu", "gpu")


def resolve(backend: str, interpret: object = False) -> str:
    """The implementation for ``backend``: "auto" is tpu on TPU, gpu on CUDA devices, xla elsewhere.

    ``interpret`` runs a Pallas kernel on any machine, for tests.

    Raises: ConfigError for an unknown name, or a backend whose hardware this process does not have.
    """
    if backend not in BACKENDS:
        raise ConfigError(f"backend: found {backend!r}, expected one of {', '.join(BACKENDS)}")
    here = jax.default_backend()
    if backend == "auto":
        return {"tpu": "tpu", "gpu": "gpu", "cuda": "gpu"}.get(here, "xla")
    if backend in ("tpu", "gpu") and not interpret and here not in (backend, {"gpu": "cuda"}.get(backend)):
        found = f"{backend!r} on a machine with only {here}"
        raise ConfigError(f"backend: found {found}, expected 'auto', or interpret=True")
    return backend
