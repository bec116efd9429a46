"""The README's code runs as it stands there."""

import re
from pathlib import Path

import pytest

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize("code", BLOCKS, ids=["scores of an answer", "policy training"])
def test_block(code, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    found = {}
    exec(compile(code, "README.md", "exec"), found)
    if "answer" in found:
        assert "Paris" in capsys.readouterr().out
    else:
        rows = (tmp_path / "runs" / "repeat" / "metrics.csv").read_text().splitlines()
        column = rows[0].split(",").index("reward")
        assert float(rows[-1].split(",")[column]) > 0.5 > float(rows[1].split(",")[column])
        assert found["state"].step == 100
