"""`python -m benchmarks checkpoint`, on few bytes: what it measures means nothing, that it measures does."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from benchmarks import checkpoint, drive_alone
from benchmarks.__main__ import main


def test_saving_and_loading_beside_the_drive(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drive_alone, "WIDTH", 256)
    monkeypatch.setattr(checkpoint, "_NUM_ROUNDS", 1)
    monkeypatch.setattr(drive_alone, "SCRATCH_BYTES", 16 << 20)
    assert main(["checkpoint", str(tmp_path), "--size", "4MiB", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["num_bytes"] == 5 * 256 * 256 * 12
    assert [(row["home"], row["act"]) for row in result["rows"]] == [
        ("RAM", "save"),
        ("RAM", "load"),
        ("NVMe", "save"),
        ("NVMe", "load"),
    ]
    assert all(row["ratio"] == row["checkpoint"] / row["drive"] > 0 for row in result["rows"])
    assert os.listdir(tmp_path) == []
    assert main(["checkpoint", str(tmp_path), "--size", "1KiB"]) == 2
    assert "is too small to measure" in capsys.readouterr().err
