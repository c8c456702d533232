"""`python -m benchmarks finetune`, without its processes: what becomes of their results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main
from benchmarks.control_group import control_group
from benchmarks.finetune import command
from benchmarks.finetune.command import Row, Trial
from zero_infinity.errors import ConfigError

DONE = {"num_parameters": 100, "engine_peak": 1, "resident_peak": 2, "bytes_read": 3, "bytes_written": 4}


def trial(*losses: float) -> Trial:
    return Trial({**DONE, "losses": list(losses), "seconds": [1.0]}, 5, None)


def test_a_resumed_run_logs_what_the_first_one_did() -> None:
    assert Row("lora", 1, trial(3.0, 2.0, 1.0), trial(2.0, 1.0)).goes_on
    assert not Row("lora", 1, trial(3.0, 2.0, 1.0), trial(2.0, 1.5)).goes_on
    assert not Row("lora", 1, trial(3.0, 2.0, 1.0), trial()).goes_on
    assert not Row("lora", 1, trial(3.0), Trial(None, None, "killed")).goes_on
    assert Row("generate", 1, trial(), None).goes_on


def test_every_method_is_tried_and_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs: list[tuple[dict[str, Any], int | None]] = []

    def start(job: dict[str, Any], limit: int | None, _: float) -> Trial:
        jobs.append((job, limit))
        return trial(2.0, 1.0)

    monkeypatch.setattr(command, "_start", start)
    assert main(["finetune", str(tmp_path), "--limit", "1GiB", "--out", str(tmp_path / "out")]) == 0
    assert [(job["method"], job.get("resumes", False)) for job, _ in jobs] == [
        ("make", False),
        *((method, resumes) for method in ("lora", "qlora", "full") for resumes in (False, True)),
        ("generate", False),
    ]
    assert [limit for _, limit in jobs] == [None, *[1 << 30] * 7]
    assert jobs[-1][0]["memory"] == 100  # half of the model in 16 bits
    result = json.loads((tmp_path / "out" / "finetune.json").read_text())
    assert [row["goes_on"] for row in result["rows"]] == [True] * 4
    assert "the same losses" in capsys.readouterr().out


@pytest.mark.long
def test_a_tiny_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        with control_group(64 << 20):
            pass
    except ConfigError as error:
        pytest.skip(str(error))
    assert main(["finetune", str(tmp_path), "--shape", "tiny", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["method"] for row in rows] == ["lora", "qlora", "full", "generate"]
