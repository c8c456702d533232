"""One rank of several fails: all others end soon, with an error that names it, and nothing is left behind."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from mounts import mounted
from support.rank_faults import CULPRIT, FATAL_STEP, build, build_and_look_again, close, train
from support.ranks import Outcome, try_ranks


def run(fault: str, num_ranks: int, directory: Path, **settings: Any) -> list[Outcome]:
    """The survivors' outcomes. Their swap directories are empty afterwards, and every process has ended by itself."""
    for rank in range(num_ranks):
        (directory / str(rank)).mkdir(exist_ok=True)
    outcomes = try_ranks(num_ranks, train, fault, {"memory": "600KiB", "nvme": directory, **settings})
    for rank, outcome in enumerate(outcomes):
        assert outcome.exit_code == (-signal.SIGKILL if rank == CULPRIT and "killed" in fault else 0), outcome
        assert not list((directory / str(rank)).iterdir())
    return [outcome for rank, outcome in enumerate(outcomes) if rank != CULPRIT]


def errors_of(survivors: list[Outcome]) -> list[str]:
    assert all(outcome.error for outcome in survivors), survivors
    return [str(outcome.error) for outcome in survivors]


@pytest.mark.parametrize(
    ("fault", "stage", "num_ranks"),
    [("killed", 0, 2), ("killed", 1, 3), ("killed", 3, 3), ("killed in step", 2, 2), ("killed in step", 3, 2)],
)
def test_a_rank_is_killed(fault: str, stage: int, num_ranks: int, tmp_path: Path) -> None:
    for error in errors_of(run(fault, num_ranks, tmp_path, stage=stage)):
        assert error.startswith("LostRankError: rank ")
        assert f"rank {CULPRIT} did not answer" in error


@pytest.mark.parametrize(("stage", "num_ranks"), [(0, 2), (2, 2), (3, 3)])
@pytest.mark.parametrize("fault", ["one backward less", "one step less"])
def test_a_rank_does_not_do_the_same(fault: str, stage: int, num_ranks: int, tmp_path: Path) -> None:
    """Found out by agreement, before anything is exchanged: every rank is told what each of them wanted."""
    theirs = f"rank {CULPRIT}: '" + ("optimizer.step()" if fault == "one backward less" else "another call")
    if (fault, stage) == ("one backward less", 0):
        theirs = f"0 backward passes before optimizer.step() on rank {CULPRIT}, 1 on rank 0"
    errors = errors_of(run(fault, num_ranks, tmp_path, stage=stage))
    assert any(error.startswith("DivergenceError: ") and theirs in error for error in errors)


@pytest.mark.parametrize(("stage", "num_ranks"), [(0, 2), (1, 2), (2, 3), (3, 2)])
def test_a_rank_has_fewer_batches(stage: int, num_ranks: int, tmp_path: Path) -> None:
    for error in errors_of(run("ends", num_ranks, tmp_path, stage=stage)):
        assert error.startswith("LostRankError: rank ")
        assert f"known: rank {CULPRIT} ended after {FATAL_STEP} steps" in error


@pytest.mark.parametrize(("stage", "num_ranks"), [(0, 2), (2, 2), (3, 3)])
def test_a_rank_raises_in_its_own_code(stage: int, num_ranks: int, tmp_path: Path) -> None:
    for error in errors_of(run("raises", num_ranks, tmp_path, stage=stage)):
        assert error.startswith("LostRankError: rank ")
        assert f"known: rank {CULPRIT} ended after {FATAL_STEP} steps with ValueError: a sample is broken" in error


def test_an_engine_is_closed_in_the_middle_and_its_rank_lives_on() -> None:
    num_seconds = 5.0
    first, second = try_ranks(2, close, num_seconds)
    assert (second.result, second.error) == ("lived on", None)
    assert str(first.error).startswith("LostRankError: rank 1 did not answer while rank 0 was waiting for 'layers.")
    assert f"known: rank {CULPRIT} ended after {FATAL_STEP} steps" in str(first.error)


@pytest.mark.parametrize("fault", ["depth", "width"])
@pytest.mark.parametrize("stage", [0, 3])
def test_ranks_with_different_models(fault: str, stage: int, tmp_path: Path) -> None:
    for error in errors_of(run(fault, 2, tmp_path, stage=stage)):
        assert error.startswith("UsageError: rank 1 has a model of ")
        assert "build the same model on every rank" in error


@pytest.mark.parametrize("stage", [0, 3])
def test_a_full_disk(stage: int, tmp_path: Path) -> None:
    with mounted(tmp_path / str(CULPRIT), "-t", "tmpfs", "-o", "size=64k", "tmpfs"):
        outcomes = try_ranks(
            3,
            train,
            "",
            {"memory": "600KiB", "nvme": _directories(tmp_path, 3), "stage": stage},
        )
        assert not list((tmp_path / str(CULPRIT)).iterdir())
    for rank, outcome in enumerate(outcomes):
        assert outcome.exit_code == 0
        if rank == CULPRIT:
            assert str(outcome.error).startswith("SwapSpaceError: ")
        else:
            assert str(outcome.error).startswith(f"RankError: rank {CULPRIT} failed in zi.prepare (swap space)")
            assert str(tmp_path / str(CULPRIT)) in str(outcome.error)


def _directories(directory: Path, num_ranks: int) -> Path:
    for rank in range(num_ranks):
        (directory / str(rank)).mkdir(exist_ok=True)
    return directory


@pytest.mark.parametrize("other_seed", [True, False])
def test_ranks_that_build_different_models(other_seed: bool, tmp_path: Path) -> None:
    outcomes = try_ranks(2, build, {"memory": "1MiB", "nvme": tmp_path}, other_seed)
    for outcome in outcomes:
        assert outcome.exit_code == 0
        when = "before" if other_seed else "after"
        assert str(outcome.error).startswith(
            f"UsageError: rank 1 differs from rank 0 in the random state {when} zi.init"
        )
    assert not list(tmp_path.iterdir())


def test_a_layer_that_is_needed_whole_and_too_large_for_that(tmp_path: Path) -> None:
    settings = {"nvme": tmp_path}
    for outcome in try_ranks(2, build_and_look_again, {**settings, "memory": "2MiB"}):
        told = str(outcome.error)
        assert told.startswith("CapacityError: 'Linear")
        assert "takes 516.0 KiB, but there is room for 512.0 KiB of whole units" in told
        assert "fix:   1.1 times as much memory" in told
    for outcome in try_ranks(2, build_and_look_again, {**settings, "memory": "2.2MiB"}):
        assert outcome.error is None
