"""Fills a model's blocks from tensors in files, within the memory budget.

A block is given memory without being read from its drive, threads copy pieces of tensors into it (converting them, see
`dtype_conversion`), and the store writes it back when later blocks need the memory. Several blocks are open at a time,
so that the drive always has something to read.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

from zero_infinity.checkpoint.dtype_conversion import BlockCopy, TensorSource, copies_into_block
from zero_infinity.checkpoint.io_thread_pool import IOThreadPool, Job, ProgressMeter
from zero_infinity.checkpoint.model_contents import BlockContent, Key, ModelContents, TensorPart
from zero_infinity.checkpoint.training_view import WeightsView
from zero_infinity.optim.state_records import StateRecord
from zero_infinity.params.unit import ManagedParameter, Unit
from zero_infinity.policy.memory_budget import Home
from zero_infinity.storage.block import Block

# Open blocks may take this part of the cache; one block is always allowed.
_OPEN_SHARE = 1 / 2


@dataclass(frozen=True, slots=True)
class FillTask:
    """A block and what goes into it. `replaces`: all of its content is replaced."""

    content: BlockContent
    parts: tuple[TensorPart, ...]
    sources: Mapping[Key, TensorSource]
    replaces: bool

    @property
    def num_bytes(self) -> int:
        return sum(part.stop - part.start for part in self.parts) * self.content.dtype.itemsize


@dataclass(eq=False, slots=True)
class _Open:
    """A block that is being filled."""

    content: BlockContent
    num_copies: int
    filled_bytes: int
    num_bytes: int = field(init=False)  # that it takes of the cache

    def __post_init__(self) -> None:
        block = self.content.block
        self.num_bytes = block.held_bytes if block.home is Home.NVME else 0


class ShardReader:
    """Fills the blocks of one model."""

    def __init__(
        self,
        contents: ModelContents,
        view: WeightsView,
        thread_pool: IOThreadPool,
        *,
        replaces_records: bool,
        meter: ProgressMeter | None = None,
    ) -> None:
        self._contents = contents
        self._meter = meter or ProgressMeter(None)
        self._thread_pool = thread_pool
        self._replaces_records = replaces_records  # else only the master copies in them
        self._host_cache, self._store = view.host_cache, view.store
        self._most_open = int(self._host_cache.policy.budget * _OPEN_SHARE)
        self._open: set[_Open] = set()
        self._closed = threading.Condition()

    def of_unit(self, unit: Unit, sources: Mapping[Key, TensorSource]) -> Iterator[FillTask]:
        """The values of a unit's parameters; those without a source keep theirs."""
        content = self._contents.of_unit(unit)
        yield _task(content, sources, replaces=True)

    def of_record(
        self,
        record: StateRecord,
        slots: Mapping[ManagedParameter, tuple[str, ...]],
        sources: Mapping[Key, TensorSource],
    ) -> Iterator[FillTask]:
        """The states of a unit's parameters."""
        for content in self._contents.of_record(record, slots):
            yield _task(content, sources, replaces=self._replaces_records)

    def run(self, tasks: Iterable[FillTask]) -> None:
        """Run all tasks, started in this order."""
        try:
            self._thread_pool.run(self._jobs(tasks))
        finally:
            for opened in self._open:  # after an error
                self._host_cache.unpin(opened.content.block)
            self._open.clear()

    # ------------------------------------------------------------------ blocks

    def _jobs(self, tasks: Iterable[FillTask]) -> Iterator[Job]:
        """Advanced by whichever thread needs the next job, one at a time."""
        for task in tasks:
            if not task.parts:
                continue
            dtype = task.content.dtype
            copies = [copy for part in task.parts for copy in copies_into_block(part, dtype, task.sources[part.key])]
            opened = self._begin(task, len(copies))
            for copy in copies:
                yield partial(self._do, opened, copy)

    def _begin(self, task: FillTask, num_copies: int) -> _Open:
        host_cache, block = self._host_cache, task.content.block
        opened = _Open(task.content, num_copies, task.num_bytes)
        with self._closed:
            self._closed.wait_for(lambda: not self._open or self._open_bytes + opened.num_bytes <= self._most_open)
            self._open.add(opened)
            host_cache.pin(block)
        if task.replaces and not block.leased:
            # No need to read it first. (Bytes in no part are padding, or states that do not exist yet.)
            host_cache.expire(block)
        host_cache.access(block)
        host_cache.wait(block)
        return opened

    @property
    def _open_bytes(self) -> int:
        return sum(opened.num_bytes for opened in self._open)

    def _do(self, opened: _Open, copy: BlockCopy, room: memoryview) -> None:
        block: Block = opened.content.block
        with self._store.changing_bytes(block) as memory:
            copy(memory, room)
        with self._closed:
            opened.num_copies -= 1
            if not opened.num_copies:
                self._store.mark_dirty(block)
                self._store.write_back(block)  # now, so that it can be evicted without waiting
                self._host_cache.unpin(block)
                self._open.discard(opened)
                self._meter.add(opened.filled_bytes)
                self._closed.notify_all()


def _task(content: BlockContent, sources: Mapping[Key, TensorSource], *, replaces: bool) -> FillTask:
    parts = tuple(part for part in content.parts if part.key in sources)
    return FillTask(content, parts, sources, replaces=replaces and len(parts) == len(content.parts))
