"""Runs optimizer updates in submission order, overlapped with the model's computation.

A job updates one unit: for each chunk it waits for the chunk's blocks, changes them in place and releases them. Jobs
run in submission order. The submitting thread has accessed (and so fetched) the blocks, in the order in which the job
uses them; here they are only waited for, changed and released. A job never touches an `nn.Parameter`.
`compute_thread.py` decides when the compute thread runs jobs and when the worker does.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch

from zero_infinity.disable_modes import ordinary_tensors
from zero_infinity.errors import EngineClosedError, again
from zero_infinity.interrupts import through
from zero_infinity.one_core_thread import cores, use_one_core
from zero_infinity.run_trace import RunTrace
from zero_infinity.storage.block import Block
from zero_infinity.storage.block_store import BlockStore

# How long the compute thread may leave a ready update undone before the worker runs it: longer than most operations
# between two parameter uses.
_PATIENCE_SECONDS = 0.25


Chunk = TypeVar("Chunk")


class UpdateJob(Protocol[Chunk]):
    """An update of the chunks of one unit, in order."""

    @property
    def is_ready(self) -> bool:
        """True if its gradients are available."""

    @property
    def chunks(self) -> Sequence[Chunk]: ...

    def blocks(self, chunk: Chunk) -> list[Block]:
        """Return the blocks that it reads or changes for `chunk`."""

    def apply(self, chunk: Chunk, store: BlockStore) -> None:
        """Update one chunk and release its blocks."""

    def finish(self, store: BlockStore) -> None:
        """All chunks are done."""


class _Progress:
    """How far a job has progressed."""

    __slots__ = ("is_shared", "job", "next_chunk", "num_threads")

    def __init__(self, job: UpdateJob[Any], *, is_shared: bool, num_threads: int) -> None:
        self.job = job
        self.is_shared = is_shared  # with the compute thread
        self.num_threads = num_threads
        self.next_chunk = 0


class UpdateWorker:
    """Runs jobs in order. A job's error is kept and raised by the next submit or wait.

    With an accelerator, the worker thread runs all jobs, on all cores. On a CPU that also computes the model, a second
    thread would compete with the model's kernels for cores, and a kernel is as slow as its slowest core. So there the
    compute thread runs ready jobs whenever it passes by (`help`), on all cores; the worker runs them, on one core,
    while the compute thread waits (`take_over`) or has not passed by for a while.
    """

    def __init__(self, store: BlockStore, run_trace: RunTrace | None = None) -> None:
        self._store = store
        self._run_trace = run_trace
        lock = threading.RLock()  # a signal handler on the same thread may close the engine inside the lock
        self._changed = threading.Condition(lock)  # notified of every finished job and chunk
        # Separate, because waking the worker takes a core from the model: notified only when the worker has work.
        self._calling = threading.Condition(lock)
        self._is_asleep = False  # the worker sleeps until it is notified
        self._jobs: deque[_Progress] = deque()
        self._is_running = False  # a thread is running the first job
        self._is_away = False  # the compute thread is not passing by
        self._num_visits = 0  # of the compute thread
        self._is_closed = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="zero-infinity-update", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------ the compute thread

    def submit(self, job: UpdateJob[Any], *, is_shared: bool, num_threads: int = 1) -> None:
        """Run the job now or queue it. `is_shared`: the compute thread may run it as well. The worker uses
        `num_threads`."""
        self.check()
        with self._changed:
            self._jobs.append(_Progress(job, is_shared=is_shared, num_threads=num_threads))
            if not is_shared:
                self._calling.notify()
        self.help()

    def help(self) -> None:
        """The compute thread passes by: run the updates that are ready."""
        if not self._jobs or not self._begin():
            return
        start = time.perf_counter()
        try:
            with ordinary_tensors():
                while self._go_on(wait=False):
                    pass
        except BaseException as error:
            self._fail(again(error))
            raise
        finally:
            self._end()
            if self._run_trace is not None:
                self._run_trace.updated(start)

    def take_over(self) -> None:
        """The compute thread is about to wait: the worker may run jobs until it passes by again."""
        if self._jobs:
            with self._changed:
                self._is_away = True
                self._calling.notify()

    def check(self) -> None:
        """Raise the error of a failed job."""
        if self._error is not None:
            raise again(self._error)

    @property
    def num_pending(self) -> int:
        return len(self._jobs)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` holds (checked after every job) or no job is left."""
        self.take_over()
        with self._changed:
            while self._error is None and self._jobs and not condition():
                with through():
                    self._changed.wait()
        self.check()

    def drain(self) -> None:
        """Wait until every job is done."""
        self.wait_until(lambda: False)

    def close(self) -> None:
        """End the thread after its current chunk; queued jobs are dropped. Idempotent."""
        if self._error is None:
            # A thread that waits for a block of a dropped job must get an error, or it would wait forever.
            self._fail(EngineClosedError("the updater is closed"))
        with self._changed:
            self._is_closed = True
            self._jobs.clear()
            self._calling.notify()
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # ------------------------------------------------------------------ the worker

    def _work(self) -> None:
        use_one_core()
        while self._is_needed():
            try:
                self._go_on(wait=True)
            except BaseException as error:  # noqa: BLE001 - handed to the compute thread by check()
                # Without its frames, which would keep the model alive as long as the error.
                error.add_note("in the update worker:\n" + "".join(traceback.format_tb(error.__traceback__)))
                self._fail(error.with_traceback(None))
            finally:
                self._end()

    def _is_needed(self) -> bool:
        """Wait until there is a chunk for the worker to run; False once the worker is closed."""
        with self._changed:
            while not self._is_closed:
                num_visits = self._num_visits
                idle = bool(self._jobs) and not self._is_running
                if idle and (self._is_away or not self._jobs[0].is_shared):
                    break
                # Idle: give the compute thread time to pass by. Busy: the running thread notifies if work is left.
                self._is_asleep = not idle
                called = self._calling.wait(_PATIENCE_SECONDS if idle else None)
                self._is_asleep = False
                if idle and not called and not self._is_running and num_visits == self._num_visits:
                    self._is_away = True
            self._is_running = not self._is_closed
            return self._is_running

    # ------------------------------------------------------------------ both threads

    def _begin(self) -> bool:
        """Record a visit of the compute thread; True if it may run the first job."""
        with self._changed:
            self._is_away = False
            self._num_visits += 1
            if self._is_running or self._error is not None or not self._jobs or not self._jobs[0].is_shared:
                return False
            self._is_running = True
            return True

    def _end(self) -> None:
        with self._changed:
            self._is_running = False
            if self._jobs and self._is_asleep:
                self._calling.notify()
            self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = error
            self._jobs.clear()
        self._store.fail(error)

    def _go_on(self, *, wait: bool) -> bool:
        """Run the next chunk of the first job, unless that would block and `wait` is False. True if a chunk was run."""
        with self._changed:
            if not self._jobs:
                return False  # closed in the meantime
            progress = self._jobs[0]
        job = progress.job
        if progress.next_chunk < len(job.chunks):
            chunk = job.chunks[progress.next_chunk]
            if not wait and not (job.is_ready and all(self._store.changeable(block) for block in job.blocks(chunk))):
                return False
            with torch.no_grad(), cores(progress.num_threads):
                job.apply(chunk, self._store)
            progress.next_chunk += 1
        if progress.next_chunk == len(job.chunks):
            job.finish(self._store)
            self._store.trim_heap_if_grown()  # optimizers allocate temporaries
            with self._changed:
                if self._jobs:
                    self._jobs.popleft()
                self._changed.notify_all()
        return True
