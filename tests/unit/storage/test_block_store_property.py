"""The block store against a plain dict: random histories on one thread, and a seeded storm on several."""

from __future__ import annotations

import random
import tempfile
import threading
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.blocks import flush_blocks, read_block, write_block
from support.fake_device import FakeDevice, FakeRequest
from support.patience import SECONDS

from benchmarks.throttled_device import ThrottledDevice
from zero_infinity.policy.homes import Home
from zero_infinity.storage.block import Block
from zero_infinity.storage.block_store import BlockStore
from zero_infinity.storage.buffer_pool import BufferPool
from zero_infinity.storage.io_engine import IOEngine
from zero_infinity.storage.striped_files import FileDevice
from zero_infinity.storage.swap_device import SwapDevice

PAGE = 4096


class WatchedPool(BufferPool):
    """Looks at its budget at every change, whoever makes it."""

    def __init__(self, budget: int) -> None:
        super().__init__(budget)
        self.violations: list[int] = []

    def _hold(self, num_bytes: int) -> None:
        super()._hold(num_bytes)
        live = sum(buffer.num_bytes for buffer in self._live.values())
        if max(self._held_bytes, live, self._arena.mapped_bytes) > self.budget:
            self.violations.append(live)


def pattern(value: int, num_bytes: int) -> torch.Tensor:
    """Bytes that differ with the value and, so that displaced ones show, with the place."""
    return ((torch.arange(num_bytes, dtype=torch.int64) * 7 + value * 31) % 251).to(torch.uint8)


def scripted(seed: int) -> FakeDevice:
    """Random latency and short transfers."""
    source = random.Random(seed)

    def latency(request: FakeRequest) -> float:
        return source.choice([0.0, 0.0, 0.0003])

    def transfer(request: FakeRequest) -> int:
        return source.randint(min(1000, request.length), request.length)

    return FakeDevice(latency=latency, transfer=transfer)


