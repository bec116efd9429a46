"""PeRQ: does ordering the channels before a small block rotation save a model that is rounded to four bits?

The inputs of the down projection are permuted, rotated in blocks by a Hadamard matrix, then rounded. Tables: their
rounding error and outliers by block size and order; perplexity by order and by what is rounded (activations A4, weights
W4, both), to nearest and with Qronos, of the down projection alone and of all linear weights (PeRQ*).

Claim: with blocks of 16 MassDiff reaches up to 90% of the full rotation's perplexity, no order 46% (Llama 3.2 1B,
arXiv 2601.22347).
Command: python -m experiments run perq
Expected: error of the rounded inputs (laptop; no rotation 0.309, full rotation 0.119)

    block   none    random  absmax  zigzag  MassDiff
    16      0.180   0.180   0.195   0.159   0.158
    64      0.143   0.141   0.166   0.132   0.129
    256     0.126   0.126   0.149   0.121   0.119

and perplexity at b=16 (float 11.7), 20,480 tokens

    rounded                        none   MassDiff   full   no rotation
    all weights, W4A4, Qronos      31.1   26.8       25.8
    down only,   W4A4, Qronos      16.3   15.0       14.0
    down only,   W4A4, nearest     19.5   17.8       16.0   27.2
    down only,   A4                15.0   13.5       12.6   21.2
    down only,   W4, nearest       14.6   14.9       14.5   13.8

PeRQ* reaches .962 [.939, .986] of the full rotation's perplexity, no order .829 [.811, .848]: MassDiff closes .81 [.70,
.92] of the gap. On 5,120 tokens (down only, W4A4, nearest) zigzag lowers the log perplexity by .000 [-.046, .048],
absmax raises it by .139 [.100, .179]. All weights rounded to nearest: perplexity 137, with learnt R1 and R2
(PeRQ-dagger) 42.0.

The reversal, weights alone: MassDiff is .022 [.006, .039] above no order in log perplexity, though its error of the
weight and of the output is no larger (log changes -.002 and -.007). It is not MassDiff's: six random orders are .015 to
.061 above no order, in the mean .9 of their standard deviations above MassDiff, and of three that move no channel far
two are .040 and .059 above it, one .008 below. Nearly every regrouping raises this perplexity, MassDiff less than most;
whether the stored order is special or lucky these nine draws do not settle.
Minutes: smoke 2, laptop 50.
"""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from experiments import core, perq_inputs, perq_text
from experiments.perq_inputs import Lab

ABOUT = core.About(
    claim="Permuting channels by mass before a block rotation saves perplexity at four bits.",
    minutes={"smoke": 2, "laptop": 50},
    needs="SmolLM2-135M",
    knob="batch",
)


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
    others: tuple[int, ...] = (64, 256)
    """More rotation blocks for a perplexity, with arms=all."""
    fewer: int = 5120
    """Evaluation tokens for those and for the other orders, the first ones."""
    steps: int = 24
    """Steps in which PeRQ-dagger learns its rotations, one calibration window each."""
    resamples: int = 2000
    """Bootstrap resamples of every interval."""
    shapes_only: bool = False
    """Without --model, only check that Qwen3-8B fits together: shapes, nothing computed."""

    def __post_init__(self):
        super().__post_init__()
        self.require(
            blocks=(2, None), block=(2, None), window=(2, None), calibration=(2, None), evaluation=(2, None),
            measured=(1, None), batch=(1, None), bits=(2, 8), resamples=(1, None),
            others=(2, None), fewer=(2, None), steps=(1, None),
        )  # fmt: skip
        if self.arms not in ("all", "nearest"):
            raise core.ConfigError(f"arms: found {self.arms!r}, expected all or nearest")


PRESETS = {
    "smoke": Config(calibration=256, evaluation=512, window=128, measured=128, blocks=(16,), arms="nearest"),
    "laptop": Config(),
    "paper": Config(window=2048, calibration=128 * 2048, evaluation=280_000, shapes_only=True),
}


class Arm(NamedTuple):
    """One perplexity: rotation ('no', 'full' or a block), order, what is rounded, how, and which weights."""

    rotation: str
    order: str
    rounded: str
    how: str = "nearest"
    weights: str = "down"

    @property
    def key(self) -> str:
        return "-".join(self)


FURTHER = ("zigzag", "absmax", "random")


