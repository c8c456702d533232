"""The copying thread: the order of copies, copies that nobody wants any more, and those that fail."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
from support.block_bench import PAGE, BlockBench
from support.patience import SECONDS, wait_until

from zero_infinity.comm.channel import Channel
from zero_infinity.comm.topics import PAUSE, Topic
from zero_infinity.errors import DivergenceError
from zero_infinity.policy.partition import Span
from zero_infinity.storage.block import Block
from zero_infinity.tiers import unit_gather
from zero_infinity.tiers.compute_device import CpuDevice
from zero_infinity.tiers.compute_thread import ComputeThread
from zero_infinity.tiers.copier import Copier, DeviceCopy, copy_size
from zero_infinity.tiers.unit_gather import UnitGather
from zero_infinity.tiers.update_worker import UpdateWorker

NUM_ELEMENTS = PAGE // 4
WHOLE = Span(0, NUM_ELEMENTS)


@dataclass(frozen=True)
class Source:
    """A float32 unit of one page; of a rank that stores a part, `stored` elements."""

    name: str
    number: int
    block: Block
    compute_dtype: torch.dtype = torch.float32
    dtype: torch.dtype = torch.float32
    num_elements: int = NUM_ELEMENTS
    spans: tuple[Span, ...] = (WHOLE,)
    stored: Span = WHOLE
    is_stored_in_parts: bool = False
    is_updated_early: bool = False

    def the_block(self) -> Block:
        return self.block


class GatedDevice(CpuDevice):
    """Whose uploads begin when a test says so."""

    def __init__(self) -> None:
        super().__init__(8 * PAGE)
        self.may_begin = threading.Event()
        self.may_begin.set()
        self.has_begun = threading.Event()
        self.first_elements: list[float] = []
        self.error: Exception | None = None

    def upload(self, source: torch.Tensor, target: torch.Tensor) -> Callable[[], None]:
        self.has_begun.set()
        assert self.may_begin.wait(SECONDS)
        if self.error is not None:
            raise self.error
        self.first_elements.append(source[0].item())
        return super().upload(source, target)


class OtherHalf:
    """Rank 0's channel to a rank that has `value` everywhere."""

    rank = 0

    def __init__(self, value: float) -> None:
        self.value = value
        self.topics: list[Topic] = []
        self.error: BaseException | None = None
        self.other_wants: list[int] = []  # if not what this rank wants
        self.sent: list[list[float]] = []

    def propose(self, topic: Topic) -> list[int]:
        if topic.number >= 0:
            self.topics.append(topic)
        if self.error is not None:
            raise self.error
        return [topic.number, self.other_wants.pop(0) if self.other_wants else topic.number]

    def send_parts(self, _: Topic, ranks: Collection[int], part: torch.Tensor) -> None:
        assert set(ranks) == {1}
        self.sent.append(part.tolist())

    def gather_parts(self, _: Topic, ranks: Collection[int], whole: torch.Tensor, spans: Sequence[Span]) -> None:
        assert set(ranks) == {0}
        whole[spans[1].start : spans[1].stop] = self.value

    def gather(self, _: Topic, wholes: Sequence[tuple[torch.Tensor, Sequence[Span]]]) -> None:
        for whole, spans in wholes:
            whole[spans[1].start : spans[1].stop] = self.value

    def end(self, thread: threading.Thread) -> None:
        thread.join(SECONDS)


class Idle:
    """An update worker without work."""

    def take_over(self) -> None:
        """Nothing to take over."""


class Bench(BlockBench):
    def __init__(self, channel: OtherHalf | None = None) -> None:
        super().__init__(8)
        self.copy_device = GatedDevice()
        gathering = UnitGather(self.store, cast(Channel, channel)) if channel is not None else None
        self.compute_thread = ComputeThread(cast(UpdateWorker, Idle()), None)
        self.copier = Copier(self.store, self.copy_device, gathering, self.compute_thread, lane="copies")

    def source(self, name: str, value: float, **options: object) -> Source:
        block = self.fetched(name)
        self.store.lease(block).view(torch.float32).fill_(value)
        self.store.mark_dirty(block)
        return Source(name, block.key, block, **options)  # type: ignore[arg-type]

    def submit(self, *sources: Source) -> list[DeviceCopy]:
        copies = [DeviceCopy(source) for source in sources]
        for source in sources:
            self.store.hold_to_read(source.block)
        self.copier.submit(sources[0].number, sources[0].name, copies)
        return copies

    def close(self) -> None:
        self.copy_device.may_begin.set()
        self.copier.close()
        self.store.close()


