"""Edits inside zi.gathered on several ranks: those of one rank become everybody's, and no edit is lost in silence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.rank_scripts import adamw, batch, loss_of, mlp, small_blocks
from support.ranks import run_ranks

import zero_infinity as zi

NUM_RANKS = 2


def every(directory: Path) -> list[dict[str, Any]]:
    ram = [{"stage": stage, "memory": "4MiB"} for stage in (0, 1, 3)]
    return [*ram, {"stage": 2, "memory": "1MiB", "nvme": directory}, {"stage": 3, "memory": "2MiB", "nvme": directory}]


def refused(call: Any) -> str:
    try:
        call()
    except zi.UsageError as error:
        return str(error)
    return ""


def edit(rank: int, settings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    small_blocks()
    return [_edit(rank, one) for one in settings]


def _edit(rank: int, settings: dict[str, Any]) -> dict[str, Any]:
    model = mlp()
    model, optimizer = zi.prepare(model, adamw(model), zi.Config(**settings, update="after_backward"))
    weight = model[0].weight
    found: dict[str, Any] = {}

    def look(name: str) -> None:
        with zi.gathered(weight):
            found[name] = weight[0, 0].item()

    with zi.gathered(weight), torch.no_grad():  # the first rank's
        if rank == 0:
            weight.fill_(1)
    look("first")
    with zi.gathered(weight):  # all, with other values
        weight.data.fill_(2 + rank)
    look("all")
    with zi.gathered(weight, modifier_rank=1):  # through numpy
        if rank == 1:
            weight.detach().numpy()[:] = 4
    look("chosen")

    def lost() -> None:
        with zi.gathered([weight, model[0].bias]), torch.no_grad():
            if rank == 1:
                weight.fill_(5)

    found["lost"] = refused(lost)
    look("after a lost edit")

    def different() -> None:
        with zi.gathered(weight, modifier_rank=rank):
            pass

    found["different"] = refused(different)
    loss_of(model, batch(0, rank)).backward()
    with zi.gathered(weight):
        if rank == 0:
            weight.grad.fill_(0.5)
    with zi.gathered(weight):
        found["gradient"] = weight.grad[0, 0].item(), weight.grad[-1, -1].item()
    optimizer.step()
    found["weights"] = {name: value.clone() for name, value in model.state_dict().items()}
    return found


def test_edits(tmp_path: Path) -> None:
    for results in zip(*run_ranks(NUM_RANKS, edit, every(tmp_path)), strict=True):
        for found in results:
            assert [found[name] for name in ("first", "all", "chosen", "after a lost edit")] == [1, 2, 4, 4]
            assert found["lost"].startswith("'0.weight' was edited inside zi.gathered on rank 1 and not on rank 0")
            assert "zi.gathered(..., modifier_rank=1)" in found["lost"]
            assert found["different"].startswith("ranks differ in modifier_rank= of zi.gathered: [0, 1], by rank")
            assert found["gradient"] == (0.5, 0.5)
            for name, value in results[0]["weights"].items():
                assert torch.equal(found["weights"][name], value), name


def test_a_rank_that_is_not_there() -> None:
    model = torch.nn.Linear(3, 3)
    model, _ = zi.prepare(model, torch.optim.SGD(model.parameters()), zi.Config(memory="1MiB"))
    gathered = zi.gathered(model.weight, modifier_rank=1)
    with (
        pytest.raises(zi.UsageError, match=r"modifier_rank is 1, but there is 1 rank\n  fix:   a rank from 0 to 0"),
        gathered,
    ):
        pass
