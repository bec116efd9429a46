"""DHSA: does a choice of key blocks by pooled chunks cover the attention that matters, at a fixed budget?

SmolLM2-135M reads Python's help topics. For every rule at the same number of blocks: the share of true attention mass
the chosen blocks hold, the perplexity of the last tokens under sparse attention, whether a number hidden in the text
is found, and the time of a prompt. A boundary predictor is trained on the model's own attention.

Claim: near-dense quality at density 1/8, better than block-sparse attention at equal cost (arXiv 2510.24606).
Command: python -m experiments run dhsa --preset smoke
Expected: not yet measured in full; the claims print what holds.
Minutes: smoke 2, laptop 15.
"""

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments import core, dhsa_rules

ABOUT = core.About(
    claim="Sparse prefill by pooled chunks stays near dense attention at density 1/8, better than block top-k.",
    minutes={"smoke": 2, "laptop": 15},
    needs="SmolLM2-135M",
    knob="length",
)


@dataclass(frozen=True, kw_only=True)
class Config(core.Config):
    """How much text, which budgets, how many needles."""

    model: str | None = None
    """Hugging Face folder, hub name or .gguf file; without one SmolLM2-135M-Instruct."""
    text: Path | None = None
    """A text file in place of Python's help topics."""
    length: int = 2048
    """Tokens of each text for recall and perplexity."""
    texts: int = 8
    """How many texts; half of them are never seen by the predictor."""
    densities: tuple[float, ...] = (0.0625, 0.125, 0.25)
    """Shares of the key blocks that are kept."""
    rules: tuple[str, ...] = dhsa_rules.RULES
    """Which rules; "topk", "fixed" and "predicted" are always among them."""
    scored: int = 256
    """Tokens at the end of each text whose perplexity counts."""
    needle_length: int = 1024
    """Tokens of the needle prompts."""
    depths: int = 5
    """Places of the needle, evenly from start to end."""
    needles: int = 4
    """Needles at each depth."""
    train_sequences: int = 48
    """Texts of 512 tokens that train the boundary predictor."""
    shapes_only: bool = False
    """Only check that Llama-3.1-8B at 128K tokens fits together: shapes, nothing computed."""

    def __post_init__(self):
        super().__post_init__()
        self.require(
            length=(512, None), texts=(2, None), densities=(1e-6, 1), scored=(1, self.length - 1),
            needle_length=(256, None), depths=(2, None), needles=(1, None), train_sequences=(2, None),
        )  # fmt: skip
        unknown = [n for n in self.rules if n not in dhsa_rules.RULES]
        missing = [n for n in ("topk", "fixed", "predicted") if n not in self.rules]
        if unknown or missing:
            expected = f"topk, fixed, predicted and any of {', '.join(dhsa_rules.RULES)}"
            raise core.ConfigError(f"rules: found {', '.join(self.rules)}, expected {expected}")


PRESETS = {
    "smoke": Config(
        length=512,
        texts=2,
        densities=(0.25,),
        scored=64,
        needle_length=512,
        depths=2,
        needles=1,
        train_sequences=4,
        rules=("sink+window", "topk", "fixed", "predicted"),
    ),
    "laptop": Config(),
    "paper": Config(length=131072, shapes_only=True),
}


