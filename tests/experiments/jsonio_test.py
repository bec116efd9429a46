"""Configurations to JSON and back, hashes, atomic files."""

import json
import math
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments import jsonio
from experiments.core import Estimate
from jaxmeth.types import ConfigError


class Colour(Enum):
    RED = 1
    BLUE = 2


@dataclass(frozen=True)
class Inner:
    depth: int = 1


@dataclass(frozen=True, kw_only=True)
class Everything:
    number: float = 1.0
    count: int = 1
    flag: bool = False
    text: str = ""
    path: Path | None = None
    pick: Literal["a", "b", 3] = "a"
    colour: Colour = Colour.RED
    many: tuple[float, ...] = ()
    pair: tuple[int, str] = (1, "x")
    names: list[str] | None = None
    table: dict[str, int] | None = None
    inner: Inner = Inner()
    either: int | str = 1
    noted: Annotated[int, "note"] = 1
    whatever: Any = None


configs = st.builds(
    Everything,
    number=st.floats(allow_nan=False),
    count=st.integers(),
    flag=st.booleans(),
    text=st.text(),
    path=st.none() | st.sampled_from([Path("a/b"), Path("/c")]),
    pick=st.sampled_from(["a", "b", 3]),
    colour=st.sampled_from(Colour),
    many=st.lists(st.floats(allow_nan=False)).map(tuple),
    pair=st.tuples(st.integers(), st.text()),
    names=st.none() | st.lists(st.text()),
    table=st.none() | st.dictionaries(st.text(), st.integers()),
    inner=st.builds(Inner, st.integers()),
    either=st.integers() | st.text(),
    noted=st.integers(),
    whatever=st.none() | st.booleans() | st.text(),
)


@given(configs)
def test_a_config_survives_json(config):
    stored = json.loads(json.dumps(jsonio.encode(config), allow_nan=False))
    assert jsonio.decode_config(Everything, stored) == config


def test_numbers_that_json_lacks():
    assert jsonio.encode({"a": math.nan, "b": [math.inf, np.float32(-math.inf)]}) == {"a": "nan", "b": ["inf", "-inf"]}
    assert math.isnan(jsonio.decode_config(Everything, {"number": "nan"}).number)
    assert jsonio.encode(np.arange(4).reshape(2, 2)) == [[0, 1], [2, 3]]
    assert jsonio.encode(Estimate(np.float64(1), 0, 2)) == {"value": 1.0, "lo": 0, "hi": 2}
    assert jsonio.encode({3, 1}) == [1, 3]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"count": "1"}, 'count: found "1", expected int'),
        ({"count": True}, "count: found true, expected int"),
        ({"count": 1.5}, "count: found 1.5, expected int"),
        ({"flag": 1}, "flag: found 1, expected bool"),
        ({"pick": "c"}, 'pick: found "c"'),
        ({"many": [1, "x"]}, r'many\[1\]: found "x", expected float'),
        ({"pair": [1]}, r"pair: found \[1\]"),
        ({"inner": {"deep": 1}}, r"inner\.deep: found an unknown field, expected one of depth"),
        ({"inner": {"depth": "x"}}, r'inner\.depth: found "x", expected int'),
        ({"colour": "GREEN"}, 'colour: found "GREEN", expected Colour'),
        ({"path": 3}, "path: found 3, expected pathlib.Path | None"),
        ({"numbr": 1}, "numbr: found an unknown field, expected one of number, count"),
    ],
)
def test_wrong_values_name_the_field(values, message):
    with pytest.raises(ConfigError, match=message):
        jsonio.decode_config(Everything, values)


def test_fields_left_out_come_from_the_base():
    base = Everything(count=7, text="x")
    assert jsonio.decode_config(Everything, {"text": "y"}, base=base) == replace(base, text="y")


def test_the_hash_covers_experiment_fields_and_data():
    one = jsonio.config_hash("a", Everything(), None)
    assert one == jsonio.config_hash("a", Everything(), None)
    others = [
        jsonio.config_hash("b", Everything(), None),
        jsonio.config_hash("a", Everything(count=2), None),
        jsonio.config_hash("a", Everything(inner=Inner(2)), None),
        jsonio.config_hash("a", Everything(), Path("data")),
    ]
    assert len({one, *others}) == 5
    assert len(one) == 8


def test_reading_what_is_no_object(tmp_path):
    path = tmp_path / "x.json"
    for text, message in (("{", "found no JSON"), ("[1]", "found a JSON list")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            jsonio.read_json(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        jsonio.read_json(tmp_path / "absent.json")
