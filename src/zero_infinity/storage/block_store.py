"""The block store: named byte strings with a home (RAM or NVMe), cached in buffers under a byte budget.

This is the interface to the blocks. It executes and decides nothing: the cache policy above says which block to fetch
and which to evict, and in what order.

Deadlock freedom: room is granted in the order of the fetches, and a fetch never overtakes an earlier one. So a caller
that keeps the sum of what it has fetched and not evicted within the budget never deadlocks: every wait is for an
eviction that was requested earlier and that depends only on earlier ones.

The rules are each in one part:
- `BlockMover`: what fetching and evicting does, and when an eviction takes effect.
- `BlockUses` (block.py): the order in which workers use a block.
- `BlockIO`: extents on NVMe, transfers, checksums.
- `BlockWaits`: waiting, and waits that cannot end.
- `SnapshotGuard` (`store.snapshot`): blocks keep their content until a background save has copied them.
- `BufferPool`: memory is reused only when no tensor refers to it.

A block has no content until it is first marked dirty. Until then a fetch takes room and reads nothing. A block whose
home is RAM keeps its buffer from its first fetch until its content expires.

A block whose home is device memory is always there, and none of the rules above applies to it: what uses it is ordered
on the device, by its streams. Here it is only read and written as bytes, between steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch

from zero_infinity.errors import EngineClosedError, UsageError
from zero_infinity.policy.homes import Home
from zero_infinity.storage.block import Block, BlockUse, Residence, UseKind
from zero_infinity.storage.block_io import BlockIO
from zero_infinity.storage.block_mover import BlockMover
from zero_infinity.storage.block_waits import BlockWaits
from zero_infinity.storage.buffer_pool import BufferPool
from zero_infinity.storage.heap import HeapTrimmer
from zero_infinity.storage.io_engine import IOEngine
from zero_infinity.storage.io_types import Priority
from zero_infinity.storage.pages import move_bytes
from zero_infinity.storage.snapshot_guard import SnapshotGuard
from zero_infinity.storage.store_monitor import StoreMonitor
from zero_infinity.storage.swap_device import FileRange
from zero_infinity.trace import Trace


class BlockStore:
    """Blocks over one pool of buffers and, for those whose home is NVMe, one I/O engine."""

    def __init__(
        self, pool: BufferPool, engine: IOEngine | None = None, *, verify: bool = False, trace: Trace | None = None
    ) -> None:
        self.pool = pool
        self.engine = engine
        self.trace = trace
        self._heap = HeapTrimmer(pool)
        self._monitor = StoreMonitor()
        self._io = BlockIO(engine, self._monitor, verify=verify) if engine is not None else None
        self._mover = BlockMover(pool, self._io, self._monitor, trace)
        self.snapshot = SnapshotGuard(self._monitor)
        self._waits = BlockWaits(pool, self._io, self._monitor, self.snapshot)
        self._last_key = -1

    # ------------------------------------------------------------------ life of a block

    def create(self, name: str, num_bytes: int, home: Home) -> Block:
        """A block without content."""
        if num_bytes <= 0:
            raise UsageError(f"block {name!r} of {num_bytes} bytes: a block has at least one byte")
        if home is Home.NVME and self._io is None:
            raise UsageError(
                f"block {name!r} needs a home on NVMe, but the store has no I/O engine\n  fix:   set nvme=..."
            )
        with self._monitor.lock:
            self._monitor.check()
            self._last_key += 1
            offset = self._io.allocate(num_bytes) if home is Home.NVME and self._io is not None else None
            return Block(self._last_key, name, num_bytes, home, offset)

    def create_on_device(self, name: str, num_bytes: int, device: torch.device) -> Block:
        """A block of zeros in device memory."""
        block = self.create(name, num_bytes, Home.DEVICE)
        block.on_device = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        block.has_content = True
        return block

    def reserve(self, num_bytes: int) -> None:
        """Reserve swap space for later blocks, so that a full disk is an error now and not during training."""
        if num_bytes and self._io is not None:
            with self._monitor.lock:
                self._io.reserve(num_bytes)

    def expire(self, block: Block) -> None:
        """Discard the content once the workers that hold the block are done: it is not written, and leaves memory.

        The block can be fetched again at any time, without content.
        """
        if block.on_device is not None:
            return
        with self._monitor.lock:
            block.uses.expire()
            self._drop_expired(block)
            self._mover.start_eviction(block)

    def drop(self, block: Block) -> None:
        """Expire the content and free the home. The block must not be used again."""
        self.expire(block)
        block.on_device = None
        # After an error nothing moves any more, and nobody needs the home.
        self._waits.wait(block, lambda b: not b.stays, unless_failed=True)
        if self._io is not None:
            with self._monitor.lock:
                self._io.free(block)

    # ------------------------------------------------------------------ movement

    def fetch(self, block: Block, priority: Priority = Priority.PREFETCH) -> None:
        """Bring the block into memory; does not wait. Takes its place in the queue for room."""
        if block.on_device is None:
            self._mover.fetch(block, priority)

    def evict(self, block: Block) -> None:
        """Let the block leave memory as soon as nothing needs it there; a dirty block is written home first."""
        if block.home is Home.NVME:
            with self._monitor.lock:
                self._mover.start_eviction(block)

    def write_back(self, block: Block) -> None:
        """Start to write a dirty block home. It stays in memory."""
        with self._monitor.lock:
            self._monitor.check()
            self._mover.write_back(block)

    def settle(self) -> None:
        """Wait until no transfer is in flight; raise the error of one that failed."""
        with self._monitor.lock:
            if self._io is not None:
                io = self._io
                self._monitor.lock.wait_for(lambda: not io.num_in_flight or self._monitor.error is not None)
            self._monitor.check()

    # ------------------------------------------------------------------ use on the thread that fetches and evicts

    def wait(self, block: Block) -> None:
        """Wait until the fetched block is in memory and no worker will change it."""
        self._waits.wait(block, self.ready)

    def ready(self, block: Block) -> bool:
        """True if `wait` would return immediately."""
        if block.on_device is not None:
            return True
        with self._monitor.lock:
            if self.snapshot.refuses(block) or len(block.stays) != 1 or block.uses.has_changes():
                return False
            return block.residence is Residence.PRESENT and not block.stays[0].evicting

    def lease(self, block: Block) -> torch.Tensor:
        """The bytes of a present block as a tensor; its memory is not reused while the tensor or a view is alive."""
        with self._monitor.lock:
            self._monitor.check()
            return block.present_buffer().tensor()[: block.num_bytes]

    def mark_dirty(self, block: Block) -> None:
        """The buffer was written to: it is newer than the home."""
        if block.on_device is not None:
            return
        with self._monitor.lock:
            block.present_buffer()
            block.mark_changed()

    def has_changes(self, block: Block) -> bool:
        """True if a worker has yet to change the block."""
        with self._monitor.lock:
            return block.uses.has_changes()

    def wait_unchanged(self, block: Block) -> None:
        """Wait until no worker will change the block, so that it may be peeked at. It need not be in memory."""
        self._waits.wait_for_changes(block)

    def peek(self, block: Block, start: int, stop: int, staging: memoryview) -> memoryview:
        """Bytes `start` to `stop` of the content, from wherever it is. For any thread, while nobody changes the block.

        Nothing is fetched or evicted. The bytes are copied into `staging`, unless the home of the block is RAM. Homes
        on NVMe are read in whole pages, so `staging` is page-aligned and two pages larger than the range.
        """
        if block.on_device is not None:
            _tensor(staging)[: stop - start].copy_(block.on_device[start:stop])
            return staging[: stop - start]
        with self._monitor.lock:
            self._monitor.check()
            if not block.has_content:
                raise UsageError(f"block {block.name!r} is read before anything was written to it")
            if block.residence is Residence.PRESENT:
                present = block.present_buffer().view[start:stop]
                if block.home is Home.RAM:
                    return present
                move_bytes(staging[: stop - start], present)
                return staging[: stop - start]
            if self._io is None:
                raise UsageError(f"block {block.name!r} is neither in memory nor on NVMe")
            ticket, memory = self._io.read_range(block, start, stop, staging)
        ticket.wait()
        return memory

    # ------------------------------------------------------------------ use by workers

    def hold(self, block: Block) -> None:
        """Keep a fetched block in memory for a worker that will change it, until `unhold`; evictions wait."""
        self._begin(block, UseKind.CHANGE)

    def unhold(self, block: Block, *, dirty: bool) -> None:
        """A worker is done with the block; `dirty` if it changed it. Holds end in the order in which they began."""
        with self._monitor.lock:
            self._end(block, block.uses.next_of(UseKind.CHANGE), dirty=dirty)

    def hold_to_read(self, block: Block) -> None:
        """Keep a fetched block in memory for the reading worker (there is one such thread), until `reading` ends."""
        self._begin(block, UseKind.READ)

    def claim(self, block: Block) -> BlockUse:
        """Like `hold`, for another worker than the one whose holds end in order. Pass the use to `changing_claimed`."""
        return self._begin(block, UseKind.CHANGE, claimed=True)

    def changeable(self, block: Block) -> bool:
        """True if `changing` would not wait."""
        with self._monitor.lock:
            return self._may_change(block)

    @contextmanager
    def changing(self, block: Block) -> Iterator[torch.Tensor]:
        """The bytes of a held block, to change in place; the tensor must not outlive the context."""
        if block.on_device is not None:
            yield block.on_device
            return
        with self.changing_bytes(block) as memory:
            yield _tensor(memory)

    def changing_bytes(self, block: Block) -> AbstractContextManager[memoryview]:
        """Like `changing`, without torch."""
        return self._waits.use(block, self._may_change)

    def changing_claimed(self, block: Block, use: BlockUse) -> AbstractContextManager[torch.Tensor]:
        """The bytes of a claimed block, to change in place when all earlier uses have ended. Ends the claim."""
        return self._using(block, use, dirty=True)

    def reading(self, block: Block) -> AbstractContextManager[torch.Tensor]:
        """The bytes of a block that is held for reading, when all earlier changes have ended. Ends the hold."""
        use = block.uses.next_of(UseKind.READ)
        if use is None:
            raise UsageError(f"block {block.name!r} is to be read by a worker, but it was not held for one")
        return self._using(block, use, dirty=False)

    def readable(self, block: Block) -> bool:
        """True if `reading` would not wait."""
        with self._monitor.lock:
            use = block.uses.next_of(UseKind.READ)
            return use is not None and self._may_use(block, use)

    # ------------------------------------------------------------------ reading homes past host memory

    def file_ranges(self, block: Block) -> Sequence[FileRange]:
        """Where the home of a block is in files; empty if it is not in files, or must not be read past the store."""
        return self._io.file_ranges(block) if self._io is not None and block.home is Home.NVME else ()

    def wait_for_home(self, block: Block, unless: Callable[[], bool]) -> bool:
        """Wait until all of the content is in the home of a block; False if `unless` holds instead.

        A block that has left memory logically may still be changed by an earlier update, or on its way home.
        """
        self._waits.wait(block, lambda b: unless() or _is_home_current(b))
        return not unless()

    # ------------------------------------------------------------------ the process's heap

    def trim_heap_if_grown(self) -> None:
        """Return free memory of the C heap to the kernel if the heap has grown (see `HeapTrimmer`)."""
        self._heap.trim_if_grown()

    def reset_heap_baseline(self) -> None:
        """Trim the heap and measure its growth from now on: a model has moved out of it, into blocks."""
        self._heap.reset_baseline()

    # ------------------------------------------------------------------ the end

    def fail(self, error: BaseException) -> None:
        """A worker cannot finish its changes: every thread that waits for a block, now or later, gets this error."""
        self._monitor.fail(error)

    def close(self) -> None:
        """Fail waiting threads and release files, threads and memory. Content is lost. Idempotent."""
        self._monitor.fail(EngineClosedError("the block store is closed"))
        # Memory must not be unmapped while a worker uses it. Those that wait have just been told to leave.
        self._waits.wait_for_users()
        if self._io is not None:
            self._io.close()
        self._heap.close()
        self.pool.close()

    # ------------------------------------------------------------------ order of uses, with the lock held

    def _begin(self, block: Block, kind: UseKind, *, claimed: bool = False) -> BlockUse:
        with self._monitor.lock:
            if not block.stays:
                raise UsageError(
                    f"block {block.name!r} is to be held, but it was not fetched\n  fix:   fetch it before holding it"
                )
            self._waits.count_holds(1)
            return block.uses.begin(kind, block.stays[-1], claimed=claimed)

    def _end(self, block: Block, use: BlockUse | None, *, dirty: bool) -> None:
        if use is None:
            raise UsageError(f"block {block.name!r} is released, but nobody holds it")
        block.uses.end(use)
        self._waits.count_holds(-1)
        if dirty:
            block.mark_changed()
        self._drop_expired(block)
        self._mover.continue_eviction(block)
        self._monitor.notify()

    def _drop_expired(self, block: Block) -> None:
        """Drop the content if it has expired and every use that was to see it has ended."""
        if block.uses.pop_expired():
            block.has_content = block.dirty = False

    def _may_use(self, block: Block, use: BlockUse) -> bool:
        if self.snapshot.refuses(block):
            return False
        if block.residence is not Residence.PRESENT or block.stays[0] is not use.stay:
            return False
        # A read may see a block that is being written home; a change would tear the write.
        return block.uses.is_due(use) and (use.kind is UseKind.READ or block.ticket is None)

    def _may_change(self, block: Block) -> bool:
        use = block.uses.next_of(UseKind.CHANGE)
        if use is not None:
            return self._may_use(block, use)
        # The thread that fetches and evicts needs no hold, but comes after all uses.
        return not self.snapshot.refuses(block) and block.is_idle and not len(block.uses)

    @contextmanager
    def _using(self, block: Block, use: BlockUse, *, dirty: bool) -> Iterator[torch.Tensor]:
        """The bytes of the block when `use` is due, which then ends."""
        try:
            with self._waits.use(block, lambda b: self._may_use(b, use)) as memory:
                yield _tensor(memory)
        finally:
            with self._monitor.lock:
                self._end(block, use, dirty=dirty)


def _is_home_current(block: Block) -> bool:
    return block.has_content and not block.dirty and block.ticket is None and not block.uses.has_changes()


def _tensor(memory: memoryview) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8)
