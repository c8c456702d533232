"""`zero-infinity convert-checkpoint`: a model trained elsewhere goes on here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.trainers import tiny_llama

import zero_infinity as zi
from zero_infinity.cli.main import main


def save_as_deepspeed(model: torch.nn.Module, folder: Path) -> None:
    """ZeRO stage 1 on one rank, with 16-bit weights beside float32 ones."""
    folder.mkdir()
    shapes = [{name: p.shape for name, p in model.named_parameters()}]
    module = {name: value.half() for name, value in model.state_dict().items()}
    states = {"module": module, "buffer_names": [], "param_shapes": shapes, "shared_params": {}}
    torch.save(states, folder / "mp_rank_00_model_states.pt")
    vector = torch.cat([p.detach().flatten() for p in model.parameters()])
    states = {"zero_stage": 1, "partition_count": [1], "single_partition_of_fp32_groups": [vector]}
    torch.save({"optimizer_state_dict": states}, folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt")


def test_weights_are_converted_and_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = tiny_llama(seed=5)
    save_as_deepspeed(theirs, tmp_path / "step7")
    (tmp_path / "latest").write_text("step7\n")
    assert main(["convert-checkpoint", str(tmp_path), str(tmp_path / "weights"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["bytes"] == sum(p.nbytes for p in theirs.parameters())
    ours = tiny_llama()
    ours, _ = zi.prepare(ours, torch.optim.AdamW(ours.parameters()), zi.Config(memory="256KiB", nvme=tmp_path))
    zi.load_pretrained(ours, tmp_path / "weights")
    assert all(torch.equal(value, ours.state_dict()[name]) for name, value in theirs.state_dict().items())


def test_a_mistake_is_told_and_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert-checkpoint", str(tmp_path), str(tmp_path / "weights")]) != 0
    assert "this is not a checkpoint of DeepSpeed" in capsys.readouterr().err
    save_as_deepspeed(tiny_llama(), tmp_path / "step7")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    assert main(["convert-checkpoint", str(tmp_path / "step7"), str(tmp_path / "full")]) == 2
    assert "exists and is not empty" in capsys.readouterr().err
    assert main(["convert-checkpoint", str(tmp_path / "step7"), str(tmp_path / "half"), "--dtype", "bfloat16"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "half", "step7"]
