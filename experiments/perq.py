"""PeRQ: does ordering the channels before a small block rotation save a model that is rounded to four bits?

The inputs of the down projection are permuted, rotated in blocks by a Hadamard matrix, then rounded. Tables: their
rounding error and outliers by block size and order; perplexity by order and by what is rounded (activations A4, weights
W4, both), to nearest and with Qronos, of the down projection alone and of all linear weights (PeRQ*).

Claim: with blocks of 16 MassDiff reaches up to 90% of the full rotation's perplexity, no order 46% (Llama 3.2 1B,
arXiv 2601.22347).
Command: python -m experiments run perq --preset smoke
Expected: error of the rounded inputs (laptop, measured; no rotation 0.309, full rotation 0.119)

    block   none    random  absmax  zigzag  MassDiff
    16      0.180   0.180   0.195   0.159   0.158
    64      0.143   0.141   0.166   0.132   0.129
    256     0.126   0.126   0.149   0.121   0.119

and, rounding the down projection alone to nearest (smoke, 512 tokens only), a lower perplexity with MassDiff than
without an order at b=16, W4A4; the full table of perplexities takes the laptop preset.
Minutes: smoke 2, laptop 25 (estimated: no undisturbed run yet).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from experiments import core, perq_text

ABOUT = core.About(
    claim="Permuting channels by mass before a block rotation saves perplexity at four bits.",
    minutes={"smoke": 2, "laptop": 25},
    needs="SmolLM2-135M",
    knob="batch",
)

ORDERS = ("none", "random", "absmax", "zigzag", "MassDiff")
# Mean error of A4 inputs over the layers of SmolLM2-135M, and outliers left, measured with torch (methods file 09).
STATED = {
    ("A4 error", 16): {"none": 0.179, "random": 0.178, "absmax": 0.200, "zigzag": 0.158, "MassDiff": 0.157},
    ("A4 error", 64): {"none": 0.1425, "random": 0.141, "absmax": 0.171, "zigzag": 0.1305, "MassDiff": 0.1286},
    ("A4 error", 256): {"none": 0.126, "random": 0.126, "absmax": 0.152, "zigzag": 0.120, "MassDiff": 0.119},
    ("outlier ratio", 16): {"none": 0.374, "absmax": 0.456, "zigzag": 0.365, "MassDiff": 0.354},
    ("outlier ratio", 64): {"none": 0.294, "absmax": 0.382, "zigzag": 0.288, "MassDiff": 0.281},
}


@dataclass(frozen=True, kw_only=True)
class Config(core.Config):
    """Which model and text, which blocks, how many tokens."""

    model: str | None = None
    """Hugging Face folder, hub name or .gguf file; without one SmolLM2-135M-Instruct."""
    data: Path | None = None
    """Folder of real extracts (else JAXMETH_DATA); without one the text is that of Python's own help topics."""
    blocks: tuple[int, ...] = (16, 64, 256)
    """Rotation blocks of the error table."""
    block: int = 16
    """Rotation block of the perplexities."""
    window: int = 512
    """Tokens of a window."""
    calibration: int = 2048
    """Calibration tokens; all of the text where it has fewer."""
    evaluation: int = 20_480
    """Evaluation tokens, from other text; all of it where it has fewer."""
    measured: int = 512
    """Evaluation tokens of the error table."""
    batch: int = 4
    """Windows at once."""
    bits: int = 4
    """Bits of weights and activations."""
    arms: str = "all"
    """Perplexities to measure: all, or nearest (round to nearest, the down projection alone)."""
    resamples: int = 2000
    """Bootstrap resamples of every interval."""
    shapes_only: bool = False
    """Without --model, only check that Qwen3-8B fits together: shapes, nothing computed."""

    def __post_init__(self):
        super().__post_init__()
        self.require(
            blocks=(2, None), block=(2, None), window=(2, None), calibration=(2, None), evaluation=(2, None),
            measured=(1, None), batch=(1, None), bits=(2, 8), resamples=(1, None),
        )  # fmt: skip
        if self.arms not in ("all", "nearest"):
            raise core.ConfigError(f"arms: found {self.arms!r}, expected all or nearest")


PRESETS = {
    "smoke": Config(calibration=256, evaluation=512, window=128, measured=128, blocks=(16,), arms="nearest"),
    "laptop": Config(),
    "paper": Config(window=2048, calibration=128 * 2048, evaluation=280_000, shapes_only=True),
}


