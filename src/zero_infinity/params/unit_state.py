"""The only owner of unit and parameter state: what is unsharded, edited by the user, or has a pending update.

All other code queries the state and changes it by the named transitions here, which check the state they start from.
Whether a unit's bytes are in memory or newer than on NVMe is the state of its block (`storage/block.py`).

    unit:       PLANNED --store_in--> OFFLOADED <--reshard/unshard--> UNSHARDED    (OFFLOADED --move_to--> OFFLOADED)
    pending:    NOTHING --submit_update--> UPDATE --end_step/postpone_update--> NOTHING
    parameter:  STORED <--edits_taken/edit--> EDITED
"""

from __future__ import annotations

import enum
import weakref

import torch

from zero_infinity.storage.block import Block


class Visibility(enum.Enum):
    """Where a unit's values are, as seen by modules."""

    PLANNED = "planned"  # has no block yet
    OFFLOADED = "offloaded"  # in its block, or its tiles' blocks; parameters point at NaN cells
    UNSHARDED = "unsharded"  # at least one parameter points at its values


class Pending(enum.Enum):
    """Work in flight that belongs to the coming `optimizer.step()`."""

    NOTHING = "nothing"
    UPDATE = "update"  # submitted during backward: a read would return the next step's value


class Origin(enum.Enum):
    """Where a parameter's value was written last."""

    STORED = "stored"  # by the engine
    EDITED = "edited"  # possibly by the user: master weights must take the change


class UnitState:
    """The state of one unit."""

    __slots__ = ("_alive", "_block", "_flat", "_num_unsharded", "pending")

    def __init__(self) -> None:
        self.pending = Pending.NOTHING
        self._block: Block | None = None
        self._num_unsharded = 0  # unsharded parameters, each counted as often as it is unsharded
        self._flat: torch.Tensor | None = None  # the elements, while a parameter is unsharded
        self._alive: weakref.ref[torch.Tensor] | None = None  # the last such tensor, while it is referenced

    @property
    def visibility(self) -> Visibility:
        if self._num_unsharded:
            return Visibility.UNSHARDED
        return Visibility.PLANNED if self._block is None else Visibility.OFFLOADED

    @property
    def block(self) -> Block | None:
        return self._block

    def store_in(self, block: Block) -> None:
        """Set the unit's block."""
        self._expect(self._block is None, "gets a second block")
        self._block = block

    def move_to(self, block: Block) -> None:
        """The values are in another block from now on."""
        self._expect(self._block is not None and not self._num_unsharded, "moves")
        self._block = block
        self._alive = None

    # ------------------------------------------------------------------ what is in memory

    @property
    def flat(self) -> torch.Tensor | None:
        """The elements, while a parameter is unsharded."""
        return self._flat

    def unshard(self, flat: torch.Tensor) -> None:
        """One more parameter is unsharded; its values lie in `flat`."""
        self._expect(self._flat is None or self._flat is flat, "is unsharded in two places")
        self._flat = flat
        self._num_unsharded += 1

    def reshard(self) -> bool:
        """One parameter less is unsharded; True if it was the last."""
        self._expect(self._num_unsharded > 0, "is resharded and was not unsharded")
        self._num_unsharded -= 1
        if self._num_unsharded:
            return False
        self._flat = None
        return True

    def acquired(self, flat: torch.Tensor) -> None:
        """These are its elements now; the next reader may share the tensor while it is referenced."""
        self._alive = weakref.ref(flat)

    @property
    def last_acquired(self) -> torch.Tensor | None:
        """The elements as last acquired, if they are still referenced."""
        return self._alive() if self._alive is not None else None

    def forget_acquired(self) -> None:
        """The last acquired elements must not be used again."""
        self._alive = None

    # ------------------------------------------------------------------ what is pending

    def submit_update(self) -> None:
        """An update is submitted before `step()`."""
        self._expect(self.pending is Pending.NOTHING, "is updated twice in one step")
        self.pending = Pending.UPDATE

    def postpone_update(self) -> None:
        """The submitted update was not made: it waits for `step()`."""
        self._expect(self.pending is Pending.UPDATE, "has its update postponed, and none was submitted")
        self.pending = Pending.NOTHING

    def end_step(self) -> None:
        """The step is over: its update is no longer pending."""
        self.pending = Pending.NOTHING

    def _expect(self, holds: bool, what: str) -> None:
        if not holds:
            raise RuntimeError(f"a unit that is {self.visibility.value} and has {self.pending.value} pending {what}")


class ParameterState:
    """The state of one parameter."""

    __slots__ = ("_num_unshards", "_seen_version", "num_changes", "origin")

    def __init__(self) -> None:
        self.origin = Origin.STORED
        self.num_changes = 0  # values replaced without autograd's knowledge: by updates or by assignment
        self._num_unshards = 0
        self._seen_version = 0

    # ------------------------------------------------------------------ what is in memory

    @property
    def is_unsharded(self) -> bool:
        return self._num_unshards > 0

    def unshard(self) -> bool:
        """Unshard it once more; True if it was offloaded."""
        self._num_unshards += 1
        return self._num_unshards == 1

    def reshard(self) -> bool:
        """Undo one `unshard`; True if it was the last."""
        if not self._num_unshards:
            raise RuntimeError("a parameter is resharded and was not unsharded")
        self._num_unshards -= 1
        return not self._num_unshards

    # ------------------------------------------------------------------ edits

    @property
    def is_edited(self) -> bool:
        return self.origin is Origin.EDITED

    def seen(self, version: int) -> None:
        """The stored value is the one at this version."""
        self._seen_version = version

    def changed_since(self, version: int) -> bool:
        """True if the version differs from the stored value's."""
        return version != self._seen_version

    def edit(self) -> None:
        """The user may have changed the value, or may do so later."""
        self.origin = Origin.EDITED

    def edits_taken(self) -> None:
        """All user edits are stored."""
        self.origin = Origin.STORED

    def replace(self) -> None:
        """The value was replaced: tensors that autograd saved before are stale."""
        self.num_changes += 1
