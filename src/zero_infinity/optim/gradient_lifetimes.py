"""How long gradients last: as in plain PyTorch until they are zeroed, not until a step has used them.

Where a loop zeroes gradients between steps (the first ones show it), `step()` may consume them and updates may run
during backward. The first step with gradients keeps them in their blocks, and so does each one that has added to older
gradients. If a gradient is needed after all that a step has consumed, that is an error, never a wrong number.
"""

from __future__ import annotations

from zero_infinity.errors import UsageError
from zero_infinity.params.unit import ManagedParameter

_USED_UP = (
    '\n  fix:   update="after_backward" in zi.Config keeps gradients until step(); code that looks at them in some '
    "steps only\n         needs it, code that does so in each step from the first one on does not"
)
# So often gradients may be thrown away before the first step: a loop may do that once, to warm up.
_WASTED = 3


class GradientLifetimes:
    """Which parameters have a gradient, as their user sees it."""

    def __init__(self) -> None:
        self.fresh: set[ManagedParameter] = set()  # of this cycle
        self.old: set[ManagedParameter] = set()  # of finished steps, and not zeroed since
        self.consumed: set[ManagedParameter] = set()  # old ones that are not kept
        self.zeros: set[ManagedParameter] = set()  # set to zero
        self._added_up = False  # a gradient of this cycle was added to an old one
        self._has_stepped = False
        self._is_read_after_step = False
        # Until the first step: how often gradients were dropped that nobody had looked at. None: that was told.
        self._num_wasted: int | None = 0
        self._is_looked_at = False

    def exists(self, parameter: ManagedParameter) -> bool:
        """True if `.grad` of the parameter is not None."""
        return parameter in self.fresh or parameter in self.old or parameter in self.zeros

    @property
    def keeps(self) -> bool:
        """True if the gradients of this step must be kept after it."""
        return self._added_up or not self._has_stepped or self._is_read_after_step

    @property
    def are_zeroed(self) -> bool:
        """True if the gradients of the last step were zeroed before those of this one came."""
        return self._has_stepped and not self._added_up

    # ------------------------------------------------------------------ events

    def came(self, parameter: ManagedParameter) -> None:
        """A gradient of the parameter has come, or was set by hand."""
        if parameter in self.consumed:
            raise UsageError(
                f"{parameter.name!r} got a gradient to be added to the last one, which step() has consumed: it was not "
                "zeroed, as those of the steps before\n"
                "  fix:   optimizer.zero_grad() between steps; or never, from the first step on: then gradients add up"
            )
        if self._num_wasted is not None and self._num_wasted >= _WASTED:
            self._num_wasted = None
            raise UsageError(
                f"{parameter.name!r} gets a gradient again, and no step() has used those that were zeroed before: the "
                "optimizer that zi.prepare returned is not the one that trains\n"
                "  fix:   call step() on the optimizer that zi.prepare has returned (this is said once)"
            )
        self._added_up = self._added_up or parameter in self.old
        self.fresh.add(parameter)
        self.zeros.discard(parameter)

    def read(self, parameter: ManagedParameter, *, is_updated: bool) -> None:
        """The user reads the gradient."""
        self._is_looked_at = True
        if parameter in self.consumed or is_updated:
            when = "by step()" if parameter in self.consumed else "during backward"
            self._is_read_after_step = self._is_read_after_step or parameter in self.consumed
            raise UsageError(f"the gradient of {parameter.name!r} was used {when} and is not kept" + _USED_UP)
        self._is_read_after_step = self._is_read_after_step or (parameter in self.old and parameter not in self.fresh)

    def changed(self, parameter: ManagedParameter) -> None:
        """The user has changed the gradient: it has values, whatever it was before."""
        self._is_looked_at = True
        if not self.exists(parameter) or parameter in self.zeros:
            self.zeros.discard(parameter)
            self.fresh.add(parameter)

    def zeroed(self, parameter: ManagedParameter, *, to_none: bool) -> None:
        """The gradient of the parameter is dropped."""
        self._note_waste(self.fresh == {parameter})
        if not to_none and self.exists(parameter):
            self.zeros.add(parameter)
        elif to_none:
            self.zeros.discard(parameter)
        for gradients in (self.fresh, self.old, self.consumed):
            gradients.discard(parameter)

    def all_zeroed(self, *, to_none: bool) -> None:
        """All gradients are dropped."""
        self._note_waste(bool(self.fresh))
        self.zeros = set() if to_none else self.fresh | self.old | self.zeros
        for gradients in (self.fresh, self.old, self.consumed):
            gradients.clear()

    def _note_waste(self, any_fresh: bool) -> None:
        if any_fresh and not self._is_looked_at and self._num_wasted is not None:
            self._num_wasted += 1

    def begin_step(self) -> None:
        """Raise if a gradient is to be used once more that was not kept."""
        self._num_wasted = None
        again = next(iter(self.consumed), None)
        if again is not None:
            raise UsageError(
                f"step() comes again without zero_grad(); the last one has consumed the gradient of {again.name!r}\n"
                "  fix:   optimizer.zero_grad() between steps"
            )

    def end_step(self) -> None:
        """All gradients were used, and kept if `keeps`."""
        is_kept = self.keeps
        self._has_stepped = self._has_stepped or bool(self.fresh)
        self.old |= self.fresh
        self.consumed = set() if is_kept else set(self.old)
        self.fresh = set()
        self._added_up = False
