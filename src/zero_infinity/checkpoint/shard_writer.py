"""Writes one rank's parts of a checkpoint from blocks into files, in the foreground or in the background.

Blocks are read piece by piece where they are, in memory or on their drive. Nothing is fetched, so the cache is the same
afterwards, and whole tensors are never assembled.

In the background, the store guards every block that is not written yet: nobody can read or change it before it is in
the file. So the file has the values at the moment of the save, bit for bit, and nothing is copied. A block that
training asks for is written next; training waits only where it overtakes the drive.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

from zero_infinity.checkpoint.copy_into_block import bytes_of
from zero_infinity.checkpoint.file_io import OpenFile, congruent
from zero_infinity.checkpoint.file_layout import FilePlace, WrittenPart
from zero_infinity.checkpoint.io_thread_pool import IOThreadPool, Job, ProgressMeter
from zero_infinity.checkpoint.manifest import PIECE_BYTES
from zero_infinity.checkpoint.rank_parts import BlockContent, Key
from zero_infinity.checkpoint.training_view import TrainingView
from zero_infinity.policy.homes import Home
from zero_infinity.storage.block import Block
from zero_infinity.storage.crc32 import crc32

# Staging memory in the background: a part of the cache's spare bytes, between these limits.
_MAX_STAGING_BYTES = 16 << 20
_STAGING_SHARE = 1 / 4
_MIN_STAGING_BYTES = 64 << 10


class ShardWriter:
    """The parts of one rank of one checkpoint."""

    def __init__(
        self,
        view: TrainingView,
        rank: int,
        folder: Path,
        files: Iterable[str],
        places: Mapping[Key, FilePlace],
        meter: ProgressMeter,
    ) -> None:
        self._view, self._store, self._rank = view, view.store, rank
        self._places = places
        self._meter = meter
        self.written: list[WrittenPart] = []
        self._guarded: list[Future[None]] = []
        with ExitStack() as stack:
            self._opened = {name: stack.enter_context(OpenFile(folder / name, writable=True)) for name in files}
            self._stack = stack.pop_all()

    def num_bytes(self, contents: Iterable[BlockContent]) -> int:
        """Bytes that this rank will write of these blocks."""
        return sum(
            (last - first) * c.parts[number].dtype.itemsize for c in contents for number, first, last in self._mine(c)
        )

    # ------------------------------------------------------------------ in the foreground

    def write_now(self, contents: Iterable[BlockContent], values: Mapping[Key, torch.Tensor]) -> None:
        """Write blocks, and tensors that are outside of blocks, while training waits."""
        with self._view.staging() as num_bytes, IOThreadPool(num_bytes) as thread_pool:
            if self._view.verify:
                for content in contents:
                    self._write_verified(content, thread_pool)
            else:
                thread_pool.run(job for content in contents for job in self._block_jobs(content, thread_pool))
            thread_pool.run(self._value_jobs(values))

    def _write_verified(self, content: BlockContent, thread_pool: IOThreadPool) -> None:
        """Fetch the block first: the store then verifies what comes back from a drive."""
        host_cache = self._view.host_cache
        host_cache.access(content.block)
        host_cache.wait(content.block)
        with host_cache.pinned(content.block):
            thread_pool.run(self._block_jobs(content, thread_pool))

    # ------------------------------------------------------------------ in the background

    def start(self, contents: Iterable[BlockContent], values: Mapping[Key, torch.Tensor]) -> None:
        """Start to write blocks, each guarded until it is written; `finish` waits for that."""
        by_block = {content.block: content for content in contents if any(self._mine(content))}
        # A leased block may change at any time, through a tensor over its memory; one on a device, when a kernel runs
        # that was launched without asking here. They are written now.
        now = {b: content for b, content in by_block.items() if b.leased or b.home is Home.DEVICE}
        self.write_now(now.values(), values)
        later = [block for block in by_block if block not in now]
        thread_pool = self._stack.enter_context(IOThreadPool(self._lend(), with_torch=False))
        self._store.snapshot.begin(later)
        self._stack.callback(self._store.snapshot.end)
        self._guarded = thread_pool.start(self._guarded_jobs(by_block, thread_pool))

    def _lend(self) -> int:
        """Bytes for staging, taken from the cache meanwhile. Blocks whose home is RAM need none."""
        host_cache, pool = self._view.host_cache, self._store.pool
        num_bytes = min(_MAX_STAGING_BYTES, int(self._view.spare_bytes * _STAGING_SHARE))
        if num_bytes < _MIN_STAGING_BYTES or not host_cache.lend(num_bytes):
            return _MIN_STAGING_BYTES
        self._stack.callback(host_cache.take_back, num_bytes)
        pool.charge(num_bytes)
        self._stack.callback(pool.discharge, num_bytes)
        return num_bytes

    def _guarded_jobs(self, by_block: Mapping[Block, BlockContent], thread_pool: IOThreadPool) -> Iterator[Job]:
        while (block := self._store.snapshot.next_block()) is not None:
            jobs = list(self._block_jobs(by_block[block], thread_pool))
            done = _Countdown(len(jobs), partial(self._store.snapshot.release, block))
            for job in jobs:
                yield partial(done.after, job)

    # ------------------------------------------------------------------ completion

    def finish(self) -> None:
        """Wait until everything is written, and make it durable."""
        IOThreadPool.finish(self._guarded)
        for file in self._opened.values():
            file.sync()

    def close(self) -> None:
        """Release files, memory and guards, finished or not. Idempotent."""
        self._stack.close()

    # ------------------------------------------------------------------ pieces

    def _mine(self, content: BlockContent) -> Iterator[tuple[int, int, int]]:
        """The parts that this rank writes: index of the part, first and last element in the tensor."""
        for number, part in enumerate(content.parts):
            mine = part.elements_of_rank(self._rank)
            if len(mine) and not part.is_derived:
                yield number, mine.start, mine.stop

    def _block_jobs(self, content: BlockContent, thread_pool: IOThreadPool) -> Iterator[Job]:
        store, block = self._store, content.block
        most = PIECE_BYTES if block.home is Home.RAM else thread_pool.room_bytes
        for number, first, last in self._mine(content):
            part = content.parts[number]
            width = part.dtype.itemsize
            in_block = (part.at - part.start) * width  # block offset minus tensor offset
            for start, stop in cut(first * width, last * width, most):

                def peek(room: memoryview, start: int = start + in_block, stop: int = stop + in_block) -> memoryview:
                    return store.peek(block, start, stop, room)

                yield self._job(part.key, start, peek)

    def _value_jobs(self, values: Mapping[Key, torch.Tensor]) -> Iterator[Job]:
        for key, value in values.items():
            data = memoryview(bytes_of(value))
            for start, stop in cut(0, len(data), PIECE_BYTES):
                yield self._job(key, start, partial(_in_memory, data[start:stop]))

    def _job(self, key: Key, start: int, read: Callable[[memoryview], memoryview]) -> Job:
        place = self._places[key]
        file, position = self._opened[place.file], place.start + start

        def job(room: memoryview) -> None:
            if self._view.ranks is not None:
                self._view.ranks.check()  # without a lost rank's part nothing becomes a checkpoint
            data = congruent(read(room), position, room)
            file.write(position, data)
            self.written.append(WrittenPart(key, start, len(data), crc32(data)))
            self._meter.add(len(data))

        return job


class _Countdown:
    """Calls `last` after the last of several jobs is done."""

    def __init__(self, count: int, last: Callable[[], None]) -> None:
        self._count = count
        self._last = last
        self._lock = threading.Lock()

    def after(self, job: Job, room: memoryview) -> None:
        job(room)
        with self._lock:
            self._count -= 1
            is_last = not self._count
        if is_last:
            self._last()


def cut(start: int, stop: int, most: int) -> Iterator[tuple[int, int]]:
    """Cut bytes `start` to `stop` of a tensor at checksum boundaries, into at most `most` bytes each."""
    while start < stop:
        end = min(stop, start + most, (start // PIECE_BYTES + 1) * PIECE_BYTES)
        yield start, end
        start = end


def _in_memory(data: memoryview, _: memoryview) -> memoryview:
    return data
