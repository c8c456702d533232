"""Training steps of the built-in GPT on an accelerator: prepared at several budgets, against plain PyTorch.

Owns the budgets, the interleaved rounds and the comparison of losses. It does not know how results are printed.

Each budget is compared with plain PyTorch in turns of a few steps, with the same initial weights and batches; two
models at most are in memory. The device is synchronized only at the end of a turn, so that work of one step may overlap
the next.

Losses can differ for two reasons that are no error: the plain model may not repeat its own losses, because some kernels
add in a varying order; and a host core rounds an AdamW update differently than the device. Both are measured: a second
plain model is one of the runs, and so is a plain model whose parameters are updated on the host.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from zero_infinity import api
from zero_infinity.config import Config
from zero_infinity.errors import CapacityError
from zero_infinity.models.byte_gpt import ByteGPT
from zero_infinity.models.presets import VOCABULARY, Shape
from zero_infinity.tiers.compute_device import DeviceTransfer
from zero_infinity.tiers.torch_accelerator import TorchAccelerator

_TURN_STEPS = 3
_WARM_UP_TURNS = 2  # the engine learns the order of accesses in three steps
_LEARNING_RATE = 1e-3
_LEAST_GRAIN = 64  # the least budget is found to this part of the parameters
STATE_COPIES = 3  # AdamW in float32: the parameter, momentum, variance


@dataclass(frozen=True, slots=True)
class Job:
    """What is trained: the model, its batch, and how many turns are timed."""

    device: torch.device
    shape: Shape
    batch: int
    num_turns: int

    @property
    def parameter_bytes(self) -> int:
        return 4 * self.shape.num_parameters

    def model(self) -> ByteGPT:
        torch.manual_seed(0)
        return ByteGPT(self.shape)

    def tokens(self, step: int) -> Tensor:
        """The batch of a step: random bytes, the same in every run."""
        generator = torch.Generator().manual_seed(step)
        size = (self.batch, self.shape.seq + 1)
        return torch.randint(VOCABULARY, size, generator=generator).to(self.device)


@dataclass(frozen=True, slots=True)
class Budget:
    """Settings of one prepared run. `memory` None: as much as the machine has."""

    name: str
    device_memory: int
    memory: int | None = None
    on_nvme: bool = False


@dataclass(frozen=True, slots=True)
class LinkBytes:
    """Bytes that one step moved, on average over the timed steps."""

    uploaded: int
    downloaded: int
    read: int  # from NVMe
    written: int


@dataclass(frozen=True, slots=True)
class StepResult:
    """One run against plain PyTorch: medians of a step's seconds, and the losses."""

    seconds: float
    plain_seconds: float
    is_identical: bool  # every loss has the bits of the plain model's
    max_loss_difference: float
    losses: tuple[float, ...]
    budget: Budget | None = None
    traffic: LinkBytes | None = None  # of prepared models

    @property
    def ratio(self) -> float:
        return self.seconds / self.plain_seconds


class CountingDevice(TorchAccelerator):
    """An accelerator that counts the bytes of its link."""

    def __init__(self, device: torch.device, budget: int) -> None:
        super().__init__(device, budget)
        self.uploaded_bytes = 0
        self.downloaded_bytes = 0
        self._counting = threading.Lock()  # several threads transfer

    def upload(self, source: Tensor, target: Tensor) -> DeviceTransfer:
        with self._counting:
            self.uploaded_bytes += target.nbytes
        return super().upload(source, target)

    def download(self, source: Tensor) -> tuple[Tensor, DeviceTransfer]:
        with self._counting:
            self.downloaded_bytes += source.nbytes
        return super().download(source)


class Trained(Protocol):
    """A model in training."""

    def step(self, tokens: Tensor) -> Tensor:
        """Take one step and return its loss."""

    def settle(self) -> None:
        """Wait for what the step has left to other threads."""

    def traffic(self) -> LinkBytes | None:
        """The bytes moved so far, if they are known."""

    def close(self) -> None: ...


class PlainTraining:
    """Plain PyTorch on the device."""

    def __init__(self, job: Job) -> None:
        self._model = job.model().to(job.device)
        self._optimizer: torch.optim.Optimizer = _adamw(self._model)

    def step(self, tokens: Tensor) -> Tensor:
        return _take_step(self._model, self._optimizer, tokens)

    def settle(self) -> None:
        """Nothing is left to other threads."""

    def traffic(self) -> None:
        return None

    def close(self) -> None:
        """Nothing but memory to free."""


