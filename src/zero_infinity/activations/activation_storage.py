"""Storage for saved activations: the interface, and the implementation as blocks of the host tier.

`ActivationBlocks` keeps them as blocks, which the policy may evict to NVMe and prefetches for backward: storing is one
access and taking another, in an order that repeats every step. That requires blocks to be reused: there is a pool per
size, and the first of its free blocks is taken, in whatever order they were returned. `BlockActivationStorage` copies
at once, for models on the CPU; `device_activation_storage.py` copies from and to a device while it computes.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Protocol

import torch

from zero_infinity.errors import CapacityError
from zero_infinity.policy.alignment import round_up
from zero_infinity.policy.homes import Home
from zero_infinity.storage.block import Block
from zero_infinity.tiers.host_cache import HostCache, SpareBytes


class ActivationSlot(Protocol):
    """Stored bytes of one saved tensor."""

    def take(self) -> torch.Tensor:
        """Return the bytes where the tensor was computed, and free their storage."""

    def drop(self) -> None:
        """Free the storage of bytes that nobody will take."""


class ActivationStorage(Protocol):
    """Stores bytes of saved tensors. Used by one thread at a time."""

    @property
    def held_bytes(self) -> int:
        """Bytes put there and not taken yet."""

    @property
    def total_bytes(self) -> int:
        """Size of the reusable memory, in use or free."""

    @property
    def room(self) -> int:
        """The most bytes that can be stored now."""

    def put(self, data: torch.Tensor, root: torch.Tensor) -> ActivationSlot | None:
        """Store a copy of these bytes, a part of `root`; None if there is no room."""

    def end_cycle(self) -> None:
        """End a step."""


class ActivationBlocks:
    """Blocks of the host tier for saved tensors, under its policy and budget.

    `spare`: with a home on NVMe, the largest block that fits next to what one operation needs; otherwise, since nothing
    is evicted then, the total that all blocks may take.
    """

    def __init__(self, host_cache: HostCache, home: Home, spare: SpareBytes) -> None:
        self.host_cache = host_cache
        self._home = home
        self._spare = spare
        self._free: dict[int, list[tuple[int, Block]]] = {}  # heaps, by size
        self._used: set[int] = set()  # keys of the blocks used in this cycle
        self.held_bytes = 0
        self.total_bytes = 0

    @property
    def room(self) -> int:
        return max(0, self._spare.num_bytes)

    def accessed(self, num_bytes: int) -> Block | None:
        """Return a block that is about to be written to; None if there is no room."""
        block = self._take_block(num_bytes)
        if block is None:
            return None
        try:
            self.host_cache.access(block)
        except CapacityError:
            self.give_back(block)
            return None
        return block

    def give_back(self, block: Block) -> None:
        """Its content is no longer needed, once the workers that hold it are done."""
        self.host_cache.expire(block)
        heapq.heappush(self._free[block.num_bytes], (block.key, block))
        self._hold(-round_up(block.num_bytes))

    def end_cycle(self) -> None:
        """Drop free blocks that the step did not use, or new sizes in each step would pile up."""
        idle = [b for heap in self._free.values() for key, b in heap if key not in self._used]
        if idle:
            expected = set(self.host_cache.policy.order)
            for block in idle:
                if block.key not in expected:
                    heap = self._free[block.num_bytes]
                    heap.remove((block.key, block))
                    heapq.heapify(heap)
                    self.total_bytes -= block.num_bytes
                    self.host_cache.remove(block)
        self._used.clear()

    def _take_block(self, num_bytes: int) -> Block | None:
        size = round_up(num_bytes)
        if size > self.room:
            return None
        free = self._free.setdefault(num_bytes, [])
        if free:
            _, block = heapq.heappop(free)
        else:
            block = self.host_cache.store.create("a saved tensor", num_bytes, self._home)
            self.host_cache.add(block)
            self.total_bytes += num_bytes
        self._used.add(block.key)
        self._hold(size)
        return block

    def _hold(self, change: int) -> None:
        self.held_bytes += change
        if self._home is Home.RAM:
            self._spare.num_bytes -= change


class BlockActivationStorage:
    """Saved tensors in blocks, copied at once."""

    def __init__(self, blocks: ActivationBlocks) -> None:
        self._blocks = blocks

    @property
    def held_bytes(self) -> int:
        return self._blocks.held_bytes

    @property
    def total_bytes(self) -> int:
        return self._blocks.total_bytes

    @property
    def room(self) -> int:
        return self._blocks.room

    def put(self, data: torch.Tensor, root: torch.Tensor) -> ActivationSlot | None:  # noqa: ARG002 - copied at once
        block = self._blocks.accessed(data.nbytes)
        if block is None:
            return None
        host_cache = self._blocks.host_cache
        host_cache.wait(block)
        with host_cache.pinned(block), host_cache.store.changing(block) as memory:
            memory.copy_(data)
        host_cache.store.mark_dirty(block)
        return _BlockSlot(self._blocks, block, data.device)

    def end_cycle(self) -> None:
        self._blocks.end_cycle()


@dataclass(frozen=True, eq=False, slots=True)
class _BlockSlot:
    """A block with the bytes."""

    blocks: ActivationBlocks
    block: Block
    device: torch.device

    def take(self) -> torch.Tensor:
        host_cache = self.blocks.host_cache
        host_cache.bring(self.block)
        taken = torch.empty(self.block.num_bytes, dtype=torch.uint8, device=self.device)
        taken.copy_(host_cache.store.lease(self.block))
        self.drop()
        return taken

    def drop(self) -> None:
        self.blocks.give_back(self.block)
