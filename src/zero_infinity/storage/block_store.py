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

A worker's use of a block is a *turn*, which begins when it is asked for (`hold`, `hold_to_read`). Turns to change a
block come one after the other, in the order in which they began and over all visits; turns to read it may overlap each
other. The end of a content (`expire`) is a place in the same order: what earlier turns write dies, what later ones
write lives.

A block has no content until it is first marked dirty; until then a fetch only takes room and reads nothing.
A block whose home is RAM keeps its buffer from its first fetch until its content is discarded.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from zero_infinity.errors import CapacityError, CorruptionError, EngineClosedError, UsageError, ZeroInfinityError, again
from zero_infinity.interrupts import through
from zero_infinity.policy.memory_budget import Home
from zero_infinity.policy.sizes import ALIGNMENT, round_up
from zero_infinity.storage.allocator import move_bytes
from zero_infinity.storage.block import Block, BlockStay, BlockUse, Residence, Turn
from zero_infinity.storage.buffer_pool import Buffer, BufferPool
from zero_infinity.storage.checksum import crc32
from zero_infinity.storage.free_extents import FreeExtents
from zero_infinity.storage.heap import HeapWatch
from zero_infinity.storage.io_types import Direction, IOEngine, Priority
from zero_infinity.trace import HOST, Trace
from zero_infinity.units import format_bytes

# How often a waiting thread looks for tensors that have died: their finalizers may not wake anyone.
_POLL_SECONDS = 0.001
# A wait for room that nothing in flight can end is an error after this long without any event (another thread may still
# drop a tensor)...
_STUCK_SECONDS = 5.0
# ...or after this long when workers hold blocks that they do not use now: they may be busy elsewhere.
_STUCK_WHILE_HELD_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class StoreCounters:
    """Block transfers between home and fast tier since the store was made."""

    blocks_read: int
    blocks_written: int
    bytes_read: int
    bytes_written: int


