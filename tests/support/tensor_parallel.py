"""Tensor parallelism (torch's own) under ZeRO: the same training prepared and plain, on a mesh of ranks."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import zero_infinity as zi
from support.rank_scripts import small_blocks
from zero_infinity.activations import offload

WIDTH, DEPTH, BATCH, LENGTH = 64, 3, 4, 8
CHECKPOINT_BYTES = BATCH * LENGTH * WIDTH * 4


class Block(nn.Module):
    """A residual block as in a transformer, without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


@dataclass(frozen=True, slots=True)
class Job:
    """One training."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    sequence: bool = False  # norms run on parts of the sequence: their gradients are partial sums
    partitioned: bool = False  # activation_group is given
    differing: bool = False  # the ranks of a tensor-parallel group get different batches
    max_norm: float | None = None


@dataclass(slots=True)
class Result:
    losses: list[float]
    weights: dict[str, torch.Tensor]  # local parts
    states: list[dict[str, Any]]
    stats: zi.Stats | None = None


class Training:
    """The part that both runs share."""

    def __init__(self, job: Job, mesh: DeviceMesh) -> None:
        self.job = job
        self.mesh = mesh
        torch.manual_seed(0)
        self.model = Model()
        _parallelize(self.model, mesh["tp"], sequence=job.sequence)
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, eps=1e-4)
        self.losses: list[float] = []

    def loss(self, number: int) -> torch.Tensor:
        dp, tp = self.mesh.get_local_rank("dp"), self.mesh.get_local_rank("tp")
        generator = torch.Generator().manual_seed(100 * number + dp + (50 * tp if self.job.differing else 0))
        x = torch.randn(BATCH, LENGTH, WIDTH, generator=generator)
        if self.job.sequence:
            x = x.chunk(self.mesh["tp"].size(), 1)[tp]
        torch.manual_seed(1000 * number + dp)
        loss = self.model(x).square().sum() / (BATCH * LENGTH * WIDTH)
        self.losses.append(loss.item())
        return loss

    def local_weights(self) -> dict[str, torch.Tensor]:
        return {n: _local(p.detach()).clone() for n, p in self.model.named_parameters()}


class Prepared(Training):
    def __init__(self, job: Job, mesh: DeviceMesh) -> None:
        super().__init__(job, mesh)
        config = zi.Config(max_grad_norm=job.max_norm, **job.settings)
        self.model, self.optimizer = zi.prepare(
            self.model,
            self.optimizer,
            config,
            group=mesh["dp"],
            activation_group=mesh["tp"] if job.partitioned else None,
        )

    def run(self, num_steps: int) -> Result:
        for number in range(num_steps):
            self.loss(number).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        states = [_local_state(state) for state in self.optimizer.state_dict()["state"].values()]
        result = Result(self.losses, self.local_weights(), states, zi.stats(self.model))
        zi.synchronize(self.model)
        return result


class Plain(Training):
    """Gradients are averaged in the order of ranks, and the optimizer sees the local parts."""

    def run(self, num_steps: int) -> Result:
        whole = list(self.model.parameters())
        parts = [nn.Parameter(_local(p.detach())) for p in whole]
        optimizer = torch.optim.AdamW(parts, lr=1e-2, eps=1e-4)
        group = self.mesh.get_group("dp")
        for number in range(num_steps):
            self.loss(number).backward()
            for p, part in zip(whole, parts, strict=True):
                gradient: Any = p.grad
                if isinstance(p, DTensor):
                    gradient = gradient.redistribute(placements=p.placements).to_local()
                gradient = gradient.contiguous()
                gathered = [torch.empty_like(gradient) for _ in range(group.size())]
                dist.all_gather(gathered, gradient, group)
                total = gathered[0]
                for other in gathered[1:]:
                    total = total + other
                part.grad = total / group.size()
                p.grad = None
            if self.job.max_norm is not None:
                self._clip(whole, parts, self.job.max_norm)
            optimizer.step()
        states = [_local_state(state) for state in optimizer.state_dict()["state"].values()]
        return Result(self.losses, self.local_weights(), states)

    def _clip(self, whole: list[nn.Parameter], parts: list[nn.Parameter], max_norm: float) -> None:
        squares = []
        for p, part in zip(whole, parts, strict=True):
            square = part.grad.double().square().sum()  # type: ignore[union-attr]
            if isinstance(p, DTensor) and any(place.is_shard() for place in p.placements):
                dist.all_reduce(square, group=self.mesh.get_group("tp"))
            squares.append(square)
        norm = torch.stack(squares).sum().sqrt()
        for part in parts:
            part.grad.mul_(torch.clamp(max_norm / (norm + 1e-6), max=1.0))  # type: ignore[union-attr]


def _parallelize(model: Model, mesh: DeviceMesh, *, sequence: bool) -> None:
    if not sequence:
        for block in model.blocks:
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return
    local = {"first": SequenceParallel(use_local_output=True), "last": SequenceParallel(use_local_output=True)}
    parallelize_module(model, mesh, local)
    for block in model.blocks:
        up, down = ColwiseParallel(input_layouts=Shard(1)), RowwiseParallel(output_layouts=Shard(1))
        parallelize_module(block, mesh, {"norm": SequenceParallel(), "up": up, "down": down})


def _local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def _local_state(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _local(value).clone() for name, value in state.items()}


def train(rank: int, jobs: list[Job], num_steps: int = 3) -> list[tuple[Result, Result]]:
    """Each job prepared and plain, on two tensor-parallel by two data-parallel ranks."""
    small_blocks()
    offload._SMALL_BYTES = 512
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return [(Prepared(job, mesh).run(num_steps), Plain(job, mesh).run(num_steps)) for job in jobs]


def wrong_group(rank: int) -> list[str]:
    """Return the errors for wrong groups and for settings that split parameters do not support."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    said = []
    for settings, groups in (
        ({}, {"group": mesh["tp"]}),
        ({}, {"group": mesh["dp"], "activation_group": mesh["tp"]}),
        ({"param_dtype": "bfloat16", "compute_dtype": "bfloat16"}, {"group": mesh["dp"]}),
    ):
        training = Training(Job(), mesh)
        try:
            zi.prepare(training.model, training.optimizer, zi.Config(memory="4MiB", **settings), **groups)
        except zi.ZeroInfinityError as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def look(rank: int) -> dict[str, list[Any]]:
    """Read and change split parameters outside of forward, prepared and plain."""
    small_blocks()
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    return {kind: _look(Training(Job(), mesh), prepared=kind == "prepared") for kind in ("plain", "prepared")}


