"""`zero-infinity bench peers`, run for real on a tiny model, and its parts."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from zero_infinity.cli.bench_peers import PEERS
from zero_infinity.cli.bench_peers_report import changed_lines
from zero_infinity.cli.main import main

TINY = "--layers=1 --hidden=64 --batch=1 --seq=16 --steps=2 --warmup=1 --timeout=60".split()  # noqa: SIM905 - as typed


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
    (plain, ours), (_, missing) = found["heats"]
    assert {"command", "commit", "date", "machine"} <= found.keys()
    for entry in (plain, ours):
        assert entry["error"] is None
        assert entry["losses"] == plain["losses"]
        figures = entry["figures"]
        assert figures["loss_difference"] == 0
        assert figures["seconds"] > 0
        assert figures["start_seconds"] > 0.1
        assert figures["peak_rss"] > 50 << 20
    assert ours["figures"]["written_bytes"] > 0
    assert missing["figures"] is None
    assert "No module named 'deepspeed'" in missing["error"]
    assert "DeepSpeed, all in RAM: failed" in output.out
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.long
def test_what_comes_with_torch_trains_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "peers", *TINY, "--only", "mapped,fsdp2", "--nvme", str(tmp_path), "--json"]) == 0
    ((plain, *others),) = json.loads(capsys.readouterr().out)["heats"]
    assert len(others) == 2
    for entry in others:
        assert entry["error"] is None
        assert entry["losses"] == plain["losses"]
    assert os.listdir(tmp_path) == []


def test_changed_lines_are_those_of_the_scripts() -> None:
    folder = Path(changed_lines.__code__.co_filename).parent / "peers"
    assert all((folder / f"{peer.script}.py").exists() for peer in PEERS.values())
    assert changed_lines("plain") == 0
    assert changed_lines("ours") == 5


def test_an_unknown_name_says_which_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "peers", "--only", "1/8,apex"]) == 2
    assert "'apex' is not one of" in capsys.readouterr().err
