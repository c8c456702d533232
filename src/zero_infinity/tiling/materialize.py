"""Materializes a tiled parameter for code that needs it whole, and writes user changes back to its tiles.

The ordinary use of a tiled parameter does not need this: it is for code that reads the weight (a norm, `zi.gathered`, a
copy) or uses it in an operation that has no tiled form. It needs memory for the whole parameter, which the block cache
lends while a tensor over it is alive; if there is too little, the error gives both numbers.

A materialized parameter is a copy. If the user may have written to it, through `.data` or a view, it is kept until the
next use of a tile and written back to the tiles before that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from zero_infinity.byte_sizes import format_bytes, suggest_bytes
from zero_infinity.errors import CapacityError
from zero_infinity.params.unit import ManagedParameter, Unit
from zero_infinity.params.unit_access import UnitAccess
from zero_infinity.policy.alignment import round_up
from zero_infinity.tiers.compute_device import DeviceMemory
from zero_infinity.tiers.host_cache import SpareBytes


class Lender(Protocol):
    """Whose budget is used."""

    def lend(self, num_bytes: int) -> bool:
        """Reduce its budget by `num_bytes`; returns False and changes nothing if that is not possible."""

    def take_back(self, num_bytes: int) -> None: ...


class Materializer:
    """The source of units whose values are in their tiles' blocks."""

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
        self._spare = spare  # used before anything is borrowed
        self._budget = budget
        self._lent: list[tuple[DeviceMemory, int, int]] = []  # with the spare and the lent bytes of each
        self._made_of: dict[Unit, list[int]] = {}  # the states of its tiles when a unit was materialized
        self._written: dict[Unit, torch.Tensor] = {}  # copies that the user may write to

    # ------------------------------------------------------------------ the source of a unit

    def acquire(self, unit: Unit) -> torch.Tensor:
        self.settle(unit)
        self._access.expect(tile.unit for tile in unit.parameters[0].tiles)
        memory = self._take(unit)
        memory.used()
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
        """Nothing to do: references keep it in memory."""

    def unpin(self, unit: Unit) -> None:
        """Nothing to do: references keep it in memory."""

    def keep(self, parameter: ManagedParameter, flat: torch.Tensor) -> None:
        for tile in parameter.tiles:
            write(self._access, tile, rows_of(tile, flat))

    def may_change(self, unit: Unit) -> None:
        flat = unit.state.last_acquired
        if flat is not None:
            self._written[unit] = flat

    def aliased(self, unit: Unit) -> bool:  # noqa: ARG002 - materialized values are a copy
        return False

    def may_lag(self, unit: Unit) -> bool:  # noqa: ARG002 - it has no update of its own
        return False

    def updated(self, unit: Unit) -> None:
        """An update of a tile was submitted: user changes of the whole are applied before it."""
        self.settle(unit)

    def look_ahead(self) -> None:
        """Nothing to do: its tiles are copied ahead."""

    def end_cycle(self, *, same_order: bool) -> None:  # noqa: ARG002 - it has no recorded order
        self._collect()

    def write_home(self) -> None:
        for unit in list(self._written):
            self.settle(unit)

    def settle(self, unit: Unit) -> None:
        """Write possible user changes of the whole to the tiles. Called before any use of a tile."""
        flat = self._written.pop(unit, None)
        if flat is not None:
            parameter = unit.parameters[0]
            for tile in parameter.tiles:
                tile.state.edit()
            with torch.no_grad():
                self.keep(parameter, flat)
            # Later writes through a tensor over the old copy are not detected.
            unit.state.forget_acquired()
        self._collect()

    # ------------------------------------------------------------------ memory

    def _take(self, unit: Unit) -> DeviceMemory:
        self._collect()
        num_bytes = round_up(unit.num_elements * unit.compute_dtype.itemsize)
        spare = min(num_bytes, max(0, self._spare.num_bytes))
        lent = num_bytes - spare
        # One tile at a time must be in memory to be copied.
        tile_bytes = max(round_up(tile.unit.stored_bytes) for tile in unit.parameters[0].tiles)
        if lent and not self._lender.lend(lent + tile_bytes):
            raise CapacityError(
                f"{unit.parameters[0].name!r} is used in {len(unit.parameters[0].tiles)} tiles, but needed whole here: "
                f"that takes {format_bytes(num_bytes)}, and memory of {format_bytes(self._budget)} has no room for it "
                "next to what is in use\n"
                f"  fix:   memory={suggest_bytes(self._budget + lent)}, or use it only through its layer "
                "(model.state_dict() and load_state_dict() do not need that)"
            )
        if lent:
            self._lender.take_back(tile_bytes)
        self._spare.num_bytes -= spare
        memory = self._allocate(num_bytes)
        self._lent.append((memory, spare, lent))
        return memory

    def _collect(self) -> None:
        """Return the memory of copies that are no longer referenced."""
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
    """Return a tile's part of the elements of the whole, in its shape."""
    if tile.whole is None:
        raise RuntimeError(f"{tile.name!r} is not a tile")
    return tile.rows_of(tile.whole.of(flat))


def write(access: UnitAccess, tile: ManagedParameter, value: torch.Tensor) -> None:
    """Store a new value of a tile."""
    flat = access.acquire(tile.unit)
    tile.of(flat).copy_(value)
    access.sources.of(tile.unit).keep(tile, flat)


def _states(whole: ManagedParameter) -> list[int]:
    return [whole.state.num_changes, *(tile.state.num_changes for tile in whole.tiles)]
