"""The channels of one model to the other ranks: one per communicating thread."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from zero_infinity.comm.channel import Channel
from zero_infinity.comm.process_group import RankGroup
from zero_infinity.comm.topics import START
from zero_infinity.errors import UsageError
from zero_infinity.policy.partition import Sharding


@dataclass(frozen=True, slots=True)
class Channels:
    """Each channel belongs to one thread."""

    steps: Channel  # the compute thread
    gradients: Channel  # reduce-scatter
    copies: Channel | None  # all-gather of sharded parameters, before use
    updates: Channel | None  # all-gather of updated shards, after the optimizer step
    on_device: Channel | None  # the compute thread's, for updated shards on devices


def connect(
    ranks: RankGroup,
    sharding: Sharding,
    unit_names: Mapping[int, str],
    num_elements: int,
    copies_on: torch.device | None,
    gradients_on: torch.device,
    homes_on: torch.device | None,
) -> Channels:
    """Connect to the other ranks and check that they have the same model.

    `unit_names` are in order of unit number. `copies_on` is the device on which sharded units are gathered,
    `gradients_on` the one on which gradients are summed, `homes_on` the one on which units live.
    """
    ranks.names.update(unit_names)
    copies = ranks.channel("parameters", copies_on) if sharding.shards_parameters and copies_on is not None else None
    channels = Channels(
        steps=ranks.channel("steps"),
        gradients=ranks.channel("gradients", gradients_on),
        copies=copies,
        updates=ranks.channel("parameters") if sharding.gathers_updates else None,
        on_device=(
            ranks.channel("updated parameters", homes_on) if sharding.gathers_updates and homes_on is not None else None
        ),
    )
    said = channels.steps.agree(START, [len(unit_names), num_elements])
    for rank, theirs in enumerate(said):
        if theirs != said[0]:
            raise UsageError(
                f"rank {rank} has a model of {theirs[0]} units and {theirs[1]:,} elements, rank 0 one of "
                f"{said[0][0]} units and {said[0][1]:,} elements\n  fix:   build the same model on every rank"
            )
    return channels
