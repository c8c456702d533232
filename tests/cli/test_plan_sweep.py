from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from zero_infinity.cli.main import main

MODEL = ("--layers", "4", "--hidden", "1024", "--heads", "16", "--seq", "256", "--memory", "512MiB")


def test_every_combination_is_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, picture = tmp_path / "sweep.csv", tmp_path / "sweep.png"
    arguments = ["plan", *MODEL, "--sweep", "batch=1,4", "--sweep", "hardware=laptop,rtx4090"]
    pytest.importorskip("matplotlib")
    assert main([*arguments, "--csv", str(table), "--picture", str(picture), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["batch"], row["hardware"]) for row in rows] == [
        (batch, hardware) for batch in (1, 4) for hardware in ("laptop", "rtx4090")
    ]
    assert main(["plan", *MODEL, "--batch", "4", "--hardware", "laptop", "--json"]) == 0
    alone = json.loads(capsys.readouterr().out)["step"]
    assert rows[2]["seconds"] == alone["seconds"]
    with table.open(newline="") as file:
        written = list(csv.DictReader(file))
    assert [float(row["seconds"]) for row in written] == [row["seconds"] for row in rows]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_what_does_not_fit_is_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", *MODEL, "--hardware", "rtx4090", "--sweep", "memory=1KiB,512MiB"]
    assert main([*arguments, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows[0]["seconds"] is None
    assert "1.0 KiB" in rows[0]["problem"] or "memory" in rows[0]["problem"]
    assert rows[1]["problem"] is None
    assert main(arguments) == 0
    assert "does not fit" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--sweep", "colour=red"], "accepted: OPTION=V,V"),
        (["--sweep", "batch=one"], "not numbers"),
        (["--csv", "a.csv"], "--sweep batch=1,2,4 beside it"),
        (["--sweep", "batch=" + ",".join("1" * 200), "--sweep", "seq=" + ",".join("1" * 200)], "at most 10,000"),
    ],
)
def test_mistakes(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *MODEL, "--hardware", "laptop", *arguments]) == 2
    assert says in capsys.readouterr().err


def test_a_machine_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *MODEL]) == 2
    assert "--hardware rtx4090" in capsys.readouterr().err
