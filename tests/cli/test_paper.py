from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from zero_infinity.cli.main import main


def test_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["paper", "zero-table1"]) == 0
    output = capsys.readouterr().out
    assert "54 of 54 published numbers are ours to the digit" in output
    assert "printed cut off, not rounded (exactly 513.5)" in output


def test_deviations_are_shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "240")
    assert main(["paper", "infinity-figure6a"]) == 0
    output = capsys.readouterr().out
    assert "the largest deviation is 50.1%" in output
    assert "almost 100" in output


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["paper", "infinity-table4", "--json"]) == 0
    (exhibit,) = json.loads(capsys.readouterr().out)
    cell = next(c for c in exhibit["cells"] if c["keys"] == ["efficiency", "5T"])
    assert cell["published"] == 0.63
    assert abs(cell["deviation"]) < 0.02


def test_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "folder"
    assert main(["paper", "infinity-figure2a", "--out", str(out)]) == 0
    rows = list(csv.reader((out / "infinity-figure2a.csv").read_text().splitlines()))
    assert rows[0][:2] == ["quantity", "model"]
    assert len(rows) == 31
    index = (out / "index.html").read_text()
    assert "infinity-figure2a.csv" in index
    assert "the printed cell is not 16 x hidden^2" in index
    pytest.importorskip("matplotlib")
    assert (out / "infinity-figure2a.svg").stat().st_size > 1000
    assert (out / "infinity-figure2a.png").read_bytes().startswith(b"\x89PNG")
    assert 'src="infinity-figure2a.svg"' in index


def test_bars(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    tables = ("zero-residual", "infinity-table4", "bandwidth-required", "bandwidth-sufficient")
    for name in ("zero-figure1", "infinity-figure6a", *tables):
        assert main(["paper", name, "--out", str(tmp_path)]) == 0
        assert (tmp_path / f"{name}.svg").stat().st_size > 1000


def test_unknown_name_suggests(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["paper", "infinity-figure2"]) == 2
    assert "did you mean 'infinity-figure2" in capsys.readouterr().err


def test_a_file_in_the_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["paper", "zero-figure1", "--out", str(tmp_path / "file")]) == 2
    assert "--out" in capsys.readouterr().err
