"""The decoder: caches, padding, purity, weight leaves, and what it refuses. Golden logits live in tests/hf."""

import dataclasses
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import FAMILIES
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmeth import models
from jaxmeth.attention import dense
from jaxmeth.models.decoder import Decoder, check_tokens
from jaxmeth.types import ConfigError

LLAMA = FAMILIES["llama"]


def some_tokens(cfg, batch=2, length=11, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, cfg.vocab_size, (batch, length)), jnp.int32)


@pytest.fixture(params=sorted(FAMILIES))
def family(request):
    cfg = FAMILIES[request.param]
    return cfg, models.init(cfg, jax.random.key(0))


def test_cached_pieces_equal_one_pass(family):
    cfg, params = family
    tokens = some_tokens(cfg)
    whole = models.apply(params, cfg, tokens)
    cache = models.init_cache(cfg, 2, 16)
    parts = []
    for piece in (tokens[:, :6], tokens[:, 6:7], tokens[:, 7:]):
        out = models.apply(params, cfg, piece, cache=cache)
        parts.append(out.logits)
        cache = out.cache
    np.testing.assert_allclose(np.concatenate(parts, axis=1), whole.logits, atol=2e-6)
    assert int(cache.index) == 11


def test_left_padding_changes_nothing(family):
    cfg, params = family
    tokens = some_tokens(cfg, length=7)
    plain = models.apply(params, cfg, tokens).logits
    padded = jnp.concatenate([jnp.full((2, 4), 3, jnp.int32), tokens], axis=1)
    mask = jnp.arange(11)[None] >= jnp.full((2, 1), 4)
    np.testing.assert_allclose(models.apply(params, cfg, padded, mask=mask).logits[:, 4:], plain, atol=2e-6)


def test_gradient_is_finite_with_padding(family):
    cfg, params = family
    tokens = some_tokens(cfg)
    mask = jnp.arange(11)[None] >= jnp.array([[0], [11]])  # the second row is all padding

    def loss(params):
        logp = jax.nn.log_softmax(models.apply(params, cfg, tokens, mask=mask).logits)
        return -jnp.sum(jnp.where(mask, logp[..., 5], 0))

    gradient = jax.grad(loss)(params)
    assert all(np.all(np.isfinite(g)) for g in jax.tree.leaves(gradient))
    assert all(np.any(g) for g in jax.tree.leaves(gradient) if g.shape[-1:] != (16,))


def test_module_class_is_bit_equal_to_apply(family):
    cfg, _ = family
    tokens = some_tokens(cfg)
    module = Decoder(cfg, nnx.Rngs(3))
    graph, state = nnx.split(module)
    direct = jax.jit(lambda state, tokens: nnx.merge(graph, state)(tokens).logits)(state, tokens)
    np.testing.assert_array_equal(direct, models.apply(nnx.to_pure_dict(state), cfg, tokens).logits)


def test_abstract_params_have_the_shapes_of_init(family):
    cfg, params = family
    chex.assert_trees_all_equal_shapes_and_dtypes(params, models.abstract_params(cfg))


def test_program_size_does_not_grow_with_depth():
    def size(layers):
        cfg = dataclasses.replace(LLAMA, num_layers=layers)
        shapes = models.abstract_params(cfg)
        program = jax.make_jaxpr(lambda p, t: models.apply(p, cfg, t).logits)(shapes, some_tokens(cfg))
        return len(str(program).splitlines())

    assert size(2) == size(12)


def test_one_compilation_a_shape():
    traced = []

    def counting(q, k, v, ctx, state):
        traced.append(q.shape)
        return dense(q, k, v, ctx, state)

    params = models.init(LLAMA, jax.random.key(0))
    for seed in range(3):
        models.apply(params, LLAMA, some_tokens(LLAMA, seed=seed), attend=counting)
    assert len(set(traced)) == 1
    first = len(traced)
    models.apply(params, LLAMA, some_tokens(LLAMA, seed=9), attend=counting)
    assert len(traced) == first


def test_attend_state_is_scanned_with_the_layers():
    def tap(q, k, v, ctx, state):
        out, _ = dense(q, k, v, ctx, None)
        return out, state + ctx.layer.astype(jnp.float32)

    params = models.init(LLAMA, jax.random.key(0))
    out = models.apply(params, LLAMA, some_tokens(LLAMA), attend=tap, state=jnp.full((3,), 10.0))
    np.testing.assert_array_equal(out.state, [10.0, 11.0, 12.0])


class Doubled(NamedTuple):
    weight: jax.Array

    def matmul(self, x):
        return 2.0 * (x @ self.weight.T)


def test_weight_leaves_pass_through_the_scan():
    params = models.init(LLAMA, jax.random.key(0))
    tokens = some_tokens(LLAMA)
    edited, expected = (jax.tree.map(lambda a: a, params) for _ in range(2))
    edited["layers"]["mlp"]["up"]["weight"] = Doubled(params["layers"]["mlp"]["up"]["weight"])
    expected["layers"]["mlp"]["up"]["weight"] = 2.0 * params["layers"]["mlp"]["up"]["weight"]
    np.testing.assert_allclose(
        models.apply(edited, LLAMA, tokens).logits, models.apply(expected, LLAMA, tokens).logits, atol=1e-6
    )


