"""Device memory over host RAM: the tier of unit copies.

Modules that cannot use a unit in its stored form get a copy: on an accelerator, in another dtype, or gathered from the
shards of all ranks. Copies are the entries of a tier with its own budget; the units' blocks are entries of the host
tier below it. Units that ranks may use in a different order (experts) are copied together, as one entry.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import torch

from zero_infinity.byte_sizes import format_bytes
from zero_infinity.comm.channel import Channel
from zero_infinity.engine_parts import PolicyFactory
from zero_infinity.errors import CapacityError
from zero_infinity.policy.cache_policy import NoRoomError
from zero_infinity.storage.block_waits import STUCK_SECONDS
from zero_infinity.tiers.compute_device import ComputeDevice
from zero_infinity.tiers.copier import Copier, CopySource, DeviceCopy, copy_size
from zero_infinity.tiers.direct_read import DirectReader
from zero_infinity.tiers.host_cache import HostCache
from zero_infinity.tiers.rounded_copies import round_to, take_edits
from zero_infinity.tiers.tier import Tier
from zero_infinity.tiers.unit_gather import UnitGather
from zero_infinity.trace import COPIES, HOST

# Group numbers start here, so that they never equal a unit number.
_JOINED = 1 << 32


class CopyGroup:
    """Units that are copied together; usually just one."""

    __slots__ = ("key", "name", "number", "sources")

    def __init__(self, key: int, number: int, name: str, sources: Sequence[CopySource]) -> None:
        self.key = key
        self.number = number  # the same on every rank
        self.name = name
        self.sources = sources

    @property
    def held_bytes(self) -> int:
        return sum(copy_size(source) for source in self.sources)


class CopyMover:
    """Makes and drops copies; writes back those that the user has changed."""

    def __init__(self, copier: Copier, host_cache: HostCache, tier_name: str) -> None:
        self._copier = copier
        self._host_cache = host_cache
        self._tier_name = tier_name  # in a trace
        self._copies: dict[int, dict[CopySource, DeviceCopy]] = {}  # by key of their group

    def fetch(self, group: CopyGroup, *, ahead: bool) -> None:  # noqa: ARG002 - copies are made in order
        copies = self._copies[group.key] = {source: self._begin_copy(source) for source in group.sources}
        self._copier.submit(group.number, group.name, list(copies.values()))

    def _begin_copy(self, source: CopySource) -> DeviceCopy:
        block = source.the_block()
        if block.on_device is not None:
            # The update of the block was launched before this, by this thread.
            return DeviceCopy(source, written=self._copier.device.computed())
        # By the policy's count, which does not depend on when something moves.
        if not self._host_cache.is_cached(block) and self._copier.reads_directly(source):
            return DeviceCopy(source, is_direct=True)
        self._host_cache.access(block)
        self._host_cache.store.hold_to_read(block)
        return DeviceCopy(source)

    def evict(self, group: CopyGroup) -> None:
        self.write_back(group)
        self.discard(group)

    def is_leased(self, group: CopyGroup) -> bool:
        memories = (copy.memory for copy in self._copies[group.key].values())
        return any(memory is not None and memory.leases > 0 for memory in memories)

    def is_ready(self, group: CopyGroup) -> bool:
        return all(copy.is_ready for copy in self._copies[group.key].values())

    def wait(self, group: CopyGroup) -> None:
        for copy in self._copies[group.key].values():
            while not copy.wait(STUCK_SECONDS):
                # This thread waits, so it can drop no tensor and no copy.
                if self._copier.seconds_without_room() > STUCK_SECONDS:
                    raise self._held_error(group)

    def _held_error(self, group: CopyGroup) -> CapacityError:
        return CapacityError(
            f"{group.name!r} needs {format_bytes(group.held_bytes)} where it is computed, and there is no room: it is "
            "taken by tensors over parameters (p.detach(), p.data, views) that were kept from before an update\n"
            "  fix:   drop them before the step, or keep copies: p.detach().clone()"
        )

    def moved(self, cached_bytes: int) -> None:
        trace = self._host_cache.store.trace
        if trace is not None:
            trace.held(self._tier_name, time.perf_counter(), cached_bytes)

    def no_room(self, group: CopyGroup, error: NoRoomError, in_use: list[CopyGroup]) -> CapacityError:
        if error.needed > error.budget:
            # This budget is a fixed share of the memory, so both must grow by the same factor.
            return CapacityError(
                f"{group.name!r} is needed whole and takes {format_bytes(error.needed)}, but there is room for "
                f"{format_bytes(error.budget)} of whole units\n"
                f"  fix:   {math.ceil(10 * error.needed / error.budget) / 10:g} times as much memory (device_memory, "
                "when computing on an accelerator)"
            )
        return CapacityError(
            f"{group.name!r} needs {format_bytes(error.needed)} where it is computed, but the "
            f"{format_bytes(error.budget)} there are in use by {len(in_use)} other units\n"
            "  fix:   more device_memory (or memory, when computing on the CPU in another dtype)"
        )

    # ------------------------------------------------------------------ not called by the tier

    def copy_of(self, group: CopyGroup, source: CopySource) -> DeviceCopy | None:
        return self._copies.get(group.key, {}).get(source)

    def write_back(self, group: CopyGroup) -> None:
        """Write copies that the user may have changed back to their blocks."""
        for copy in self._copies.get(group.key, {}).values():
            if copy.is_written:
                self.write_home(copy.source, copy.flat())
                copy.is_written = False

    def write_back_all(self) -> None:
        """Write back every such copy; they stay marked, since the user may write again."""
        for copy in [copy for copies in self._copies.values() for copy in copies.values() if copy.is_written]:
            flat = copy.flat()
            self.write_home(copy.source, flat)
            round_to(copy.source.dtype, flat)

    def discard(self, group: CopyGroup) -> None:
        for copy in self._copies.pop(group.key, {}).values():
            self._copier.drop(copy)

    def write_home(self, source: CopySource, flat: torch.Tensor) -> None:
        """Write what differs in a copy to the unit's block, whose other elements may have more bits."""
        with self._host_cache.writing(source.the_block()) as memory:
            mine = flat[source.stored.start : source.stored.stop]
            stored = memory.view(source.dtype)[: len(mine)]
            if source.the_block().on_device is not None:
                take_edits(stored, mine)
                return
            here, transfer = self._copier.device.download(mine)
            transfer.wait()
            take_edits(stored, here)