def arms(cfg: Config) -> list[Arm]:
    """What is measured, the comparisons that matter most first."""
    block = f"b={cfg.block}"
    plain = [(block, "none"), (block, "MassDiff"), ("full", "none"), ("no", "none")]
    found = [Arm(r, o, mode) for mode in ("W4A4", "W4", "A4") for r, o in plain]
    if cfg.arms == "all":
        star = [Arm(r, o, "W4A4", "Qronos", weights) for weights in ("all", "down") for r, o in plain[:3]]
        found = star[:3] + found + star[3:]
        found += [Arm(block, "MassDiff", "W4A4", how, "all") for how in ("nearest", "learnt")]
        found += [Arm(f"b={b}", o, "W4A4") for b in cfg.others if b != cfg.block for o in ("none", "MassDiff")]
        found += [Arm(block, o, "W4A4") for o in FURTHER]
        found += [Arm(block, o, "W4") for o in perq_inputs.DRAWS + perq_inputs.NEAR]
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
    errors, claims = perq_inputs.errors(lab, folder)
    table, more = _perplexities(lab, folder)
    first = errors["down projection"]
    return core.Result(
        rows=errors | {"perplexity": table},
        claims=claims + more,
        figures={
            "errors": lambda f: perq_inputs.draw_errors(f, first),
            "perplexity": lambda f: _draw_perplexity(f, table),
        },
        notes=[
            f"Text: {source}. Calibration {calibration.size:,}, evaluation {evaluation.size:,} tokens in windows of "
            f"{evaluation.shape[1]}. Intervals: 95%, bootstrap over windows (perplexity) or layers (errors), paired.",
            "A4: inputs to four bits, per token, asymmetric; W4: weights to four bits, per output channel, symmetric.",
            "W4 error: of the down projection's weight after the same order and rotation; output errors: of its "
            "product, to nearest. An order made for the inputs also regroups the weight's columns: the table of log "
            "changes tells the two sides apart, and the random orders under W4 what regrouping alone does.",
            "A share of a gap counts the resamples that have one: where two perplexities hardly differ it says little.",
            "'recovered' is the full rotation's perplexity over this one; the paper's 90% and 46% are this ratio.",
            f"Blocks of {', '.join(map(str, cfg.others))} and the orders {', '.join(FURTHER)}: the first {cfg.fewer:,} "
            "evaluation tokens, and so what they are held against. "
            f"Learnt: {cfg.steps} steps (the paper: 100 of 8 samples).",
        ],
    )


# --- perplexity ------------------------------------------------------------------------------------------------------


@functools.cache
def _loss_of(model):
    """Compiled once a structure of weights: mean next-token loss of each window [n, T], nats."""
    import jax
    import optax

    from jaxmeth import models

    def loss(params, tokens):
        # The logits of one window at a time: all of them together would be the largest array by far.
        def one(window):
            logits = models.apply(params, model, window[None]).logits[0]
            return optax.softmax_cross_entropy_with_integer_labels(logits[:-1], window[1:]).mean()

        return jax.lax.map(one, tokens)

    return jax.jit(loss)


def _losses(lab: Lab, params: dict, model, windows: int | None = None) -> np.ndarray:
    """Mean next-token loss of each (of the first ``windows``) evaluation window, nats."""
    batches = lab.batches(lab.evaluation[:windows])
    return np.concatenate([np.asarray(_loss_of(model)(params, b)) for b in batches])


def _rounded(lab: Lab, arm: Arm, orders: dict):
    """``(params, configuration)`` of an arm."""
    import jax.numpy as jnp

    from jaxmeth import quant

    r3 = {"no": None, "full": lab.model.intermediate_size}.get(arm.rotation, _block(arm))
    chosen = quant.PerqConfig(
        weight_bits=lab.cfg.bits if "W" in arm.rounded else None,
        act_bits=lab.cfg.bits if "A" in arm.rounded else None,
        rounding=quant.by_qronos() if arm.how == "Qronos" else quant.rtn(),
        permute=perq_inputs.strategies(lab.cfg.seed)[arm.order],
        r3=r3,
        targets=("mlp.down",) if arm.weights == "down" else quant.ALL_LINEAR,
        learn=quant.CayleyConfig(steps=lab.cfg.steps) if arm.how == "learnt" else None,
    )
    batches = lab.batches(lab.calibration)
    if arm.weights == "all":
        batches = list(lab.calibration[:, None]) if arm.how == "learnt" else batches
        params, report = quant.perq(lab.params, lab.model, batches, chosen)
        return params, report.cfg
    params = lab.params
    if _block(arm):
        params = quant.permute_params(params, quant.hidden_region(lab.model), jnp.asarray(orders[arm.order, r3]))
    params, model = quant.rotate_params(params, lab.model, quant.RotationPlan(r3=r3))
    return quant.round_params(params, model, batches, chosen)[0], model


