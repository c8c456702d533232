"""One model's wires to the other ranks: one for each thread that talks to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zero_infinity.comm.channel import Channel, Topic
from zero_infinity.comm.process_group import RankGroup
from zero_infinity.errors import UsageError
from zero_infinity.params.unit import Unit

# The topic of what is said before the first step; no unit has this number.
START = -10


@dataclass(frozen=True, slots=True)
class Channels:
    steps: Channel  # of the thread that computes
    gradients: Channel
    copies: Channel | None  # of parameters of which each rank stores a part
    exchange: Channel | None  # of parameters of which each rank updates a part


def connect(ranks: RankGroup, units: Sequence[Unit], stage: int, copies_on: torch.device | None) -> Channels:
    """Connect to ranks that have the same model, which is checked. `copies_on`: where copies of units are made."""
    ranks.names.update({unit.number: unit.name for unit in units})
    channels = Channels(
        steps=ranks.channel("steps"),
        gradients=ranks.channel("gradients"),
        copies=ranks.channel("parameters", copies_on) if stage == 3 and copies_on is not None else None,
        exchange=ranks.channel("parameters") if stage in (1, 2) else None,
    )
    sizes = [len(units), sum(unit.num_elements for unit in units)]
    said = channels.steps.agree(Topic("start", START, "the sizes of the model"), sizes)
    for rank, theirs in enumerate(said):
        if theirs != said[0]:
            raise UsageError(
                f"rank {rank} has a model of {theirs[0]} units and {theirs[1]:,} elements, rank 0 one of "
                f"{said[0][0]} units and {said[0][1]:,} elements\n  fix:   build the same model on every rank"
            )
    return channels
