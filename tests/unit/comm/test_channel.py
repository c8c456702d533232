"""What a rank says when another one does not answer: connections that only fail."""

from __future__ import annotations

from typing import Any, cast

import pytest

from zero_infinity.comm import lost_rank
from zero_infinity.comm.channel import Channel, GroupConnections, Topic, Traffic
from zero_infinity.errors import DivergenceError, LostRankError


class Broken:
    """Rank 0 of two, whose peer is gone."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2

    def recv(self, *_: Any) -> Any:
        raise RuntimeError("[gloo/pair.cc:1] Connection closed by peer. This is typical")

    send = recv


class Known:
    def __init__(self) -> None:
        self.divergences: dict[object, DivergenceError] = {}

    def describe(self, _: int) -> list[str]:
        return []

    def name_of(self, number: int) -> str:
        return f"#{number}"

    def note(self, _: str) -> None:
        """Nobody reads it."""


@pytest.mark.parametrize("has_diverged", [False, True])
def test_a_rank_that_diverged_is_not_said_to_be_lost(has_diverged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lost_rank, "_DIVERGENCE_SECONDS", 0.01)
    known = Known()
    channel, other = (Channel(cast(GroupConnections, Broken()), Traffic(), known) for _ in range(2))
    if has_diverged:
        known.divergences[other] = DivergenceError("ranks diverged")
    with pytest.raises(DivergenceError if has_diverged else LostRankError):
        channel.agree(Topic("step", 1, "the step"))
