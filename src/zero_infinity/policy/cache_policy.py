"""Decides which blocks of one tier are in memory: eviction and prefetch from the recorded access order.

Training repeats a known sequence of accesses. The policy is told of every access; it records the sequence of one cycle
(from one optimizer step to the next; of inference: one forward), and from then on knows when each block is used next.
On each access it returns what to evict and what to fetch:

- *Evict* the block whose next use is farthest away (Belady). While no order is known yet: the least recently used.
- *Prefetch* what the next accesses need, in order, up to `lookahead` bytes, and never by evicting a block that is used
  sooner. The window is bounded because fetching earlier than necessary evicts blocks that would have been hits: with an
  unbounded window a cyclic scan degrades to reading everything in every cycle.

It knows nothing of time, threads, torch or files: the same accesses give the same decisions, on every rank and in the
simulator. Its accounting is *logical*: a block is in memory from the decision to fetch it to the decision to evict it.
An executor that carries out the decisions in order never needs more than the budget.

`access_order.py` records the order, and finds the place in it when an access differs from it.

The cost of an access does not grow with the model: the window slides along with the clock, so a block is visited once
when it enters the window and once when it is used. Only a jump visits everything that was skipped.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from zero_infinity.policy.access_order import AccessOrder, BlockId, Recency

# Stale heap entries allowed in addition to one per block in memory, before the heap is rebuilt.
_STALE_ENTRIES = 64


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do now: first all evictions, then all fetches, in this order."""

    evict: tuple[BlockId, ...] = ()
    fetch: tuple[BlockId, ...] = ()


NOTHING = Decision()


class NoRoomError(Exception):
    """Every block that could be evicted is in use."""

    def __init__(self, needed: int, budget: int, in_use: tuple[BlockId, ...]) -> None:
        super().__init__(f"{needed} bytes needed, budget {budget}, {len(in_use)} blocks in use")
        self.needed = needed
        self.budget = budget
        self.in_use = in_use


