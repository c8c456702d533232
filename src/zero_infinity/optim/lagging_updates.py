"""Updates that `step()` has decided and that run when their unit is used next: layer by layer, in the next forward.

Clipping needs the norm of all gradients, so no update can run before backward has ended. Run all at once in `step()`
they would keep the drive busy while nothing computes, and would read every parameter that the next forward reads again.
So an update lags: it is submitted right before the first use of its unit, whatever that is. The policy has fetched its
blocks ahead of that, because they are part of the order of accesses. Settings (lr, ...) are those of its own step.

Who reads a value acquires its unit, and that runs the unit's update first; so does a gradient that comes for it. Who
reads or writes records calls `submit_all` first. A unit that nobody uses keeps its gradients and its update.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zero_infinity.interrupts import held
from zero_infinity.optim.chunk_update import UnitUpdate, WholeGradients
from zero_infinity.optim.step_cycle import StepCycle
from zero_infinity.optim.update_submission import UpdateSubmission
from zero_infinity.params.unit import ManagedParameter, Unit
from zero_infinity.params.unit_values import ValueSources


class LaggingUpdates:
    """The updates of one model that have been decided and not submitted; at most one for each unit."""

    def __init__(self, submission: UpdateSubmission, sources: ValueSources, cycle: StepCycle, *, may_lag: bool) -> None:
        """`may_lag`: False on several ranks, which may not all use a unit again, and have to submit in one order."""
        self._submission = submission
        self._sources = sources
        self._cycle = cycle
        self._may_lag = may_lag
        self._updates: dict[Unit, UnitUpdate] = {}
        self._has_lagged = False  # an update of the last cycle has

    def update(
        self,
        unit: Unit,
        retained: Sequence[ManagedParameter],
        factors: tuple[torch.Tensor, ...],
        *,
        keeps_gradients: bool,
    ) -> None:
        """Update a unit with its retained gradients, now or before its next use."""
        update = self._submission.decide(
            unit, WholeGradients({}), retained, retained, factors, _nothing, keeps_gradients=keeps_gradients
        )
        # Where updates run in backward, the few that are left for `step()` would only change the order of forward.
        lags = self._may_lag and not keeps_gradients and not self._cycle.is_early
        # A tile is read through its whole, and beside that there may be no room for its update.
        lags = lags and all(parameter.whole is None for parameter in unit.parameters)
        if lags and self._sources.of(unit).may_lag(unit):
            self._updates[unit] = update
        else:
            self._submission.submit(update)

    def before_use(self, unit: Unit) -> None:
        """The unit's value, record or gradient blocks are about to be used."""
        if unit in self._updates:
            with (
                held(),
                self._cycle.torn_unless_finished(f"{unit.name!r} was not updated after step(), others were"),
            ):
                self._submission.submit(self._updates.pop(unit))

    def submit_all(self) -> None:
        """Submit what is left, in the order in which it was decided."""
        for unit in list(self._updates):
            self.before_use(unit)

    def drop(self) -> None:
        """All values and states will be replaced: nothing is left to update."""
        self._updates.clear()

    def end_cycle(self) -> bool:
        """End a step; False if the next cycle has another order, because updates begin or cease to lag."""
        had_lagged, self._has_lagged = self._has_lagged, bool(self._updates)
        return had_lagged == self._has_lagged


def _nothing() -> None:
    return None
