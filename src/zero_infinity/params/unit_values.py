"""The sources of a unit's values for modules, and where changed values are written.

`HostValues`: directly from the unit's block, without a copy, if the CPU computes in the stored dtype.
`DeviceValues`: directly from the unit's block in device memory, likewise.
`CopiedValues`: from a copy in the device cache. (`tiling/materialize.py` has a third: a weight materialized from its
tiles.) `ValueSources` maps units to sources.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch

from zero_infinity.params.unit import ManagedParameter, Unit
from zero_infinity.tiers.device_cache import DeviceCache
from zero_infinity.tiers.host_cache import HostCache
from zero_infinity.tiers.rounded_copies import round_to


class UnitValues(Protocol):
    """A source of units' elements for computation."""

    def acquire(self, unit: Unit) -> torch.Tensor:
        """Return the elements in `unit.compute_dtype`; they stay while the tensor or a view of it is alive."""

    def current(self, unit: Unit) -> bool:
        """True if the last acquired elements are still the unit's current values, in memory."""

    def pin(self, unit: Unit) -> None:
        """Keep it in memory until `unpin`."""

    def unpin(self, unit: Unit) -> None: ...

    def keep(self, parameter: ManagedParameter, flat: torch.Tensor) -> None:
        """The user has changed the parameter in `flat`, which was acquired: that is its value now."""

    def may_change(self, unit: Unit) -> None:
        """The user has a tensor through which the value may change undetected, now or later."""

    def aliased(self, unit: Unit) -> bool:
        """True if a live tensor would see an update."""

    def may_lag(self, unit: Unit) -> bool:
        """True if an update may wait until the unit is acquired next: until then nobody reads its values."""

    def updated(self, unit: Unit) -> None:
        """An update of the unit was submitted: copies are stale."""

    def look_ahead(self) -> None:
        """The blocks of all submitted updates are held: copies for what comes next may be made after them."""

    def end_cycle(self, *, same_order: bool) -> None:
        """End a step."""

    def write_home(self) -> None:
        """Write possible user changes to the blocks, which are about to be read."""


class ValueSources:
    """Maps each unit to its source."""

    def __init__(self, default: UnitValues) -> None:
        self._default = default
        self._of: dict[Unit, UnitValues] = {}

    def serve(self, unit: Unit, source: UnitValues) -> None:
        """From now on `source` has the unit's values."""
        self._of[unit] = source

    def of(self, unit: Unit) -> UnitValues:
        return self._of.get(unit, self._default)

    def of_all(self, units: Iterable[Unit]) -> list[UnitValues]:
        """Return the sources of these units, each once."""
        return list(dict.fromkeys(self.of(unit) for unit in units))


class HostValues:
    """Units directly from their blocks."""

    def __init__(self, host_cache: HostCache) -> None:
        self._host_cache = host_cache

    def acquire(self, unit: Unit) -> torch.Tensor:
        block = unit.the_block()
        self._host_cache.bring(block)
        return self._host_cache.store.lease(block)[: unit.stored_bytes].view(unit.dtype)

    def current(self, unit: Unit) -> bool:
        return self._host_cache.store.ready(unit.the_block())

    def pin(self, unit: Unit) -> None:
        self._host_cache.pin(unit.the_block())

    def unpin(self, unit: Unit) -> None:
        self._host_cache.unpin(unit.the_block())

    def keep(self, parameter: ManagedParameter, flat: torch.Tensor) -> None:  # noqa: ARG002 - already in the block
        self._host_cache.store.mark_dirty(parameter.unit.the_block())

    def may_change(self, unit: Unit) -> None:
        self._host_cache.store.mark_dirty(unit.the_block())

    def aliased(self, unit: Unit) -> bool:
        return unit.the_block().leased

    def may_lag(self, unit: Unit) -> bool:
        return not unit.the_block().leased

    def updated(self, unit: Unit) -> None:
        """Nothing to do: the update changes the block itself."""

    def look_ahead(self) -> None:
        """Nothing to do: there are no copies."""

    def end_cycle(self, *, same_order: bool) -> None:
        """Nothing to do: the host tier has its own end of cycle."""

    def write_home(self) -> None:
        """Nothing to do: changes are made in the block."""


class DeviceValues:
    """Units that live in device memory. Updates and user changes are ordered there, as in plain PyTorch."""

    def acquire(self, unit: Unit) -> torch.Tensor:
        return unit.the_block().the_device_bytes()[: unit.stored_bytes].view(unit.dtype)

    def current(self, unit: Unit) -> bool:  # noqa: ARG002 - the memory is always the same
        return True

    def pin(self, unit: Unit) -> None:
        """Nothing to do: it never moves."""

    def unpin(self, unit: Unit) -> None:
        """Nothing to do: it never moves."""

    def keep(self, parameter: ManagedParameter, flat: torch.Tensor) -> None:
        """Nothing to do: the change is in the block already."""

    def may_change(self, unit: Unit) -> None:
        """Nothing to do: changes are made in the block."""

    def aliased(self, unit: Unit) -> bool:  # noqa: ARG002 - it is updated in `step()`, as in plain PyTorch
        return False

    def may_lag(self, unit: Unit) -> bool:  # noqa: ARG002 - likewise
        return False

    def updated(self, unit: Unit) -> None:
        """Nothing to do: the update changes the block itself."""

    def look_ahead(self) -> None:
        """Nothing to do: nothing is copied."""

    def end_cycle(self, *, same_order: bool) -> None:
        """Nothing to do: nothing is cached."""

    def write_home(self) -> None:
        """Nothing to do: changes are made in the block."""


class ShrinkingCache(Protocol):
    """The device memory of a cache."""

    def shrink(self, when: str) -> bool:
        """The device ran out of memory: give back what is not in use; False if the cache cannot be smaller."""


class CopiedValues:
    """Units from copies in the device cache, whose memory may shrink."""

    def __init__(self, cache: DeviceCache, memory: ShrinkingCache | None) -> None:
        self._cache = cache
        self._memory = memory

    def acquire(self, unit: Unit) -> torch.Tensor:
        is_second = False
        while True:
            try:
                return self._cache.acquire(unit)
            except torch.OutOfMemoryError:
                if self._memory is None:
                    raise
                # Also a cache that does not shrink has given back what was not in use: once.
                if not self._memory.shrink("when a layer was to be copied to it") and is_second:
                    raise
                is_second = True

    def current(self, unit: Unit) -> bool:
        return self._cache.is_current(unit)

    def pin(self, unit: Unit) -> None:
        self._cache.pin(unit)

    def unpin(self, unit: Unit) -> None:
        self._cache.unpin(unit)

    def keep(self, parameter: ManagedParameter, flat: torch.Tensor) -> None:
        self._cache.write_home(parameter.unit, flat)
        round_to(parameter.unit.dtype, parameter.of(flat))

    def may_change(self, unit: Unit) -> None:
        self._cache.may_change(unit)

    def aliased(self, unit: Unit) -> bool:  # noqa: ARG002 - an update does not touch copies
        return False

    def may_lag(self, unit: Unit) -> bool:  # noqa: ARG002 - copies are made ahead of their use
        return False

    def updated(self, unit: Unit) -> None:
        self._cache.invalidate(unit)

    def look_ahead(self) -> None:
        self._cache.look_ahead()

    def end_cycle(self, *, same_order: bool) -> None:
        self._cache.end_cycle(same_order=same_order)

    def write_home(self) -> None:
        self._cache.write_back_all()
