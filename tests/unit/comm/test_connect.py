"""Which channels a model has, and that ranks have to have the same model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest
import torch

from zero_infinity.comm.connect import connect
from zero_infinity.comm.process_group import RankGroup
from zero_infinity.comm.topics import START, Topic
from zero_infinity.errors import UsageError
from zero_infinity.policy.partition import RankPartition, Sharding
from zero_infinity.policy.zero_stage import ZeroStage

CPU = torch.device("cpu")


class Ranks:
    """Two ranks; what the other one has is given."""

    def __init__(self, theirs: list[int]) -> None:
        self.names: dict[int, str] = {}
        self.made: list[tuple[str, torch.device | None]] = []
        self.topics: list[Topic] = []
        self._theirs = theirs

    def channel(self, name: str, device: torch.device | None = None) -> Ranks:
        self.made.append((name, device))
        return self

    def agree(self, topic: Topic, say: Sequence[int]) -> list[list[int]]:
        self.topics.append(topic)
        return [list(say), self._theirs]


def sharding(stage: ZeroStage) -> Sharding:
    return Sharding(0, RankPartition(2), stage)


@pytest.mark.parametrize(
    ("stage", "made"),
    [
        (ZeroStage.NONE, {("steps", None), ("gradients", CPU)}),
        (ZeroStage.OPTIMIZER, {("steps", None), ("gradients", CPU), ("parameters", None)}),
        (ZeroStage.GRADIENTS, {("steps", None), ("gradients", CPU), ("parameters", None)}),
        (ZeroStage.PARAMETERS, {("steps", None), ("gradients", CPU), ("parameters", CPU)}),
    ],
)
def test_a_stage_has_the_channels_that_it_needs(stage: ZeroStage, made: set[tuple[str, torch.device | None]]) -> None:
    ranks = Ranks([2, 100])
    channels = connect(cast(RankGroup, ranks), sharding(stage), {0: "a", 1: "b"}, 100, CPU, CPU, None)
    assert set(ranks.made) == made
    assert len(ranks.made) == len(made), "one for each thread"
    assert (channels.copies is not None) is (stage is ZeroStage.PARAMETERS)
    assert (channels.updates is not None) is (stage in (ZeroStage.OPTIMIZER, ZeroStage.GRADIENTS))
    assert ranks.names == {0: "a", 1: "b"}
    assert ranks.topics == [START]


@pytest.mark.parametrize("stage", list(ZeroStage))
def test_units_that_live_on_a_device_are_sent_there_where_every_rank_stores_them(stage: ZeroStage) -> None:
    ranks = Ranks([1, 10])
    channels = connect(cast(RankGroup, ranks), sharding(stage), {0: "a"}, 10, CPU, CPU, CPU)
    has_updates = stage in (ZeroStage.OPTIMIZER, ZeroStage.GRADIENTS)
    assert (channels.on_device is not None) is has_updates
    assert (("updated parameters", CPU) in ranks.made) is has_updates


def test_ranks_with_different_models_are_told_apart() -> None:
    with pytest.raises(UsageError) as caught:
        connect(cast(RankGroup, Ranks([3, 12345])), sharding(ZeroStage.NONE), {0: "a"}, 1000, None, CPU, None)
    assert str(caught.value) == (
        "rank 1 has a model of 3 units and 12,345 elements, rank 0 one of 1 units and 1,000 elements\n"
        "  fix:   build the same model on every rank"
    )
