"""Moves blocks between memory and home: fetch, evict, write back.

It executes and decides nothing: the cache policy above calls `fetch` and `evict` in an order of its own, and the mover
carries them out as room and I/O allow.

- Room is granted in the order of the fetches (see `BufferPool`).
- An eviction may be requested while the block is being read, written or used by a worker. It takes effect when the last
  of these has ended; a dirty block is written home first.
- A block that is fetched again before its eviction took effect stays, but only if nobody waits for room. Otherwise the
  eviction proceeds and the block queues for room like every other, for another *stay*. Without this rule there is a
  deadlock: a worker waits for room that an eviction was to free, while the evicted block was fetched again and is kept
  for a worker that comes later.

Order of uses is the concern of `BlockUses`, transfers are those of `BlockIO`.
"""

from __future__ import annotations

import time

from zero_infinity.policy.homes import Home
from zero_infinity.storage.block import Block, BlockStay, Residence
from zero_infinity.storage.block_io import BlockIO
from zero_infinity.storage.buffer import Buffer
from zero_infinity.storage.buffer_pool import BufferPool
from zero_infinity.storage.io_types import Direction, Priority
from zero_infinity.storage.store_monitor import StoreMonitor
from zero_infinity.trace import HOST, Trace


class BlockMover:
    """Moves the blocks of one store between the buffers of `pool` and their homes (`io`; none if all are in RAM)."""

    def __init__(self, pool: BufferPool, io: BlockIO | None, monitor: StoreMonitor, trace: Trace | None) -> None:
        self._pool = pool
        self._io = io
        self._monitor = monitor
        self._trace = trace

    def fetch(self, block: Block, priority: Priority) -> None:
        """Bring the block into memory; does not wait. Takes its place in the queue for room."""
        with self._monitor.lock:
            self._monitor.check()
            last = block.stays[-1] if block.stays else None
            block.priority = min(block.priority, priority) if last is not None else priority
            if last is not None and (not last.evicting or not self._pool.num_waiting):
                last.evicting = False
                if block.ticket is not None and last.residence is Residence.READING:
                    block.ticket.raise_priority(priority)
                return
            stay = BlockStay()
            block.stays.append(stay)
        # Without the lock: the pool has a lock of its own, and calls back with none held.
        request = self._pool.request(block.num_bytes, lambda buffer: self._granted(block, stay, buffer))
        with self._monitor.lock:
            if stay.residence is Residence.QUEUED:
                stay.request = request

    # The lock of the store is held in what follows.

    def start_eviction(self, block: Block) -> None:
        """Let the last stay of the block end as soon as nothing needs it."""
        if not block.stays:
            return
        last = block.stays[-1]
        last.evicting = True
        if last.request is not None and not last.num_uses and last.request.cancel():
            block.stays.pop()
            self._monitor.notify()
            return
        self.continue_eviction(block)

    def continue_eviction(self, block: Block) -> None:
        """Take the next step of an eviction, if one is pending and possible."""
        stay = block.stays[0] if block.stays else None
        if stay is None or not stay.evicting or stay.num_uses or not block.is_idle:
            return
        if self._io is not None and block.dirty and block.home is Home.NVME and self._monitor.error is None:
            self._write(block, self._io)
            return
        buffer = block.present_buffer()
        block.stays.popleft()
        self._monitor.notify()
        buffer.release()
        self._trace_held_bytes()

    def write_back(self, block: Block) -> None:
        """Start to write a dirty block home, unless a worker will change it during this stay. It stays in memory."""
        if self._io is None or not block.dirty or block.home is not Home.NVME or not block.is_idle:
            return
        if not block.uses.has_changes(block.stays[0]):
            self._write(block, self._io)

    def _write(self, block: Block, io: BlockIO) -> None:
        memory = block.present_buffer().view[: block.stored_bytes]
        block.dirty = False
        io.submit(block, Direction.WRITE, memory, Priority.WRITE_BACK, self.continue_eviction)

    def _read_done(self, block: Block) -> None:
        block.stays[0].residence = Residence.PRESENT
        self.continue_eviction(block)

    # Callbacks of the pool, without the lock.

    def _granted(self, block: Block, stay: BlockStay, buffer: Buffer) -> None:
        self._trace_held_bytes()
        with self._monitor.lock:
            stay.request = None
            if block.stays[0] is not stay:
                self._merge(block, stay)
                buffer.release()
                return
            buffer.label = block.name
            stay.buffer = buffer
            self._monitor.notify()
            # A stay that is to end at once, and that nobody uses, need not be read.
            wanted = stay.num_uses > 0 or not stay.evicting
            stored = block.has_content and block.home is Home.NVME
            if self._io is not None and stored and wanted and self._monitor.error is None:
                stay.residence = Residence.READING
                memory = buffer.view[: block.stored_bytes]
                self._io.submit(block, Direction.READ, memory, block.priority, self._read_done)
                return
            stay.residence = Residence.PRESENT
            self.continue_eviction(block)

    def _merge(self, block: Block, stay: BlockStay) -> None:
        """A later stay was granted room while the previous one has not ended: then the previous one continues.

        The previous stay is not always the current one: two threads may report two grants in the wrong order.
        """
        previous = block.stays[block.stays.index(stay) - 1]
        block.stays.remove(stay)
        stay.residence = Residence.PRESENT
        previous.evicting = stay.evicting
        block.uses.move(stay, previous)
        self._monitor.notify()
        self.continue_eviction(block)

    def _trace_held_bytes(self) -> None:
        if self._trace is not None:
            self._trace.held(HOST, time.perf_counter(), self._pool.held_bytes)
