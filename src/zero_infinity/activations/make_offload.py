"""Builds the offload of saved activations that the config asks for."""

from __future__ import annotations

import torch

from zero_infinity.activations.activation_storage import ActivationStorage, BlockActivationStorage
from zero_infinity.activations.arena import ActivationArena
from zero_infinity.activations.offload import ActivationOffload
from zero_infinity.activations.replicas import Replicas
from zero_infinity.comm.process_group import RankGroup
from zero_infinity.config import Config
from zero_infinity.policy.memory_budget import Home, MemoryDivision
from zero_infinity.tiers.host_cache import HostCache, SpareBytes


def make_activation_offload(
    config: Config,
    host_cache: HostCache,
    device: torch.device,
    division: MemoryDivision,
    spare: SpareBytes,
    replicas: RankGroup | None,
) -> ActivationOffload | None:
    """Return None if torch alone keeps saved tensors. `replicas`: the ranks that compute the same activations."""
    offload = config.offload_activations
    if replicas is None and not offload:
        return None
    storage: ActivationStorage = ActivationArena(device)
    if offload in (True, "all"):
        home = Home.NVME if config.nvme else Home.RAM
        beside = SpareBytes(division.cache - division.least)
        storage = BlockActivationStorage(host_cache, home, beside if config.nvme else spare)
    if replicas is None:
        return ActivationOffload(storage)
    return ActivationOffload(storage, Replicas(replicas.channel("activations", device)))
