"""What one of several ranks needs to sum gradients and to spread updated parameters."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zero_infinity.comm.channel import Channel
from zero_infinity.comm.gather_updates import UpdateAllGather
from zero_infinity.comm.reduce_scatter import ReduceScatter
from zero_infinity.params.moe_routing import ExpertRouting
from zero_infinity.policy.partition import Sharding
from zero_infinity.tiers.device_cache import DeviceCache


@dataclass(frozen=True, slots=True)
class GradientCollectives:
    """The collectives for gradients and updated parameters."""

    sharding: Sharding
    channel: Channel  # of the compute thread
    reduce_scatter: ReduceScatter
    all_gather: UpdateAllGather | None  # of updated shards, where every rank stores whole units
    routing: ExpertRouting
    gathered: DeviceCache | None  # unsharded copies of sharded parameters
    device: torch.device  # where gradients are summed
    sends_float16: bool
    updated: Channel | None  # to the other ranks' copies of units that live on the device and are updated in parts
