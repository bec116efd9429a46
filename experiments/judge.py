"""When to trust a judge: does a learnt confidence accept more verdicts than a heuristic one at the same guarantee?

Part one, made views whose law is known: who ranks best, and how often do thresholds break their promise? Part two, the
500 real comparisons of Chatbot Arena with one human label and three judges, over random splits into training,
calibration and test; GPT-4 is the judge in question. Without --data or JAXMETH_DATA a made table stands in for it.

Claim: ranking with an adaptive margin orders verdicts better than simulated annotators and than a fixed margin (AUROC
.787 against .735 and .752 on Chatbot Arena), so that more are accepted at the same agreement (arXiv 2605.15416).
Command: python -m experiments run judge --preset smoke
Expected: on made views the learnt confidences rank far better; on the 500 real rows no difference in coverage shows.
Minutes: smoke 1, laptop 8.
"""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments import core, judge_data, judge_methods, rules

ABOUT = core.About(
    claim="A learnt margin-adaptive confidence accepts more of a judge's verdicts at a guaranteed agreement.",
    minutes={"smoke": 1, "laptop": 8},
    needs="nothing",
    knob="made_test",
)
GRID = 1001
SHOWN = ("predictive probability", "simulated annotators", "logistic regression", "vanilla ranking", "adaptive margin")


@dataclass(frozen=True, kw_only=True)
class Config(core.Config):
    """How many splits, which levels, how much training."""

    alphas: tuple[float, ...] = (0.1, 0.15, 0.2)
    """Tolerated rates of disagreement among accepted verdicts."""
    delta: float = 0.1
    """Probability with which the guarantee may fail."""
    min_count: int = 50
    """Accepted calibration items from which testing starts; fixed in advance."""
    splits: int = 200
    """Random splits of the table: half trains, a quarter calibrates, a quarter tests."""
    repeats: int = 40
    """Independent draws of made views, each with its own training."""
    made_train: int = 3000
    """Made items that train."""
    made_calibration: int = 500
    """Made items that calibrate."""
    made_test: int = 4000
    """Made items that test."""
    calibrations: int = 2000
    """Calibration sets for the violation rates on made views."""
    epochs: int = 30
    """Of every training."""
    pairs: int = 5000
    """Of agreements and disagreements in every training."""
    data: Path | None = None
    """Folder of real extracts (else JAXMETH_DATA); without one the table is made."""
    shapes_only: bool = False
    """Only check that training on 155 views fits together: shapes, nothing computed."""

    def __post_init__(self):
        super().__post_init__()
        self.require(
            alphas=(1e-6, 1 - 1e-6), delta=(1e-9, 1 - 1e-9), min_count=(1, None), splits=(1, None), repeats=(1, None),
            made_train=(2, None), made_calibration=(1, None), made_test=(2, None), calibrations=(1, None),
            epochs=(1, None), pairs=(1, None),
        )  # fmt: skip


PRESETS = {
    "smoke": Config(splits=25, repeats=10, made_train=300, made_test=1000, calibrations=200, epochs=6, pairs=1000),
    "laptop": Config(),
    "paper": Config(splits=1000, repeats=200, calibrations=10_000, shapes_only=True),
}


class Judged(NamedTuple):
    """Confidences by method, [R, q] on calibration and test; agreements likewise."""

    calibration: dict[str, np.ndarray]
    test: dict[str, np.ndarray]
    right_calibration: np.ndarray
    right_test: np.ndarray


