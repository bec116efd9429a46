"""RAUQ in batch form: the two public implementations' scores, the invariants of the recurrence, and the edges."""

import dataclasses
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmeth import uncertainty
from jaxmeth.types import ConfigError
from jaxmeth.uncertainty import RAUQConfig, rauq

STORED = Path(__file__).parents[1] / "golden" / "12-rauq"
ABLATIONS = {
    "simple_rec": "previous_prob",
    "no_rec": "no_recurrence",
    "no_attn": "no_attention",
    "multiply": "product",
    "delta_sliding": "minus_mean",
    "delta_ratio": "ratio",
    "delta_rolling": "minus_last5",
}
TOKEN_AGGS = ("meanlog", "sumlog", "mean", "median", "min", "max")
LAYER_AGGS = ("max", "mean", "median")
RECURRENCES = ("full", "no_recurrence", "no_attention", "previous_prob", "product")


@pytest.fixture(scope="module")
def g():
    with np.load(STORED / "synthetic.npz") as stored:
        return dict(stored)


PRECISIONS = {"float32": (False, 1e-4), "float64": (True, 1e-6)}
# What costs time is compiling: where float32 adds a type and no path, it runs with -m slow.
MOSTLY_DOUBLE = pytest.mark.parametrize(
    "precision", [pytest.param("float32", marks=pytest.mark.slow), "float64"], indirect=True
)


@pytest.fixture(params=PRECISIONS)
def precision(request):
    """(dtype, tolerance of the golden README), with float64 switched on where it is asked for."""
    double, tolerance = PRECISIONS[request.param]
    with jax.enable_x64(double):
        yield (jnp.float64 if double else jnp.float32), tolerance


def arrays(g, dtype):
    gen_len = jnp.asarray(g["gen_len"], jnp.int32)
    return jnp.asarray(g["token_logp"], dtype), jnp.asarray(g["prev_attn"], dtype), gen_len


def made(seed, rows=4, layers=6, heads=3, tokens=7, floor=1e-3):
    """Random logp [B,N], prev_attn [B,L,H,N-1] in (0, 1) and gen_len in 1..N."""
    rng = np.random.default_rng(seed)
    logp = jnp.asarray(np.log(rng.uniform(floor, 1, (rows, tokens))), jnp.float32)
    prev_attn = jnp.asarray(rng.uniform(0, 1, (rows, layers, heads, tokens - 1)), jnp.float32)
    return logp, prev_attn, jnp.asarray(rng.integers(1, tokens + 1, rows), jnp.int32)


# --- golden ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.0, 0.2, 0.5, 0.9, 1.0])
def test_scores_of_the_probability_form(g, precision, alpha):
    dtype, tolerance = precision
    score = rauq(*arrays(g, dtype), config=RAUQConfig(alpha=alpha)).score
    assert score.dtype == dtype
    np.testing.assert_allclose(score, g[f"score_prob_a{alpha}"], rtol=0, atol=tolerance)


@pytest.mark.parametrize("alpha", [0.5, 0.8, 0.9])
def test_scores_of_the_entropy_form(g, precision, alpha):
    dtype, tolerance = precision
    entropy = jnp.asarray(g["token_entropy"], dtype)
    config = RAUQConfig(alpha=alpha, signal="entropy")
    score = rauq(*arrays(g, dtype), entropy=entropy, vocab_size=int(g["vocab_size"]), config=config).score
    np.testing.assert_allclose(score, g[f"score_entropy_a{alpha}"], rtol=0, atol=tolerance)


@MOSTLY_DOUBLE
@pytest.mark.parametrize("token_agg", TOKEN_AGGS)
def test_aggregations(g, precision, token_agg):
    """One compilation for the three ways to join layers."""
    dtype, tolerance = precision
    configs = {name: RAUQConfig(token_agg=token_agg, layer_agg=name) for name in LAYER_AGGS}
    scores = jax.jit(lambda *args: {name: rauq(*args, config=c).score for name, c in configs.items()})(
        *arrays(g, dtype)
    )
    for layer_agg, score in scores.items():
        np.testing.assert_allclose(score, g[f"agg_{token_agg}_{layer_agg}"], rtol=0, atol=tolerance)


@MOSTLY_DOUBLE
@pytest.mark.parametrize("stored", ABLATIONS)
def test_ablations(g, precision, stored):
    dtype, tolerance = precision
    config = RAUQConfig(recurrence=ABLATIONS[stored], token_agg="mean")
    score = rauq(*arrays(g, dtype), config=config).score
    np.testing.assert_allclose(score, g[f"ablation_{stored}"], rtol=0, atol=tolerance)


