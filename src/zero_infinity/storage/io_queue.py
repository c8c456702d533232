"""Which request goes next: the state of every unfinished transfer, and the rules of order and priority.

Owns the transfers from submission to completion. It moves no byte and starts no thread: workers take requests from
it and bring back the outcome (queue.py).

The rules:

- Requests are taken by priority, then in order of submission. A transfer is cut into requests up front but they are
  taken one by one, so a demanded read overtakes the rest of a long write-back.
- A transfer waits for every earlier, unfinished one that shares a byte with it, unless both are reads. The earlier
  ones inherit its priority. A dependency is on each overlapping transfer, not only on the last of a chain, so
  taking one back can release the later ones without a look at what it waited for itself.
- The first failure stops everything: what has not been taken yet fails, and what runs is let finish, because the
  kernel is still writing into its memory. A transfer is complete only when no request of it is at the device.

One lock guards it all, held for microseconds. Nothing that could run foreign code (callbacks) is called under it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from heapq import heappop, heappush
from queue import SimpleQueue
from time import perf_counter

from zero_infinity.errors import EngineClosedError
from zero_infinity.storage.io_types import Direction, IOCounters, Priority
from zero_infinity.storage.latency import LatencyHistogram
from zero_infinity.storage.range_index import RangeIndex


class IORequest:
    """The state of one transfer. Fields change only under the queue's lock."""

    __slots__ = (
        "blockers",
        "callbacks",
        "dependents",
        "direction",
        "error",
        "event",
        "finished",
        "in_flight",
        "memory",
        "name",
        "next_request",
        "num_blockers",
        "offset",
        "priority",
        "requests",
        "sequence",
        "settled",
        "stop",
    )

    def __init__(
        self,
        direction: Direction,
        memory: memoryview,
        offset: int,
        priority: Priority,
        requests: list[tuple[int, int]],
        name: str = "",
    ) -> None:
        self.name = name  # for a trace
        self.direction = direction
        self.memory: memoryview | None = memory  # dropped at the end, so that a ticket keeps no buffer alive
        self.offset = offset
        self.stop = offset + len(memory)
        self.priority = priority
        self.requests = requests  # (offset, length), in order
        self.next_request = 0
        self.in_flight = 0
        self.sequence = 0
        self.blockers: list[IORequest] = []
        self.num_blockers = 0
        self.dependents: list[IORequest] = []
        self.error: BaseException | None = None
        self.finished = False  # no request of it is, or will be, at the device
        self.settled = False  # and its callbacks have run: what waiters wait for
        self.callbacks: list[Callable[[BaseException | None], None]] = []
        self.event: threading.Event | None = None  # made by the first waiter


