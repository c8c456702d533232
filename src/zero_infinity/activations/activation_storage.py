"""Storage for saved activations: the interface, and the implementation as blocks of the host tier.

`BlockActivationStorage` keeps them as blocks, which the policy may evict to NVMe and prefetches for backward: `put` is
one access and `take` another, in an order that repeats every step. That requires blocks to be reused: there is a pool
per size, and the first of its free blocks is taken, in whatever order they were returned.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from zero_infinity.errors import CapacityError
from zero_infinity.policy.alignment import round_up
from zero_infinity.policy.homes import Home
from zero_infinity.storage.block import Block
from zero_infinity.tiers.host_cache import HostCache, SpareBytes


@dataclass(frozen=True, eq=False, slots=True)
class ActivationSlot:
    """Stored bytes of one saved tensor. `fetch` returns them in memory, `drop` frees their storage."""

    fetch: Callable[[], torch.Tensor]
    drop: Callable[[], None]

    def take(self, into: torch.Tensor) -> None:
        """Copy the bytes to `into` and free their storage."""
        into.copy_(self.fetch())
        self.drop()


class ActivationStorage(Protocol):
    """Stores bytes of saved tensors. Used by one thread at a time."""

    held_bytes: int  # put there and not taken yet

    @property
    def total_bytes(self) -> int:
        """Size of the reusable memory, in use or free."""

    @property
    def room(self) -> int:
        """The most bytes that can be stored now."""

    def put(self, data: torch.Tensor) -> ActivationSlot | None:
        """Store a copy of these bytes; None if there is no room."""

    def end_cycle(self) -> None:
        """End a step."""


class BlockActivationStorage:
    """Saved tensors in blocks of the host tier, under its policy and budget.

    `spare`: with a home on NVMe, the largest block that fits next to what one operation needs; otherwise, since nothing
    is evicted then, the total that all blocks may take.
    """

    def __init__(self, host_cache: HostCache, home: Home, spare: SpareBytes) -> None:
        self._host_cache = host_cache
        self._home = home
        self._spare = spare
        self._free: dict[int, list[tuple[int, Block]]] = {}  # heaps, by size
        self._used: set[int] = set()  # keys of the blocks used in this cycle
        self.held_bytes = 0
        self._total_bytes = 0

    @property
    def total_bytes(self) -> int:
        return self._total_bytes

    @property
    def room(self) -> int:
        return max(0, self._spare.num_bytes)

    def put(self, data: torch.Tensor) -> ActivationSlot | None:
        block = self._take_block(data.nbytes)
        if block is None:
            return None
        host_cache = self._host_cache
        try:
            host_cache.access(block)
        except CapacityError:
            self._give_back(block)
            return None
        host_cache.wait(block)
        with host_cache.pinned(block), host_cache.store.changing(block) as memory:
            memory.copy_(data)
        host_cache.store.mark_dirty(block)
        return ActivationSlot(partial(self._fetch, block), partial(self._give_back, block))

    def end_cycle(self) -> None:
        """Drop free blocks that the step did not use, or new sizes in each step would pile up."""
        idle = [b for heap in self._free.values() for key, b in heap if key not in self._used]
        if idle:
            expected = set(self._host_cache.policy.order)
            for block in idle:
                if block.key not in expected:
                    heap = self._free[block.num_bytes]
                    heap.remove((block.key, block))
                    heapq.heapify(heap)
                    self._total_bytes -= block.num_bytes
                    self._host_cache.remove(block)
        self._used.clear()

    def _fetch(self, block: Block) -> torch.Tensor:
        self._host_cache.bring(block)
        return self._host_cache.store.lease(block)

    def _give_back(self, block: Block) -> None:
        self._host_cache.expire(block)
        heapq.heappush(self._free[block.num_bytes], (block.key, block))
        self._hold(-round_up(block.num_bytes))

    def _take_block(self, num_bytes: int) -> Block | None:
        size = round_up(num_bytes)
        if size > self.room:
            return None
        free = self._free.setdefault(num_bytes, [])
        if free:
            _, block = heapq.heappop(free)
        else:
            block = self._host_cache.store.create("a saved tensor", num_bytes, self._home)
            self._host_cache.add(block)
            self._total_bytes += num_bytes
        self._used.add(block.key)
        self._hold(size)
        return block

    def _hold(self, change: int) -> None:
        self.held_bytes += change
        if self._home is Home.RAM:
            self._spare.num_bytes -= change
