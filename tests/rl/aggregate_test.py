"""Aggregations against loops, their invariants, and batches in parts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import compiled

from jaxmeth import rl
from jaxmeth.types import ConfigError

MODES = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "token_sum_norm", "group_token_mean")
N, T, MAX_LEN = 8, 5, 7
IDS = jnp.asarray([0, 0, 1, 1, 1, 2, 3, 3])


def keywords(mode):
    return {"mode": mode, "max_len": MAX_LEN, "group_ids": IDS}


@compiled
def everything(x, mask):
    """Each mode, with and without empty rows: (value, gradient)."""
    values = lambda x: {  # noqa: E731
        f"{mode} {count}": rl.aggregate(x, mask, count_empty_rows=count, **keywords(mode))
        for mode in MODES
        for count in (True, False)
    }
    return values(x), jax.jacrev(values)(x)


@pytest.fixture(scope="module")
def made():
    rng = np.random.default_rng(0)
    mask = rng.uniform(size=(N, T)) < 0.6
    mask[2] = mask[5] = False  # row 5 is a group of its own
    return jnp.asarray(rng.normal(size=(N, T)), jnp.float32), jnp.asarray(mask)


def looped(x, mask, mode, count_empty):
    rows = [x[i][mask[i]] for i in range(N)]
    filled = [r for r in rows if len(r)]
    if mode == "token_mean":
        return np.concatenate(rows).mean()
    if mode == "token_sum_norm":
        return np.concatenate(rows).sum() / (N * MAX_LEN)
    if mode == "seq_mean_token_sum":
        return np.mean([r.sum() for r in filled])
    if mode == "seq_mean_token_mean":
        return np.sum([r.mean() for r in filled]) / (N if count_empty else len(filled))
    groups = [np.concatenate([rows[i] for i in range(N) if IDS[i] == group]) for group in range(4)]
    means = [g.mean() for g in groups if len(g)]
    return np.sum(means) / (4 if count_empty else len(means))


@pytest.mark.parametrize("count_empty", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_definitions(made, mode, count_empty):
    found, _ = everything(*made)
    expected = looped(*map(np.asarray, made), mode, count_empty)
    np.testing.assert_allclose(found[f"{mode} {count_empty}"], expected, rtol=1e-5)


def test_equal_lengths_agree():
    x = jnp.asarray(np.random.default_rng(1).normal(size=(N, T)), jnp.float32)
    mask = jnp.ones((N, T), bool)
    modes = ("token_mean", "seq_mean_token_mean", "token_sum_norm")
    values = compiled(lambda x: [rl.aggregate(x, mask, mode, max_len=T) for mode in modes])(x)
    np.testing.assert_allclose(values, np.asarray(x).mean(), rtol=1e-5)


def test_masked_columns_change_nothing(made):
    x, mask = made
    junk = np.full((N, 3), np.nan, np.float32)
    found, _ = everything(np.hstack([x, junk]), np.hstack([mask, junk > 0]))
    for name, value in everything(x, mask)[0].items():
        np.testing.assert_allclose(found[name], value, rtol=1e-6, err_msg=name)


def test_nothing_unmasked_is_zero(made):
    """Case 28, with what would be NaN at the masked positions."""
    values, grads = everything(jnp.full((N, T), jnp.nan), jnp.zeros((N, T), bool))
    for name in values:
        assert values[name] == 0, name
        np.testing.assert_array_equal(grads[name], 0, err_msg=name)


def test_no_rows_is_zero():
    x, mask, ids = jnp.zeros((0, T)), jnp.zeros((0, T), bool), jnp.zeros(0, int)
    values = compiled(lambda x: {m: rl.aggregate(x, mask, m, max_len=MAX_LEN, group_ids=ids) for m in MODES})
    assert values(x) == dict.fromkeys(MODES, 0)


def test_parts_add_up(made):
    """Rows in two parts (groups whole), each over the sum of both denominators."""

    @compiled
    def parts(x, mask):
        found = {}
        for mode in MODES:
            rows = [(x[p], mask[p], IDS[p] - IDS[p][0]) for p in (slice(0, 5), slice(5, None))]
            total = sum(rl.aggregate_denominator(m, mode, max_len=MAX_LEN, group_ids=ids) for _, m, ids in rows)
            whole = rl.aggregate_denominator(mask, **keywords(mode))
            same = {"mode": mode, "max_len": MAX_LEN, "denominator": total}
            found[mode] = sum(rl.aggregate(a, m, group_ids=ids, **same) for a, m, ids in rows), total, whole
        return found

    whole, _ = everything(*made)
    for mode, (found, total, expected) in parts(*made).items():
        np.testing.assert_allclose(found, whole[f"{mode} True"], rtol=1e-6)
        assert total == expected > 0


def test_weighted_denominator(made):
    x, mask = made
    np.testing.assert_allclose(
        rl.aggregate_denominator(mask, weight=x), np.asarray(x)[np.asarray(mask)].sum(), rtol=1e-5
    )


def test_parts_without_a_token_have_the_divisor_0(made):
    x, mask = made
    assert rl.aggregate(x, jnp.zeros_like(mask), denominator=0.0) == 0


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda x, m: rl.aggregate(x, m, "mean"), "mode"),
        (lambda x, m: rl.aggregate(x, m[1:]), "mask"),
        (lambda x, m: rl.aggregate(x, m, "token_sum_norm"), "max_len"),
        (lambda x, m: rl.aggregate(x, m, "token_sum_norm", max_len=0), "max_len"),
        (lambda x, m: rl.aggregate(x, m, "group_token_mean"), "group_ids"),
        (lambda x, m: rl.aggregate(x, m, "group_token_mean", group_ids=IDS[1:]), "group_ids"),
        (lambda x, m: rl.aggregate_denominator(m, "token_sum_norm", max_len=3, weight=x), "weight"),
        (lambda x, m: rl.aggregate_denominator(m, weight=x[1:]), "weight"),
        (lambda x, m: rl.aggregate(x[:2], m[:2], "group_token_mean", group_ids=jnp.asarray([7, 9])), "group_ids"),
        (lambda x, m: rl.aggregate(x, m, "group_token_mean", group_ids=IDS - 1), "group_ids"),
        (lambda x, m: rl.aggregate(x, m, denominator=float("nan")), "denominator"),
        (lambda x, m: rl.aggregate(x, m, denominator=-1.0), "denominator"),
        (lambda x, m: rl.aggregate(x, m, denominator=jnp.float32(0)), "denominator"),
    ],
)
def test_bad_input_names_the_field(made, call, field):
    with pytest.raises(ConfigError, match=f"^{field}: found"):
        call(*made)
