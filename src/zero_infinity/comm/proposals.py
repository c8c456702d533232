"""What one thread of every rank exchanges next, where ranks may want different things.

Before each exchange every rank proposes what it wants. If all want the same, that is exchanged. Otherwise one of the
proposals is chosen, the same on every rank, and the ranks that do not want it take part all the same: they send their
shard of a layer that only others use, or zeros as its gradient. They propose their own again the next time. So ranks
whose control flow differs (a layer used on some ranks only) get what they need, and none of them waits for ever.

A rank that waits for all others *pauses*: it proposes nothing (`PAUSE`) and takes part until every rank does so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from zero_infinity.comm.topics import IDLE, PAUSE, Topic


class Proposing(Protocol):
    """The part of a channel that is used here."""

    def propose(self, topic: Topic) -> list[int]:
        """Tell every rank what this one wants next; returns the topic number that each rank wants, by rank."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """The exchange that comes next."""

    number: int
    wanted_by: frozenset[int]  # ranks
    is_common: bool  # every rank wants it


class Proposals:
    """The exchanges of one channel, in the order that all ranks agree on."""

    def __init__(self, channel: Proposing) -> None:
        self._channel = channel
        self._last = 0
        self.num_differences = 0  # exchanges that not every rank wanted
        self.all_pause = False  # every rank did, the last time

    def choose(self, topic: Topic) -> Chosen | None:
        """Propose `topic`. Returns what to exchange now; None if no rank wants anything."""
        said = self._channel.propose(topic)
        self.all_pause = all(number == PAUSE.number for number in said)
        wanted = set(said) - {PAUSE.number, IDLE.number}
        if not wanted:
            return None
        # Layers are used in the order of their numbers, forward or backward: a rank that skips one is ahead of others.
        number = min(wanted, key=lambda one: (abs(one - self._last), one))
        self._last = number
        is_common = set(said) == wanted and len(wanted) == 1
        if not is_common:
            self.num_differences += 1
        return Chosen(number, frozenset(rank for rank, one in enumerate(said) if one == number), is_common)