def test_heads_confidence_and_all_layers(g, precision):
    dtype, tolerance = precision
    logp, prev_attn, gen_len = arrays(g, dtype)
    result = rauq(logp, prev_attn, gen_len, layers=tuple(range(6)))
    np.testing.assert_allclose(result.score, g["all_layers"], rtol=0, atol=tolerance)
    np.testing.assert_allclose(result.confidence, g["confidence_a0.2"], rtol=0, atol=tolerance)
    np.testing.assert_array_equal(result.heads, g["selected_head"])
    np.testing.assert_array_equal(uncertainty.select_heads(prev_attn, gen_len), g["selected_head"])


def test_the_offset_of_the_public_code(g):
    result = rauq(*arrays(g, jnp.float32), config=RAUQConfig(offset=1.0))
    np.testing.assert_allclose(result.score, g["score_prob_a0.2"] + 1, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["rauq_prob_a0.2", "rauq_prob_a0.5", "rauq_entropy_a0.8", "rauq_entropy_a0.9"])
def test_scores_of_real_answers(name):
    """A slice of the middle layers only, stored in float16."""
    with np.load(STORED / "smollm2_answers.npz") as stored:
        s = dict(stored)
    config = RAUQConfig(alpha=float(name[-3:]), signal="entropy" if "entropy" in name else "prob")
    prev_attn = jnp.asarray(s["prev_attn"])
    result = rauq(
        jnp.asarray(s["token_logp"]),
        prev_attn,
        jnp.asarray(s["gen_len"], jnp.int32),
        entropy=jnp.asarray(s["token_entropy"]),
        vocab_size=int(s["vocab_size"]),
        layers=tuple(range(prev_attn.shape[1])),
        config=config,
    )
    assert result.score.dtype == jnp.float32
    np.testing.assert_allclose(result.score, s[name], rtol=0, atol=1e-4)


def test_middle_layers():
    assert uncertainty.middle_layers(32) == tuple(range(10, 23))
    assert uncertainty.middle_layers(30) == tuple(range(10, 21))
    assert uncertainty.middle_layers(6) == (2, 3, 4)
    assert [uncertainty.middle_layers(n) for n in (1, 2, 3)] == [(0,), (0, 1), (1, 2)]


def test_layers_without_a_full_attention_map_are_left_out():
    """The middle is that of the original numbering, not of the layers that remain."""
    full = [i % 2 == 1 for i in range(30)]
    assert uncertainty.middle_layers(30, full=full) == (11, 13, 15, 17, 19)
    with pytest.raises(ConfigError, match=r"full: found 3 .* expected 30"):
        uncertainty.middle_layers(30, full=[True] * 3)
    with pytest.raises(ConfigError, match="num_layers: found 0"):
        uncertainty.middle_layers(0)


# --- invariants ------------------------------------------------------------------------------------------------------

seeds = st.integers(0, 2**31 - 1)


@settings(max_examples=30, deadline=None)
@given(seed=seeds)
def test_alpha_one_is_perplexity(seed):
    logp, prev_attn, gen_len = made(seed, floor=1e-300)
    result = rauq(logp, prev_attn, gen_len, config=RAUQConfig(alpha=1.0))
    expected = uncertainty.perplexity(logp, gen_len)
    # The sums run in another order: one unit in the last place.
    np.testing.assert_allclose(result.score, expected, rtol=2e-7)
    np.testing.assert_allclose(result.layer_scores, jnp.tile(expected[:, None], 3), rtol=2e-7)
    valid = jnp.arange(7)[None] < gen_len[:, None]
    np.testing.assert_array_equal(result.confidence[:, 0], jnp.where(valid, jnp.exp(logp), 0))


@settings(max_examples=30, deadline=None)
@given(seed=seeds)
def test_permuting_heads_changes_only_the_head_numbers(seed):
    logp, prev_attn, gen_len = made(seed)
    order = np.random.default_rng(seed).permutation(3)
    plain, mixed = rauq(logp, prev_attn, gen_len), rauq(logp, prev_attn[:, :, order], gen_len)
    np.testing.assert_array_equal(plain.layer_scores, mixed.layer_scores)
    longer = np.asarray(gen_len) > 1
    np.testing.assert_array_equal(order[np.asarray(mixed.heads)][longer], np.asarray(plain.heads)[longer])


