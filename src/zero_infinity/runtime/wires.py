"""One model's wires to the other ranks: one for each thread that talks to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zero_infinity.errors import UsageError
from zero_infinity.runtime.unit import Unit
from zero_infinity.shard.group import RankGroup
from zero_infinity.shard.wire import Topic, Wire

# The topic of what is said before the first step; no unit has this number.
START = -10


@dataclass(frozen=True, slots=True)
class Wires:
    steps: Wire  # of the thread that computes
    gradients: Wire
    copies: Wire | None  # of parameters of which each rank stores a part
    exchange: Wire | None  # of parameters of which each rank updates a part


def connect(ranks: RankGroup, units: Sequence[Unit], stage: int, copies_on: torch.device | None) -> Wires:
    """Connect to ranks that have the same model, which is checked. `copies_on`: where copies of units are made."""
    ranks.names.update({unit.number: unit.name for unit in units})
    wires = Wires(
        steps=ranks.wire("steps"),
        gradients=ranks.wire("gradients"),
        copies=ranks.wire("parameters", copies_on) if stage == 3 and copies_on is not None else None,
        exchange=ranks.wire("parameters") if stage in (1, 2) else None,
    )
    sizes = [len(units), sum(unit.num_elements for unit in units)]
    said = wires.steps.agree(Topic("start", START, "the sizes of the model"), sizes)
    for rank, theirs in enumerate(said):
        if theirs != said[0]:
            raise UsageError(
                f"rank {rank} has a model of {theirs[0]} units and {theirs[1]:,} elements, rank 0 one of "
                f"{said[0][0]} units and {said[0][1]:,} elements\n  fix:   build the same model on every rank"
            )
    return wires
