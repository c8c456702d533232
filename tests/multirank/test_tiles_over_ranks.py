"""Layers in tiles over several ranks: gathered, used and summed tile by tile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.compare import assert_same
from support.multirank import (
    MAX_NORM,
    Job,
    Plain,
    accumulate,
    build,
    check,
    clip_by_config,
    look_and_edit,
    prepared_part,
    run_jobs,
    steps,
)
from support.ranks import run_ranks

ABOVE = 2 * 4 * 32 * 40  # forty rows of the models' 32 elements, with their gradients


def settings(stage: int, directory: Path, **changes: Any) -> dict[str, Any]:
    where = {"nvme": directory, "memory": "512KiB"} if stage % 2 else {"memory": "8MiB"}
    return {"stage": stage, "tile_above": ABOVE, **where, **changes}


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.long)])
def test_every_stage_has_the_same_bits(num_ranks: int, tmp_path: Path) -> None:
    """And those of the joined batch, as far as float32 goes."""
    every = [Job(steps, "llama", settings=settings(stage, tmp_path)) for stage in range(4)]
    check(every, num_ranks, exact=False, moves=False)


@pytest.mark.parametrize("stage", [3, *(pytest.param(s, marks=pytest.mark.long) for s in (0, 1, 2))])
def test_a_tied_weight(stage: int, tmp_path: Path) -> None:
    """It has two gradients a backward; when they are added up depends on the stage."""
    check([Job(steps, "gpt2", settings=settings(stage, tmp_path))], 2, exact=False, moves=False)


@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.long)])
def test_accumulation_clipping_and_edits(stage: int, tmp_path: Path) -> None:
    twice = settings(stage, tmp_path, gradient_accumulation_steps=2)
    check([Job(accumulate, "tied", settings=twice)], 2, exact=False, moves=False)
    clipped = settings(stage, tmp_path, max_grad_norm=MAX_NORM)
    check([Job(clip_by_config, "tied", settings=clipped)], 2, exact=False, moves=False)
    late = settings(stage, tmp_path, update="after_backward")
    check([Job(look_and_edit, "tied", settings=late)], 2, exact=False, moves=False)


@pytest.mark.parametrize("stage", [3, pytest.param(1, marks=pytest.mark.long)])
def test_built_by_init_in_tiles(stage: int, tmp_path: Path) -> None:
    """Every rank draws every value, tile by tile, and keeps its part; training has the bits of a model cut later."""
    every = [{"stage": stage, "tile_above": ABOVE, "memory": "512KiB", "nvme": tmp_path}]
    values = {name: p.detach() for name, p in Plain(Job(steps, "gpt2"), 2).model.named_parameters()}
    later = run_jobs([Job(steps, "gpt2", settings=settings) for settings in every], 2)
    for rank, outcomes in enumerate(run_ranks(2, build, 2, "gpt2", every)):
        for number, (built, result, stats) in enumerate(outcomes):
            assert_same("values as built", values, built)
            assert_same(f"rank {rank}", prepared_part(later[number][rank]), prepared_part(result))
            assert stats.memory_peak <= stats.memory_budget
