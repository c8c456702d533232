"""The training that every rank of a simulation runs, and the plain one that it is compared with."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zero_infinity as zi
from benchmarks.simulation.schedule import Training
from zero_infinity import api
from zero_infinity.engine_parts import EngineParts

NUM_STEPS = 3
SAVED_STEP = 2
_WIDTH = 40
_MAX_NORM = 0.05

Weights = dict[str, torch.Tensor]


def _model(training: Training) -> nn.Module:
    state = torch.random.get_rng_state()
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(training.depth):
        layers += [nn.Linear(_WIDTH, _WIDTH), nn.Tanh()]
    model = nn.Sequential(*layers)
    torch.random.set_rng_state(state)
    return model


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def _loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    x = torch.randn(4, _WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))
    return (model(x) - x.flip(0)).square().mean()  # type: ignore[no-any-return]


def weights_of(model: nn.Module) -> Weights:
    return {name: value.clone() for name, value in model.state_dict().items()}


@cache
def plain(training: Training) -> list[Weights]:
    """The weights before the first step and after each one, of plain PyTorch with gradients summed in rank order."""
    model = _model(training)
    optimizer = _optimizer(model)
    found = [weights_of(model)]
    for step in range(NUM_STEPS):
        for parameter, gradient in zip(model.parameters(), _gradients(training, model, step), strict=True):
            parameter.grad = gradient
        if training.is_clipped:
            nn.utils.clip_grad_norm_(model.parameters(), _MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        found.append(weights_of(model))
    return found


def _gradients(training: Training, model: nn.Module, step: int) -> list[torch.Tensor]:
    """Gradients of a step, averaged over ranks at each backward, or once for the step (stages 0 and 1)."""

    def of(rank: int, part: int) -> list[torch.Tensor]:
        loss = _loss(model, step * training.num_parts + part, rank)
        return [gradient.clone() for gradient in torch.autograd.grad(loss, list(model.parameters()))]

    ranks, parts = range(training.num_ranks), range(training.num_parts)
    if training.stage < 2:
        return _average([_sum([of(rank, part) for part in parts]) for rank in ranks])
    return _sum([_average([of(rank, part) for rank in ranks]) for part in parts])


def _sum(several: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    totals = several[0]
    for more in several[1:]:
        totals = [total + gradient for total, gradient in zip(totals, more, strict=True)]
    return totals


def _average(by_rank: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    totals = _sum(by_rank)
    return [total / len(by_rank) for total in totals] if len(by_rank) > 1 else totals


class Prepared:
    """One rank's training."""

    def __init__(self, training: Training, rank: int, parts: EngineParts, saved: Path) -> None:
        self._training, self._rank, self._saved = training, rank, saved
        model = _model(training)
        config = zi.Config(
            memory=training.needs,
            nvme=saved.parent,
            stage=training.stage,
            max_grad_norm=_MAX_NORM if training.is_clipped else None,
        )
        self.model: Any
        self.model, self._optimizer = api.prepare_with(parts, model, _optimizer(model), config)

    def run(self, *, in_background: bool) -> Weights:
        """Train, and save on the way; returns the final weights."""
        for step in range(NUM_STEPS):
            self._step(step)
            if step + 1 == SAVED_STEP:
                zi.save(self._saved, self.model, self._optimizer, background=in_background)
        if self._training.is_loaded:
            zi.load(self._saved, self.model, self._optimizer)
            for step in range(SAVED_STEP, NUM_STEPS):
                self._step(step)
        zi.synchronize(self.model)
        return weights_of(self.model)

    def _step(self, step: int) -> None:
        num_parts = self._training.num_parts
        for part in range(num_parts):
            is_last = part == num_parts - 1
            with nullcontext() if is_last else self._optimizer.no_sync():
                _loss(self.model, step * num_parts + part, self._rank).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
