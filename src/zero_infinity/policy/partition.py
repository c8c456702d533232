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
    """What one rank keeps. The only place that knows what a ZeRO stage is; everything else asks these properties."""

    rank: int = 0
    partition: Partition = Partition(1)
    stage: int = 0

    @property
    def num_ranks(self) -> int:
        return self.partition.num_ranks

    @property
    def shards_optimizer(self) -> bool:
        """Each rank updates its shard of every unit (stages 1 to 3)."""
        return self.num_ranks > 1 and self.stage >= 1

    @property
    def shards_gradients(self) -> bool:
        """Gradients are reduce-scattered as they become complete (stages 2 and 3), not kept whole until the update."""
        return self.num_ranks > 1 and self.stage >= 2

    @property
    def shards_parameters(self) -> bool:
        """Each rank stores its shard of every unit and gathers the rest for use (stage 3)."""
        return self.num_ranks > 1 and self.stage == 3

    @property
    def gathers_updates(self) -> bool:
        """Every rank stores whole units and updates a shard of each: updated shards go to all (stages 1 and 2)."""
        return self.shards_optimizer and not self.shards_parameters

    @property
    def keeps_whole_gradients(self) -> bool:
        """A rank updates its shard and keeps whole gradients until then (stage 1)."""
        return self.shards_optimizer and not self.shards_gradients

    def layout(self, num_elements: int, number: int) -> ShardLayout:
        """The layout of the `number`th unit."""
        padded = self.partition.padded(num_elements)
        spans = self.partition.spans(padded, number)
        whole, mine = Span(0, padded), spans[self.rank]
        stored = mine if self.shards_parameters else whole
        owned = mine if self.shards_optimizer else whole
        return ShardLayout(padded, spans, stored, owned, self.shards_parameters, self.shards_optimizer)


ONE_RANK = Sharding()
