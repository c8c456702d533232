"""The state of units and parameters: what is in memory, who has changed it, what is pending. The only owner.

Everything else asks, and changes a state by the named transitions here, which check the state that they start from.

    unit:       PLANNED --store_in--> OFFLOADED <--reshard/unshard--> UNSHARDED
    pending:    NOTHING --submit_update--> UPDATE --end_step--> NOTHING
    parameter:  STORED <--edits_taken/edit--> EDITED
"""

from __future__ import annotations

import enum
import weakref

import torch

from zero_infinity.storage.block import Block


class Visibility(enum.Enum):
    """Where a unit's values are, as modules see it."""

    PLANNED = "planned"  # it has no block yet
    OFFLOADED = "offloaded"  # in its block, or in its tiles'; parameters point at NaN cells
    UNSHARDED = "unsharded"  # at least one parameter points at its values


class Pending(enum.Enum):
    """What has been begun and belongs to the coming `optimizer.step()`."""

    NOTHING = "nothing"
    UPDATE = "update"  # submitted while backward runs: reading the unit now would give the next step's value


class Origin(enum.Enum):
    """Who wrote a parameter's value last."""

    STORED = "stored"  # the engine
    EDITED = "edited"  # the user may have: a master copy has to take the change over


class UnitState:
    """The state of one unit."""

    __slots__ = ("_alive", "_block", "_flat", "_num_unsharded", "pending")

    def __init__(self) -> None:
        self.pending = Pending.NOTHING
        self._block: Block | None = None
        self._num_unsharded = 0  # parameters that are unsharded, each as often as it is
        self._flat: torch.Tensor | None = None  # the elements, while a parameter is unsharded
        self._alive: weakref.ref[torch.Tensor] | None = None  # the last such tensor, as long as anybody holds it

    @property
    def visibility(self) -> Visibility:
        if self._num_unsharded:
            return Visibility.UNSHARDED
        return Visibility.PLANNED if self._block is None else Visibility.OFFLOADED

    @property
    def block(self) -> Block | None:
        return self._block

    def store_in(self, block: Block) -> None:
        """The unit gets its block."""
        self._expect(self._block is None, "gets a second block")
        self._block = block

    # ------------------------------------------------------------------ what is in memory

    @property
    def flat(self) -> torch.Tensor | None:
        """The elements, while a parameter is unsharded."""
        return self._flat

    def unshard(self, flat: torch.Tensor) -> None:
        """One more parameter shows its values, which lie in `flat`."""
        self._expect(self._flat is None or self._flat is flat, "is unsharded in two places")
        self._flat = flat
        self._num_unsharded += 1

    def reshard(self) -> bool:
        """One parameter less shows its values; True if it was the last."""
        self._expect(self._num_unsharded > 0, "is resharded and was not unsharded")
        self._num_unsharded -= 1
        if self._num_unsharded:
            return False
        self._flat = None
        return True

    def acquired(self, flat: torch.Tensor) -> None:
        """These are its elements now; the next reader may have the same tensor while somebody holds it."""
        self._alive = weakref.ref(flat)

    @property
    def last_acquired(self) -> torch.Tensor | None:
        """The elements as they were last acquired, if somebody still holds them."""
        return self._alive() if self._alive is not None else None

    def forget_acquired(self) -> None:
        """What was acquired is not to be used again."""
        self._alive = None

    # ------------------------------------------------------------------ what is pending

    def submit_update(self) -> None:
        """An update is submitted before `step()`."""
        self._expect(self.pending is Pending.NOTHING, "is updated twice in one step")
        self.pending = Pending.UPDATE

    def end_step(self) -> None:
        """The step is over: its update belongs to the past."""
        self.pending = Pending.NOTHING

    def _expect(self, holds: bool, what: str) -> None:
        if not holds:
            raise RuntimeError(f"a unit that is {self.visibility.value} and has {self.pending.value} pending {what}")


class ParameterState:
    """The state of one parameter."""

    __slots__ = ("_num_unshards", "_seen_version", "num_changes", "origin")

    def __init__(self) -> None:
        self.origin = Origin.STORED
        self.num_changes = 0  # values that were replaced behind autograd's back: updates, and tensors put in its place
        self._num_unshards = 0
        self._seen_version = 0

    # ------------------------------------------------------------------ what is in memory

    @property
    def is_unsharded(self) -> bool:
        return self._num_unshards > 0

    def unshard(self) -> bool:
        """It shows its values once more; True if it did not before."""
        self._num_unshards += 1
        return self._num_unshards == 1

    def reshard(self) -> bool:
        """True if nobody needs to see its values any more."""
        if not self._num_unshards:
            raise RuntimeError("a parameter is resharded and was not unsharded")
        self._num_unshards -= 1
        return not self._num_unshards

    # ------------------------------------------------------------------ who has changed it

    @property
    def is_edited(self) -> bool:
        return self.origin is Origin.EDITED

    def seen(self, version: int) -> None:
        """What is stored is its value at this version."""
        self._seen_version = version

    def changed_since(self, version: int) -> bool:
        """True if the version differs from that of what is stored."""
        return version != self._seen_version

    def edit(self) -> None:
        """The user may have changed the value, now or later."""
        self.origin = Origin.EDITED

    def edits_taken(self) -> None:
        """What the user has changed is stored everywhere."""
        self.origin = Origin.STORED

    def replace(self) -> None:
        """Another value is in its place: what autograd saved before is out of date."""
        self.num_changes += 1