@pytest.fixture
def make() -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def build(channel: OtherHalf | None = None) -> Bench:
        made.append(Bench(channel))
        return made[-1]

    yield build
    for bench in made:
        bench.close()


def test_copies_are_made_in_the_order_in_which_they_were_submitted(make: Callable[..., Bench]) -> None:
    b = make()
    sources = [b.source(str(value), value) for value in range(5)]
    b.copy_device.may_begin.clear()
    copies = [b.submit(sources[number])[0] for number in (3, 1, 4, 0, 2)]
    assert not any(copy.is_ready for copy in copies)
    b.copy_device.may_begin.set()
    b.copier.drain()
    assert b.copy_device.first_elements == [3, 1, 4, 0, 2]
    assert [copy.use()[-1].item() for copy in copies] == [3, 1, 4, 0, 2]
    assert not b.copier.is_collective


def test_a_copy_is_made_in_the_dtype_that_is_computed_in(make: Callable[..., Bench]) -> None:
    b = make()
    (copy,) = b.submit(b.source("a", 1.5, compute_dtype=torch.float64))
    copy.wait()
    assert torch.equal(copy.use(), torch.full((NUM_ELEMENTS,), 1.5, dtype=torch.float64))


def test_what_was_dropped_before_it_was_made_takes_no_memory(make: Callable[..., Bench]) -> None:
    b = make()
    first, second = b.source("a", 1), b.source("b", 2)
    b.copy_device.may_begin.clear()
    (busy,) = b.submit(first)
    assert b.copy_device.has_begun.wait(SECONDS)
    (unwanted,) = b.submit(second)
    b.copier.drop(unwanted)
    b.copy_device.may_begin.set()
    b.copier.drain()
    assert b.copy_device.first_elements == [1]
    assert unwanted.memory is None
    assert unwanted.is_ready
    assert not len(second.block.uses), "the block is not held any longer"
    b.copier.drop(busy)
    assert b.copy_device.pool.held_bytes == 0


def test_what_was_dropped_while_it_was_made_gives_its_memory_back(make: Callable[..., Bench]) -> None:
    b = make()
    b.copy_device.may_begin.clear()
    (copy,) = b.submit(b.source("a", 1))
    assert b.copy_device.has_begun.wait(SECONDS)
    b.copier.drop(copy)
    assert b.copy_device.pool.held_bytes == PAGE, "it is being written to"
    b.copy_device.may_begin.set()
    b.copier.drain()
    assert b.copy_device.pool.held_bytes == 0


def test_an_error_reaches_whoever_acquires_and_nobody_else(make: Callable[..., Bench]) -> None:
    b = make()
    first, second = b.source("a", 1), b.source("b", 2)
    b.copy_device.error = ValueError("no device")
    (broken,) = b.submit(first)
    b.copier.drain()
    b.copy_device.error = None
    (copy,) = b.submit(second)
    b.copier.drain()
    with pytest.raises(ValueError, match="no device"):
        broken.use()
    assert copy.use()[0] == 2
    assert not len(first.block.uses)


def test_a_copy_without_memory_says_so(make: Callable[..., Bench]) -> None:
    with pytest.raises(RuntimeError, match="the copy of 'a' has no memory"):
        DeviceCopy(make().source("a", 1)).flat()


