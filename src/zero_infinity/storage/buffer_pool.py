"""Buffers under one byte budget: who may have memory, in which order, and when it may be used again.

A `BufferPool` owns its memory, the queue of those who wait for some, and the accounting. It does not know what the
bytes mean, nor which buffer should leave when there is no room: that is the policy's.

Three rules:
- *Budget.* Live buffers, charges and mapped free memory are together never more than the budget, at any moment.
  A request whose page-rounded size is no more than `free_bytes` is met, however the free memory lies (`Arena`).
- *Order.* Room is given in the order in which it was asked for. A small request does not overtake a large one that
  waits, else the large one would starve.
- *Lifetime.* A buffer is used again when its owner has released it and every storage made over it has died. Views
  share the storage and autograd holds it from C++, so nothing but the storage's own end is a safe sign.

How the end of a storage is seen: by a weak reference to its wrapper, which torch keeps while C++ holds the storage.
Its callback runs wherever Python frees something, also in a thread that is inside the pool's lock, and an exception in
it (Ctrl-C strikes between any two bytecodes) is swallowed. So it is `deque.append` itself: one call of C, without a
bytecode. `collect` does the rest. For the same reason nothing of the pool may be called from a finalizer.
"""

from __future__ import annotations

import collections
import functools
import os
import threading
import time
import weakref
from collections.abc import Callable

import torch

from zero_infinity.errors import CapacityError, UsageError
from zero_infinity.policy.sizes import round_up
from zero_infinity.storage.allocator import PAGE_BYTES, Arena, Pinning, accelerator_pinning, unmap_pages, view_memory

# How often a blocked thread looks for dead storages: they wake nobody.
_POLL_SECONDS = 0.001


class _Lease(weakref.ref["torch.UntypedStorage"]):
    """A storage over a buffer."""

    __slots__ = ("buffer",)

    buffer: Buffer


class Buffer:
    """A piece of a pool's memory; its contents are undefined until they are written."""

    __slots__ = ("_leases", "_pool", "_released", "_view", "address", "label", "num_bytes", "requested_bytes")

    def __init__(self, pool: BufferPool, address: int, num_bytes: int, requested_bytes: int) -> None:
        self.address = address
        self.num_bytes = num_bytes  # held: requested_bytes in whole pages
        self.requested_bytes = requested_bytes
        self.label = "unnamed"  # who holds it, for error messages
        self._pool = pool
        self._leases: list[_Lease] = []  # one a storage; some may have died
        self._released = False
        self._view: memoryview | None = None

    @property
    def view(self) -> memoryview:
        """All `num_bytes`, writable, for I/O. It is no lease: do not use it after `release`."""
        self._check_not_released()
        if self._view is None:
            self._view = view_memory(self.address, self.num_bytes)
        return self._view

    @property
    def leases(self) -> int:
        """Number of storages from `tensor` that are still alive."""
        return sum(lease() is not None for lease in list(self._leases))

    def tensor(self) -> torch.Tensor:
        """A 1-D uint8 tensor over the requested bytes, in a storage of its own: a lease."""
        tensor = torch.frombuffer(self.view, dtype=torch.uint8, count=self.requested_bytes)
        self._pool._lease(self, tensor.untyped_storage())
        return tensor

    def release(self) -> None:
        """Give it back; the room is free when the last lease has died. A no-op after the pool was closed."""
        self._pool._release(self)

    def _check_not_released(self) -> None:
        if self._released:
            raise UsageError(f"buffer '{self.label}' was released before: take a new one from the pool")

    def __repr__(self) -> str:
        state = "released" if self._released else "live"
        return f"<Buffer '{self.label}' {self.num_bytes} bytes at {self.address:#x}, {state}, {self.leases} leases>"


class BufferRequest:
    """A place in the queue for room."""

    __slots__ = ("_admit", "_pool")

    def __init__(self, pool: BufferPool, admit: Callable[[], Callable[[], None] | None]) -> None:
        self._pool = pool
        # Under the lock: take the room and return what tells the owner, which runs without it; None: no room.
        self._admit = admit

    def cancel(self) -> bool:
        """Leave the queue. True: the callback will never be called. False: it was, or is just being called."""
        return self._pool._cancel(self)