class CachePolicy:
    """The contents of one tier. `in_use(block)` tells which blocks must not be evicted now."""

    def __init__(self, budget: int, lookahead: int, in_use: Callable[[BlockId], bool], *, wraps: bool = True) -> None:
        self.budget = budget
        self.lookahead = lookahead
        self._in_use = in_use
        self._wraps = wraps  # True: prefetches across the end of a cycle
        self._sizes: dict[BlockId, int] = {}
        self._cached: set[BlockId] = set()
        self.cached_bytes = 0
        # Training and inference use the blocks in different orders; each is kept while the other goes on.
        recency = Recency()
        self._orders = {is_inference: AccessOrder(recency) for is_inference in (False, True)}
        self._order = self._orders[False]
        # Farthest next use first; an entry is stale if the block was evicted or its next use has changed.
        self._farthest: list[tuple[int, BlockId]] = []
        self._next_use: dict[BlockId, int] = {}
        self._num_missing = 0  # blocks of the order that are not in memory
        # The accesses from the clock up to here are visited: their blocks are in memory, or are fetched when their
        # present content has ended. With these bytes in total.
        self._window_end = 0
        self._window_bytes = 0
        self._window: Counter[BlockId] = Counter()
        self.num_deviations = 0

    # ------------------------------------------------------------------ contents

    def add(self, block: BlockId, num_bytes: int) -> None:
        """Register a block; it is not in memory yet."""
        self._sizes[block] = num_bytes

    def __contains__(self, block: BlockId) -> bool:
        return block in self._cached

    @property
    def order(self) -> tuple[BlockId, ...]:
        """The accesses of the last complete cycle; empty while the first is being recorded."""
        return self._order.accesses

    def follow(self, *, inference: bool) -> None:
        """From now on accesses belong to the order of inference, or to that of training."""
        order = self._orders[inference]
        if order is not self._order:
            self._order = order
            self._find_place()

    # ------------------------------------------------------------------ events

    def access(self, block: BlockId) -> Decision:
        """`block` is used now."""
        self._order.record(block)
        self._follow(block)
        evict: list[BlockId] = []
        fetch: list[BlockId] = []
        if block in self._cached:
            self._rank(block)
        else:
            self._bring(block, evict, fetch)
        self._look_ahead(block, evict, fetch)
        return Decision(tuple(evict), tuple(fetch)) if evict or fetch else NOTHING

    def look_ahead(self) -> Decision:
        """Between two accesses: prefetch what the next ones need."""
        evict: list[BlockId] = []
        fetch: list[BlockId] = []
        self._look_ahead(None, evict, fetch)
        return Decision(tuple(evict), tuple(fetch)) if evict or fetch else NOTHING

    def shrink(self, budget: int) -> tuple[BlockId, ...]:
        """Change the budget; returns what must be evicted."""
        self.budget = budget
        victims = self._victims(0, None) or ()
        for victim in victims:
            self._remove(victim)
        return tuple(victims)

    def forget(self, block: BlockId) -> None:
        """The content of `block` is no longer needed: it takes no memory any more."""
        if block in self._cached:
            self._remove(block)

    def expire(self, block: BlockId) -> None:
        """The content of `block` is no longer needed, and its next use is of another content: a copy before an update.

        In later cycles it is not fetched ahead until this has happened again.
        """
        self._order.end_content(block)
        if block in self._cached:
            self._remove(block)
        else:
            self._cut_window(block)

    def end_cycle(self, *, same_order: bool = True) -> None:
        """End a step: the accesses recorded since the last one are the order from now on.

        If the next cycle is known to differ (`same_order` is False), all orders are recorded from scratch.
        """
        if not same_order:
            for order in self._orders.values():
                order.end_cycle(same_order=False)
            self._find_place()
        elif self._order.end_cycle(same_order=True):
            self._find_place()

    def _find_place(self) -> None:
        """The order, or the place in it, is another one."""
        self._num_missing = len(self._order.blocks - self._cached)
        self._restart()

    def _follow(self, block: BlockId) -> None:
        """Advance past this access, or continue at its next occurrence in the order."""
        if not self._order:
            return
        if self._order.at(self._order.clock) == block:
            self._leave_window(block)
            self._order.advance()
            return
        self.num_deviations += 1
        if self._order.jump_past(block):
            self._restart()

    def _restart(self) -> None:
        """Continue at another position: the next use of every block has changed."""
        self._window_end = self._order.clock
        self._window_bytes = 0
        self._window.clear()
        self._next_use = {block: self._order.next_use(block) for block in self._cached}
        self._sort()

    # ------------------------------------------------------------------ eviction

    def _rank(self, block: BlockId) -> None:
        upcoming = self._order.next_use(block)
        if self._next_use.get(block) == upcoming:
            return
        self._next_use[block] = upcoming
        heapq.heappush(self._farthest, (-upcoming, block))
        if len(self._farthest) > 2 * len(self._cached) + _STALE_ENTRIES:
            self._sort()

    def _sort(self) -> None:
        self._farthest = [(-upcoming, block) for block, upcoming in self._next_use.items()]
        heapq.heapify(self._farthest)

    def _victims(self, size: int, sooner_than: int | None, keep: BlockId | None = None) -> list[BlockId] | None:
        """Return blocks to evict to free `size` bytes, all used later than `sooner_than`; None if there are too few."""
        missing = self.cached_bytes + size - self.budget
        if missing <= 0:
            return []
        victims: list[BlockId] = []
        met: dict[BlockId, tuple[int, BlockId]] = {}
        while missing > 0 and self._farthest:
            entry = heapq.heappop(self._farthest)
            next_use, block = -entry[0], entry[1]
            # A block that was evicted and fetched again for the same use has two entries.
            if self._next_use.get(block) != next_use or block in met:
                continue
            met[block] = entry
            if sooner_than is not None and next_use <= sooner_than:
                break
            if block == keep or self._in_use(block):
                continue
            victims.append(block)
            missing -= self._sizes[block]
        for entry in met.values():
            heapq.heappush(self._farthest, entry)
        return self._necessary(victims, -missing) if missing <= 0 else None

    def _necessary(self, victims: list[BlockId], excess: int) -> list[BlockId]:
        """Keep blocks that need not be evicted because a larger one is; those used soonest first."""
        necessary: list[BlockId] = []
        for block in reversed(victims):
            if self._sizes[block] <= excess:
                excess -= self._sizes[block]
            else:
                necessary.append(block)
        return necessary[::-1]

    # ------------------------------------------------------------------ fetching

    def _bring(self, block: BlockId, evict: list[BlockId], fetch: list[BlockId]) -> None:
        size = self._sizes[block]
        victims = self._victims(size, None)
        if victims is None:
            in_use = tuple(b for b in sorted(self._cached) if self._in_use(b))
            raise NoRoomError(size, self.budget, in_use)
        self._replace(victims, block, evict, fetch)

    def _look_ahead(self, current: BlockId | None, evict: list[BlockId], fetch: list[BlockId]) -> None:
        """Extend the window as far as its byte limit and the free space for missing blocks allow."""
        if not self._num_missing or not self._order:
            return
        length = len(self._order)
        self._window_end = max(self._window_end, self._order.clock)
        # The clock is past the current access, which may be the last of its cycle.
        cycle = (self._order.clock - (current is not None)) // length
        end = self._order.clock + length if self._wraps else (cycle + 1) * length
        while self._window_end < end:
            block = self._order.at(self._window_end)
            if not self._window[block]:
                size = self._sizes[block]
                if self._window_bytes + size > self.lookahead:
                    return
                if block not in self._cached and not self._order.ends_before(block, self._window_end):
                    victims = self._victims(size, self._window_end, keep=current)
                    if victims is None:
                        return
                    self._replace(victims, block, evict, fetch)
                self._window_bytes += size
            self._window[block] += 1
            self._window_end += 1

    def _leave_window(self, block: BlockId) -> None:
        """Remove one access to `block` from the window: at its start, because it happens, or at its end."""
        if self._window[block]:
            self._window[block] -= 1
            if not self._window[block]:
                self._window_bytes -= self._sizes[block]

    def _replace(self, victims: list[BlockId], block: BlockId, evict: list[BlockId], fetch: list[BlockId]) -> None:
        for victim in victims:
            self._remove(victim)
            if victim in fetch:
                # Decided in this call and not carried out yet: the two cancel out.
                fetch.remove(victim)
            else:
                evict.append(victim)
        self._cached.add(block)
        self._num_missing -= block in self._order
        self.cached_bytes += self._sizes[block]
        self._rank(block)
        if block in evict:
            evict.remove(block)
        else:
            fetch.append(block)

    def _remove(self, block: BlockId) -> None:
        self._cached.discard(block)
        self._num_missing += block in self._order
        self._next_use.pop(block, None)
        self.cached_bytes -= self._sizes[block]
        self._cut_window(block)

    def _cut_window(self, block: BlockId) -> None:
        """The window ends before the next use of a block that is not in memory, until that is fetched."""
        if self._window[block]:
            upcoming = self._order.next_use(block)
            while self._window_end > upcoming:
                self._window_end -= 1
                self._leave_window(self._order.at(self._window_end))
