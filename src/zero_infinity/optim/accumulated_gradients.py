"""Gradients accumulated until `step()`, in the gradient blocks of their chunks.

The policy may evict these blocks to NVMe, so accumulated gradients need no memory outside the budget. Gradients that
arrive later, from an accelerator or other ranks, are added by the update worker (`chunk_update.py: RetainGradients`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch

from zero_infinity.optim.chunk_update import part_of
from zero_infinity.optim.state_records import Chunk, Segment, StateRecord
from zero_infinity.params.unit import ManagedParameter, Unit
from zero_infinity.tiers.host_cache import HostCache


class AccumulatedGradients:
    """The parameters that have a retained gradient, and the blocks that hold it."""

    def __init__(self, host_cache: HostCache, records: Mapping[Unit, StateRecord]) -> None:
        self._host_cache = host_cache
        self._records = records
        self._places = _places(records.values())
        self._parameters: set[ManagedParameter] = set()

    def __contains__(self, parameter: ManagedParameter) -> bool:
        return parameter in self._parameters

    def __iter__(self) -> Iterator[ManagedParameter]:
        return iter(self._parameters)

    def __bool__(self) -> bool:
        return bool(self._parameters)

    @property
    def units(self) -> set[Unit]:
        return {parameter.unit for parameter in self._parameters}

    @property
    def trained(self) -> Iterable[ManagedParameter]:
        """All parameters that can have a retained gradient."""
        return self._places

    def note(self, parameters: Iterable[ManagedParameter]) -> None:
        """Record gradients that are in their blocks, or will be once the update worker has run."""
        self._parameters.update(parameters)

    def release(self, parameters: Iterable[ManagedParameter]) -> None:
        """Drop these gradients: a submitted update uses them, or they are replaced."""
        self._parameters.difference_update(parameters)

    def add(self, parameter: ManagedParameter, flat: torch.Tensor) -> None:
        """Add a gradient to the retained one."""
        for chunk, segment in self._places[parameter]:
            part = flat[segment.start : segment.stop]
            with self._host_cache.writing(chunk.gradient) as memory:
                kept = part_of(memory, segment, flat.dtype)
                if parameter in self._parameters:
                    kept.add_(part)
                else:
                    kept.copy_(part)
        self._parameters.add(parameter)

    def take_into(self, parameter: ManagedParameter, flat: torch.Tensor) -> torch.Tensor:
        """Return the gradient plus the retained one, which is dropped."""
        if parameter in self._parameters:
            for chunk, segment in self._places[parameter]:
                with self._host_cache.reading(chunk.gradient) as memory:
                    flat[segment.start : segment.stop].add_(part_of(memory, segment, flat.dtype))
            self._parameters.discard(parameter)
        return flat

    def read(self, parameter: ManagedParameter, flat: torch.Tensor) -> None:
        """Copy the part of a retained gradient that this rank has."""
        for chunk, segment in self._places[parameter]:
            with self._host_cache.reading(chunk.gradient) as memory:
                flat[segment.start : segment.stop] = part_of(memory, segment, flat.dtype)

    def squares(self, parameters: Iterable[ManagedParameter]) -> Iterator[tuple[Segment, float]]:
        """Yield the sum of squares of each segment that this rank updates."""
        for parameter in parameters:
            record = self._records[parameter.unit]
            for chunk, segment in self._places[parameter]:
                if chunk in record.chunks:
                    with self._host_cache.reading(chunk.gradient) as memory:
                        part = part_of(memory, segment, record.dtype)
                        norm = torch.linalg.vector_norm(part, dtype=torch.float64)
                    yield segment, norm.square().item()

    def expire(self, units: Iterable[Unit]) -> None:
        """The contents of these units' gradient blocks are no longer needed."""
        for unit in units:
            for chunk in self._records[unit].gradient_chunks:
                self._host_cache.expire(chunk.gradient)

    def clear(self) -> None:
        """Drop all retained gradients."""
        self._parameters.clear()


def _places(records: Iterable[StateRecord]) -> dict[ManagedParameter, list[tuple[Chunk, Segment]]]:
    places: dict[ManagedParameter, list[tuple[Chunk, Segment]]] = {}
    for record in records:
        for parameter in record.state_names:
            places[parameter] = []  # stays empty if another rank has all of it
        for chunk in record.gradient_chunks:
            for segment in chunk.segments:
                places[segment.parameter].append((chunk, segment))
    return places
