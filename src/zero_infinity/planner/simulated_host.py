"""Host memory in the simulation: the engine's cache policy over blocks that live on storage, on a virtual clock.

Decisions are carried out in order, as in the engine: evicting a changed block is a write, and the fetch that takes its
room starts after that write.
"""

from __future__ import annotations

from zero_infinity.byte_sizes import format_bytes
from zero_infinity.errors import CapacityError
from zero_infinity.planner.hardware import HardwareTier
from zero_infinity.planner.host_division import HostPlan
from zero_infinity.planner.rank_links import VirtualLink
from zero_infinity.policy.alignment import round_up
from zero_infinity.policy.cache_policy import CachePolicy, NoRoomError
from zero_infinity.trace import Category


class SimulatedHost:
    """Blocks that stream between storage and host memory. Blocks that were not added are always in memory."""

    def __init__(self, plan: HostPlan, scale: float, num_sharers: int, links: dict[HardwareTier, VirtualLink]) -> None:
        self.in_use: set[int] = set()
        self.read_bytes = 0
        self.written_bytes = 0
        self.policy = CachePolicy(plan.division.cache, plan.division.lookahead, self.in_use.__contains__)
        self._fixed = plan.fixed_bytes
        self._scale = scale
        self._num_sharers = num_sharers
        self._links = links
        self._homes: dict[int, HardwareTier] = {}
        self._sizes: dict[int, int] = {}
        self._names: dict[int, str] = {}
        self._ready: dict[int, float] = {}
        self._changed: dict[int, float] = {}  # changed block -> when the change is done
        self._without_content: set[int] = set()

    def add(self, key: int, name: str, num_bytes: int, home: HardwareTier, *, has_content: bool = True) -> None:
        num_bytes = round_up(num_bytes)
        self._sizes[key] = num_bytes
        self._names[key] = name
        self._homes[key] = home
        if not has_content:
            self._without_content.add(key)
        self.policy.add(key, num_bytes)

    @property
    def held_bytes(self) -> int:
        return self._fixed + int(self._scale * self.policy.cached_bytes)

    def access(self, key: int, now: float) -> float:
        """Use a block; returns when it is in memory and no longer being changed."""
        if key not in self._sizes:
            return max(now, self._changed.get(key, 0.0))
        try:
            decision = self.policy.access(key)
        except NoRoomError as error:
            raise CapacityError(
                f"{self._names[key]!r} needs {format_bytes(error.needed)} of host memory, but all of the "
                f"{format_bytes(error.budget)} for blocks is in use\n  fix:   more memory"
            ) from None
        room_at = now
        for evicted in decision.evict:
            room_at = max(room_at, self._evict(evicted, now))
        for fetched in decision.fetch:
            self._ready[fetched] = self._fetch(fetched, room_at)
        return max(now, self._ready.get(key, 0.0), self._changed.get(key, 0.0))

    def change(self, key: int, when: float) -> None:
        """The block has new content from `when` on."""
        self._changed[key] = when
        self._without_content.discard(key)

    def expire(self, key: int) -> None:
        """The block's content is no longer needed."""
        if key in self._sizes:
            self.policy.forget(key)
            self._changed.pop(key, None)
            self._without_content.add(key)

    def _evict(self, key: int, now: float) -> float:
        if key not in self._changed:
            return now
        done = self._changed.pop(key)
        self.written_bytes += self._sizes[key]
        return self._transfer(key, Category.WRITE_BACK, max(now, done), self._homes[key].write)

    def _fetch(self, key: int, ready: float) -> float:
        if key in self._without_content:
            return ready
        self.read_bytes += self._sizes[key]
        return self._transfer(key, Category.FETCH, ready, self._homes[key].read)

    def _transfer(self, key: int, category: Category, ready: float, rate: float) -> float:
        num_bytes, tier = self._sizes[key], self._homes[key]
        seconds = max(num_bytes * self._num_sharers / rate, num_bytes / tier.one_device)
        return self._links[tier].occupy(self._names[key], category, ready, seconds, num_bytes)
