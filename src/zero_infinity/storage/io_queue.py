"""The I/O scheduler: every unfinished transfer, and the rules by which requests are ordered.

Owns transfers from submission to completion. It moves no bytes and starts no threads: `IOWorkers` takes requests from
the queue and reports their outcome.

Rules:

- Requests run by priority, then in order of submission. A transfer is split into requests up front, but they are taken
  one at a time, so a demanded read overtakes the rest of a long write-back.
- A transfer waits for every earlier unfinished transfer that overlaps it, unless both are reads. The earlier transfers
  inherit its priority. Dependencies are on every overlapping transfer, not only on the last of a chain, so aborting one
  releases its dependents without following the chain.
- The first failure stops the engine: requests that were not taken fail. Running requests finish, because the kernel is
  still writing into their memory. A transfer is finished only when none of its requests is at the device.

One lock protects everything and is held for microseconds. Callbacks are never called under it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from queue import SimpleQueue
from time import perf_counter

from zero_infinity.errors import EngineClosedError
from zero_infinity.storage.io_types import Direction, IOCounters, LatencyHistogram, Priority
from zero_infinity.storage.range_index import RangeIndex

_NO_MEMORY = memoryview(b"")


@dataclass(slots=True, eq=False)
class IOTransfer:
    """The state of one transfer, which is split into requests. Fields change only under the queue's lock."""

    direction: Direction
    memory: memoryview  # an empty one when finished, so that a ticket keeps no buffer alive
    offset: int
    priority: Priority
    requests: list[tuple[int, int]]  # (offset, length), in order
    name: str = ""  # for the trace
    stop: int = field(init=False)
    next_request: int = 0
    in_flight: int = 0
    sequence: int = 0
    blockers: list[IOTransfer] = field(default_factory=list)
    num_blockers: int = 0
    dependents: list[IOTransfer] = field(default_factory=list)
    error: BaseException | None = None
    finished: bool = False  # none of its requests is or will be at the device
    completed: bool = False  # finished, and its callbacks have run: what waiters wait for
    callbacks: list[Callable[[BaseException | None], None]] = field(default_factory=list)
    event: threading.Event | None = None  # created by the first waiter

    def __post_init__(self) -> None:
        self.stop = self.offset + sum(length for _, length in self.requests)


