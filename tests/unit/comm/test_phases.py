"""Phases: errors are exchanged only when there is one, and reach every rank."""

from __future__ import annotations

from typing import cast

import pytest
from support.scripted_channel import Scripted

import zero_infinity as zi
from zero_infinity.comm.channel import Channel
from zero_infinity.comm.phases import Phases


def phases(channel: Scripted) -> Phases:
    return Phases(cast(Channel, channel))


def test_texts_are_exchanged_only_when_a_rank_has_failed() -> None:
    channel = Scripted()
    with phases(channel).agreed("checks"):
        pass
    assert channel.texts == []


def test_a_rank_that_failed_raises_its_own_error() -> None:
    channel = Scripted()
    with pytest.raises(ValueError, match="mine"), phases(channel).agreed("checks"):
        raise ValueError("mine")
    assert channel.texts == ["ValueError: mine"]


def test_the_others_raise_what_it_says() -> None:
    channel = Scripted(of_first=1, text_of_first="ValueError: theirs")
    failed = pytest.raises(zi.RankError, match="rank 0 failed in checks: ValueError: theirs")
    with failed as caught, phases(channel).agreed("checks"):
        pass
    assert caught.value.failed_rank == 0


def test_an_error_here_is_not_replaced_by_that_of_a_lost_rank() -> None:
    lost = zi.LostRankError("rank 0 did not answer")
    with pytest.raises(ValueError, match="mine") as caught, phases(Scripted(error=lost)).agreed("checks"):
        raise ValueError("mine")
    with pytest.raises(zi.LostRankError), phases(Scripted(error=lost)).agreed("checks"):
        pass
    assert caught.value.__cause__ is lost


def test_what_ranks_say() -> None:
    assert phases(Scripted(of_first=3)).smallest("the memory", 5) == 3
    assert phases(Scripted(text_of_first="a")).tell("it", "b") == ["a", "b"]
    phases(Scripted(text_of_first="a")).all_same("it", "a", "fix")
    with pytest.raises(zi.UsageError, match="rank 1 differs from rank 0 in it: b and a\n  fix:   the same"):
        phases(Scripted(text_of_first="a")).all_same("it", "b", "the same")
