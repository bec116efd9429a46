"""Toy: does the mean of nine noisy draws beat a single draw?

Claim: averaging n draws cuts the error by sqrt(n).
Command: python -m experiments run toy --preset smoke
Expected: a ratio of errors near 3. Minutes: 0.1.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from experiments import core

ABOUT = core.About(
    claim="The mean of nine draws has an error three times smaller than that of a single draw.",
    minutes={"smoke": 0.1, "laptop": 2},
    needs="nothing",
    knob="items",
)


@dataclass(frozen=True, kw_only=True)
class Config(core.Config):
    """Noise, and what goes wrong."""

    items: int = 100
    """Number of items, each drawn nine times."""
    scale: float = 1.0
    """Standard deviation of the noise."""
    levels: tuple[float, ...] = (0.1, 0.5)
    """Unused numbers."""
    fast: bool = False
    """Unused flag."""
    data: Path | None = None
    """Folder of real data."""
    mode: Literal["run", "refuse", "bug", "memory", "xla", "full", "data", "missing", "extra", "slow"] = "run"
    """What happens in the run."""

    def __post_init__(self):
        super().__post_init__()
        self.require(items=(1, None), scale=(0, 10), levels=(0, 1))


PRESETS = {"smoke": Config(items=20), "laptop": Config(), "paper": Config(items=10_000)}


def run(cfg: Config, folder: core.RunDir | None = None) -> core.Result:
    """Draw, item by item, and compare."""
    folder = folder or core.RunDir()
    _go_wrong(cfg)
    rng = np.random.default_rng(cfg.seed)
    draws = cfg.scale * rng.normal(size=(cfg.items, 9))
    single, mean = [], []
    for i in core.progress(range(cfg.items), description="drawing"):
        if cfg.mode == "slow" and i >= 4:
            time.sleep(0.2)
        stored = folder.cached(f"item-{i}", lambda i=i: {"errors": np.abs([draws[i, 0], draws[i].mean()])})
        single.append(stored["errors"][0])
        mean.append(stored["errors"][1])
        folder.log(i, "single", error=np.mean(single))
        folder.log(i, "mean", error=np.mean(mean), draws=9)
    ratio = core.bootstrap_interval(lambda a, b: a.mean() / b.mean(), single, mean, resamples=200)

    def draw(figure):
        axes = figure.subplots()
        axes.plot(np.sort(single), label="single")
        axes.plot(np.sort(mean), label="mean of nine")
        axes.legend()

    return core.Result(
        rows=[
            {"method": "single", "error": core.bootstrap_interval(np.mean, single, resamples=200), "draws": 1},
            {"method": "mean of nine", "error": core.bootstrap_interval(np.mean, mean, resamples=200), "draws": 9},
        ],
        claims=[
            core.Claim("the mean is better", ratio, ">", 1),
            core.Claim("errors differ by <twenty> times", ratio, ">=", 20),
        ],
        figures={"errors": draw},
        notes=["made data: normal noise"],
    )


def _go_wrong(cfg: Config) -> None:
    if cfg.mode == "refuse":
        raise core.ConfigError("weights: found none, expected a folder")
    if cfg.mode == "bug":
        raise KeyError("bug")
    if cfg.mode == "memory":
        raise MemoryError("Unable to allocate 7.28 TiB for an array")
    if cfg.mode == "xla":
        import jax.numpy as jnp

        jnp.ones((cfg.items, 1 << 20, 16), jnp.float32).block_until_ready()
    if cfg.mode == "full":
        raise OSError(28, "No space left on device", "metrics.csv")
    if cfg.mode == "data":
        core.data_file("00-toy", "toy.csv", cfg.data)
    if cfg.mode == "extra":
        raise ImportError("hub names need huggingface_hub: install jaxmeth[hf]")
    if cfg.mode == "missing":
        import package_that_is_missing  # noqa: F401


if __name__ == "__main__":
    core.main(__file__)
