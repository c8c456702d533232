"""Runs one schedule, and says what was wrong: the judge.

Right is: every rank has the plain training's weights, bit for bit, or raises an error of this package in bounded time,
which names a killed rank; without a fault there is no error. A checkpoint that is there has the right weights. When the
engines are closed, no thread, no buffer and no file is left.
"""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import safetensors.torch
import torch

from benchmarks.simulation.device import FileFaults, SimulatedDevice
from benchmarks.simulation.primitives import installed, namespaces
from benchmarks.simulation.schedule import Bug, Fault, Schedule
from benchmarks.simulation.scheduler import Scheduler
from benchmarks.simulation.training import NUM_STEPS, Prepared, Weights, plain
from benchmarks.simulation.wires import TIMEOUT, Network, SimulatedTransport, Store, delays
from zero_infinity.checkpoint import checkpoint_directory, file_io
from zero_infinity.checkpoint.checkpoint_directory import CheckpointDraft, checkpoints_in
from zero_infinity.checkpoint.manifest import read
from zero_infinity.comm.process_group import RankGroup
from zero_infinity.engine_parts import EngineParts
from zero_infinity.errors import EngineClosedError, RankError, StorageError
from zero_infinity.params import parameter_store
from zero_infinity.policy import chunk_size, homes

# Virtual seconds: how long ranks may live on after a kill, and when a simulation is given up.
_LIVE_ON_SECONDS = 20.0
_LIMIT_SECONDS = 4 * TIMEOUT.total_seconds()
_LIMIT_TURNS = 200_000
# Garbage of cycles is collected between simulations only: within one it would be a matter of what ran before.
_SEEDS_PER_COLLECTION = 16


@dataclass(slots=True)
class Outcome:
    """What came of a schedule."""

    schedule: Schedule
    wrong: list[str] = field(default_factory=list)
    errors: dict[int, str] = field(default_factory=dict)  # by rank
    num_turns: int = 0
    seconds: float = 0.0  # virtual
    is_killed: bool = False

    @property
    def trail(self) -> tuple[int, float, tuple[str, ...]]:
        """The same in every run of the same seed."""
        return self.num_turns, self.seconds, (*self.wrong, *self.errors.values())


class Simulation:
    """One schedule."""

    def __init__(self, schedule: Schedule, directory: Path) -> None:
        self._schedule = schedule
        self._saved = directory / "saved"
        self._outcome = Outcome(schedule)
        seed, training = schedule.seed, schedule.training
        self._scheduler = Scheduler(
            seed, preemption=schedule.preemption, limit_seconds=_LIMIT_SECONDS, limit_turns=_LIMIT_TURNS
        )
        links = schedule.links
        self._network = Network(self._scheduler, training.num_ranks, links, seed)
        self._store = Store(self._network, is_in_first=schedule.store_in_first)
        self._files = FileFaults(self._scheduler, list(schedule.drives))
        self._devices: list[SimulatedDevice] = []
        self._pools: list[tuple[int, Any]] = []
        self._ended: dict[int, float] = {}
        self._killed_at: float | None = None
        self._results: dict[int, Weights] = {}
        if schedule.fault is Fault.KILL:
            self._scheduler.on_turn = self._maybe_kill

    def run(self) -> Outcome:
        expected = plain(self._schedule.training)
        replacements = namespaces(self._scheduler)
        with installed(replacements, "zero_infinity"), _files(self._files, self._scheduler, self._schedule.bug):
            self._scheduler.run([self._main(rank) for rank in range(self._schedule.training.num_ranks)])
        for store in list(parameter_store._alive):  # of killed ranks: nothing is closed with their processes
            store.closers.clear()
        self._judge(expected)
        self._outcome.num_turns, self._outcome.seconds = self._scheduler.num_turns, self._scheduler.now
        return self._outcome

    # ------------------------------------------------------------------ one rank

    def _main(self, rank: int) -> Callable[[], None]:
        def main() -> None:
            torch.set_grad_enabled(True)
            parts = EngineParts(
                make_device=lambda _: self._make_device(rank),
                find_ranks=lambda _, make_traffic: self._find_ranks(rank, make_traffic),
            )
            prepared = None
            try:
                prepared = Prepared(self._schedule.training, rank, parts, self._saved)
                self._results[rank] = prepared.run(in_background=self._schedule.in_background)
            except (StorageError, RankError, EngineClosedError) as error:
                self._outcome.errors[rank] = f"{type(error).__name__}: {error}"
            except Exception as error:  # noqa: BLE001 - this is what is looked for
                self._outcome.errors[rank] = f"{type(error).__name__}: {error}"
                self._outcome.wrong.append(f"rank {rank}: not the right kind of error\n{traceback.format_exc()}")
            if prepared is not None:
                store = api_store(prepared.model)
                store.close()  # as at the end of its process
                self._pools.append((rank, store.store.pool))
            self._ended[rank] = self._scheduler.now
            self._network.lose(rank)

        return main

    def _make_device(self, rank: int) -> SimulatedDevice:
        schedule = self._schedule
        delay = delays(f"{schedule.seed} {rank}", schedule.drive_delay)
        self._devices.append(SimulatedDevice(self._scheduler, schedule.drives[rank], delay))
        return self._devices[-1]

    def _find_ranks(self, rank: int, make_traffic: Callable[[], Any]) -> RankGroup | None:
        if self._schedule.training.num_ranks == 1:
            return None
        return RankGroup(SimulatedTransport(self._network, self._store, rank), make_traffic())

    def _maybe_kill(self, turn: int) -> None:
        victim = self._schedule.victim
        if turn >= self._schedule.kill_at and self._killed_at is None and victim not in self._ended:
            self._killed_at = self._scheduler.now
            self._outcome.is_killed = True
            self._scheduler.kill(victim)
            self._network.lose(victim)

    # ------------------------------------------------------------------ the judge

    def _judge(self, expected: list[Weights]) -> None:
        wrong, schedule = self._outcome.wrong, self._schedule
        if self._scheduler.stuck is not None:
            wrong.append(self._scheduler.stuck)
            return
        wrong += self._network.violations
        for rank, weights in self._results.items():
            wrong += [f"rank {rank}: {name} is wrong" for name in _differences(weights, expected[NUM_STEPS])]
        for rank in range(schedule.training.num_ranks):
            if not (self._outcome.is_killed and rank == schedule.victim):
                self._judge_end(rank)
        self._judge_checkpoints(expected)

    def _judge_end(self, rank: int) -> None:
        wrong, schedule, error = self._outcome.wrong, self._schedule, self._outcome.errors.get(rank)
        if rank not in self._results and error is None:
            wrong.append(f"rank {rank} has neither weights nor an error")
        if error is not None and schedule.fault is Fault.NOTHING:
            wrong.append(f"rank {rank} fails without a fault: {error}")
        if self._killed_at is not None:
            seconds = self._ended[rank] - self._killed_at
            if seconds > _LIVE_ON_SECONDS:
                wrong.append(f"rank {rank} lived on for {seconds:.1f} s")
            if error is not None and f"rank {schedule.victim} " not in error:
                wrong.append(f"rank {rank} does not name rank {schedule.victim}: {error}")
        if left := self._scheduler.alive(rank):
            wrong.append(f"rank {rank} leaves threads: {left}")
        for owner, pool in self._pools:
            if owner == rank and (held := list(pool.holders())):
                wrong.append(f"rank {rank} leaves memory in use: {held}")

    def _judge_checkpoints(self, expected: list[Weights]) -> None:
        if not self._saved.is_dir():
            return
        for folder, (step, _) in checkpoints_in(self._saved):
            manifest = read(folder)
            found: Weights = {}
            for name in manifest.files:
                if name.startswith("model") and name.endswith(".safetensors"):
                    found |= safetensors.torch.load_file(folder / name)
            differences = _differences(found, expected[step])
            self._outcome.wrong += [f"checkpoint {folder.name}: {name} is wrong" for name in differences]
        saves = [path.name for path in self._saved.iterdir() if path.name.startswith(".")]
        if saves and not self._outcome.is_killed:
            self._outcome.wrong.append(f"left behind: {saves}")


