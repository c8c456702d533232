"""What a rank says when another one does not answer: connections that only fail."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, cast

import pytest

from zero_infinity.comm import lost_rank
from zero_infinity.comm.channel import Channel, Traffic
from zero_infinity.comm.topics import Topic
from zero_infinity.comm.transport import Connections
from zero_infinity.errors import DivergenceError, EngineClosedError, LostRankError


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
    timeout = timedelta(seconds=1)

    def __init__(self, first: int = 1) -> None:
        self.divergences: dict[object, DivergenceError] = {}
        self.loss: LostRankError | None = None
        self.notes: list[str] = []
        self._first = first

    def lost_first(self, _: int) -> int:
        return self._first

    def lose(self, _: int, error: LostRankError, note: str) -> None:
        self.loss = error
        self.notes.append(note)

    def describe(self, _: int) -> list[str]:
        return []

    def name_of(self, number: int) -> str:
        return f"#{number}"


@pytest.mark.parametrize("has_diverged", [False, True])
def test_a_rank_that_diverged_is_not_said_to_be_lost(has_diverged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lost_rank, "_DIVERGENCE_SECONDS", 0.01)
    known = Known()
    channel, other = (Channel(cast(Connections, Broken()), Traffic(), known) for _ in range(2))
    if has_diverged:
        known.divergences[other] = DivergenceError("ranks diverged")
    with pytest.raises(DivergenceError if has_diverged else LostRankError):
        channel.agree(Topic("step", 1, "the step"))


def test_the_rank_that_was_lost_first_is_named_by_every_thread() -> None:
    known = Known(first=7)
    known.divergences = {}
    channels = [Channel(cast(Connections, Broken()), Traffic(), known) for _ in range(2)]
    for channel in channels:
        with pytest.raises(LostRankError, match="rank 7 did not answer while rank 0 was waiting for 'first'"):
            channel.agree(Topic("step", 1, "first" if channel is channels[0] else "second"))
    assert known.notes == ["failed, as rank 7 did not answer while it was waiting for 'first'"]


def test_a_thread_whose_connections_its_own_engine_has_cut_does_not_blame_a_rank() -> None:
    known = Known()
    channel = Channel(cast(Connections, Broken()), Traffic(), known)
    channel.cut()
    with pytest.raises(EngineClosedError, match="the connections between ranks were closed while 'it' was exchanged"):
        channel.agree(Topic("step", 1, "it"))
    assert known.loss is None
