"""Blocks: named byte strings with a home, cached in buffers under a byte budget.

The store executes; it decides nothing. Somebody above says *fetch* and *evict*, in an order of his own, and the
store carries that out as room and I/O allow:

- Room is granted in the order in which fetches were asked for. A fetch never overtakes an earlier one, so whoever
  keeps the sum of what he has fetched and not evicted within the budget can never deadlock: every wait is for an
  eviction that was asked for earlier and that depends only on earlier ones.
- An eviction may be asked for while the block is still being read, written or used by a worker. It takes effect when
  the last of these is over (a dirty block is written home first). When the block is fetched again before that, the
  eviction is forgotten, but only if nobody waits for room: else the block goes, and queues like everybody for another
  *visit*. (Seen otherwise: a record that a worker needs waits for room that was promised to it by an eviction, while
  the evicted block was fetched again and is held for a worker that comes later.)
- Memory is handed on only when no tensor refers to it (see `buffers`).

A block has no content until it is first marked dirty; until then a fetch only takes room and reads nothing.
A block whose home is RAM keeps its buffer from its first fetch until its content is discarded.
"""

from __future__ import annotations

import enum
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from zero_infinity.errors import CapacityError, CorruptionError, EngineClosedError, UsageError, ZeroInfinityError
from zero_infinity.store.buffers import Buffer, BufferPool, Request
from zero_infinity.store.engine import Direction, Engine, Priority, Ticket
from zero_infinity.store.extents import Extents, round_up
from zero_infinity.units import format_bytes

# How often a waiting thread looks for tensors that have died: their finalizers may not wake anyone.
_POLL_SECONDS = 0.001
# A wait that nothing in flight can end is an error after this long (another thread may still drop a tensor).
_STUCK_SECONDS = 5.0


class Home(enum.Enum):
    """The slowest tier that a block may be pushed down to."""

    NVME = "nvme"
    RAM = "ram"


class Residence(enum.Enum):
    """Where a block's bytes are, seen from the fast tier."""

    ABSENT = "absent"  # only at home
    QUEUED = "queued"  # waits for room
    READING = "reading"
    PRESENT = "present"


class Visit:
    """One stay of a block in memory, from the fetch that asks for room to the eviction that gives it back."""

    __slots__ = ("buffer", "evicting", "expired", "holds", "request", "residence")

    def __init__(self) -> None:
        self.residence = Residence.QUEUED
        self.request: Request | None = None
        self.buffer: Buffer | None = None
        self.holds = 0  # workers that will use the buffer, or do so now
        self.evicting = False
        self.expired = False  # the content dies with the last hold


class Block:
    """A named byte string. Its fields belong to the store and change only under the store's lock."""

    __slots__ = (
        "checksum",
        "dirty",
        "has_content",
        "home",
        "key",
        "name",
        "num_bytes",
        "offset",
        "priority",
        "ticket",
        "visits",
    )

    def __init__(self, key: int, name: str, num_bytes: int, home: Home, offset: int | None) -> None:
        self.key = key  # unique in its store
        self.name = name
        self.num_bytes = num_bytes
        self.home = home
        self.offset = offset  # in the engine's address space; None when the home is RAM
        self.has_content = False
        self.dirty = False  # the buffer is newer than the home
        # The first is the present one; a later one was asked for before the one before it had left.
        self.visits: deque[Visit] = deque()
        self.ticket: Ticket | None = None  # the read or write in flight
        self.priority = Priority.PREFETCH
        self.checksum: int | None = None

    def __repr__(self) -> str:
        stays = ", ".join(
            f"{v.residence.value}{'-' * v.evicting}{f' holds={v.holds}' if v.holds else ''}" for v in self.visits
        )
        return f"<Block {self.name} {format_bytes(self.num_bytes)}{'*' * self.dirty} {stays or 'absent'}>"

    @property
    def residence(self) -> Residence:
        return self.visits[0].residence if self.visits else Residence.ABSENT

    @property
    def held_bytes(self) -> int:
        """What it takes of a budget when it is present."""
        return round_up(self.num_bytes)

    @property
    def leased(self) -> bool:
        """Whether a tensor over its memory is alive."""
        buffer = self.visits[0].buffer if self.visits else None
        return buffer is not None and buffer.leases > 0


@dataclass(frozen=True, slots=True)
class StoreCounters:
    """Block transfers between home and fast tier since the store was made."""

    blocks_read: int
    blocks_written: int
    bytes_read: int
    bytes_written: int