class BlockStore:
    """Blocks over one pool of buffers and, for those whose home is NVMe, one engine."""

    def __init__(
        self, pool: BufferPool, engine: IOEngine | None = None, *, verify: bool = False, trace: Trace | None = None
    ) -> None:
        self.pool = pool
        self.trace = trace
        self.engine = engine
        self.heap = HeapWatch(pool)
        self._verify = verify
        self._extents = FreeExtents(engine.reserve) if engine is not None else None
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._in_flight = 0
        self._num_turns = 0  # to change or to read
        self._num_events = 0
        # Threads that use a block, and those that wait: one that is in both waits for room with a block in its hands.
        self._busy: Counter[int] = Counter()
        # Blocks that nobody gets to use, in the order in which they are to be let go, and those somebody waits for.
        self._guarded: dict[Block, None] = {}
        self._not_begun: dict[Block, None] = {}
        self._wanted: dict[Block, None] = {}
        self._waiting: Counter[int] = Counter()
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
            block.turns.append(Turn(BlockUse.EXPIRE, None))
            self._settle(block)
            self._start_eviction(block)

    def drop(self, block: Block) -> None:
        """Expire the content and give the home back. The block must not be used again."""
        self.expire(block)
        # After an error nothing moves any more, and nothing needs the home.
        self._wait(block, lambda b: not b.visits, unless_failed=True)
        with self._changed:
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
            visit = BlockStay()
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

    def settle(self) -> None:
        """Wait until nothing is in flight; raise what a transfer failed with."""
        with self._changed:
            self._changed.wait_for(lambda: not self._in_flight or self._error is not None)
            self._check()

    def flush(self, blocks: list[Block]) -> None:
        """Write every dirty block of these home and wait until it is there, also what workers have still to change."""
        for block in blocks:
            self.write_back(block)
        for block in blocks:
            self._wait(block, self._is_home)

    # ------------------------------------------------------------------ use

    def wait(self, block: Block) -> None:
        """Wait until the fetched block is in memory and no worker is going to change it."""
        self._wait(block, self.ready)

    def ready(self, block: Block) -> bool:
        """Whether `wait` would return at once."""
        with self._changed:
            if self._is_guarded(block):
                return False
            if len(block.visits) != 1 or any(turn.use is BlockUse.CHANGE for turn in block.turns):
                return False
            return block.residence is Residence.PRESENT and not block.visits[0].evicting

    def lease(self, block: Block) -> torch.Tensor:
        """The bytes of a present block as a tensor; its memory is not reused while the tensor or a view lives."""
        with self._changed:
            self._check()
            return self._present_buffer(block).tensor()[: block.num_bytes]

    def mark_dirty(self, block: Block) -> None:
        """The buffer was written to: it is newer than the home."""
        with self._changed:
            self._present_buffer(block)
            block.dirty = block.has_content = True

    def hold(self, block: Block) -> None:
        """Keep a fetched block for a worker to change, whatever is evicted meanwhile, until `unhold`."""
        with self._changed:
            self._begin(block, BlockUse.CHANGE)

    def unhold(self, block: Block, *, dirty: bool) -> None:
        """A worker is done with the block, and has changed it or not. Holds end in the order in which they began."""
        with self._changed:
            self._end(block, self._next_turn(block, BlockUse.CHANGE), dirty=dirty)

    def hold_to_read(self, block: Block) -> None:
        """Keep a fetched block for a reader (there is one such thread), until its `reading` is over."""
        with self._changed:
            self._begin(block, BlockUse.READ)

    def claim(self, block: Block) -> Turn:
        """As `hold`, for a worker beside the one whose holds end in their order: its own turn, for `in_turn`."""
        with self._changed:
            return self._begin(block, BlockUse.CHANGE, claimed=True)

    @contextmanager
    def in_turn(self, block: Block, turn: Turn) -> Iterator[torch.Tensor]:
        """The bytes of a claimed block, to change in place when all who were before are done; ends the turn."""
        try:
            self._wait(block, lambda b: self._may_use(b, turn))
            with self._using(block) as memory:
                yield _tensor(memory)
        finally:
            with self._changed:
                self._end(block, turn, dirty=True)

    def changeable(self, block: Block) -> bool:
        """Whether `changing` would not wait."""
        with self._changed:
            return self._may_change(block)

    @contextmanager
    def changing(self, block: Block) -> Iterator[torch.Tensor]:
        """A worker's view of a held block's bytes, to change in place: it must not outlive the context."""
        with self.changing_bytes(block) as memory:
            yield _tensor(memory)

    @contextmanager
    def changing_bytes(self, block: Block) -> Iterator[memoryview]:
        """As `changing`, without torch."""
        self._wait(block, self._may_change)
        with self._using(block) as memory:
            yield memory

    @contextmanager
    def reading(self, block: Block) -> Iterator[torch.Tensor]:
        """A reader's view of the bytes of a block that it holds, when those who were to change it before are done."""
        if self._next_turn(block, BlockUse.READ) is None:
            raise UsageError(f"block {block.name!r} is to be read by a worker, but it was not held for one")
        try:
            self._wait(block, lambda b: self._may_use(b, self._next_turn(b, BlockUse.READ)))
            with self._using(block) as memory:
                yield _tensor(memory)
        finally:
            with self._changed:
                self._end(block, self._next_turn(block, BlockUse.READ), dirty=False)

    def read(self, block: Block) -> torch.Tensor:
        """Fetch, wait until those who were to change it are done, and lease. Not for one who holds it himself."""
        with self._changed:
            self._check()
            if not block.turns:
                self._check_content(block)
            turn = self._fetch_and_begin(block, BlockUse.READ)
        try:
            self._wait(block, lambda b: self._may_use(b, turn))
            with self._changed:
                self._check_content(block)
                return self.lease(block)
        finally:
            with self._changed:
                self._end(block, turn, dirty=False)

    def peek(self, block: Block, start: int, stop: int, room: memoryview) -> memoryview:
        """Bytes `start` to `stop` of the content, which are copied into `room` unless they are at home in memory.

        Nothing is fetched for it or leaves: what is in memory stays as it is. Only while nobody changes the block.
        `room` starts at a page and takes two pages more than the bytes: a home is read in whole pages. For any thread.
        """
        with self._changed:
            self._check()
            self._check_content(block)
            if block.residence is Residence.PRESENT:
                here = self._present_buffer(block).view[start:stop]
                if block.home is Home.RAM:
                    return here
                move_bytes(room[: stop - start], here)
                return room[: stop - start]
            if self.engine is None or block.offset is None:
                raise UsageError(f"block {block.name!r} is neither in memory nor at home")
            first, last = start // ALIGNMENT * ALIGNMENT, round_up(stop)
            memory = room[: last - first]
            ticket = self.engine.submit(Direction.READ, memory, block.offset + first, Priority.DEMANDED, block.name)
        ticket.wait()
        return memory[start - first : stop - first]

    def write(self, block: Block, data: torch.Tensor) -> None:
        """Replace the whole content by the bytes of `data` (uint8, as long as the block), in turn as `read`."""
        if data.dtype is not torch.uint8 or data.shape != (block.num_bytes,):
            raise UsageError(
                f"block {block.name!r} takes {block.num_bytes} bytes (torch.uint8), not a {data.dtype} tensor of shape "
                f"{tuple(data.shape)}"
            )
        with self._changed:
            turn = self._fetch_and_begin(block, BlockUse.CHANGE)
        written = False
        try:
            self._wait(block, lambda b: self._may_use(b, turn))
            with self._using(block) as memory:
                _tensor(memory).copy_(data)
                written = True
        finally:
            with self._changed:
                self._end(block, turn, dirty=written)

    # ------------------------------------------------------------------ a moment that is kept

    def guard(self, blocks: Iterable[Block]) -> None:
        """From now on nobody but `peek` gets to see or to change these blocks (and no others) before `unguard`.

        They move between memory and home as ever. Whoever guards them has to come to an end without anybody else.
        """
        with self._changed:
            self._guarded = dict.fromkeys(blocks)
            self._not_begun = dict(self._guarded)
            self._wanted.clear()
            self._notify()

    def next_guarded(self) -> Block | None:
        """One that was not asked for before: what somebody waits for, else in the order in which they were given."""
        with self._changed:
            block = next(iter(self._wanted or self._not_begun), None)
            if block is not None:
                self._wanted.pop(block, None)
                del self._not_begun[block]
            return block

    def unguard(self, block: Block) -> None:
        """Let it go."""
        with self._changed:
            self._guarded.pop(block, None)
            self._notify()

    # ------------------------------------------------------------------ the end

    def counters(self) -> StoreCounters:
        with self._changed:
            return StoreCounters(self._reads, self._writes, self._bytes_read, self._bytes_written)

    def fail(self, error: BaseException) -> None:
        """Somebody who was to change blocks cannot: whoever waits for one, now or later, gets this error."""
        with self._changed:
            if self._error is None:
                self._error = error
            self._notify()

    def close(self) -> None:
        """Fail what waits and give back files, threads and memory. Content is gone. Idempotent."""
        with self._changed:
            if self._error is None:
                self._error = EngineClosedError("the block store is closed")
            self._notify()
            # Memory must not go while a worker is at it; those that wait have just been told to leave.
            others = self._busy.keys() - {threading.get_ident()}
            self._changed.wait_for(lambda: not others & self._busy.keys(), _STUCK_SECONDS)
        if self.engine is not None:
            self.engine.close()
        self.heap.close()
        self.pool.close()

    # ------------------------------------------------------------------ inside, with the lock held

    def _check(self) -> None:
        if self._error is not None:
            raise again(self._error)

    def _notify(self) -> None:
        self._num_events += 1
        self._changed.notify_all()

    def _check_content(self, block: Block) -> None:
        if not block.has_content:
            raise UsageError(f"block {block.name!r} is read before anything was written to it")

    def _present_buffer(self, block: Block) -> Buffer:
        buffer = block.visits[0].buffer if block.residence is Residence.PRESENT else None
        if buffer is None:
            raise UsageError(f"block {block.name!r} is not in memory (it is {block.residence.value})")
        return buffer

    def _fetch_and_begin(self, block: Block, use: BlockUse) -> Turn:
        # Under one lock: else somebody could evict it between the two.
        self.fetch(block, Priority.DEMANDED)
        return self._begin(block, use, claimed=True)

    def _begin(self, block: Block, use: BlockUse, *, claimed: bool = False) -> Turn:
        if not block.visits:
            raise UsageError(f"block {block.name!r} is to be held, but it was not fetched")
        turn = Turn(use, block.visits[-1], claimed=claimed)
        block.turns.append(turn)
        block.visits[-1].turns += 1
        self._num_turns += 1
        return turn

    def _end(self, block: Block, turn: Turn | None, *, dirty: bool) -> None:
        if turn is None or turn.visit is None:
            raise UsageError(f"block {block.name!r} is let go, but nobody holds it")
        # Not always the first: readers overlap, and a worker that gives up has not waited for its turn.
        block.turns.remove(turn)
        turn.visit.turns -= 1
        self._num_turns -= 1
        if dirty:
            block.dirty = block.has_content = True
        self._settle(block)
        self._continue_eviction(block)
        self._notify()

    def _next_turn(self, block: Block, use: BlockUse) -> Turn | None:
        """The turn of the worker that comes next."""
        return next((turn for turn in block.turns if turn.use is use and not turn.claimed), None)

    def _is_guarded(self, block: Block) -> bool:
        if block in self._not_begun:
            self._wanted[block] = None
        return block in self._guarded

    def _may_use(self, block: Block, turn: Turn | None) -> bool:
        if self._is_guarded(block):
            return False
        if turn is None or block.residence is not Residence.PRESENT or block.visits[0] is not turn.visit:
            return False
        if turn.use is BlockUse.CHANGE:
            return block.turns[0] is turn and block.ticket is None
        for earlier in block.turns:
            if earlier is turn:
                break
            if earlier.use is not BlockUse.READ:
                return False
        return True

    def _may_change(self, block: Block) -> bool:
        turn = self._next_turn(block, BlockUse.CHANGE)
        if turn is not None:
            return self._may_use(block, turn)
        if self._is_guarded(block):
            return False
        # The thread that decides about evictions needs no hold, but comes after all who have one.
        return block.residence is Residence.PRESENT and block.ticket is None and not block.turns

    def _may_write(self, block: Block) -> bool:
        idle = block.residence is Residence.PRESENT and block.ticket is None
        changes = any(turn.use is BlockUse.CHANGE and turn.visit is block.visits[0] for turn in block.turns)
        return block.dirty and block.home is Home.NVME and idle and not changes

    def _is_home(self, block: Block) -> bool:
        """Whether the home has all that was and will be changed; starts the write that is missing when it may."""
        if self._may_write(block):
            self._submit_write(block, Priority.DEMANDED)
        if any(turn.use is BlockUse.CHANGE for turn in block.turns):
            return False
        return block.home is Home.RAM or (not block.dirty and block.ticket is None)

    def _settle(self, block: Block) -> None:
        """Let the content die if all who were to see it are done."""
        while block.turns and block.turns[0].use is BlockUse.EXPIRE:
            block.turns.popleft()
            block.has_content = block.dirty = False

    def _start_eviction(self, block: Block) -> None:
        if not block.visits:
            return
        last = block.visits[-1]
        last.evicting = True
        if last.request is not None and not last.turns and last.request.cancel():
            block.visits.pop()
            self._notify()
            return
        self._continue_eviction(block)

    def _continue_eviction(self, block: Block) -> None:
        """Take the next step out of memory, if one is due and possible."""
        visit = block.visits[0] if block.visits else None
        if visit is None or not visit.evicting or visit.residence is not Residence.PRESENT:
            return
        if visit.turns or block.ticket is not None:
            return
        if block.dirty and block.home is Home.NVME and self._error is None:
            self._submit_write(block, Priority.WRITE_BACK)
            return
        buffer = self._present_buffer(block)
        block.visits.popleft()
        self._notify()
        buffer.release()
        if self.trace is not None:
            self.trace.held(HOST, time.perf_counter(), self.pool.held_bytes)

    def _submit_write(self, block: Block, priority: Priority) -> None:
        buffer = self._present_buffer(block)
        block.dirty = False
        memory = buffer.view[: block.stored_bytes]
        if self._verify:
            block.checksum = crc32(memory[: block.num_bytes])
        self._writes += 1
        self._bytes_written += block.stored_bytes
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
            block.ticket = self.engine.submit(direction, memory, block.offset, priority, block.name)
        except ZeroInfinityError as error:
            done(block, error)
            return
        block.ticket.add_done_callback(lambda error: done(block, error))

    # ------------------------------------------------------------------ inside, called back without the lock

    def _granted(self, block: Block, visit: BlockStay, buffer: Buffer) -> None:
        if self.trace is not None:
            self.trace.held(HOST, time.perf_counter(), self.pool.held_bytes)
        with self._changed:
            visit.request = None
            if block.visits[0] is not visit:
                self._merge(block, visit)
                buffer.release()
                return
            buffer.label = block.name
            visit.buffer = buffer
            # What is to leave again at once, and nobody holds, need not be read.
            wanted = visit.turns > 0 or not visit.evicting
            self._notify()
            if block.has_content and block.home is Home.NVME and self._error is None and wanted:
                visit.residence = Residence.READING
                self._reads += 1
                self._bytes_read += block.stored_bytes
                self._submit(block, Direction.READ, buffer.view[: block.stored_bytes], block.priority, self._arrived)
                return
            visit.residence = Residence.PRESENT
            self._continue_eviction(block)

    def _merge(self, block: Block, visit: BlockStay) -> None:
        """A later visit's turn has come and the one before it has not left yet: then it need not.

        The one before it is not always the present one: two threads may tell of two visits in the wrong order.
        """
        before = block.visits[block.visits.index(visit) - 1]
        block.visits.remove(visit)
        visit.residence = Residence.PRESENT
        before.evicting = visit.evicting
        before.turns += visit.turns
        for turn in block.turns:
            if turn.visit is visit:
                turn.visit = before
        self._notify()
        self._continue_eviction(block)

    def _arrived(self, block: Block, error: BaseException | None) -> None:
        buffer = block.visits[0].buffer
        if error is None and self._verify and buffer is not None and block.checksum is not None:
            found = crc32(buffer.view[: block.num_bytes])
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
            # Transfers that were given up because another one failed may be told first: who failed is in their cause.
            first = error.__cause__ if isinstance(error, EngineClosedError) else None
            self._error = error if first is None else first
        self._notify()

    def _corruption(self, block: Block, found: int) -> CorruptionError:
        where = self.engine.describe(block.offset) if self.engine is not None and block.offset is not None else "?"
        return CorruptionError(
            f"block {block.name!r} ({format_bytes(block.num_bytes)}) came back changed from {where}: "
            f"checksum {found:#010x}, written as {block.checksum:#010x}\n"
            "  fix:   the drive or its memory is failing; restore the last checkpoint onto another drive"
        )

    # ------------------------------------------------------------------ waiting

    @contextmanager
    def _using(self, block: Block) -> Iterator[memoryview]:
        thread = threading.get_ident()
        with self._changed:
            # No lease: the turn already keeps the buffer, and a worker's view must not count as a user's tensor.
            memory = self._present_buffer(block).view[: block.num_bytes]
            self._busy[thread] += 1
        try:
            yield memory
        finally:
            with self._changed:
                _uncount(self._busy, thread)
                self._notify()

    def _wait(self, block: Block, condition: Callable[[Block], bool], *, unless_failed: bool = False) -> None:
        """Wait for `condition`; `unless_failed`: return after an error of the store instead of raising it."""
        thread = threading.get_ident()
        with self._changed:
            if self._error is None and condition(block):
                return  # most often: nothing to wait for
            self._waiting[thread] += 1
        try:
            self._poll(block, condition, unless_failed=unless_failed)
        finally:
            with self._changed:
                _uncount(self._waiting, thread)

    def _poll(self, block: Block, condition: Callable[[Block], bool], *, unless_failed: bool) -> None:
        idle_since, last_event = time.monotonic(), -1
        while True:
            self.pool.collect()
            with self._changed:
                if unless_failed and self._error is not None:
                    return
                self._check()
                if condition(block):
                    return
                if not block.visits:
                    raise UsageError(
                        f"block {block.name!r} is waited for, but it was not fetched (or was evicted since)"
                    )
                block.priority = Priority.DEMANDED
                if block.ticket is not None:
                    block.ticket.raise_priority(Priority.DEMANDED)
                with through():
                    self._changed.wait(_POLL_SECONDS)
                if last_event != self._num_events or not self._is_stuck(block):
                    idle_since, last_event = time.monotonic(), self._num_events
                patience = _STUCK_WHILE_HELD_SECONDS if self._num_turns else _STUCK_SECONDS
            if time.monotonic() - idle_since > patience:
                raise self._exhausted(block)

    def _is_stuck(self, block: Block) -> bool:
        """Whether `block` waits for room and nothing that could give it some is under way."""
        queued = any(visit.residence is Residence.QUEUED for visit in block.visits)
        return (
            queued
            and not self._in_flight
            and not self._guarded
            and all(thread in self._waiting for thread in self._busy)
        )

    def _exhausted(self, block: Block) -> CapacityError:
        holders = sorted(self.pool.holders(), key=lambda h: -h[1])[:8]
        held = "".join(f"\n  held:  {format_bytes(size)} by {label}" for label, size in holders)
        return CapacityError(
            f"block {block.name!r} needs {format_bytes(block.held_bytes)}, but {format_bytes(self.pool.free_bytes)} of "
            f"{format_bytes(self.pool.budget)} are free and nothing in flight will free more{held}\n"
            "  fix:   drop the tensors that refer to these blocks, or give more memory"
        )


def _tensor(memory: memoryview) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8)


def _uncount(counts: Counter[int], key: int) -> None:
    """One less; those that count nothing leave."""
    counts[key] -= 1
    if not counts[key]:
        del counts[key]