def api_store(model: Any) -> parameter_store.ParameterStore:
    from zero_infinity.api import engine_of

    return engine_of(model).parameter_store


def _differences(found: Weights, expected: Weights) -> list[str]:
    if found.keys() != expected.keys():
        return [f"{sorted(found)} instead of {sorted(expected)}:"]
    return [name for name, value in expected.items() if not torch.equal(found[name], value)]


class _files:  # noqa: N801 - a context manager reads like a function
    """Inside, checkpoints are written with faults; and a killed rank removes nothing."""

    def __init__(self, faults: FileFaults, scheduler: Scheduler, bug: Bug | None) -> None:
        self._faults, self._scheduler, self._bug = faults, scheduler, bug

    def __enter__(self) -> None:
        self._before = (CheckpointDraft.discard, file_io.OpenFile.sync)
        namespace = self._faults.namespace()
        cast(Any, file_io).os = cast(Any, checkpoint_directory).os = namespace
        discard, sync, scheduler = CheckpointDraft.discard, file_io.OpenFile.sync, self._scheduler

        def discard_if_alive(draft: CheckpointDraft) -> None:
            if scheduler.task().is_killed:
                draft._unlock()
            else:
                discard(draft)

        def sync_and_ignore(file: file_io.OpenFile) -> None:
            with suppress(OSError):
                sync(file)

        cast(Any, CheckpointDraft).discard = discard_if_alive
        if self._bug is Bug.IGNORED_FSYNC:
            cast(Any, file_io.OpenFile).sync = sync_and_ignore

    def __exit__(self, *_: object) -> None:
        cast(Any, file_io).os = cast(Any, checkpoint_directory).os = os
        cast(Any, CheckpointDraft).discard, cast(Any, file_io.OpenFile).sync = self._before


def set_up() -> None:
    """For the whole process: small blocks move like large ones, and only the simulation decides what happens when."""
    homes._SMALL_BYTES = 0
    chunk_size.MIN_CHUNK_BYTES = 4096
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    gc.collect()
    gc.freeze()
    gc.disable()


def simulate(schedule: Schedule) -> Outcome:
    """Run one schedule in this process, which `set_up` has prepared."""
    root = Path("/dev/shm") if os.path.isdir("/dev/shm") else Path(tempfile.gettempdir())
    directory = Path(tempfile.mkdtemp(prefix="zero-infinity-simulation-", dir=root))
    try:
        return Simulation(schedule, directory).run()
    finally:
        shutil.rmtree(directory)
        if not schedule.seed % _SEEDS_PER_COLLECTION:
            gc.collect()
