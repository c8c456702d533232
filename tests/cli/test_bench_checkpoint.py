"""`zero-infinity bench checkpoint`, on few bytes: what it measures means nothing, that it measures does."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from zero_infinity.cli import bench_beside_drive, bench_checkpoint
from zero_infinity.cli.main import main


def test_saving_and_loading_beside_the_drive(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_beside_drive, "WIDTH", 256)
    monkeypatch.setattr(bench_checkpoint, "_NUM_ROUNDS", 1)
    monkeypatch.setattr(bench_beside_drive, "SCRATCH_BYTES", 16 << 20)
    assert main(["bench", "checkpoint", str(tmp_path), "--size", "4MiB", "--json"]) == 0
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
    assert main(["bench", "checkpoint", str(tmp_path), "--size", "1KiB"]) == 2
    assert "is too small to measure" in capsys.readouterr().err
