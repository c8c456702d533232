"""What ranks of the checkpoint tests do: load, look, save again, train and save."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import zero_infinity as zi
from support.compare import copied
from support.multirank import Job, Prepared, steps
from support.rank_scripts import small_blocks


@dataclass(frozen=True, slots=True)
class Stop:
    """One run of a walk over settings."""

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