HALVES = (Span(0, NUM_ELEMENTS // 2), Span(NUM_ELEMENTS // 2, NUM_ELEMENTS))


def half(b: Bench, name: str, value: float, **options: object) -> Source:
    return b.source(name, value, spans=HALVES, stored=HALVES[0], is_stored_in_parts=True, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shards_are_gathered_also_for_a_copy_that_nobody_wants(make: Callable[..., Bench], dtype: torch.dtype) -> None:
    channel = OtherHalf(9)
    b = make(channel)
    source = half(b, "a", 1, compute_dtype=dtype)
    b.copy_device.may_begin.clear()
    (copy,) = b.submit(source)
    (unwanted,) = b.submit(half(b, "b", 2))
    b.copier.drop(unwanted)
    b.copy_device.may_begin.set()
    b.copier.drain()
    assert copy.use().tolist() == [1] * len(HALVES[0]) + [9] * len(HALVES[1])
    assert copy.use().dtype == dtype
    assert [topic.name for topic in channel.topics] == ["a", "b"]
    b.copier.drop(copy)
    assert b.copy_device.pool.held_bytes == 0
    assert b.copier.is_collective


def test_after_a_failed_collective_there_is_none(make: Callable[..., Bench]) -> None:
    channel = OtherHalf(9)
    b = make(channel)
    channel.error = ValueError("lost")
    (broken,) = b.submit(half(b, "a", 1))
    b.copier.drain()
    channel.error = None
    (later,) = b.submit(half(b, "b", 2))
    b.copier.drain()
    for copy in (broken, later):
        with pytest.raises(ValueError, match="lost"):
            copy.use()
    assert len(channel.topics) == 1


def test_a_shard_is_sent_to_ranks_that_alone_want_the_unit(make: Callable[..., Bench], monkeypatch: Any) -> None:
    monkeypatch.setattr(unit_gather, "_PART_BYTES", PAGE // 4)
    channel = OtherHalf(9)
    b = make(channel)
    other, mine = half(b, "other", 2), half(b, "mine", 1)
    b.copier.register(other.number, "other", [other])
    channel.other_wants = [other.number]
    (copy,) = b.submit(mine)
    b.copier.drain()
    quarter = NUM_ELEMENTS // 4
    assert channel.sent == [[2.0] * quarter] * 2
    assert copy.use().tolist() == [1] * len(HALVES[0]) + [9] * len(HALVES[1])
    assert b.copier.num_differences == 1


def test_a_unit_that_this_rank_alone_wants_is_gathered_in_parts(make: Callable[..., Bench], monkeypatch: Any) -> None:
    monkeypatch.setattr(unit_gather, "_PART_BYTES", PAGE // 4)
    channel = OtherHalf(9)
    b = make(channel)
    channel.other_wants = [PAUSE.number]
    (copy,) = b.submit(half(b, "a", 1))
    copy.wait()
    assert copy.use().tolist() == [1] * len(HALVES[0]) + [9] * len(HALVES[1])


def test_a_pause_takes_part_until_every_rank_pauses(make: Callable[..., Bench]) -> None:
    channel = OtherHalf(9)
    b = make(channel)
    source = half(b, "a", 3)
    b.copier.register(source.number, "a", [source])
    channel.other_wants = [source.number, source.number]
    b.copier.pause()()
    assert [values[0] for values in channel.sent] == [3, 3]


def test_a_rank_that_waits_long_takes_part(make: Callable[..., Bench]) -> None:
    channel = OtherHalf(9)
    b = make(channel)
    source = half(b, "a", 3)
    b.copier.register(source.number, "a", [source])
    channel.other_wants = [source.number]
    with b.compute_thread.waiting("something else"):
        wait_until(lambda: bool(channel.sent))
    assert channel.sent[0][0] == 3


def test_a_unit_that_was_updated_before_the_step_is_not_sent(make: Callable[..., Bench]) -> None:
    channel = OtherHalf(9)
    b = make(channel)
    source = half(b, "a", 3, is_updated_early=True)
    b.copier.register(source.number, "a", [source])
    channel.other_wants = [source.number]
    with pytest.raises(DivergenceError, match="'a' is read by"):
        b.copier.pause()()


def test_the_size_of_a_copy_counts_what_is_gathered_in_another_dtype(make: Callable[..., Bench]) -> None:
    b = make()
    assert copy_size(b.source("a", 1)) == copy_size(half(b, "b", 1)) >= PAGE
    staged = half(b, "c", 1, compute_dtype=torch.float64)
    assert copy_size(staged) - copy_size(b.source("d", 1, compute_dtype=torch.float64)) >= PAGE
