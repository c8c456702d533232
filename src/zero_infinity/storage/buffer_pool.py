"""Buffers under one byte budget: who gets memory, in which order, and when it may be reused.

A `BufferPool` owns its memory and the accounting. It does not know what the bytes mean, nor which buffer should leave
when there is no room: that is the cache policy's decision.

Three rules:
- *Budget.* Live buffers, charges and mapped free memory together never exceed the budget, at any moment. A request
  whose page-rounded size is at most `free_bytes` is met, however fragmented the free memory is (`Arena`).
- *Order.* Room is granted in the order of the requests (`GrantQueue`).
- *Lifetime.* A buffer is reused when its owner has released it and every tensor storage over it has died (`Buffer`).
"""

from __future__ import annotations

import collections
import functools
import os
import threading
import weakref
from collections.abc import Callable

import torch

from zero_infinity.errors import CapacityError, UsageError
from zero_infinity.policy.alignment import round_up
from zero_infinity.storage.arena import Arena
from zero_infinity.storage.buffer import Buffer, Lease
from zero_infinity.storage.grant_queue import BufferRequest, Callback, GrantQueue
from zero_infinity.storage.pages import PAGE_BYTES, unmap_pages
from zero_infinity.storage.pinning import Pinning

# How often a blocked thread looks for dead storages: they wake nobody.
_POLL_SECONDS = 0.001


