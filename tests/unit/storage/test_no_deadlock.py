"""The store's central promise: whoever keeps what he has fetched and not evicted within the budget never deadlocks.

One thread decides, as the training thread does: it fetches, evicts, holds and expires at random, and only the *logical*
sum stays within the budget. What it holds goes to two workers, each first in, first out: one that changes blocks, one
that reads them. I/O takes random time. Everything must come to an end, and every worker must see exactly the content
that the order of decisions says.
"""

from __future__ import annotations

import queue
import random
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from support.blocks import read_block
from support.fake_device import FakeDevice, FakeRequest
from support.patience import SECONDS

from zero_infinity.policy.homes import Home
from zero_infinity.storage.block import Block
from zero_infinity.storage.block_store import BlockStore
from zero_infinity.storage.buffer_pool import BufferPool
from zero_infinity.storage.io_engine import IOEngine

PAGE = 4096


@dataclass
class Step:
    """A worker's use of one block: what it must find (None: anything), and what it leaves (None: no change)."""

    block: Block
    expected: int | None
    new: int | None = None


@dataclass
class Job:
    """As an update: one block is held throughout, others one after the other."""

    whole: Step
    parts: list[Step] = field(default_factory=list)


def check(memory: torch.Tensor, step: Step) -> None:
    if step.expected is not None:
        found = memory[:4].view(torch.int32).item(), memory[-4:].view(torch.int32).item()
        assert found == (step.expected, step.expected), f"{step.block}: found {found}, not {step.expected}"


def fill(memory: torch.Tensor, value: int) -> None:
    memory.view(torch.int32).fill_(value)


