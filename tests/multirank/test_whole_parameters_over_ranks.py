"""Optimizers that see whole parameters, over several ranks: one rank updates each parameter, the others get it."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.checkpoints import Seen, Stop, visit
from support.compare import assert_same
from support.matrix import thinned
from support.models import mlp
from support.multirank import LEAST, Job, build, check, clip_by_config, orthogonalise, run_plain, steps
from support.ranks import run_ranks


@pytest.mark.parametrize("stages", [(1, 2), pytest.param((0, 3), marks=pytest.mark.long)])
@pytest.mark.parametrize(("optimizer", "num_ranks"), thinned(["muon", "adafactor", "soap"], [2, 3]))
def test_every_stage_on_ram_and_nvme(optimizer: str, num_ranks: int, stages: tuple[int, ...], tmp_path: Path) -> None:
    """The noise of sums of joined batches is amplified by an orthogonalisation, and is not compared."""
    every = [
        {"stage": stage, **({"memory": LEAST, "nvme": tmp_path} if stage % 2 else {"memory": "4MiB"})}
        for stage in stages
    ]
    check([Job(steps, optimizer=optimizer, settings=s) for s in every], num_ranks, joined=False)


@pytest.mark.parametrize("stages", [(0, 3), pytest.param((1, 2), marks=pytest.mark.long)])
def test_clipping(stages: tuple[int, ...], tmp_path: Path) -> None:
    every = [{"stage": s, "memory": LEAST, "nvme": tmp_path, "max_grad_norm": 0.05} for s in stages]
    check([Job(clip_by_config, optimizer="adafactor", settings=s) for s in every], 2, exact=False, joined=False)


def test_each_matrix_is_orthogonalised_by_one_rank(tmp_path: Path) -> None:
    """Also where each rank has gradients of its own; at stage 0 every rank updates everything."""
    every = [
        {"stage": stage, "memory": LEAST, "nvme": tmp_path, "gradient_accumulation_steps": 2} for stage in (1, 2, 3, 0)
    ]
    by_rank = run_ranks(2, orthogonalise, 2, every)
    matrices = sorted(2 * [tuple(p.shape) for p in mlp().parameters() if p.dim() == 2])
    for number in range(3):
        assert sorted(by_rank[0][number] + by_rank[1][number]) == matrices
        assert abs(len(by_rank[0][number]) - len(by_rank[1][number])) <= 2, "one rank has most of the work"
    assert sorted(by_rank[0][3]) == sorted(by_rank[1][3]) == matrices


@pytest.mark.parametrize("optimizer", [pytest.param("muon", marks=pytest.mark.long), "soap"])
def test_checkpoints_between_world_sizes(optimizer: str, tmp_path: Path) -> None:
    nvme = {"memory": LEAST, "nvme": tmp_path}
    walk = [
        Stop(2, {**nvme, "stage": 3}, optimizer=optimizer),
        Stop(3, {"memory": "8MiB", "stage": 1}, optimizer=optimizer),
        Stop(1, nvme, optimizer=optimizer),
        Stop(2, {"memory": "8MiB", "stage": 0}, optimizer=optimizer),
    ]
    before: Seen | None = None
    for number, stop in enumerate(walk):
        source = tmp_path / f"saved{number - 1}" if before else None
        seen = run_ranks(stop.num_ranks, visit, stop, source, tmp_path / f"copy{number}", tmp_path / f"saved{number}")
        for rank, mine in enumerate(seen):
            if before is not None:
                assert_same(f"{stop}, rank {rank}", before.trained, mine.loaded)
        before = seen[0]


def test_a_model_that_was_built_in_shards(tmp_path: Path) -> None:
    """zi.init cuts every layer over ranks, before it is known which optimizer will train it."""
    every = [{"stage": stage, "memory": "4MiB", "nvme": tmp_path} for stage in (3, 1)]
    plain = run_plain(Job(steps, optimizer="muon"), 2)
    for outcomes in run_ranks(2, build, 2, "mlp", every, "muon"):
        for _, result, _ in outcomes:
            assert_same("weights", plain.weights, result.weights)
