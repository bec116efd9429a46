"""A family of tiny character models: trained here, disturbed at every checkpoint, asked for its losses.

D counts characters trained on, N the parameters of the layers (not the embedding). The text is the Python documentation
that comes with Python (464,970 characters, every tenth block of 2,048 held out for the losses), or a file.
"""

import functools
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments import core
from experiments.scaling_tables import Table

CHECKPOINTS = 12
FIRST_STEP = 24
BLOCK = 2048
EVAL_SEQUENCES = 64
LAYERS = 2
WARMUP = 20


class Level(NamedTuple):
    """One perturbation: its name, and its kind with the level."""

    name: str
    kind: str
    value: float


def levels(snr_db: tuple[float, ...], bits: tuple[int, ...]) -> list[Level]:
    """No perturbation, then noise from weak to strong, then rounding from fine to coarse."""
    noise = [Level(f"noise {v:g} dB", "noise", v) for v in sorted(snr_db, reverse=True)]
    rounding = [Level(f"{b} bits", "bits", b) for b in sorted(bits, reverse=True)]
    return [Level("clean", "noise", float("inf")), *noise, *rounding]


def corpus(path: Path | None) -> tuple[np.ndarray, np.ndarray, int]:
    """Training and held-out characters as ids, and how many different characters there are.

    Raises: ConfigError for a file that cannot be read as UTF-8 or is too short to hold blocks out.
    """
    if path is None:
        from pydoc_data.topics import topics

        text = "".join(topics[k] for k in sorted(topics))
    else:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise core.ConfigError(f"text: found {path} ({error}), expected a text file in UTF-8") from None
    if len(text) < 20 * BLOCK:
        raise core.ConfigError(f"text: found {len(text)} characters, expected at least {20 * BLOCK}")
    letters, ids = np.unique(np.frombuffer(text.encode("utf-32-le"), np.uint32), return_inverse=True)
    held = (np.arange(len(ids)) // BLOCK) % 10 == 9
    return ids[~held].astype(np.int32), ids[held].astype(np.int32), len(letters)


def steps_at(train_steps: int) -> np.ndarray:
    """The checkpoints: steps spread evenly over their logarithm, all different."""
    return np.unique(np.geomspace(min(FIRST_STEP, train_steps // 5), train_steps, CHECKPOINTS).round().astype(int))


def config(width: int, vocab: int, length: int):
    """A two-layer Llama of this width."""
    from jaxmeth.models import DecoderConfig

    heads = max(1, width // 16)
    head_dim = 2 * (width // (2 * heads))
    return DecoderConfig("llama", vocab, width, LAYERS, heads, heads, head_dim, 4 * width, length, tie_embeddings=True)


def size(params) -> int:
    """Parameters but for the embedding."""
    import jax

    return sum(v.size for v in jax.tree.leaves({k: v for k, v in params.items() if k != "embed"}))


@functools.lru_cache(maxsize=1)
def functions(cfg, text_shape: tuple[int, ...], steps: int, rate: float, batch: int, length: int):
    """``init(params)``, ``train(state, text, key, first, last)`` and ``measure(params, held, entries) -> losses``."""
    import jax
    import jax.numpy as jnp
    import optax

    from jaxmeth import scaling
    from jaxmeth.models import apply

    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, min(WARMUP, steps // 4), steps, 0.1 * rate)
    optimiser = optax.flatten(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule, b2=0.99)))

    def loss(params, tokens):
        logits = apply(params, cfg, tokens[:, :-1]).logits.astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    @functools.partial(jax.jit, donate_argnums=0)
    def train(state, text, key, first, last):
        def step(i, state):
            params, opt = state
            at = jax.random.randint(jax.random.fold_in(key, i), (batch,), 0, text_shape[0] - length - 1)
            tokens = text[at[:, None] + jnp.arange(length + 1)[None]]
            updates, opt = optimiser.update(jax.grad(loss)(params, tokens), opt, params)
            return optax.apply_updates(params, updates), opt

        return jax.lax.fori_loop(first, last, step, state)

    def one(params, held, key, noisy, value):
        disturbed = jax.lax.cond(
            noisy,
            lambda p: scaling.perturb_gaussian(key, p, value),
            lambda p: scaling.perturb_round(p, value),
            params,
        )
        return loss(disturbed, held)

    @jax.jit
    def measure(params, held, keys, noisy, values):
        return jax.lax.map(lambda each: one(params, held, *each), (keys, noisy, values))

    return optimiser.init, train, measure


def entries(wanted: list[Level], key, draws: int):
    """What to measure at a checkpoint: keys, whether noise, values, and the level of each; only noise is drawn anew."""
    import jax
    import jax.numpy as jnp

    times = [draws if v.kind == "noise" and np.isfinite(v.value) else 1 for v in wanted]
    owner = np.repeat(np.arange(len(wanted)), times)
    noisy = np.array([wanted[i].kind == "noise" for i in owner])
    values = np.array([wanted[i].value for i in owner], np.float32)
    return jax.random.split(key, len(owner)), jnp.asarray(noisy), jnp.asarray(values), owner


def train_one(cfg: Any, folder: core.RunDir, width: int, bar: core.progress | None = None) -> tuple[int, np.ndarray]:
    """N and the losses [checkpoint, level] of one width; continues from the last stored checkpoint."""
    import jax
    import jax.numpy as jnp

    from jaxmeth.models import init

    wanted, stops, key = levels(cfg.snr_db, cfg.bits), steps_at(cfg.train_steps), f"family-{width}"
    stored = folder.load(key) if folder.done(key) else None
    if stored is not None and int(stored["done"]) == len(stops):
        return int(stored["n"]), stored["losses"]
    text, held, vocab = corpus(cfg.text)
    model = config(width, vocab, cfg.length)
    # Noise, data and initial weights of a width hang on the seed and the width only.
    root = jax.random.fold_in(jax.random.key(cfg.seed), width)
    keys = {name: jax.random.fold_in(root, i) for i, name in enumerate(("init", "data", "noise"))}
    rate = cfg.rate * (64 / width) ** 0.5
    opt_init, train, measure = functions(model, text.shape, cfg.train_steps, rate, cfg.batch, cfg.length)
    params = init(model, keys["init"])
    n, (leaves, structure) = size(params), jax.tree.flatten((params, opt_init(params)))
    losses, done = np.full((len(stops), len(wanted)), np.nan), 0
    if stored is not None:
        losses, done = stored["losses"], int(stored["done"])
        leaves = [jnp.asarray(stored[f"leaf{i}"]) for i in range(len(leaves))]
    state = jax.tree.unflatten(structure, leaves)
    rows = np.linspace(0, len(held) - cfg.length - 1, EVAL_SEQUENCES).astype(int)
    shown = jnp.asarray(held[rows[:, None] + np.arange(cfg.length + 1)[None]])
    # The same noise at every checkpoint: what changes along training is the model alone.
    *asked, owner = entries(wanted, keys["noise"], cfg.draws)
    text = jnp.asarray(text)
    for number in range(done, len(stops)):
        first = 0 if number == 0 else int(stops[number - 1])
        state = train(state, text, keys["data"], first, int(stops[number]))
        each = np.asarray(measure(state[0], shown, *asked), float)
        losses[number] = np.bincount(owner, each) / np.bincount(owner)
        folder.log(int(stops[number]), f"width {width}", **{v.name: losses[number, i] for i, v in enumerate(wanted)})
        last = number == len(stops) - 1
        kept = {} if last else {f"leaf{i}": v for i, v in enumerate(jax.tree.leaves(state))}
        folder.save(key, n=n, losses=losses, done=number + 1, **kept)
        if bar is not None:
            bar.note(f"width {width}, step {stops[number]}, loss {losses[number, 0]:.3f}")
    return n, losses


def train_all(cfg: Any, folder: core.RunDir) -> list[Table]:
    """One table a perturbation: rows are the widths' checkpoints."""
    import jax

    stops, wanted = steps_at(cfg.train_steps), levels(cfg.snr_db, cfg.bits)
    sizes, losses = [], []
    # The family is trained in float32, whatever the fits use.
    with jax.enable_x64(False):
        bar = core.progress(cfg.widths, description="training the family")
        for width in bar:
            n, measured = train_one(cfg, folder, width, bar)
            sizes.append(n)
            losses.append(measured)
    n = np.repeat(np.array(sizes, float), len(stops))
    d = np.tile(stops * float(cfg.batch * cfg.length), len(sizes))
    y = np.concatenate(losses)
    run, lines = np.repeat(np.array(cfg.widths), len(stops)), np.arange(len(n))
    return [
        Table(f"Family, {level.name}", n, d, y[:, i], np.full(len(n), ""), run, lines) for i, level in enumerate(wanted)
    ]


def shapes(cfg: Any) -> core.Rows:
    """What the largest model of the family would hold and compute: traced, nothing trained."""
    import jax
    import jax.numpy as jnp

    from jaxmeth.models import abstract_params

    text, _, vocab = corpus(cfg.text)
    rows = []
    with jax.enable_x64(False):
        for width in cfg.widths:
            model = config(width, vocab, cfg.length)
            params = abstract_params(model)
            opt_init, train, measure = functions(model, text.shape, cfg.train_steps, cfg.rate, cfg.batch, cfg.length)
            state = (params, jax.eval_shape(opt_init, params))
            ids = jax.ShapeDtypeStruct((len(text),), jnp.int32)
            shown = jax.ShapeDtypeStruct((EVAL_SEQUENCES, cfg.length + 1), jnp.int32)
            key = jax.random.key(0)
            jax.eval_shape(train, state, ids, key, 0, 10)
            jax.eval_shape(measure, params, shown, *entries(levels(cfg.snr_db, cfg.bits), key, cfg.draws)[:3])
            n, tokens = size(params), cfg.train_steps * cfg.batch * cfg.length
            rows.append(
                {"width": width, "parameters of the layers": n, "characters": tokens, "training FLOP": 6.0 * n * tokens}
            )
    return rows