class Arm(NamedTuple):
    """One perplexity: rotation ('no', 'block', 'full'), order, what is rounded, how, and which weights."""

    rotation: str
    order: str
    rounded: str
    how: str = "nearest"
    weights: str = "down"

    @property
    def key(self) -> str:
        return "-".join(self)


def arms(cfg: Config) -> list[Arm]:
    """What is measured, the comparisons that matter most first."""
    plain = [("block", "none"), ("block", "MassDiff"), ("full", "none"), ("no", "none")]
    found = [Arm(r, o, mode) for mode in ("W4A4", "A4", "W4") for r, o in plain]
    if cfg.arms == "all":
        found += [Arm(r, o, "W4A4", "Qronos") for r, o in plain[:3]]
        found += [Arm(r, o, "W4A4", "Qronos", "all") for r, o in plain[:3]]
        found += [Arm("block", o, "W4A4") for o in ("zigzag", "absmax", "random")] + [Arm("block", "zigzag", "A4")]
    return found


def run(cfg: Config, folder: core.RunDir | None = None) -> core.Result:
    """Errors and outliers, then perplexities."""
    folder = folder or core.RunDir()
    if cfg.shapes_only and cfg.model is None:
        from experiments.shapes_quant import perq_shapes

        return perq_shapes()
    from jaxmeth import hf

    checkpoint = hf.load(cfg.model) if cfg.model else hf.default()
    texts, source = perq_text.texts(cfg.data)
    calibration, evaluation = (
        perq_text.windows(checkpoint.tokenizer, text, count, cfg.window, name)
        for text, count, name in zip(
            texts, (cfg.calibration, cfg.evaluation), ("calibration", "evaluation"), strict=True
        )
    )
    lab = Lab(cfg, checkpoint.cfg, checkpoint.params, calibration, evaluation)
    errors, claims = _errors(lab, folder)
    table, more = _perplexities(lab, folder)
    return core.Result(
        rows={"inputs of the down projection": errors, "perplexity": table},
        claims=claims + more,
        figures={"errors": lambda f: _draw_errors(f, errors), "perplexity": lambda f: _draw_perplexity(f, table)},
        notes=[
            f"Text: {source}. Calibration {calibration.size:,}, evaluation {evaluation.size:,} tokens in windows of "
            f"{evaluation.shape[1]}. Intervals: 95%, bootstrap over windows (perplexity) or layers (errors), paired.",
            "A4: inputs to four bits, per token, asymmetric; W4: weights to four bits, per output channel, symmetric.",
            "W4 error: of the down projection's weight after the same order and rotation; output error: of its "
            "product, both rounded to nearest. An order made for the inputs also regroups the weight's columns.",
            "'recovered' is the full rotation's perplexity over this one; the paper's 90% and 46% are this ratio.",
        ],
    )


class Lab(NamedTuple):
    """The configuration, the model and the text."""

    cfg: Config
    model: object
    params: dict
    calibration: np.ndarray
    evaluation: np.ndarray

    def batches(self, tokens: np.ndarray) -> list[np.ndarray]:
        """Windows [n, T] in batches."""
        return [tokens[i : i + self.cfg.batch] for i in range(0, len(tokens), self.cfg.batch)]


def _strategies(seed: int) -> dict:
    from jaxmeth import quant

    found = (quant.by_identity, quant.by_chance(seed), quant.by_absmax, quant.by_zigzag, quant.by_mass)
    return dict(zip(ORDERS, found, strict=True))


def _orders(lab: Lab, folder: core.RunDir) -> dict[tuple[str, int], np.ndarray]:
    """Orders [L, F] by name and block, from the float model's inputs."""
    import jax.numpy as jnp

    from jaxmeth import quant
    from jaxmeth.quant import layerwise

    def stats():
        return layerwise.masses(lab.params, lab.model, lab.batches(lab.calibration), "mlp.down")._asdict()

    found = quant.MassState(**{k: jnp.asarray(v) for k, v in folder.cached("stats", stats).items()})
    width, orders = lab.model.intermediate_size, {}
    for block in {*lab.cfg.blocks, lab.cfg.block}:
        if width % block or not quant.has_hadamard(block):
            raise core.ConfigError(f"blocks: found {block}, expected Hadamard blocks that divide the width {width}")
        for name, order in _strategies(lab.cfg.seed).items():
            orders[name, block] = np.stack([order(found.layer(i), block) for i in range(lab.model.num_layers)])
    return orders


