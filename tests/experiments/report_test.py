"""The HTML report."""

import base64
import json
import re
from html.parser import HTMLParser

import pytest

from experiments import report
from experiments.curves import read_metrics, svg_curves
from jaxmeth.types import ConfigError


class Page(HTMLParser):
    """Text, attributes and balance of a page."""

    optional = frozenset({"meta", "img", "p", "dt", "dd", "td", "th", "tr", "line", "polyline", "i"})

    def __init__(self, html):
        super().__init__()
        self.text, self.attributes, self.open = [], [], []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.attributes += [(tag, *a) for a in attributes]
        if tag not in self.optional:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.optional:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture
def results(command, tmp_path):
    """Three finished runs."""
    out = tmp_path / "results"
    for argv in (["--preset", "smoke"], ["--items", "30"], ["--preset", "smoke", "--seed", "1"]):
        assert command("run", "toy", "--out", out, *argv)[0] == 0
    return out


def test_the_page_holds_everything_and_fetches_nothing(command, results):
    code, out, _ = command("report", "--out", results)
    assert code == 0
    assert f"report: {results / 'report.html'}" in out
    html = (results / "report.html").read_text()
    page = Page(html)
    assert not page.open
    text = " ".join(" ".join(page.text).split())
    for expected in (
        "3 finished runs",
        "1 claim holds",
        "1 claim does not hold",
        "errors differ by <twenty> times",
        "mean of nine",
        "made data: normal noise",
        "configuration",
        "seed=1",
    ):
        assert expected in text
    pictures = [value for tag, name, value in page.attributes if (tag, name) == ("img", "src")]
    stored = [p.read_bytes() for p in results.glob("toy/*/figures/errors.png")]
    assert len(pictures) == 3
    decoded = [base64.b64decode(p.removeprefix("data:image/png;base64,")) for p in pictures]
    assert sorted(decoded) == sorted(stored)
    links = [
        v for _, name, v in page.attributes if name in ("src", "href") and not v.startswith(("data:image/png", "#"))
    ]
    assert links == []
    assert not re.search(r"https?://|@import|url\(", html)
    anchors = {v for _, name, v in page.attributes if name == "id"}
    assert {v[1:] for _, name, v in page.attributes if name == "href"} <= anchors
    assert "<polyline" in html


def test_the_largest_preset_speaks_and_every_run_has_a_square(results):
    lines = report.ledger(report.read_runs(results))
    assert [line["claim"]["statement"] for line in lines] == ["the mean is better", "errors differ by <twenty> times"]
    for line in lines:
        assert line["run"].record["preset"] == "laptop"
        assert len(line["history"]) == 3
    assert {verdict for _, verdict in lines[1]["history"]} == {"no"}


def test_the_latest_of_equal_presets_speaks():
    def run(preset, started):
        return report.Run(None, {"preset": preset, "started": started})

    runs = [run("smoke", "3"), run("laptop", "1"), run("laptop", "2"), run("own", "4")]
    assert report.leading(runs) is runs[2]


def test_runs_without_a_result_are_shown(results, tmp_path):
    folders = sorted((results / "toy").iterdir())
    (folders[0] / "result.json").unlink()
    (folders[1] / "result.json").write_text('{"tables": {}, "claims"')
    (folders[2] / "result.json").write_text("{}")
    html = report.build(results).read_text()
    assert "unfinished (" in html
    assert f"--config {folders[0] / 'config.json'}" in html
    assert "damaged result.json (" in html
    assert "damaged result.json (no tables)" in html
    assert "No finished run states a claim." in html
    assert not Page(html).open


def test_hostile_text_is_escaped(results):
    for file in results.glob("toy/*/result.json"):
        record = json.loads(file.read_text())
        record["notes"] = ["<script>alert(1)</script>"]
        record["claims"][0]["statement"] = "'><img src=x onerror=alert(1)>"
        record["tables"] = {"<b>": [{"<i>": "</table>"}]}
        record["config"]["mode"] = "</style>"
        record["figures"] = ["figures/absent.png"]
        file.write_text(json.dumps(record))
    html = report.build(results).read_text()
    page = Page(html)
    assert html.count("<script>") == 1
    assert not [a for a in page.attributes if a[0] == "img"]
    assert "</table>" in page.text
    assert any("absent.png is gone" in text for text in page.text)


def test_a_folder_without_runs_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="found no runs"):
        report.build(tmp_path)
    with pytest.raises(ConfigError, match="found no folder"):
        report.build(tmp_path / "absent")


def test_curves(tmp_path):
    path = tmp_path / "metrics.csv"
    assert read_metrics(path) == {}
    path.write_text("step,part,loss,word\n0,a,1,x\n1,a,nan,y\n2,a,0.5,z\n0,b,2,\n1,b,")
    metrics = read_metrics(path)
    assert metrics == {"loss": {"a": [(0, 1), (2, 0.5)], "b": [(0, 2)]}}
    svg = svg_curves(metrics)
    assert svg.count("<polyline") == 2
    first = re.search(r"points='([^']*)'", svg).group(1)
    # loss 1 of 0.5..2 at step 0 of 0..2: left edge, two thirds down; loss 0.5 at step 2: lower right corner
    assert first.split()[0] == "52.0,108.0"
    assert first.split()[-1] == "352.0,158.0"
    assert svg_curves({"loss": {"": [(0, 1)]}}) == ""
    assert "nan" not in svg_curves({"flat": {"": [(0, 1), (1, 1)]}})
    assert len(svg_curves({"long": {"": [(i, i) for i in range(100_000)]}})) < 20_000
