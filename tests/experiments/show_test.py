"""How numbers and tables look."""

import io
import math

import pytest
from rich.console import Console

from experiments import core, jsonio, show


def printed(table, width=100):
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        ([0.7431, 0.71, 1.03], ["0.743", "0.710", "1.030"]),
        ([12.345, 3.2], ["12.3", "3.2"]),
        ([864, 16], ["864", "16"]),
        ([1234567, 12], ["1,234,567", "12"]),
        ([1e-9, 0.5], ["1e-09", "0.5"]),
        ([2.5e9, 1.0], ["2.5e+09", "1"]),
        ([0.0, 0.0], ["0.00", "0.00"]),
        (["nan", 0.25], ["nan", "0.250"]),
        ([-0.5, math.inf], ["-0.500", "inf"]),
    ],
)
def test_a_column_shares_its_decimals(column, expected):
    formats = show.formatter(column)
    assert [formats(v) for v in column] == expected


def test_cells():
    rows = [
        {"method": "a", "score": {"value": 0.5, "lo": 0.25, "hi": 0.75}, "ok": True},
        {"method": "b", "score": None, "n": 3},
    ]
    columns, body, numeric = show.cells(rows)
    assert columns == ["method", "score", "ok", "n"]
    assert body == [["a", "0.500 [0.250, 0.750]", "yes", "-"], ["b", "-", "-", "3"]]
    assert numeric == [False, True, False, True]


def test_claims_table_gives_verdict_measured_interval_and_threshold():
    claim = {"statement": "[b] wins", "measured": 0.5, "interval": [0.25, 0.75], "comparison": ">=", "threshold": 0.3}
    shown = printed(show.claims_table([claim | {"holds": "undecided"}, claim | {"interval": None, "holds": "yes"}]))
    first, second = (line.split() for line in shown.splitlines() if "wins" in line)
    assert first == ["[b]", "wins", "0.500", "[0.250,", "0.750]", ">=", "0.3", "undecided"]
    assert second == ["[b]", "wins", "0.500", "-", ">=", "0.3", "holds"]


def test_an_infinite_end_is_stored_and_shown(tmp_path):
    claim = core.Claim("late", core.Estimate(0.25, 0.125, math.inf), "<=", 0.5)
    row = {"arm": "late", "share": core.Estimate(0.25, 0.125, math.inf)}
    jsonio.write_json(tmp_path / "x.json", {"rows": [row], "claims": [jsonio.encode(claim) | {"holds": claim.holds}]})
    stored = jsonio.read_json(tmp_path / "x.json")
    assert show.cells(stored["rows"])[1] == [["late", "0.250 [0.125, inf]"]]
    assert show.claim_cells(stored["claims"][0]) == ("0.250", "[0.125, inf]", "<= 0.5", "undecided")


def test_long_tables_are_cut():
    shown = printed(show.rows_table([{"i": i} for i in range(100)]))
    assert "60 more rows in result.json" in shown
    assert len(shown.splitlines()) < 50


def test_no_rows_and_markup_in_cells():
    assert printed(show.rows_table([{"x": "[red]no markup[/red]"}])).count("[red]no markup[/red]") == 1


@pytest.mark.parametrize(
    ("seconds", "expected"), [(4.21, "4.2 s"), (59.9, "59.9 s"), (185, "3 min 05 s"), (7800, "2 h 10 min")]
)
def test_duration(seconds, expected):
    assert show.duration(seconds) == expected