class StoreMachine(RuleBasedStateMachine):
    """One thread that decides and is its own worker.

    `fetched` is the logical content of the memory, within the budget. `held` are the uses that were promised to a
    worker and not done yet: (block, what is expected, what is written), first in first out.
    """

    budget = 8 * PAGE
    verify = True

    def __init__(self) -> None:
        super().__init__()
        self.pool = WatchedPool(self.budget)
        self.blocks: dict[Block, int | None] = {}  # with the value that the order of decisions gives them
        self.fetched: dict[Block, None] = {}
        self.held: list[tuple[Block, int | None, int | None]] = []
        self.leases: list[tuple[Block, torch.Tensor, int]] = []
        self.last_value = 0

    def device(self, seed: int) -> SwapDevice:
        return scripted(seed)

    @initialize(seed=st.integers(0, 2**16))
    def begin(self, seed: int) -> None:
        self.store = BlockStore(self.pool, IOEngine(self.device(seed), 2), verify=self.verify)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.calm()
            for block, value in self.blocks.items():
                if value is not None:
                    self.check(block, self.access_and_read(block), value)
            self.leases.clear()
            self.store.close()
            assert self.pool.held_bytes == 0

    # What the rules are made of

    def check(self, block: Block, memory: torch.Tensor, value: int | None) -> None:
        assert value is None or torch.equal(memory, pattern(value, block.num_bytes)), f"{block} is not {value}"

    def access(self, block: Block) -> None:
        """Fetch within the budget: the least recently fetched leave."""
        if block in self.fetched:
            return
        while sum(b.held_bytes for b in self.fetched) + block.held_bytes > self.budget:
            other = next(iter(self.fetched))
            del self.fetched[other]
            self.store.evict(other)
        self.fetched[block] = None
        self.store.fetch(block)

    def access_and_read(self, block: Block) -> torch.Tensor:
        self.access(block)
        self.calm()
        return read_block(self.store, block)

    def work(self) -> None:
        """Do what was promised first."""
        block, expected, new = self.held.pop(0)
        self.drop_leases()
        with self.store.changing(block) as memory:
            self.check(block, memory, expected)
            if new is not None:
                memory.copy_(pattern(new, block.num_bytes))
        self.store.unhold(block, dirty=new is not None)

    def drop_leases(self) -> None:
        """Leased memory is not free, whatever was evicted: give it up before waiting for room."""
        while self.leases:
            block, tensor, value = self.leases.pop()
            self.check(block, tensor, value)
            del tensor

    def calm(self) -> None:
        """This thread is the worker too, so before it waits it does its work."""
        while self.held:
            self.work()
        self.drop_leases()

    def any_block(self, data: st.DataObject) -> Block:
        return data.draw(st.sampled_from(list(self.blocks)))

    def next_value(self) -> int:
        self.last_value += 1
        return self.last_value

    # Rules

    @precondition(lambda self: len(self.blocks) < 8)
    @rule(num_bytes=st.integers(1, 3 * PAGE))
    def create(self, num_bytes: int) -> None:
        self.blocks[self.store.create(f"b{len(self.blocks)}", num_bytes, Home.NVME)] = None

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        block = self.any_block(data)
        self.access(block)
        self.calm()
        self.blocks[block] = self.next_value()
        write_block(self.store, block, pattern(self.last_value, block.num_bytes))

    @precondition(lambda self: any(v is not None for v in self.blocks.values()))
    @rule(data=st.data(), keep=st.booleans())
    def read(self, data: st.DataObject, keep: bool) -> None:
        block = data.draw(st.sampled_from([b for b, v in self.blocks.items() if v is not None]))
        value = self.blocks[block]
        assert value is not None
        tensor = self.access_and_read(block)
        self.check(block, tensor, value)
        if keep:
            self.leases.append((block, tensor[: block.num_bytes], value))

    @precondition(lambda self: self.blocks)
    @rule(data=st.data(), change=st.booleans())
    def hold(self, data: st.DataObject, change: bool) -> None:
        block = self.any_block(data)
        self.drop_leases()  # they see the memory that the worker will change
        self.access(block)
        self.store.hold(block)
        self.held.append((block, self.blocks[block], self.next_value() if change else None))
        if change:
            self.blocks[block] = self.last_value

    @precondition(lambda self: self.held)
    @rule()
    def unhold(self) -> None:
        self.work()

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def fetch(self, data: st.DataObject) -> None:
        self.access(self.any_block(data))

    @precondition(lambda self: self.fetched)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(list(self.fetched)))
        del self.fetched[block]
        self.store.evict(block)

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def expire(self, data: st.DataObject) -> None:
        block = self.any_block(data)
        self.fetched.pop(block, None)
        self.store.expire(block)
        self.blocks[block] = None

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        block = self.any_block(data)
        self.calm()
        self.fetched.pop(block, None)
        del self.blocks[block]
        self.store.drop(block)

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def flush(self, data: st.DataObject) -> None:
        block = self.any_block(data)
        self.calm()
        flush_blocks(self.store, block)
        assert not block.dirty

    @invariant()
    def the_budget_holds(self) -> None:
        assert self.pool.violations == []
        with self.store._monitor.lock:
            buffers = [v.buffer for b in self.blocks for v in b.stays if v.buffer is not None]
            assert sum(buffer.num_bytes for buffer in buffers) <= self.pool.held_bytes <= self.budget
            assert len({buffer.address for buffer in buffers}) == len(buffers)


class FileStoreMachine(StoreMachine):
    """The same on a real file, and without checksums in the way."""

    verify = False

    def device(self, seed: int) -> SwapDevice:
        self.directory = tempfile.TemporaryDirectory()
        return FileDevice(self.directory.name)

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "directory"):
            self.directory.cleanup()


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=40, stateful_step_count=40, suppress_health_check=list(HealthCheck))
TestFileStoreMachine = FileStoreMachine.TestCase
TestFileStoreMachine.settings = settings(
    max_examples=20, stateful_step_count=40, suppress_health_check=list(HealthCheck)
)


# Several threads