class BlockStore:
    """Blocks over one pool of buffers and, for those whose home is NVMe, one engine."""

    def __init__(self, pool: BufferPool, engine: Engine | None = None, *, verify: bool = False) -> None:
        self.pool = pool
        self.engine = engine
        self._verify = verify
        self._extents = Extents(engine.reserve) if engine is not None else None
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._in_flight = 0
        self._num_holds = 0
        self._last_key = -1
        self._reads = self._writes = self._bytes_read = self._bytes_written = 0

    # ------------------------------------------------------------------ life of a block

    def create(self, name: str, num_bytes: int, home: Home) -> Block:
        """A block without content."""
        if num_bytes <= 0:
            raise UsageError(f"block {name!r} of {num_bytes} bytes: a block has at least one byte")
        if home is Home.NVME and self._extents is None:
            raise UsageError(f"block {name!r} wants a home on NVMe, but the store has no I/O engine")
        with self._changed:
            self._check()
            self._last_key += 1
            offset = self._extents.allocate(num_bytes) if home is Home.NVME and self._extents is not None else None
            return Block(self._last_key, name, num_bytes, home, offset)

    def reserve(self, num_bytes: int) -> None:
        """Reserve room on NVMe for blocks to come, so that a full disk is an error now and not in mid-training."""
        if num_bytes and self.engine is not None and self._extents is not None:
            with self._changed:
                self._extents.add(self.engine.reserve(num_bytes), round_up(num_bytes))

    def expire(self, block: Block) -> None:
        """The content is dead once the workers that hold the block are done: it is never written, and leaves memory.

        The block can be fetched again at any time, without content.
        """
        with self._changed:
            if not block.visits:
                block.has_content = block.dirty = False
                return
            block.visits[-1].expired = True
            self._settle(block)
            self._start_eviction(block)

    def drop(self, block: Block) -> None:
        """Expire the content and give the home back. The block must not be used again."""
        self.expire(block)
        with self._changed:
            self._changed.wait_for(lambda: not block.visits or self._error is not None)
            if block.offset is not None and self._extents is not None:
                self._extents.free(block.offset, block.num_bytes)
                block.offset = None

    # ------------------------------------------------------------------ movement

    def fetch(self, block: Block, priority: Priority = Priority.PREFETCH) -> None:
        """Bring the block into memory; does not wait. Takes its place in the queue for room."""
        with self._changed:
            self._check()
            last = block.visits[-1] if block.visits else None
            block.priority = min(block.priority, priority) if last is not None else priority
            if last is not None and (not last.evicting or not self.pool.num_waiting):
                last.evicting = False
                if block.ticket is not None and last.residence is Residence.READING:
                    block.ticket.raise_priority(priority)
                return
            visit = Visit()
            block.visits.append(visit)
        request = self.pool.request(block.num_bytes, lambda buffer: self._granted(block, visit, buffer))
        with self._changed:
            if visit.residence is Residence.QUEUED:
                visit.request = request

    def evict(self, block: Block) -> None:
        """Let the block leave memory as soon as nothing needs it there, written home first when it is dirty."""
        if block.home is Home.NVME:
            with self._changed:
                self._start_eviction(block)

    def write_back(self, block: Block) -> None:
        """Start writing a dirty block home; it stays in memory."""
        with self._changed:
            self._check()
            if self._may_write(block):
                self._submit_write(block, Priority.WRITE_BACK)

    def flush(self, blocks: list[Block]) -> None:
        """Write every dirty block of these home and wait until it is there."""
        for block in blocks:
            self.write_back(block)
        for block in blocks:
            self._wait(block, lambda b: b.ticket is None)

    # ------------------------------------------------------------------ use

    def wait(self, block: Block) -> None:
        """Wait until the fetched block is in memory and no worker is going to change it."""
        self._wait(block, self.ready)

    def ready(self, block: Block) -> bool:
        """Whether `wait` would return at once."""
        if len(block.visits) != 1:
            return False
        visit = block.visits[0]
        return visit.residence is Residence.PRESENT and not visit.holds and not visit.evicting

    def lease(self, block: Block) -> torch.Tensor:
        """The bytes of a present block as a tensor; its memory is not reused while the tensor or a view lives."""
        with self._changed:
            return self._present_buffer(block).tensor()[: block.num_bytes]

    def mark_dirty(self, block: Block) -> None:
        """The buffer was written to: it is newer than the home."""
        with self._changed:
            self._present_buffer(block)
            block.dirty = block.has_content = True

    def hold(self, block: Block) -> None:
        """Keep a fetched block for a worker, whatever is evicted meanwhile, until `unhold`."""
        with self._changed:
            block.visits[-1].holds += 1
            self._num_holds += 1

    def unhold(self, block: Block, *, dirty: bool) -> None:
        """A worker is done with the block, and has changed it or not. Holds end in the order in which they began."""
        with self._changed:
            block.visits[0].holds -= 1
            self._num_holds -= 1
            if dirty:
                block.dirty = block.has_content = True
            self._settle(block)
            self._continue_eviction(block)
            self._changed.notify_all()

    @contextmanager
    def changing(self, block: Block) -> Iterator[torch.Tensor]:
        """A worker's view of a held block's bytes, to change in place: it must not outlive the context."""
        self._wait(block, self._may_change)
        # No lease: the hold already keeps the buffer, and a worker's view must not count as a user's tensor.
        yield torch.frombuffer(self._present_buffer(block).view, dtype=torch.uint8)[: block.num_bytes]

    def read(self, block: Block) -> torch.Tensor:
        """Fetch, wait and lease."""
        if not block.has_content:
            raise UsageError(f"block {block.name!r} is read before anything was written to it")
        self.fetch(block, Priority.DEMANDED)
        self.hold(block)
        try:
            self._wait(block, self._may_change)
            return self.lease(block)
        finally:
            self.unhold(block, dirty=False)

    def write(self, block: Block, data: torch.Tensor) -> None:
        """Replace the whole content by the bytes of `data` (uint8, as long as the block)."""
        self.fetch(block, Priority.DEMANDED)
        self.hold(block)
        try:
            with self.changing(block) as memory:
                memory.copy_(data)
        finally:
            self.unhold(block, dirty=True)

    # ------------------------------------------------------------------ the end

    def counters(self) -> StoreCounters:
        with self._changed:
            return StoreCounters(self._reads, self._writes, self._bytes_read, self._bytes_written)

    def close(self) -> None:
        """Fail what waits and give back files, threads and memory. Content is gone. Idempotent."""
        with self._changed:
            if self._error is None:
                self._error = EngineClosedError("the block store is closed")
            self._changed.notify_all()
        if self.engine is not None:
            self.engine.close()
        self.pool.close()

    # ------------------------------------------------------------------ inside, with the lock held

    def _check(self) -> None:
        if self._error is not None:
            if isinstance(self._error, EngineClosedError):
                raise EngineClosedError(str(self._error))
            raise self._error

    def _present_buffer(self, block: Block) -> Buffer:
        buffer = block.visits[0].buffer if block.residence is Residence.PRESENT else None
        if buffer is None:
            raise UsageError(f"block {block.name!r} is not in memory (it is {block.residence.value})")
        return buffer

    def _may_change(self, block: Block) -> bool:
        if block.residence is not Residence.PRESENT or block.ticket is not None:
            return False
        # Workers take turns in the order of their holds: one that holds a later visit waits for that.
        return block.visits[0].holds > 0 or len(block.visits) == 1

    def _may_write(self, block: Block) -> bool:
        idle = block.residence is Residence.PRESENT and not block.visits[0].holds and block.ticket is None
        return block.dirty and block.home is Home.NVME and idle

    def _settle(self, block: Block) -> None:
        visit = block.visits[0]
        if visit.expired and not visit.holds:
            visit.expired = block.has_content = block.dirty = False

    def _start_eviction(self, block: Block) -> None:
        if not block.visits:
            return
        last = block.visits[-1]
        last.evicting = True
        if last.request is not None and not last.holds and last.request.cancel():
            block.visits.pop()
            self._changed.notify_all()
            return
        self._continue_eviction(block)

    def _continue_eviction(self, block: Block) -> None:
        """Take the next step out of memory, if one is due and possible."""
        visit = block.visits[0]
        if not visit.evicting or visit.residence is not Residence.PRESENT or visit.holds or block.ticket is not None:
            return
        if block.dirty and self._error is None:
            self._submit_write(block, Priority.WRITE_BACK)
            return
        buffer = self._present_buffer(block)
        block.visits.popleft()
        self._changed.notify_all()
        buffer.release()

    def _submit_write(self, block: Block, priority: Priority) -> None:
        buffer = self._present_buffer(block)
        block.dirty = False
        memory = buffer.view[: block.held_bytes]
        if self._verify:
            block.checksum = zlib.crc32(memory[: block.num_bytes])
        self._writes += 1
        self._bytes_written += block.held_bytes
        self._submit(block, Direction.WRITE, memory, priority, self._written)

    def _submit(
        self,
        block: Block,
        direction: Direction,
        memory: memoryview,
        priority: Priority,
        done: Callable[[Block, BaseException | None], None],
    ) -> None:
        if self.engine is None or block.offset is None:
            raise UsageError(f"block {block.name!r} has no home on NVMe")
        self._in_flight += 1
        try:
            block.ticket = self.engine.submit(direction, memory, block.offset, priority)
        except ZeroInfinityError as error:
            done(block, error)
            return
        block.ticket.add_done_callback(lambda error: done(block, error))

    # ------------------------------------------------------------------ inside, called back without the lock

    def _granted(self, block: Block, visit: Visit, buffer: Buffer) -> None:
        with self._changed:
            visit.request = None
            if block.visits[0] is not visit:
                self._merge(block, visit)
                buffer.release()
                return
            buffer.label = block.name
            visit.buffer = buffer
            if block.has_content and block.home is Home.NVME and self._error is None:
                visit.residence = Residence.READING
                self._reads += 1
                self._bytes_read += block.held_bytes
                self._submit(block, Direction.READ, buffer.view[: block.held_bytes], block.priority, self._arrived)
                return
            visit.residence = Residence.PRESENT
            self._continue_eviction(block)
            self._changed.notify_all()

    def _merge(self, block: Block, visit: Visit) -> None:
        """A later visit's turn has come and the present one has not left yet: then it need not."""
        block.visits.remove(visit)
        visit.residence = Residence.PRESENT
        present = block.visits[0]
        present.evicting = visit.evicting
        present.holds += visit.holds
        present.expired |= visit.expired
        self._continue_eviction(block)
        self._changed.notify_all()

    def _arrived(self, block: Block, error: BaseException | None) -> None:
        buffer = block.visits[0].buffer
        if error is None and self._verify and buffer is not None and block.checksum is not None:
            found = zlib.crc32(buffer.view[: block.num_bytes])
            if found != block.checksum:
                error = self._corruption(block, found)
        with self._changed:
            self._landed(block, error)
            block.visits[0].residence = Residence.PRESENT
            self._continue_eviction(block)

    def _written(self, block: Block, error: BaseException | None) -> None:
        with self._changed:
            self._landed(block, error)
            self._continue_eviction(block)

    def _landed(self, block: Block, error: BaseException | None) -> None:
        block.ticket = None
        self._in_flight -= 1
        if error is not None and self._error is None:
            self._error = error
        self._changed.notify_all()

    def _corruption(self, block: Block, found: int) -> CorruptionError:
        where = self.engine.describe(block.offset) if self.engine is not None and block.offset is not None else "?"
        return CorruptionError(
            f"block {block.name!r} ({format_bytes(block.num_bytes)}) came back changed from {where}: "
            f"checksum {found:#010x}, written as {block.checksum:#010x}\n"
            "  fix:   the drive or its memory is failing; restore the last checkpoint onto another drive"
        )

    # ------------------------------------------------------------------ waiting

    def _wait(self, block: Block, condition: Callable[[Block], bool]) -> None:
        idle_since: float | None = None
        while True:
            self.pool.collect()
            with self._changed:
                self._check()
                if condition(block):
                    return
                block.priority = Priority.DEMANDED
                if block.ticket is not None:
                    block.ticket.raise_priority(Priority.DEMANDED)
                self._changed.wait(_POLL_SECONDS)
                idle = block.residence is Residence.QUEUED and not self._in_flight and not self._num_holds
            idle_since = (idle_since or time.monotonic()) if idle else None
            if idle_since is not None and time.monotonic() - idle_since > _STUCK_SECONDS:
                raise self._exhausted(block)

    def _exhausted(self, block: Block) -> CapacityError:
        holders = sorted(self.pool.holders(), key=lambda h: -h[1])[:8]
        held = "".join(f"\n  held:  {format_bytes(size)} by {label}" for label, size in holders)
        return CapacityError(
            f"block {block.name!r} needs {format_bytes(block.held_bytes)}, but {format_bytes(self.pool.free_bytes)} of "
            f"{format_bytes(self.pool.budget)} are free and nothing in flight will free more{held}\n"
            "  fix:   drop the tensors that refer to these blocks, or give more memory"
        )
