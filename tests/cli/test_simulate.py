from __future__ import annotations

import json
from pathlib import Path

import pytest

from zero_infinity import trace as traces
from zero_infinity.cli.main import main

SMALL = ["--model", "gpt2-124m", "--hardware", "laptop", "--memory", "512MiB"]


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *SMALL]) == 0
    output = capsys.readouterr().out
    assert all(text in output for text in ("NVMe", "exposed wait", "tokens/s", "held: RAM", "simulated in"))


def test_json_and_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *SMALL, "--json", "--trace", str(tmp_path / "t.json")]) == 0
    result = json.loads(capsys.readouterr().out)
    trace = traces.read(tmp_path / "t.json")
    spans = list(trace.spans)
    moved = sum(span.num_bytes for span in spans if span.lane == "NVMe")
    assert moved == 2 * (result["read_bytes"] + result["written_bytes"]) > 0  # two steps
    assert trace.budgets == {"RAM": 512 * 2**20}
    assert max(sample.num_bytes for sample in trace.samples) <= 512 * 2**20


def test_worst_case_is_slower(capsys: pytest.CaptureFixture[str]) -> None:
    seconds = []
    for extra in ([], ["--after-backward", "--no-overlap"]):
        assert main(["simulate", "--model", "gpt2-1.5b", "--hardware", "gh200", "--nodes", "2", *extra, "--json"]) == 0
        seconds.append(json.loads(capsys.readouterr().out)["seconds"])
    assert seconds[0] < seconds[1]


def test_no_place_for_the_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *SMALL, "--trace", str(tmp_path / "no" / "t.json")]) == 2
    assert "does not exist" in capsys.readouterr().err
    assert main(["simulate", *SMALL, "--trace", str(tmp_path)]) == 2
    assert "cannot be written" in capsys.readouterr().err
