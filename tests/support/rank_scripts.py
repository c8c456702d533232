"""What ranks do in tests: at the top of a module, so that a process can be told to call it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import zero_infinity as zi
from zero_infinity.api import engine_of
from zero_infinity.runtime import placement


def small_blocks() -> None:
    """Units of a few KiB are moved like large ones, and their records are cut into several chunks."""
    placement._SMALL_BYTES = 0
    placement._MIN_CHUNK_BYTES = 4096


def mlp(depth: int = 4, width: int = 48) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.LayerNorm(width), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(width, 5))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def batch(step: int, part: int, width: int = 48, size: int = 6) -> torch.Tensor:
    return torch.randn(size, width, generator=torch.Generator().manual_seed(1000 * step + part))


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) - x[:, :5]).square().mean()


def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    kept = optimizer.state_dict()["state"]
    return {
        "weights": {name: value.clone() for name, value in model.state_dict().items()},
        "state": {
            number: {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in state.items()}
            for number, state in kept.items()
        },
    }


def train(
    rank: int, num_ranks: int, settings: dict[str, Any], num_steps: int = 4, num_parts: int = 1
) -> dict[str, Any]:
    """Train the MLP: rank r of N sees part r of each batch."""
    small_blocks()
    model = mlp()
    optimizer = adamw(model)
    model, optimizer = zi.prepare(model, optimizer, zi.Config(**settings))
    losses = []
    for step in range(num_steps):
        for part in range(num_parts):
            loss = loss_of(model, batch(step, part * num_ranks + rank))
            losses.append(loss.item())
            (loss / num_parts).backward()
        optimizer.step()
        optimizer.zero_grad()
    result = states(model, optimizer)
    result["losses"] = losses
    stats = zi.stats(model)
    result["peak"], result["budget"] = stats.memory_peak, stats.memory_budget
    return result


def build(rank: int, num_ranks: int, settings: dict[str, Any], depth: int = 4) -> dict[str, Any]:
    """Build the MLP inside zi.init, train it, and say what was held."""
    small_blocks()
    config = zi.Config(**settings)
    with zi.init(config):
        model = mlp(depth)
    built = {name: value.clone() for name, value in model.state_dict().items()}
    model, optimizer = zi.prepare(model, adamw(model), config)
    for step in range(3):
        loss_of(model, batch(step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {**states(model, optimizer), "built": built, "stats": zi.stats(model)}


def count(rank: int, num_ranks: int, depth: int, every: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Train an MLP by each of these settings; what was sent in one step, once the order is known, and what is held."""
    small_blocks()
    return [_count(rank, depth, settings) for settings in every]


def _count(rank: int, depth: int, settings: dict[str, Any]) -> dict[str, Any]:
    width = 96
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))
    model, optimizer = zi.prepare(model, adamw(model), zi.Config(**settings))
    seen = []
    for number in range(4):
        # The first layer's weight is read in backward, too.
        model(batch(number, rank, width).requires_grad_()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        zi.synchronize(model)
        torch.distributed.barrier()
        seen.append(zi.stats(model))
    buckets = engine_of(model).gradients._reducer._buckets.values()  # type: ignore[attr-defined]
    sent = {kind: total - seen[-2].sent_bytes[kind] for kind, total in seen[-1].sent_bytes.items()}
    return {"sent": sent, "stats": seen[-1], "buckets": sum(t.nbytes for pair in buckets for t in pair)}
