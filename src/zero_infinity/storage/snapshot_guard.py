"""The guard of a background save: blocks keep their content until the save has copied them.

Training continues during a save. Blocks of the snapshot move between memory and home as usual, but nobody gets to read
or change one before the save has released it. What training waits for is saved first.
"""

from __future__ import annotations

from collections.abc import Iterable

from zero_infinity.storage.block import Block
from zero_infinity.storage.store_monitor import StoreMonitor


class SnapshotGuard:
    """Blocks that nobody may use yet, and the order in which they are saved."""

    def __init__(self, monitor: StoreMonitor) -> None:
        self._monitor = monitor
        self._guarded: dict[Block, None] = {}
        self._not_begun: dict[Block, None] = {}  # guarded, and not yet returned by `next_block`
        self._demanded: dict[Block, None] = {}  # not begun, and a thread waits for it

    @property
    def is_active(self) -> bool:
        """True while a block is guarded."""
        return bool(self._guarded)

    def begin(self, blocks: Iterable[Block]) -> None:
        """Guard these blocks and no others. The save must be able to finish without any other thread's help."""
        with self._monitor.lock:
            self._guarded = dict.fromkeys(blocks)
            self._not_begun = dict(self._guarded)
            self._demanded.clear()
            self._monitor.notify()

    def next_block(self) -> Block | None:
        """The block to save next: one that a thread waits for, else in the given order. Each is returned once."""
        with self._monitor.lock:
            block = next(iter(self._demanded or self._not_begun), None)
            if block is not None:
                self._demanded.pop(block, None)
                del self._not_begun[block]
            return block

    def release(self, block: Block) -> None:
        """The block was saved: it may be used again."""
        with self._monitor.lock:
            self._guarded.pop(block, None)
            self._monitor.notify()

    def end(self) -> None:
        """Release every block."""
        self.begin(())

    def refuses(self, block: Block) -> bool:
        """True if `block` may not be used yet; then it is saved next. The lock is held."""
        if block in self._not_begun:
            self._demanded[block] = None
        return block in self._guarded
