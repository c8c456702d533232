"""The replaceable parts of an engine, for benchmarks that slow or omit a part, simulations, and tests that break one.

These are not settings. Training uses the defaults, and `zi.prepare` and `zi.init` do not take them; their internal
forms `api.prepare_with` and `api.init_with` do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from zero_infinity.comm.channel import Traffic
from zero_infinity.comm.process_group import RankGroup, find_group
from zero_infinity.policy.access_order import BlockId
from zero_infinity.policy.cache_policy import CachePolicy
from zero_infinity.storage.striped_files import FileDevice
from zero_infinity.storage.swap_device import SwapDevice


class PolicyFactory(Protocol):
    """Makes the policy of one tier."""

    def __call__(
        self, budget: int, lookahead: int, in_use: Callable[[BlockId], bool], *, wraps: bool = True
    ) -> CachePolicy: ...


class RankFinder(Protocol):
    """Finds the ranks of a group; None for a single rank."""

    def __call__(
        self, group: ProcessGroup | DeviceMesh | None, make_traffic: Callable[[], Traffic]
    ) -> RankGroup | None: ...


@dataclass(frozen=True, slots=True)
class EngineParts:
    """Factories of one engine's parts."""

    make_device: Callable[[Sequence[Path]], SwapDevice] = FileDevice  # swap space in the directories of `nvme`
    make_policy: PolicyFactory = CachePolicy  # of host memory, and of copies on the compute device
    make_traffic: Callable[[], Traffic] = Traffic  # counts everything that this rank has sent
    find_ranks: RankFinder = find_group  # who trains together, and what they talk through


DEFAULT_PARTS = EngineParts()