# --- errors of the inputs --------------------------------------------------------------------------------------------

MEASURES = ("A4 error", "outlier ratio", "W4 error", "output error")


def _measure(lab: Lab, orders: np.ndarray, block: int | None) -> np.ndarray:
    """``MEASURES`` of each order [P, L, F]: [4, P, L]."""
    import jax
    import jax.numpy as jnp

    from jaxmeth import quant
    from jaxmeth.quant import layerwise

    def product(a, b):
        return jnp.matmul(a, b.T, precision="highest")

    def one(x, w, idx):
        turn = (lambda a: a) if block is None else (lambda a: quant.block_hadamard(a, block))
        y, v = turn(x[:, idx]), turn(w[:, idx])
        yq = quant.fake_quantize_act(y, lab.cfg.bits)
        vq = quant.dequantize(quant.quantize_weight(v, lab.cfg.bits))
        top = lambda a: jnp.abs(a).max(1).mean()  # noqa: E731
        size = jnp.linalg.norm
        exact = product(y, v)
        return jnp.stack([
            size(yq - y) / size(y), top(y) / top(x), size(vq - v) / size(v), size(product(yq, vq) - exact) / size(exact)
        ])  # fmt: skip

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


def _errors(lab: Lab, folder: core.RunDir) -> tuple[core.Rows, list[core.Claim]]:
    orders = _orders(lab, folder)
    width = lab.model.intermediate_size
    same = np.broadcast_to(np.arange(width), (1, lab.model.num_layers, width))
    settings = [("no rotation", None, ["none"], same)]
    settings += [(f"b={b}", b, list(ORDERS), np.stack([orders[o, b] for o in ORDERS])) for b in lab.cfg.blocks]
    settings += [("full", width, ["none"], same)]
    rows, claims, gap = [], [], {}
    for title, block, names, idx in core.progress(settings, description="errors"):
        values = folder.cached(f"errors-{block}", lambda i=idx, b=block: {"v": _measure(lab, i, b)})["v"]
        for p, name in enumerate(names):
            means = {m: core.bootstrap_interval(np.mean, values[k, p]) for k, m in enumerate(MEASURES)}
            rows.append({"rotation": title, "order": name} | means)
            for measure in MEASURES[:2]:
                stated = STATED.get((measure, block), {}).get(name)
                if stated:
                    gap[measure] = max(gap.get(measure, 0.0), abs(means[measure].value / stated - 1))
        if len(names) > 1:
            a4 = dict(zip(names, values[0], strict=True))
            for worse, better in (("absmax", "none"), ("none", "zigzag"), ("none", "MassDiff"), ("zigzag", "MassDiff")):
                found = core.bootstrap_interval(np.mean, a4[worse] - a4[better])
                claims.append(core.Claim(f"{title}: A4 error with {worse} is above that with {better}", found, ">", 0))
    if lab.cfg.model is None:
        claims += [core.Claim(f"{m}: largest deviation from the stated table", v, "<=", 0.05) for m, v in gap.items()]
    return rows, claims


# --- perplexity ------------------------------------------------------------------------------------------------------


def _losses(lab: Lab, params: dict, model) -> np.ndarray:
    """Mean next-token loss of each evaluation window, nats."""
    import jax
    import jax.numpy as jnp
    import optax

    from jaxmeth import models

    def loss(params, tokens):
        # The logits of one window at a time: all of them together would be the largest array by far.
        def one(window):
            logits = models.apply(params, model, window[None]).logits[0]
            return optax.softmax_cross_entropy_with_integer_labels(logits[:-1], window[1:]).mean()

        return jax.lax.map(one, tokens)

    compiled = jax.jit(loss)
    return np.concatenate([np.asarray(compiled(params, jnp.asarray(b))) for b in lab.batches(lab.evaluation)])


