"""Gradients of units that live in device memory: they stay where they were computed until `step()`.

The first gradient is kept as autograd made it, without a copy; later ones are added to it. On several ranks it is this
rank's part of the average. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from zero_infinity.optim.state_records import Segment, StateRecord
from zero_infinity.params.unit import ManagedParameter, Unit
from zero_infinity.policy.homes import Home
from zero_infinity.policy.partition import Span


class ArrivingGradients(Protocol):
    """The average over ranks of the gradients of one unit's parameters, which is being computed."""

    @property
    def parameters(self) -> Iterable[ManagedParameter]: ...

    def on_device(self) -> tuple[Span, torch.Tensor]:
        """Return this rank's elements of the unit, for what this thread launches from now on."""


@dataclass(slots=True)
class _Kept:
    """A gradient, or the part of it that this rank has."""

    first: int  # its first element within the parameter
    elements: torch.Tensor


class DeviceGradients:
    """The gradients of all units that live on the device."""

    def __init__(self, records: Mapping[Unit, StateRecord]) -> None:
        self._records = {unit: r for unit, r in records.items() if unit.the_block().home is Home.DEVICE}
        self._kept: dict[ManagedParameter, _Kept] = {}
        self._arriving: dict[Unit, list[ArrivingGradients]] = {}

    def is_home_of(self, unit: Unit) -> bool:
        """True if the unit lives on the device."""
        return unit in self._records

    def __contains__(self, parameter: ManagedParameter) -> bool:
        return parameter in self._kept or any(
            parameter in reduced.parameters for reduced in self._arriving.get(parameter.unit, ())
        )

    def __bool__(self) -> bool:
        return bool(self._kept or self._arriving)

    @property
    def units(self) -> list[Unit]:
        """The units with a gradient, in model order."""
        found = {parameter.unit for parameter in self._kept} | self._arriving.keys()
        return [unit for unit in self._records if unit in found]

    # ------------------------------------------------------------------ taking in

    def add(self, parameter: ManagedParameter, flat: torch.Tensor) -> None:
        """Add a whole gradient."""
        flat = flat.to(parameter.cell.device, self._records[parameter.unit].dtype)
        kept = self._kept.get(parameter)
        if kept is None:
            self._kept[parameter] = _Kept(0, flat)
        else:
            kept.elements.add_(flat)

    def add_reduced(self, unit: Unit, reduced: ArrivingGradients) -> None:
        """Add averages of a unit's gradients once they are computed."""
        arriving = self._arriving.setdefault(unit, [])
        while arriving:  # at most one is on its way, so that memory does not grow with the number of backwards
            self._take_in(arriving.pop(0))
        arriving.append(reduced)

    def settle(self) -> None:
        """Take in what is on its way."""
        for arriving in self._arriving.values():
            for reduced in arriving:
                self._take_in(reduced)
        self._arriving.clear()

    def _take_in(self, reduced: ArrivingGradients) -> None:
        span, elements = reduced.on_device()
        for parameter in reduced.parameters:
            mine = span.overlap(parameter.offset, parameter.end)
            part = elements[mine.start - span.start : mine.stop - span.start]
            kept = self._kept.get(parameter)
            if kept is None:
                self._kept[parameter] = _Kept(mine.start - parameter.offset, part)
            else:
                kept.elements.add_(part)

    # ------------------------------------------------------------------ giving out

    def take(self, parameter: ManagedParameter) -> torch.Tensor:
        """Return a gradient, which is dropped here."""
        return self._kept.pop(parameter).elements

    def part(self, segment: Segment) -> torch.Tensor | None:
        """Return the elements of `segment`, which may be changed; None if its parameter has no gradient."""
        kept = self._kept.get(segment.parameter)
        return None if kept is None else kept.elements[segment.start - kept.first : segment.stop - kept.first]

    def parameters_of(self, unit: Unit) -> list[ManagedParameter]:
        """Return the parameters of the unit that have a gradient."""
        return [parameter for parameter in self._records[unit].state_names if parameter in self._kept]

    def copy_into(self, parameter: ManagedParameter, flat: torch.Tensor) -> None:
        """Copy the part that this rank has."""
        self.settle()
        kept = self._kept[parameter]
        flat[kept.first : kept.first + len(kept.elements)] = kept.elements

    def replace(self, parameter: ManagedParameter, flat: torch.Tensor) -> None:
        """Replace a gradient by another one, of which this rank keeps as much as before."""
        self.settle()
        flat = flat.to(parameter.cell.device, self._records[parameter.unit].dtype, copy=True)
        mine = parameter.unit.owned.overlap(parameter.offset, parameter.end)
        kept = self._kept.get(parameter) or _Kept(mine.start - parameter.offset, flat[: len(mine)])
        self._kept[parameter] = _Kept(kept.first, flat[kept.first : kept.first + len(kept.elements)])

    def drop(self, parameter: ManagedParameter) -> None:
        """Drop a gradient, if there is one."""
        self.settle()
        self._kept.pop(parameter, None)

    def clear(self) -> None:
        """Drop all gradients."""
        self._kept.clear()
        self._arriving.clear()

    # ------------------------------------------------------------------ norms, on the device

    def norms(self) -> dict[ManagedParameter, torch.Tensor]:
        """Return the norm of each whole gradient."""
        return {
            parameter: torch.linalg.vector_norm(kept.elements.as_strided(parameter.shape, parameter.stride))
            for parameter, kept in self._kept.items()
        }

    def squares(self) -> dict[Segment, float]:
        """Return the sum of squares of each segment. Waits for the device, once."""
        self.settle()
        segments = [s for record in self._records.values() for chunk in record.chunks for s in chunk.segments]
        parts = [(segment, part) for segment in segments if (part := self.part(segment)) is not None]
        if not parts:
            return {}
        norms = torch.stack([torch.linalg.vector_norm(part, dtype=torch.float64) for _, part in parts])
        return dict(zip([segment for segment, _ in parts], norms.square().tolist(), strict=True))

    def __iter__(self) -> Iterator[ManagedParameter]:
        return iter(self._kept)
