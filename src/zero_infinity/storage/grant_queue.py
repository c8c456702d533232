"""The queue for room in a buffer pool: who gets memory next, and how they are told.

First in, first out: a small request does not overtake a large one, which would otherwise starve. The queue does not
know how much room there is: each request brings an `admit` function that takes the room if there is enough.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable

from zero_infinity.errors import CapacityError

# Tells the owner of a request that it was granted. Called without any lock.
Callback = Callable[[], None]


class BufferRequest:
    """A place in the queue for room.

    `admit` is called under the lock of the pool: it takes the room and returns the callback, or None without room.
    """

    __slots__ = ("_cancel", "admit")

    def __init__(self, admit: Callable[[], Callback | None], cancel: Callable[[BufferRequest], bool]) -> None:
        self.admit = admit
        self._cancel = cancel

    def cancel(self) -> bool:
        """Leave the queue. True: the callback will never be called. False: it was called, or is being called now."""
        return self._cancel(self)


class GrantQueue:
    """Waiting requests, first in, first out. `name` is the pool's, for errors."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._waiting: collections.deque[BufferRequest] = collections.deque()
        self._delivering = threading.local()

    def __len__(self) -> int:
        return len(self._waiting)

    # Under the lock of the pool.

    def submit(self, request: BufferRequest) -> Callback | None:
        """Admit `request` now, if there is room and nobody waits; else append it."""
        callback = None if self._waiting else request.admit()
        if callback is None:
            self._waiting.append(request)
        return callback

    def remove(self, request: BufferRequest) -> bool:
        """Take a request out; False if it is not waiting."""
        if request not in self._waiting:
            return False
        self._waiting.remove(request)
        return True

    def admit_waiting(self) -> list[Callback]:
        """Give room to the head of the queue while there is enough; return the callbacks to deliver."""
        granted: list[Callback] = []
        while self._waiting:
            try:
                callback = self._waiting[0].admit()
            except CapacityError:
                # The kernel has no memory. The request stays, and the next attempt raises again if it must.
                if granted:
                    break
                raise
            if callback is None:
                break
            self._waiting.popleft()
            granted.append(callback)
        return granted

    # Without the lock.

    def deliver(self, callbacks: list[Callback]) -> None:
        """Run all callbacks, then raise what they raised.

        A callback may free room for the next request. Its callback is left to the loop that already runs on this
        thread, so that a long queue does not become a deep stack.
        """
        if not callbacks:
            return
        pending: collections.deque[Callback] | None = getattr(self._delivering, "pending", None)
        if pending is not None:
            pending.extend(callbacks)
            return
        pending = self._delivering.pending = collections.deque(callbacks)
        errors: list[BaseException] = []
        while pending:
            try:
                pending.popleft()()
            except BaseException as error:  # noqa: BLE001 - raised below, after the other callbacks
                errors.append(error)
        self._delivering.pending = None
        if errors:
            raise (
                errors[0] if len(errors) == 1 else BaseExceptionGroup(f"{self._name}: several callbacks failed", errors)
            )
