"""Detection of a deadlock: a thread waits for room, and nothing that is going on can free any.

The store cannot deadlock for a caller that keeps what it has fetched and not evicted within the budget (see
`block_store`). It can for one that holds tensors over evicted blocks: their memory is not reused. Such a wait ends with
an error that names who holds the memory, instead of a hang.

Owns the record of what goes on: held uses and threads at work. Every method is called with the lock of the store held.
"""

from __future__ import annotations

from collections import Counter

from zero_infinity.errors import CapacityError
from zero_infinity.storage.block import Block
from zero_infinity.storage.block_io import BlockIO
from zero_infinity.storage.block_stay import Residence
from zero_infinity.storage.buffer_pool import BufferPool
from zero_infinity.storage.snapshot_guard import SnapshotGuard
from zero_infinity.units import format_bytes

# A wait for room that nothing in flight can end is an error after this long without any event: another thread may still
# drop a tensor...
STUCK_SECONDS = 5.0
# ...or after this long while workers hold blocks that they do not use now: they may be busy elsewhere.
STUCK_WHILE_HELD_SECONDS = 30.0


class DeadlockDetector:
    """What could still free memory."""

    def __init__(self, pool: BufferPool, io: BlockIO | None, snapshot: SnapshotGuard) -> None:
        self._pool = pool
        self._io = io
        self._snapshot = snapshot
        self._num_held_uses = 0
        # Threads that use a block, and threads that wait. One that is in both waits for room while it uses a block.
        self._using: Counter[int] = Counter()
        self._waiting: Counter[int] = Counter()

    def begin_hold(self) -> None:
        """A use was requested."""
        self._num_held_uses += 1

    def end_hold(self) -> None:
        """A requested use ended."""
        self._num_held_uses -= 1

    def begin_use(self, thread: int) -> None:
        """`thread` works on a block from now on."""
        self._using[thread] += 1

    def end_use(self, thread: int) -> None:
        _decrement(self._using, thread)

    def begin_wait(self, thread: int) -> None:
        """`thread` waits from now on."""
        self._waiting[thread] += 1

    def end_wait(self, thread: int) -> None:
        _decrement(self._waiting, thread)

    def threads_using(self) -> set[int]:
        """Threads that work on a block now."""
        return set(self._using)

    @property
    def patience_seconds(self) -> float:
        """How long a wait may be stuck before it is an error."""
        return STUCK_WHILE_HELD_SECONDS if self._num_held_uses else STUCK_SECONDS

    def is_stuck(self, block: Block) -> bool:
        """True if `block` waits for room and nothing that could free some is going on."""
        return (
            any(stay.residence is Residence.QUEUED for stay in block.stays)
            and not (self._io is not None and self._io.num_in_flight)
            and not self._snapshot.is_active
            and all(thread in self._waiting for thread in self._using)
        )

    def describe(self, block: Block) -> CapacityError:
        """The error of a stuck wait."""
        holders = sorted(self._pool.holders(), key=lambda holder: -holder[1])[:8]
        held = "".join(f"\n  held:  {format_bytes(size)} by {label}" for label, size in holders)
        return CapacityError(
            f"block {block.name!r} needs {format_bytes(block.held_bytes)}, but {format_bytes(self._pool.free_bytes)} "
            f"of {format_bytes(self._pool.budget)} are free and nothing in flight will free more{held}\n"
            "  fix:   drop the tensors that refer to these blocks, or set a larger memory=..."
        )


def _decrement(counts: Counter[int], key: int) -> None:
    """Subtract one; remove the key at zero."""
    counts[key] -= 1
    if not counts[key]:
        del counts[key]