def run(cfg: Config, folder: core.RunDir | None = None) -> core.Result:
    """Train the predictor, then recall, perplexity, needles and time."""
    folder = folder or core.RunDir()
    if cfg.shapes_only:
        return _shapes(cfg)
    from jaxmeth import hf

    model = hf.load(cfg.model) if cfg.model else hf.default()
    if model.tokenizer is None:
        raise core.ConfigError(f"model: found no tokenizer in {cfg.model}, expected a tokenizer.json")
    ids, source = _ids(cfg, model)
    box, f1 = _predictor(cfg, model, ids)
    texts = _windows(ids, cfg.texts, cfg.length)
    recall = _recall(cfg, folder, model, texts, box)
    loss = _losses(cfg, folder, model, texts, box)
    found = _needles(cfg, folder, model, ids, box)
    middle = 0.125 if 0.125 in cfg.densities else cfg.densities[0]
    at = cfg.densities.index(middle)
    names = cfg.rules
    place = {n: i for i, n in enumerate(names)}
    rows = []
    for d, density in enumerate(cfg.densities):
        rows += [{"rule": n, "density": density, "mass recall": _spread(recall[:, d, i])} for i, n in enumerate(names)]
    gain = core.bootstrap_interval(np.mean, recall[:, at, place["fixed"]] - recall[:, at, place["topk"]])
    ratio = {n: core.bootstrap_interval(lambda x: np.exp(x.mean()), loss[n] - loss["dense"]) for n in loss}
    learnt = core.bootstrap_interval(np.mean, recall[:, at, place["predicted"]] - recall[:, at, place["fixed"]])
    share = {n: float(np.mean(found[n])) for n in found}
    best = max(share["dense"], 1e-9)
    claims = [
        core.Claim(f"density {middle}: mass recall of DHSA over block top-k", gain, ">=", 0.03),
        core.Claim(f"density {middle}: perplexity of DHSA over dense", ratio["fixed"], "<=", 1.03),
        core.Claim("needles found by DHSA over dense", share["fixed"] / best, ">=", 0.9),
        core.Claim("F1 of the predictor on unseen text", f1, ">=", 0.5),
        core.Claim("mass recall of predicted over fixed chunks", learnt, ">", 0),
    ]
    return core.Result(
        rows={
            "attention mass recall": rows,
            f"perplexity over dense, density {middle}": [
                {"rule": n, "perplexity ratio": r, "perplexity": float(np.exp(loss[n].mean()))}
                for n, r in ratio.items()
            ],
            f"needles, density {middle}": [
                {"rule": n, "found": share[n]} | {f"depth {d}": float(f) for d, f in enumerate(found[n].mean(1))}
                for n in found
            ],
            "time of a prompt": _times(cfg, model, texts, middle),
        },
        claims=claims,
        figures={"needles": lambda f: _heat_map(f, found), "recall": lambda f: _draw_recall(f, cfg, recall)},
        notes=[
            f"Text: {source}; {cfg.texts} texts of {cfg.length} tokens. Intervals: 95%, bootstrap over texts.",
            f"Blocks of {dhsa_rules.BQ} queries and {dhsa_rules.BK} keys; density is a share of all key blocks. "
            "Query heads of a key/value head share a list.",
            f"Needles: {cfg.needles} at each of {cfg.depths} depths, {cfg.needle_length} tokens; decoding is dense.",
        ],
    )


def _ids(cfg: Config, model) -> tuple[np.ndarray, str]:
    if cfg.text:
        text, source = cfg.text.read_text(encoding="utf-8"), cfg.text.name
    else:
        from pydoc_data.topics import topics

        text, source = "\n".join(topics[n] for n in sorted(topics)), "help topics of this Python (pydoc_data.topics)"
    return np.asarray(model.tokenizer.encode(text).ids, np.int32), source


def _windows(ids: np.ndarray, count: int, length: int, part: slice = slice(None)) -> np.ndarray:
    """``count`` windows spread evenly over the text."""
    if len(ids) < length:
        raise core.ConfigError(f"text: found {len(ids)} tokens, expected at least {length}")
    starts = np.linspace(0, len(ids) - length, count + 1).astype(int)[1:]
    return np.stack([ids[s : s + length] for s in starts[part]])


def _spread(values: np.ndarray) -> core.Estimate:
    return core.bootstrap_interval(np.mean, values)


