"""What the ranks of tests do on test devices: rank r computes on device r. Run by `support.ranks.run_ranks`."""

from __future__ import annotations

import random
import threading
import time
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from support.device import EXTENSION
from support.homes import living_on_device
from torch import nn

import zero_infinity as zi
from zero_infinity.comm.channel import Channel
from zero_infinity.comm.process_group import find_group
from zero_infinity.comm.topics import Topic
from zero_infinity.policy.partition import Span

NUM_STEPS = 5
AT_HOME = {"all": None, "none": lambda _: False, "some": lambda number: number % 2 == 0}


def make(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(48, 48), nn.GELU(), nn.LayerNorm(48), nn.Linear(48, 80), nn.GELU(), nn.Linear(80, 48)]
    return nn.Sequential(*layers).to(device)


def batch(number: int, rank: int, device: torch.device) -> torch.Tensor:
    return torch.randn(8, 48, generator=torch.Generator().manual_seed(100 * number + rank)).to(device)


def loss_of(model: nn.Module, data: torch.Tensor) -> torch.Tensor:
    return (model(data) - data).square().mean()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def device_of(rank: int, *, seed: int) -> torch.device:
    """Make the rank's device the current one, with long delays."""
    EXTENSION.set_delays(seed=seed, probability=0.2, max_seconds=2e-4)
    torch.accelerator.set_device_index(rank)
    return torch.device("lag", rank)


def train(rank: int, *, built_on: str, seed: int, at_home: str, config: dict[str, Any]) -> dict[str, Any]:
    """Train some steps; returns losses and weights, and what the last step moved."""
    device = device_of(rank, seed=seed)
    model = make(device if built_on == "device" else torch.device("cpu"))
    chosen = AT_HOME[at_home]
    with living_on_device(chosen) if chosen is not None else nullcontext():
        model, optimizer = zi.prepare(model, adamw(model), zi.Config(**{"device_memory": "4MiB", **config}))
    losses = []
    num_backwards = config.get("gradient_accumulation_steps", 1)
    for number in range(NUM_STEPS):
        batches = [batch(10 * number + part, rank, device) for part in range(num_backwards)]
        if number == NUM_STEPS - 1:
            zi.synchronize(model)
            dist.barrier()
            torch.accelerator.synchronize(device)
            EXTENSION.reset_counts(rank)
        for data in batches:
            loss = loss_of(model, data)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    ours = {thread.ident for thread in threading.enumerate() if thread.name.startswith("zero-infinity")}
    waits = sum(n for ident, n in EXTENSION.host_waits_by_thread().items() if ident not in ours)
    zi.synchronize(model)
    torch.accelerator.synchronize(device)
    counts = {**EXTENSION.counts(rank), "host_waits": waits}
    return {
        "weights": {name: p.detach().cpu().clone() for name, p in model.named_parameters()},
        "losses": torch.stack(losses).cpu(),
        "counts": counts,
        "units": [(u.num_elements, len(u.stored), len(u.owned)) for u in zi.api.engine_of(model).units],
    }


def prepare_on(rank: int, devices: list[str], backend: str) -> None:
    """Prepare a model, on a device for each rank, over a group with this backend."""
    device_of(rank, seed=0)
    model = make(torch.device("cpu"))
    group = dist.new_group(backend=backend)
    zi.prepare(model, adamw(model), zi.Config(memory="4MiB", stage=2), device=devices[rank], group=group)


class Fork(nn.Module):
    """Each rank goes another way."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ways = nn.ModuleList(nn.Linear(48, 48) for _ in range(2))
        self.end = nn.Linear(48, 48)

    def forward(self, x: torch.Tensor, ways: list[int]) -> torch.Tensor:
        for way in ways:
            x = self.ways[way](x).tanh()
        return self.end(x)


def ways_of(rank: int, number: int) -> list[int]:
    """The first rank goes both ways, the other one alternates."""
    return [number % 2] if rank else [1 - number % 2, number % 2]


def train_apart(rank: int, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Train on a stream of one's own with long kernels, so that updates on the device are late; returns weights."""
    device = device_of(rank, seed=0)
    with living_on_device(lambda _: True):
        model = Fork().to(device)
        model, optimizer = zi.prepare(model, adamw(model), zi.Config(**config))
    torch.accelerator.synchronize(device)
    EXTENSION.set_delays(kernel_seconds=2e-3)
    with torch.Stream(device):
        for number in range(NUM_STEPS):
            model(batch(number, rank, device), ways_of(rank, number)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        zi.synchronize(model)
        torch.accelerator.synchronize(device)
        EXTENSION.set_delays(probability=0.1, max_seconds=2e-4)
        return {name: p.detach().cpu().clone() for name, p in model.named_parameters()}


def gather_from_two_threads(rank: int, num_gathers: int) -> list[torch.Tensor]:
    """Two threads gather as they like, with pauses that differ on each rank; returns the sums of what they got."""
    device = device_of(rank, seed=rank)
    ranks = find_group(None)
    assert ranks is not None
    channels = [ranks.channel(f"thread {number}", device) for number in range(2)]
    found = [torch.zeros(ranks.num_ranks, device=device) for _ in channels]
    spans = [Span(number, number + 1) for number in range(ranks.num_ranks)]

    def work(number: int, channel: Channel) -> None:
        pauses = random.Random(10 * rank + number)
        with torch.Stream(device):
            for turn in range(num_gathers):
                whole = torch.full((len(spans),), float(10 * number + rank), device=device)
                topic = Topic("parameter gather", turn, f"gather {turn}")
                channel.agree(topic)
                time.sleep(pauses.choice((0, 0, 1e-3)))
                channel.gather(topic, [(whole, spans)])
                found[number] += whole

    threads = [threading.Thread(target=work, args=arguments) for arguments in enumerate(channels)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.accelerator.synchronize(device)
    return [total.cpu() for total in found]
