"""Data that no fit can mean are refused with their row and field (fault case 36)."""

import jax
import numpy as np
import pytest

from jaxmeth import scaling
from jaxmeth.types import ConfigError


def points(count=24):
    n = np.repeat([1e8, 3e8, 1e9, 3e9], count // 4)
    d = np.tile(np.linspace(1e10, 3e11, count // 4), 4)
    return n, d, 2.0 + (n / 1e9) ** -0.3 + (d / 1e9) ** -0.3


def fit(n, d, y, law=scaling.CHINCHILLA, **options):
    return scaling.fit(law, n, d, y, rng=jax.random.key(0), **options)


def changed(column, row, value):
    data = {k: v.copy() for k, v in zip("ndy", points(), strict=True)}
    data[column][row] = value
    return data["n"], data["d"], data["y"]


@pytest.mark.parametrize("column", ["n", "d", "y"])
@pytest.mark.parametrize("value", [0.0, -1.0, np.nan, np.inf])
def test_a_value_that_is_not_positive_and_finite_names_its_row_and_field(column, value):
    with pytest.raises(ConfigError, match=f"row 7, {column}: found {value:g}, expected a finite number above 0"):
        fit(*changed(column, 7, value))


@pytest.mark.parametrize(("law", "free"), [(scaling.CHINCHILLA, 5), (scaling.SHANNON, 8), (scaling.SHANNON_SIMPLE, 7)])
def test_fewer_points_than_parameters(law, free):
    few = [v[3 : 3 + free - 1] for v in points()]
    with pytest.raises(ConfigError, match=f"y: found {free - 1} points, expected at least {free}, .* {law.name}"):
        fit(*few, law=law)


def test_points_of_weight_zero_do_not_count():
    weights = np.zeros(24)
    weights[:4] = 1
    with pytest.raises(ConfigError, match="y: found 4 points"):
        fit(*points(), weights=weights)
    with pytest.raises(ConfigError, match="row 2, weights: found -1"):
        fit(*points(), weights=np.where(np.arange(24) == 2, -1.0, 1.0))


@pytest.mark.parametrize("column", ["n", "d"])
def test_one_size_or_one_token_count_only(column):
    n, d, y = points()
    data = (np.full_like(n, 1e9), d, y) if column == "n" else (n, np.full_like(d, 1e10), y + np.arange(24) * 1e-3)
    with pytest.raises(ConfigError, match=f"{column}: found .* in all 24 points, expected at least two"):
        fit(*data)


def test_no_points_at_all():
    with pytest.raises(ConfigError, match="found 0 points"):
        fit(*(v[:0] for v in points()))


@pytest.mark.parametrize(("column", "value"), [("n", 1e22), ("d", 3e-2), ("y", 1e13)])
def test_ranges_beyond_a_billion_suggest_mixed_units(column, value):
    with pytest.raises(ConfigError, match=f"^{column}: found .*row 7.*expected one unit"):
        fit(*changed(column, 7, value))


@pytest.mark.parametrize("column", ["n", "d"])
def test_one_column_in_billions_is_suspected(column):
    n, d, y = points()
    data = (n / 1e9, d, y) if column == "n" else (n, d / 1e9, y)
    with pytest.raises(ConfigError, match=f"^{column}: found .* is {column} given in billions"):
        fit(*data)


def test_everything_in_billions_is_suspected():
    n, d, y = points()
    with pytest.raises(ConfigError, match=r"^n: found 0\.1 to 3, below 3000 parameters; .* is n given in billions"):
        fit(n / 1e9, d / 1e9, y)
    with pytest.raises(ConfigError, match="is n given in billions or millions"):
        fit(n / 1e6, d / 1e6, y)


@pytest.mark.parametrize(("column", "value"), [("d", 30.0), ("n", 0.7), ("d", 1e5), ("n", 900.0)])
def test_a_single_row_in_billions_or_millions_is_suspected(column, value):
    with pytest.raises(ConfigError, match=f"^{column}: found {value:g} .row 7. .*expected one unit"):
        fit(*changed(column, 7, value))


def test_naming_the_units_settles_it(x64):
    n, d, y = points()
    result = fit(n, d / 1e9, y, d0=1.0, starts=8, keep=8)
    np.testing.assert_allclose(scaling.predict(result, n, d / 1e9), y, rtol=1e-6)


def test_a_repeated_row_is_named():
    n, d, y = points()
    order = np.r_[0:24, 5]
    with pytest.raises(ConfigError, match="row 24: found the n, d, y of row 5 again"):
        fit(n[order], d[order], y[order])


def test_the_same_sizes_with_another_loss_are_a_second_seed(x64):
    n, d, y = points()
    n[6], d[6], y[6] = n[5], d[5], y[5] + 0.01
    assert fit(n, d, y, starts=8, keep=8).converged


def test_shapes_must_agree():
    n, d, y = points()
    with pytest.raises(ConfigError, match="d: found shape"):
        fit(n, d[:-1], y)
    with pytest.raises(ConfigError, match="weights: found shape"):
        fit(n, d, y, weights=np.ones(3))


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"objective": "mae"}, "objective"),
        ({"starts": 0}, "starts"),
        ({"steps": 0}, "steps"),
        ({"keep": 0}, "keep"),
        ({"huber": 0.0}, "huber"),
        ({"gauge": "a", "law": scaling.SHANNON}, "gauge"),
    ],
)
def test_options_out_of_range(options, field):
    with pytest.raises(ConfigError, match=field):
        fit(*points(), **options)


def test_losses_that_are_not_finite_can_be_masked(x64):
    n, d, y = changed("y", 7, np.nan)
    result = fit(n, d, y, mask_nonfinite=True, starts=8, keep=8)
    assert result.converged
    assert np.isfinite(result.sse)
