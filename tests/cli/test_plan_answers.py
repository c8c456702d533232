from __future__ import annotations

import json

import pytest

from zero_infinity.cli.main import main

SMALL = (
    "--layers",
    "4",
    "--hidden",
    "2048",
    "--heads",
    "16",
    "--seq",
    "512",
    "--hardware",
    "rtx4090",
    "--memory",
    "1GiB",
)


def test_recommended_and_what_it_costs(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("plan", *SMALL, "--recommend", "--max-sequences", "8", "--tokens", "1e9", "--price", "2")
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    speeds = [choice["tokens_per_second"] for choice in found["recommended"]]
    assert speeds[0] == max(speeds) > found["step"]["tokens_per_second"]
    assert found["better_machines"]
    assert found["training"]["seconds"] == pytest.approx(1e9 / found["step"]["tokens_per_second"])
    assert found["training"]["money"] == pytest.approx(2 * found["training"]["seconds"] / 3600)
    assert main(list(arguments)) == 0
    printed = capsys.readouterr().out
    assert "settings, the fastest first" in printed
    assert "a second NVMe" in printed
    assert "1,000,000,000 tokens:" in printed


def test_nothing_that_was_not_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *SMALL, "--json"]) == 0
    assert not {"recommended", "better_machines", "training"} & set(json.loads(capsys.readouterr().out))