def test_bfloat16_storage_is_computed_in_float32_on_cpu():
    params = jax.tree.map(lambda a: a.astype(jnp.bfloat16), models.init(LLAMA, jax.random.key(0)))
    rounded = jax.tree.map(lambda a: a.astype(jnp.float32), params)
    tokens = some_tokens(LLAMA)
    np.testing.assert_allclose(
        models.apply(params, LLAMA, tokens).logits, models.apply(rounded, LLAMA, tokens).logits, atol=1e-5
    )


def test_float64_parameters_compute_in_float64(x64):
    tokens = some_tokens(LLAMA)
    params = jax.tree.map(lambda a: a.astype(jnp.float64), models.init(LLAMA, jax.random.key(0)))
    exact = models.apply(params, LLAMA, tokens).logits
    single = models.apply(jax.tree.map(lambda a: a.astype(jnp.float32), params), LLAMA, tokens).logits
    assert exact.dtype == jnp.float64
    np.testing.assert_allclose(single, exact, atol=1e-5)


def test_bidirectional_switch_lets_early_tokens_see_late_ones():
    cfg = dataclasses.replace(LLAMA, causal=False)
    params = models.init(cfg, jax.random.key(0))
    tokens = some_tokens(cfg)
    changed = tokens.at[:, -1].set((tokens[:, -1] + 1) % cfg.vocab_size)
    both = [[models.apply(params, c, t).logits[:, 0] for t in (tokens, changed)] for c in (cfg, LLAMA)]
    assert np.abs(both[0][0] - both[0][1]).max() > 1e-6
    np.testing.assert_array_equal(*both[1])


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=2, max_size=2))
def test_ragged_batch_equals_its_rows(lengths):
    params = models.init(LLAMA, jax.random.key(0))
    tokens = some_tokens(LLAMA, length=9)
    mask = jnp.arange(9)[None] >= 9 - jnp.array(lengths)[:, None]
    together = models.apply(params, LLAMA, tokens, mask=mask)
    for row, length in enumerate(lengths):
        alone = models.apply(params, LLAMA, tokens[row : row + 1, 9 - length :])
        np.testing.assert_allclose(together.logits[row, 9 - length :], alone.logits[0], atol=2e-6)


def test_eager_jit_and_vmap_agree():
    params = models.init(LLAMA, jax.random.key(0))
    tokens = some_tokens(LLAMA)
    jitted = models.apply(params, LLAMA, tokens).logits
    with jax.disable_jit():
        np.testing.assert_allclose(models.apply(params, LLAMA, tokens).logits, jitted, atol=2e-6)
    rows = jax.vmap(lambda t: models.apply(params, LLAMA, t[None]).logits[0])(tokens)
    np.testing.assert_allclose(rows, jitted, atol=2e-6)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (np.array([[0, 61]], np.int32), "61, expected 0 to 60"),
        (np.array([[-1, 3]], np.int32), "-1, expected 0 to 60"),
        (jnp.array([[0, 61]], jnp.int32), "61, expected 0 to 60"),
        (np.zeros((2, 0), np.int32), "empty prompt"),
        (np.zeros((1, 65), np.int32), "max_positions 64"),
        (np.zeros((3,), np.int32), r"expected \[batch, length\]"),
    ],
)
def test_unusable_tokens_are_refused(tokens, message):
    params = models.init(LLAMA, jax.random.key(0))
    with pytest.raises(ConfigError, match=message):
        check_tokens(LLAMA, tokens, 0) if tokens.ndim == 1 else models.apply(params, LLAMA, tokens)


@pytest.mark.parametrize(
    ("field", "value"),
    [("norm", "batchnorm"), ("num_kv_heads", 3), ("layer_windows", (1,)), ("num_layers", 0), ("activation", "swish2")],
)  # fmt: skip
def test_unusable_configuration_names_its_field(field, value):
    with pytest.raises(ConfigError, match=field):
        dataclasses.replace(LLAMA, **{field: value})


def test_a_full_cache_is_refused_instead_of_overwritten():
    params = models.init(LLAMA, jax.random.key(0))
    tokens = some_tokens(LLAMA, length=6)
    cache = models.apply(params, LLAMA, tokens, cache=models.init_cache(LLAMA, 2, 10)).cache
    with pytest.raises(ConfigError, match="10 slots, 6 of them used, expected room for 6"):
        models.apply(params, LLAMA, tokens, cache=cache)


def test_positions_masks_and_batches_that_do_not_fit_are_refused():
    params, tokens = models.init(LLAMA, jax.random.key(0)), some_tokens(LLAMA)
    for wrong in (-1, LLAMA.max_positions):
        with pytest.raises(ConfigError, match=f"positions: found {wrong}, expected 0 to max_positions"):
            models.apply(params, LLAMA, tokens, positions=jnp.full(tokens.shape, wrong))
    with pytest.raises(ConfigError, match="tokens: found an empty batch"):
        models.apply(params, LLAMA, jnp.zeros((0, 3), jnp.int32))
    # The annotations are checked in tests, so what they would refuse is given to the check itself.
    for wrong in ([[1, 2]], None, "ab", np.ones((1, 2), np.float32)):
        with pytest.raises(ConfigError, match=r"tokens: found .*expected an array of integers"):
            check_tokens(LLAMA, wrong, 0)