def _look(run: Training, *, prepared: bool) -> list[Any]:
    model, optimizer = run.model, run.optimizer
    if prepared:
        config = zi.Config(memory="4MiB", update="after_backward")
        model, optimizer = zi.prepare(model, optimizer, config, group=run.mesh["dp"])
    weight = model.blocks[0].up.weight
    seen: list[Any] = [type(weight).__mro__[-4:], weight.shape, weight.placements, isinstance(weight, DTensor)]

    def note(*tensors: Any) -> None:
        seen.extend((type(t).__name__, t.shape, _local(t.detach()).clone()) for t in tensors)

    def step(number: int) -> None:
        penalty = sum(p.square().sum() for p in model.parameters() if not isinstance(p, DTensor))
        penalty = penalty + sum(p.to_local().square().sum() for p in model.parameters() if isinstance(p, DTensor))
        (run.loss(number) + 1e-3 * penalty).backward()

    note(weight.to_local(), weight.full_tensor(), weight + 1, weight.redistribute(placements=[Shard(1)]))
    step(0)
    with zi.gathered([weight]):
        note(weight.grad)
        weight.grad.mul_(0.5)
    optimizer.step()
    optimizer.zero_grad()
    with zi.gathered([weight]), torch.no_grad():
        weight.mul_(0.9)
    note(weight.to_local())
    with torch.no_grad():
        weight.add_(0.1)
    step(1)
    optimizer.step()
    optimizer.zero_grad()
    states = copy.deepcopy(model.state_dict())  # a plain model's are the parameters themselves
    seen.extend((name, type(value).__name__, _local(value).clone()) for name, value in states.items())
    saved = copy.deepcopy(optimizer.state_dict())
    seen.extend(
        (number, name, type(value).__name__, _local(value).clone())
        for number, state in saved["state"].items()
        for name, value in sorted(state.items())
    )
    twin = copy.deepcopy(model)
    note(*twin.parameters())
    step(2)
    optimizer.step()
    optimizer.zero_grad()
    model.load_state_dict(states)
    optimizer.load_state_dict(saved)
    step(3)
    optimizer.step()
    note(*(p.detach() for p in model.parameters()))
    return [*seen, *run.losses]