class IOQueue:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._heap: list[tuple[int, int, IORequest]] = []
        self._ranges: RangeIndex[IORequest] = RangeIndex()
        self._unfinished: dict[int, IORequest] = {}
        self._num_submitted = 0
        self._closed = False
        self._failure: BaseException | None = None
        # A sleeping worker takes one token. SimpleQueue.put is safe even in a finalizer that interrupts our own
        # code (a Condition is not), and costs a third of a Condition.
        self._tokens: SimpleQueue[None] = SimpleQueue()
        self._num_asleep = 0
        self._abandoned = False
        self._num_running = 0
        self._busy_since = 0.0
        self._busy_seconds = 0.0
        self._depth = 0
        self._max_depth = 0
        self._num_bytes = {Direction.READ: 0, Direction.WRITE: 0}
        self._num_requests = {Direction.READ: 0, Direction.WRITE: 0}
        self._latency = {Direction.READ: LatencyHistogram(), Direction.WRITE: LatencyHistogram()}

    def check_open(self) -> None:
        """Raise `EngineClosedError` if nothing can be submitted any more."""
        if self._closed or self._failure is not None:
            raise self._closed_error()

    def submit(self, transfer: IORequest) -> None:
        with self.lock:
            self.check_open()
            transfer.sequence = self._num_submitted
            self._num_submitted += 1
            both_read = transfer.direction is Direction.READ
            for other in self._ranges.overlapping(transfer.offset, transfer.stop):
                if both_read and other.direction is Direction.READ:
                    continue
                other.dependents.append(transfer)
                transfer.blockers.append(other)
                self._raise(other, transfer.priority)
            transfer.num_blockers = len(transfer.blockers)
            self._ranges.add(transfer.offset, transfer.stop, transfer.sequence, transfer)
            self._unfinished[transfer.sequence] = transfer
            self._depth += len(transfer.requests)
            self._max_depth = max(self._max_depth, self._depth)
            if not transfer.num_blockers:
                self._make_ready(transfer)

    def take(self) -> tuple[IORequest, int] | None:
        """The next request: a transfer and an index into its requests. Blocks; None when there will be none."""
        while True:
            with self.lock:
                taken = self._pick()
                if taken is not None or self._closed or self._abandoned:
                    return taken
                self._num_asleep += 1
            self._tokens.get()

    def complete(self, transfer: IORequest, index: int, seconds: float, error: BaseException | None) -> list[IORequest]:
        """Take back a request; return the transfers that have finished with it, for the caller to settle."""
        finished: list[IORequest] = []
        with self.lock:
            self._num_running -= 1
            if self._num_running == 0:
                self._busy_seconds += perf_counter() - self._busy_since
            self._depth -= 1
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

    def fail(self, error: BaseException) -> list[IORequest]:
        """Stop because of `error`; return the transfers that have finished with it, for the caller to settle."""
        finished: list[IORequest] = []
        with self.lock:
            self._fail(error, finished)
        return finished

    def cancel(self, transfer: IORequest, error: BaseException) -> bool:
        """Finish `transfer` with `error` if no request of it was taken. The caller settles it then."""
        with self.lock:
            if transfer.finished or transfer.next_request:
                return False
            self._abort(transfer, error, [])
        return True

    def close(self) -> list[IORequest]:
        """Let what has begun finish, fail the rest; return the transfers that have finished, for the caller."""
        finished: list[IORequest] = []
        with self.lock:
            self._closed = True
            for transfer in list(self._unfinished.values()):
                if not transfer.next_request:
                    self._abort(transfer, self._closed_error(), finished)
            self._wake(self._num_asleep)
        return finished

    def abandon(self, num_workers: int) -> None:
        """Let workers leave once nothing is queued. Takes no lock: called by a finalizer, which may interrupt any
        code, also ours."""
        self._abandoned = True
        for _ in range(num_workers):
            self._tokens.put(None)

    def raise_priority(self, transfer: IORequest, priority: Priority) -> None:
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
                queue_depth=self._depth,
                max_queue_depth=self._max_depth,
                read_latency=self._latency[Direction.READ].percentiles(),
                write_latency=self._latency[Direction.WRITE].percentiles(),
            )

    # From here on the lock is held.

    def _pick(self) -> tuple[IORequest, int] | None:
        while self._heap:
            _, _, transfer = self._heap[0]
            index = transfer.next_request
            if index == len(transfer.requests):
                heappop(self._heap)  # all taken; or cancelled; or an old entry of one that was raised
                continue
            transfer.next_request = index + 1
            transfer.in_flight += 1
            if self._num_running == 0:
                self._busy_since = perf_counter()
            self._num_running += 1
            return transfer, index
        return None

    def _make_ready(self, transfer: IORequest) -> None:
        heappush(self._heap, (transfer.priority, transfer.sequence, transfer))
        self._wake(len(transfer.requests))

    def _wake(self, num_workers: int) -> None:
        for _ in range(min(num_workers, self._num_asleep)):
            self._num_asleep -= 1
            self._tokens.put(None)

    def _raise(self, transfer: IORequest, priority: Priority) -> None:
        """Give `transfer`, and all that it waits for, at least `priority`."""
        stack = [transfer]
        while stack:
            transfer = stack.pop()
            # One that has the priority already has passed it on to its blockers.
            if transfer.finished or transfer.priority <= priority:
                continue
            transfer.priority = priority
            if transfer.num_blockers:
                stack.extend(transfer.blockers)
            else:
                heappush(self._heap, (priority, transfer.sequence, transfer))

    def _fail(self, error: BaseException, finished: list[IORequest]) -> None:
        if self._failure is None:
            self._failure = error
        for transfer in list(self._unfinished.values()):
            if transfer.next_request < len(transfer.requests):
                self._abort(transfer, self._closed_error(), finished)

    def _abort(self, transfer: IORequest, error: BaseException, finished: list[IORequest]) -> None:
        """Take no further request of `transfer`; it finishes when those at the device are back."""
        self._depth -= len(transfer.requests) - transfer.next_request
        transfer.next_request = len(transfer.requests)
        if transfer.error is None:
            transfer.error = error
        if transfer.in_flight == 0:
            self._finish(transfer, finished)

    def _finish(self, transfer: IORequest, finished: list[IORequest]) -> None:
        transfer.finished = True
        transfer.memory = None
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
        # An OSError's own text would repeat errno and path, which the message has already.
        reason = (isinstance(self._failure, OSError) and self._failure.strerror) or repr(self._failure)
        error = EngineClosedError(f"the I/O engine has stopped because of an earlier failure: {reason}")
        error.__cause__ = self._failure
        return error
