"""`python -m benchmarks clipping`, run for real on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import main

TINY = "--layers=1 --hidden=64 --batches=1x16 --steps=2 --warmup=1 --budget=2 --timeout=240".split()  # noqa: SIM905


@pytest.mark.long
def test_both_contenders_take_their_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["clipping", *TINY, f"--nvme={tmp_path}", f"--out={tmp_path / 'out'}", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads((tmp_path / "out" / "clipping.json").read_text())
    base, clipped = found["rows"]
    assert (base["name"], clipped["name"]) == ("not clipped", "clipped")
    assert base["ratio"] == base["best"] == 1.0
    assert clipped["seconds"] > 0