class BufferPool:
    """Memory of at most `budget` bytes. All methods may be called from any thread, but not from a finalizer.

    With `pinning` the memory is registered with an accelerator. After a fork the child can neither take nor free
    memory: everything belongs to the parent.
    """

    def __init__(self, budget: int, *, name: str = "memory", pinning: Pinning | None = None) -> None:
        if budget < 0:
            raise UsageError(f"{name}: a budget of {budget:,} bytes is negative")
        self.budget = budget
        self.name = name
        self._arena = Arena(pinning)
        self._live: dict[int, Buffer] = {}  # by address: not released, or still leased
        self._held_bytes = 0
        self._charged_bytes = 0
        self._peak_bytes = 0
        self._queue = GrantQueue(name)
        self._dead: collections.deque[Lease] = collections.deque()
        self._lock = threading.Lock()
        self._closed = False
        self._pid = os.getpid()
        # For a pool that was dropped and not closed. Buffers that nobody released stay mapped: I/O or a tensor may
        # still use them.
        weakref.finalize(self, _clear, self._arena, self._pid).atexit = False

    # ------------------------------------------------------------------ what it holds
    # Plain reads, as of the last call that changed something. Call `collect` first for exact numbers.

    @property
    def held_bytes(self) -> int:
        """Live buffers, in whole pages, and charges."""
        return self.mapped_bytes + self._charged_bytes if self._closed else self._held_bytes

    @property
    def free_bytes(self) -> int:
        return self.budget - self.held_bytes

    @property
    def peak_bytes(self) -> int:
        """The maximum of `held_bytes` so far."""
        return self._peak_bytes

    @property
    def mapped_bytes(self) -> int:
        """Memory that the process has mapped: live buffers, and free memory kept for reuse."""
        return sum(b.num_bytes for b in list(self._live.values())) if self._closed else self._arena.mapped_bytes

    @property
    def num_waiting(self) -> int:
        """Requests that wait for room."""
        return len(self._queue)

    def holders(self) -> list[tuple[str, int]]:
        """Label and bytes of every live buffer."""
        return [(buffer.label, buffer.num_bytes) for buffer in list(self._live.values())]

    # ------------------------------------------------------------------ taking and charging

    def request(self, num_bytes: int, on_grant: Callable[[Buffer], None]) -> BufferRequest:
        """Request a buffer: `on_grant(buffer)` is called once, without any lock, and then owns the buffer.

        It is called before this method returns if there is room and nobody waits; otherwise on the thread that frees
        room. It must not block. What it raises is raised on that thread; a callback that fails must release its buffer.
        """
        page_bytes = self._checked(num_bytes)

        def admit() -> Callback | None:
            buffer = self._place(num_bytes, page_bytes)
            return None if buffer is None else functools.partial(on_grant, buffer)

        return self._submit(admit)

    def take(self, num_bytes: int) -> Buffer:
        """A buffer; waits in the queue for room."""
        taken = self.try_take(num_bytes)
        if taken is None:
            placed: list[Buffer] = []

            def place() -> bool:
                buffer = self._place(num_bytes, round_up(num_bytes, PAGE_BYTES))
                if buffer is not None:
                    placed.append(buffer)
                return buffer is not None

            self._wait(place, lambda: placed[0].release())
            taken = placed[0]
        return taken

    def try_take(self, num_bytes: int) -> Buffer | None:
        """A buffer, or None if there is no room now or somebody waits."""
        page_bytes = self._checked(num_bytes)
        with self._lock:
            self._free_dead()
            return None if self._queue else self._place(num_bytes, page_bytes)

    def charge(self, num_bytes: int) -> None:
        """Count bytes that are allocated elsewhere (gradients from autograd); waits in the queue for room."""
        if not self.try_charge(num_bytes):
            self._wait(lambda: self._place_charge(num_bytes), lambda: self.discharge(num_bytes))

    def try_charge(self, num_bytes: int) -> bool:
        """Charge if there is room now and nobody waits. Charges are exact, not rounded to pages."""
        self._checked(num_bytes, least=0, multiple=1)
        with self._lock:
            self._free_dead()
            return not self._queue and self._place_charge(num_bytes)

    def discharge(self, num_bytes: int) -> None:
        """Charged bytes were freed."""
        if self._is_child():
            return
        with self._lock:
            if not 0 <= num_bytes <= self._charged_bytes:
                raise UsageError(
                    f"{self.name}: cannot discharge {num_bytes:,} of {self._charged_bytes:,} charged bytes"
                )
            self._charged_bytes -= num_bytes
            self._held_bytes -= num_bytes
            granted = self._queue.admit_waiting()
        self._queue.deliver(granted)

    def collect(self) -> None:
        """Free the buffers of dead storages and grant the room to waiting requests. Cheap if there are neither."""
        if not (self._dead or self._queue) or self._is_child():
            return
        with self._lock:
            self._free_dead()
            granted = self._queue.admit_waiting()
        self._queue.deliver(granted)

    def close(self) -> None:
        """Unmap everything but leased memory, which is unmapped when its last lease dies. Idempotent.

        Buffers that were never released are unmapped too: end the I/O into them first. Blocked calls (`take`, `charge`)
        raise; callbacks of waiting requests are never called.
        """
        if self._is_child():
            return
        with self._lock:
            # The flag first: from here on the end of a lease unmaps its buffer.
            self._closed = True
            for buffer in self._live.values():
                buffer.mark_released()
            self._arena.clear()
            for buffer in list(self._live.values()):
                for storage in buffer.live_storages():
                    weakref.finalize(storage, _unmap_unleased, self._live, buffer, self._pid).atexit = False
                _unmap_unleased(self._live, buffer, self._pid)

    # ------------------------------------------------------------------ called by Buffer

    def add_lease(self, buffer: Buffer, storage: torch.UntypedStorage) -> None:
        """Keep `buffer` until `storage` has died."""
        self._check_usable()
        with self._lock:
            buffer.check_not_released()
            buffer.append_lease(Lease(storage, self._dead.append, buffer))

    def take_back(self, buffer: Buffer) -> None:
        """Free `buffer` as soon as it has no lease."""
        if self._is_child():
            return
        with self._lock:
            if self._closed:
                return
            buffer.check_not_released()
            buffer.mark_released()
            self._free_if_unused(buffer)
            self._free_dead()
            granted = self._queue.admit_waiting()
        self._queue.deliver(granted)

    # ------------------------------------------------------------------ with the lock held

    def _place(self, num_bytes: int, page_bytes: int) -> Buffer | None:
        if self._closed or page_bytes > self.budget - self._held_bytes:
            return None
        address = self._arena.take(page_bytes, limit=self.budget - self._charged_bytes)
        buffer = self._live[address] = Buffer(self, address, page_bytes, num_bytes)
        self._hold(page_bytes)
        return buffer

    def _place_charge(self, num_bytes: int) -> bool:
        if self._closed or num_bytes > self.budget - self._held_bytes:
            return False
        self._arena.shrink(self.budget - self._charged_bytes - num_bytes)
        self._charged_bytes += num_bytes
        self._hold(num_bytes)
        return True

    def _hold(self, num_bytes: int) -> None:
        self._held_bytes += num_bytes
        self._peak_bytes = max(self._peak_bytes, self._held_bytes)

    def _free_dead(self) -> None:
        """Free the buffers whose last lease has died."""
        while self._dead and not self._closed:
            lease = self._dead.popleft()
            lease.buffer.remove_lease(lease)
            self._free_if_unused(lease.buffer)

    def _free_if_unused(self, buffer: Buffer) -> None:
        if buffer.is_unused:
            del self._live[buffer.address]
            self._held_bytes -= buffer.num_bytes
            self._arena.give(buffer.address, buffer.num_bytes)

    # ------------------------------------------------------------------ without the lock

    def _checked(self, num_bytes: int, *, least: int = 1, multiple: int = PAGE_BYTES) -> int:
        """The rounded size of a request that can be met eventually; an error if it cannot."""
        self._check_usable()
        if num_bytes < least:
            raise UsageError(f"{self.name}: cannot take {num_bytes:,} bytes, the minimum is {least}")
        rounded = round_up(num_bytes, multiple)
        if rounded > self.budget:
            raise CapacityError(
                f"{self.name}: {num_bytes:,} bytes ({rounded:,} in whole pages) can never fit in a budget of"
                f" {self.budget:,} bytes\n  fix:   set a larger memory=..."
            )
        return rounded

    def _check_usable(self) -> None:
        if self._is_child():
            raise UsageError(f"{self.name}: the pool belongs to process {self._pid} and cannot be used after a fork")
        if self._closed:
            raise UsageError(f"{self.name}: the pool was closed")

    def _is_child(self) -> bool:
        return os.getpid() != self._pid

    def _submit(self, admit: Callable[[], Callback | None]) -> BufferRequest:
        request = BufferRequest(admit, self._cancel)
        with self._lock:
            self._free_dead()
            callback = self._queue.submit(request)
        if callback is not None:
            callback()
        return request

    def _cancel(self, request: BufferRequest) -> bool:
        if self._is_child():
            return False
        with self._lock:
            if not self._queue.remove(request):
                return False
            granted = self._queue.admit_waiting()
        self._queue.deliver(granted)
        return True

    def _wait(self, place: Callable[[], bool], undo: Callable[[], None]) -> None:
        """Queue until `place()`, called under the lock, has found room; `undo` that if this thread is interrupted."""
        granted = threading.Event()

        def admit() -> Callback | None:
            if not place():
                return None
            # Set here and not in the callback: this thread may itself be the one that delivers callbacks.
            granted.set()
            return _nothing

        request = self._submit(admit)
        try:
            while not granted.wait(_POLL_SECONDS):
                self.collect()
                self._check_usable()
        except BaseException:
            if not request.cancel():
                undo()
            raise


def _nothing() -> None:
    """The callback of requests that were told under the lock."""


def _clear(arena: Arena, pid: int) -> None:
    if os.getpid() == pid:
        arena.clear()


def _unmap_unleased(live: dict[int, Buffer], buffer: Buffer, pid: int) -> None:
    # `close` and the ends of several leases may get here on several threads: dict.pop lets one of them through.
    if os.getpid() == pid and not buffer.leases and live.pop(buffer.address, None) is not None:
        unmap_pages(buffer.address, buffer.num_bytes)
