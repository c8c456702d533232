"""The benchmark of generating: three copies of a model take turns and write the same tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import main


def test_bytes_are_counted_and_tokens_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--layers", "24", "--hidden", "128", "--tokens", "4", "--rounds", "1", "--out", str(tmp_path / "out")]
    assert main(["generate", str(tmp_path), *options]) == 0
    told = json.loads((tmp_path / "out" / "generate.json").read_text())
    ours, *theirs = told["rows"]
    assert 0.5 <= ours["bytes_per_token"] / told["model_bytes"] <= 0.58
    assert len(theirs) == 2
    assert all(row["same_tokens"] and row["tokens_per_second"] > 0 for row in told["rows"])
    assert capsys.readouterr().out.count("| yes |") == 3
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
