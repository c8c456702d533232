"""Events of one step (reads, gradients, updates), which decide what the next step may update early.

A cycle lasts from one `optimizer.step()` to the next. An update may run during backward only if it is certain that the
old value is not read any more. The events of the last cycle say when that is likely; live handles say when it is
certain; an unexpected later read or gradient is an error, never a wrong number.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from zero_infinity.params.unit import ManagedParameter, Unit


@dataclass(slots=True)
class StepHistory:
    """The events between two steps."""

    num_backwards: int = 0  # not counting those under no_sync
    has_accumulated: bool = False  # there was one under no_sync
    events: int = 0
    # Number of gradients per parameter in the last counted backward, and the last event of each kind.
    firings: dict[ManagedParameter, int] = field(default_factory=dict)
    last_firing: dict[Unit, int] = field(default_factory=dict)
    last_read: dict[Unit, int] = field(default_factory=dict)
    read_order: dict[Unit, None] = field(default_factory=dict)  # by first read: the order of the next forward
    # Units whose update was submitted before step().
    updated: set[Unit] = field(default_factory=set)
    updated_parameters: set[ManagedParameter] = field(default_factory=set)
    deferred: set[Unit] = field(default_factory=set)  # not updated early because a handle was alive
    backward_complete: bool = True
    discarded: bool = False  # gradients were dropped

    def read(self, unit: Unit) -> None:
        self.events += 1
        self.last_read[unit] = self.events
        self.read_order.setdefault(unit)

    def fired(self, parameter: ManagedParameter, *, counts: bool) -> None:
        self.events += 1
        if counts:
            self.firings[parameter] = self.firings.get(parameter, 0) + 1
        self.last_firing[parameter.unit] = self.events

    def postpone(self, unit: Unit, parameters: Iterable[ManagedParameter]) -> None:
        """An update that was submitted was not made: it waits for `step()`."""
        self.updated.discard(unit)
        self.updated_parameters.difference_update(parameters)
        self.deferred.add(unit)

    def begin_backward(self, counts_as: int = 1) -> None:
        """Only the last backward of a cycle may update, so only its gradients are counted."""
        self.num_backwards += counts_as
        self.firings.clear()
        self.backward_complete = False

    def read_late(self, unit: Unit) -> bool:
        """True if the unit was read after its last gradient."""
        return self.last_read.get(unit, 0) > self.last_firing.get(unit, 0)

    def allows_early_update(self, unit: Unit, num_backwards: int) -> bool:
        """True if, judging by this cycle, the unit can be updated as soon as its gradients are complete."""
        if self.num_backwards != num_backwards or self.discarded or unit in self.deferred:
            return False
        return unit in self.last_firing and not self.read_late(unit)
