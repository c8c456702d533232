"""`python -m benchmarks update`, on few bytes: what it measures means nothing, what it counts does."""

from __future__ import annotations

import json
import os
import statistics
from pathlib import Path

import pytest

from benchmarks import drive_alone, update
from benchmarks.__main__ import main


def test_a_step_beside_the_drive(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drive_alone, "WIDTH", 512)
    monkeypatch.setattr(drive_alone, "SCRATCH_BYTES", 16 << 20)
    monkeypatch.setattr(update, "_LEAST_MEMORY", 6 << 20)
    monkeypatch.setattr(update, "_NUM_ROUNDS", 2)
    assert main(["update", str(tmp_path), "--size", "36MiB", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    states = 12 * 512 * 512 * 12
    assert result["num_bytes"] == states
    assert len(result["rounds"]) == 2
    assert result["ratio"] == statistics.median(each["ratio"] for each in result["rounds"]) > 0
    for each in result["rounds"]:
        # Gradients are read beside the states and not written; what was in memory before need not be read.
        assert states * 2 / 3 < each["bytes_read"] <= states * 4 / 3
        assert states * 2 / 3 < each["bytes_written"] <= states * 4 / 3
    assert os.listdir(tmp_path) == []
    assert main(["update", str(tmp_path), "--size", "1KiB"]) == 2
    assert "is too small to measure" in capsys.readouterr().err
    assert main(["update", str(tmp_path), "--size", "36MiB"]) == 0
    assert "of the drive (median)" in " ".join(capsys.readouterr().out.split())