class Run:
    """One random history, from a seed."""

    def __init__(self, seed: int, *, slack_pages: int, num_decisions: int) -> None:
        self.random = random.Random(seed)
        pages = [self.random.randint(1, 4) for _ in range(self.random.randint(3, 9))]
        # The least with which a job can run at all: its whole block and its largest part.
        budget = (sum(sorted(pages)[-2:]) + slack_pages) * PAGE
        delays = random.Random(seed + 1)
        slowest = self.random.choice([0.0, 0.0002, 0.001])

        def latency(request: FakeRequest) -> float:
            return delays.random() * slowest

        def transfer(request: FakeRequest) -> int:
            return delays.randint(min(1000, request.length), request.length)

        self.device = FakeDevice(latency=latency, transfer=transfer)
        self.engine = IOEngine(self.device, self.random.randint(1, 3))
        self.pool = BufferPool(budget)
        self.store = BlockStore(self.pool, self.engine, verify=True)
        self.blocks = [self.store.create(f"b{i}", n * PAGE, Home.NVME) for i, n in enumerate(pages)]
        self.values: dict[Block, int | None] = dict.fromkeys(self.blocks)
        self.fetched: dict[Block, None] = {}  # logically: in the order of fetching
        self.num_decisions = num_decisions
        self.last_value = 0
        self.jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self.readings: queue.SimpleQueue[Step | None] = queue.SimpleQueue()
        self.errors: list[BaseException] = []

    # Decisions

    def access(self, block: Block, pinned: tuple[Block, ...] = ()) -> None:
        if block in self.fetched:
            return
        while sum(b.held_bytes for b in self.fetched) + block.held_bytes > self.pool.budget:
            self.evict(self.random.choice([b for b in self.fetched if b not in pinned]))
        self.fetched[block] = None
        self.store.fetch(block)

    def evict(self, block: Block) -> None:
        del self.fetched[block]
        self.store.evict(block)

    def expire(self, block: Block) -> None:
        self.fetched.pop(block, None)
        self.store.expire(block)
        self.values[block] = None

    def step(self, block: Block) -> Step:
        """A change (or none) to `block`, as of now in the order of decisions."""
        step = Step(block, self.values[block])
        if self.random.random() < 0.8:
            self.last_value += 1
            step.new = self.values[block] = self.last_value
        return step

    def submit_job(self) -> None:
        whole, *parts = self.random.sample(self.blocks, self.random.randint(2, len(self.blocks)))
        self.access(whole)
        self.store.hold(whole)
        job = Job(self.step(whole))
        for part in parts:
            self.access(part, pinned=(whole,))
            self.store.hold(part)
            job.parts.append(self.step(part))
            if self.random.random() < 0.2:
                self.expire(part)
            # Whole blocks are pinned and parts are not: the next part may need the room of the last one.
        self.jobs.put(job)

    def submit_reading(self) -> None:
        block = self.random.choice(self.blocks)
        self.access(block)
        self.store.hold_to_read(block)
        self.readings.put(Step(block, self.values[block]))

    def use_here(self) -> None:
        """What the deciding thread does itself: wait, look, perhaps change."""
        block = self.random.choice(self.blocks)
        self.access(block)
        self.store.wait(block)
        step = self.step(block)
        if self.random.random() < 0.5:
            leased = self.store.lease(block)
            check(leased, step)
            del leased
        with self.store.changing(block) as memory:
            check(memory, step)
            if step.new is not None:
                fill(memory, step.new)
        if step.new is not None:
            self.store.mark_dirty(block)

    def evict_something(self) -> None:
        if self.fetched:
            self.evict(self.random.choice(list(self.fetched)))

    def expire_something(self) -> None:
        self.expire(self.random.choice(self.blocks))

    def write_back_something(self) -> None:
        self.store.write_back(self.random.choice(self.blocks))

    def decide(self) -> None:
        kinds = [self.submit_job, self.submit_reading, self.use_here, self.evict_something, self.expire_something]
        for _ in range(self.num_decisions):
            if self.errors:
                return
            self.random.choices([*kinds, self.write_back_something], [6, 4, 2, 4, 1, 1])[0]()
        self.jobs.put(None)
        self.readings.put(None)

    # Workers

    def change(self) -> None:
        while (job := self.jobs.get()) is not None:
            with self.store.changing(job.whole.block) as memory:
                check(memory, job.whole)
            for part in job.parts:
                with self.store.changing(job.whole.block), self.store.changing(part.block) as memory:
                    self.apply(memory, part)
                self.store.unhold(part.block, dirty=part.new is not None)
            with self.store.changing(job.whole.block) as memory:
                self.apply(memory, job.whole)
            self.store.unhold(job.whole.block, dirty=job.whole.new is not None)

    def apply(self, memory: torch.Tensor, step: Step) -> None:
        check(memory, step)
        if step.new is not None:
            fill(memory, step.new)

    def read(self) -> None:
        while (step := self.readings.get()) is not None:
            with self.store.reading(step.block) as memory:
                check(memory, step)

    # All of it

    def go(self) -> None:
        threads = [
            threading.Thread(target=self.guarded, args=(function,), daemon=True, name=function.__name__)
            for function in (self.decide, self.change, self.read)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)
            if self.errors:
                raise self.errors[0]
            if thread.is_alive():
                pytest.fail(self.dump(threads))
        for block in self.blocks:
            if self.values[block] is not None:
                self.evict_all_but(block)
                check(read_block(self.store, block), Step(block, self.values[block]))
        assert self.pool.peak_bytes <= self.pool.budget

    def evict_all_but(self, block: Block) -> None:
        for other in list(self.fetched):
            if other is not block:
                self.evict(other)
        self.fetched[block] = None

    def guarded(self, function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:  # noqa: BLE001 - raised by `go`
            # As text: its frames refer to memory that is gone when pytest wants to show it.
            text = "".join(traceback.format_exception(error))
            self.errors.append(AssertionError(f"in {function.__name__}: {text}"))
            self.jobs.put(None)
            self.readings.put(None)

    def dump(self, threads: list[threading.Thread]) -> str:
        frames = sys._current_frames()
        lines = [f"stuck: {self.pool.held_bytes} of {self.pool.budget} held, {self.pool.num_waiting} wait for room"]
        lines += [
            f"  {block!r} {[(use.kind.value, use.stay is not None) for use in block.uses]}" for block in self.blocks
        ]
        lines += [f"  fetched: {[block.name for block in self.fetched]}", f"  {self.engine.counters()}"]
        for thread in threads:
            if thread.is_alive() and thread.ident in frames:
                lines += [f"  thread {thread.name}:", *traceback.format_stack(frames[thread.ident])]
        return "\n".join(lines)


@pytest.mark.half
@pytest.mark.parametrize("slack_pages", [0, 1, 5])
@pytest.mark.parametrize("group", range(4))
def test_whoever_keeps_the_sum_within_the_budget_never_deadlocks(group: int, slack_pages: int) -> None:
    for seed in range(group * 1000, group * 1000 + 10):
        run = Run(seed, slack_pages=slack_pages, num_decisions=60)
        try:
            run.go()
        except BaseException as error:
            error.add_note(f"seed {seed}, slack_pages {slack_pages}")
            raise
        finally:
            run.store.close()
