"""Who owns which elements. Pure: the same answer on every rank.

*Spread*: every unit is cut into equal parts, one for each rank, so that each rank reads 1/N of every unit from its own
drive and the bandwidth of all adds up (ZeRO-Infinity's bandwidth-centric partition). *Owner*: a whole unit belongs to
one rank, which sends it to the others: one link at a time is busy. It is there to be compared with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from zero_infinity.policy.sizes import GRAIN, round_up

Kind: TypeAlias = Literal["spread", "owner"]


@dataclass(frozen=True, slots=True)
class Span:
    """Elements `start` to `stop` of a unit."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def overlap(self, start: int, stop: int) -> Span:
        """What it has in common with another range; empty when that is nothing."""
        first = max(self.start, start)
        return Span(first, max(first, min(self.stop, stop)))


NOTHING = Span(0, 0)


@dataclass(frozen=True, slots=True)
class Partition:
    """The parts of `num_ranks` ranks."""

    num_ranks: int
    kind: Kind = "spread"

    def padded(self, num_elements: int) -> int:
        """What a unit of this many elements is filled up to, so that it can be cut."""
        return round_up(num_elements, GRAIN * self.num_ranks if self.kind == "spread" else GRAIN)

    def spans(self, num_elements: int, number: int) -> tuple[Span, ...]:
        """Each rank's part of the `number`th unit, which has this many (padded) elements."""
        if self.kind == "spread":
            each = num_elements // self.num_ranks
            return tuple(Span(rank * each, (rank + 1) * each) for rank in range(self.num_ranks))
        owner = number % self.num_ranks
        return tuple(
            Span(0, num_elements) if rank == owner else Span(num_elements, num_elements)
            for rank in range(self.num_ranks)
        )


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """How one unit is divided."""

    num_elements: int  # filled up, so that it can be cut
    spans: tuple[Span, ...]  # each rank's part
    stored: Span  # what this rank keeps of the parameters
    owned: Span  # what this rank updates
    # Whether ranks store, and update, different parts. The same answer on every rank, also on one whose part is all.
    is_stored_in_parts: bool
    is_updated_in_parts: bool


@dataclass(frozen=True, slots=True)
class Sharding:
    """What one rank keeps: ZeRO's stages."""

    rank: int = 0
    partition: Partition = Partition(1)
    stage: int = 0

    def layout(self, num_elements: int, number: int) -> ShardLayout:
        """The layout of the `number`th unit."""
        padded = self.partition.padded(num_elements)
        spans = self.partition.spans(padded, number)
        whole, mine = Span(0, padded), spans[self.rank]
        stored, updated = self.partition.num_ranks > 1 and self.stage == 3, self.partition.num_ranks > 1 <= self.stage
        return ShardLayout(padded, spans, mine if stored else whole, mine if updated else whole, stored, updated)


ONE_RANK = Sharding()
