"""How many bytes a unit takes on one rank: from numbers of elements and bytes per element to a `UnitSize`.

Pure arithmetic. The engine calls it with the dtypes of a real model, the planner with the numbers of a described one.
"""

from __future__ import annotations

from dataclasses import dataclass

from zero_infinity.policy.alignment import ALIGNMENT, GRAIN, round_up
from zero_infinity.policy.homes import Home


@dataclass(frozen=True, slots=True)
class ElementBytes:
    """Bytes per element of each kind of state."""

    parameter: int  # as stored
    record: int  # what the optimizer keeps: a master copy, if there is one, and its states
    gradient: int  # as the optimizer takes it


@dataclass(frozen=True, slots=True)
class UnitElements:
    """Elements of one unit, with padding."""

    stored: int  # of the parameters, on this rank
    trained: int  # on all ranks together
    updated: int  # on this rank


@dataclass(frozen=True, slots=True)
class UnitSize:
    """Bytes of one unit on this rank."""

    name: str
    parameters: int
    record: int
    gradients: int  # kept until the update
    arriving: int  # in memory before they are used or kept
    home: Home | None = None  # if it was decided earlier
    copied: int = 0  # the copy that modules compute with; 0 if they compute with the stored parameters
    num_wholes: int = 0  # parameters that are updated whole, each in a chunk of its own
    largest_whole: int = 0  # record and gradient of the largest of them

    def total(self, chunk_bytes: int) -> int:
        """All of it in blocks, each of whole pages."""
        num_chunks = -(-max(self.record, self.gradients) // chunk_bytes) + 2 * self.num_wholes
        return round_up(self.parameters) + self.record + self.gradients + 2 * ALIGNMENT * num_chunks


def stored_bytes(num_elements: int, element_bytes: int) -> int:
    """Size of the block that holds a unit's parameters. A rank that stores none of them has a block of one grain."""
    return max(GRAIN, num_elements) * element_bytes


def copy_bytes(num_elements: int, *, stored: int, computed: int, staged: bool) -> int:
    """Memory for the copy of a unit that modules compute with, `computed` bytes per element.

    `staged`: the unit is gathered as it is stored, `stored` bytes per element, and converted afterwards.
    """
    return round_up(num_elements * computed) + (round_up(num_elements * stored) if staged else 0)


def unit_size(
    name: str,
    elements: UnitElements,
    widths: ElementBytes,
    *,
    is_reduced: bool,
    whole_gradients: bool = False,
    copied: int = 0,
    home: Home | None = None,
) -> UnitSize:
    """The size of a unit on one rank.

    `is_reduced`: gradients are summed over ranks, and the sum needs memory beside the gradient that it is made of.
    `whole_gradients`: gradients of all trained elements are kept until the step, not only of those updated here.
    """
    whole, mine = elements.trained * widths.gradient, elements.updated * widths.gradient
    return UnitSize(
        name,
        parameters=round_up(stored_bytes(elements.stored, widths.parameter)),
        record=elements.updated * widths.record,
        gradients=whole if whole_gradients else mine,
        arriving=whole + mine if is_reduced else whole,
        home=home,
        copied=copied,
    )
