from __future__ import annotations

import json

import pytest

from benchmarks.__main__ import main


def test_every_point_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["published", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == 11
    assert all(row["planned"] > 0 and row["ratio"] == pytest.approx(row["planned"] / row["measured"]) for row in rows)
    copied = next(row for row in rows if "bytes copied" in row["label"])
    assert copied["ratio"] == pytest.approx(1, abs=0.1)