def _block(arm: Arm) -> int | None:
    return int(arm.rotation[2:]) if arm.rotation.startswith("b=") else None


def _perplexities(lab: Lab, folder: core.RunDir) -> tuple[core.Rows, list[core.Claim]]:
    orders = perq_inputs.find_orders(lab, folder)
    whole = folder.cached("loss-float", lambda: {"v": _losses(lab, lab.params, lab.model)})["v"]
    losses = {}
    fewer = -(-lab.cfg.fewer // lab.evaluation.shape[1])
    for arm in core.progress(arms(lab.cfg), description="perplexity"):
        count = fewer if arm.order in FURTHER or _block(arm) not in (None, lab.cfg.block) else None
        found = folder.cached(
            f"loss-{arm.key}", lambda a=arm, n=count: {"v": _losses(lab, *_rounded(lab, a, orders), n)}
        )
        losses[arm] = found["v"]

    def interval(statistic, *arrays):
        # Arms measured on the first windows only are held against the same windows of others.
        n = min(map(len, arrays))
        return core.bootstrap_interval(statistic, *(a[:n] for a in arrays), resamples=lab.cfg.resamples)

    rows = [{"weights": "", "rounded": "nothing", "how": "", "rotation": "", "order": "",
             "perplexity": interval(_ppl, whole), "log gain over no order": None, "recovered": None}]  # fmt: skip
    claims = []
    for arm, loss in losses.items():
        full = losses.get(arm._replace(rotation="full", order="none"))
        none = losses.get(arm._replace(order="none")) if _block(arm) and arm.order != "none" else None
        gain = None if none is None else interval(_gain, none, loss)
        share = None if full is None else interval(_ratio, full, loss)
        rows.append(
            {"weights": arm.weights, "rounded": arm.rounded, "how": arm.how, "rotation": arm.rotation}
            | {"order": arm.order, "perplexity": interval(_ppl, loss)}
            | {"log gain over no order": gain, "recovered": share}
        )
        where = f"{arm.weights} weights, {arm.rounded}, {arm.how}, {arm.rotation}"
        if arm.order == "MassDiff" and none is not None:
            claims.append(core.Claim(f"{where}: MassDiff lowers the log perplexity of no order", gain, ">", 0))
            closed = interval(_closed, none, loss, full)
            claims.append(core.Claim(f"{where}: share of the gap to the full rotation closed", closed, ">", 0))
            if (arm.how, arm.weights) == ("Qronos", "all"):
                claims.append(
                    core.Claim(f"{where}: MassDiff recovers the full rotation's perplexity", share, ">=", 0.9)
                )
                better = interval(lambda f, a, b: _ratio(f, a) - _ratio(f, b), full, loss, none)
                claims.append(core.Claim(f"{where}: MassDiff recovers more of it than no order", better, ">", 0))
            drawn = [losses[arm._replace(order=o)] for o in perq_inputs.DRAWS if arm._replace(order=o) in losses]
            if drawn:
                name = f"{where}: MassDiff's log perplexity over the mean of {len(drawn)} random orders, in their sds"
                claims.append(core.Claim(name, _spreads(loss, drawn), "<=", 2))
        if arm.how == "learnt":
            gain = interval(_gain, losses[arm._replace(how="nearest")], loss)
            claims.append(
                core.Claim(f"{where}: learning R1 and R2 lowers the log perplexity of Hadamard", gain, ">", 0)
            )
    return rows, claims


def _gain(before: np.ndarray, after: np.ndarray) -> float:
    return float(np.mean(before - after))


def _spreads(ours: np.ndarray, drawn: list[np.ndarray]) -> float:
    means = [loss.mean() for loss in drawn]
    return float((ours.mean() - np.mean(means)) / np.std(means, ddof=1))


def _ratio(full: np.ndarray, ours: np.ndarray) -> float:
    return _ppl(full) / _ppl(ours)


def _ppl(loss: np.ndarray) -> float:
    return float(np.exp(loss.mean()))


def _closed(none: np.ndarray, ours: np.ndarray, full: np.ndarray) -> float:
    gap = _ppl(none) - _ppl(full)
    return (_ppl(none) - _ppl(ours)) / gap if gap > 0 else float("nan")


# --- figures ---------------------------------------------------------------------------------------------------------


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
