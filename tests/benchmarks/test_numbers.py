"""The figures in the documents are those of docs/results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.numbers import command as numbers
from benchmarks.numbers.engine_tables import capacity_sentence, capacity_table

ORIGIN = {
    "command": "zero-infinity bench it",
    "commit": "abc",
    "date": "2026-01-02T03:04",
    "machine": {"cpu": "2 cores", "load": "9"},
}
TRIAL = {
    "layers": 3,
    "num_parameters": 1_400_000_000,
    "losses": [5.5, 5.25],
    "seconds": 12.0,
    "start_seconds": 20.0,
    "peak_bytes": 2**31,
    "error": None,
}
CAPACITY = {
    **ORIGIN,
    "limit": 2**31,
    "hidden": 1024,
    "capacities": [
        {"name": "plain PyTorch", "largest": None, "failed": {**TRIAL, "error": "killed"}},
        {"name": "this library", "largest": TRIAL, "failed": None},
    ],
    "without_a_limit": TRIAL,
}


def test_documents_are_in_step_with_the_results() -> None:
    results = numbers.load(numbers.RESULTS)
    for document in numbers.DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        assert numbers.render(text, results) == text, f"{document.name}: run make numbers"


def test_every_table_has_a_place() -> None:
    text = "".join(document.read_text(encoding="utf-8") for document in numbers.DOCUMENTS)
    assert {name for _, name, _, _ in numbers._REGION.findall(text)} == set(numbers.WRITERS)


def test_a_region_is_replaced_and_names_where_it_comes_from() -> None:
    text = "before\n<!-- figures: headline -->\nold\n<!-- end -->\nafter <!-- figures: growth -->\nkept\n<!-- end -->"
    new = numbers.render(text, {"capacity": CAPACITY})
    assert "old" not in new
    assert "kept" in new
    assert new.startswith("before\n")
    for part in (
        "1.40B",
        "2.0 GiB",
        "16.8 GB",
        "the same losses",
        "`python -m benchmarks it`",
        "abc",
        "2026-01-02",
        "2 cores",
    ):
        assert part in new
    assert numbers.render(new, {"capacity": CAPACITY}) == new


def test_losses_that_differ_are_told() -> None:
    other = {**CAPACITY, "without_a_limit": {**TRIAL, "losses": [5.5, 5.5]}}
    assert "DIFFER" in capacity_sentence(other)
    assert "DIFFERENT" in capacity_table(other)


def test_results_are_kept_small(tmp_path: Path) -> None:
    (tmp_path / "growth.json").write_text(
        json.dumps(
            {
                "command": "bench growth --nvme /home/me/x --axes depth",
                "date": "2026-11-16T20:00+00:00",
                "samples": [1] * 1000,
                "axes": [0.12345678901234567],
            }
        )
    )
    assert numbers.take(tmp_path, tmp_path / "kept") == ["growth"]
    assert json.loads((tmp_path / "kept" / "growth.json").read_text()) == {
        "command": "bench growth --nvme DIR --axes depth",
        "date": "2026-11-16T20:00+00:00",
        "axes": [0.123456789],
    }


def test_older_results_are_not_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new, old = ({"command": "bench growth", "date": f"2026-11-1{day}T20:00+00:00"} for day in (6, 5))
    (tmp_path / "growth.json").write_text(json.dumps(new))
    assert numbers.take(tmp_path, tmp_path / "kept") == ["growth"]
    assert numbers.take(tmp_path, tmp_path / "kept") == ["growth"]
    (tmp_path / "growth.json").write_text(json.dumps(old))
    assert numbers.take(tmp_path, tmp_path / "kept") == []
    assert "growth.json is of 2026-11-15" in capsys.readouterr().err
    assert json.loads((tmp_path / "kept" / "growth.json").read_text()) == new


@pytest.mark.parametrize("file", sorted((numbers.ROOT / "docs" / "results").glob("*.json")), ids=lambda file: file.name)
def test_every_result_says_where_it_comes_from(file: Path) -> None:
    result = json.loads(file.read_text(encoding="utf-8"))
    assert all(result[name] for name in ("command", "commit", "date", "machine"))


def test_a_region_of_two_results_needs_both() -> None:
    peer = {"name": "x", "error": None, "changed_lines": 3}
    seconds = {"wall": {"median": 1.25, "best": 1.0}, "seconds": 1.0, "peak_rss": 2**30, "start_seconds": 1.0}
    entries = [{**peer, "key": key, "figures": {**seconds}} for key in ("plain", "fits", "ds-params", "ds-pipe")]
    entries[3]["figures"] = {**seconds, "wall": {"median": 1.125, "best": 1.0}}
    race = {"layers": 6, "hidden": 64, "batch": 1, "seq": 8}
    peers = {**ORIGIN, "contests": [{"race": race, "num_parameters": 76_000_000, "heats": [entries]}]}
    text = "<!-- figures: comparison -->\nold\n<!-- end -->"
    assert numbers.render(text, {"capacity": CAPACITY}) == text
    new = numbers.render(text, {"capacity": CAPACITY, "peers": peers})
    assert "| plain PyTorch | 1.25, 1.0 GiB | no |  | 3 |" in new
    assert "| DeepSpeed ZeRO-3 | failed | 1.12, 1.0 GiB |  | 3 |" in new  # the faster of its two
    assert "| zero-infinity | 1.25, 1.0 GiB | failed | 1,400M | 3 |" in new
