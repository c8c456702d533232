"""Functions that ranks run in tests, at module level so that they can be pickled."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import zero_infinity as zi
from support.prompt import let_nothing_lag
from zero_infinity.api import engine_of
from zero_infinity.models.byte_gpt import ByteGPT
from zero_infinity.models.presets import Shape
from zero_infinity.policy import chunk_size, homes


def small_blocks() -> None:
    """Units of a few KiB are moved like large ones, and their records are cut into several chunks."""
    homes._SMALL_BYTES = 0
    chunk_size.MIN_CHUNK_BYTES = 4096


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


def record(rank: int, num_ranks: int, settings: dict[str, Any]) -> tuple[zi.Stats, str, dict[str, Any]]:
    """Train, and return the stats, the trace (if there is one) and the states at the same moment."""
    small_blocks()
    model = mlp()
    model, optimizer = zi.prepare(model, adamw(model), zi.Config(**settings))
    for step in range(4):
        loss_of(model, batch(step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    zi.synchronize(model)
    trace = settings.get("trace")
    written = trace.with_stem(f"{trace.stem}.rank{rank}").read_text() if trace is not None else ""
    return zi.stats(model), written, states(model, optimizer)


def build(rank: int, num_ranks: int, settings: dict[str, Any], depth: int = 4) -> dict[str, Any]:
    """Build the MLP inside zi.init, train it, and return values, states and stats."""
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


class Expert(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


class Mixture(nn.Module):
    """Each row goes to the expert that its router likes best; an expert without rows is not called."""

    def __init__(self, width: int, num_experts: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.router = nn.Linear(width, num_experts)
        self.experts = nn.ModuleList(Expert(width) for _ in range(num_experts))
        self.offered = num_experts

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        weights = self.router(normed).softmax(-1)
        result = x.clone()
        for number, expert in enumerate(self.experts):
            rows = (chosen % self.offered == number).nonzero().flatten()
            if len(rows):
                result = result.index_add(0, rows, expert(normed[rows]) * weights[rows, number, None])
        return result


class MixtureModel(nn.Module):
    def __init__(self, width: int = 24, num_layers: int = 3, num_experts: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mixture(width, num_experts) for _ in range(num_layers))
        self.head = nn.Linear(width, 5)

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, chosen)
        return self.head(x)


def routed(step: int, part: int, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and their experts: different ones on each rank ("apart"), or the same on all ranks at first ("later")."""
    x = torch.randn(6, 24, generator=torch.Generator().manual_seed(100 * step + part))
    if kind == "apart":
        chosen = torch.tensor([part, part, part + 1, part, part + 1, part])
    elif step < 3:
        chosen = torch.arange(6)
    else:
        chosen = torch.arange(6) // (2 + part) + step
    return x, chosen


def train_mixture(rank: int, num_ranks: int, settings: dict[str, Any], kind: str, num_steps: int = 6) -> dict[str, Any]:
    small_blocks()
    torch.manual_seed(0)
    model = MixtureModel()
    model, optimizer = zi.prepare(model, adamw(model), zi.Config(**settings))
    for step in range(num_steps):
        x, chosen = routed(step, rank, kind)
        (model(x, chosen) - 0.5).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return states(model, optimizer)


def plain_mixture(num_ranks: int, kind: str, num_steps: int = 6) -> dict[str, Any]:
    torch.manual_seed(0)
    model = MixtureModel()
    optimizer = adamw(model)
    for step in range(num_steps):
        losses = []
        for part in range(num_ranks):
            x, chosen = routed(step, part, kind)
            losses.append((model(x, chosen) - 0.5).square().mean())
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return states(model, optimizer)


def train_mixtures(rank: int, num_ranks: int, settings: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [train_mixture(rank, num_ranks, one, kind) for one in settings]


class Chain(nn.Module):
    """Layers one after the other, with a residual path around each."""

    def __init__(self, width: int = 24, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Expert(width) for _ in range(depth))
        self.left_out: int | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            if number != self.left_out:
                x = x + layer(x)
        return x


def train_gpt(_: int, shape: Shape, settings: dict[str, Any], num_steps: int) -> tuple[int, int, int, int]:
    """Train, and return the bytes read, written and sent in the last step, and the peak held."""
    torch.manual_seed(0)
    model = ByteGPT(shape)
    model, optimizer = zi.prepare(model, torch.optim.AdamW(model.parameters(), fused=True), zi.Config(**settings))
    let_nothing_lag(model)
    tokens = torch.randint(0, 256, (1, shape.seq))
    before = after = zi.stats(model)
    for _ in range(num_steps):
        for _ in range(settings.get("gradient_accumulation_steps", 1)):
            model(tokens, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        zi.synchronize(model)
        before, after = after, zi.stats(model)
    sent = sum(after.sent_bytes.values()) - sum(before.sent_bytes.values())
    return after.bytes_read - before.bytes_read, after.bytes_written - before.bytes_written, sent, after.memory_peak


def count(rank: int, num_ranks: int, depth: int, every: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Train an MLP with each setting. Returns the bytes sent in one step, once the order is known, and the bytes held."""
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
    buckets = engine_of(model).gradients._reduce_scatter._buckets.values()  # type: ignore[attr-defined]
    sent = {kind: total - seen[-2].sent_bytes[kind] for kind, total in seen[-1].sent_bytes.items()}
    return {"sent": sent, "stats": seen[-1], "buckets": sum(t.nbytes for pair in buckets for t in pair)}


def accumulate_layer_major(
    rank: int, num_ranks: int, every: list[dict[str, Any]], kind: str
) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Weights after a loop of backwards, and after `zi.accumulate`, by setting."""
    from support.models import CASES

    small_blocks()
    case = CASES[kind]

    def train(settings: dict[str, Any], *, by_layer: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = case.make()
        model, optimizer = zi.prepare(model, torch.optim.AdamW(model.parameters()), zi.Config(**settings))
        torch.manual_seed(rank)
        for step in range(3):
            batches = [case.batch(100 * step + 10 * rank + part) for part in range(2)]
            if by_layer:
                zi.accumulate(model, batches, case.loss)
            else:
                for batch in batches:
                    (case.loss(model, batch) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
        if by_layer and not engine_of(model).accumulation.is_layer_major:
            raise AssertionError(engine_of(model).accumulation.reason)
        return [value.clone() for value in model.state_dict().values()]

    return [(train(settings, by_layer=False), train(settings, by_layer=True)) for settings in every]
