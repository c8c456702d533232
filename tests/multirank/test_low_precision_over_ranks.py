"""Quantised states, stochastic rounding and schedule-free weights over ranks: stages, tiers, world sizes change no bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import Seen, Stop, visit
from support.compare import assert_same
from support.multirank import LEAST, Job, average, check, steps
from support.ranks import run_ranks

ROUNDED = {"param_dtype": "bfloat16", "compute_dtype": "float32", "master": "none", "optim_dtype": "bfloat16"}


def every_stage(directory: Path, **settings: Any) -> list[dict[str, Any]]:
    """On NVMe and in RAM in turn."""
    return [
        {"stage": stage, **({"memory": LEAST, "nvme": directory} if stage % 2 else {"memory": "4MiB"}), **settings}
        for stage in range(4)
    ]


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.long)])
def test_quantised_states(num_ranks: int, tmp_path: Path) -> None:
    """The bits of plain PyTorch that sums in the order of ranks. Quantisation amplifies the noise of joined batches."""
    jobs = [Job(steps, optimizer="adamw8bit", settings=s) for s in every_stage(tmp_path)]
    check(jobs, num_ranks, joined=False)


@pytest.mark.parametrize(
    ("optimizer", "num_ranks"),
    [("adamw", 2), ("adamw", 3), ("muon", 2), pytest.param("muon", 3, marks=pytest.mark.long)],
)
def test_stochastic_rounding(optimizer: str, num_ranks: int, tmp_path: Path) -> None:
    jobs = [Job(steps, optimizer=optimizer, settings=s) for s in every_stage(tmp_path, **ROUNDED)]
    check(jobs, num_ranks, exact=False, joined=False)


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.long)])
def test_schedule_free(num_ranks: int, tmp_path: Path) -> None:
    """All weights are exchanged with averaged ones, and back."""
    jobs = [Job(average, optimizer="schedule-free", settings=s) for s in every_stage(tmp_path)]
    check(jobs, num_ranks, joined=False)


@pytest.mark.parametrize(("optimizer", "settings"), [("adamw8bit", {}), ("adamw", ROUNDED)], ids=["8bit", "rounded"])
def test_checkpoints_between_world_sizes(optimizer: str, settings: dict[str, Any], tmp_path: Path) -> None:
    nvme = {"memory": LEAST, "nvme": tmp_path, **settings}
    walk = [
        Stop(2, {**nvme, "stage": 3}, optimizer=optimizer),
        Stop(1, {"memory": "8MiB", **settings}, optimizer=optimizer),
        Stop(3, {**nvme, "stage": 1}, optimizer=optimizer),
    ]
    before: Seen | None = None
    for number, stop in enumerate(walk):
        source = tmp_path / f"saved{number - 1}" if before else None
        seen = run_ranks(stop.num_ranks, visit, stop, source, tmp_path / f"copy{number}", tmp_path / f"saved{number}")
        for rank, mine in enumerate(seen):
            if before is not None:
                assert_same(f"{stop}, rank {rank}", before.trained, mine.loaded)
        before = seen[0]
