"""A buffer: a piece of a pool's memory, and the leases on it.

A *lease* is a torch storage over a buffer. A buffer is reused when its owner has released it and every lease has died.
Views share the storage and autograd holds it from C++, so only the end of the storage itself is a safe sign.

The end of a storage is seen by a weak reference to its Python wrapper, which torch keeps alive while C++ holds the
storage. The callback runs wherever Python frees an object, possibly on a thread that is inside the pool's lock, and an
exception in it (Ctrl-C can strike between any two bytecodes) is swallowed. So the callback is `deque.append` itself:
one C call without bytecode. `BufferPool.collect` does the rest. For the same reason no method of a pool may be called
from a finalizer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Protocol

import torch

from zero_infinity.errors import UsageError
from zero_infinity.storage.pages import view_memory


class BufferOwner(Protocol):
    """The pool, seen from a buffer."""

    def add_lease(self, buffer: Buffer, storage: torch.UntypedStorage) -> None: ...

    def take_back(self, buffer: Buffer) -> None: ...


class Lease(weakref.ref["torch.UntypedStorage"]):
    """A weak reference to a storage over `buffer`."""

    __slots__ = ("buffer",)

    buffer: Buffer

    def __new__(cls, storage: torch.UntypedStorage, on_death: Callable[[Lease], object], buffer: Buffer) -> Lease:
        self = super().__new__(cls, storage, on_death)
        self.buffer = buffer
        return self

    def __init__(self, *_: object) -> None:
        """Nothing to do after `__new__`, and `weakref.ref.__init__` accepts no third argument."""


class Buffer:
    """A piece of a pool's memory. Its contents are undefined until they are written."""

    __slots__ = ("_leases", "_owner", "_released", "_view", "address", "label", "num_bytes", "requested_bytes")

    def __init__(self, owner: BufferOwner, address: int, num_bytes: int, requested_bytes: int) -> None:
        self.address = address
        self.num_bytes = num_bytes  # requested_bytes in whole pages
        self.requested_bytes = requested_bytes
        self.label = "unnamed"  # the holder, for error messages
        self._owner = owner
        self._leases: list[Lease] = []  # one per storage; some may have died
        self._released = False
        self._view: memoryview | None = None

    @property
    def view(self) -> memoryview:
        """All `num_bytes`, writable, for I/O. Not a lease: do not use it after `release`."""
        self.check_not_released()
        if self._view is None:
            self._view = view_memory(self.address, self.num_bytes)
        return self._view

    @property
    def leases(self) -> int:
        """Number of storages from `tensor` that are alive."""
        return len(self.live_storages())

    def tensor(self) -> torch.Tensor:
        """A 1-D uint8 tensor over the requested bytes, in a storage of its own: a lease."""
        tensor = torch.frombuffer(self.view, dtype=torch.uint8, count=self.requested_bytes)
        self._owner.add_lease(self, tensor.untyped_storage())
        return tensor

    def release(self) -> None:
        """Return the buffer; its room is free when the last lease has died. A no-op after the pool was closed."""
        self._owner.take_back(self)

    # For the pool, under its lock.

    @property
    def is_unused(self) -> bool:
        """True if it was released and no lease is left. A dead lease counts until it is removed."""
        return self._released and not self._leases

    def mark_released(self) -> None:
        self._released = True

    def append_lease(self, lease: Lease) -> None:
        self._leases.append(lease)

    def remove_lease(self, lease: Lease) -> None:
        self._leases.remove(lease)

    def live_storages(self) -> list[torch.UntypedStorage]:
        return [storage for lease in list(self._leases) if (storage := lease()) is not None]

    def check_not_released(self) -> None:
        if self._released:
            raise UsageError(f"buffer '{self.label}' was released before\n  fix:   take a new one from the pool")

    def __repr__(self) -> str:
        state = "released" if self._released else "live"
        return f"<Buffer '{self.label}' {self.num_bytes} bytes at {self.address:#x}, {state}, {self.leases} leases>"
