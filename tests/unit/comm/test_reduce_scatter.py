"""Gradients that are averaged over ranks: what is sent, from where, and what becomes of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import cast

import pytest
import torch
from support.patience import SECONDS, wait_until

from zero_infinity.comm.channel import Channel
from zero_infinity.comm.reduce_scatter import LocalGradients, ReducedShard, ReduceScatter
from zero_infinity.comm.topics import PAUSE, Topic
from zero_infinity.errors import EngineClosedError
from zero_infinity.policy.partition import RankPartition, Sharding, Span
from zero_infinity.policy.zero_stage import ZeroStage

TOPIC = Topic("gradient sum", 3, "layer.3")


class Echo:
    """The channel of `rank` to ranks that have the same gradients: a sum is a multiple."""

    def __init__(self, num_ranks: int = 2, rank: int = 0) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        self.topics: list[Topic] = []
        self.rows: list[list[torch.Tensor]] = []
        self.received_shapes: list[tuple[int, ...]] = []
        self.gathered: list[Topic] = []
        self.error: BaseException | None = None
        self.others_want: list[int] = []  # if not what this rank wants
        self.may_agree = threading.Event()
        self.may_agree.set()

    def propose(self, topic: Topic) -> list[int]:
        assert self.may_agree.wait(SECONDS)
        if self.error is not None:
            raise self.error
        mine = topic.number
        others = self.others_want.pop(0) if self.others_want else mine
        if mine >= 0 and mine == others:
            self.topics.append(topic)
        return [others if rank != self.rank else mine for rank in range(self.num_ranks)]

    def reduce(self, _: Topic, rows: Sequence[torch.Tensor], received: torch.Tensor, out: torch.Tensor) -> None:
        self.rows.append(list(rows))
        self.received_shapes.append(tuple(received.shape))
        out.copy_(rows[self.rank])
        for _ in range(self.num_ranks - 1):
            out.add_(rows[self.rank])

    def gather(self, topic: Topic, wholes: Sequence[tuple[torch.Tensor, Sequence[Span]]]) -> None:
        """The others have the sums of their own spans: 7 everywhere."""
        self.gathered.append(topic)
        for whole, spans in wholes:
            for rank, span in enumerate(spans):
                if rank != self.rank:
                    whole[span.start : span.stop] = 7

    def end(self, thread: threading.Thread) -> None:
        thread.join(SECONDS)


Make = Callable[..., ReduceScatter]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[tuple[Echo, ReduceScatter]] = []

    def build(
        channel: Echo,
        bucket_bytes: int = 1 << 20,
        *,
        wire_dtype: torch.dtype | None = None,
        all_reduce: bool = False,
    ) -> ReduceScatter:
        reduce = ReduceScatter(
            cast(Channel, channel),
            bucket_bytes,
            wire_dtype=wire_dtype,
            all_reduce=all_reduce,
            absent=lambda _: gradients({}, rank=channel.rank),
        )
        made.append((channel, reduce))
        return reduce

    yield build
    for channel, reduce in made:
        channel.may_agree.set()
        reduce.close()


def gradients(
    pieces: dict[int, torch.Tensor],
    num_elements: int = 256,
    *,
    rank: int = 0,
    num_ranks: int = 2,
    stage: ZeroStage = ZeroStage.GRADIENTS,
    dtype: torch.dtype = torch.float32,
) -> LocalGradients:
    layout = Sharding(rank, RankPartition(num_ranks), stage).layout(num_elements, 0)
    return LocalGradients(layout, dtype, pieces)


def numbers(start: int, length: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(start, start + length, dtype=dtype)


def ignore() -> None:
    """Nobody waits for the memory."""


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_gets_the_average_of_its_own_shard(make: Make, rank: int) -> None:
    channel = Echo(rank=rank)
    reduce = make(channel)
    flat = numbers(0, 256)
    released = threading.Event()
    (shard,) = reduce.submit(TOPIC, [gradients({0: flat}, rank=rank)], released.set)
    assert shard.span == Span(128 * rank, 128 * (rank + 1))
    assert torch.equal(shard.wait(), flat[128 * rank : 128 * (rank + 1)])
    assert shard.is_ready
    assert released.wait(SECONDS)
    assert channel.topics == [TOPIC]


def test_a_row_inside_of_one_gradient_is_sent_from_where_it_is(make: Make) -> None:
    channel, flat = Echo(), numbers(0, 256)
    make(channel).submit(TOPIC, [gradients({0: flat})], ignore)[0].wait()
    assert [row.data_ptr() for row in channel.rows[0]] == [flat[:128].data_ptr(), flat[128:].data_ptr()]


def test_a_row_over_several_gradients_is_put_together_and_what_is_missing_is_zero(make: Make) -> None:
    channel = Echo()
    unit = gradients({64: numbers(1, 100), 192: numbers(1000, 10)})
    (shard,) = make(channel).submit(TOPIC, [unit], ignore)
    assert shard.wait().tolist() == [0.0] * 64 + numbers(1, 64).tolist()
    second = channel.rows[0][1].tolist()
    assert second == numbers(65, 36).tolist() + [0.0] * 28 + numbers(1000, 10).tolist() + [0.0] * 54


def test_gradients_in_another_dtype_are_summed_in_that_of_the_unit(make: Make) -> None:
    channel = Echo()
    unit = gradients({0: numbers(0, 256, torch.bfloat16)}, dtype=torch.float32)
    (shard,) = make(channel).submit(TOPIC, [unit], ignore)
    assert shard.wait().dtype == torch.float32
    assert torch.equal(shard.wait(), numbers(0, 128, torch.bfloat16).float())


def test_the_wire_dtype_is_what_is_sent_and_not_what_is_summed_in(make: Make) -> None:
    channel = Echo()
    (shard,) = make(channel, wire_dtype=torch.bfloat16).submit(TOPIC, [gradients({0: numbers(0, 256)})], ignore)
    assert shard.wait().dtype == torch.float32
    assert {row.dtype for row in channel.rows[0]} == {torch.bfloat16}


def test_a_unit_larger_than_the_bucket_goes_in_pieces(make: Make) -> None:
    channel, flat = Echo(), numbers(0, 256)
    bucket_bytes = 2 * 48 * 4  # 48 elements for each of two ranks
    (shard,) = make(channel, bucket_bytes).submit(TOPIC, [gradients({0: flat[:200], 200: flat[200:]})], ignore)
    assert torch.equal(shard.wait(), flat[:128])
    assert [len(rows[0]) for rows in channel.rows] == [48, 48, 32]
    assert set(channel.received_shapes) == {(1, 48)}


def test_small_units_share_a_bucket(make: Make) -> None:
    channel = Echo()
    units = [gradients({0: numbers(1000 * number, 128)}, 128) for number in range(3)]
    shards = make(channel).submit(TOPIC, units, ignore)
    assert [shard.wait().tolist() for shard in shards] == [numbers(1000 * number, 64).tolist() for number in range(3)]
    assert [len(row) for row in channel.rows[0]] == [192, 192]
    assert len(channel.rows) == 1


def test_units_of_different_dtypes_are_sent_apart(make: Make) -> None:
    channel = Echo()
    units = [
        gradients({0: numbers(0, 128)}, 128),
        gradients({0: numbers(5, 128, torch.float64)}, 128, dtype=torch.float64),
        gradients({0: numbers(9, 128)}, 128),
    ]
    shards = make(channel).submit(TOPIC, units, ignore)
    assert [shard.wait()[0].item() for shard in shards] == [0, 5, 9]
    assert [rows[0].dtype for rows in channel.rows] == [torch.float32, torch.float64]


def test_with_all_reduce_every_rank_gets_the_whole_average(make: Make) -> None:
    channel = Echo(rank=1)
    unit = gradients({0: numbers(0, 256)}, rank=1, stage=ZeroStage.NONE)
    (shard,) = make(channel, all_reduce=True).submit(TOPIC, [unit], ignore)
    assert shard.span == Span(0, 256)
    assert shard.wait().tolist() == [3.5] * 128 + numbers(128, 128).tolist()
    assert channel.gathered == [Topic("gradient gather", TOPIC.number, TOPIC.name)]


def test_units_are_reduced_in_the_order_of_their_submission(make: Make) -> None:
    channel = Echo()
    reduce = make(channel)
    channel.may_agree.clear()
    topics = [Topic("gradient sum", number, str(number)) for number in (4, 2, 3)]
    shards = [reduce.submit(topic, [gradients({0: numbers(0, 256)})], ignore)[0] for topic in topics]
    assert not any(shard.is_ready for shard in shards)
    channel.may_agree.set()
    for shard in shards:
        shard.wait()
    assert channel.topics == topics


def test_an_error_reaches_whoever_waits_now_or_later_and_memory_is_released(make: Make) -> None:
    channel = Echo()
    reduce = make(channel)
    channel.error = ValueError("lost")
    released = [threading.Event() for _ in range(2)]
    first = reduce.submit(TOPIC, [gradients({0: numbers(0, 256)})], released[0].set)[0]
    with pytest.raises(ValueError, match="lost"):
        first.wait()
    channel.error = None
    later = reduce.submit(TOPIC, [gradients({0: numbers(0, 256)})], released[1].set)[0]
    with pytest.raises(ValueError, match="lost"):
        later.wait()
    assert all(event.wait(SECONDS) for event in released)
    assert channel.topics == [], "nothing is exchanged after an error"


def test_what_is_left_when_it_is_closed_fails(make: Make) -> None:
    channel = Echo()
    reduce = make(channel)
    channel.may_agree.clear()
    first, second = (reduce.submit(TOPIC, [gradients({0: numbers(0, 256)})], ignore)[0] for _ in range(2))
    closer = threading.Thread(target=reduce.close)
    closer.start()
    wait_until(lambda: reduce._error is not None)
    channel.may_agree.set()
    closer.join(SECONDS)
    assert isinstance(reduce._error, EngineClosedError)
    with pytest.raises(EngineClosedError):
        second.wait()
    assert first.is_ready


def test_a_shard_without_elements_says_so() -> None:
    shard = ReducedShard(Span(0, 1))
    shard._ready.set()
    with pytest.raises(RuntimeError, match="ready and has no elements"):
        shard.wait()


def test_a_rank_without_gradients_takes_part_with_zeros_and_gets_its_shard(make: Make) -> None:
    channel = Echo()
    reduce = make(channel)
    channel.others_want = [2, TOPIC.number]
    (shard,) = reduce.submit(TOPIC, [gradients({0: numbers(0, 256)})], ignore)
    assert torch.equal(shard.wait(), numbers(0, 128))
    reduce.pause()()
    ((number, absent),) = reduce.take_absent()
    assert (number, absent.wait().tolist()) == (2, [0.0] * 128)
    assert (shard.kind.is_partial, absent.kind.is_partial) == (False, True)
    assert reduce.take_absent() == []


def test_a_sum_that_another_rank_has_no_gradients_for_is_partial(make: Make) -> None:
    channel = Echo()
    reduce = make(channel)
    channel.others_want = [PAUSE.number]
    (shard,) = reduce.submit(TOPIC, [gradients({0: numbers(0, 256)})], ignore)
    shard.wait()
    assert shard.kind.is_partial


def test_a_pause_takes_part_until_every_rank_pauses(make: Make) -> None:
    channel = Echo()
    reduce = make(channel)
    channel.others_want = [4, 6]
    reduce.pause()()
    assert [number for number, _ in reduce.take_absent()] == [4, 6]


def test_a_pause_raises_the_error_of_a_failed_exchange(make: Make) -> None:
    channel = Echo()
    reduce = make(channel)
    channel.error = ValueError("lost")
    with pytest.raises(ValueError, match="lost"):
        reduce.pause()()