@settings(max_examples=30, deadline=None)
@given(seed=seeds)
def test_layers_outside_do_not_matter_and_a_superset_scores_no_less(seed):
    logp, prev_attn, gen_len = made(seed)
    chosen = rauq(logp, prev_attn, gen_len, layers=(1, 3)).score
    np.testing.assert_array_equal(chosen, rauq(logp, prev_attn.at[:, 4].set(0.5), gen_len, layers=(1, 3)).score)
    np.testing.assert_array_equal(chosen, rauq(logp, prev_attn, gen_len, layers=(3, 1)).score)
    assert (rauq(logp, prev_attn, gen_len, layers=(1, 2, 3)).score >= chosen).all()


@settings(max_examples=30, deadline=None)
@given(seed=seeds, recurrence=st.sampled_from(RECURRENCES))
def test_a_larger_signal_or_attention_never_raises_a_layer_score(seed, recurrence):
    logp, prev_attn, gen_len = made(seed, heads=1)
    rng = np.random.default_rng(seed + 1)
    config = RAUQConfig(recurrence=recurrence)
    base = rauq(logp, prev_attn, gen_len, config=config).layer_scores
    nearer = jnp.asarray(rng.uniform(0, 1, logp.shape), jnp.float32)
    surer = rauq(logp * nearer, prev_attn, gen_len, config=config).layer_scores
    grown = prev_attn + (1 - prev_attn) * jnp.asarray(rng.uniform(0, 1, prev_attn.shape), jnp.float32)
    firmer = rauq(logp, grown, gen_len, config=config).layer_scores
    assert (surer <= base + 1e-5).all()
    assert (firmer <= base + 1e-5).all()


@settings(max_examples=30, deadline=None)
@given(seed=seeds, alpha=st.sampled_from([0.0, 0.2, 0.9]))
def test_confidence_is_a_probability_and_the_score_has_a_bound(seed, alpha):
    logp, prev_attn, gen_len = made(seed)
    result = rauq(logp, prev_attn, gen_len, config=RAUQConfig(alpha=alpha))
    valid = np.arange(logp.shape[1])[None] < np.asarray(gen_len)[:, None]
    inside = np.asarray(result.confidence)[np.broadcast_to(valid[:, None], result.confidence.shape)]
    assert (inside > 0).all()
    assert (inside <= 1 + 1e-6).all()
    assert (np.asarray(result.confidence)[np.broadcast_to(~valid[:, None], result.confidence.shape)] == 0).all()
    if alpha > 0:
        bound = uncertainty.perplexity(logp, gen_len) - math.log(alpha)
        assert (result.layer_scores <= bound[:, None] + 1e-5).all()


def test_batch_is_a_loop_over_rows_without_padding():
    logp, prev_attn, _ = made(4)
    lengths = [1, 3, 6, 7]
    batch = rauq(logp, prev_attn, jnp.asarray(lengths, jnp.int32))
    for b, n in enumerate(lengths):
        row = rauq(logp[b : b + 1, :n], prev_attn[b : b + 1, ..., : n - 1], jnp.asarray([n], jnp.int32))
        np.testing.assert_allclose(row.score[0], batch.score[b], rtol=1e-6)
        np.testing.assert_allclose(row.confidence[0], batch.confidence[b, :, :n], rtol=1e-6)
        np.testing.assert_array_equal(row.heads[0], batch.heads[b])


def test_jit_and_vmap_equal_eager():
    logp, prev_attn, gen_len = made(5)
    plain = rauq(logp, prev_attn, gen_len)
    jitted = jax.jit(rauq)(logp, prev_attn, gen_len)
    jax.tree.map(np.testing.assert_array_equal, plain, jitted)
    mapped = jax.vmap(rauq)(*[x[:, None] for x in (logp, prev_attn, gen_len)])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b[:, 0], rtol=1e-6), plain, mapped)


# --- edges -----------------------------------------------------------------------------------------------------------


def test_one_token_has_no_attention():
    logp, prev_attn, _ = made(13)
    result = rauq(logp, jnp.full_like(prev_attn, jnp.nan), jnp.ones(4, jnp.int32))
    np.testing.assert_allclose(result.score, -logp[:, 0], rtol=1e-6)
    np.testing.assert_array_equal(result.heads, 0)
    narrow = rauq(logp[:, :1], prev_attn[..., :0], jnp.ones(4, jnp.int32))
    np.testing.assert_array_equal(narrow.score, result.score)