def run(cfg: Config, folder: core.RunDir | None = None) -> core.Result:
    """Made views, then the table."""
    folder = folder or core.RunDir()
    if cfg.shapes_only:
        from experiments.shapes import judge_shapes

        return judge_shapes()
    path = core.data_file("06-judge-confidence", "judge_probs.csv", cfg.data)
    table = judge_data.read(path) if path else judge_data.made_table(500, cfg.seed)
    made = _made(cfg, folder)
    promises, claims = _promises(cfg, made)
    ranks = _rank_rows(made)
    claims = _rank_claims(made) + claims
    source = f"{len(table.agree)} {'real' if path else 'made'} comparisons"
    real = _table(cfg, folder, table)
    rows, more = _selective(cfg, real, source)
    claims += more
    return core.Result(
        rows={
            "made views: ranking": ranks,
            "made views: promises": promises,
            f"{source}: ranking": _rank_rows(real),
            f"{source}: selective judging": rows,
            f"{source}: cascade": _cascade(cfg, table),
        },
        claims=claims,
        figures={
            "agreement_coverage": lambda f: _draw(f, cfg, real, source),
            "agreement_coverage_made": lambda f: _draw(f, cfg, made, "made views"),
        },
        notes=[
            f"Made views: {cfg.repeats} independent draws, {cfg.made_train} items train, {cfg.made_calibration} "
            f"calibrate; violations over {cfg.calibrations} calibration sets of a known law, exact binomial intervals.",
            f"{source}: {cfg.splits} splits; brackets hold the middle 95% of them. Splits share their rows, so this is "
            "no interval of the mean, and a quarter of the rows may miss a target by chance.",
            f"The judge in question is right in {table.agree.mean():.3f}. Testing starts at {cfg.min_count} accepted "
            "items. Single prompts and verbalised confidence are not in the table.",
            "A guarantee holds over all calibrations: the rate among the certified ones alone may be lower.",
            "Temperature and isotonic scaling keep the order (but for ties): only the scale of the threshold changes.",
        ],
    )


# --- confidences -----------------------------------------------------------------------------------------------------


def _learn(cfg: Config, folder: core.RunDir, name: str, s, agree, asked, cut: int) -> tuple[dict, dict]:
    """Learnt confidences of the views asked [R, q, T], cut into calibration and test."""
    first, second = {}, {}
    for method, fitting in judge_methods.settings(cfg.epochs, cfg.pairs).items():
        conf, gamma = judge_methods.train(folder, f"{name} {method}", fitting, s, agree, asked, cfg.seed)
        folder.log(0, method, gamma=float(gamma.mean()))
        first[method], second[method] = conf[:, :cut], conf[:, cut:]
    return first, second


def _rescaled(heuristic: np.ndarray, agree: np.ndarray, asked: np.ndarray) -> dict[str, np.ndarray]:
    """The order-preserving scalings of a heuristic, [R, q], fitted on [R, n]."""
    rows = list(zip(heuristic, agree, asked, strict=True))
    scalings = (judge_methods.temperature, judge_methods.isotonic)
    return {
        name: np.stack([scale(*row) for row in rows]).astype(np.float32)
        for name, scale in zip(judge_methods.ORDER_PRESERVING, scalings, strict=True)
    }


def _made(cfg: Config, folder: core.RunDir) -> Judged:
    import jax

    n, cut = cfg.made_train, cfg.made_calibration
    keys = jax.random.split(jax.random.key(cfg.seed), cfg.repeats)
    draw = jax.jit(lambda keys: jax.lax.map(lambda k: judge_data.made_rows(k, n + cut + cfg.made_test), keys))
    rows = {name: np.asarray(value) for name, value in draw(keys).items()}
    s, agree = rows.pop("s"), rows.pop("agree")
    rows |= _rescaled(rows["simulated annotators"][:, :n], agree[:, :n], rows["simulated annotators"])
    first = {name: v[:, n : n + cut] for name, v in rows.items()}
    second = {name: v[:, n + cut :] for name, v in rows.items()}
    learnt = _learn(cfg, folder, "made", s[:, :n], agree[:, :n], s[:, n:], cut)
    return Judged(first | learnt[0], second | learnt[1], agree[:, n : n + cut], agree[:, n + cut :])


