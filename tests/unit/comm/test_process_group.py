"""What a rank makes of connections that fail, without any: lost ranks get their names."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch

from zero_infinity.comm.channel import Topic, Traffic
from zero_infinity.comm.connection_attempt import AttemptState
from zero_infinity.comm.process_group import RankGroup
from zero_infinity.errors import LostRankError

CLOSED = "Connection closed by peer"


class Work:
    def wait(self, _: timedelta) -> bool:
        return True


class Peer:
    """Rank 0's connections to a rank 1 that answers some exchanges, as rank 0 does, and then ends."""

    def __init__(self, num_answers: int) -> None:
        self._num_answers = num_answers
        self._said: list[torch.Tensor] = []

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2

    def recv(self, tensors: list[torch.Tensor], _: int, __: int) -> Any:
        if not self._num_answers:
            raise RuntimeError(CLOSED)
        self._num_answers -= 1
        self._said = tensors
        return Work()

    def send(self, tensors: list[torch.Tensor], _: int, __: int) -> Any:
        self._said[0].copy_(tensors[0])
        return Work()


class Values:
    def __init__(self, **values: str) -> None:
        self._values = {key.replace("_", "/"): value for key, value in values.items()}

    def set(self, key: str, value: str) -> None:
        self._values[key] = value

    def get(self, key: str) -> bytes:
        return self._values[key].encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def add(self, key: str, amount: int) -> int:
        self._values[key] = str(int(self._values.get(key, "0")) + amount)
        return int(self._values[key])


class Transport:
    """Rank 0's, of `num_ranks`. `connected` are the connections that can be made."""

    rank = 0
    timeout = timedelta(seconds=1)

    def __init__(self, *connected: Peer, num_ranks: int = 2, store: Values | None = None) -> None:
        self._connected = list(connected)
        self.num_ranks = num_ranks
        self.store = store or Values()

    def meet(self) -> Any:
        return Peer(num_answers=2)  # when connecting begins, and when it has ended

    def connect(self, _: str) -> Any:
        if not self._connected:
            raise RuntimeError("Connect timeout")
        return self._connected.pop(0)

    def group_on(self, device: torch.device) -> Any:
        raise NotImplementedError(device)


def group(*connected: Peer, **named: Any) -> RankGroup:
    return RankGroup(Transport(*connected, **named), Traffic())


# One answer is for beginning to connect; a second one was on its way when the rank ended.
@pytest.mark.parametrize("num_answers", [1, 2])
def test_a_rank_that_ends_while_connections_are_made_is_named(
    num_answers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zero_infinity.comm.lost_rank._DIVERGENCE_SECONDS", 0.01)
    monkeypatch.setattr("zero_infinity.comm.process_group._STORE_SECONDS", 0.0)
    ranks = group(Peer(num_answers))
    with pytest.raises(
        LostRankError, match="rank 1 did not answer while rank 0 was waiting for 'connections for steps"
    ):
        ranks.channel("steps")
    with pytest.raises(LostRankError, match="rank 1 did not answer"):
        ranks.check()


class Hanging(Transport):
    """gloo waits for a rank that has published its address and is gone."""

    def connect(self, name: str) -> Any:
        if name != "wire/0":
            threading.Event().wait(1000)
        return super().connect(name)


def test_a_rank_that_ends_while_gloo_waits_for_it_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zero_infinity.comm.lost_rank._DIVERGENCE_SECONDS", 0.01)
    monkeypatch.setattr("zero_infinity.comm.process_group._STORE_SECONDS", 0.0)
    monkeypatch.setattr("zero_infinity.comm.process_group._LOOK_SECONDS", 0.01)
    ranks = RankGroup(Hanging(Peer(num_answers=5)), Traffic())
    with pytest.raises(LostRankError, match="rank 1 did not answer while rank 0 was waiting for 'connections for"):
        ranks.channel("steps")


def test_connections_that_another_rank_cannot_make() -> None:
    class Elsewhere(Peer):
        def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
            super().send(tensors, rank, tag)
            self._said[0][2] = AttemptState.FAILED
            return Work()

    ranks = group(Elsewhere(num_answers=9), Peer(num_answers=9))
    with pytest.raises(LostRankError, match="rank 1 could not connect to every other rank for 'connections for steps'"):
        ranks.channel("steps")


def test_connections_that_fail_while_everybody_is_there() -> None:
    with pytest.raises(
        LostRankError, match="rank 0 could not connect to every other rank for steps\n.*Connect timeout"
    ):
        group(Peer(num_answers=9)).channel("steps")


def test_notes_lead_to_the_rank_that_was_lost_first() -> None:
    ranks = group(num_ranks=4, store=Values(lost_1="2", lost_2="3"))
    assert [ranks.lost_first(rank) for rank in (1, 2, 3)] == [3, 3, 3]
    # Two that lost each other, and one that lost this rank: there is no better name.
    assert group(num_ranks=4, store=Values(lost_1="2", lost_2="1")).lost_first(1) in (1, 2)
    assert group(num_ranks=4, store=Values(lost_1="0")).lost_first(1) == 1


def test_a_loss_ends_every_exchange_of_this_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zero_infinity.comm.process_group._STORE_SECONDS", 0.0)
    ranks = group(Peer(9), Peer(9))
    channel = ranks.channel("steps")
    ranks.lose(1, LostRankError("rank 1 did not answer"), "failed, as rank 1 did not answer")
    ranks.lose(2, LostRankError("rank 2 did not answer"), "a later one is a consequence")
    assert str(ranks.loss) == "rank 1 did not answer"
    assert ranks._store.get("note/0") == b"failed, as rank 1 did not answer"
    assert ranks._store.get("lost/0") == b"1"
    monkeypatch.setattr(Peer, "recv", _fails)
    with pytest.raises(LostRankError, match="rank 1 did not answer"):
        channel.agree(Topic("step", 1, "it"))


def _fails(*_: Any) -> Any:
    raise RuntimeError(CLOSED)
