"""The benchmark `kills`: what it checks after each kill, and a few real ones."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from support.patience import SECONDS

from benchmarks.__main__ import main
from benchmarks.kills import command
from benchmarks.kills.campaign import Campaign, Figures, Setting
from benchmarks.kills.command import _is_good, table


@pytest.mark.parametrize(
    "settings", [command.SETTINGS[1:3], pytest.param(command.SETTINGS, marks=pytest.mark.long)], ids=len
)
def test_a_few_kills(
    settings: list[Setting], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "SETTINGS", settings)
    monkeypatch.setattr(command, "LIMIT_SECONDS", SECONDS)  # how busy the machine is must not matter here
    count = len(settings)
    assert main(["kills", str(tmp_path / "kills"), "--kills", str(count), "--steps", "3", "--jobs", "2"]) == 0
    rows = re.findall(r"^\| (\d rank.*)$", capsys.readouterr().out, re.MULTILINE)
    assert [row.split(" | ")[1] for row in rows] == ["1"] * count
    assert all(row.endswith("| nothing |") for row in rows)


def test_a_survivor_that_lives_on_or_names_nobody_fails_the_run() -> None:
    setting = Setting(2, background=False)
    assert _is_good(Figures(setting, 1, 0, [3.0]))
    assert not _is_good(Figures(setting, 1, 0, [23.0]))
    assert not _is_good(Figures(setting, 1, 0, [3.0], num_unnamed=1))
    left = Figures(setting, 1, 0, [3.0], left=["swap.7"])
    assert not _is_good(left)
    assert "| 3.0 s | 3.0 s | 3.0 s | 0 | swap.7 |" in table([left])


def test_what_is_left_behind_is_found(tmp_path: Path) -> None:
    campaign = Campaign(tmp_path / "it", Setting(1, background=False), 1, 0, tmp_path / "text")
    assert list(campaign._left_behind([0])) == []
    (tmp_path / "it" / "swap" / "forgotten").touch()
    assert list(campaign._left_behind([os.getpid()])) == ["forgotten", f"process {os.getpid()}"]
