from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.plan import command
from benchmarks.plan.rank_run import PlanConfiguration
from zero_infinity.models.presets import Shape

TINY = Shape(layers=4, hidden=192, heads=4, seq=32)  # 21 MiB of states


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    configurations = (
        PlanConfiguration("tiny, RAM", TINY, 1, None, steps_a_round=1),
        PlanConfiguration("tiny, all fits", TINY, 1, 2.0, steps_a_round=1),
        PlanConfiguration("tiny, 1/2", TINY, 1, 1 / 2, steps_a_round=1),
        PlanConfiguration("tiny, drive", TINY, 1, 1 / 4, drive_rate=2e8, steps_a_round=1),
        PlanConfiguration("tiny, device", TINY, 1, None, device_rate=5e8, steps_a_round=1),
        PlanConfiguration("tiny, ranks", TINY, 1, 1 / 2, num_ranks=2, steps_a_round=1),
    )
    monkeypatch.setattr(command, "CONFIGURATIONS", configurations)
    monkeypatch.setattr(command, "_DRIVE_BYTES", 32 << 20)


@pytest.mark.long
def test_bytes_are_exact_and_held_is_close(tiny: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(tmp_path), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert len(result["comparisons"]) == 6
    for comparison in result["comparisons"]:
        assert comparison["bytes_are_exact"], comparison
        assert abs(comparison["held_error"]) < 0.03, comparison
        assert comparison["predicted"]["seconds"] > 0
    assert result["comparisons"][2]["measured"]["read"] > 0
    assert result["comparisons"][4]["measured"]["uploaded"] > 0
    assert result["comparisons"][5]["measured"]["sent"] > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_table(tiny: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["plan", str(tmp_path), "--only", "tiny, 1/2"]) == 0
    assert "bytes exact in 1 of 1" in capsys.readouterr().out


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(tmp_path), "--only", "elephant"]) == 2
    assert "wide, 1/2" in capsys.readouterr().err
    assert main(["plan", str(tmp_path / "no")]) == 2
    assert "is not a directory" in capsys.readouterr().err