@pytest.mark.parametrize("token_agg", ["meanlog", "median", "min"])
def test_an_empty_answer_is_never_trusted(token_agg):
    logp, prev_attn, _ = made(17)
    gen_len = jnp.asarray([0, 2, 0, 7], jnp.int32)
    result = rauq(logp, prev_attn, gen_len, config=RAUQConfig(token_agg=token_agg, offset=1.0))
    np.testing.assert_array_equal(np.isposinf(result.score), [True, False, True, False])
    np.testing.assert_array_equal(np.isposinf(result.layer_scores).all(1), [True, False, True, False])


def test_an_empty_answer_as_asked_and_a_batch_of_them():
    logp, prev_attn, _ = made(17)
    asked = rauq(logp, prev_attn, jnp.asarray([0, 2, 0, 7]), config=RAUQConfig(empty_score=math.nan))
    np.testing.assert_array_equal(np.isnan(asked.score), [True, False, True, False])
    none = rauq(logp[:, :0], prev_attn[..., :0], jnp.zeros(4, jnp.int32))
    assert np.isposinf(none.score).all()
    assert none.confidence.shape == (4, 3, 0)


def test_ties_take_the_lowest_head():
    prev_attn = jnp.asarray([0.2, 0.7, 0.7, 0.1])[None, None, :, None] * jnp.ones((1, 1, 1, 3))
    np.testing.assert_array_equal(uncertainty.select_heads(prev_attn, jnp.asarray([4])), [[1]])


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recurrence", ["minus_mean", "minus_last5"])
@pytest.mark.parametrize("token_agg", ["meanlog", "sumlog"])
def test_differences_have_no_logarithm(recurrence, token_agg):
    with pytest.raises(ConfigError, match=f"token_agg: found '{token_agg}' with recurrence '{recurrence}'"):
        RAUQConfig(recurrence=recurrence, token_agg=token_agg)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("alpha", -0.1),
        ("alpha", 1.1),
        ("alpha", math.nan),
        ("signal", "logit"),
        ("token_agg", "meanlogs"),
        ("layer_agg", "min"),
        ("recurrence", "none"),
        ("offset", math.inf),
    ],
)
def test_unknown_settings(field, value):
    with pytest.raises(ConfigError, match=f"{field}: found"):
        dataclasses.replace(RAUQConfig(), **{field: value})


def test_arguments_that_do_not_fit():
    logp, prev_attn, gen_len = made(31)
    with pytest.raises(ConfigError, match="entropy, vocab_size: found None"):
        rauq(logp, prev_attn, gen_len, config=RAUQConfig(signal="entropy"))
    with pytest.raises(ConfigError, match=r"entropy: found shape \(4, 6\), expected \(4, 7\)"):
        rauq(logp, prev_attn, gen_len, entropy=logp[:, 1:], vocab_size=9, config=RAUQConfig(signal="entropy"))
    with pytest.raises(ConfigError, match="vocab_size: found 0"):
        rauq(logp, prev_attn, gen_len, entropy=-logp, vocab_size=0, config=RAUQConfig(signal="entropy"))
    with pytest.raises(ConfigError, match=r"prev_attn: found shape \(4, 6, 3, 5\), expected \[4, L, H, 6\]"):
        rauq(logp, prev_attn[..., 1:], gen_len)
    with pytest.raises(ConfigError, match=r"layers: found \(6,\), expected indices in \[0, 6\)"):
        rauq(logp, prev_attn, gen_len, layers=(6,))
    with pytest.raises(ConfigError, match=r"layers: found \(\)"):
        rauq(logp, prev_attn, gen_len, layers=())
    with pytest.raises(ConfigError, match=r"gen_len: found 8, expected values in \[0, 7\]"):
        rauq(logp, prev_attn, gen_len.at[0].set(8))
    with pytest.raises(ConfigError, match="gen_len: found -1"):
        rauq(logp, prev_attn, gen_len.at[0].set(-1))


def test_the_function_wins_over_the_module():
    assert callable(uncertainty.rauq)
    assert not hasattr(uncertainty.rauq, "RAUQConfig")
    assert uncertainty.judge.__name__ == "jaxmeth.uncertainty.judge"
    with pytest.raises(AttributeError, match="has no attribute 'judges'"):
        _ = uncertainty.judges
