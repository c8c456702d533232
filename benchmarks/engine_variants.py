"""Variants of the engine for ablations: no prefetch, no cache, slower drives and links. Not settings for training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.throttled_device import ThrottledDevice
from zero_infinity.comm.channel import Traffic
from zero_infinity.engine_parts import EngineParts
from zero_infinity.policy.access_order import BlockId
from zero_infinity.policy.cache_policy import CachePolicy, Decision
from zero_infinity.storage.striped_files import FileDevice
from zero_infinity.tiers.emulated_accelerator import SlowLink


class PolicyWithoutPrefetch(CachePolicy):
    """Fetches a block when it is used, never ahead of that."""

    @property
    def lookahead(self) -> int:
        return 0

    @lookahead.setter
    def lookahead(self, num_bytes: int) -> None:
        """The tier sets it when memory is divided; here it stays 0."""


class PolicyWithoutCache(CachePolicy):
    """Keeps what is in use or in the look-ahead window, and evicts everything else at once."""

    def access(self, block: BlockId) -> Decision:
        decision = super().access(block)
        idle = [b for b in sorted(self._cached) if b != block and not self._window[b] and not self._in_use(b)]
        for other in idle:
            self.forget(other)
        return Decision((*decision.evict, *idle), decision.fetch)


class SlowTraffic(Traffic):
    """Holds up whoever has sent something for as long as a link of this speed would have taken."""

    def __init__(self, bytes_per_second: float) -> None:
        super().__init__()
        self._link = SlowLink(bytes_per_second, latency_seconds=0.0)

    def add(self, kind: str, num_bytes: int) -> None:
        self._link.carry(num_bytes)
        super().add(kind, num_bytes)


_POLICIES = {(): CachePolicy, ("prefetch",): PolicyWithoutPrefetch, ("cache",): PolicyWithoutCache}


def engine_parts(without: Sequence[str], bytes_per_second: float | None = None) -> EngineParts:
    """Parts of an engine without "prefetch" or without "cache".

    `bytes_per_second`: the speed of each drive, reads and writes together, and of what a rank sends.
    """
    make_policy = _POLICIES[tuple(without)]
    if bytes_per_second is None:
        return EngineParts(make_policy=make_policy)
    return EngineParts(slow_drive(bytes_per_second), make_policy, lambda: SlowTraffic(bytes_per_second))


def slow_drive(bytes_per_second: float) -> Callable[[Sequence[Path]], ThrottledDevice]:
    """Makes swap space that moves this many bytes a second, reads and writes together."""
    return lambda paths: ThrottledDevice(FileDevice(paths), bytes_per_second)
