"""Which blocks of one tier are in memory: caching with foresight, as a pure function of order and sizes.

Training repeats a known sequence of accesses. The policy is told every access; it records the sequence of one cycle
(from one optimizer step to the next) and from then on knows for each block when it is used next. On each access it
answers with what to evict and what to fetch:

- *Evict* the block whose next use is farthest (Belady). While no order is known yet: the least recently used.
- *Fetch ahead* what the next accesses need, in their order, as far as `lookahead` bytes reach, and never at the price
  of a block that is used sooner. The window is bounded because fetching earlier than necessary evicts blocks that
  would have been hits: with an unbounded window a cyclic scan degrades to reading everything every cycle.

It knows neither time nor threads, torch nor files: the same accesses give the same decisions, on every rank and in the
simulator. What it counts is *logical*: a block is in memory from the decision to fetch it to the decision to evict it.
Whoever executes the decisions in order never needs more than the budget.

When an access differs from the recorded order, the policy finds the nearest place where the order does say so and goes
on from there; at the end of the cycle the newly recorded order replaces the old one.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

BlockId = int


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do now: first every eviction, then every fetch, in this order."""

    evict: tuple[BlockId, ...] = ()
    fetch: tuple[BlockId, ...] = ()


NOTHING = Decision()


class NoRoomError(Exception):
    """Everything that could leave is in use."""

    def __init__(self, needed: int, budget: int, in_use: tuple[BlockId, ...]) -> None:
        super().__init__(f"{needed} bytes needed, budget {budget}, {len(in_use)} blocks in use")
        self.needed = needed
        self.budget = budget
        self.in_use = in_use


