"""Turns a failed exchange into the error that names its cause: a lost rank, or ranks that diverged.

Does not exchange anything itself, and does not detect divergence.
"""

from __future__ import annotations

import time
from typing import Protocol

from zero_infinity.errors import DivergenceError, LostRankError, again

# How long the threads of a rank may take to notice the same divergence.
_DIVERGENCE_SECONDS = 1.0


class RankStatus(Protocol):
    """What is known about the other ranks and about the topics they exchange."""

    divergences: dict[object, DivergenceError]  # seen here, by channel, on those that have not agreed since

    def describe(self, rank: int) -> list[str]:
        """Return what is known about a lost rank, and about others that have ended."""

    def name_of(self, number: int) -> str:
        """Return the name of the topic with this number."""

    def note(self, text: str) -> None:
        """Leave a note for other ranks about how this rank ended."""


def lost_rank(lost: int, rank: int, name: str, error: RuntimeError, status: RankStatus) -> BaseException:
    """Return the error to raise on `rank` when the exchange of `name` with the rank `lost` failed with `error`."""
    divergence = _wait_for_divergence(status)
    if divergence is not None:
        return again(divergence)
    reason = (str(error).partition("] ")[2] or str(error)).splitlines()[0].partition(". This is")[0]
    status.note(f"failed, as rank {lost} did not answer while it was waiting for {name!r}")
    known = "".join(f"\n  known: {line}" for line in status.describe(lost))
    return LostRankError(
        f"rank {lost} did not answer while rank {rank} was waiting for {name!r}\n"
        f"  why:   {reason}{known}\n"
        "  fix:   read that rank's output; every rank must run the same number of batches and the same calls"
    )


def _wait_for_divergence(status: RankStatus) -> DivergenceError | None:
    """Return a divergence that a thread of this rank has seen, or sees soon.

    A rank that detects a divergence closes its connections. Then the divergence is the real cause.
    """
    deadline = time.monotonic() + _DIVERGENCE_SECONDS
    while not status.divergences and time.monotonic() < deadline:
        time.sleep(_DIVERGENCE_SECONDS / 100)
    return next(iter(status.divergences.values()), None)
