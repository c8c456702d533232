"""Turns a failed exchange into the error that names its cause: a lost rank, or ranks that diverged.

A rank that is lost is noticed by who waits for it. That rank notes whom it has lost and cuts its own connections, so
that ranks which wait for it end as well, and so on: they follow the notes to the rank that was lost first.

Does not exchange anything itself, and does not detect divergence.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Protocol

from zero_infinity.errors import DivergenceError, LostRankError, again

# How long the threads of a rank may take to notice the same divergence.
_DIVERGENCE_SECONDS = 1.0


class RankStatus(Protocol):
    """What is known about the other ranks and about the topics they exchange."""

    divergences: dict[object, DivergenceError]  # seen here, by channel, on those that have not agreed since

    @property
    def timeout(self) -> timedelta:
        """How long to wait for a rank that is there and does not answer."""

    @property
    def loss(self) -> LostRankError | None:
        """The error of the first thread here that has lost a rank."""

    def lost_first(self, rank: int) -> int:
        """Return the rank that was lost first, of which the silence of `rank` is a consequence."""

    def describe(self, rank: int) -> list[str]:
        """Return what is known about a lost rank, and about others that have ended."""

    def name_of(self, number: int) -> str:
        """Return the name of the topic with this number."""

    def lose(self, rank: int, error: LostRankError, note: str) -> None:
        """A rank is lost: leave the note for the others, and end every exchange of this rank."""


def lost_rank(silent: int, rank: int, name: str, error: RuntimeError, status: RankStatus) -> BaseException:
    """Return the error to raise on `rank` when the exchange of `name` with the rank `silent` failed with `error`."""
    lost = status.lost_first(silent)
    if lost == silent:
        divergence = _wait_for_divergence(status)
        if divergence is not None:
            return again(divergence)
    if status.loss is not None:
        return again(status.loss)
    reason = (str(error).partition("] ")[2] or str(error)).splitlines()[0].partition(". This is")[0]
    known = "".join(f"\n  known: {line}" for line in status.describe(lost))
    loss = LostRankError(
        f"rank {lost} did not answer while rank {rank} was waiting for {name!r}\n"
        f"  why:   {reason}{known}\n"
        "  fix:   read that rank's output; every rank must run the same number of batches and the same calls"
    )
    status.lose(lost, loss, f"failed, as rank {lost} did not answer while it was waiting for {name!r}")
    return again(status.loss or loss)


def _wait_for_divergence(status: RankStatus) -> DivergenceError | None:
    """Return a divergence that a thread of this rank has seen, or sees soon.

    A rank that detects a divergence closes its connections. Then the divergence is the real cause.
    """
    deadline = time.monotonic() + _DIVERGENCE_SECONDS
    while not status.divergences and status.loss is None and time.monotonic() < deadline:
        time.sleep(_DIVERGENCE_SECONDS / 100)
    return next(iter(status.divergences.values()), None)
