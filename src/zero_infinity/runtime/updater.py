"""Updates parameters while the model computes.

A job updates one unit: for each chunk it waits for the chunk's record, calls the user's optimizer on it in place, and
lets it go home. Jobs run in the order in which they were submitted. The blocks of a job were accessed (and so fetched)
by the thread that submitted it, in the order in which the job uses them; here they are only waited for, changed and let
go. The worker never touches an `nn.Parameter`.
"""

from __future__ import annotations

import queue
import threading
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from zero_infinity.errors import EngineClosedError, again
from zero_infinity.interrupts import through
from zero_infinity.runtime.record import MASTER, Chunk, Record, Segment
from zero_infinity.runtime.unit import ManagedParameter
from zero_infinity.runtime.update_rule import Hyperparameters, Scalars, UpdateRule, copy_scalars, split_state
from zero_infinity.store.block import Block
from zero_infinity.store.blocks import BlockStore


@dataclass(frozen=True, slots=True)
class Job:
    """One unit's update. A gradient is either here, flat and whole, or in the chunks' gradient blocks."""

    record: Record
    gradients: dict[ManagedParameter, torch.Tensor | None]
    hyperparameters: dict[ManagedParameter, Hyperparameters]
    rule: UpdateRule
    factors: tuple[torch.Tensor, ...]  # what gradients are multiplied by first, one after the other (unscale, clip)
    done: Callable[[], None]

    @property
    def in_blocks(self) -> bool:
        """Whether gradients have to be read from blocks."""
        return any(gradient is None for gradient in self.gradients.values())


class _Progress:
    """How far a job has come."""

    __slots__ = ("job", "next_chunk", "states")

    def __init__(self, job: Job) -> None:
        self.job = job
        self.next_chunk = 0
        self.states: list[tuple[ManagedParameter, tuple[str, ...], Scalars]] = []


