"""Keeps ranks in step during checkpoint calls: no rank continues until all have completed a phase.

Uses the calling thread's channel, whose broken connections report a lost rank immediately. Error texts are exchanged
through the process group's key-value store.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from zero_infinity.comm.channel import Channel, Topic
from zero_infinity.comm.process_group import RankGroup
from zero_infinity.errors import UsageError
from zero_infinity.storage.crc32 import crc32

_NUMBER = -30  # topic number of checkpoint exchanges


class Agreement:
    """The ranks of one model during one call. A single rank exchanges nothing."""

    def __init__(self, call: str, ranks: RankGroup | None, channel: Channel | None) -> None:
        # Identical on every rank, because all ranks make the same calls in the same order.
        self._name = f"{call} #{next(ranks.call_numbers)}" if ranks is not None else call
        self._ranks = ranks
        self._channel = channel
        self.rank = ranks.rank if ranks is not None else 0
        self.num_ranks = ranks.num_ranks if ranks is not None else 1

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
        if self._ranks is None:
            return
        if self._channel is None:  # the model is still being built
            self._ranks.all_well(f"{self._name} ({phase})", error)
            return
        said = self._channel.agree(Topic("checkpoint", _NUMBER, f"{self._name} ({phase})"), [error is not None])
        if any(failed for (failed,) in said):
            self._ranks.all_well(f"{self._name} ({phase})", error)

    def same(self, what: str, text: str, fix: str) -> None:
        """Raise if ranks differ in `text`."""
        if self._channel is None:
            return
        said = self._channel.agree(Topic("checkpoint", _NUMBER, f"{self._name} ({what})"), [crc32(text.encode())])
        for rank, theirs in enumerate(said):
            if theirs != said[0]:
                raise UsageError(f"rank {rank} differs from rank 0 in {what}\n  fix:   {fix}")

    def of_first(self, what: str, text: str) -> str:
        """Return rank 0's `text`."""
        return self._ranks.tell(f"{self._name}: {what}", text)[0] if self._ranks is not None else text
