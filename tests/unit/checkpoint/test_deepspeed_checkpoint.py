"""Checkpoints in DeepSpeed's layouts, written here as its documentation and its own converter have them."""

from __future__ import annotations

import math
from collections import OrderedDict
from enum import IntEnum
from pathlib import Path
from typing import Any

import pytest
import torch

from zero_infinity.checkpoint.deepspeed_checkpoint import read_deepspeed
from zero_infinity.errors import CheckpointError


class Stage(IntEnum):
    """DeepSpeed saves its own enumeration for stage 3."""

    WEIGHTS = 3


VALUES = {
    "a.weight": torch.arange(15.0).view(3, 5),
    "a.bias": torch.arange(7.0) + 100,
    "b.weight": torch.arange(64.0).view(8, 8) + 200,
    "b.bias": torch.tensor(300.0),
    "c.empty": torch.zeros(0, 2),
}
GROUPS = [["a.weight", "b.weight"], ["a.bias", "b.bias", "c.empty"]]
BUFFER = {"norm.count": torch.tensor([5])}
FROZEN = {"frozen.weight": torch.arange(9.0).view(3, 3) + 400}


def model_states(frozen: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {
        "module": {**BUFFER, "a.weight": torch.empty(0)},
        "buffer_names": list(BUFFER),
        "param_shapes": [OrderedDict((name, VALUES[name].shape) for name in group) for group in GROUPS],
        "shared_params": {"head.weight": "b.weight"},
        "frozen_param_shapes": {name: value.shape for name, value in FROZEN.items()},
        "frozen_param_fragments": frozen,
        "ds_version": "0.19",
    }


def stage_2(folder: Path, num_ranks: int) -> None:
    torch.save(model_states(FROZEN), folder / "mp_rank_00_model_states.pt")
    align = 2 * num_ranks
    vectors = []
    for group in GROUPS:
        vector = torch.cat([VALUES[name].flatten() for name in group])
        vectors.append(torch.cat([vector, torch.zeros(-vector.numel() % align)]).chunk(num_ranks))
    for rank in range(num_ranks):
        parts = [vector[rank].clone() for vector in vectors]
        states = {"zero_stage": 2, "partition_count": [num_ranks] * 2, "single_partition_of_fp32_groups": parts}
        torch.save({"optimizer_state_dict": states}, folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")


def stage_3(folder: Path, num_ranks: int) -> None:
    def part(value: torch.Tensor, rank: int) -> torch.Tensor:
        size = math.ceil(value.numel() / num_ranks)
        return torch.cat([value.flatten(), torch.zeros(size * num_ranks - value.numel())])[rank * size :][:size]

    for rank in range(num_ranks):
        frozen = {name: part(value, rank) for name, value in FROZEN.items()}
        torch.save(model_states(frozen), folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        vectors = [torch.cat([part(VALUES[name], rank) for name in group]) for group in GROUPS]
        states = {"zero_stage": Stage.WEIGHTS, "partition_count": num_ranks, "fp32_flat_groups": vectors}
        torch.save({"optimizer_state_dict": states}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")


def universal(folder: Path, num_ranks: int) -> None:
    """As its converter writes what stages 1 and 2 have saved."""
    for name, value in VALUES.items():
        (folder / "zero" / name).mkdir(parents=True)
        torch.save({"param": value}, folder / "zero" / name / "fp32.pt")
        torch.save({"param": value * 0}, folder / "zero" / name / "exp_avg.pt")
    torch.save(model_states(FROZEN), folder / "mp_rank_00_model_states.pt")


def universal_3(folder: Path, num_ranks: int) -> None:
    """Of stage 3 it writes vectors with their padding."""
    stage_3(folder, num_ranks)
    for name, value in VALUES.items():
        (folder / "zero" / name).mkdir(parents=True)
        padding = torch.full((-value.numel() % num_ranks,), -1.0)
        torch.save(torch.cat([value.flatten(), padding]), folder / "zero" / name / "fp32.pt")
    for file in folder.glob("*_optim_states.pt"):
        file.unlink()


def without_zero(folder: Path, num_ranks: int) -> None:
    tied = {"head.weight": VALUES["b.weight"]}
    torch.save({"module": {**VALUES, **BUFFER, **FROZEN, **tied}}, folder / "mp_rank_00_model_states.pt")


LAYOUTS = {
    "stage 2": stage_2,
    "stage 3": stage_3,
    "universal": universal,
    "universal of 3": universal_3,
    "without": without_zero,
}


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_weights(layout: str, num_ranks: int, tmp_path: Path) -> None:
    folder = tmp_path / "global_step5"
    folder.mkdir()
    LAYOUTS[layout](folder, num_ranks)
    (tmp_path / "latest").write_text("global_step5")
    for path in (tmp_path, folder):
        weights = read_deepspeed(path)
        expected = {**VALUES, **BUFFER, **FROZEN}
        read = dict(weights.values())
        assert read.keys() == weights.kinds.keys() == expected.keys()
        assert all(torch.equal(value, read[name]) for name, value in expected.items())
        assert all(weights.kinds[name].shape == tuple(value.shape) for name, value in expected.items())
    assert read_deepspeed(folder, torch.bfloat16).kinds["a.bias"].dtype == "BF16"


def test_what_is_missing_or_unknown_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="this is not a checkpoint of DeepSpeed"):
        read_deepspeed(tmp_path)
    stage_3(tmp_path, 3)
    last = tmp_path / "zero_pp_rank_2_mp_rank_00_optim_states.pt"
    saved = torch.load(last, weights_only=False)
    last.unlink()
    with pytest.raises(CheckpointError, match="states of 2 ranks, and 3 ranks have saved it"):
        read_deepspeed(tmp_path)
    saved["optimizer_state_dict"]["fp32_flat_groups"].pop()
    torch.save(saved, last)
    with pytest.raises(CheckpointError, match="has 27 elements where its parameters have 31"):
        read_deepspeed(tmp_path)
    (tmp_path / "zero_pp_rank_0_mp_rank_01_optim_states.pt").touch()
    with pytest.raises(CheckpointError, match="several tensor-parallel ranks"):
        read_deepspeed(tmp_path)
    (tmp_path / "u" / "zero" / "w").mkdir(parents=True)
    torch.save(torch.ones(3), tmp_path / "u" / "zero" / "w" / "fp32.pt")
    with pytest.raises(CheckpointError, match="does not say in which shape"):
        read_deepspeed(tmp_path / "u")
    (tmp_path / "latest").write_text("../elsewhere")
    with pytest.raises(CheckpointError, match="which is no folder beside it"):
        read_deepspeed(tmp_path)
    with pytest.raises(CheckpointError, match="is not a folder"):
        read_deepspeed(tmp_path / "none")
