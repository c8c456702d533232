"""Updates parameters while the model computes.

A job works on one unit: for each chunk it waits for the chunk's blocks, changes them in place, and lets them go home.
Jobs run in the order in which they were submitted. The blocks of a job were accessed (and so fetched) by the thread
that submitted it, in the order in which the job uses them; here they are only waited for, changed and let go. The
worker never touches an `nn.Parameter`.
"""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections.abc import Callable
from typing import Protocol

import torch

from zero_infinity.errors import EngineClosedError, again
from zero_infinity.interrupts import through
from zero_infinity.runtime.record import Chunk
from zero_infinity.runtime.recording import Recording
from zero_infinity.store.block import Block
from zero_infinity.store.blocks import BlockStore


class Job(Protocol):
    """Work on the chunks of one unit, in their order."""

    @property
    def is_ready(self) -> bool:
        """Whether its gradients are there."""

    @property
    def chunks(self) -> list[Chunk]: ...

    def blocks(self, chunk: Chunk) -> list[Block]:
        """What it changes or reads for `chunk`."""

    def apply(self, chunk: Chunk, store: BlockStore) -> None:
        """Work on one chunk, and let its blocks go."""

    def finish(self, store: BlockStore) -> None:
        """All chunks are done."""


class _Progress:
    """How far a job has come."""

    __slots__ = ("job", "next_chunk")

    def __init__(self, job: Job) -> None:
        self.job = job
        self.next_chunk = 0


class Updater:
    """Runs jobs in their order. An error in a job is kept, and raised by whoever submits or waits next.

    On a CPU that also computes the model (`shares_cores`), chunks whose bytes are there already are updated at once by
    the thread that submits them, on all its cores: a second thread would only take turns with the model's own kernels
    on the same cores. What has to wait for a drive is left to the worker, which uses one core.
    """

    def __init__(self, store: BlockStore, *, shares_cores: bool, recording: Recording | None = None) -> None:
        self._store = store
        self._recording = recording
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
            start = time.perf_counter()
            try:
                if self._run(progress, wait=False):
                    return
            except BaseException as error:
                self._fail(again(error))
                raise
            finally:
                if self._recording is not None:
                    self._recording.updated(start)
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
            # Whoever waits for a block that a dropped job was to change has to know, or waits for ever.
            self._fail(EngineClosedError("the updater is closed"))
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
        if not wait and not job.is_ready:
            return False
        with torch.no_grad():
            while progress.next_chunk < len(job.chunks):
                chunk = job.chunks[progress.next_chunk]
                if not wait and not all(self._store.changeable(block) for block in job.blocks(chunk)):
                    return False
                job.apply(chunk, self._store)
                progress.next_chunk += 1
        job.finish(self._store)
        self._store.heap.look()  # optimizers make temporaries
        return True
