"""Checkpoints between world sizes, stages and homes."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.checkpoints import Seen, Stop, save_beside, save_beside_failing, visit
from support.compare import assert_same
from support.multirank import LEAST
from support.ranks import run_ranks


def tensor_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "latest").iterdir() if path.suffix == ".safetensors"}


@pytest.mark.parametrize("model", [pytest.param("odds", marks=pytest.mark.long), "gpt2"])
def test_a_walk_over_world_sizes_stages_and_homes(model: str, tmp_path: Path) -> None:
    """1, 2, 4, 3 and 1 ranks; NVMe at stage 3, RAM at stage 1, stage 0; each goes on from what the one before left."""
    nvme = {"memory": LEAST, "nvme": tmp_path}
    ram = {"memory": "8MiB"}
    walk = [
        Stop(1, ram, model),
        Stop(2, {**nvme, "stage": 3}, model),
        Stop(4, {**ram, "stage": 1}, model),
        Stop(3, {**nvme, "stage": 2, "partition": "owner"}, model),
        Stop(1, {**ram, "stage": 0}, model),
        Stop(2, {**ram, "stage": 0}, model),
    ]
    if model == "gpt2":  # its ties are what matters
        walk = [walk[1], walk[3], walk[0]]
    before: Seen | None = None
    for number, stop in enumerate(walk):
        source = tmp_path / f"saved{number - 1}" if before else None
        copy, target = tmp_path / f"copy{number}", tmp_path / f"saved{number}"
        seen = run_ranks(stop.num_ranks, visit, stop, source, copy, target)
        for rank, mine in enumerate(seen):
            assert mine.num_steps == 2 * (number + 1)
            assert mine.lr == 1e-2 * 0.5 ** (number + 1)
            assert mine.stats.memory_peak <= mine.stats.memory_budget
            if before is not None:
                assert_same(f"{stop}, rank {rank}", before.trained, mine.loaded)
                assert mine.extra["rank"] == (rank if rank < walk[number - 1].num_ranks else 0)
        if source is not None:
            assert tensor_files(source) == tensor_files(copy), "the files are not the same, byte for byte"
        before = seen[0]


@pytest.mark.parametrize(("num_ranks", "stage", "home"), [(2, 3, "nvme"), (2, 1, "ram"), (3, 2, "nvme")])
def test_saving_while_all_ranks_train_on(num_ranks: int, stage: int, home: str, tmp_path: Path) -> None:
    settings = {"stage": stage, **({"memory": LEAST, "nvme": tmp_path} if home == "nvme" else {"memory": "8MiB"})}
    seen = run_ranks(num_ranks, save_beside, settings, num_ranks, tmp_path)
    for other in seen[1:]:
        assert_same("states", seen[0], other)
    whole, beside = (
        {path.name: path.read_bytes() for path in (tmp_path / name / "step-00000002").iterdir()}
        for name in ("foreground", "background")
    )
    assert whole == beside


def test_a_rank_that_cannot_write_while_all_train_on(tmp_path: Path) -> None:
    """All are told, the checkpoint before is whole, and the next one, too."""
    said = run_ranks(2, save_beside_failing, 2, tmp_path)
    assert "rank 1 failed" in said[0]
    assert "Input/output error" in said[0]
    assert "Input/output error" in said[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000001", "step-00000003"]
