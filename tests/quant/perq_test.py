"""The function of a model under permutations and rotations, the whole of PeRQ, and what it refuses."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from families import FAMILIES

from jaxmeth import hf, models, quant
from jaxmeth.quant import io, layerwise
from jaxmeth.types import ConfigError, WeightsError

TINY = ["llama", "qwen3", "gemma3", "gpt_neox", "olmo2"]
ADMITS_R1 = {"llama", "qwen3"}


@functools.cache
def checkpoint(name):
    from conftest import GOLDEN

    return hf.load(GOLDEN / "hf" / name)


def window(cfg, seed=0, shape=(2, 12)):
    return np.random.default_rng(seed).integers(0, cfg.vocab_size, shape).astype(np.int32)


def logits(params, cfg, tokens):
    return np.asarray(models.apply(params, cfg, jnp.asarray(tokens)).logits)


def same_function(before, after, tolerance=1e-4):
    assert np.abs(before - after).max() <= tolerance * np.abs(before).max()


def shuffled(seed, *shape):
    return np.random.default_rng(seed).permuted(np.broadcast_to(np.arange(shape[-1]), shape), axis=-1)


@pytest.mark.parametrize("name", TINY)
def test_permutations_change_nothing(name):
    cfg, params = checkpoint(name)[:2]
    tokens = window(cfg)
    before = logits(params, cfg, tokens)
    heads = shuffled(3, cfg.num_layers, cfg.num_kv_heads, cfg.head_dim)
    heads = heads + np.arange(cfg.num_kv_heads)[:, None] * cfg.head_dim
    orders = {
        quant.stream_region(cfg): shuffled(1, cfg.hidden_size),
        quant.value_region(cfg): heads.reshape(cfg.num_layers, -1),
        quant.hidden_region(cfg): shuffled(2, cfg.num_layers, cfg.intermediate_size),
    }
    for region, idx in orders.items():
        moved = quant.permute_params(params, region, jnp.asarray(idx))
        back = quant.permute_params(moved, region, jnp.asarray(np.argsort(idx, axis=-1)))
        jax.tree.map(np.testing.assert_array_equal, back, params)
        assert any(not np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (moved, params)), strict=True))
        params = moved
    same_function(before, logits(params, cfg, tokens))


def orthonormal(seed, n):
    return jnp.asarray(np.linalg.qr(np.random.default_rng(seed).normal(size=(n, n)))[0], jnp.float32)


@pytest.mark.parametrize("name", TINY)
def test_rotations_change_nothing(name):
    """With matrices that are not symmetric, so that a transpose in the wrong place shows."""
    cfg, params = checkpoint(name)[:2]
    tokens = window(cfg)
    before = logits(params, cfg, tokens)
    r2 = jnp.stack([orthonormal(i, cfg.head_dim) for i in range(cfg.num_layers)])
    plan = quant.RotationPlan(orthonormal(9, cfg.hidden_size), r2, 12)
    if name not in ADMITS_R1:
        with pytest.raises(ConfigError, match=f"R1: found norm.*{cfg.model_type}"):
            quant.rotate_params(params, cfg, plan)
        plan = plan._replace(r1=None)
    rotated, its_cfg = quant.rotate_params(params, cfg, plan)
    same_function(before, logits(rotated, its_cfg, tokens))
    assert not np.allclose(rotated["layers"]["attn"]["v"]["weight"], params["layers"]["attn"]["v"]["weight"])
    assert rotated["layers"]["mlp"]["down"]["weight"].rotate == 12
    assert (plan.r1 is None) == np.array_equal(rotated["embed"]["embedding"], params["embed"]["embedding"])


def test_a_tied_head_is_untied_and_offsets_fold():
    """No released family has both a pre-norm stream and Gemma's offset; the code must not mind."""
    import dataclasses

    cfg = dataclasses.replace(FAMILIES["qwen3"], norm_offset=1.0, tie_embeddings=True)
    params = models.init(cfg, jax.random.key(0))
    params["norm"]["scale"] = params["norm"]["scale"] + 0.3
    params["layers"]["attn_norm"]["scale"] = params["layers"]["attn_norm"]["scale"] - 0.2
    tokens = window(cfg)
    rotated, its_cfg = quant.rotate_params(params, cfg, quant.RotationPlan(r1=orthonormal(0, cfg.hidden_size)))
    assert not its_cfg.tie_embeddings
    same_function(logits(params, cfg, tokens), logits(rotated, its_cfg, tokens))


