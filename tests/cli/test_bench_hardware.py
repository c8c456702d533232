from __future__ import annotations

import json
from pathlib import Path

import pytest

from zero_infinity.cli import bench_hardware
from zero_infinity.cli.main import main
from zero_infinity.planner import hardware

FIGURES = bench_hardware.HardwareFigures(1e11, 2e10, 3e10, 4e9, 3e9, 1e-4, 1e-10, 2e-4, 8 * 2**30, 10**11, 4)


def test_this_machine_becomes_a_profile_that_plan_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = tmp_path / "mine.toml"
    assert main(["bench", "hardware", str(tmp_path), "--size", "32MiB", "-o", str(profile)]) == 0
    mine = hardware.load(str(profile))
    assert mine.device is None
    assert mine.flops > 1e8
    assert mine.storage[0].read > 1e6
    assert all(source.startswith(("measured", "definition")) for source in mine.sources.values())
    assert list(tmp_path.iterdir()) == [profile]
    capsys.readouterr()
    arguments = ["--hardware", str(profile), "--layers", "2", "--hidden", "128", "--heads", "2", "--json"]
    assert main(["plan", *arguments]) == 0
    assert json.loads(capsys.readouterr().out)["step"]["seconds"] > 0


def test_the_profile_s_text() -> None:
    mine = hardware.parse(bench_hardware.profile_text(FIGURES, 'my "old" box', "2026-01-02"), "test")
    assert mine.name == "my old box"
    assert (mine.flops, mine.update_rate, mine.host.capacity) == (1e11, 2e10, 8 * 2**30)
    drive = mine.storage[0]
    assert (drive.capacity, drive.read, drive.write, drive.latency) == (10**11, 4e9, 3e9, 1e-4)
    assert (drive.cpu_seconds_per_byte, mine.block_cpu_seconds) == (1e-10, 2e-4)


def test_printed_as_json_or_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench_hardware, "take_figures", lambda directories, num_bytes: FIGURES)
    assert main(["bench", "hardware", ".", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_cores"] == 4
    assert main(["bench", "hardware", "."]) == 0
    assert hardware.parse(capsys.readouterr().out, "printed").flops == 1e11


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-o", "mine.json"], "ends in .toml"),
        (["--size", "1MiB"], "too small"),
        (["-o", "no/where.toml"], "cannot be written"),
    ],
)
def test_mistakes(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_hardware, "take_figures", lambda directories, num_bytes: FIGURES)
    assert main(["bench", "hardware", ".", *arguments]) == 2
    assert message in capsys.readouterr().err
