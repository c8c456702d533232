"""The recorded order of accesses to blocks, the position in it, and when each block is used next.

An order is recorded from the accesses of one cycle (from one optimizer step to the next) and followed in the next
cycles. If an access differs from it, the position jumps to the block's nearest occurrence in the order if that is ahead
(something was skipped), and stays if it is behind (something is repeated, or comes late). At the end of the cycle the
newly recorded order replaces the old one.

Knows nothing of sizes, budgets or what is in memory.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Set

BlockId = int

# The next use of a block that is not in the order: later than any other. Its recency is subtracted, so that the least
# recently used of these blocks has the latest.
_NEVER = 1 << 60


class Recency:
    """When each block was used last, in numbers of accesses."""

    def __init__(self) -> None:
        self._num_accesses = 0
        self._last: dict[BlockId, int] = {}

    def used(self, block: BlockId) -> None:
        """`block` is used now."""
        self._num_accesses += 1
        self._last[block] = self._num_accesses

    def of(self, block: BlockId) -> int:
        """Return the number of its last access; 0 if it was never used."""
        return self._last.get(block, 0)


class AccessOrder:
    """The accesses of the last complete cycle, and the accesses of this one. False while there is no complete one.

    Orders of the same blocks share one `recency`.
    """

    def __init__(self, recency: Recency | None = None) -> None:
        self.clock = 0  # absolute position: cycles * len(order) + position in the cycle
        self._order: list[BlockId] = []
        self._positions: dict[BlockId, list[int]] = {}
        self._recorded: list[BlockId] = []
        self._cycle_start = 0  # the clock when this cycle began
        # After how many accesses of a cycle a block's content ends: in the last complete cycle, and in this one.
        self._ends: dict[BlockId, int] = {}
        self._recorded_ends: dict[BlockId, int] = {}
        self._lost: BlockId | None = None  # the last access, if the order has no place for it ahead
        self._recency = recency or Recency()

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, block: BlockId) -> bool:
        return block in self._positions

    @property
    def accesses(self) -> tuple[BlockId, ...]:
        """The whole order; empty while the first cycle is being recorded."""
        return tuple(self._order)

    @property
    def blocks(self) -> Set[BlockId]:
        """Each block of the order once."""
        return self._positions.keys()

    def at(self, position: int) -> BlockId:
        """Return the block at an absolute position of the order."""
        return self._order[position % len(self._order)]

    def next_use(self, block: BlockId) -> int:
        """Return the absolute position of the next access to `block` at or after the clock."""
        places = self._positions.get(block)
        if places is None:
            return _NEVER - self._recency.of(block)
        cycle, place = divmod(self.clock, len(self._order))
        index = bisect_left(places, place)
        if index < len(places):
            return cycle * len(self._order) + places[index]
        return (cycle + 1) * len(self._order) + places[0]

    def record(self, block: BlockId) -> None:
        """`block` is used now."""
        self._recorded.append(block)
        self._recency.used(block)

    def end_content(self, block: BlockId) -> None:
        """What `block` holds is not used any more: its next use is of another content."""
        self._recorded_ends[block] = len(self._recorded)

    def ends_before(self, block: BlockId, use: int) -> bool:
        """True if the content that `block` has now is expected to end before the access at `use`."""
        end = self._ends.get(block)
        if end is None:
            return False
        cycles = 1 if block in self._recorded_ends else 0
        return self._cycle_start + cycles * len(self._order) + end <= use

    def advance(self) -> None:
        """Continue after the access at the clock, which was the expected one."""
        self._lost = None
        self.clock += 1

    def jump_past(self, block: BlockId) -> bool:
        """Continue after the next access to `block`, which was not expected; False if it is not ahead."""
        place = self._place_of(block)
        self._lost = block if place is None else None
        if place is not None:
            self.clock = place + 1
        return place is not None

    def end_cycle(self, *, same_order: bool) -> bool:
        """Adopt the recorded accesses as the order, or none if the next cycle is known to differ.

        Returns True if the order or the position in it has changed.
        """
        recorded, self._recorded = self._recorded, []
        self._ends, self._recorded_ends = (self._recorded_ends if same_order else {}), {}
        self._lost = None
        if not same_order:
            self._adopt([])
        elif recorded and recorded != self._order:
            self._adopt(recorded)
        elif self._order and self.clock % len(self._order):
            self.clock = 0
        else:
            self._cycle_start = self.clock
            return False
        self._cycle_start = self.clock
        return True

    def _adopt(self, order: list[BlockId]) -> None:
        self._order = order
        self._positions = {}
        for place, block in enumerate(order):
            self._positions.setdefault(block, []).append(place)
        self.clock = 0

    def _place_of(self, block: BlockId) -> int | None:
        """Return the absolute position of an unexpected access; None if it is not ahead of the clock."""
        places = self._positions.get(block)
        if places is None:
            return None
        length = len(self._order)
        # Two unexpected accesses that are consecutive in the order determine the position, however far away it is.
        ahead = [
            (p - self.clock) % length for p in places if self._lost is not None and self._order[p - 1] == self._lost
        ]
        if ahead:
            return self.clock + min(ahead)
        distance = self.next_use(block) - self.clock
        behind = min((self.clock - p) % length for p in places)
        return self.clock + distance if distance <= behind else None
