"""`zero-infinity bench peers`, run for real on a tiny model, and its parts."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.figures import figures

from zero_infinity.cli.bench_peers import PEERS
from zero_infinity.cli.bench_peers_report import changed_lines
from zero_infinity.cli.main import main

TINY = "--layers=1 --hidden=64 --batches=1x16 --steps=2 --warmup=1 --timeout=60".split()  # noqa: SIM905 - as typed


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # threads that spin for each other cost seconds on a busy machine


def test_an_error_of_a_peer_is_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if find_spec("deepspeed"):
        pytest.skip("DeepSpeed is installed here")
    places = ["--nvme", str(tmp_path), "--out", str(tmp_path / "out")]
    assert main(["bench", "peers", *TINY, "--only", "1/2,ds-cpu", *places]) == 0
    output = capsys.readouterr()
    assert "round 3/3" in output.err
    found = json.loads((tmp_path / "out" / "peers.json").read_text())
    (contest,) = found["contests"]
    ((plain, ours, missing),) = contest["heats"]  # who is compared with whom takes turns with him
    assert {"command", "commit", "date", "machine"} <= found.keys()
    for entry in (plain, ours):
        assert entry["error"] is None
        assert entry["losses"] == plain["losses"]
        measured = entry["figures"]
        assert measured["loss_difference"] == 0
        assert measured["seconds"] > 0
        assert measured["start_seconds"] > 0.1
        assert measured["peak_rss"] > 50 << 20
    assert ours["figures"]["written_bytes"] > 0
    assert missing["figures"] is None
    assert "No module named 'deepspeed'" in missing["error"]
    assert "DeepSpeed, all in RAM: failed" in output.out
    assert os.listdir(tmp_path) == ["out"]
    (row,) = figures._quotients(found).splitlines()[2:]  # of other pairs there is nobody
    assert row == "| this library, NVMe, 1/2 in RAM | DeepSpeed, all in RAM | failed |  |"
    for table in (figures._peers(found), figures._peers_short(found)):
        assert "| plain PyTorch | " in table
        assert "failed" in table
        assert found["date"][:10] in table


@pytest.mark.long
def test_what_comes_with_torch_trains_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "peers", *TINY, "--only", "mapped,fsdp2", "--nvme", str(tmp_path), "--json"]) == 0
    (contest,) = json.loads(capsys.readouterr().out)["contests"]
    assert [len(heat) for heat in contest["heats"]] == [2, 2]
    for plain, entry in contest["heats"]:
        assert entry["error"] is None
        assert entry["losses"] == plain["losses"]
    assert os.listdir(tmp_path) == []


def test_changed_lines_are_those_of_the_scripts() -> None:
    folder = Path(changed_lines.__code__.co_filename).parent / "peers"
    assert all((folder / f"{peer.script}.py").exists() for peer in PEERS.values())
    assert changed_lines("plain") == 0
    assert changed_lines("ours") == 5


def test_each_batch_size_is_a_contest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    places = ["--nvme", str(tmp_path), "--out", str(tmp_path / "out")]
    assert main(["bench", "peers", *TINY, "--batches=2x16,1x8", "--only=fits", *places]) == 0
    found = json.loads((tmp_path / "out" / "peers.json").read_text())
    races = [contest["race"] for contest in found["contests"]]
    assert [(race["batch"], race["seq"]) for race in races] == [(2, 16), (1, 8)]
    (two,), (one,) = (contest["heats"] for contest in found["contests"])
    assert two[0]["losses"] == two[1]["losses"] != one[0]["losses"] == one[1]["losses"]
    assert (tmp_path / "out" / "peers.svg").exists()
    printed = capsys.readouterr().out
    for batch in ("batch 2 x 16", "batch 1 x 8"):
        assert batch in printed
        assert f"| {batch} | " in figures._peers(found)
        assert f"{batch}: time of a step" in figures._peers_short(found)


@pytest.mark.parametrize("batches", ["4", "4x0", "4x256,", "x", "4x256;1x64"])
def test_a_batch_that_is_none(batches: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "peers", "--batches", batches]) == 2
    assert f"--batches {batches}: sequences x bytes" in capsys.readouterr().err


def test_an_unknown_name_says_which_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "peers", "--only", "1/8,apex"]) == 2
    assert "'apex' is not one of" in capsys.readouterr().err
