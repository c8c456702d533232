"""Copies units to the compute device, in order, on its own thread; all-gathers them where they are sharded.

A copy is made from the unit's block in host memory, which is held until the device has read it: several copies may be
under way.

Where each rank stores a shard, the thread all-gathers the rest, in the order that all ranks agree on
(`comm/proposals.py`). A unit that only some ranks want is sent to these; the others' threads take part without a copy.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

import torch

from zero_infinity.comm.topics import Topic
from zero_infinity.errors import again
from zero_infinity.interrupts import through
from zero_infinity.one_core_thread import use_one_core
from zero_infinity.policy.partition import Span
from zero_infinity.policy.unit_sizes import copy_bytes
from zero_infinity.storage.block import Block
from zero_infinity.storage.block_store import BlockStore
from zero_infinity.tiers.compute_device import FINISHED, ComputeDevice, DeviceMemory, DeviceTransfer
from zero_infinity.tiers.compute_thread import ComputeThread
from zero_infinity.tiers.direct_read import DirectReader
from zero_infinity.tiers.unit_gather import ShardSource, UnitGather
from zero_infinity.trace import Category

# How often a thread that waits for the copy thread checks that it is still alive.
_POLL_SECONDS = 0.1
# Copies that may be under way at once: enough to keep a link busy, few enough not to hold the host's blocks.
_MAX_UNDER_WAY = 4


class CopySource(ShardSource, Protocol):
    """The part of a unit that this layer needs to copy it."""

    @property
    def name(self) -> str: ...
    @property
    def number(self) -> int: ...
    @property
    def compute_dtype(self) -> torch.dtype: ...
    @property
    def num_elements(self) -> int: ...
    @property
    def is_stored_in_parts(self) -> bool: ...


class DeviceCopy:
    """One unit's elements on the compute device."""

    __slots__ = ("_ready", "_transfer", "error", "is_direct", "is_dropped", "is_written", "memory", "source", "written")

    def __init__(self, source: CopySource, *, is_direct: bool = False, written: torch.Event | None = None) -> None:
        self.source = source
        self.is_direct = is_direct  # it is read from the block's home past host memory
        self.written = written  # the event after the last change of a source on the device
        self.memory: DeviceMemory | None = None
        self.error: BaseException | None = None
        self.is_dropped = False
        self.is_written = False  # the user has had a tensor over it and may have written to it
        self._transfer: DeviceTransfer | None = None
        self._ready = threading.Event()

    @property
    def is_ready(self) -> bool:
        return self._ready.is_set()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until it is ready; False if it was not within `seconds`."""
        with through():
            return self._ready.wait(seconds)

    def use(self) -> torch.Tensor:
        """Return the elements, for what this thread launches from now on; raises the error of a failed copy."""
        if self.error is not None:
            raise again(self.error)
        if self._transfer is not None:
            self._transfer.order()
        if self.memory is not None:
            self.memory.used()
        return self.flat()

    def flat(self) -> torch.Tensor:
        if self.memory is None:
            raise RuntimeError(f"the copy of {self.source.name!r} has no memory")
        return self.memory.tensor()[: _num_bytes(self.source)].view(self.source.compute_dtype)

    def made(self, transfer: DeviceTransfer) -> None:
        """The copy is made, or under way."""
        self._transfer = transfer

    def finish(self) -> None:
        """Mark it as done, successfully or not."""
        self._ready.set()
        if self.is_dropped:
            self.release()

    def drop(self) -> None:
        """It is no longer needed."""
        self.is_dropped = True
        if self.is_ready:
            self.release()

    def release(self) -> None:
        if self.memory is not None:
            self.memory.release()


@dataclass(frozen=True, slots=True)
class _Task:
    topic: Topic
    copies: list[DeviceCopy]


@dataclass(frozen=True, slots=True)
class _Pause:
    """The submitting thread waits until every rank does."""

    ended: threading.Event


class Copier:
    """The copy thread. It refers to a unit only while copying it."""

    def __init__(
        self,
        store: BlockStore,
        device: ComputeDevice,
        gathering: UnitGather | None,
        compute_thread: ComputeThread,
        *,
        lane: str,
        direct: DirectReader | None = None,
    ) -> None:
        """`direct` reads homes on NVMe past host memory; only where copies are not gathered."""
        self.device = device
        self.direct = direct
        self._lane = lane  # its row in a trace
        self._gathering = gathering
        self._compute_thread = compute_thread
        self._store = store
        self._changed = threading.Condition(threading.Lock())
        self._num_pending = 0
        self._without_room_since: float | None = None
        self._failed: BaseException | None = None  # a collective failed: none runs after that
        self._tasks: queue.SimpleQueue[_Task | _Pause | None] = queue.SimpleQueue()
        # Oldest first: the block it reads, and what keeps that in memory.
        self._under_way: deque[tuple[DeviceTransfer, Block, ExitStack]] = deque()
        self._thread = threading.Thread(target=self._work, name="zero-infinity-copy", daemon=True)
        self._thread.start()

    @property
    def bytes_read_directly(self) -> int:
        return self.direct.bytes_read if self.direct is not None else 0

    @property
    def thread_id(self) -> int:
        """The kernel's number of the copy thread."""
        return self._thread.native_id or 0

    @property
    def is_collective(self) -> bool:
        """True if copies are gathered from all ranks."""
        return self._gathering is not None

    def reads_directly(self, source: CopySource) -> bool:
        """True if a copy can be read from the home of its block past host memory, when the block is not there."""
        return (
            self.direct is not None
            and source.dtype == source.compute_dtype
            and bool(self._store.file_ranges(source.the_block()))
        )

    def seconds_without_room(self) -> float:
        """How long the thread has been waiting for memory for a copy now; for any thread."""
        since = self._without_room_since
        return time.perf_counter() - since if since is not None else 0.0

    def submit(self, number: int, name: str, copies: list[DeviceCopy]) -> None:
        """Make these copies together. The blocks of those that are not direct are held for reading until then."""
        with self._changed:
            self._num_pending += 1
        self._tasks.put(_Task(Topic("parameter gather", number, name), copies))

    def register(self, number: int, name: str, sources: Sequence[CopySource]) -> None:
        """Other ranks may gather these units, which are copied together, by this number."""
        if self._gathering is not None:
            self._gathering.register(number, name, sources)

    @property
    def num_differences(self) -> int:
        """Number of gathers so far that not every rank wanted: the same on every rank, during a pause."""
        return self._gathering.num_differences if self._gathering is not None else 0

    def pause(self) -> Callable[[], None]:
        """From now on take part in what other ranks gather. Call the result to wait until every rank pauses."""
        pause = _Pause(threading.Event())
        self._tasks.put(pause)

        def wait() -> None:
            with through():
                pause.ended.wait()
            if self._failed is not None:
                raise again(self._failed)

        return wait

    def drain(self) -> None:
        """Wait until every copy is made, including dropped ones. The thread that acquires a copy raises its error."""
        with self._changed:
            while self._num_pending and self._thread.is_alive():
                with through():
                    self._changed.wait(_POLL_SECONDS)

    def drop(self, copy: DeviceCopy) -> None:
        """The copy is no longer needed."""
        with self._changed:
            copy.drop()

    def close(self) -> None:
        """End the thread after its current copy."""
        self._tasks.put(None)
        if self._gathering is not None:
            self._gathering.channel.end(self._thread)
        elif threading.current_thread() is not self._thread:
            self._thread.join()
        if self.direct is not None:
            self.direct.close()
        self.device.close()

    def _work(self) -> None:
        use_one_core()
        try:
            self._make_all()
        finally:
            while self._under_way:
                self._finish_oldest()

    def _make_all(self) -> None:
        while (task := self._next_task()) is not None:
            if isinstance(task, _Pause):
                if self._gathering is not None and self._failed is None:
                    self._try(self._gathering.take_part_until_all_pause)
                task.ended.set()
                continue
            try:
                if self._failed is not None:
                    raise again(self._failed)
                self._make(task)
            except BaseException as error:  # noqa: BLE001 - raised by the thread that acquires the copy
                for copy in task.copies:
                    copy.error = error.with_traceback(None)  # its frames would keep the copies and their memory alive
                if self._gathering is not None:
                    self._failed = error.with_traceback(None)
            with self._changed:
                for copy in task.copies:
                    copy.finish()
                self._num_pending -= 1
                self._changed.notify_all()
            del task, copy

    def _try(self, exchange: Callable[[], None]) -> None:
        """Run an exchange with other ranks; an error is kept for the threads that wait."""
        try:
            exchange()
        except BaseException as error:  # noqa: BLE001 - raised by these threads
            self._failed = error.with_traceback(None)

    def _next_task(self) -> _Task | _Pause | None:
        """Wait for a task; releases the sources of finished copies meanwhile."""
        while self._under_way:
            try:
                return self._tasks.get_nowait()
            except queue.Empty:
                self._finish_oldest()
        if self._gathering is None:
            return self._tasks.get()
        while True:
            patience = self._gathering.patience_seconds
            try:
                return self._tasks.get(timeout=patience)
            except queue.Empty:
                # The submitting thread may wait for another rank, which waits for this rank's shard of a unit.
                if self._failed is None and self._compute_thread.seconds_of_wait() > patience:
                    self._try(self._gathering.take_part_once)

    def _finish_oldest(self) -> None:
        """Wait until the device has read the oldest source, and release it."""
        transfer, _, reading = self._under_way.popleft()
        with reading:
            transfer.wait()

    def _make(self, task: _Task) -> None:
        with torch.no_grad():
            if self._gathering is not None:
                self._gather(self._gathering, task)
                return
            for copy in task.copies:
                self._copy(copy)

    def _copy(self, copy: DeviceCopy) -> None:
        source = copy.source
        if copy.is_direct and self.direct is not None:
            self._read_directly(copy, self.direct)
            return
        if copy.is_dropped:
            self._pass_over(source.the_block())
            return
        self._allocate(copy)
        copy.made(self._load(copy, source.num_elements, copy.flat()))

    def _allocate(self, copy: DeviceCopy) -> None:
        self._without_room_since = time.perf_counter()
        try:
            copy.memory = self.device.allocate(_num_bytes(copy.source))
        finally:
            self._without_room_since = None

    def _read_directly(self, copy: DeviceCopy, direct: DirectReader) -> None:
        """Read a copy from the home of its block. An update drops the copy before it changes the block."""
        block = copy.source.the_block()
        while self._under_way:  # this thread must never wait for a block while it holds others
            self._finish_oldest()
        if not self._store.wait_for_home(block, unless=lambda: copy.is_dropped):
            return
        self._allocate(copy)
        self.device.uploaded().wait()  # no stream knows of the read: what has used the memory before must be done
        start = time.perf_counter()
        direct.read(copy.flat(), self._store.file_ranges(block))
        copy.made(FINISHED)
        self._note(copy.source, start, block.num_bytes)

    def _pass_over(self, block: Block) -> None:
        """Release a block that is held for a copy that nobody needs."""
        if block.on_device is None:
            self._finish_before(block)
            with self._store.reading(block):
                return

    def _load(self, copy: DeviceCopy, num_elements: int, target: torch.Tensor) -> DeviceTransfer:
        """Copy a unit's block, or a part of it, to the device as soon as the block is in memory."""
        source = copy.source
        block = source.the_block()
        if block.on_device is not None:
            return self.device.copy(block.on_device.view(source.dtype)[:num_elements], target, copy.written)
        self._finish_before(block)
        with ExitStack() as reading:
            memory = reading.enter_context(self._store.reading(block))
            transfer = self._upload(source, memory.view(source.dtype)[:num_elements], target)
            if not transfer.is_done:
                self._under_way.append((transfer, block, reading.pop_all()))
        return transfer

    def _finish_before(self, block: Block) -> None:
        """Wait for copies that have to be done before this block is read.

        One at a time reads a block, and one that is not there yet may need the room that the sources of earlier copies
        take: this thread must never wait for a block while it holds others.
        """
        while self._under_way:
            is_read = any(block is other for _, other, _ in self._under_way)
            if not is_read and len(self._under_way) < _MAX_UNDER_WAY and self._store.readable(block):
                return
            self._finish_oldest()

    def _upload(self, source: CopySource, stored: torch.Tensor, target: torch.Tensor) -> DeviceTransfer:
        start = time.perf_counter()
        transfer = self.device.upload(stored, target)
        self._note(source, start, stored.nbytes)
        return transfer

    def _note(self, source: CopySource, start: float, num_bytes: int) -> None:
        if self._store.trace is not None:
            seconds = time.perf_counter() - start
            self._store.trace.span(source.name, Category.FETCH, self._lane, start, seconds, num_bytes)

    def _gather(self, gather: UnitGather, task: _Task) -> None:
        """All-gather these units, including dropped ones: the other ranks take part."""
        with self.device.uploading():
            wholes: list[tuple[torch.Tensor, Sequence[Span]]] = []
            for copy in task.copies:
                source = copy.source
                self._allocate(copy)
                whole = copy.flat()
                if source.dtype != source.compute_dtype:
                    whole = torch.empty(source.num_elements, dtype=source.dtype, device=whole.device)
                self._load(copy, len(source.stored), whole[source.stored.start : source.stored.stop])
                wholes.append((whole, source.spans))
            gather(task.topic, wholes)
            for copy, (whole, _) in zip(task.copies, wholes, strict=True):
                if whole.dtype != copy.source.compute_dtype:
                    copy.flat().copy_(whole)
            gathered = self.device.uploaded()
        for copy in task.copies:
            copy.made(gathered)


def _num_bytes(source: CopySource) -> int:
    return source.num_elements * source.compute_dtype.itemsize


def copy_size(source: CopySource) -> int:
    """Return the size of a copy, including what is needed while it is made."""
    staged = source.is_stored_in_parts and source.dtype != source.compute_dtype
    return copy_bytes(
        source.num_elements, stored=source.dtype.itemsize, computed=source.compute_dtype.itemsize, staged=staged
    )