class Updater:
    """Runs jobs in their order. An error in a job is kept, and raised by whoever submits or waits next.

    On a CPU that also computes the model (`shares_cores`), chunks whose bytes are there already are updated at once by
    the thread that submits them, on all its cores: a second thread would only take turns with the model's own kernels
    on the same cores. What has to wait for a drive is left to the worker, which uses one core.
    """

    def __init__(self, store: BlockStore, *, shares_cores: bool) -> None:
        self._store = store
        self._shares_cores = shares_cores
        self._jobs: queue.SimpleQueue[_Progress | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._num_pending = 0
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="zero-infinity-update", daemon=True)
        num_threads = torch.get_num_threads()
        self._started = threading.Event()
        self._thread.start()
        self._started.wait()
        # What the worker has set for itself is what threads to come would start with.
        torch.set_num_threads(num_threads)

    def submit(self, job: Job) -> None:
        """Run the job, or leave it to the worker."""
        self.check()
        progress = _Progress(job)
        if self._shares_cores and not self._num_pending:
            try:
                if self._run(progress, wait=False):
                    return
            except BaseException as error:
                self._fail(again(error))
                raise
        with self._changed:
            self._num_pending += 1
        self._jobs.put(progress)

    def check(self) -> None:
        """Raise what a job failed with."""
        if self._error is not None:
            raise again(self._error)

    @property
    def num_pending(self) -> int:
        return self._num_pending

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` holds (looked at after every job) or no job is left."""
        with self._changed:
            while self._error is None and self._num_pending and not condition():
                with through():
                    self._changed.wait()
        self.check()

    def drain(self) -> None:
        """Wait until every job is done."""
        self.wait_until(lambda: False)

    def close(self) -> None:
        """End the thread after the job that runs now; what waits is dropped. Idempotent."""
        if self._error is None:
            self._error = EngineClosedError("the updater is closed")
        self._jobs.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _work(self) -> None:
        torch.set_num_threads(1)
        self._started.set()
        while (progress := self._jobs.get()) is not None:
            if self._error is None:
                try:
                    self._run(progress, wait=True)
                except BaseException as error:  # noqa: BLE001 - handed to the training thread by check()
                    # Without its frames, which hold the model for as long as the error lives.
                    error.add_note("in the update worker:\n" + "".join(traceback.format_tb(error.__traceback__)))
                    self._fail(error.with_traceback(None))
            with self._changed:
                self._num_pending -= 1
                self._changed.notify_all()
            del progress

    def _fail(self, error: BaseException) -> None:
        self._error = error
        self._store.fail(error)

    def _run(self, progress: _Progress, *, wait: bool) -> bool:
        """Go on with a job: to its end, or (`wait` is False) as far as goes without waiting. True: it is done."""
        job = progress.job
        record = job.record
        with torch.no_grad():
            while progress.next_chunk < len(record.chunks):
                chunk = record.chunks[progress.next_chunk]
                if not wait and not all(self._store.changeable(block) for block in self._blocks(job, chunk)):
                    return False
                progress.states += self._update(job, chunk)
                progress.next_chunk += 1
        self._store.unhold(record.unit.the_block(), dirty=True)
        for parameter, names, scalars in progress.states:
            record.started[parameter] = names
            record.scalars[parameter] = scalars
            parameter.edited = False
        job.done()
        self._store.heap.look()  # optimizers make temporaries
        return True

    def _blocks(self, job: Job, chunk: Chunk) -> list[Block]:
        blocks = (job.record.unit.the_block(), chunk.gradient if job.in_blocks else None, chunk.record)
        return [block for block in blocks if block is not None]

    def _update(self, job: Job, chunk: Chunk) -> list[tuple[ManagedParameter, tuple[str, ...], Scalars]]:
        """Update one chunk; returns the names and the new scalars of each state (the old serve the other chunks)."""
        record = job.record
        held = self._blocks(job, chunk)[1:]
        updated = []
        try:
            with ExitStack() as stack:
                values = stack.enter_context(self._store.changing(record.unit.the_block())).view(record.unit.dtype)
                states = stack.enter_context(self._store.changing(chunk.record)) if chunk.record else None
                retained = stack.enter_context(self._store.changing(chunk.gradient)) if job.in_blocks else None
                for segment in chunk.segments:
                    if segment.parameter in job.gradients:
                        gradient = _gradient_of(job, segment, retained)
                        new = self._update_segment(job, segment, chunk, values, states, gradient)
                        updated.append((segment.parameter, *new))
        finally:
            for block in held:
                self._store.unhold(block, dirty=block is chunk.record)
        return updated

    def _update_segment(
        self,
        job: Job,
        segment: Segment,
        chunk: Chunk,
        values: torch.Tensor,
        states: torch.Tensor | None,
        gradient: torch.Tensor,
    ) -> tuple[tuple[str, ...], Scalars]:
        record, parameter = job.record, segment.parameter
        first = parameter.offset + segment.start
        stored = values[first : first + segment.stop - segment.start]
        slots = {
            name: chunk.slot(states, name, record.dtype)[segment.offset : segment.offset + len(stored)]
            for name in ((MASTER,) if record.has_master else ()) + record.state_names[parameter]
            if states is not None
        }
        master = slots.pop(MASTER, stored)
        if record.has_master and parameter.edited:
            # Only what the user really changed: the rest of the master copy has more bits than what is stored.
            torch.where(master.to(stored.dtype) == stored, master, stored.to(master.dtype), out=master)
        gradient = gradient.to(record.dtype)
        for factor in job.factors:
            gradient.mul_(factor)
        known = parameter in record.started
        result = job.rule.apply(
            master,
            gradient,
            slots if known else {},
            copy_scalars(record.scalars[parameter]) if known else {},
            job.hyperparameters[parameter],
        )
        tensors, scalars = split_state(result, master.shape)
        for name, tensor in tensors.items():
            if tensor.data_ptr() != slots[name].data_ptr():
                slots[name].copy_(tensor)
        if record.has_master:
            stored.copy_(master)
        return tuple(result), scalars


def _gradient_of(job: Job, segment: Segment, retained: torch.Tensor | None) -> torch.Tensor:
    whole = job.gradients[segment.parameter]
    if whole is not None:
        return whole[segment.start : segment.stop]
    if retained is None:
        raise RuntimeError(f"no gradient of {segment.parameter.name!r} in its block")
    flat = retained.view(job.record.dtype)
    return flat[segment.offset : segment.offset + segment.stop - segment.start]