class HostUpdate(PlainTraining):
    """Plain PyTorch with the update on the host: gradients go down, parameters go up, one after the other."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._masters = job.model()
        self._optimizer = _adamw(self._masters)

    def step(self, tokens: Tensor) -> Tensor:
        loss = _loss(self._model, tokens)
        loss.backward()
        pairs = list(zip(self._masters.parameters(), self._model.parameters(), strict=True))
        for master, parameter in pairs:
            master.grad = parameter.grad.to("cpu") if parameter.grad is not None else None
            parameter.grad = None
        self._optimizer.step()
        with torch.no_grad():
            for master, parameter in pairs:
                parameter.copy_(master)
        return loss.detach()


class PreparedTraining:
    """A model prepared by this library."""

    def __init__(self, job: Job, budget: Budget, nvme: str | None) -> None:
        self._device = CountingDevice(job.device, budget.device_memory)
        config = Config(
            memory=budget.memory,
            device_memory=budget.device_memory,
            nvme=nvme,
            tile_above=job.parameter_bytes,  # no tiles: these agree to 1e-6 only
        )
        model = job.model()
        self._model, self._optimizer = api.prepare(model, _adamw(model), config, device=self._device)

    def step(self, tokens: Tensor) -> Tensor:
        return _take_step(self._model, self._optimizer, tokens)

    def settle(self) -> None:
        api.synchronize(self._model)

    def traffic(self) -> LinkBytes:
        stats = api.stats(self._model)
        link = self._device
        return LinkBytes(
            link.uploaded_bytes,
            link.downloaded_bytes,
            stats.bytes_read + stats.bytes_read_directly,
            stats.bytes_written,
        )

    def close(self) -> None:
        api.close(self._model)


def _adamw(model: ByteGPT) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)


def _loss(model: ByteGPT, tokens: Tensor) -> Tensor:
    loss: Tensor = model(tokens[:, :-1], tokens[:, 1:])
    return loss


def _take_step(model: ByteGPT, optimizer: torch.optim.Optimizer, tokens: Tensor) -> Tensor:
    loss = _loss(model, tokens)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


class _Timed:
    """A model in training, its losses, the time of its turns and what they moved."""

    def __init__(self, job: Job, training: Trained) -> None:
        self._job = job
        self._training = training
        self._losses: list[Tensor] = []
        self._seconds: list[float] = []
        self._before: LinkBytes | None = None

    def take_turn(self, *, is_timed: bool) -> None:
        first = len(self._losses)
        batches = [self._job.tokens(step) for step in range(first, first + _TURN_STEPS)]
        if is_timed and not self._seconds:
            self._before = self._training.traffic()
        torch.accelerator.synchronize(self._job.device)
        start = time.perf_counter()
        self._losses += [self._training.step(tokens) for tokens in batches]
        self._training.settle()
        torch.accelerator.synchronize(self._job.device)
        if is_timed:
            self._seconds.append((time.perf_counter() - start) / _TURN_STEPS)

    @property
    def seconds(self) -> float:
        return statistics.median(self._seconds)

    @property
    def losses(self) -> tuple[float, ...]:
        return tuple(loss.item() for loss in self._losses)  # a float32 is exact in a float

    def traffic(self) -> LinkBytes | None:
        """Bytes of a timed step."""
        before, after = self._before, self._training.traffic()
        if before is None or after is None:
            return None
        steps = len(self._seconds) * _TURN_STEPS
        return LinkBytes(
            (after.uploaded - before.uploaded) // steps,
            (after.downloaded - before.downloaded) // steps,
            (after.read - before.read) // steps,
            (after.written - before.written) // steps,
        )


def compare(job: Job, make: Callable[[], Trained], budget: Budget | None = None) -> StepResult:
    """Train one model and a plain one in turns."""
    _free_earlier_runs()
    training = make()
    try:
        runs = _Timed(job, PlainTraining(job)), _Timed(job, training)
        for turn in range(_WARM_UP_TURNS + job.num_turns):
            for run in runs:
                run.take_turn(is_timed=turn >= _WARM_UP_TURNS)
        plain, ours = runs
        differences = [abs(a - b) for a, b in zip(plain.losses, ours.losses, strict=True)]
        return StepResult(
            seconds=ours.seconds,
            plain_seconds=plain.seconds,
            is_identical=plain.losses == ours.losses,
            max_loss_difference=max(differences),
            losses=ours.losses,
            budget=budget,
            traffic=ours.traffic(),
        )
    finally:
        training.close()


def compare_budget(job: Job, budget: Budget, directory: Path | None) -> StepResult:
    """Train a prepared model and a plain one in turns."""
    folder: AbstractContextManager[str | None] = nullcontext()
    if budget.on_nvme and directory is not None:
        folder = tempfile.TemporaryDirectory(dir=directory)
    with folder as nvme:
        return compare(job, lambda: PreparedTraining(job, budget, nvme), budget)


def budgets(job: Job, *, nvme: bool) -> Iterator[Budget]:
    """The settings to compare, from everything on the device to as little as possible."""
    whole = job.parameter_bytes
    least = least_device_memory(job)
    # One copy more than the states for gradients, and one for padding.
    yield Budget("states fit", (STATE_COPIES + 2) * whole)
    yield Budget("parameters fit", whole + whole // 4)
    yield Budget("half of the parameters", max(whole // 2, least))
    yield Budget("least", least)
    if nvme:
        memory = STATE_COPIES * whole // 2
        yield Budget("half, states on NVMe", max(whole // 2, least), memory, on_nvme=True)
        yield Budget("least, states on NVMe", least, memory, on_nvme=True)


def least_device_memory(job: Job) -> int:
    """The smallest device memory that `zi.prepare` accepts without tiles, to a 64th of the parameters."""

    def is_accepted(parts: int) -> bool:
        budget = Budget("least", job.parameter_bytes * parts // _LEAST_GRAIN)
        _free_earlier_runs()
        try:
            PreparedTraining(job, budget, nvme=None).close()
        except CapacityError:
            return False
        return True

    refused, accepted = 0, _LEAST_GRAIN + _LEAST_GRAIN // 4
    while accepted - refused > 1:
        middle = (refused + accepted) // 2
        refused, accepted = (refused, middle) if is_accepted(middle) else (middle, accepted)
    return job.parameter_bytes * accepted // _LEAST_GRAIN


def _free_earlier_runs() -> None:
    """A prepared model is part of reference cycles."""
    gc.collect()
    torch.accelerator.memory.empty_cache()