class Policy:
    """The contents of one tier. `in_use(block)` tells which blocks must not be evicted now."""

    def __init__(self, budget: int, lookahead: int, in_use: Callable[[BlockId], bool]) -> None:
        self.budget = budget
        self.lookahead = lookahead
        self._in_use = in_use
        self._sizes: dict[BlockId, int] = {}
        self._cached: set[BlockId] = set()
        self.cached_bytes = 0
        self._order: list[BlockId] = []
        self._positions: dict[BlockId, list[int]] = {}
        self._recording: list[BlockId] = []
        self._clock = 0  # absolute position: cycles * len(order) + place in the cycle
        self._deviated = False
        # Farthest next use first; an entry is stale when the block has left or its next use has changed.
        self._farthest: list[tuple[int, BlockId]] = []
        self._next_use: dict[BlockId, int] = {}
        self._num_missing = 0  # blocks of the order that are not in memory
        self.num_deviations = 0

    # ------------------------------------------------------------------ what is there

    def add(self, block: BlockId, num_bytes: int) -> None:
        """Make a block known; it is not in memory yet."""
        self._sizes[block] = num_bytes

    def __contains__(self, block: BlockId) -> bool:
        return block in self._cached

    @property
    def order(self) -> tuple[BlockId, ...]:
        """The accesses of the last whole cycle; empty while the first is being recorded."""
        return tuple(self._order)

    # ------------------------------------------------------------------ events

    def access(self, block: BlockId) -> Decision:
        """`block` is used now."""
        self._recording.append(block)
        self._follow(block)
        evict: list[BlockId] = []
        fetch: list[BlockId] = []
        if block in self._cached:
            self._rank(block)
        else:
            self._bring(block, evict, fetch)
        self._look_ahead(block, evict, fetch)
        return Decision(tuple(evict), tuple(fetch)) if evict or fetch else NOTHING

    def forget(self, block: BlockId) -> None:
        """The content of `block` is dead: it takes no room any more."""
        if block in self._cached:
            self._remove(block)

    def end_cycle(self, *, same_order: bool = True) -> None:
        """A step is over: what was recorded since the last one is the order from now on.

        Unless it is known that the next cycle will differ (`same_order` is False): then it is recorded afresh.
        """
        recorded, self._recording = self._recording, []
        if not same_order:
            self._order, self._positions, self._num_missing, self._clock = [], {}, 0, 0
            self._rank_all()
        elif recorded and recorded != self._order:
            self._order = recorded
            self._positions = {}
            for place, block in enumerate(recorded):
                self._positions.setdefault(block, []).append(place)
            self._num_missing = len(self._positions.keys() - self._cached)
            self._clock = 0
            self._rank_all()
        elif self._deviated or (self._order and self._clock % len(self._order)):
            self._clock = 0
            self._rank_all()
        self._deviated = False

    # ------------------------------------------------------------------ inside

    def _follow(self, block: BlockId) -> None:
        """Advance the clock past this access, or jump to where the order has it next."""
        if not self._order:
            self._clock += 1
            return
        length = len(self._order)
        if self._order[self._clock % length] == block:
            self._clock += 1
            return
        self._deviated = True
        self.num_deviations += 1
        upcoming = self._upcoming_use(block)
        if upcoming is not None:
            self._clock = upcoming + 1
            # Everything between was skipped; its next use is elsewhere now.
            self._rank_all()

    def _upcoming_use(self, block: BlockId) -> int | None:
        """The absolute position of the next access to `block` at or after the clock."""
        places = self._positions.get(block)
        if not places:
            return None
        cycle, place = divmod(self._clock, len(self._order))
        index = bisect_left(places, place)
        if index < len(places):
            return cycle * len(self._order) + places[index]
        return (cycle + 1) * len(self._order) + places[0]

    def _rank(self, block: BlockId) -> None:
        upcoming = self._upcoming_use(block)
        if upcoming is None:
            # Never used again as far as is known. Without any order this ranks by recency: oldest leaves first.
            upcoming = (1 << 60) - self._clock
        self._next_use[block] = upcoming
        heapq.heappush(self._farthest, (-upcoming, block))

    def _rank_all(self) -> None:
        self._farthest.clear()
        for block in sorted(self._cached):
            self._rank(block)

    def _bring(self, block: BlockId, evict: list[BlockId], fetch: list[BlockId]) -> None:
        size = self._sizes[block]
        victims = self._victims(size, None)
        if victims is None:
            in_use = tuple(b for b in sorted(self._cached) if self._in_use(b))
            raise NoRoomError(size, self.budget, in_use)
        self._replace(victims, block, evict, fetch)

    def _look_ahead(self, current: BlockId, evict: list[BlockId], fetch: list[BlockId]) -> None:
        if not self._num_missing:
            return
        length = len(self._order)
        window = self.lookahead
        seen = {current}
        for clock in range(self._clock, self._clock + length):
            block = self._order[clock % length]
            if block in seen:
                continue
            seen.add(block)
            window -= self._sizes[block]
            if window < 0:
                return
            if block in self._cached:
                continue
            victims = self._victims(self._sizes[block], clock, keep=current)
            if victims is None:
                return
            self._replace(victims, block, evict, fetch)

    def _victims(self, size: int, sooner_than: int | None, keep: BlockId | None = None) -> list[BlockId] | None:
        """The blocks whose leaving makes room for `size` bytes, all used later than `sooner_than`; None if too few."""
        missing = self.cached_bytes + size - self.budget
        victims: list[BlockId] = []
        spared: list[tuple[int, BlockId]] = []
        while missing > 0 and self._farthest:
            entry = heapq.heappop(self._farthest)
            next_use, block = -entry[0], entry[1]
            if block not in self._cached or self._next_use.get(block) != next_use:
                continue
            spared.append(entry)
            if sooner_than is not None and next_use <= sooner_than:
                break
            if block == keep or self._in_use(block):
                continue
            victims.append(block)
            missing -= self._sizes[block]
        for entry in spared:
            heapq.heappush(self._farthest, entry)
        return victims if missing <= 0 else None

    def _replace(self, victims: list[BlockId], block: BlockId, evict: list[BlockId], fetch: list[BlockId]) -> None:
        for victim in victims:
            self._remove(victim)
            if victim in fetch:
                # Decided a moment ago and not yet carried out: the two cancel out.
                fetch.remove(victim)
            else:
                evict.append(victim)
        self._cached.add(block)
        self._num_missing -= block in self._positions
        self.cached_bytes += self._sizes[block]
        self._rank(block)
        fetch.append(block)

    def _remove(self, block: BlockId) -> None:
        self._cached.discard(block)
        self._num_missing += block in self._positions
        self._next_use.pop(block, None)
        self.cached_bytes -= self._sizes[block]