class DeviceCache:
    """Copies of units on the compute device, under a byte budget."""

    def __init__(
        self,
        copier: Copier,
        host_cache: HostCache,
        make_policy: PolicyFactory,
        budget: int,
        lookahead: int,
        *,
        tier_name: str,
    ) -> None:
        trace = host_cache.store.trace
        if trace is not None:
            trace.budgets[tier_name] = budget
        self.copier = copier
        self._mover = CopyMover(copier, host_cache, tier_name)
        self._is_shared = copier.is_collective
        self._tier: Tier[CopyGroup] = Tier(
            self._mover, host_cache.compute_thread, make_policy, budget, lookahead, collective=self._is_shared
        )
        self._num_differences = 0  # seen up to the last step
        self._groups: dict[CopySource, CopyGroup] = {}

    # ------------------------------------------------------------------ units

    def add(self, source: CopySource) -> None:
        self._add(CopyGroup(source.the_block().key, source.number, source.name, [source]))

    def __contains__(self, source: CopySource) -> bool:
        return source in self._groups

    def join(self, name: str, sources: Sequence[CopySource]) -> None:
        """From now on copy these units together, whichever of them is used."""
        with self._tier.lock:
            known = list(dict.fromkeys(self._groups[source] for source in sources))
            if len(known) == 1:
                return
            for group in known:
                self._tier.drop(group)
            self._add(CopyGroup(known[0].key, _JOINED + known[0].number, name, list(sources)))

    def _add(self, group: CopyGroup) -> None:
        self._groups.update(dict.fromkeys(group.sources, group))
        self.copier.register(group.number, group.name, group.sources)
        self._tier.add(group)

    def remove(self, source: CopySource) -> None:
        """Drop a unit that is no longer used and will have no home. Changes to its copy are lost."""
        with self._tier.lock:
            group = self._groups.pop(source, None)
            if group is not None:
                self._tier.remove(group)
                self._tier.policy.end_cycle(same_order=False)  # the order recorded so far may contain it
                self._mover.discard(group)

    # ------------------------------------------------------------------ use, by the compute thread

    def acquire(self, source: CopySource) -> torch.Tensor:
        """Return the elements in `source.compute_dtype`; they stay while the tensor or a view of it is alive.

        After a `torch.OutOfMemoryError`, when the device may have more room, it can be called again.
        """
        with self._tier.lock:
            group = self._groups[source]
            self._tier.access(group)
            copy = self._mover.copy_of(group, source)
        if copy is None:
            raise RuntimeError(f"{source.name!r} was accessed and has no copy")
        self._tier.wait(group)
        try:
            return copy.use()
        except torch.OutOfMemoryError:
            self._tier.drop(group)  # it has no memory, perhaps since it was to be copied ahead
            raise

    def is_current(self, source: CopySource) -> bool:
        """True if the last acquired copy is still valid and may be used without another access."""
        group = self._groups[source]
        copy = self._mover.copy_of(group, source)
        return copy is not None and copy.is_ready and (not self._is_shared or self._tier.is_last(group))

    def pin(self, source: CopySource) -> None:
        self._tier.pin(self._groups[source])

    def unpin(self, source: CopySource) -> None:
        self._tier.unpin(self._groups[source])

    def may_change(self, source: CopySource) -> None:
        """The user has a tensor over the copy and may write to it."""
        copy = self._mover.copy_of(self._groups[source], source)
        if copy is not None:
            copy.is_written = True

    def write_home(self, source: CopySource, flat: torch.Tensor) -> None:
        self._mover.write_home(source, flat)

    def invalidate(self, source: CopySource) -> None:
        """An update of the unit was submitted. User changes to its copy are applied before the update."""
        with self._tier.lock:
            group = self._groups[source]
            self._mover.write_back(group)
            self._tier.invalidate(group)

    def look_ahead(self) -> None:
        """The update of a unit holds its block: the next copy may be asked for, and is made after the update."""
        self._tier.look_ahead()

    def end_cycle(self, *, same_order: bool) -> None:
        """End a step; every rank does."""
        if self.copier.num_differences == self._num_differences:
            self._tier.end_cycle(same_order=same_order)
            return
        # Ranks have used different units, so they keep different copies and would look ahead differently.
        self._num_differences = self.copier.num_differences
        self._tier.start_over()

    def follow(self, *, inference: bool) -> None:
        self._tier.follow(inference=inference)

    def write_back_all(self) -> None:
        with self._tier.lock:
            self._mover.write_back_all()

    # ------------------------------------------------------------------ the budget, and closing

    @property
    def total_bytes(self) -> int:
        """The size of all copies together, whether they are there or not."""
        return self._tier.total_bytes

    def limit(self, budget: int, lookahead: int) -> None:
        """Set the budget; evicts what exceeds it, but for what is in use."""
        self._tier.limit(budget, lookahead)

    def lend(self, num_bytes: int) -> bool:
        """Reduce the budget by `num_bytes`; returns False and changes nothing if too much is in use."""
        return self._tier.lend(num_bytes)

    def take_back(self, num_bytes: int) -> None:
        """Return lent bytes to the budget."""
        self._tier.take_back(num_bytes)

    def drain(self) -> None:
        """Wait until every started copy is made."""
        self.copier.drain()


def make_device_cache(
    host_cache: HostCache,
    device: ComputeDevice,
    make_policy: PolicyFactory,
    budget: int,
    lookahead: int,
    *,
    channel: Channel | None = None,
    tier_name: str = COPIES,
    direct: DirectReader | None = None,
) -> DeviceCache:
    """Return a cache of copies on `device`; with a `channel`, of units that are gathered from all ranks."""
    gathering = UnitGather(host_cache.store, channel) if channel is not None else None
    lane = f"{HOST} to {tier_name}"
    copier = Copier(host_cache.store, device, gathering, host_cache.compute_thread, lane=lane, direct=direct)
    return DeviceCache(copier, host_cache, make_policy, budget, lookahead, tier_name=tier_name)