def _table(cfg: Config, folder: core.RunDir, table: judge_data.Rows) -> Judged:
    rng = np.random.default_rng(cfg.seed)
    n = len(table.agree)
    order = np.stack([rng.permutation(n) for _ in range(cfg.splits)])
    train, rest, cut = order[:, : n // 2], order[:, n // 2 :], n // 4
    found = {name: v[rest] for name, v in table.heuristics.items()}
    heuristic = table.heuristics["simulated annotators"]
    found |= _rescaled(heuristic[train], table.agree[train], heuristic[rest])
    learnt = _learn(cfg, folder, "table", table.s[train], table.agree[train], table.s[rest], cut)
    agree = table.agree[rest]
    first = {name: v[:, :cut] for name, v in found.items()}
    second = {name: v[:, cut:] for name, v in found.items()}
    return Judged(first | learnt[0], second | learnt[1], agree[:, :cut], agree[:, cut:])


# --- ranking ---------------------------------------------------------------------------------------------------------


def _rank_rows(judged: Judged) -> core.Rows:
    import jax
    import jax.numpy as jnp

    from jaxmeth.uncertainty.judge import monotonicity_violation

    falls = jax.jit(jax.vmap(monotonicity_violation))
    rows = []
    for name, conf in judged.test.items():
        strict, area = judge_methods.ranking(conf, judged.right_test)
        falling = np.asarray(falls(jnp.asarray(conf, jnp.float32), jnp.asarray(judged.right_test)))
        rows.append(
            {
                "confidence": name,
                "misranked pairs": rules.spread(strict),
                "AUROC": rules.spread(area),
                "bins that fall": rules.spread(falling),
            }
        )
    return rows


def _rank_claims(judged: Judged) -> list[core.Claim]:
    """Differences over independent draws: a bootstrap interval of the mean."""
    risk = {name: 1 - judge_methods.ranking(conf, judged.right_test)[1] for name, conf in judged.test.items()}

    def gain(better: str, worse: str) -> core.Claim:
        found = core.bootstrap_interval(np.mean, risk[worse] - risk[better])
        return core.Claim(f"made views: {better} misranks less than {worse}", found, ">", 0)

    return [gain("vanilla ranking", "simulated annotators"), gain("adaptive margin", "vanilla ranking")]


# --- promises on made views ------------------------------------------------------------------------------------------


@lru_cache
def _tests(count: int, calibrations: int, alphas: tuple[float, ...], delta: float, min_count: int):
    """``(conf [N], error [N], key) -> lam [3, R, A]``: calibration sets drawn from N items, three rules."""
    import jax
    import jax.numpy as jnp

    from jaxmeth.uncertainty import judge

    grid = jnp.linspace(0.0, 1.0, GRID)

    def one(conf, error, key):
        rows = jax.random.randint(key, (count,), 0, conf.shape[0])
        conf, error = conf[rows], error[rows]

        def guaranteed(alpha, compat):
            return judge.fixed_sequence_test(conf, error, alpha, delta, grid, min_count, compat).lam

        accepted = conf[None] >= grid[:, None]
        number = accepted.sum(1)
        rate = (accepted & error[None]).sum(1) / jnp.maximum(number, 1)

        def naive(alpha):
            passed = (number >= min_count) & (rate <= alpha)
            return jnp.where(passed.any(), grid[jnp.argmax(passed)], jnp.inf)

        levels = jnp.asarray(alphas)
        rule = [jax.vmap(lambda a, compat=compat: guaranteed(a, compat))(levels) for compat in (False, True)]
        return jnp.stack([*rule, jax.vmap(naive)(levels)])

    def many(conf, error, key):
        keys = jax.random.split(key, calibrations)
        return jnp.moveaxis(jax.lax.map(lambda k: one(conf, error, k), keys, batch_size=20), 1, 0)

    return jax.jit(many)


def _promises(cfg: Config, made: Judged) -> tuple[core.Rows, list[core.Claim]]:
    """Calibration sets drawn with replacement from one draw's test items, which are then the exact law."""
    import jax
    import jax.numpy as jnp

    grid = np.linspace(0.0, 1.0, GRID, dtype=np.float32)
    error = ~made.right_test[0]
    tests = _tests(cfg.made_calibration, cfg.calibrations, cfg.alphas, cfg.delta, cfg.min_count)
    names = ("fixed-sequence test", "public code", "naive (empirical rate)")
    rows = []
    for method in ("simulated annotators", "adaptive margin"):
        conf = made.test[method][0].astype(np.float32)
        accepted = conf[None] >= grid[:, None]
        number = accepted.sum(1)
        risk = (accepted & error[None]).sum(1) / np.maximum(number, 1)
        lams = np.asarray(tests(jnp.asarray(conf), jnp.asarray(error), jax.random.key(cfg.seed + 1)))
        for rule, lam in zip(names, lams, strict=True):
            for a, alpha in enumerate(cfg.alphas):
                finite = np.isfinite(lam[:, a])
                place = np.searchsorted(grid, lam[finite, a])
                broken = risk[np.minimum(place, GRID - 1)] > alpha
                covered = np.zeros(len(finite))
                covered[finite] = number[np.minimum(place, GRID - 1)] / len(conf)
                rows.append(
                    {"confidence": method, "alpha": alpha, "rule": rule}
                    | {"violations": rules.binomial(int(broken.sum()), len(finite)), "certified": float(finite.mean())}
                    | {"coverage": rules.spread(covered)}
                )
    limit = rules.allowed(cfg.delta, cfg.calibrations)
    worst = max(r["violations"].value for r in rows if r["rule"] == names[0])
    naive = max((r["violations"] for r in rows if r["rule"] == names[2]), key=lambda v: v.value)
    return rows, [
        core.Claim("made views, fixed-sequence test: worst violation rate", worst, "<=", limit),
        core.Claim("made views, naive threshold: worst violation rate", naive, ">", cfg.delta),
    ]


# --- selective judging of the table ----------------------------------------------------------------------------------


@lru_cache
def _thresholds(delta: float, min_count: int):
    import jax

    from jaxmeth.uncertainty import judge

    def one(conf, error, alpha):
        found = judge.fixed_sequence_test(conf, error, alpha, delta, min_count=min_count)
        # What the strictest test would have needed.
        strictest = found.count.shape[0] - 1 - (found.count[::-1] >= min_count).argmax()
        return found.lam, found.upper[strictest]

    return jax.jit(jax.vmap(jax.vmap(one, in_axes=(None, None, 0)), in_axes=(0, 0, None)))


def _selective(cfg: Config, judged: Judged, source: str) -> tuple[core.Rows, list[core.Claim]]:
    import jax.numpy as jnp

    find = _thresholds(cfg.delta, cfg.min_count)
    coverage: dict[tuple[str, float], np.ndarray] = {}
    rows, claims = [], []
    for name, conf in judged.calibration.items():
        error = ~judged.right_calibration
        lam, needed = (
            np.asarray(v) for v in find(jnp.asarray(conf, jnp.float32), jnp.asarray(error), jnp.asarray(cfg.alphas))
        )
        for a, alpha in enumerate(cfg.alphas):
            accepted = judged.test[name].astype(np.float32) >= lam[:, a : a + 1]
            number = accepted.sum(1)
            agreement = (accepted & judged.right_test).sum(1) / np.maximum(number, 1)
            used = np.isfinite(lam[:, a]) & (number > 0)
            kept = int((agreement[used] >= 1 - alpha - 1e-9).sum())
            coverage[name, alpha] = accepted.mean(1)
            rows.append(
                {"confidence": name, "agreement target": 1 - alpha}
                | {"coverage": rules.spread(accepted.mean(1)), "certified": float(np.isfinite(lam[:, a]).mean())}
                | {"agreement": rules.spread(np.where(used, agreement, np.nan))}
                | {"success (certified)": rules.binomial(kept, int(used.sum()))}
                | {"success (all)": rules.binomial(kept + int((~used).sum()), len(used))}
                | {"smallest alpha": float(np.median(needed[~np.isfinite(lam[:, a]), a])) if not used.all() else None}
            )
    for alpha in cfg.alphas:
        ahead = rules.spread(coverage["adaptive margin", alpha] - coverage["simulated annotators", alpha])
        text = f"{source}: coverage of the adaptive margin less the heuristic's at agreement {1 - alpha:g}"
        claims.append(core.Claim(text, ahead, ">=", 0))
    limit = 1 - rules.allowed(cfg.delta, cfg.splits)
    for which, text in (("all", "with nothing accepted as success"), ("certified", "of certified thresholds alone")):
        worst = np.nanmin([r[f"success ({which})"].value for r in rows])
        claims.append(core.Claim(f"{source}: least success rate on test, {text}", worst, ">=", limit))
    return rows, claims


def _cascade(cfg: Config, table: judge_data.Rows) -> core.Rows:
    """Judges in order of cost, calibrated on half of the rows; heuristic confidences need no training."""
    import jax
    import jax.numpy as jnp

    from jaxmeth.uncertainty import judge

    rng = np.random.default_rng(cfg.seed + 1)
    n = len(table.agree)
    order = np.stack([rng.permutation(n) for _ in range(cfg.splits)])
    conf = jnp.asarray(np.stack([c for c, _ in table.each]))
    error = jnp.asarray(np.stack([e for _, e in table.each]))

    def one(rows, alpha):
        first, rest = rows[: n // 2], rows[n // 2 :]
        judges = [(c[first], e[first]) for c, e in zip(conf, error, strict=True)]
        lams = judge.cascade_calibrate(judges, alpha, cfg.delta, min_count=cfg.min_count)
        chosen = judge.cascade_apply([c[rest] for c in conf], lams)
        wrong = jnp.take_along_axis(error[:, rest], jnp.maximum(chosen, 0)[None], axis=0)[0]
        return chosen, (chosen >= 0) & ~wrong

    found = jax.jit(jax.vmap(jax.vmap(one, in_axes=(None, 0)), in_axes=(0, None)))
    chosen, right = (np.asarray(v) for v in found(jnp.asarray(order), jnp.asarray(cfg.alphas)))
    rows = []
    for a, alpha in enumerate(cfg.alphas):
        accepted = chosen[:, a] >= 0
        agreement = np.where(accepted.any(1), right[:, a].sum(1) / np.maximum(accepted.sum(1), 1), np.nan)
        kept = int((agreement[accepted.any(1)] >= 1 - alpha - 1e-9).sum())
        rows.append(
            {"agreement target": 1 - alpha, "coverage": rules.spread(accepted.mean(1))}
            | {"agreement": rules.spread(agreement)}
            | {"success (certified)": rules.binomial(kept, int(accepted.any(1).sum()))}
            | {f"by {name}": float((chosen[:, a] == j).mean()) for j, name in enumerate(judge_data.JUDGES)}
        )
    return rows


def _draw(figure: Any, cfg: Config, judged: Judged, title: str) -> None:
    axes = figure.subplots()
    n = judged.right_test.shape[1]
    start = max(n // 25, 1)
    coverage = np.arange(1, n + 1) / n
    for name in SHOWN:
        if name in judged.test:
            order = np.argsort(-judged.test[name], axis=1, kind="stable")
            right = np.take_along_axis(judged.right_test, order, axis=1)
            rate = (right.cumsum(1) / np.arange(1, n + 1)).mean(0)
            axes.plot(coverage[start:], rate[start:], label=name)
    for alpha in cfg.alphas:
        axes.axhline(1 - alpha, color="0.8", linestyle="--")
    axes.set(xlabel="share of verdicts accepted", ylabel="agreement with the human", xlim=(0, 1), title=title)
    axes.legend()


if __name__ == "__main__":
    core.main(__file__)
