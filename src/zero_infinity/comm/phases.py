"""Phases that ranks go through together: no rank continues until all have completed one.

Over the channel of the calling thread, whose broken connections report a lost rank at once. A wait on the key-value
store would not: nobody tells it that a rank is gone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from zero_infinity.comm.channel import Channel
from zero_infinity.comm.topics import FIRST_PHASE, Topic
from zero_infinity.errors import RankError, UsageError
from zero_infinity.storage.crc32 import crc32


class Phases:
    """What the ranks tell each other between phases, on one thread."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def tell(self, what: str, value: str) -> list[str]:
        """Exchange one text per rank; returns all of them by rank."""
        return self._channel.tell(_topic(what), value)

    def all_same(self, what: str, value: str, fix: str) -> None:
        """Raise if ranks differ in `what`."""
        found = self.tell(what, value)
        for rank, other in enumerate(found):
            if other != found[0]:
                raise UsageError(f"rank {rank} differs from rank 0 in {what}: {other} and {found[0]}\n  fix:   {fix}")

    def smallest(self, what: str, value: int) -> int:
        """Return the smallest value of `what` over all ranks."""
        return min(number for (number,) in self._channel.agree(_topic(what), [value]))

    @contextmanager
    def agreed(self, phase: str) -> Iterator[None]:
        """Continue after `phase` only if it succeeded on every rank; else raise on every rank."""
        try:
            yield
        except Exception as error:
            self._settle(phase, error)
            raise
        self._settle(phase, None)

    def _settle(self, phase: str, error: Exception | None) -> None:
        topic = _topic(phase)
        try:
            said = self._channel.agree(topic, [error is not None])
            if not any(failed for (failed,) in said):
                return
            outcomes = self._channel.tell(topic, f"{type(error).__name__}: {error}" if error is not None else "")
        except RankError as lost:
            if error is not None:
                raise error from lost
            raise
        if error is not None:
            return  # raised by the caller
        for rank, outcome in enumerate(outcomes):
            if outcome:
                failure = RankError(f"rank {rank} failed in {phase}: {outcome}")
                failure.failed_rank = rank
                raise failure


def _topic(what: str) -> Topic:
    return Topic("phase", FIRST_PHASE + crc32(what.encode()), what)
