"""Fills a model's blocks from tensors in files, within the memory budget.

A block is given memory without being read from its drive, threads copy pieces of tensors into it (converting them, see
`copy_into_block`), and the store writes it back when later blocks need the memory. Several blocks are open at a time,
so that the drive always has something to read.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from zero_infinity.checkpoint.copy_into_block import BlockCopy, TensorSource, copies_into_block
from zero_infinity.checkpoint.io_thread_pool import IOThreadPool, Job, ProgressMeter
from zero_infinity.checkpoint.manifest import StateEntry
from zero_infinity.checkpoint.rank_parts import BlockContent, Key, ModelContents, TensorPart
from zero_infinity.checkpoint.training_view import WeightsView
from zero_infinity.params.unit import Unit
from zero_infinity.policy.homes import Home
from zero_infinity.storage.block import Block

# Open blocks may take this part of the cache; one block is always allowed.
_OPEN_SHARE = 1 / 2


@dataclass(frozen=True, slots=True)
class FillTask:
    """A block and what goes into it. `may_replace`: bytes in no part need not be kept."""

    content: BlockContent
    sources: Mapping[Key, TensorSource]
    may_replace: bool

    @property
    def parts(self) -> list[TensorPart]:
        return [part for part in self.content.parts if part.key in self.sources]

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)


@dataclass(eq=False, slots=True)
class _Open:
    """A block that is being filled."""

    block: Block
    num_copies: int
    filled_bytes: int

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes of the cache."""
        return self.block.held_bytes if self.block.home is Home.NVME else 0


class ShardReader:
    """Fills the blocks of one model."""

    def __init__(
        self,
        contents: ModelContents,
        view: WeightsView,
        thread_pool: IOThreadPool,
        meter: ProgressMeter,
        *,
        replaces_records: bool,
    ) -> None:
        self._contents = contents
        self._meter = meter
        self._thread_pool = thread_pool
        self._replaces_records = replaces_records  # else only the master copies in them
        self._host_cache, self._store = view.host_cache, view.store
        self._most_open = int(self._host_cache.policy.budget * _OPEN_SHARE)
        self._open: set[_Open] = set()
        self._closed = threading.Condition()

    def tasks(
        self, unit: Unit, sources: Mapping[Key, TensorSource], states: Mapping[str, StateEntry]
    ) -> Iterator[FillTask]:
        """The values of a unit's parameters, their master copies and `states`. What has no source stays as it is."""
        yield FillTask(self._contents.of_unit(unit), sources, may_replace=True)
        for content in self._contents.of_record(unit, states):
            yield FillTask(content, sources, may_replace=self._replaces_records)

    def run(self, tasks: Iterable[FillTask]) -> None:
        """Run all tasks, started in this order."""
        try:
            self._thread_pool.run(self._jobs(tasks))
        finally:
            for opened in self._open:  # after an error
                self._host_cache.unpin(opened.block)
            self._open.clear()

    # ------------------------------------------------------------------ blocks

    def _jobs(self, tasks: Iterable[FillTask]) -> Iterator[Job]:
        """Advanced by whichever thread needs the next job, one at a time."""
        for task in tasks:
            if not task.parts:
                continue
            copies = [copy for part in task.parts for copy in copies_into_block(part, task.sources[part.key])]
            opened = self._begin(task, len(copies))
            for copy in copies:
                yield partial(self._do, opened, copy)

    def _begin(self, task: FillTask, num_copies: int) -> _Open:
        host_cache, block = self._host_cache, task.content.block
        opened = _Open(block, num_copies, task.num_bytes)
        with self._closed:
            self._closed.wait_for(
                lambda: not self._open or sum(o.num_bytes for o in (*self._open, opened)) <= self._most_open
            )
            self._open.add(opened)
            host_cache.pin(block)
        if task.may_replace and len(task.parts) == len(task.content.parts) and not block.leased:
            # No need to read it first. (Bytes in no part are padding, or states that do not exist yet.)
            host_cache.expire(block)
        host_cache.access(block)
        host_cache.wait(block)
        return opened

    def _do(self, opened: _Open, copy: BlockCopy, room: memoryview) -> None:
        block = opened.block
        if block.on_device is not None:
            copy(block.on_device, room)
        else:
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
