"""Host RAM over NVMe: the tier of blocks.

A block whose home is RAM is resident: it is never evicted, so the policy does not know it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from zero_infinity.byte_sizes import format_bytes, suggest_bytes
from zero_infinity.engine_parts import PolicyFactory
from zero_infinity.errors import CapacityError
from zero_infinity.policy.cache_policy import NoRoomError
from zero_infinity.policy.homes import Home
from zero_infinity.storage.block import Block
from zero_infinity.storage.block_store import BlockStore
from zero_infinity.storage.io_types import Priority
from zero_infinity.tiers.compute_thread import ComputeThread
from zero_infinity.tiers.tier import Tier


class SpareBytes:
    """Memory that no block will ever need. Each user subtracts what it takes and adds it back later."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes


class HostMover:
    """Moves blocks between their home on NVMe and the buffers of the block store."""

    def __init__(self, store: BlockStore) -> None:
        self._store = store

    def fetch(self, block: Block, *, ahead: bool) -> None:
        self._store.fetch(block, Priority.PREFETCH if ahead else Priority.DEMANDED)

    def evict(self, block: Block) -> None:
        self._store.evict(block)

    def is_leased(self, block: Block) -> bool:
        return block.leased

    def is_ready(self, block: Block) -> bool:
        return self._store.ready(block)

    def wait(self, block: Block) -> None:
        self._store.wait(block)

    def moved(self, cached_bytes: int) -> None:  # noqa: ARG002 - the pool counts held bytes
        self._store.trim_heap_if_grown()

    def no_room(self, block: Block, error: NoRoomError, in_use: list[Block]) -> CapacityError:
        holders = sorted(in_use, key=lambda b: -b.num_bytes)[:8]
        held = "".join(f"\n  held:  {format_bytes(b.held_bytes)} by {b.name!r}, in use" for b in holders)
        return CapacityError(
            f"{block.name!r} needs {format_bytes(error.needed)} now, but everything in the "
            f"{format_bytes(error.budget)} for blocks is in use{held}\n"
            f"  fix:   memory={suggest_bytes(self._store.pool.budget + error.needed)} or more, if one operation needs "
            "all of these at once; else drop the tensors that refer to them"
        )


class HostCache(Tier[Block]):
    """The blocks of one model in host memory."""

    def __init__(
        self,
        store: BlockStore,
        compute_thread: ComputeThread,
        make_policy: PolicyFactory,
        budget: int,
        lookahead: int,
    ) -> None:
        super().__init__(HostMover(store), compute_thread, make_policy, budget, lookahead)
        self.store = store

    def add(self, block: Block) -> None:
        """Register a block."""
        if block.home is Home.NVME:
            super().add(block)

    def is_cached(self, block: Block) -> bool:
        """True if the block is in memory by the policy's count; one that is resident always is."""
        with self.lock:
            return block.home is not Home.NVME or block.key in self.policy

    def remove(self, block: Block) -> None:
        """Drop a block that the recorded order does not contain; it must not be used again."""
        self.expire(block)
        super().remove(block)
        self.store.drop(block)

    def expire(self, block: Block) -> None:
        """The content of `block` is no longer needed (once the workers that hold it are done)."""
        with self.lock:
            self.forget(block)
            self.store.expire(block)

    @contextmanager
    def reading(self, block: Block) -> Iterator[torch.Tensor]:
        """The bytes of a block, for reading; no view of them may outlive the context."""
        self.bring(block)
        with self.store.changing(block) as memory:
            yield memory

    @contextmanager
    def writing(self, block: Block) -> Iterator[torch.Tensor]:
        """The bytes of a block, to change in place; no view of them may outlive the context."""
        self.bring(block)
        with self.pinned(block):
            with self.store.changing(block) as memory:
                yield memory
            self.store.mark_dirty(block)
