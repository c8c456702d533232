"""Updates of units that live in device memory: by the user's optimizer, on the device, in `step()`.

They are launched like a step of plain PyTorch, for many parameters at once, on the stream of the thread that calls
`step()`. No thread waits, and nothing moves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from zero_infinity.disable_modes import ordinary_tensors
from zero_infinity.optim.chunk_update import advanced
from zero_infinity.optim.device_gradients import DeviceGradients
from zero_infinity.optim.state_records import MASTER, StateRecord
from zero_infinity.optim.update_rule import Hyperparameters, UpdateRule, hyperparameters_of, split_state
from zero_infinity.params.unit import ManagedParameter, Unit
from zero_infinity.params.unit_values import ValueSources
from zero_infinity.tiers.rounded_copies import take_edits

# The kernels of many parameters at once take temporary memory of a few times their size.
_MOST_TOGETHER = 64 << 20


@dataclass(slots=True)
class _Part:
    """The part of one parameter that this rank updates."""

    parameter: ManagedParameter
    record: StateRecord
    values: torch.Tensor  # master weights, if there are any
    stored: torch.Tensor
    slots: dict[str, torch.Tensor]
    gradient: torch.Tensor

    def state(self) -> dict[str, Any]:
        """Return the optimizer's state; empty before the first step."""
        names = self.record.started.get(self.parameter, ())
        values = {**self.slots, **self.record.scalars.get(self.parameter, {})}
        return {name: values[name] for name in names}

    def finish(self, state: dict[str, Any]) -> None:
        """Keep the new state."""
        tensors, scalars = split_state(state, self.values.shape)
        for name, tensor in tensors.items():
            if tensor.data_ptr() != self.slots[name].data_ptr():
                self.slots[name].copy_(tensor)
        if self.record.has_master:
            self.stored.copy_(self.values)
        self.record.started[self.parameter] = tuple(state)
        self.record.scalars[self.parameter] = scalars
        self.parameter.state.edits_taken()


class DeviceUpdates:
    """Runs the updates of one model's units that live on the device."""

    def __init__(self, optimizer: Optimizer, records: Mapping[Unit, StateRecord], sources: ValueSources) -> None:
        self._optimizer = optimizer
        self._rule = UpdateRule(optimizer)  # the worker has one of its own
        self._records = records
        self._sources = sources

    def run(self, gradients: DeviceGradients, factors: Iterable[torch.Tensor]) -> list[Unit]:
        """Update with all gradients, multiplied by `factors` first; returns the updated units."""
        units = gradients.units
        if not units:
            return []
        groups = [hyperparameters_of(group) for group in self._optimizer.param_groups]
        with torch.no_grad(), ordinary_tensors():
            parts: list[_Part] = []
            for unit in units:
                self._sources.of(unit).updated(unit)
                parts += self._parts(unit, gradients, groups)
            for part in parts:
                for factor in factors:
                    part.gradient.mul_(factor)
            for number, group in enumerate(groups):
                for batch in _batches([part for part in parts if part.parameter.group == number]):
                    states = self._rule.apply_together(
                        [(part.values, part.gradient, part.state()) for part in batch], group
                    )
                    for part, state in zip(batch, states, strict=True):
                        part.finish(state)
        return units

    def _parts(self, unit: Unit, gradients: DeviceGradients, groups: list[Hyperparameters]) -> Iterator[_Part]:
        record = self._records[unit]
        stored = whole_on_device(unit)
        here: set[ManagedParameter] = set()
        for chunk in record.chunks:
            memory = chunk.record.the_device_bytes() if chunk.record is not None else None
            for segment in chunk.segments:
                parameter, gradient = segment.parameter, gradients.part(segment)
                if gradient is None:
                    continue
                if not gradient.is_cpu:  # its memory belongs to a stream of backward, perhaps another one
                    gradient.record_stream(torch.accelerator.current_stream(gradient.device))
                here.add(parameter)
                first = parameter.offset + segment.start - unit.stored.start
                mine = stored[first : first + segment.stop - segment.start]
                slots = {
                    name: chunk.state(memory, name, segment)
                    for name in (*record.master, *record.state_names[parameter])
                    if memory is not None
                }
                values = slots.pop(MASTER, mine)
                if record.has_master and parameter.state.is_edited:
                    take_edits(values, mine)
                yield _Part(parameter, record, values, mine, slots, gradient.to(record.dtype))
        for parameter in gradients.parameters_of(unit):
            parameter.state.replace()
            if parameter not in here and parameter.group is not None:
                names, scalars = advanced(record, parameter, self._rule, groups[parameter.group])
                record.started[parameter], record.scalars[parameter] = names, scalars
                parameter.state.edits_taken()


def whole_on_device(unit: Unit) -> torch.Tensor:
    """Return the elements that this rank stores of a unit that lives on the device."""
    return unit.the_block().the_device_bytes()[: unit.stored_bytes].view(unit.dtype)


def _batches(parts: list[_Part]) -> Iterator[list[_Part]]:
    """Split them so that each batch has a limited size."""
    batch: list[_Part] = []
    num_bytes = 0
    for part in parts:
        if batch and num_bytes + part.values.nbytes > _MOST_TOGETHER:
            yield batch
            batch, num_bytes = [], 0
        batch.append(part)
        num_bytes += part.values.nbytes
    if batch:
        yield batch
