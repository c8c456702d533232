"""Carries out the policy's decisions on the block store, for one tier.

The one place where *what should be in memory* meets *what is*. Every use of a block goes through `access`, on the
thread that computes; the store then moves bytes in the order of the decisions, and `wait` blocks only for the one
block that is needed now. Time spent there is the exposed wait that a run reports.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from zero_infinity.engine_parts import PolicyFactory
from zero_infinity.errors import CapacityError
from zero_infinity.policy.cache_policy import CachePolicy, NoRoomError
from zero_infinity.policy.memory_budget import Home
from zero_infinity.run_trace import RunTrace
from zero_infinity.storage.block import Block
from zero_infinity.storage.block_store import BlockStore
from zero_infinity.storage.io_types import Priority
from zero_infinity.units import format_bytes, suggest_bytes


class SpareBytes:
    """Memory that no block will ever want. Who takes some of it takes it off here, and puts it back."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes


class HostCache:
    """The blocks of one tier, their policy and their store."""

    def __init__(
        self,
        store: BlockStore,
        budget: int,
        lookahead: int,
        run_trace: RunTrace | None = None,
        make_policy: PolicyFactory = CachePolicy,
    ) -> None:
        self.store = store
        self.run_trace = run_trace
        self.policy = make_policy(budget, lookahead, self._in_use)
        self.waited_seconds = 0.0
        self.before_wait: Callable[[], None] = _nothing  # called by the computing thread
        self._blocks: dict[int, Block] = {}
        self._pins: Counter[int] = Counter()
        self._lent = 0
        # Autograd runs hooks of accelerator graphs on a thread of its own.
        self._lock = threading.RLock()

    def add(self, block: Block) -> None:
        """Make a block known. One whose home is RAM never leaves, so the policy is not asked about it."""
        if block.home is Home.NVME:
            self._blocks[block.key] = block
            self.policy.add(block.key, block.held_bytes)

    def remove(self, block: Block) -> None:
        """Drop a block that the recorded order does not mention; it must not be used again."""
        with self._lock:
            self.expire(block)
            self._blocks.pop(block.key, None)
        self.store.drop(block)

    def limit(self, budget: int, lookahead: int) -> None:
        """From now on the blocks may take `budget` bytes together; what is over that leaves."""
        with self._lock:
            self.policy.lookahead = lookahead
            for key in self.policy.shrink(budget - self._lent):
                self.store.evict(self._blocks[key])

    def lend(self, num_bytes: int) -> bool:
        """Let blocks take that much less; False, and nothing changes, when too much is in use for that."""
        with self._lock:
            before = self.policy.budget
            if num_bytes > before:
                return False
            for key in self.policy.shrink(before - num_bytes):
                self.store.evict(self._blocks[key])
            if self.policy.cached_bytes > self.policy.budget:
                self.policy.shrink(before)
                return False
            self._lent += num_bytes
        return True

    def take_back(self, num_bytes: int) -> None:
        """What was lent is there again."""
        with self._lock:
            self._lent -= num_bytes
            self.policy.shrink(self.policy.budget + num_bytes)

    def access(self, block: Block) -> None:
        """`block` is used now: bring it in, and whatever the policy wants ahead of its use. Does not wait."""
        if block.home is Home.RAM:
            self.store.fetch(block, Priority.DEMANDED)
            return
        with self._lock:
            try:
                decision = self.policy.access(block.key)
            except NoRoomError as error:
                raise self._no_room(block, error) from None
            for key in decision.evict:
                self.store.evict(self._blocks[key])
            for key in decision.fetch:
                self.store.fetch(self._blocks[key], Priority.DEMANDED if key == block.key else Priority.PREFETCH)
        if decision.fetch:
            self.store.trim_heap_if_grown()

    def wait(self, block: Block) -> None:
        """Wait until an accessed block is in memory and no worker is going to change it."""
        if not self.store.ready(block):
            with self.waiting(block.name):
                self.store.wait(block)

    @contextmanager
    def waiting(self, name: str) -> Iterator[None]:
        """The computing thread stands still in here, for `name`."""
        self.before_wait()
        start = time.perf_counter()
        yield
        seconds = time.perf_counter() - start
        self.waited_seconds += seconds
        if self.run_trace is not None:
            self.run_trace.waited(name, start, seconds)

    def expire(self, block: Block) -> None:
        """The content of `block` is dead (once the workers that hold it are done)."""
        with self._lock:
            if block.home is Home.NVME:
                self.policy.forget(block.key)
            self.store.expire(block)

    def end_cycle(self, *, same_order: bool) -> None:
        """A step is over. `same_order`: the next one is expected to use blocks in the same order."""
        with self._lock:
            self.policy.end_cycle(same_order=same_order)
        self.store.trim_heap_if_grown()

    @contextmanager
    def pinned(self, block: Block) -> Iterator[None]:
        """Keep the policy from evicting `block` meanwhile."""
        self.pin(block)
        try:
            yield
        finally:
            self.unpin(block)

    def pin(self, block: Block) -> None:
        self._pins[block.key] += 1

    def unpin(self, block: Block) -> None:
        self._pins[block.key] -= 1
        if not self._pins[block.key]:
            del self._pins[block.key]

    def _in_use(self, key: int) -> bool:
        # A tensor over the block keeps its memory whatever the policy says, so evicting it would free nothing.
        return key in self._pins or self._blocks[key].leased

    def _no_room(self, block: Block, error: NoRoomError) -> CapacityError:
        holders = sorted((self._blocks[key] for key in error.in_use), key=lambda b: -b.num_bytes)[:8]
        held = "".join(f"\n  held:  {format_bytes(b.held_bytes)} by {b.name!r}, in use" for b in holders)
        return CapacityError(
            f"{block.name!r} needs {format_bytes(error.needed)} now, but all that could leave the "
            f"{format_bytes(error.budget)} for blocks is in use{held}\n"
            f"  fix:   memory={suggest_bytes(self.store.pool.budget + error.needed)} or more, if one operation needs "
            "all of these at once; else drop the tensors that refer to them"
        )


def _nothing() -> None:
    return None