def _rounded(lab: Lab, arm: Arm, orders: dict):
    """``(params, configuration)`` of an arm."""
    import jax.numpy as jnp

    from jaxmeth import quant

    width, block = lab.model.intermediate_size, lab.cfg.block
    r3 = {"no": None, "block": block, "full": width}[arm.rotation]
    chosen = quant.PerqConfig(
        weight_bits=lab.cfg.bits if "W" in arm.rounded else None,
        act_bits=lab.cfg.bits if "A" in arm.rounded else None,
        rounding=quant.by_qronos() if arm.how == "Qronos" else quant.rtn(),
        permute=_strategies(lab.cfg.seed)[arm.order],
        r3=r3,
        targets=("mlp.down",) if arm.weights == "down" else quant.ALL_LINEAR,
    )
    batches = lab.batches(lab.calibration)
    if arm.weights == "all":
        params, report = quant.perq(lab.params, lab.model, batches, chosen)
        return params, report.cfg
    params = lab.params
    if arm.rotation == "block":
        params = quant.permute_params(params, quant.hidden_region(lab.model), jnp.asarray(orders[arm.order, block]))
    params, model = quant.rotate_params(params, lab.model, quant.RotationPlan(r3=r3))
    return quant.round_params(params, model, batches, chosen)[0], model


def _perplexities(lab: Lab, folder: core.RunDir) -> tuple[core.Rows, list[core.Claim]]:
    orders = _orders(lab, folder)
    whole = folder.cached("loss-float", lambda: {"v": _losses(lab, lab.params, lab.model)})["v"]
    losses = {}
    for arm in core.progress(arms(lab.cfg), description="perplexity"):
        found = folder.cached(f"loss-{arm.key}", lambda a=arm: {"v": _losses(lab, *_rounded(lab, a, orders))})
        losses[arm] = found["v"]

    def interval(statistic, *arrays):
        return core.bootstrap_interval(statistic, *arrays, resamples=lab.cfg.resamples)

    rows = [{"weights": "", "rounded": "nothing", "how": "", "rotation": "", "order": "",
             "perplexity": interval(_ppl, whole), "log gain over no order": None, "recovered": None}]  # fmt: skip
    claims = []
    for arm, loss in losses.items():
        full = losses.get(arm._replace(rotation="full", order="none"))
        none = losses.get(arm._replace(rotation="block", order="none"))
        ordered = arm.rotation == "block" and arm.order != "none" and none is not None
        gain = interval(lambda a, b: float(np.mean(a - b)), none, loss) if ordered else None
        share = None if full is None else interval(lambda f, a: _ppl(f) / _ppl(a), full, loss)
        rows.append(
            {"weights": arm.weights, "rounded": arm.rounded, "how": arm.how}
            | {"rotation": {"block": f"b={lab.cfg.block}"}.get(arm.rotation, arm.rotation), "order": arm.order}
            | {"perplexity": interval(_ppl, loss), "log gain over no order": gain, "recovered": share}
        )
        if arm.order == "MassDiff":
            where = f"{arm.weights} weights, {arm.rounded}, {arm.how}, b={lab.cfg.block}"
            claims.append(core.Claim(f"{where}: MassDiff lowers the log perplexity of no order", gain, ">", 0))
            closed = interval(_closed, none, loss, full)
            claims.append(core.Claim(f"{where}: share of the gap to the full rotation closed", closed, ">", 0))
    return rows, claims


def _ppl(loss: np.ndarray) -> float:
    return float(np.exp(loss.mean()))


def _closed(none: np.ndarray, ours: np.ndarray, full: np.ndarray) -> float:
    gap = _ppl(none) - _ppl(full)
    return (_ppl(none) - _ppl(ours)) / gap if gap > 0 else float("nan")


# --- figures ---------------------------------------------------------------------------------------------------------


def _draw_errors(figure, rows: core.Rows) -> None:
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


def _draw_perplexity(figure, rows: core.Rows) -> None:
    ax = figure.subplots()
    names = [" ".join(str(r[k]) for k in ("weights", "rounded", "how", "rotation", "order") if r[k]) for r in rows]
    values = [r["perplexity"] for r in rows]
    spans = [[v.value - v.lo for v in values], [v.hi - v.value for v in values]]
    ax.barh(range(len(rows)), [v.value for v in values], xerr=spans)
    ax.set_yticks(range(len(rows)), names, fontsize=6)
    ax.invert_yaxis()
    ax.set_xlabel("perplexity")


if __name__ == "__main__":
    core.main(__file__)
