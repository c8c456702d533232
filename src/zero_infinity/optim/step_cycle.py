"""The cycle of a step: what may be updated during backward, and whether a step is torn.

A cycle lasts from one `optimizer.step()` to the next. Its events are a `StepHistory`; those of the last cycle decide
which units may be updated as soon as their gradients are complete. A step is *torn* if some of its updates have run and
the others cannot: then only a checkpoint gives values that belong together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch.optim import Optimizer

from zero_infinity.errors import DivergenceError, TornStepError, UsageError
from zero_infinity.optim.step_history import StepHistory
from zero_infinity.optim.update_rule import hyperparameters_of
from zero_infinity.params.unit import ManagedParameter, Unit
from zero_infinity.params.unit_state import Pending

_TORN = (
    '\n  fix:   reload a checkpoint or rebuild the model; update="after_backward" in zi.Config runs every '
    "update in step()"
)


class StepCycle:
    """The current cycle, and what the last one says about it."""

    def __init__(self, optimizer: Optimizer, num_backwards: int, *, early: bool) -> None:
        """`num_backwards`: for each step. `early`: updates may run during backward, where that is safe."""
        self._optimizer = optimizer
        self._num_backwards = num_backwards
        self._early = early
        self.last = StepHistory()
        self.now = StepHistory()
        self._early_units: frozenset[Unit] = frozenset()
        self.same_order = False  # True if the next cycle is expected to repeat the last one
        self._synchronised = True  # False inside `accumulating`
        self.is_in_pieces = False  # several runs of autograd are one backward
        self._has_begun = False  # that backward
        self._counts_as = 1
        self._changes_order = False
        self._graph_task = -1
        self._settings_then: list[str] | None = None  # of the optimizer, at the first early update of this cycle
        self._torn: str | None = None
        self._was_short = True  # the last step came before all of its backwards; the first one may not

    @property
    def has_updated(self) -> bool:
        """True if an update of this cycle was submitted before `step()`."""
        return bool(self.now.updated)

    @property
    def is_early(self) -> bool:
        """True if updates may run before `step()`, where that is safe."""
        return self._early

    @property
    def is_torn(self) -> bool:
        return self._torn is not None

    # ------------------------------------------------------------------ events

    def read(self, unit: Unit) -> None:
        """The compute thread reads a unit's values."""
        if unit.state.pending is Pending.UPDATE:
            raise TornStepError(
                f"{unit.name!r} is read after it was updated and before optimizer.step(): the values would be the next "
                "step's" + _TORN
            )
        self.now.read(unit)

    def fired(self, parameter: ManagedParameter) -> None:
        """Autograd has computed a gradient of the parameter."""
        if parameter in self.now.updated_parameters:
            self._tear(f"{parameter.name!r} got another gradient after its update was submitted")
        self.now.fired(parameter, counts=self._synchronised)

    def enter_backward(self, graph_task: int) -> bool:
        """A gradient has come from this run of autograd; True if it is the first of that run."""
        if graph_task == self._graph_task:
            return False
        self._graph_task = graph_task
        if not self._synchronised:
            self.now.has_accumulated = True
        elif not self._has_begun:
            if self.now.updated and not self.now.backward_complete:
                self._tear("the last backward did not finish, but some of its updates had run")
            self.now.begin_backward(self._counts_as)
            self._has_begun = self.is_in_pieces
        return True

    def end_backward(self) -> None:
        if not self.is_in_pieces:
            self.now.backward_complete = True

    @contextmanager
    def in_pieces(self, num_micro_batches: int) -> Iterator[None]:
        """All runs of autograd inside are one backward, besides those that only accumulate.

        It counts as that of one micro-batch, or of all, if the settings say how many backwards a step has.
        """
        self.is_in_pieces = True
        self._counts_as = num_micro_batches if self._num_backwards > 1 else 1
        try:
            yield
        finally:
            self.is_in_pieces = self._has_begun = False
            self._counts_as = 1

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Backward passes inside this context only accumulate gradients."""
        before = self._synchronised
        self._synchronised = False
        try:
            yield
        finally:
            self._synchronised = before

    # ------------------------------------------------------------------ updates during backward

    def may_update_early(self, unit: Unit) -> bool:
        """True if the unit may be updated in this backward, once its gradients are complete."""
        return (
            unit in self._early_units
            and unit.state.pending is Pending.NOTHING
            and self._synchronised
            and self.now.num_backwards == self._num_backwards
        )

    def has_fired(self, unit: Unit) -> bool:
        """True if each of its parameters has had as many gradients as in the last backward, and one at least.

        The last backward may have left out a parameter that this one uses, after another one of the same unit.
        """
        trained = [p for p in unit.parameters if p.parameter.requires_grad]
        return all(self.now.firings.get(p, 0) >= max(1, self.last.firings.get(p, 0)) for p in trained)

    def updated(self, unit: Unit, parameters: Iterable[ManagedParameter]) -> None:
        """An update is submitted before `step()`."""
        self._settings_then = self._settings_then or self._settings()
        unit.state.submit_update()
        self.now.updated.add(unit)
        self.now.updated_parameters.update(parameters)

    def gradients_are_used(self) -> None:
        """The user reads or changes gradients between backward and step: from now on all updates wait for `step()`."""
        self._early, self._early_units = False, frozenset()

    def change_order(self) -> None:
        """The next cycle will not repeat this one."""
        self._changes_order = True

    def deferred(self, unit: Unit) -> None:
        """A unit could not be updated early, because its old value is still referred to."""
        self.now.deferred.add(unit)

    def postponed(self, unit: Unit, parameters: Iterable[ManagedParameter]) -> None:
        """An update that was submitted before `step()` was not made: its gradients wait for `step()`."""
        unit.state.postpone_update()
        self.now.postpone(unit, parameters)

    def allows_early_update(self, unit: Unit) -> bool:
        """True if, as this cycle went until now, the unit could be updated before `step()`."""
        return self.now.allows_early_update(unit, self._num_backwards)

    def discarded(self, *, any_fresh: bool) -> None:
        """Gradients are dropped, of this cycle if `any_fresh`."""
        if self.now.updated:
            self._tear("zero_grad() was called after some updates of this backward had run and before step()")
        self.now.discarded = self.now.discarded or any_fresh

    # ------------------------------------------------------------------ the step

    def check(self) -> None:
        """Raise if a step is torn."""
        if self._torn is not None:
            raise TornStepError(self._torn + _TORN)

    def check_may_step(self) -> None:
        """Raise if the updates that are left would not belong to those of this cycle's backward."""
        self.check()
        if self._is_short and self._was_short:
            raise UsageError(
                f"step() comes after {self.now.num_backwards} of {self._num_backwards} backward passes "
                f"(gradient_accumulation_steps={self._num_backwards})\n"
                f"  fix:   step() and zero_grad() after {self._num_backwards} of them; or leave "
                "gradient_accumulation_steps out of zi.Config, which plain loops do not need"
            )
        if self.now.updated and not self.now.backward_complete:
            self._tear("backward did not finish, but some of its updates had run")
        if self.now.updated and self._settings_then != self._settings():
            self._tear("the optimizer's settings (lr, ...) were changed after some updates of this backward had run")

    @property
    def _is_short(self) -> bool:
        return 0 < self.now.num_backwards < self._num_backwards and not self.now.has_accumulated

    @contextmanager
    def torn_unless_finished(self, reason: str) -> Iterator[None]:
        """Mark the step as torn, with this reason, unless the context ends without an error."""
        before, self._torn = self._torn, reason
        yield
        self._torn = before

    def end(self, units: Iterable[Unit], *, may_consume: bool) -> None:
        """Begin the next cycle; `units` are all that are trained. `may_consume`: gradients are zeroed between steps."""
        # Two consecutive cycles must allow it: the second cycle of a loop may differ from its first.
        early = frozenset(
            unit
            for unit in units
            if self._early
            and may_consume
            and self.now.allows_early_update(unit, self._num_backwards)
            and self.last.allows_early_update(unit, self._num_backwards)
        )
        self._was_short = self._is_short
        self.same_order = early == self._early_units and not self._changes_order
        self._changes_order = False
        self._early_units = early
        self.last, self.now = self.now, self._next_history()
        self._settings_then = None

    def restart(self) -> None:
        """Forget the history of steps, including a torn one."""
        self.last, self.now = StepHistory(), self._next_history()
        self._early_units, self._settings_then = frozenset(), None
        self._torn = None

    def _next_history(self) -> StepHistory:
        for unit in self.now.updated:
            unit.state.end_step()
        return StepHistory()

    def _settings(self) -> list[str]:
        """Return the current settings of the parameter groups, for comparison."""
        return [repr(hyperparameters_of(group)) for group in self._optimizer.param_groups]

    def _tear(self, reason: str) -> None:
        self._torn = reason
        raise TornStepError(reason + _TORN)


def check_same_backwards(num_backwards: list[int]) -> None:
    """Raise if ranks had different numbers of backward passes; `num_backwards` is by rank."""
    for rank, number in enumerate(num_backwards):
        if number != num_backwards[0]:
            raise DivergenceError(
                f"ranks diverged: {number} backward passes before optimizer.step() on rank {rank}, {num_backwards[0]} "
                "on rank 0\n  fix:   every rank must run the same number of backward passes"
            )
