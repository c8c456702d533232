"""A parameter that lives in tiles, put together for who needs it whole.

The ordinary use of such a parameter never needs this: it is for code that looks at a weight (a norm, `zi.gathered`, a
copy) or uses it in a way that tiles do not serve. It takes room for all of it at once, which is lent by the cache of
blocks for as long as a tensor over it lives; when there is not as much, that is said, with both numbers.

What is put together is a copy. When the user may have written to it, through `.data` or a view, it is kept until the
next use of a tile, and goes back into the tiles before that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from zero_infinity.errors import CapacityError
from zero_infinity.params.unit import ManagedParameter, Unit
from zero_infinity.params.unit_access import UnitAccess
from zero_infinity.policy.sizes import round_up
from zero_infinity.tiers.accelerator import DeviceMemory
from zero_infinity.tiers.host_cache import SpareBytes
from zero_infinity.units import format_bytes, suggest_bytes


class Lender(Protocol):
    """Whose room is used."""

    def lend(self, num_bytes: int) -> bool:
        """Do with that much less from now on; False, and nothing changes, when that cannot be."""

    def take_back(self, num_bytes: int) -> None: ...


class Materializer:
    """The source of units that have no block: their tiles have."""

    def __init__(
        self,
        access: UnitAccess,
        lender: Lender,
        allocate: Callable[[int], DeviceMemory],
        spare: SpareBytes,
        budget: int,
    ) -> None:
        self._access = access
        self._lender = lender
        self._allocate = allocate
        self._spare = spare  # is used before anything is lent
        self._budget = budget
        self._lent: list[tuple[DeviceMemory, int, int]] = []  # each with what is spare and what is lent of it
        self._made_of: dict[Unit, list[int]] = {}  # the states of its tiles when a unit was put together
        self._written: dict[Unit, torch.Tensor] = {}  # what the user may write to

    # ------------------------------------------------------------------ the source of a unit

    def acquire(self, unit: Unit) -> torch.Tensor:
        self.settle(unit)
        memory = self._take(unit)
        flat = memory.tensor()[: unit.num_elements * unit.compute_dtype.itemsize].view(unit.compute_dtype)
        whole = unit.parameters[0]
        with torch.no_grad():
            for tile in whole.tiles:
                rows_of(tile, flat).copy_(tile.of(self._access.acquire(tile.unit)))
        self._made_of[unit] = _states(whole)
        return flat

    def current(self, unit: Unit) -> bool:
        return self._made_of.get(unit) == _states(unit.parameters[0])

    def pin(self, unit: Unit) -> None:
        """What refers to it keeps it."""

    def unpin(self, unit: Unit) -> None:
        """What refers to it keeps it."""

    def keep(self, parameter: ManagedParameter, flat: torch.Tensor) -> None:
        for tile in parameter.tiles:
            write(self._access, tile, rows_of(tile, flat))

    def may_change(self, unit: Unit) -> None:
        flat = unit.state.last_acquired
        if flat is not None:
            self._written[unit] = flat

    def aliased(self, unit: Unit) -> bool:  # noqa: ARG002 - what is put together is a copy
        return False

    def updated(self, unit: Unit) -> None:
        """An update of a tile was submitted: what was written to the whole counts before it."""
        self.settle(unit)

    def end_cycle(self, *, same_order: bool) -> None:  # noqa: ARG002 - there is no order in this
        self._collect()

    def write_home(self) -> None:
        for unit in list(self._written):
            self.settle(unit)

    def settle(self, unit: Unit) -> None:
        """Let the tiles have what may have been written to the whole. Before any use of a tile."""
        flat = self._written.pop(unit, None)
        if flat is not None:
            parameter = unit.parameters[0]
            for tile in parameter.tiles:
                tile.state.edit()
            with torch.no_grad():
                self.keep(parameter, flat)
            # Who holds a tensor over the old copy can write to it again, and will not be heard.
            unit.state.forget_acquired()
        self._collect()

    # ------------------------------------------------------------------ room

    def _take(self, unit: Unit) -> DeviceMemory:
        self._collect()
        num_bytes = round_up(unit.num_elements * unit.compute_dtype.itemsize)
        spare = min(num_bytes, max(0, self._spare.num_bytes))
        lent = num_bytes - spare
        # One tile at a time has to be there to be copied.
        beside = max(round_up(tile.unit.stored_bytes) for tile in unit.parameters[0].tiles)
        if lent and not self._lender.lend(lent + beside):
            raise CapacityError(
                f"{unit.parameters[0].name!r} is used in {len(unit.parameters[0].tiles)} tiles, but needed whole here: "
                f"that takes {format_bytes(num_bytes)}, which memory of {format_bytes(self._budget)} has not room for "
                "beside what is in use\n"
                f"  fix:   memory={suggest_bytes(self._budget + lent)}, or use it by its layer alone "
                "(model.state_dict() and load_state_dict() need no such room)"
            )
        if lent:
            self._lender.take_back(beside)
        self._spare.num_bytes -= spare
        memory = self._allocate(num_bytes)
        self._lent.append((memory, spare, lent))
        return memory

    def _collect(self) -> None:
        """Give back the room of copies that nobody refers to any more."""
        alive = []
        for memory, spare, lent in self._lent:
            if memory.leases:
                alive.append((memory, spare, lent))
            else:
                memory.release()
                self._spare.num_bytes += spare
                self._lender.take_back(lent)
        self._lent = alive


def rows_of(tile: ManagedParameter, flat: torch.Tensor) -> torch.Tensor:
    """A tile's part of the elements of the whole, in its shape."""
    if tile.whole is None:
        raise RuntimeError(f"{tile.name!r} is no tile")
    return tile.rows_of(tile.whole.of(flat))


def write(access: UnitAccess, tile: ManagedParameter, value: torch.Tensor) -> None:
    """Store another value of a tile."""
    flat = access.acquire(tile.unit)
    tile.of(flat).copy_(value)
    access.sources.of(tile.unit).keep(tile, flat)


def _states(whole: ManagedParameter) -> list[int]:
    return [whole.state.num_changes, *(tile.state.num_changes for tile in whole.tiles)]
