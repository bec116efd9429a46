"""Confidences of a judge side by side: heuristic, rescaled, learnt; trained on many splits at once."""

from functools import lru_cache
from typing import Any

import numpy as np

from experiments import core

ORDER_PRESERVING = ("temperature scaling", "isotonic scaling")
LEARNT = ("logistic regression", "BCE network", "vanilla ranking", "adaptive margin")
BLOCK = 25


def settings(epochs: int, pairs: int) -> dict[str, Any]:
    """The trained confidences; the paper's values but for the linear one, which needs a larger step."""
    from jaxmeth.uncertainty.judge import FitConfig

    base = {"epochs": epochs, "pairs": pairs}
    return {
        "logistic regression": FitConfig(**base, loss="bce", hidden=(), lr=0.03),
        "BCE network": FitConfig(**base, loss="bce"),
        "vanilla ranking": FitConfig(**base, adaptive=False, beta=0.0),
        "adaptive margin": FitConfig(**base),
    }


@lru_cache
def _trainer(cfg: Any):
    import jax

    from jaxmeth.uncertainty import judge

    def one(key, s, agree, asked):
        state = judge.fit(key, s, agree, cfg)
        return judge.estimate(state, asked), state.gamma

    return jax.jit(jax.vmap(one))


def train(
    folder: core.RunDir, name: str, cfg: Any, s: np.ndarray, agree: np.ndarray, asked: np.ndarray, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Confidence [R, q] of the views asked [R, q, T] after training on [R, n, T], and the margins [R]; in blocks."""
    import jax

    keys = jax.random.split(jax.random.key(seed), len(s))
    size = min(BLOCK, len(s))

    def block(start: int) -> dict[str, np.ndarray]:
        rows = np.minimum(np.arange(start, start + size), len(s) - 1)
        conf, gamma = _trainer(cfg)(keys[rows], s[rows], agree[rows], asked[rows])
        return {"conf": np.asarray(conf), "gamma": np.asarray(gamma)}

    parts = []
    for start in core.progress(range(0, len(s), size), description=name):
        parts.append(folder.cached(f"{name.replace(' ', '-')}-{start:05d}", lambda start=start: block(start)))
    conf, gamma = (np.concatenate([p[k] for p in parts])[: len(s)] for k in ("conf", "gamma"))
    return conf, gamma


def temperature(conf: np.ndarray, agree: np.ndarray, asked: np.ndarray) -> np.ndarray:
    """``sigmoid(logit(conf) / T)`` with the T of least cross-entropy on the training rows."""
    grid = np.geomspace(0.1, 30, 80)
    z, y = _logit(conf), agree.astype(float)
    scaled = z[None] / grid[:, None]
    loss = np.mean(np.logaddexp(0, scaled) - y[None] * scaled, axis=1)
    return 1 / (1 + np.exp(-_logit(asked) / grid[loss.argmin()]))


def _logit(conf: np.ndarray) -> np.ndarray:
    clipped = np.clip(conf.astype(float), 1e-6, 1 - 1e-6)
    return np.log(clipped / (1 - clipped))


def isotonic(conf: np.ndarray, agree: np.ndarray, asked: np.ndarray) -> np.ndarray:
    """Least-squares monotone fit of agreement on confidence (pool adjacent violators), linear in between."""
    order = np.argsort(conf, kind="stable")
    blocks: list[list[float]] = []  # [sum of agreement, count, sum of confidence]
    for c, a in zip(conf[order], agree[order], strict=True):
        blocks.append([float(a), 1.0, float(c)])
        while len(blocks) > 1 and blocks[-2][0] * blocks[-1][1] >= blocks[-1][0] * blocks[-2][1]:
            last = blocks.pop()
            blocks[-1] = [x + y for x, y in zip(blocks[-1], last, strict=True)]
    total, count, place = np.array(blocks).T
    return np.interp(asked, place / count, total / count)


def ranking(conf: np.ndarray, agree: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Misranking rate (strict) and AUROC (ties half) of rows [R, q], over all pairs."""
    strict, area = [], []
    for c, a in zip(conf, agree.astype(bool), strict=True):
        right, wrong = np.sort(c[a]), np.sort(c[~a])
        pairs = max(len(right) * len(wrong), 1)
        above = np.searchsorted(right, wrong, side="left").sum()  # agreements strictly below a disagreement
        equal = np.searchsorted(right, wrong, side="right").sum() - above
        strict.append(above / pairs)
        area.append(1 - (above + 0.5 * equal) / pairs if len(right) and len(wrong) else 0.5)
    return np.array(strict), np.array(area)