@pytest.mark.parametrize("name", [*TINY, "gpt2"])
def test_before_rounding_perq_changes_nothing(name):
    cfg, params = checkpoint(name)[:2]
    tokens = window(cfg)
    config = quant.perq_star(weight_bits=None, act_bits=None, r3=8)
    made, report = quant.perq(params, cfg, [tokens], config)
    same_function(logits(params, cfg, tokens), logits(made, report.cfg, tokens))
    np.testing.assert_array_equal(np.sort(report.order, axis=1)[0], np.arange(cfg.intermediate_size))
    assert (report.imbalance[1] <= report.imbalance[0] + 1e-6).all()
    assert any("R1" in s for s in report.skipped) == (name not in ADMITS_R1)


def test_a_block_rotation_of_the_stream_comes_with_its_order():
    cfg, params = checkpoint("llama")[:2]
    tokens = window(cfg)
    config = quant.perq_star(weight_bits=None, act_bits=None, r3=8, r1_block=8)
    made, report = quant.perq(params, cfg, [tokens], config)
    same_function(logits(params, cfg, tokens), logits(made, report.cfg, tokens))


def test_layers_one_by_one_are_the_model():
    for name in ("gemma", "gpt2", "smollm3", "gpt_neox"):
        cfg = FAMILIES[name]
        params = models.init(cfg, jax.random.key(1))
        tokens = window(cfg, shape=(2, 9))
        x = layerwise.embed(params, cfg, jnp.asarray(tokens))
        for i in range(cfg.num_layers):
            x = layerwise.advance(cfg, layerwise.of_layer(params, i), jnp.asarray(i), x)
        seen = models.apply(params, cfg, jnp.asarray(tokens)).hidden
        whole = models.decoder.build(cfg, params).norm(x)
        np.testing.assert_allclose(whole, seen, atol=1e-5)