class BufferPool:
    """Memory of at most `budget` bytes. All methods may be called from any thread, but not from a finalizer.

    `pin` registers it with the accelerator in use, if there is one, or with the given `Pinning`.
    After a fork the child can neither take nor free: everything stays the parent's.
    """

    def __init__(self, budget: int, *, name: str = "memory", pin: bool | Pinning = False) -> None:
        if budget < 0:
            raise UsageError(f"{name}: a budget of {budget:,} bytes is negative")
        self.budget = budget
        self.name = name
        self._arena = Arena(accelerator_pinning() if pin is True else pin or None)
        self._live: dict[int, Buffer] = {}  # by address: not released, or still leased
        self._held_bytes = 0
        self._charged_bytes = 0
        self._peak_bytes = 0
        self._waiting: collections.deque[BufferRequest] = collections.deque()
        self._dead: collections.deque[_Lease] = collections.deque()
        self._delivering = threading.local()
        self._lock = threading.Lock()
        self._closed = False
        self._pid = os.getpid()
        # A pool that was dropped and not closed. Buffers that nobody released stay mapped: I/O, or a tensor, may still
        # be using them.
        weakref.finalize(self, _clear, self._arena, self._pid).atexit = False

    # What it holds. Plain reads, as of the last call that changed something: `collect` first to be exact.

    @property
    def held_bytes(self) -> int:
        """Live buffers, in whole pages, and charges."""
        return self.mapped_bytes + self._charged_bytes if self._closed else self._held_bytes

    @property
    def free_bytes(self) -> int:
        return self.budget - self.held_bytes

    @property
    def peak_bytes(self) -> int:
        """The most that was held so far."""
        return self._peak_bytes

    @property
    def mapped_bytes(self) -> int:
        """Memory that is the process's now: live buffers, and free memory kept for the next taker."""
        return sum(b.num_bytes for b in list(self._live.values())) if self._closed else self._arena.mapped_bytes

    @property
    def num_remaps(self) -> int:
        """Ranges mapped and unmapped so far. It stands still when the same sizes come and go."""
        return self._arena.num_remaps

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def holders(self) -> list[tuple[str, int]]:
        """Label and bytes of the live buffers."""
        return [(buffer.label, buffer.num_bytes) for buffer in list(self._live.values())]

    # Taking

    def request(self, num_bytes: int, on_grant: Callable[[Buffer], None]) -> BufferRequest:
        """Ask for a buffer: `on_grant(buffer)` is called once, with no lock held, and then owns the buffer.

        It is called before this returns if there is room and nobody waits; else in the thread that frees the room.
        What it raises reaches that thread; a callback that fails must release its buffer itself. It must not block.
        """
        page_bytes = self._checked(num_bytes)

        def admit() -> Callable[[], None] | None:
            buffer = self._place(num_bytes, page_bytes)
            return None if buffer is None else functools.partial(on_grant, buffer)

        return self._enqueue(admit)

    def take(self, num_bytes: int, timeout: float | None = None) -> Buffer:
        """A buffer, after waiting for one's turn and for room. CapacityError after `timeout` seconds."""
        taken = self.try_take(num_bytes)
        if taken is None:
            places: list[Buffer] = []

            def place() -> bool:
                buffer = self._place(num_bytes, round_up(num_bytes, PAGE_BYTES))
                if buffer is not None:
                    places.append(buffer)
                return buffer is not None

            self._wait(place, lambda: places[0].release(), num_bytes, timeout)
            taken = places[0]
        return taken

    def try_take(self, num_bytes: int) -> Buffer | None:
        """A buffer, or None when there is no room now or somebody waits."""
        page_bytes = self._checked(num_bytes)
        with self._lock:
            self._settle()
            return None if self._waiting else self._place(num_bytes, page_bytes)

    def charge(self, num_bytes: int, timeout: float | None = None) -> None:
        """Count bytes that live elsewhere (gradients that autograd allocated), after waiting as `take` does."""
        if not self.try_charge(num_bytes):
            self._wait(lambda: self._place_charge(num_bytes), lambda: self.discharge(num_bytes), num_bytes, timeout)

    def try_charge(self, num_bytes: int) -> bool:
        """Count them if there is room now and nobody waits. Charges add up exactly; they are not page-rounded."""
        self._checked(num_bytes, least=0, multiple=1)
        with self._lock:
            self._settle()
            return not self._waiting and self._place_charge(num_bytes)

    def discharge(self, num_bytes: int) -> None:
        """Charged bytes are gone."""
        if self._is_child():
            return
        with self._lock:
            if not 0 <= num_bytes <= self._charged_bytes:
                raise UsageError(
                    f"{self.name}: cannot discharge {num_bytes:,} of {self._charged_bytes:,} charged bytes"
                )
            self._charged_bytes -= num_bytes
            self._held_bytes -= num_bytes
            ready = self._admit_waiting()
        self._deliver(ready)

    def collect(self) -> None:
        """Free what dead storages held, and give the room to those who wait. Cheap when there is neither."""
        if not (self._dead or self._waiting) or self._is_child():
            return
        with self._lock:
            self._settle()
            ready = self._admit_waiting()
        self._deliver(ready)

    def close(self) -> None:
        """Unmap everything but leased memory, which is unmapped when its last lease dies. Idempotent.

        It takes buffers back that were never released: end the I/O into them first. Those who wait get an error
        (`take`, `charge`) or are never called (`request`).
        """
        if self._is_child():
            return
        with self._lock:
            # First the flag: from here on a lease that ends unmaps its buffer itself.
            self._closed = True
            for buffer in self._live.values():
                buffer._released = True
            self._arena.clear()
            for buffer in list(self._live.values()):
                for storage in filter(None, [lease() for lease in buffer._leases]):
                    weakref.finalize(storage, _unmap_unleased, self._live, buffer, self._pid).atexit = False
                _unmap_unleased(self._live, buffer, self._pid)

    # Under the lock

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

    def _settle(self) -> None:
        """Free the buffers whose last lease has died."""
        while self._dead and not self._closed:
            lease = self._dead.popleft()
            lease.buffer._leases.remove(lease)
            self._free_if_unused(lease.buffer)

    def _free_if_unused(self, buffer: Buffer) -> None:
        if buffer._released and not buffer._leases:
            del self._live[buffer.address]
            self._held_bytes -= buffer.num_bytes
            self._arena.give(buffer.address, buffer.num_bytes)

    def _admit_waiting(self) -> list[Callable[[], None]]:
        """Give room to the head of the queue while there is enough; return whom to tell."""
        ready: list[Callable[[], None]] = []
        while self._waiting:
            try:
                tell = self._waiting[0]._admit()
            except CapacityError:
                # The kernel has no memory. The waiter stays, and the next attempt fails again if it must.
                if ready:
                    break
                raise
            if tell is None:
                break
            self._waiting.popleft()
            ready.append(tell)
        return ready

    # Without the lock

    def _checked(self, num_bytes: int, *, least: int = 1, multiple: int = PAGE_BYTES) -> int:
        """The rounded size of a request that can be met, sooner or later."""
        self._check_usable()
        if num_bytes < least:
            raise UsageError(f"{self.name}: cannot take {num_bytes:,} bytes, {least} is the least")
        rounded = round_up(num_bytes, multiple)
        if rounded > self.budget:
            raise CapacityError(
                f"{self.name}: {num_bytes:,} bytes ({rounded:,} in whole pages) can never fit in a budget of"
                f" {self.budget:,} bytes"
            )
        return rounded

    def _check_usable(self) -> None:
        if self._is_child():
            raise UsageError(f"{self.name}: the pool is process {self._pid}'s, and cannot be used after a fork")
        if self._closed:
            raise UsageError(f"{self.name}: the pool was closed")

    def _is_child(self) -> bool:
        return os.getpid() != self._pid

    def _enqueue(self, admit: Callable[[], Callable[[], None] | None]) -> BufferRequest:
        request = BufferRequest(self, admit)
        with self._lock:
            self._settle()
            tell = None if self._waiting else admit()
            if tell is None:
                self._waiting.append(request)
        if tell is not None:
            tell()
        return request

    def _wait(self, place: Callable[[], bool], undo: Callable[[], None], num_bytes: int, timeout: float | None) -> None:
        """Queue up until `place()`, called under the lock, found room; `undo` that if this thread is interrupted."""
        arrived = threading.Event()

        def admit() -> Callable[[], None] | None:
            if not place():
                return None
            # Told here and not when callbacks run: this thread may itself be the one that runs them.
            arrived.set()
            return _nothing

        deadline = None if timeout is None else time.monotonic() + timeout
        request = self._enqueue(admit)
        try:
            while not arrived.wait(_POLL_SECONDS):
                self.collect()
                self._check_usable()
                if deadline is not None and time.monotonic() >= deadline and not arrived.is_set():
                    raise CapacityError(self._describe_shortage(num_bytes, timeout or 0.0))
        except BaseException:
            if not request.cancel():
                undo()
            raise

    def _describe_shortage(self, num_bytes: int, seconds: float) -> str:
        holders = [f"'{label}' {size:,}" for label, size in sorted(self.holders(), key=lambda holder: -holder[1])]
        if self._charged_bytes:
            holders.append(f"outside of the pool {self._charged_bytes:,}")
        more = f" and {len(holders) - 8} more" if len(holders) > 8 else ""
        return (
            f"{self.name}: no room for {num_bytes:,} bytes within {seconds:g} s: {self._held_bytes:,} of"
            f" {self.budget:,} bytes are held, by {', '.join(holders[:8]) or 'nobody'}{more}"
        )

    def _deliver(self, ready: list[Callable[[], None]]) -> None:
        """Run callbacks. All of them run, then what they raised is raised.

        A callback may free room for the next one. That one is left to the loop that is already running in this
        thread: a long queue must not become a deep stack.
        """
        if not ready:
            return
        pending: collections.deque[Callable[[], None]] | None = getattr(self._delivering, "pending", None)
        if pending is not None:
            pending.extend(ready)
            return
        pending = self._delivering.pending = collections.deque(ready)
        errors: list[BaseException] = []
        while pending:
            try:
                pending.popleft()()
            except BaseException as error:  # noqa: BLE001 - raised below, when everybody has what is theirs
                errors.append(error)
        self._delivering.pending = None
        if errors:
            raise (
                errors[0] if len(errors) == 1 else BaseExceptionGroup(f"{self.name}: several callbacks failed", errors)
            )

    # For Buffer and Request

    def _lease(self, buffer: Buffer, storage: torch.UntypedStorage) -> None:
        self._check_usable()
        with self._lock:
            buffer._check_not_released()
            lease = _Lease(storage, self._dead.append)
            lease.buffer = buffer
            buffer._leases.append(lease)

    def _release(self, buffer: Buffer) -> None:
        if self._is_child():
            return
        with self._lock:
            if self._closed:
                return
            buffer._check_not_released()
            buffer._released = True
            self._free_if_unused(buffer)
            self._settle()
            ready = self._admit_waiting()
        self._deliver(ready)

    def _cancel(self, request: BufferRequest) -> bool:
        if self._is_child():
            return False
        with self._lock:
            if request not in self._waiting:
                return False
            self._waiting.remove(request)
            ready = self._admit_waiting()
        self._deliver(ready)
        return True


def _nothing() -> None:
    """The callback of those who were told under the lock."""


def _clear(arena: Arena, pid: int) -> None:
    if os.getpid() == pid:
        arena.clear()


def _unmap_unleased(live: dict[int, Buffer], buffer: Buffer, pid: int) -> None:
    # `close` and the ends of several leases may meet here in several threads: dict.pop lets one of them through.
    if os.getpid() == pid and not buffer.leases and live.pop(buffer.address, None) is not None:
        unmap_pages(buffer.address, buffer.num_bytes)
