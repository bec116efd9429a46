"""Errors and outliers of the down projection's inputs and weights, by rotation block and order: PeRQ's first table."""

from typing import NamedTuple

import numpy as np

from experiments import core

ORDERS = ("none", "random", "absmax", "zigzag", "MassDiff")
DRAWS = tuple(f"random-{i}" for i in range(1, 7))
"""More random orders: how far regrouping the channels alone moves a perplexity."""
NEAR = tuple(f"near-{i}" for i in range(1, 4))
"""Random orders that move no channel by more than two blocks."""
# Mean error of A4 inputs over the layers of SmolLM2-135M, and outliers left, measured with torch (methods file 09).
STATED = {
    ("A4 error", 16): {"none": 0.179, "random": 0.178, "absmax": 0.200, "zigzag": 0.158, "MassDiff": 0.157},
    ("A4 error", 64): {"none": 0.1425, "random": 0.141, "absmax": 0.171, "zigzag": 0.1305, "MassDiff": 0.1286},
    ("A4 error", 256): {"none": 0.126, "random": 0.126, "absmax": 0.152, "zigzag": 0.120, "MassDiff": 0.119},
    ("outlier ratio", 16): {"none": 0.374, "absmax": 0.456, "zigzag": 0.365, "MassDiff": 0.354},
    ("outlier ratio", 64): {"none": 0.294, "absmax": 0.382, "zigzag": 0.288, "MassDiff": 0.281},
}


class Lab(NamedTuple):
    """The configuration (``perq.Config``), the model and the text."""

    cfg: core.Config
    model: object
    params: dict
    calibration: np.ndarray
    evaluation: np.ndarray

    def batches(self, tokens: np.ndarray) -> list[np.ndarray]:
        """Windows [n, T] in batches."""
        return [tokens[i : i + self.cfg.batch] for i in range(0, len(tokens), self.cfg.batch)]


def strategies(seed: int) -> dict:
    from jaxmeth import quant

    found = (quant.by_identity, quant.by_chance(seed), quant.by_absmax, quant.by_zigzag, quant.by_mass)
    draws = {name: quant.by_chance(seed + i) for i, name in enumerate(DRAWS, 1)}
    return dict(zip(ORDERS, found, strict=True)) | draws | {name: _by_near(seed + i) for i, name in enumerate(NEAR, 1)}


def _by_near(seed: int):
    def order(stats, block: int) -> np.ndarray:
        width = stats.total.shape[-1]
        return np.argsort(np.arange(width) + 2 * block * np.random.default_rng(seed).random(width))

    return order


def find_orders(lab: Lab, folder: core.RunDir) -> dict[tuple[str, int], np.ndarray]:
    """Orders [L, F] by name and block, from the float model's inputs."""
    import jax.numpy as jnp

    from jaxmeth import quant
    from jaxmeth.quant import layerwise

    def stats():
        return layerwise.masses(lab.params, lab.model, lab.batches(lab.calibration), "mlp.down")._asdict()

    found = quant.MassState(**{k: jnp.asarray(v) for k, v in folder.cached("stats", stats).items()})
    width, orders = lab.model.intermediate_size, {}
    more = lab.cfg.others if lab.cfg.arms == "all" else ()
    named = [("block", lab.cfg.block), *(("blocks", b) for b in lab.cfg.blocks), *(("others", b) for b in more)]
    for option, block in named:
        if width % block or not quant.has_hadamard(block):
            raise core.ConfigError(f"{option}: found {block}, expected a Hadamard block that divides the width {width}")
    for block in {b for _, b in named}:
        for name, order in strategies(lab.cfg.seed).items():
            orders[name, block] = np.stack([order(found.layer(i), block) for i in range(lab.model.num_layers)])
    return orders


MEASURES = ("A4 error", "outlier ratio", "W4 error", "output error, A4", "output error, W4", "output error")