def test_statistics_are_those_of_the_float_model():
    cfg, params = checkpoint("llama")[:2]
    tokens = window(cfg, shape=(3, 8))
    whole = layerwise.masses(params, cfg, [tokens], "mlp.down")
    parts = layerwise.masses(params, cfg, [tokens[:1], tokens[1:]], "mlp.down")
    for a, b in zip(whole, parts, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    first = layerwise.of_layer(params, 0)
    x = layerwise.embed(params, cfg, jnp.asarray(tokens))
    _, seen = layerwise.run_layer(cfg, first, jnp.asarray(0), x, ("mlp.down", "mlp.up"))
    inner = jax.nn.silu(models.linear(seen["mlp.up"], first["mlp"]["gate"]["weight"]))
    inner = inner * models.linear(seen["mlp.up"], first["mlp"]["up"]["weight"])
    np.testing.assert_allclose(seen["mlp.down"], inner, atol=1e-6)
    np.testing.assert_allclose(whole.mean[0], jnp.abs(inner).mean((0, 1)), rtol=1e-5)
    assert whole.count == 24


@pytest.fixture(scope="module")
def starred():
    cfg, params = checkpoint("llama")[:2]
    batches = [window(cfg, i, (4, 24)) for i in range(2)]
    return cfg, params, batches, quant.perq(params, cfg, batches, quant.perq_star(r3=16))


def test_second_order_rounding_beats_nearest(starred):
    """On the calibration text, in what the last layer hands on."""
    cfg, params, batches, (star, report) = starred
    nearest, plain = quant.perq(params, cfg, batches, quant.perq_star(r3=16, rounding=quant.rtn()))
    exact = logits(params, cfg, batches[0])
    gap = lambda p, c: float(np.square(logits(p, c, batches[0]) - exact).mean())  # noqa: E731
    assert gap(star, report.cfg) < gap(nearest, plain.cfg)
    assert set(report.weight_error) == set(quant.ALL_LINEAR)
    assert all(float(e.min()) > 0 and float(e.max()) < 0.6 for e in report.weight_error.values())


def test_second_order_rounding_meets_the_inputs_so_far(starred):
    """The second layer's first weight is rounded with moments of the rounded first layer, redone here by hand."""
    cfg, params, batches, (star, report) = starred
    plan = quant.RotationPlan(quant.hadamard(cfg.hidden_size), quant.hadamard(cfg.head_dim), 16)
    ordered = quant.permute_params(params, quant.hidden_region(cfg), report.order)
    exact, its_cfg = quant.rotate_params(ordered, cfg, plan)
    moments = [0, 0]
    for tokens in batches:
        x = layerwise.embed(exact, its_cfg, jnp.asarray(tokens))
        pair = [layerwise.run_layer(its_cfg, layerwise.of_layer(p, 0), jnp.asarray(0), x, ())[0] for p in (exact, star)]
        inputs = [
            layerwise.run_layer(its_cfg, layerwise.of_layer(p, 1), jnp.asarray(1), a, ("attn.q",))[1]["attn.q"]
            for p, a in zip((exact, star), pair, strict=True)
        ]
        a, b = (v.reshape(-1, cfg.hidden_size) for v in inputs)
        moments = [moments[0] + b.T @ b / 192, moments[1] + a.T @ b / 192]
    found = quant.qronos(exact["layers"]["attn"]["q"]["weight"][1], *moments)
    stored = quant.unpack(jax.tree.map(lambda a: a[1], star["layers"]["attn"]["q"]["weight"]))
    assert (np.asarray(found.q) == np.asarray(stored.q)).mean() > 0.98


def test_learnt_rotations_start_at_the_rounded_hadamard_model():
    """The loss before the first step is that of the model rounded to nearest; the steps then leave the start."""
    cfg, params = checkpoint("llama")[:2]
    tokens = window(cfg, shape=(4, 16))
    made, report = quant.perq(params, cfg, [tokens], quant.perq_dagger(r3=16, learn=quant.CayleyConfig(steps=3)))
    start, plain = quant.perq(params, cfg, [tokens], quant.perq_star(r3=16, rounding=quant.rtn()))
    loss = optax.softmax_cross_entropy_with_integer_labels(
        jnp.asarray(logits(start, plain.cfg, tokens)[:, :-1]), jnp.asarray(tokens[:, 1:])
    ).mean()
    assert report.losses.shape == (3,)
    np.testing.assert_allclose(report.losses[0], loss, rtol=1e-3)
    assert len(set(np.asarray(report.losses).tolist())) == 3
    # What the last step left is still a rotation: the weights keep their size, which a matrix that is none would not.
    size = lambda p: np.linalg.norm(quant.dequantize(p["layers"]["attn"]["q"]["weight"]), axis=(1, 2))  # noqa: E731
    np.testing.assert_allclose(size(made), size(start), rtol=0.03)


def test_cayley_steps():
    target = orthonormal(5, 8)
    start = {"one": orthonormal(1, 8), "many": jnp.stack([orthonormal(2, 8), orthonormal(3, 8)])}
    optimizer = quant.cayley_sgd(optax.cosine_decay_schedule(1.0, 200))
    distance = lambda r: sum(jnp.square(a - target).sum() for a in (r["one"], *r["many"]))  # noqa: E731
    state, r = optimizer.init(start), start
    step = jax.jit(lambda r, s: optimizer.update(jax.grad(distance)(r), s, r))
    for _ in range(60):
        updates, state = step(r, state)
        r = optax.apply_updates(r, updates)
    for a in (r["one"], *r["many"]):
        np.testing.assert_allclose(a @ a.T, np.eye(8), atol=1e-5)
    assert distance(r) < 0.5 * distance(start)


def test_there_and_back(starred, tmp_path):
    cfg, _, batches, (star, report) = starred
    io.save(tmp_path / "q", star, report.cfg)
    params, its_cfg = io.load(tmp_path / "q")
    assert its_cfg == report.cfg
    assert jax.tree.structure(params) == jax.tree.structure(star)
    jax.tree.map(np.testing.assert_array_equal, params, star)
    np.testing.assert_array_equal(logits(params, its_cfg, batches[0]), logits(star, report.cfg, batches[0]))
    q = star["layers"]["mlp"]["up"]["weight"].q
    assert q.nbytes == cfg.num_layers * cfg.intermediate_size * cfg.hidden_size // 2
    sizes = sum(a.nbytes for a in jax.tree.leaves(star))
    assert sizes < (tmp_path / "q" / "model.safetensors").stat().st_size < sizes + 8192
    prompt = jnp.asarray(batches[0][:, :5])
    made = models.generate(params, its_cfg, prompt, jnp.ones_like(prompt), key=jax.random.key(0), max_new_tokens=4)
    assert made.tokens.shape == (4, 4)
    first = np.argmax(logits(params, its_cfg, prompt)[:, -1], axis=-1)
    np.testing.assert_array_equal(made.tokens[:, 0], first)
    with pytest.raises(WeightsError, match="already holds weights"):
        io.save(tmp_path / "q", star, report.cfg)


def test_damaged_files_are_named(starred, tmp_path):
    _, _, _, (star, report) = starred
    with pytest.raises(WeightsError, match=r"quant\.json: cannot be read"):
        io.load(tmp_path)
    io.save(tmp_path / "q", star, report.cfg)
    description = tmp_path / "q" / "quant.json"
    text = description.read_text()
    for change, named in (
        ("{", "no JSON"),
        ("{}", "another format"),
        (text.replace('"hidden_size": 32', '"hidden_size": 64'), "found shape|expected"),
        (text.replace("layers.attn.q.weight", "layers.attn.x.weight"), "layers.attn.x.weight"),
        (text.replace('"num_layers"', '"layers_num"'), "damaged description"),
    ):
        description.write_text(change)
        with pytest.raises(WeightsError, match=named):
            io.load(tmp_path / "q")
    description.write_text(text)
    whole = (tmp_path / "q" / "model.safetensors").read_bytes()
    (tmp_path / "q" / "model.safetensors").write_bytes(whole[:-3])
    with pytest.raises(WeightsError, match="truncated"):
        io.load(tmp_path / "q")


def test_what_perq_refuses(starred):
    cfg, params, batches, (star, report) = starred
    with pytest.raises(ConfigError, match=r"layers\.attn\.q\.weight: found a QTensor"):
        quant.perq(star, report.cfg, batches)
    with pytest.raises(ConfigError, match="found a QTensor"):
        quant.round_params(star, report.cfg, batches, quant.perq_star())
    with pytest.raises(ConfigError, match="calibration: found no batch"):
        quant.perq(params, cfg, [])
    with pytest.raises(ConfigError, match="calibration: found no batch"):
        quant.round_params(params, cfg, [], quant.perq_star())
    with pytest.raises(ConfigError, match="tokens: found id"):
        quant.perq(params, cfg, [np.full((1, 4), cfg.vocab_size, np.int32)])
    bad = jax.tree.map(lambda a: a, params)
    bad["layers"]["mlp"]["down"]["weight"] = bad["layers"]["mlp"]["down"]["weight"].at[0, 1, 2].set(jnp.nan)
    with pytest.raises(WeightsError, match=r"layers\.mlp\.down\.weight: found NaN"):
        quant.perq(bad, cfg, batches)
    for bits in (1, 9):
        with pytest.raises(ConfigError, match=f"weight_bits: found {bits}, expected 2 to 8"):
            quant.perq_star(weight_bits=bits)
    with pytest.raises(ConfigError, match="targets: found"):
        quant.perq_star(targets=("mlp.none",))
    for name in ("r3", "r1_block", "group"):
        for value in (0, -4, True):
            with pytest.raises(ConfigError, match=f"{name}: found .*expected a whole number above 0"):
                quant.perq_star(**{name: value})
    with pytest.raises(ConfigError, match="expected both above 0"):
        quant.CayleyConfig(steps=0)


def test_a_width_that_no_block_divides_is_skipped_and_reported():
    cfg, params = checkpoint("llama")[:2]
    tokens = window(cfg)
    made, report = quant.perq(params, cfg, [tokens], quant.perq_star(weight_bits=8, act_bits=8, r3=64))
    assert any("R3, P3: found a width of 48, expected Hadamard blocks of 64" in s for s in report.skipped)
    assert report.order is None
    assert made["layers"]["mlp"]["down"]["weight"].rotate is None
    same_function(logits(params, cfg, tokens), logits(made, report.cfg, tokens), 0.02)


def test_one_token_of_calibration():
    cfg, params = checkpoint("llama")[:2]
    made, report = quant.perq(params, cfg, [window(cfg, shape=(1, 1))], quant.perq_star(r3=8))
    assert np.isfinite(logits(made, report.cfg, window(cfg))).all()


def test_activations_that_overflow_and_dead_channels():
    cfg, params = checkpoint("llama")[:2]
    tokens = window(cfg)
    up = params["layers"]["mlp"]["up"]["weight"]
    gate = params["layers"]["mlp"]["gate"]["weight"]
    large = quant.regions.put(params, "layers.mlp.up.weight", up * 1e30)
    large = quant.regions.put(large, "layers.mlp.gate.weight", gate * 1e30)
    with pytest.raises(ConfigError, match="calibration: found activations that are not finite"):
        quant.perq(large, cfg, [tokens], quant.perq_star(r3=8, rounding=quant.rtn()))
    dead = quant.regions.put(params, "layers.mlp.up.weight", up.at[:, ::2].set(0))
    made, report = quant.perq(dead, cfg, [tokens], quant.perq_star(r3=8, targets=("mlp.down",)))
    assert np.isfinite(logits(made, report.cfg, tokens)).all()


def test_a_region_that_does_not_match_is_refused():
    cfg, params = checkpoint("llama")[:2]
    region = quant.hidden_region(cfg)
    with pytest.raises(ConfigError, match=r"found no parameter layers\.mlp\.none\.weight"):
        quant.permute_params(params, region._replace(rows=("layers.mlp.none.weight",)), jnp.arange(48))
    with pytest.raises(ConfigError, match=r"found layers\.mlp\.up, a group of weight, expected the path of one"):
        quant.permute_params(params, region._replace(rows=("layers.mlp.up",)), jnp.arange(48))
    with pytest.raises(ConfigError, match="expected 32 channels"):
        quant.permute_params(params, region, jnp.arange(32))
    with pytest.raises(ConfigError, match=r"region: found .*expected a Region"):
        quant.permute_params(params, (region.rows, region.cols), jnp.arange(48))
    with pytest.raises(ConfigError, match="idx: found float32, expected integers"):
        quant.permute_params(params, region, jnp.arange(48.0))
    with pytest.raises(ConfigError, match="repeated or missing channels"):
        inspect.unwrap(quant.permute_params)(params, region, [0] * 48)
    with pytest.raises(ConfigError, match="repeated or missing channels"):
        quant.permute_params(params, region, jnp.zeros(48, jnp.int32))
    with pytest.raises(ConfigError, match="across heads"):
        quant.permute_params(params, quant.value_region(cfg), jnp.arange(16)[::-1])
    with pytest.raises(ConfigError, match="r1: found shape"):
        quant.rotate_params(params, cfg, quant.RotationPlan(r1=jnp.eye(8)))
    for plan in (quant.RotationPlan(r1=jnp.ones((32, 32))), quant.RotationPlan(r2=jnp.full((8, 8), jnp.nan))):
        with pytest.raises(ConfigError, match=r"r[12]: found a matrix .* from orthonormal"):
            quant.rotate_params(params, cfg, plan)
    with pytest.raises(ConfigError, match="r2: found shape"):
        quant.rotate_params(params, cfg, quant.RotationPlan(r2=jnp.eye(4)))
    with pytest.raises(ConfigError, match="r3: found 7"):
        quant.rotate_params(params, cfg, quant.RotationPlan(r3=7))


@pytest.mark.slow
def test_smollm2_keeps_its_logits():
    cfg, params, _, _ = hf.default()
    tokens = window(cfg, shape=(1, 64))
    made, report = quant.perq(params, cfg, [tokens], quant.perq_star(weight_bits=None, act_bits=None))
    assert report.skipped == ()
    assert not report.cfg.tie_embeddings
    same_function(logits(params, cfg, tokens), logits(made, report.cfg, tokens))
