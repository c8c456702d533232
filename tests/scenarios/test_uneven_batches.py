"""Ranks with different numbers of batches: an error on the rank that has more, never a wait for the others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.rank_scripts import adamw, batch, loss_of, mlp, small_blocks
from support.ranks import try_ranks

import zero_infinity as zi


def train(rank: int, stage: int, end: str, folder: Path) -> None:
    """One rank has one batch more; then comes what `end` says."""
    small_blocks()
    model = mlp()
    model, optimizer = zi.prepare(model, adamw(model), zi.Config(memory="4MiB", stage=stage))
    for number in range(5 if end == "evaluate" else 5 + rank):
        loss_of(model, batch(number, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    if end == "save":
        zi.save(folder, model, optimizer)
    elif end == "read the states":
        optimizer.state_dict()
    elif end == "evaluate":  # without gradients ranks may differ
        with torch.no_grad():
            for number in range(2 + 3 * rank):
                model(batch(number, rank))
        loss_of(model, batch(9, rank)).backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("stage", "end", "failing"),
    [
        (3, "the end", {1}),
        (1, "save", {0, 1}),
        (2, "evaluate", set()),
        pytest.param(3, "save", {0, 1}, marks=pytest.mark.long),
        pytest.param(0, "the end", {1}, marks=pytest.mark.long),
        pytest.param(3, "read the states", {0, 1}, marks=pytest.mark.long),
        pytest.param(3, "evaluate", set(), marks=pytest.mark.long),
    ],
)
def test_one_batch_more(stage: int, end: str, failing: set[int], tmp_path: Path) -> None:
    outcomes = try_ranks(2, train, stage, end, tmp_path)
    assert {rank for rank, outcome in enumerate(outcomes) if outcome.error} == failing
    for outcome in outcomes:
        if outcome.error:
            assert outcome.error.startswith(("DivergenceError", "LostRankError"))
            assert "every rank must run the same number of batches" in outcome.error
