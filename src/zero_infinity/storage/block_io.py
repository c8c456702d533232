"""Blocks on NVMe: their extents in the swap space, and the transfers between a buffer and its block's home.

Owns the I/O engine, the free extents and the checksums. It does not decide when a block moves: `BlockMover` does. Every
method is called with the lock of the store held, unless it says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from zero_infinity.byte_sizes import format_bytes
from zero_infinity.errors import CorruptionError, EngineClosedError, UsageError, ZeroInfinityError
from zero_infinity.policy.alignment import ALIGNMENT, round_up
from zero_infinity.storage.block import Block
from zero_infinity.storage.crc32 import crc32
from zero_infinity.storage.free_extents import FreeExtents
from zero_infinity.storage.io_engine import IOEngine, IOTicket
from zero_infinity.storage.io_types import Direction, Priority
from zero_infinity.storage.store_monitor import StoreMonitor
from zero_infinity.storage.swap_device import FileRange

# Called when a transfer has ended, well or not, with the lock of the store held.
Done = Callable[[Block], None]


class BlockIO:
    """Homes on NVMe. With `verify`, every read is compared with a checksum of what was written."""

    def __init__(self, engine: IOEngine, monitor: StoreMonitor, *, verify: bool = False) -> None:
        self.num_in_flight = 0
        self.engine = engine
        self._monitor = monitor
        self._verify = verify
        self._extents = FreeExtents(engine.reserve)

    def allocate(self, num_bytes: int) -> int:
        """The offset of a new extent."""
        return self._extents.allocate(num_bytes)

    def free(self, block: Block) -> None:
        """Free the extent of a block, if it has one."""
        if block.offset is not None:
            self._extents.free(block.offset, block.num_bytes)
            block.offset = None

    def reserve(self, num_bytes: int) -> None:
        """Reserve swap space for later blocks."""
        self._extents.add(self.engine.reserve(num_bytes), round_up(num_bytes))

    def read_range(self, block: Block, start: int, stop: int, staging: memoryview) -> tuple[IOTicket, memoryview]:
        """Start to read bytes `start` to `stop` of `block` into `staging`; return where they will be.

        Direct I/O reads whole pages, so `staging` is page-aligned and has room for two pages more than the range.
        """
        first, last = start // ALIGNMENT * ALIGNMENT, round_up(stop)
        memory = staging[: last - first]
        offset = _offset_of(block) + first
        ticket = self.engine.submit(Direction.READ, memory, offset, Priority.DEMANDED, block.name)
        return ticket, memory[start - first : stop - first]

    def file_ranges(self, block: Block) -> Sequence[FileRange]:
        """Where the content of `block` is in files. Nothing else would notice a byte that came back changed: with
        `verify`, it is in none."""
        return () if self._verify else self.engine.file_ranges(_offset_of(block), block.num_bytes)

    def close(self) -> None:
        """Close the engine. Called without the lock: completion callbacks take it."""
        self.engine.close()

    def submit(self, block: Block, direction: Direction, memory: memoryview, priority: Priority, done: Done) -> None:
        """Start to fill `memory` with the stored bytes of `block`, or to store it as these."""
        offset = _offset_of(block)
        if self._verify and direction is Direction.WRITE:
            block.checksum = crc32(memory[: block.num_bytes])

        def complete(error: BaseException | None) -> None:
            if error is None and direction is Direction.READ:
                error = self._compare(block, memory, offset)  # without the lock: it takes time
            self._complete(block, error, done)

        self.num_in_flight += 1
        try:
            block.ticket = self.engine.submit(direction, memory, offset, priority, block.name)
        except ZeroInfinityError as error:
            self._complete(block, error, done)
            return
        block.ticket.add_done_callback(complete)

    def _complete(self, block: Block, error: BaseException | None, done: Done) -> None:
        with self._monitor.lock:
            block.ticket = None
            self.num_in_flight -= 1
            if error is not None:
                # Transfers that were aborted because another one failed may be reported first; the failure is their
                # cause.
                first = error.__cause__ if isinstance(error, EngineClosedError) else None
                self._monitor.fail(error if first is None else first)
            self._monitor.notify()
            done(block)

    def _compare(self, block: Block, memory: memoryview, offset: int) -> CorruptionError | None:
        if not self._verify or block.checksum is None:
            return None
        found = crc32(memory[: block.num_bytes])
        if found == block.checksum:
            return None
        return CorruptionError(
            f"block {block.name!r} ({format_bytes(block.num_bytes)}) came back changed from "
            f"{self.engine.describe(offset)}: checksum {found:#010x}, written as {block.checksum:#010x}\n"
            "  fix:   the drive or its memory is failing; restore the last checkpoint onto another drive"
        )


def _offset_of(block: Block) -> int:
    if block.offset is None:
        raise UsageError(f"block {block.name!r} has no home on NVMe")
    return block.offset