class IOQueue:
    """Unfinished transfers in the order in which workers take their requests."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._heap: list[tuple[int, int, IOTransfer]] = []
        self._ranges: RangeIndex[IOTransfer] = RangeIndex()
        self._unfinished: dict[int, IOTransfer] = {}
        self._num_submitted = 0
        self._closed = False
        self._failure: BaseException | None = None
        # A sleeping worker takes one token. SimpleQueue.put is reentrant, so a finalizer may call it even while it
        # interrupts this class (a Condition is not), and it costs a third of a Condition.
        self._tokens: SimpleQueue[None] = SimpleQueue()
        self._num_asleep = 0
        self._abandoned = False
        self._num_running = 0
        self._busy_since = 0.0
        self._busy_seconds = 0.0
        self._num_bytes = {Direction.READ: 0, Direction.WRITE: 0}
        self._num_requests = {Direction.READ: 0, Direction.WRITE: 0}
        self._latency = {Direction.READ: LatencyHistogram(), Direction.WRITE: LatencyHistogram()}

    def check_open(self) -> None:
        """Raise `EngineClosedError` if the engine no longer accepts transfers."""
        if self._closed or self._failure is not None:
            raise self._closed_error()

    def submit(self, transfer: IOTransfer) -> None:
        with self.lock:
            self.check_open()
            transfer.sequence = self._num_submitted
            self._num_submitted += 1
            for other in self._ranges.overlapping(transfer.offset, transfer.stop):
                if transfer.direction is other.direction is Direction.READ:
                    continue
                other.dependents.append(transfer)
                transfer.blockers.append(other)
                self._raise(other, transfer.priority)
            transfer.num_blockers = len(transfer.blockers)
            self._ranges.add(transfer.offset, transfer.stop, transfer.sequence, transfer)
            self._unfinished[transfer.sequence] = transfer
            if not transfer.num_blockers:
                self._make_ready(transfer)

    def take(self) -> tuple[IOTransfer, int] | None:
        """The next request, as a transfer and an index into its requests. Blocks; None when the worker should exit."""
        while True:
            with self.lock:
                taken = self._pick()
                if taken is not None or self._closed or self._abandoned:
                    return taken
                self._num_asleep += 1
            self._tokens.get()

    def complete(
        self, transfer: IOTransfer, index: int, seconds: float, error: BaseException | None
    ) -> list[IOTransfer]:
        """Record the outcome of a request; return the transfers that finished, whose callbacks the caller runs."""
        finished: list[IOTransfer] = []
        with self.lock:
            self._num_running -= 1
            if self._num_running == 0:
                self._busy_seconds += perf_counter() - self._busy_since
            transfer.in_flight -= 1
            if error is None:
                self._num_bytes[transfer.direction] += transfer.requests[index][1]
                self._num_requests[transfer.direction] += 1
                self._latency[transfer.direction].add(seconds)
            else:
                transfer.error = error
                self._fail(error, finished)
            if transfer.in_flight == 0 and transfer.next_request == len(transfer.requests) and not transfer.finished:
                self._finish(transfer, finished)
        return finished

    def fail(self, error: BaseException) -> list[IOTransfer]:
        """Stop the engine because of `error`; return the transfers that finished, whose callbacks the caller runs."""
        finished: list[IOTransfer] = []
        with self.lock:
            self._fail(error, finished)
        return finished

    def close(self) -> list[IOTransfer]:
        """Let started transfers finish and fail the rest; return the transfers that finished, as `complete` does."""
        finished: list[IOTransfer] = []
        with self.lock:
            self._closed = True
            for transfer in list(self._unfinished.values()):
                if not transfer.next_request:
                    self._abort(transfer, self._closed_error(), finished)
            self._wake(self._num_asleep)
        return finished

    def abandon(self, num_workers: int) -> None:
        """Let workers exit once nothing is queued.

        Takes no lock: a finalizer calls this and may interrupt any code, including code that holds the lock.
        """
        self._abandoned = True
        for _ in range(num_workers):
            self._tokens.put(None)

    def raise_priority(self, transfer: IOTransfer, priority: Priority) -> None:
        with self.lock:
            self._raise(transfer, priority)

    def counters(self) -> IOCounters:
        with self.lock:
            busy = self._busy_seconds + (perf_counter() - self._busy_since if self._num_running else 0.0)
            return IOCounters(
                bytes_read=self._num_bytes[Direction.READ],
                bytes_written=self._num_bytes[Direction.WRITE],
                read_requests=self._num_requests[Direction.READ],
                write_requests=self._num_requests[Direction.WRITE],
                busy_seconds=busy,
                read_latency=self._latency[Direction.READ].percentiles(),
                write_latency=self._latency[Direction.WRITE].percentiles(),
            )

    # The lock is held in everything below.

    def _pick(self) -> tuple[IOTransfer, int] | None:
        while self._heap:
            _, _, transfer = self._heap[0]
            index = transfer.next_request
            if index == len(transfer.requests):
                heappop(self._heap)  # all taken, aborted, or a stale entry from before its priority was raised
                continue
            transfer.next_request = index + 1
            transfer.in_flight += 1
            if self._num_running == 0:
                self._busy_since = perf_counter()
            self._num_running += 1
            return transfer, index
        return None

    def _make_ready(self, transfer: IOTransfer) -> None:
        heappush(self._heap, (transfer.priority, transfer.sequence, transfer))
        self._wake(len(transfer.requests))

    def _wake(self, num_workers: int) -> None:
        for _ in range(min(num_workers, self._num_asleep)):
            self._num_asleep -= 1
            self._tokens.put(None)

    def _raise(self, transfer: IOTransfer, priority: Priority) -> None:
        """Give `transfer`, and everything it waits for, at least `priority`."""
        stack = [transfer]
        while stack:
            transfer = stack.pop()
            # A transfer that already has the priority has passed it on to its blockers.
            if transfer.finished or transfer.priority <= priority:
                continue
            transfer.priority = priority
            if transfer.num_blockers:
                stack.extend(transfer.blockers)
            else:
                heappush(self._heap, (priority, transfer.sequence, transfer))

    def _fail(self, error: BaseException, finished: list[IOTransfer]) -> None:
        if self._failure is None:
            self._failure = error
        for transfer in list(self._unfinished.values()):
            if transfer.next_request < len(transfer.requests):
                self._abort(transfer, self._closed_error(), finished)

    def _abort(self, transfer: IOTransfer, error: BaseException, finished: list[IOTransfer]) -> None:
        """Start no further request of `transfer`; it finishes when its requests at the device have returned."""
        transfer.next_request = len(transfer.requests)
        if transfer.error is None:
            transfer.error = error
        if transfer.in_flight == 0:
            self._finish(transfer, finished)

    def _finish(self, transfer: IOTransfer, finished: list[IOTransfer]) -> None:
        transfer.finished = True
        transfer.memory = _NO_MEMORY
        transfer.blockers = []
        self._ranges.remove(transfer.offset, transfer.stop, transfer.sequence)
        del self._unfinished[transfer.sequence]
        for dependent in transfer.dependents:
            dependent.num_blockers -= 1
            if dependent.num_blockers == 0 and not dependent.finished:
                dependent.blockers = []
                self._make_ready(dependent)
        transfer.dependents = []
        finished.append(transfer)

    def _closed_error(self) -> EngineClosedError:
        if self._failure is None:
            return EngineClosedError("the I/O engine is closed")
        # The text of an OSError would repeat errno and path, which are in the message already.
        reason = (isinstance(self._failure, OSError) and self._failure.strerror) or repr(self._failure)
        error = EngineClosedError(f"the I/O engine has stopped because of an earlier failure: {reason}")
        error.__cause__ = self._failure
        return error
