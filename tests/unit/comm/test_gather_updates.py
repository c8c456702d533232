"""Units of which each rank has updated its shard are completed, after the update and before anybody reads them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import cast

import pytest
import torch
from support.block_bench import PAGE, BlockBench, wait_until
from support.patience import SECONDS

from zero_infinity.comm.channel import Channel
from zero_infinity.comm.gather_updates import UpdateAllGather
from zero_infinity.comm.topics import Topic
from zero_infinity.policy.partition import Span
from zero_infinity.storage.block import Block

NUM_ELEMENTS = PAGE // 4
SPANS = (Span(0, 512), Span(512, NUM_ELEMENTS))


class OtherHalf:
    """Rank 0's channel to a rank whose shard is 9 everywhere."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.seen: list[float] = []
        self.error: BaseException | None = None
        self.may_agree = threading.Event()
        self.may_agree.set()

    def agree(self, topic: Topic) -> None:
        assert self.may_agree.wait(SECONDS)
        if self.error is not None:
            raise self.error
        self.log.append(topic.name)

    def gather(self, _: Topic, wholes: Sequence[tuple[torch.Tensor, Sequence[Span]]]) -> None:
        for whole, spans in wholes:
            self.seen.append(whole[0].item())
            whole[spans[1].start : spans[1].stop] = 9

    def end(self, thread: threading.Thread, wake: Callable[[], None]) -> None:
        thread.join(SECONDS)
        wake()


class Bench(BlockBench):
    def __init__(self) -> None:
        super().__init__(4)
        self.channel = OtherHalf()
        self.all_gather = UpdateAllGather(self.store, cast(Channel, self.channel))

    def submit(self, block: Block) -> None:
        self.all_gather.submit(Topic("parameter gather", block.key, block.name), block, torch.float32, SPANS)


@pytest.fixture
def b() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.channel.may_agree.set()
    bench.all_gather.close()
    bench.store.close()


def elements(b: Bench, block: Block) -> torch.Tensor:
    b.store.wait(block)
    return b.store.lease(block).view(torch.float32)


def test_the_other_ranks_shards_come_into_the_block_which_is_dirty_then(b: Bench) -> None:
    block = b.fetched("a", 0)
    assert not block.dirty
    b.submit(block)
    b.all_gather.drain()
    assert elements(b, block).tolist() == [0] * 512 + [9] * (NUM_ELEMENTS - 512)
    assert block.dirty


def test_units_are_gathered_in_the_order_of_their_updates(b: Bench) -> None:
    blocks = [b.fetched(name, 0) for name in "cab"]
    b.channel.may_agree.clear()
    for block in blocks:
        b.submit(block)
    assert not any(b.store.ready(block) for block in blocks), "nobody reads what is not complete"
    b.channel.may_agree.set()
    b.all_gather.drain()
    assert b.channel.log == ["c", "a", "b"]
    assert all(b.store.ready(block) for block in blocks)


def test_a_unit_is_gathered_after_its_update(b: Bench) -> None:
    block = b.fetched("a", 0)
    b.store.hold(block)
    b.submit(block)
    with b.store.changing(block) as memory:
        memory.view(torch.float32).fill_(5)
        del memory
    assert b.channel.log == []
    b.store.unhold(block, dirty=True)
    b.all_gather.drain()
    assert b.channel.seen == [5]
    assert elements(b, block)[-1] == 9


def test_a_block_that_is_evicted_meanwhile_leaves_complete(b: Bench) -> None:
    block = b.fetched("a", 0)
    b.channel.may_agree.clear()
    b.submit(block)
    b.store.evict(block)
    b.channel.may_agree.set()
    b.all_gather.drain()
    wait_until(lambda: not block.stays)
    b.store.fetch(block)
    assert elements(b, block)[-1] == 9


def test_an_error_reaches_who_drains_and_who_waits_for_a_block(b: Bench) -> None:
    first, second = b.fetched("a", 0), b.fetched("b", 0)
    b.channel.error = ValueError("lost")
    b.submit(first)
    b.submit(second)
    for _ in range(2):
        with pytest.raises(ValueError, match="lost"):
            b.all_gather.drain()
    with pytest.raises(ValueError, match="lost"):
        b.store.wait(second)
    assert b.channel.log == []
