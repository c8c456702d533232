"""`python -m benchmarks growth`, run for real on tiny models, and its laws."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.growth import command
from benchmarks.growth.command import AXES, Grown, Point, laws, points
from benchmarks.turns.contender import Contender
from benchmarks.turns.messages import Race, Setting

TINY = "--layers=1 --hidden=64 --seq=16 --steps=1 --warmup=2 --timeout=240".split()  # noqa: SIM905 - as typed


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # threads that spin for each other cost seconds on a busy machine


@pytest.mark.parametrize("axis", AXES)
def test_one_thing_grows_at_a_time(axis: str) -> None:
    line = points(axis, 8, 512, 128)
    assert [point.value for point in line] == sorted({point.value for point in line})
    of_axis = {"depth": "layers", "width": "hidden", "budget": "memory", "batch": "batch", "ranks": "ranks"}[axis]
    for name in (
        {"layers", "hidden", "batch", "memory", "ranks"} - {of_axis} - ({"memory"} if axis == "ranks" else set())
    ):
        assert len({getattr(point, name) for point in line}) == 1
    assert len({getattr(point, of_axis) for point in line}) == len(line) >= 4
    assert all(point.batch % point.ranks == 0 for point in line)


def test_laws() -> None:
    first = Grown(1.0, 0.9, 5, 7, 0.5, 100.0)
    depth = points("depth", 8, 512, 128)
    found = laws(depth, first)
    assert found[0].seconds == 1.0
    assert found[-1].seconds == pytest.approx(depth[-1].num_parameters / depth[0].num_parameters)
    assert found[-1].moved_bytes == 2 * (depth[-1].state_bytes - depth[-1].memory)
    assert [law.held_bytes for law in found] == [point.memory for point in depth]
    assert [law.seconds for law in laws(points("batch", 8, 512, 128), first)] == [1, 2, 4, 8, 16]
    assert laws(points("budget", 8, 512, 128), first)[-1].moved_bytes == 0
    assert [law.moved_bytes for law in laws(points("ranks", 8, 512, 128), first)] == pytest.approx(
        [100, 50, 100 / 3, 25]
    )


@pytest.mark.long
@pytest.mark.parametrize("axis", ["budget", "ranks"])
def test_a_real_run_writes_figures_and_a_picture(axis: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    swap, out = tmp_path / "swap", tmp_path / "out"
    swap.mkdir()
    assert main(["growth", *TINY, "--hidden=128", "--axes", axis, "--nvme", str(swap), "--out", str(out)]) == 0
    (found,) = json.loads((out / "growth.json").read_text())["axes"]
    assert len(found["points"]) >= 4
    for point in found["points"]:
        assert point["error"] is None
        assert point["measured"]["seconds"] > 0
        assert 0 < point["measured"]["held_bytes"] <= point["memory"]
    assert (out / "growth.svg").exists()
    assert "MB moved" in capsys.readouterr().out
    assert os.listdir(swap) == []


def test_a_point_that_fails_is_told_and_the_file_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(point: Point, nvme: str, args: object) -> Contender:
        race = Race(point.layers, point.hidden, 1, point.batch, point.seq, 0, 1e-3, 3)
        return Contender(race, Setting("broken"), timeout=10, command=("false",))

    monkeypatch.setattr(command, "_contender", broken)
    out = tmp_path / "out"
    assert main(["growth", *TINY, "--axes", "depth", "--nvme", str(tmp_path), "--out", str(out)]) == 1
    (axis,) = json.loads((out / "growth.json").read_text())["axes"]
    assert all("exit code 1" in point["error"] and point["measured"] is None for point in axis["points"])
    assert "failed: depth" in capsys.readouterr().out
