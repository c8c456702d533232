"""Which rank owns which elements of a unit, and what each ZeRO stage keeps on a rank.

Pure: every rank computes the same answer. Knows neither bytes nor tensors.

*Spread*: every unit is cut into equal shards, one per rank, so that each rank reads 1/N of every unit from its own
drive and the bandwidth of all drives adds up (ZeRO-Infinity's bandwidth-centric partitioning). *Owner*: each unit
belongs to one rank, which sends it to the others, so only one link is busy at a time. It exists for comparison, and for
units with parameters that their optimizer must see whole.
"""

from __future__ import annotations

from dataclasses import dataclass

from zero_infinity.config import Partition
from zero_infinity.policy.alignment import GRAIN, round_up
from zero_infinity.policy.zero_stage import ZeroStage


@dataclass(frozen=True, slots=True)
class Span:
    """Elements `start` to `stop` of a unit."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def overlap(self, start: int, stop: int) -> Span:
        """The intersection with another range; empty if there is none."""
        first = max(self.start, start)
        return Span(first, max(first, min(self.stop, stop)))


@dataclass(frozen=True, slots=True)
class RankPartition:
    """How units are cut for `num_ranks` ranks."""

    num_ranks: int
    kind: Partition = "spread"

    def padded(self, num_elements: int) -> int:
        """The number of elements that a unit is padded to, so that it can be cut."""
        return round_up(num_elements, GRAIN * self.num_ranks if self.kind == "spread" else GRAIN)

    def spans(self, num_elements: int, number: int, owner: int | None = None) -> tuple[Span, ...]:
        """Each rank's part of the `number`th unit, which has `num_elements` elements with padding.

        `owner`: the rank that has all of it, whatever the kind.
        """
        if self.kind == "spread" and owner is None:
            each = num_elements // self.num_ranks
            return tuple(Span(rank * each, (rank + 1) * each) for rank in range(self.num_ranks))
        owner = number % self.num_ranks if owner is None else owner
        return tuple(
            Span(0, num_elements) if rank == owner else Span(num_elements, num_elements)
            for rank in range(self.num_ranks)
        )


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """How one unit is sharded."""

    num_elements: int  # padded
    spans: tuple[Span, ...]  # each rank's part
    stored: Span  # the parameters that this rank stores
    owned: Span  # the parameters that this rank updates
    # True if ranks store, or update, different parts. The same on every rank, also on one whose part is everything.
    is_stored_in_parts: bool
    is_updated_in_parts: bool


@dataclass(frozen=True, slots=True)
class Sharding:
    """What one rank keeps: the only place that knows what a ZeRO stage does. A single rank shards nothing."""

    rank: int = 0
    partition: RankPartition = RankPartition(1)
    stage: ZeroStage = ZeroStage.NONE

    @property
    def is_distributed(self) -> bool:
        """True if there is more than one rank."""
        return self.partition.num_ranks > 1

    @property
    def shards_optimizer(self) -> bool:
        """Each rank keeps the optimizer state of its own part, and updates that part."""
        return self.is_distributed and self.stage.shards_optimizer

    @property
    def shards_gradients(self) -> bool:
        """Each rank keeps the summed gradients of its own part."""
        return self.is_distributed and self.stage.shards_gradients

    @property
    def shards_parameters(self) -> bool:
        """Each rank stores its own part of the parameters; the rest is gathered when it is used."""
        return self.is_distributed and self.stage.shards_parameters

    @property
    def keeps_whole_gradients(self) -> bool:
        """Until the step a rank keeps gradients of everything, though it updates only its own part (stage 1)."""
        return self.shards_optimizer and not self.shards_gradients

    @property
    def gathers_updates(self) -> bool:
        """Updated parameters are sent to every rank: all store everything, each updates a part (stages 1 and 2)."""
        return self.shards_optimizer and not self.shards_parameters

    @property
    def reduces_everywhere(self) -> bool:
        """Every rank needs the sum of the whole gradient: all ranks update everything (stage 0)."""
        return self.is_distributed and not self.shards_optimizer

    def layout(self, num_elements: int, number: int, owner: int | None = None) -> ShardLayout:
        """The layout of the `number`th unit. `owner`: the rank that updates all of it, if it may not be cut."""
        padded = self.partition.padded(num_elements)
        spans = self.partition.spans(padded, number, owner)
        whole, mine = Span(0, padded), spans[self.rank]
        return ShardLayout(
            padded,
            spans,
            stored=mine if self.shards_parameters else whole,
            owned=mine if self.shards_optimizer else whole,
            is_stored_in_parts=self.shards_parameters,
            is_updated_in_parts=self.shards_optimizer,
        )


ONE_RANK = Sharding()
