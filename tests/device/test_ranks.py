"""Several ranks, each with a device: exact, and each host link carries its share."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.device import DEVICE, WHY_NOT
from support.patience import SECONDS

from device import rank_program

if WHY_NOT is not None:
    pytest.skip(WHY_NOT, allow_module_level=True)


def train(tmp_path: Path, num_ranks: int, *, built_on: str = "device", seed: int = 0, **config: Any) -> list[Any]:
    """Run the program on every rank; returns what each wrote."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = json.dumps({"config": config, "out": str(tmp_path), "seed": seed, "built_on": built_on})
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(num_ranks)}
    command = [sys.executable, "-m", "device.rank_program", settings]
    ranks = [
        subprocess.Popen(
            command, env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stderr=subprocess.PIPE
        )
        for rank in range(num_ranks)
    ]
    errors = [rank.communicate(timeout=SECONDS)[1].decode() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * num_ranks, "\n".join(errors)
    return [torch.load(tmp_path / f"{rank}.pt") for rank in range(num_ranks)]


def expected(num_ranks: int) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """Plain training on one device, with gradients averaged over the ranks' batches in rank order."""
    model = rank_program.make(DEVICE)
    optimizer = rank_program.adamw(model)
    losses: list[torch.Tensor] = []
    for number in range(rank_program.NUM_STEPS):
        sums: list[torch.Tensor] = []
        for rank in range(num_ranks):
            loss = rank_program.loss_of(model, rank_program.batch(number, rank, DEVICE))
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            sums = [a + b for a, b in zip(sums, gradients, strict=True)] if sums else list(gradients)
            losses.append(loss.detach().cpu())
        for parameter, total in zip(model.parameters(), sums, strict=True):
            parameter.grad = total / num_ranks
        optimizer.step()
    return {name: p.detach().cpu() for name, p in model.named_parameters()}, losses


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_every_stage_trains_as_plain_pytorch_on_all_batches(num_ranks: int, stage: int, tmp_path: Path) -> None:
    weights, losses = expected(num_ranks)
    found = train(tmp_path, num_ranks, stage=stage, memory="4MiB", seed=stage)
    for rank, result in enumerate(found):
        assert torch.equal(result["losses"], torch.stack(losses[rank::num_ranks]))
        for name, value in weights.items():
            assert torch.equal(result["weights"][name], value), name


def test_built_on_the_cpu_with_states_on_nvme(tmp_path: Path) -> None:
    weights, _ = expected(2)
    config = {"stage": 3, "memory": "400KiB", "device_memory": "200KiB", "nvme": str(tmp_path)}
    for result in train(tmp_path, 2, built_on="cpu", **config):
        for name, value in weights.items():
            assert torch.equal(result["weights"][name], value), name


def test_each_link_carries_a_share_in_stage_three(tmp_path: Path) -> None:
    """A step uploads this rank's shard and downloads its shard of the gradients; the rest is between devices."""
    for result in train(tmp_path, 2, stage=3, memory="4MiB"):
        whole = sum(4 * num_elements for num_elements, _ in result["units"])
        stored = sum(4 * num_stored for _, num_stored in result["units"])
        batch_bytes = 4 * 8 * 48
        counts = result["counts"]
        assert stored <= whole // 2 + 4096
        assert counts["uploaded"] == stored + batch_bytes
        assert counts["downloaded"] == stored
        assert counts["unpinned"] == 0
        assert counts["sent"] == stored + (whole - stored)  # the gather, and the others' shards of gradients
