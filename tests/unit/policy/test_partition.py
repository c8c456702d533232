from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zero_infinity.config import Partition
from zero_infinity.policy.alignment import GRAIN
from zero_infinity.policy.partition import ONE_RANK, RankPartition, Sharding, Span
from zero_infinity.policy.zero_stage import ZeroStage

kinds: st.SearchStrategy[Partition] = st.sampled_from(["spread", "owner"])


def sharding(stage: int, *, rank: int = 1, num_ranks: int = 4) -> Sharding:
    return Sharding(rank, RankPartition(num_ranks), ZeroStage(stage))


@given(st.integers(1, 10**6), st.integers(1, 9), st.integers(0, 20), kinds)
def test_the_parts_of_all_ranks_are_the_whole(num_elements: int, num_ranks: int, number: int, kind: Partition) -> None:
    partition = RankPartition(num_ranks, kind)
    padded = partition.padded(num_elements)
    assert padded >= num_elements
    spans = partition.spans(padded, number)
    assert len(spans) == num_ranks
    covered = sorted((span.start, span.stop) for span in spans if len(span))
    assert covered[0][0] == 0
    assert covered[-1][1] == padded
    assert all(before[1] == after[0] for before, after in zip(covered, covered[1:], strict=False))
    assert all(span.start % GRAIN == len(span) % GRAIN == 0 for span in spans)


def test_equal_parts_or_one_owner_after_the_other() -> None:
    assert {len(span) for span in RankPartition(3).spans(RankPartition(3).padded(1000), 0)} == {384}
    owners = [
        [len(span) for span in RankPartition(3, "owner").spans(RankPartition(3, "owner").padded(1000), number)]
        for number in range(4)
    ]
    assert owners == [[1024, 0, 0], [0, 1024, 0], [0, 0, 1024], [1024, 0, 0]]


def test_overlaps_may_be_empty() -> None:
    assert Span(10, 20).overlap(15, 30) == Span(15, 20)
    assert len(Span(10, 20).overlap(20, 30)) == 0
    assert len(Span(10, 20).overlap(0, 5)) == 0


@pytest.mark.parametrize(
    ("stage", "properties"),
    [
        (0, {"is_distributed", "reduces_everywhere"}),
        (1, {"is_distributed", "shards_optimizer", "keeps_whole_gradients", "gathers_updates"}),
        (2, {"is_distributed", "shards_optimizer", "shards_gradients", "gathers_updates"}),
        (3, {"is_distributed", "shards_optimizer", "shards_gradients", "shards_parameters"}),
    ],
)
def test_what_a_stage_does(stage: int, properties: set[str]) -> None:
    names = [name for name, value in vars(Sharding).items() if isinstance(value, property)]
    assert {name for name in names if getattr(sharding(stage), name)} == properties
    assert not any(getattr(sharding(stage, rank=0, num_ranks=1), name) for name in names)


@pytest.mark.parametrize(("stage", "stored", "owned"), [(0, 1024, 1024), (1, 1024, 256), (2, 1024, 256), (3, 256, 256)])
def test_a_rank_stores_and_updates_its_part_or_all(stage: int, stored: int, owned: int) -> None:
    layout = sharding(stage).layout(1000, 7)
    assert layout.num_elements == 1024
    assert (len(layout.stored), len(layout.owned)) == (stored, owned)
    assert (layout.is_stored_in_parts, layout.is_updated_in_parts) == (stage == 3, stage >= 1)
    mine = layout.spans[1]
    assert layout.owned in (mine, Span(0, 1024))


def test_one_rank_has_everything() -> None:
    layout = ONE_RANK.layout(1000, 0)
    assert layout.stored == layout.owned == Span(0, 1024)
    assert not layout.is_stored_in_parts
    assert not layout.is_updated_in_parts
