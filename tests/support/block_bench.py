"""A block store over a device whose requests can be held back, for tests."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable

import torch

from support.blocks import write_block
from support.fake_device import FakeDevice, FakeFault, FakeRequest
from support.patience import SECONDS, wait_until
from zero_infinity.policy.homes import Home
from zero_infinity.storage.block import Block
from zero_infinity.storage.block_store import BlockStore
from zero_infinity.storage.buffer_pool import BufferPool
from zero_infinity.storage.io_engine import IOEngine
from zero_infinity.storage.io_types import Direction

PAGE = 4096


def filled(value: int, num_bytes: int = PAGE) -> torch.Tensor:
    return torch.full((num_bytes,), value, dtype=torch.uint8)


class BlockBench:
    """A store of `pages` pages of memory, over a device whose requests wait while `gate` is closed."""

    def __init__(self, pages: int, *, verify: bool = False, faults: tuple[FakeFault, ...] = ()) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.device = FakeDevice(latency=self._hold, faults=faults)
        self.pool = BufferPool(pages * PAGE)
        self.engine = IOEngine(self.device, 2)
        self.store = BlockStore(self.pool, self.engine, verify=verify)

    def _hold(self, request: FakeRequest) -> float:
        self.gate.wait(SECONDS)
        return 0.0

    def block(self, name: str, value: int | None = None, pages: int = 1, home: Home = Home.NVME) -> Block:
        """A block; with a `value` it has that content, and is only at home."""
        block = self.store.create(name, pages * PAGE, home)
        if value is not None:
            write_block(self.store, block, filled(value, pages * PAGE))
            self.store.evict(block)
            if home is Home.NVME:
                wait_until(lambda: not block.stays)
        return block

    def fetched(self, name: str, value: int | None = None, pages: int = 1) -> Block:
        block = self.block(name, value, pages)
        self.store.fetch(block)
        self.store.wait(block)
        return block

    def directions(self) -> list[Direction]:
        return [request.direction for request in self.device.requests]

    def num_reads(self) -> int:
        """Blocks read so far: none here is larger than one request."""
        return self.directions().count(Direction.READ)

    def num_writes(self) -> int:
        return self.directions().count(Direction.WRITE)


def in_thread(function: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    """Run it beside us; the list receives what it returned or raised."""
    results: list[object] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:  # noqa: BLE001 - looked at by the test
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, results


def room(num_bytes: int) -> memoryview:
    return memoryview(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def numbered(store: BlockStore, block: Block, first: int = 0) -> bytes:
    """Give the block a content in which no two neighbours are the same."""
    data = (torch.arange(block.num_bytes) + first).remainder(251).to(torch.uint8)
    write_block(store, block, data)
    return data.numpy().tobytes()
