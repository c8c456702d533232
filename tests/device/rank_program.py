"""One rank of a training on test devices: rank r computes on device r. Writes its weights and counts to a file."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
from support.homes import living_on_device
from torch import nn

import zero_infinity as zi
from device import lag

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


def main() -> None:
    settings = json.loads(sys.argv[1])
    extension = lag.load()
    torch.set_num_threads(1)
    extension.set_delays(seed=settings["seed"], probability=0.2, max_seconds=2e-4)
    dist.init_process_group("cpu:gloo,lag:lag")
    rank = dist.get_rank()
    device = torch.device("lag", rank)
    torch.accelerator.set_device_index(rank)
    model = make(device if settings["built_on"] == "device" else torch.device("cpu"))
    at_home = AT_HOME[settings["at_home"]]
    with living_on_device(at_home) if at_home is not None else nullcontext():
        model, optimizer = zi.prepare(model, adamw(model), zi.Config(**{"device_memory": "4MiB", **settings["config"]}))
    losses = []
    num_backwards = settings["config"].get("gradient_accumulation_steps", 1)
    for number in range(NUM_STEPS):
        batches = [batch(10 * number + part, rank, device) for part in range(num_backwards)]
        if number == NUM_STEPS - 1:
            zi.synchronize(model)
            dist.barrier()
            torch.accelerator.synchronize(device)
            extension.reset_counts(rank)
        for data in batches:
            loss = loss_of(model, data)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    zi.synchronize(model)
    counts = extension.counts(rank)
    weights = {name: p.detach().cpu().clone() for name, p in model.named_parameters()}
    units = [[u.num_elements, len(u.stored)] for u in zi.api.engine_of(model).units]
    found = {"weights": weights, "losses": torch.stack(losses).cpu(), "counts": counts, "units": units}
    torch.save(found, f"{settings['out']}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