def _measure(lab: Lab, orders: np.ndarray, block: int | None) -> np.ndarray:
    """``MEASURES`` of each order [P, L, F]: [6, P, L]."""
    import jax
    import jax.numpy as jnp

    from jaxmeth import quant
    from jaxmeth.quant import layerwise

    def one(x, w, idx):
        turn = (lambda a: a) if block is None else (lambda a: quant.block_hadamard(a, block))
        y, v = turn(x[:, idx]), turn(w[:, idx])
        yq = quant.fake_quantize_act(y, lab.cfg.bits)
        exact, rounded = quant.QTensor(v, bits=None), quant.quantize_weight(v, lab.cfg.bits)
        top = lambda a: jnp.abs(a).max(1).mean()  # noqa: E731
        size = jnp.linalg.norm
        weight_error = size(quant.dequantize(rounded) - v) / size(v)
        outputs = [quant.relative_error(v, q, y, a) for q, a in ((exact, yq), (rounded, y), (rounded, yq))]
        return jnp.stack([size(yq - y) / size(y), top(y) / top(x), weight_error, *outputs])

    @jax.jit
    def measure(params, tokens, orders):
        def body(x, this):
            layer_params, layer, idx = this
            x, seen = layerwise.run_layer(lab.model, layer_params, layer, x, ("mlp.down",))
            flat = seen["mlp.down"].reshape(-1, lab.model.intermediate_size)
            w = layer_params["mlp"]["down"]["weight"].astype(flat.dtype)
            return x, jax.lax.map(lambda i: one(flat, w, i), idx)

        layers = jnp.arange(lab.model.num_layers)
        x = layerwise.embed(params, lab.model, tokens)
        return jax.lax.scan(body, x, (params["layers"], layers, orders))[1]

    tokens = jnp.asarray(lab.evaluation.reshape(-1)[: lab.cfg.measured][None])
    return np.asarray(measure(lab.params, tokens, jnp.asarray(np.swapaxes(orders, 0, 1)))).transpose(2, 1, 0)


def errors(lab: Lab, folder: core.RunDir) -> tuple[dict[str, core.Rows], list[core.Claim]]:
    """The table of errors, what each order changes in them, and the claims about both."""
    orders = find_orders(lab, folder)
    width = lab.model.intermediate_size
    same = np.broadcast_to(np.arange(width), (1, lab.model.num_layers, width))
    settings = [("no rotation", None, ["none"], same)]
    settings += [(f"b={b}", b, list(ORDERS), np.stack([orders[o, b] for o in ORDERS])) for b in lab.cfg.blocks]
    settings += [("full", width, ["none"], same)]
    rows, changes, claims, gap = [], [], [], {}
    for title, block, names, idx in core.progress(settings, description="errors"):
        values = folder.cached(f"errors-{block}", lambda i=idx, b=block: {"v": _measure(lab, i, b)})["v"]
        for p, name in enumerate(names):
            means = {m: core.bootstrap_interval(np.mean, values[k, p]) for k, m in enumerate(MEASURES)}
            rows.append({"rotation": title, "order": name} | means)
            for measure in MEASURES[:2]:
                stated = STATED.get((measure, block), {}).get(name)
                if stated:
                    gap[measure] = max(gap.get(measure, 0.0), abs(means[measure].value / stated - 1))
            if p:
                change = np.log(values[:, p] / values[:, 0])
                each = {m: core.bootstrap_interval(np.mean, change[k]) for k, m in enumerate(MEASURES)}
                changes.append({"rotation": title, "order": name} | each)
        if len(names) > 1:
            claims += _claims(title, names, values)
    if lab.cfg.model is None:
        claims += [core.Claim(f"{m}: largest deviation from the stated table", v, "<=", 0.05) for m, v in gap.items()]
    return {"down projection": rows, "log change against no order": changes}, claims


def _claims(title: str, names: list[str], values: np.ndarray) -> list[core.Claim]:
    """The order of the orders, by the rounded inputs; whether the weight pays for it."""
    by = {m: dict(zip(names, v, strict=True)) for m, v in zip(MEASURES, values, strict=True)}
    pairs = (("absmax", "none"), ("none", "zigzag"), ("none", "MassDiff"), ("zigzag", "MassDiff"))
    compared = [("A4 error", *pair) for pair in pairs]
    compared += [(m, "none", "MassDiff") for m in ("output error, W4", "output error")]
    return [
        core.Claim(f"{title}: {m} with {worse} is above that with {better}",
                   core.bootstrap_interval(np.mean, by[m][worse] - by[m][better]), ">", 0)
        for m, worse, better in compared
    ]  # fmt: skip


def draw_errors(figure, rows: core.Rows) -> None:
    axes = figure.subplots(1, 2)
    titles = list(dict.fromkeys(r["rotation"] for r in rows))
    for ax, measure in zip(axes, MEASURES[:2], strict=True):
        for order in ORDERS:
            shown = [r for r in rows if r["order"] == order and r["rotation"].startswith("b=")]
            ax.plot([titles.index(r["rotation"]) for r in shown], [r[measure].value for r in shown], "o-", label=order)
        ends = [r for r in rows if not r["rotation"].startswith("b=")]
        ax.plot([titles.index(r["rotation"]) for r in ends], [r[measure].value for r in ends], "kx")
        ax.set_xticks(range(len(titles)), titles, rotation=30)
        ax.set_title(measure)
    axes[0].legend()
