from __future__ import annotations

import itertools
from typing import Any

import pytest

import zero_infinity as zi
from zero_infinity.comm.checkpoint_agreement import Agreement


class FakeRanks:
    """Rank 1 of 2; `others` is what rank 0 says."""

    rank, num_ranks = 1, 2

    def __init__(self) -> None:
        self.call_numbers = itertools.count()
        self.settled: list[tuple[str, Exception | None]] = []

    def all_well(self, phase: str, error: Exception | None) -> None:
        self.settled.append((phase, error))
        if error is None:
            raise zi.RankError("rank 0 failed")

    def tell(self, what: str, value: str) -> list[str]:
        return [f"rank 0 on {what}", value]


class FakeChannel:
    def __init__(self, of_first: list[int]) -> None:
        self.of_first = of_first

    def agree(self, topic: object, values: list[Any]) -> list[list[Any]]:
        return [self.of_first, values]


def agreement(of_first: list[Any]) -> tuple[FakeRanks, Agreement]:
    ranks = FakeRanks()
    return ranks, Agreement("zi.save", ranks, FakeChannel(of_first))  # type: ignore[arg-type]


def test_one_rank_agrees_with_itself() -> None:
    alone = Agreement("zi.save", None, None)
    assert (alone.rank, alone.num_ranks) == (0, 1)
    with alone.agreed("checks"):
        pass
    with pytest.raises(ValueError, match="mine"), alone.agreed("checks"):
        raise ValueError("mine")
    alone.same("it", "text", "fix")
    assert alone.of_first("it", "text") == "text"


def test_errors_are_exchanged_only_when_there_is_one() -> None:
    ranks, both = agreement([False])
    with both.agreed("checks"):
        pass
    assert ranks.settled == []
    with pytest.raises(ValueError, match="mine"), both.agreed("checks"):
        raise ValueError("mine")
    assert [phase for phase, _ in ranks.settled] == ["zi.save #0 (checks)"]
    ranks, both = agreement([True])
    with pytest.raises(zi.RankError, match="rank 0 failed"), both.agreed("checks"):
        pass


def test_ranks_that_differ() -> None:
    _, both = agreement([0])
    assert both.of_first("its name", "mine") == "rank 0 on zi.save #0: its name"
    with pytest.raises(zi.UsageError, match="rank 1 differs from rank 0 in the model\n  fix:   the same"):
        both.same("the model", "text", "the same")
