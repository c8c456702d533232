"""One rank of a run that a prediction is compared with, in a process of its own.

Plain PyTorch's steps are the calibration: the time of each module and of an update, at that moment and with the other
ranks running. The drive and the link between ranks are measured before.
"""

from __future__ import annotations

import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero_infinity.cli.bench_hardware import DriveSpeed, copy_rate, measure_drive
from zero_infinity.models.presets import Shape
from zero_infinity.planner.simulator import WARM_UP_STEPS

_STATE_BYTES = 12  # a parameter in float32: value, momentum, variance
_NUM_ROUNDS = 2
_DRIVE_BYTES = 256 << 20
_LINK_BYTES = 2 << 20
_LINK_ROUNDS = 24


@dataclass(frozen=True, slots=True)
class PlanConfiguration:
    """What is trained, and in how much memory: a part of a rank's states, or None for RAM without a drive."""

    name: str
    shape: Shape
    batch: int
    part: float | None
    early: bool = True
    num_ranks: int = 1
    drive_rate: float | None = None  # bytes a second of a slower drive than there is, on each rank
    device_rate: float | None = None  # of the link to an emulated accelerator, which holds half of the parameters
    steps_a_round: int = 3

    @property
    def memory(self) -> int:
        """Of one rank."""
        states = _STATE_BYTES * self.shape.num_parameters // self.num_ranks
        return int(states * self.part) if self.part is not None else 3 * states

    @property
    def device_memory(self) -> int | None:
        return None if self.device_rate is None else 2 * self.shape.num_parameters


@dataclass(frozen=True, slots=True)
class Calibration:
    """What plain PyTorch, the drive and the link did."""

    modules: dict[str, tuple[float, float]]  # forward and backward seconds
    update_seconds: float
    plain_seconds: float  # a whole step
    drive: DriveSpeed
    copy_rate: float
    link_rate: float
    link_cpu_seconds_per_byte: float


@dataclass(frozen=True, slots=True)
class StepFigures:
    """Of one step, predicted or measured."""

    seconds: float
    read: int
    written: int
    held: int
    sent: int = 0  # to other ranks
    uploaded: int = 0  # to the accelerator


