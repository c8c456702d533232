"""Functions that ranks run in the checkpoint tests: load, compare, save again, train, save."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import zero_infinity as zi
from support.compare import copied
from support.multirank import Job, Prepared, steps
from support.rank_scripts import small_blocks
from zero_infinity.checkpoint.file_io import OpenFile


@dataclass(frozen=True, slots=True)
class Stop:
    """One run in a series of runs, each with other settings."""

    num_ranks: int
    settings: dict[str, Any]
    model: str = "mlp"
    optimizer: str = "adamw"


@dataclass(slots=True)
class Seen:
    """What a rank had after loading, and after training on."""

    loaded: tuple[dict[str, Any], dict[str, Any]] | None
    trained: tuple[dict[str, Any], dict[str, Any]]
    num_steps: int
    lr: float
    extra: dict[str, Any]
    stats: zi.Stats


def states(run: Prepared) -> tuple[dict[str, Any], dict[str, Any]]:
    model = {name: copied(value.detach()) for name, value in run.model.state_dict().items()}
    return model, copied(run.optimizer.state_dict())


def visit(rank: int, stop: Stop, source: Path | None, copy: Path, target: Path) -> Seen:
    """Load `source`, save it again as `copy`, train two steps and save them as `target`."""
    small_blocks()
    run = Prepared(Job(steps, stop.model, stop.optimizer, settings=stop.settings), rank, stop.num_ranks)
    schedule = torch.optim.lr_scheduler.ExponentialLR(run.optimizer, 0.5)
    loaded, extra = None, {}
    if source is not None:
        extra = zi.load(source, run.model, run.optimizer, extra={"schedule": schedule})  # type: ignore[arg-type]
        loaded = states(run)
        zi.save(copy, run.model, run.optimizer, extra={"schedule": schedule, "rank": rank})  # type: ignore[arg-type]
    for number in range(2):
        run.backward(number)
        run.step()
    schedule.step()
    zi.save(target, run.model, run.optimizer, extra={"schedule": schedule, "rank": rank})  # type: ignore[arg-type]
    stats = zi.stats(run.model)
    return Seen(loaded, states(run), stats.num_steps, run.optimizer.param_groups[0]["lr"], extra, stats)


def save_beside(rank: int, settings: dict[str, Any], num_ranks: int, folder: Path) -> tuple[Any, Any]:
    """Save after two steps in the foreground and in the background, and return the final states."""
    small_blocks()
    run = Prepared(Job(steps, "mlp", "adamw", settings=settings), rank, num_ranks)
    for number in range(2):
        run.backward(number)
        run.step()
    options = {"extra": {"rank": rank}}
    zi.save(folder / "foreground", run.model, run.optimizer, **options)  # type: ignore[arg-type]
    saved = zi.save(folder / "background", run.model, run.optimizer, background=True, **options)  # type: ignore[arg-type]
    for number in range(2, 4):
        run.backward(number)
        run.step()
    again = zi.save(folder / "background", run.model, run.optimizer, background=True, **options)  # type: ignore[arg-type]
    if not saved.exists() or again == saved:
        raise AssertionError(f"{saved} was not finished before {again} was begun")
    zi.synchronize(run.model)
    if not again.exists():
        raise AssertionError(f"{again} is not there")
    return states(run)


def save_beside_failing(rank: int, num_ranks: int, folder: Path) -> str:
    """The second rank cannot write its part."""
    small_blocks()
    run = Prepared(Job(steps, "mlp", "adamw", settings={"memory": "8MiB", "stage": 3}), rank, num_ranks)
    run.backward(0)
    run.step()
    zi.save(folder, run.model, run.optimizer)  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(OpenFile, "sync", _fail)
        zi.save(folder, run.model, run.optimizer, background=True)  # type: ignore[arg-type]
        run.backward(1)
        run.step()
        try:
            zi.synchronize(run.model)
        except (OSError, zi.RankError) as error:
            said = str(error)
        else:
            raise AssertionError("nobody was told")
    run.backward(2)
    run.step()
    zi.save(folder, run.model, run.optimizer, background=True)  # type: ignore[arg-type]
    zi.synchronize(run.model)
    return said


def _fail(self: OpenFile) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))
