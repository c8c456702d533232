"""How the simulator cuts a unit's optimizer record and gradient into chunks: as the engine does. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from zero_infinity.planner.unit_states import UnitStates
from zero_infinity.policy.chunk_size import chunk_elements


@dataclass(frozen=True, slots=True)
class ChunkSize:
    """Elements and bytes of one chunk on a rank."""

    num_elements: int
    record_bytes: int  # 0: the optimizer has no states, or another rank has them
    gradient_bytes: int
    is_updated: bool = True  # False: another rank updates these elements; this one keeps their gradients


@dataclass(frozen=True, slots=True)
class ChunkBlocks:
    """A chunk of a unit's optimizer record and gradient in a simulation: the keys of its two blocks."""

    record: int | None  # None without states, or if another rank has them
    gradient: int
    size: ChunkSize


def chunk_sizes(states: UnitStates, chunk_bytes: int, *, num_others: int = 0) -> Iterator[ChunkSize]:
    """The chunks of a unit: slices, then whole parameters, then those that `num_others` ranks update."""
    if states.is_frozen:
        return
    widths = states.widths
    most = chunk_elements(chunk_bytes, widths)
    for elements in _slices(states.trained, most):
        yield ChunkSize(elements, elements * widths.record, elements * widths.gradient)
    for whole in states.wholes:
        yield ChunkSize(whole.num_elements, whole.record, whole.num_elements * widths.gradient)
    for elements in _slices(num_others * states.trained, most):
        yield ChunkSize(elements, 0, elements * widths.gradient, is_updated=False)


def _slices(num_elements: int, most: int) -> Iterator[int]:
    for start in range(0, num_elements, most):
        yield min(most, num_elements - start)