def run_rank(
    rank: int, configuration: PlanConfiguration, directory: Path, store: str
) -> tuple[Calibration, StepFigures]:
    """All that one rank does; every rank is called at the same time."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // configuration.num_ranks))
    # Ranks share the drive and each moves its own bytes there; one of them measures it.
    drive = measure_drive([str(directory)], _DRIVE_BYTES)
    if configuration.num_ranks == 1:
        return _Rank(configuration, directory, drive, _nothing).run(1.0, 0.0)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=configuration.num_ranks)
    try:
        link = _measure_link(dist.barrier)
        return _Rank(configuration, directory, drive, dist.barrier).run(*link)
    finally:
        dist.destroy_process_group()


class _Rank:
    """A plain model and a prepared one, alike."""

    def __init__(
        self, configuration: PlanConfiguration, directory: Path, drive: DriveSpeed, barrier: Callable[[], object]
    ) -> None:
        import torch

        from benchmarks.plan.stopwatch import Stopwatch
        from zero_infinity.models.byte_gpt import ByteGPT

        self._configuration = configuration
        self._directory = directory
        self._drive = drive
        self._barrier = barrier
        torch.manual_seed(0)
        self._tokens = torch.randint(0, 256, (configuration.batch, configuration.shape.seq))
        self._plain, self._model = ByteGPT(configuration.shape), ByteGPT(configuration.shape)
        self._plain_optimizer = torch.optim.AdamW(self._plain.parameters(), fused=True)
        self._stopwatch = Stopwatch(self._plain)
        self._timings: list[dict[str, tuple[float, float]]] = []
        self._updating: list[float] = []
        self._plain_steps: list[float] = []

    def run(self, link_rate: float, link_cpu: float) -> tuple[Calibration, StepFigures]:
        import torch

        stepping: list[float] = []
        with tempfile.TemporaryDirectory(dir=self._directory) as swap:
            self._prepare(swap)
            figures = self._count_bytes()
            self._step_plainly()
            for values in (self._timings, self._updating, self._plain_steps):
                values.clear()  # the first one made memory
            for _ in range(_NUM_ROUNDS):
                self._barrier()
                for _ in range(self._configuration.steps_a_round):
                    self._step_plainly()
                self._barrier()
                stepping += self._train(self._configuration.steps_a_round)
            held = self._api.stats(self._model).memory_peak
        names = self._timings[0]
        modules = {
            name: (
                statistics.median(t[name][0] for t in self._timings),
                statistics.median(t[name][1] for t in self._timings),
            )
            for name in names
        }
        calibration = Calibration(
            modules,
            statistics.median(self._updating),
            statistics.median(self._plain_steps),
            self._drive,
            copy_rate(torch),
            link_rate,
            link_cpu,
        )
        read, written, sent, uploaded = figures
        return calibration, StepFigures(statistics.median(stepping), read, written, held, sent, uploaded)

    def _prepare(self, swap: str) -> None:
        import torch

        from benchmarks.engine_variants import slow_drive
        from zero_infinity import api
        from zero_infinity.config import Config
        from zero_infinity.engine_parts import DEFAULT_PARTS, EngineParts
        from zero_infinity.tiers.emulated_accelerator import EmulatedAccelerator

        chosen = self._configuration
        parts = DEFAULT_PARTS if chosen.drive_rate is None else EngineParts(slow_drive(chosen.drive_rate))
        config = Config(
            memory=chosen.memory,
            device_memory=chosen.device_memory,
            nvme=swap if chosen.part is not None else None,
            update="auto" if chosen.early else "after_backward",
        )
        self._accelerator = None
        if chosen.device_rate is not None and chosen.device_memory is not None:
            self._accelerator = EmulatedAccelerator(chosen.device_memory, bytes_per_second=chosen.device_rate)
        self._api: Any = api
        optimizer = torch.optim.AdamW(self._model.parameters(), fused=True)
        self._model, self._optimizer = api.prepare_with(parts, self._model, optimizer, config, device=self._accelerator)

    def _count_bytes(self) -> tuple[int, int, int, int]:
        """Of the step that the simulator reports. What runs on into the next one is waited for: it would blur them."""
        before = after = (0, 0, 0, 0)
        for _ in range(WARM_UP_STEPS + 1):
            self._step()
            self._api.synchronize(self._model)
            self._barrier()
            before, after = after, self._counters()
        read, written, sent, uploaded = (new - old for new, old in zip(after, before, strict=True))
        return read, written, sent, uploaded

    def _counters(self) -> tuple[int, int, int, int]:
        stats = self._api.stats(self._model)
        uploaded = self._accelerator.bytes_uploaded if self._accelerator is not None else 0
        return stats.bytes_read, stats.bytes_written, sum(stats.sent_bytes.values()), uploaded

    def _train(self, num_steps: int) -> list[float]:
        """Seconds of each step in the middle of a run: one before them leaves to do what each of them does."""
        ends = []
        for _ in range(num_steps + 1):
            self._step()
            ends.append(time.perf_counter())
        self._api.synchronize(self._model)
        return [end - start for start, end in itertools.pairwise(ends)]

    def _step(self) -> None:
        self._model(self._tokens, self._tokens).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _step_plainly(self) -> None:
        start = time.perf_counter()
        self._plain(self._tokens, self._tokens).backward()
        self._timings.append(self._stopwatch.take())
        middle = time.perf_counter()
        self._plain_optimizer.step()
        self._plain_optimizer.zero_grad()
        end = time.perf_counter()
        self._updating.append(end - middle)
        self._plain_steps.append(end - start)


def _measure_link(barrier: Callable[[], object]) -> tuple[float, float]:
    """Bytes a second that a rank sends while it gets as many, and its CPU seconds a byte."""
    import torch
    import torch.distributed as dist

    sent, received = torch.ones(_LINK_BYTES // 4), torch.ones(_LINK_BYTES // 4)
    peer = dist.get_world_size() - 1 - dist.get_rank()

    def exchange() -> None:
        for work in (dist.irecv(received, peer), dist.isend(sent, peer)):
            if work is not None:
                work.wait()

    exchange()
    barrier()
    start, cpu = time.perf_counter(), time.process_time()
    for _ in range(_LINK_ROUNDS):
        exchange()
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
    num_bytes = _LINK_BYTES * _LINK_ROUNDS
    return num_bytes / seconds, cpu_seconds / num_bytes


def _nothing() -> None:
    return None
