"""Several ranks, each with a device: exact, and each host link carries its share."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.device import DEVICE, WHY_NOT
from support.ranks import run_ranks, try_ranks

from device import rank_program

if WHY_NOT is not None:
    pytest.skip(WHY_NOT, allow_module_level=True)


def train(
    num_ranks: int, *, built_on: str = "device", seed: int = 0, at_home: str = "none", **config: Any
) -> list[Any]:
    """Train on every rank; returns what each found."""
    program = functools.partial(rank_program.train, built_on=built_on, seed=seed, at_home=at_home, config=config)
    return run_ranks(num_ranks, program)


def expected(
    num_ranks: int, *, num_backwards: int = 1, averages_each: bool = False, max_norm: float | None = None
) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """Plain training on one device, with gradients averaged over the ranks' batches in rank order.

    `averages_each`: those of each backward, as stages 2 and 3 do, and not their sum.
    """
    model = rank_program.make(DEVICE)
    optimizer = rank_program.adamw(model)
    losses: list[torch.Tensor] = []
    for number in range(rank_program.NUM_STEPS):
        found: list[list[list[torch.Tensor]]] = []  # by rank, by backward
        for rank in range(num_ranks):
            found.append([])
            for part in range(num_backwards):
                loss = rank_program.loss_of(model, rank_program.batch(10 * number + part, rank, DEVICE))
                found[-1].append(list(torch.autograd.grad(loss, list(model.parameters()))))
            losses.append(loss.detach().cpu())
        if averages_each:
            totals = added([divided(added(parts), num_ranks) for parts in zip(*found, strict=True)])
        else:
            totals = divided(added([added(parts) for parts in found]), num_ranks)
        for parameter, total in zip(model.parameters(), totals, strict=True):
            parameter.grad = total
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
    return {name: p.detach().cpu() for name, p in model.named_parameters()}, losses


def added(terms: Iterable[list[torch.Tensor]]) -> list[torch.Tensor]:
    return [functools.reduce(torch.add, parts) for parts in zip(*terms, strict=True)]


def divided(sums: list[torch.Tensor], number: int) -> list[torch.Tensor]:
    return [total / number for total in sums]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("at_home", ["none", "some"])
@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_every_stage_trains_as_plain_pytorch_on_all_batches(num_ranks: int, at_home: str, stage: int) -> None:
    weights, losses = expected(num_ranks)
    found = train(num_ranks, stage=stage, memory="4MiB", seed=stage, at_home=at_home)
    for rank, result in enumerate(found):
        assert torch.equal(result["losses"], torch.stack(losses[rank::num_ranks]))
        for name, value in weights.items():
            assert torch.equal(result["weights"][name], value), name


def test_built_on_the_cpu_with_states_on_nvme(tmp_path: Path) -> None:
    weights, _ = expected(2)
    config = {"stage": 3, "memory": "400KiB", "device_memory": "200KiB", "nvme": str(tmp_path)}
    for result in train(2, built_on="cpu", **config):
        for name, value in weights.items():
            assert torch.equal(result["weights"][name], value), name


@pytest.mark.parametrize("num_backwards", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_each_link_carries_its_share(stage: int, num_backwards: int) -> None:
    """Up: the parameters that this rank stores. Down: its part of each sum, which devices have made. No thread that
    computes waits for its device."""
    weights, losses = expected(2, num_backwards=num_backwards, averages_each=True)
    config = {"stage": stage, "memory": "4MiB", "gradient_accumulation_steps": num_backwards}
    for rank, result in enumerate(train(2, **config)):
        whole, stored, owned = (4 * sum(sizes) for sizes in zip(*result["units"], strict=True))
        counts = result["counts"]
        assert owned == (whole if stage == 0 else whole // 2)
        assert stored == (whole // 2 if stage == 3 else whole)
        assert counts["uploaded"] == stored
        assert counts["downloaded"] == num_backwards * owned
        gathered = {0: num_backwards * whole // 2, 1: 0, 2: 0, 3: stored}  # gradients, or parameters
        assert counts["sent"] == num_backwards * whole // 2 + gathered[stage]
        assert counts["unpinned"] == 0
        assert counts["host_waits"] == 0
        assert torch.equal(result["losses"], torch.stack(losses[rank::2]))
        for name, value in weights.items():
            assert torch.equal(result["weights"][name], value), name


def test_streamed_parameters_are_gathered_twice_from_shards() -> None:
    """What goes up is a shard, and all of it is gathered: for forward, and for backward but for what is still there."""
    for result in train(2, stage=3, memory="4MiB", device_memory="32KiB"):
        whole, stored, owned = (4 * sum(sizes) for sizes in zip(*result["units"], strict=True))
        counts = result["counts"]
        assert stored < counts["uploaded"] <= 2 * stored
        assert counts["sent"] == counts["uploaded"] + whole - owned
        assert counts["downloaded"] == owned
        assert counts["host_waits"] == 0


def test_what_another_rank_asks_for_has_its_update() -> None:
    """A rank that goes another way sends its shard of a layer, of which the update may not have run yet."""
    model = rank_program.Fork().to(DEVICE)
    optimizer = rank_program.adamw(model)
    for number in range(rank_program.NUM_STEPS):
        for rank in range(2):
            data = rank_program.batch(number, rank, DEVICE)
            loss = model(data, rank_program.ways_of(rank, number)).square().mean()
            (loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    config = {"stage": 3, "memory": "4MiB", "device_memory": "4MiB"}
    for weights in run_ranks(2, rank_program.train_apart, config):
        for name, value in model.named_parameters():
            assert torch.equal(weights[name], value.detach().cpu()), name


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_nothing_crosses_the_host_links_where_all_lives_on_the_devices(stage: int) -> None:
    """Accumulated gradients stay there, too."""
    weights, losses = expected(2, num_backwards=2, averages_each=stage >= 2)
    config = {"stage": stage, "memory": "4MiB", "gradient_accumulation_steps": 2}
    for rank, result in enumerate(train(2, at_home="all", **config)):
        assert result["counts"]["uploaded"] == result["counts"]["downloaded"] == 0
        assert result["counts"]["unpinned"] == 0
        assert torch.equal(result["losses"], torch.stack(losses[rank::2]))
        for name, value in weights.items():
            assert torch.equal(result["weights"][name], value), name


@pytest.mark.parametrize("stage", [1, 3])
def test_clipping_over_ranks(stage: int) -> None:
    weights, _ = expected(2, max_norm=0.05)
    for result in train(2, stage=stage, memory="4MiB", at_home="some", max_grad_norm=0.05):
        for name, value in weights.items():
            assert torch.allclose(result["weights"][name], value, atol=1e-6), name


def test_a_rank_without_a_device_is_named() -> None:
    for outcome in try_ranks(2, rank_program.prepare_on, ["lag:0", "cpu"], "cpu:gloo,lag:lag"):
        assert str(outcome.error).startswith(
            "UsageError: rank 1 differs from rank 0 in the device to compute on: cpu and lag\n"
            "  fix:   start every rank with a device, or none"
        )


def test_a_process_group_without_a_backend_for_the_device_is_refused() -> None:
    for outcome in try_ranks(2, rank_program.prepare_on, ["lag:0", "lag:1"], "cpu:gloo"):
        assert "UsageError: the process group has no backend for tensors on lag" in str(outcome.error)


def test_threads_that_gather_at_the_same_time_do_not_mix_up_their_launches() -> None:
    """Devices run collectives in the order of their launches. Another order on another rank ends in a deadlock, or here,
    in one process group, in the other thread's values."""
    for totals in run_ranks(2, rank_program.gather_from_two_threads, 40):
        assert [total.tolist() for total in totals] == [[0, 40], [400, 440]]
