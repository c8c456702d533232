"""Keeps ranks in step during checkpoint calls: no rank continues until all have completed a phase."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from zero_infinity.comm.channel import Channel
from zero_infinity.comm.phases import Phases
from zero_infinity.comm.process_group import RankGroup
from zero_infinity.errors import UsageError
from zero_infinity.storage.crc32 import crc32


class Agreement:
    """The ranks of one model during one call. A single rank exchanges nothing.

    `channel` is the calling thread's; None while the model is still being built.
    """

    def __init__(self, call: str, ranks: RankGroup | None, channel: Channel | None) -> None:
        # Identical on every rank, because all ranks make the same calls in the same order.
        self._name = f"{call} #{next(ranks.call_numbers)}" if ranks is not None else call
        self._phases: Phases | None = None
        if ranks is not None:
            self._phases = Phases(channel) if channel is not None else ranks.phases
        self.rank = ranks.rank if ranks is not None else 0
        self.num_ranks = ranks.num_ranks if ranks is not None else 1

    @contextmanager
    def agreed(self, phase: str) -> Iterator[None]:
        """Continue after `phase` only if it succeeded on every rank; else raise on every rank."""
        if self._phases is None:
            yield
            return
        with self._phases.agreed(f"{self._name} ({phase})"):
            yield

    def same(self, what: str, text: str, fix: str) -> None:
        """Raise if ranks differ in `text`."""
        if self._phases is None:
            return
        said = self._phases.tell(f"{self._name} ({what})", f"{crc32(text.encode())}")
        for rank, theirs in enumerate(said):
            if theirs != said[0]:
                raise UsageError(f"rank {rank} differs from rank 0 in {what}\n  fix:   {fix}")

    def of_first(self, what: str, text: str) -> str:
        """Return rank 0's `text`."""
        return self._phases.tell(f"{self._name}: {what}", text)[0] if self._phases is not None else text