class Storm:
    """Threads with blocks of their own and some in common, each within its share of the budget."""

    num_threads = 4
    share = 8 * PAGE

    def __init__(self, device: SwapDevice, seed: int, num_operations: int) -> None:
        self.seed = seed
        self.num_operations = num_operations
        self.pool = WatchedPool(self.num_threads * self.share)
        self.store = BlockStore(self.pool, IOEngine(device, 3), verify=True)
        source = random.Random(seed)
        self.common = [self.store.create(f"c{i}", source.randint(1, 3 * PAGE), Home.NVME) for i in range(4)]
        for value, block in enumerate(self.common):
            write_block(self.store, block, pattern(value, block.num_bytes))
        flush_blocks(self.store, *self.common)
        for block in self.common:
            self.store.evict(block)
        # One thread at a time decides about a common block: fetching it, and evicting it.
        self.deciding = threading.Lock()
        self.errors: list[str] = []

    def run(self) -> None:
        threads = [threading.Thread(target=self._guarded, args=(i,), daemon=True) for i in range(self.num_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)
            assert not thread.is_alive(), f"stuck: {self.pool.num_waiting} wait, {self.pool.holders()}"
        assert self.errors == []
        assert self.pool.violations == []
        self.store.close()

    def _guarded(self, index: int) -> None:
        try:
            self._live(index)
        except BaseException as error:  # noqa: BLE001 - shown by the test
            self.errors.append("".join(traceback.format_exception(error)))

    def _live(self, index: int) -> None:
        source = random.Random(self.seed * 100 + index)
        own = [self.store.create(f"t{index}b{i}", source.randint(1, 3 * PAGE), Home.NVME) for i in range(8)]
        values: dict[Block, int | None] = dict.fromkeys(own)
        values.update({block: value for value, block in enumerate(self.common)})
        fetched: list[Block] = []
        kept: list[tuple[Block, torch.Tensor, int]] = []
        for operation in range(self.num_operations):
            if self.errors:
                return
            block = source.choice(own if source.random() < 0.7 else self.common)
            # What is leased and evicted takes room too, so a share is counted in both.
            while sum(b.held_bytes for b in [*fetched, *(k[0] for k in kept), block]) > self.share:
                if kept and source.random() < 0.5:
                    leased, tensor, value = kept.pop(0)
                    assert torch.equal(tensor, pattern(value, leased.num_bytes)), f"{leased} was changed under a lease"
                    del tensor
                elif fetched:
                    self._evict(fetched.pop(source.randrange(len(fetched))))
            expected = values[block]
            kind = source.random()
            # A lease is a view, not a copy: what is leased is not changed (nor expired, to be written anew).
            mine = block in own and all(k[0] is not block for k in kept)
            if expected is None or (kind < 0.4 and mine):
                values[block] = operation
                write_block(self.store, block, pattern(operation, block.num_bytes))
            elif kind < 0.45 and mine:
                values[block] = None
                self.store.expire(block)
                if block in fetched:
                    fetched.remove(block)
                continue
            else:
                tensor = self._read(block)
                assert torch.equal(tensor, pattern(expected, block.num_bytes)), f"{block} is not {expected}"
                if source.random() < 0.3:
                    kept.append((block, tensor, expected))
                del tensor
            if block in fetched:
                fetched.remove(block)
            if source.random() < 0.3:
                self._evict(block)
            else:
                fetched.append(block)
        kept.clear()
        for block in fetched:
            self._evict(block)
        for block in own:
            self.store.drop(block)

    def _read(self, block: Block) -> torch.Tensor:
        with self.deciding if block in self.common else nullcontext():
            return read_block(self.store, block)

    def _evict(self, block: Block) -> None:
        with self.deciding if block in self.common else nullcontext():
            self.store.evict(block)


DEVICES: dict[str, Callable[[Path], SwapDevice]] = {
    "memory": lambda path: scripted(5),
    "file": lambda path: FileDevice(path),
    "two directories": lambda path: FileDevice([path / "a", path / "b"], stripe_bytes=PAGE),
    "throttled": lambda path: ThrottledDevice(FakeDevice(), 100e6, 0.0002),
}


@pytest.mark.parametrize("kind", DEVICES)
def test_a_storm_of_threads_agrees_with_dicts(kind: str, tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    for seed in range(2):
        Storm(DEVICES[kind](tmp_path), seed, num_operations=400).run()
