"""Agreement during one checkpoint call: its names, and what a single rank does without."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from support.scripted_channel import Scripted

import zero_infinity as zi
from zero_infinity.comm.checkpoint_agreement import Agreement
from zero_infinity.storage.crc32 import crc32


class FakeRanks:
    """Rank 1 of 2."""

    rank, num_ranks = 1, 2

    def __init__(self) -> None:
        self.call_numbers = itertools.count()


def agreement(channel: Scripted) -> Agreement:
    return Agreement("zi.save", FakeRanks(), channel)  # type: ignore[arg-type]


def test_one_rank_agrees_with_itself() -> None:
    alone = Agreement("zi.save", None, None)
    assert (alone.rank, alone.num_ranks) == (0, 1)
    with alone.agreed("checks"):
        pass
    with pytest.raises(ValueError, match="mine"), alone.agreed("checks"):
        raise ValueError("mine")
    alone.same("it", "text", "fix")
    assert alone.of_first("it", "text") == "text"


def test_calls_are_numbered() -> None:
    ranks: Any = FakeRanks()
    channel: Any = Scripted(of_first=0)
    for number in range(2):
        with Agreement("zi.save", ranks, channel).agreed("checks"):
            pass
        assert channel.topics[-1].name == f"zi.save #{number} (checks)"


def test_ranks_that_differ() -> None:
    agreement(Scripted(text_of_first=f"{crc32(b'text')}")).same("the model", "text", "the same")
    with pytest.raises(zi.UsageError, match="rank 1 differs from rank 0 in the model\n  fix:   the same"):
        agreement(Scripted(text_of_first="other")).same("the model", "text", "the same")
    assert agreement(Scripted(text_of_first="theirs")).of_first("its name", "mine") == "theirs"
