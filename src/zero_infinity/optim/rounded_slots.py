"""One update of a segment of which something is kept in bfloat16: widened before the update, rounded after it.

The random numbers depend on the seed, on how many updates of the parameter were rounded before, on the parameter's
name, on what is rounded, and on the element's index in the parameter. That number is part of the parameter's state,
and so of state dicts and checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from zero_infinity.optim.state_records import Segment, StateRecord
from zero_infinity.optim.stochastic_rounding import NUM_ROUNDINGS, round_into, rounding_key
from zero_infinity.optim.update_rule import Scalars
from zero_infinity.params.unit import ManagedParameter

_VALUES = "values"


class RoundedSlots:
    """What an update works on: what is narrow is a copy in the dtype of the arithmetic."""

    def __init__(
        self, record: StateRecord, segment: Segment, values: torch.Tensor, slots: Mapping[str, torch.Tensor]
    ) -> None:
        self._record = record
        self._segment = segment
        wide = {name: record.wide_dtype(segment.parameter, name) for name in slots}
        self.values = values if values.dtype == record.dtype else values.to(record.dtype)
        self.slots = {name: slot if slot.dtype == wide[name] else slot.to(wide[name]) for name, slot in slots.items()}
        self._kept = {name: (slot, self.slots[name]) for name, slot in slots.items() if slot is not self.slots[name]}
        if self.values is not values:
            self._kept[_VALUES] = (values, self.values)

    def finish(self, names: tuple[str, ...], scalars: Scalars) -> tuple[tuple[str, ...], Scalars]:
        """Round what the update has changed; returns the names and scalars of the state with the new count."""
        record, parameter = self._record, self._segment.parameter
        number = num_roundings(record, parameter)
        of_user = parameter if parameter.whole is None else parameter.whole
        # An element has the same number in a tile as in the whole parameter.
        before = parameter.first_row * parameter.shape[1:].numel() if parameter.whole is not None else 0
        for name, (kept, wide) in self._kept.items():
            is_of_whole = parameter in record.wholes and name != _VALUES
            first = 0 if is_of_whole else before + self._segment.start
            round_into(kept, wide, rounding_key(record.rounding_seed, of_user.name, name, number), first)
        return counted(record, parameter, names, scalars)


def counted(
    record: StateRecord, parameter: ManagedParameter, names: tuple[str, ...], scalars: Scalars
) -> tuple[tuple[str, ...], Scalars]:
    """Return the names and scalars of a state after one more rounded update."""
    return (*names, NUM_ROUNDINGS), {**scalars, NUM_ROUNDINGS: num_roundings(record, parameter) + 1}


def num_roundings(record: StateRecord, parameter: ManagedParameter) -> int:
    """How many updates of the parameter were rounded."""
    return int(record.scalars.get(parameter, {}).get(NUM_ROUNDINGS, 0))
