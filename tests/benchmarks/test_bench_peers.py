"""`python -m benchmarks peers`, run for real on a tiny model, and its parts."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.numbers.contest_tables import peers_quotients_table, peers_short_table, peers_table
from benchmarks.peers import command
from benchmarks.peers.command import PEERS
from benchmarks.peers.report import changed_lines

TINY = "--contests=1x64:1x16 --steps=2 --warmup=1 --timeout=240".split()  # noqa: SIM905 - as typed


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # threads that spin for each other cost seconds on a busy machine


def test_an_error_of_a_peer_is_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if find_spec("deepspeed"):
        pytest.skip("DeepSpeed is installed here")
    places = ["--nvme", str(tmp_path), "--out", str(tmp_path / "out")]
    assert main(["peers", *TINY, "--only", "1/2,ds-cpu", *places]) == 0
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
    (row,) = peers_quotients_table(found).splitlines()[2:]  # of other pairs there is nobody
    assert row == "| this library, NVMe, 1/2 in RAM | DeepSpeed, all in RAM | failed |  |"
    for table in (peers_table(found), peers_short_table(found)):
        assert "| plain PyTorch | " in table
        assert "failed" in table
        assert found["date"][:10] in table


@pytest.mark.long
def test_what_comes_with_torch_trains_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["peers", *TINY, "--only", "mapped,fsdp2", "--nvme", str(tmp_path), "--json"]) == 0
    (contest,) = json.loads(capsys.readouterr().out)["contests"]
    assert [len(heat) for heat in contest["heats"]] == [2, 2]
    for plain, entry in contest["heats"]:
        assert entry["error"] is None
        assert entry["losses"] == plain["losses"]
    assert os.listdir(tmp_path) == []


def test_changed_lines_are_those_of_the_scripts() -> None:
    folder = Path(changed_lines.__code__.co_filename).parent / "scripts"
    assert all((folder / f"{peer.script}.py").exists() for peer in PEERS.values())
    assert changed_lines("plain") == 0
    assert changed_lines("ours") == 5


@pytest.mark.long
@pytest.mark.parametrize("expected", [[(1, 2, 16), (2, 1, 8)], [(1, 2, 16), (1, 1, 8), (2, 1, 8)]], ids=len)
def test_each_model_and_batch_is_a_contest(
    expected: list[tuple[int, int, int]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = ["--nvme", str(tmp_path), "--out", str(tmp_path / "out")]
    contests = ",".join(f"{layers}x64:{batch}x{seq}" for layers, batch, seq in expected)
    assert main(["peers", *TINY, f"--contests={contests}", "--only=fits", *places]) == 0
    found = json.loads((tmp_path / "out" / "peers.json").read_text())
    races = [contest["race"] for contest in found["contests"]]
    assert [(race["layers"], race["batch"], race["seq"]) for race in races] == expected
    losses = []
    for contest in found["contests"]:
        ((plain, ours),) = contest["heats"]
        assert plain["losses"] == ours["losses"]
        losses.append(tuple(plain["losses"]))
    assert len(set(losses)) == len(expected)
    assert (tmp_path / "out" / "peers.svg").exists()
    printed = capsys.readouterr().out
    for batch in (f"{layers} layers x 64, batch {size} x {seq}" for layers, size, seq in expected):
        assert batch in printed
        assert f"| {batch.replace(' layers', '')} | " in peers_table(found)
        assert f"{batch.replace(' layers', '')}: time of a step" in peers_short_table(found)


def test_all_of_them_take_part_with_the_first_model_and_fewer_with_others() -> None:
    assert [peer.key for heat in command._chosen(None, is_first_model=True) for peer in heat] == list(PEERS)
    (heat,) = command._chosen(None, is_first_model=False)
    assert [peer.key for peer in heat] == ["fits", "1/2", "1/8", "ds-cpu"]
    (heat,) = command._chosen("mapped", is_first_model=False)
    assert [peer.key for peer in heat] == ["mapped"]


def test_who_is_not_in_a_contest_has_no_figure_in_its_column() -> None:
    def entry(key: str, seconds: float) -> dict[str, object]:
        wall = {"median": seconds, "best": seconds}
        figures = {"seconds": 10 * seconds, "wall": wall, "peak_rss": int(seconds * 2**30), "start_seconds": 1.0}
        return {"key": key, "name": key, "error": None, "changed_lines": 1, "figures": figures}

    def contest(layers: int, *entries: dict[str, object]) -> dict[str, object]:
        race = {"layers": layers, "hidden": 64, "batch": 1, "seq": 8}
        return {"race": race, "num_parameters": 1, "heats": [entries]}

    everybody = [entry("plain", 1.0), entry("1/2", 2.0), entry("1/8", 2.5), entry("ds-cpu", 3.0), entry("fsdp2", 5.0)]
    two = {
        "contests": [contest(1, *everybody), contest(2, entry("plain", 1.0), entry("1/2", 1.0), entry("ds-cpu", 2.0))],
        "command": "",
        "commit": "",
        "date": "2026-11-18",
        "machine": {},
    }
    quotients = peers_quotients_table(two).splitlines()
    assert quotients[2] == "| 1/2 | ds-cpu | 1.50 (1.50) | 0.67 | 2.00 (2.00) | 0.50 |"
    assert quotients[3] == "| 1/8 | ds-cpu | 1.20 (1.20) | 0.83 |  |  |"
    assert "| fsdp2 | 5.00 (5.00) | 5.0 GiB |  |  | 1.0 s | 1 |" in peers_short_table(two)


@pytest.mark.parametrize("contests", ["6x1024", "6x1024:4x0", "6x1024:4x256,", "x:x", "6x1024:4x256;6x1024:1x64"])
def test_a_contest_that_is_none(contests: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["peers", "--contests", contests]) == 2
    assert f"--contests {contests}: blocks x width" in capsys.readouterr().err


def test_an_unknown_name_says_which_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["peers", "--only", "1/8,apex"]) == 2
    assert "'apex' is not one of" in capsys.readouterr().err
