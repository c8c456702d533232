"""Copies units to the compute device, in order, on its own thread; all-gathers them where they are sharded.

A copy is made from the unit's block in host memory, which is held until the device has read it: several copies may be
under way. Where each rank stores a shard, the thread all-gathers the rest, so every rank must submit the same copies in
the same order.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

import torch

from zero_infinity.comm.channel import Channel, Topic
from zero_infinity.errors import DivergenceError, again
from zero_infinity.interrupts import through
from zero_infinity.one_core_thread import use_one_core
from zero_infinity.policy.partition import Span
from zero_infinity.policy.unit_sizes import copy_bytes
from zero_infinity.storage.block import Block
from zero_infinity.storage.block_store import BlockStore
from zero_infinity.tiers.compute_device import ComputeDevice, DeviceMemory, DeviceTransfer
from zero_infinity.trace import Category

# How often a thread that waits for the copy thread checks that it is still alive.
_POLL_SECONDS = 0.1
# Copies that may be under way at once: enough to keep a link busy, few enough not to hold the host's blocks.
_MAX_UNDER_WAY = 4


class CopySource(Protocol):
    """The part of a unit that this layer needs to copy it."""

    @property
    def name(self) -> str: ...
    @property
    def number(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def compute_dtype(self) -> torch.dtype: ...
    @property
    def num_elements(self) -> int: ...
    @property
    def spans(self) -> tuple[Span, ...]: ...
    @property
    def stored(self) -> Span: ...
    @property
    def is_stored_in_parts(self) -> bool: ...
    def the_block(self) -> Block: ...


class DeviceCopy:
    """One unit's elements on the compute device."""

    __slots__ = ("_ready", "_transfer", "error", "is_dropped", "is_written", "memory", "source")

    def __init__(self, source: CopySource) -> None:
        self.source = source
        self.memory: DeviceMemory | None = None
        self.error: BaseException | None = None
        self.is_dropped = False
        self.is_written = False  # the user has had a tensor over it and may have written to it
        self._transfer: DeviceTransfer | None = None
        self._ready = threading.Event()

    @property
    def is_ready(self) -> bool:
        return self._ready.is_set()

    def wait(self) -> None:
        with through():
            self._ready.wait()

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
    number: int  # the same on every rank
    name: str
    copies: list[DeviceCopy]


class Copier:
    """The copy thread. It refers to a unit only while copying it."""

    def __init__(self, store: BlockStore, device: ComputeDevice, channel: Channel | None, *, lane: str) -> None:
        self.device = device
        self._lane = lane  # its row in a trace
        self._channel = channel
        self._store = store
        self._changed = threading.Condition(threading.Lock())
        self._num_pending = 0
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        # Oldest first: the block it reads, and what keeps that in memory.
        self._under_way: deque[tuple[DeviceTransfer, Block, ExitStack]] = deque()
        self._thread = threading.Thread(target=self._work, name="zero-infinity-copy", daemon=True)
        self._thread.start()

    @property
    def is_collective(self) -> bool:
        """True if copies are gathered from all ranks."""
        return self._channel is not None

    def submit(self, number: int, name: str, copies: list[DeviceCopy]) -> None:
        """Make these copies together. Their units' blocks are held for reading until then."""
        with self._changed:
            self._num_pending += 1
        self._tasks.put(_Task(number, name, copies))

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
        if self._channel is not None:
            self._channel.end(self._thread)
        elif threading.current_thread() is not self._thread:
            self._thread.join()
        self.device.close()

    def _work(self) -> None:
        use_one_core()
        try:
            self._make_all()
        finally:
            while self._under_way:
                self._finish_oldest()

    def _make_all(self) -> None:
        failed: BaseException | None = None  # set by a failed collective: no collective runs after that
        while (task := self._next_task()) is not None:
            try:
                if failed is not None:
                    raise again(failed)
                self._make(task)
            except BaseException as error:  # noqa: BLE001 - raised by the thread that acquires the copy
                for copy in task.copies:
                    copy.error = error.with_traceback(None)  # its frames would keep the copies and their memory alive
                # If ranks ask for different units nothing was exchanged, so they may still recover.
                if self._channel is not None and not isinstance(error, DivergenceError):
                    failed = error
            with self._changed:
                for copy in task.copies:
                    copy.finish()
                self._num_pending -= 1
                self._changed.notify_all()
            del task, copy

    def _next_task(self) -> _Task | None:
        """Wait for a task; releases the sources of finished copies meanwhile."""
        while self._under_way:
            try:
                return self._tasks.get_nowait()
            except queue.Empty:
                self._finish_oldest()
        return self._tasks.get()

    def _finish_oldest(self) -> None:
        """Wait until the device has read the oldest source, and release it."""
        transfer, _, reading = self._under_way.popleft()
        with reading:
            transfer.wait()

    def _make(self, task: _Task) -> None:
        with torch.no_grad():
            if self._channel is not None:
                self._gather(self._channel, task)
                return
            for copy in task.copies:
                self._copy(copy)

    def _copy(self, copy: DeviceCopy) -> None:
        source = copy.source
        if copy.is_dropped:
            self._finish_before(source.the_block())
            with self._store.reading(source.the_block()):
                return
        copy.memory = self.device.allocate(_num_bytes(source))
        copy.made(self._load(source, source.num_elements, copy.flat()))

    def _load(self, source: CopySource, num_elements: int, target: torch.Tensor) -> DeviceTransfer:
        """Copy a unit's block, or a part of it, to the device as soon as the block is in memory."""
        block = source.the_block()
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
        if self._store.trace is not None:
            seconds = time.perf_counter() - start
            self._store.trace.span(source.name, Category.FETCH, self._lane, start, seconds, stored.nbytes)
        return transfer

    def _gather(self, channel: Channel, task: _Task) -> None:
        """All-gather these units, including dropped ones: the other ranks take part."""
        with self.device.uploading():
            wholes: list[tuple[torch.Tensor, Sequence[Span]]] = []
            for copy in task.copies:
                source = copy.source
                copy.memory = self.device.allocate(_num_bytes(source))
                whole = copy.flat()
                if source.dtype != source.compute_dtype:
                    whole = torch.empty(source.num_elements, dtype=source.dtype, device=whole.device)
                self._load(source, len(source.stored), whole[source.stored.start : source.stored.stop])
                wholes.append((whole, source.spans))
            topic = Topic("parameter gather", task.number, task.name)
            channel.agree(topic)
            channel.gather(topic, wholes)
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