def _predictor(cfg: Config, model, ids: np.ndarray) -> tuple[dhsa_rules.Box, float]:
    """A predictor trained on the first half of the text; its F1 on windows of the second half."""
    import jax
    import jax.numpy as jnp

    from jaxmeth import models
    from jaxmeth.attention import dhsa

    layers, width = model.cfg.num_layers, model.cfg.num_kv_heads * model.cfg.head_dim
    chosen = np.arange(0, layers, max(1, layers // 10))
    tap = dhsa_rules.label_tap()

    @jax.jit
    def labelled(params, tokens):
        state = (jnp.zeros((layers, 512, width)), jnp.zeros((layers, 512)))
        keys, ratio = models.apply(params, model.cfg, tokens[None], attend=tap, state=state).state
        return keys[chosen], ratio[chosen]

    half = len(ids) // 2
    seen = _windows(ids[:half], cfg.train_sequences, 512)
    unseen = _windows(ids[half:], max(2, cfg.train_sequences // 8), 512)
    made = [labelled(model.params, jnp.asarray(t)) for t in core.progress([*seen, *unseen], description="labels")]
    keys, ratio = (jnp.stack([m[i] for m in made]) for i in (0, 1))
    start, order = jax.random.split(jax.random.key(cfg.seed))
    params = dhsa.boundary_predictor_init(start, width)
    n = len(seen)
    params, _ = dhsa.train_boundary_predictor(order, params, keys[:n], ratio[:n], dhsa.PredictorTraining(epochs=4))
    logits = jax.jit(jax.vmap(lambda x: dhsa.boundary_logits(params, x)))(keys[n:])
    inside = slice(7, 512 - 8)
    said, true = np.asarray(logits)[..., inside] > 0, np.asarray(ratio[n:])[..., inside] >= 2
    f1 = 2 * (said & true).sum() / max(1, said.sum() + true.sum())
    return dhsa_rules.Box(params), float(f1)


def _recall(cfg: Config, folder: core.RunDir, model, texts: np.ndarray, box) -> np.ndarray:
    """``[texts, densities, rules]``, mean over layers."""
    import jax.numpy as jnp

    from jaxmeth import models

    tap = dhsa_rules.recall_tap(cfg.rules, cfg.densities, box)
    shape = (model.cfg.num_layers, len(cfg.densities), len(cfg.rules))
    found = []
    for i, text in enumerate(core.progress(texts, description="recall")):
        state = models.apply(model.params, model.cfg, jnp.asarray(text)[None], attend=tap, state=jnp.zeros(shape)).state
        found.append(np.asarray(state).mean(0))
        folder.log(i, "recall", **{f"{n} {d}": float(v) for d, row in zip(cfg.densities, found[-1], strict=True)
                                   for n, v in zip(cfg.rules, row, strict=True)})  # fmt: skip
    return np.stack(found)


def _losses(cfg: Config, folder: core.RunDir, model, texts: np.ndarray, box) -> dict[str, np.ndarray]:
    """Mean negative log-likelihood of the last tokens of each text, by rule."""
    import jax
    import jax.numpy as jnp

    from jaxmeth import models

    density = 0.125 if 0.125 in cfg.densities else cfg.densities[0]
    found = {}
    for name in core.progress(("dense", *cfg.rules), description="perplexity"):
        attend = dhsa_rules.attend(name, density, box)

        @jax.jit
        def loss(params, tokens, attend=attend):
            logits = models.apply(params, model.cfg, tokens[None], attend=attend).logits[0, -cfg.scored - 1 : -1]
            logp = jax.nn.log_softmax(logits, axis=-1)
            return -jnp.mean(jnp.take_along_axis(logp, tokens[-cfg.scored :, None], axis=-1))

        found[name] = np.array([float(loss(model.params, jnp.asarray(t))) for t in texts])
        folder.log(0, "perplexity", **{name: float(found[name].mean())})
    return found


def _needles(cfg: Config, folder: core.RunDir, model, ids: np.ndarray, box) -> dict[str, np.ndarray]:
    """Whether the hidden number is the answer, ``[depths, needles]`` by rule."""
    import jax

    from jaxmeth import models

    density = 0.125 if 0.125 in cfg.densities else cfg.densities[0]
    rng = np.random.default_rng(cfg.seed)
    encode = lambda text: np.asarray(model.tokenizer.encode(text).ids, np.int32)  # noqa: E731
    question = encode("\nQuestion: What is the secret number?\nAnswer: The secret number is")
    prompts, answers = [], []
    for depth in np.linspace(0, 1, cfg.depths):
        for _ in range(cfg.needles):
            number = str(rng.integers(1000, 10000))
            needle = encode(f"\nThe secret number is {number}. Remember it.\n")
            room = cfg.needle_length - len(question) - len(needle)
            start = rng.integers(0, len(ids) - room)
            filler, at = ids[start : start + room], int(depth * room)
            prompts.append(np.concatenate([filler[:at], needle, filler[at:], question]))
            answers.append(number)
    prompts = np.stack(prompts)
    found = {}
    for name in core.progress(("dense", *cfg.rules), description="needles"):
        attend = dhsa_rules.attend(name, density, box)
        texts = []
        for row in prompts:
            new = models.generate(
                model.params, model.cfg, row[None], np.ones((1, row.size), bool), key=jax.random.key(0),
                max_new_tokens=8, attend=attend,
            ).tokens  # fmt: skip
            texts.append(model.tokenizer.decode(np.asarray(new)[0].tolist()))
        right = [a in t for a, t in zip(answers, texts, strict=True)]
        found[name] = np.array(right).reshape(cfg.depths, cfg.needles)
        folder.log(0, "needles", **{name: float(found[name].mean())})
    return found


def _times(cfg: Config, model, texts: np.ndarray, density: float) -> core.Rows:
    import jax
    import jax.numpy as jnp

    from jaxmeth import models

    tokens = jnp.asarray(texts[0])[None]
    rows = []
    for name in ("dense", "fixed"):
        attend = dhsa_rules.attend(name, density)
        call = lambda attend=attend: jax.block_until_ready(  # noqa: E731
            models.apply(model.params, model.cfg, tokens, attend=attend).hidden
        )
        call()
        taken = []
        for _ in range(3):
            start = time.perf_counter()
            call()
            taken.append(time.perf_counter() - start)
        rows.append({"rule": name, "tokens": cfg.length, "seconds": float(np.median(taken))})
    return rows


def _heat_map(figure, found: dict[str, np.ndarray]) -> None:
    ax = figure.subplots()
    grid = np.stack([f.mean(1) for f in found.values()])
    image = ax.imshow(grid, vmin=0, vmax=1, aspect="auto", cmap="viridis")
    ax.set_yticks(range(len(found)), found)
    ax.set_xticks(range(grid.shape[1]), [f"{d:.0%}" for d in np.linspace(0, 1, grid.shape[1])])
    ax.set(xlabel="depth of the needle", title="Needles found")
    ax.grid(False)
    figure.colorbar(image)


def _draw_recall(figure, cfg: Config, recall: np.ndarray) -> None:
    ax = figure.subplots()
    for i, name in enumerate(cfg.rules):
        ax.plot(cfg.densities, recall[:, :, i].mean(0), marker="o", label=name)
    ax.set(xlabel="density", ylabel="share of attention mass covered", title="Attention-mass recall")
    ax.legend(fontsize=8)


def _shapes(cfg: Config) -> core.Result:
    """Llama-3.1-8B's attention at the paper's length: lists and output, by shape alone."""
    import jax
    import jax.numpy as jnp

    from jaxmeth.attention import dhsa

    shape = jax.ShapeDtypeStruct
    q, k = (shape((1, h, cfg.length, 128), jnp.bfloat16) for h in (32, 8))
    rows = []
    for rule in ("vs", "vsb", "chunk"):
        settings = dhsa.DHSAConfig(bk=32, rule=rule)
        lists = jax.eval_shape(lambda q, k, s=settings: dhsa.select_blocks(q, k, s), q, k)
        out, _ = jax.eval_shape(lambda q, k, v, s=settings: dhsa.prefill(q, k, v, s), q, k, k)
        rows += [
            {"array": f"{rule}: lists", "shape": str(list(lists.idx.shape)), "numbers": lists.idx.size},
            {"array": f"{rule}: output", "shape": str(list(out.shape)), "numbers": out.size},
        ]
    return core.Result(rows=rows, notes=["Shapes only: nothing was computed."])


if __name__ == "__main__":
    core.main(__file__)
