"""Reading units and keeping what the user changes in them: the one way by which code gets at a unit's values."""

from __future__ import annotations

import os
import weakref
from typing import Protocol

import torch

from zero_infinity._torch import is_func_tensor, local_tensor, storage_id, version_of
from zero_infinity.disable_modes import ordinary_tensors
from zero_infinity.errors import UsageError
from zero_infinity.params import offloaded_param
from zero_infinity.params.dtensor import is_distributed
from zero_infinity.params.unit import ManagedParameter, Unit
from zero_infinity.params.unit_values import ValueSources
from zero_infinity.tiers.compute_thread import ComputeThread

# Dead storages that may be remembered beyond as many as are alive.
_DEAD_STORAGES = 8


class AccessObserver(Protocol):
    """Who wants to know what is read and what the user changes."""

    def on_read(self, unit: Unit) -> None:
        """A unit's value is about to be read on the computing thread."""

    def on_edit(self, parameter: ManagedParameter, flat: torch.Tensor) -> None:
        """The user has changed the parameter in `flat`, its unit's elements. Called before that is stored."""


class StorageIndex:
    """In which unit's memory a tensor lies."""

    def __init__(self) -> None:
        # By address. Some have died: a finalizer would be one more place for an interrupt to strike.
        self._storages: dict[int, tuple[weakref.ref[torch.UntypedStorage], Unit]] = {}
        self._forget_dead_at = _DEAD_STORAGES

    def add(self, storage: torch.UntypedStorage, unit: Unit) -> None:
        if len(self._storages) >= self._forget_dead_at:
            self._storages = {a: known for a, known in self._storages.items() if known[0]() is not None}
            self._forget_dead_at = 2 * len(self._storages) + _DEAD_STORAGES
        self._storages[storage_id(storage)] = (weakref.ref(storage), unit)

    def unit_of(self, tensor: torch.Tensor) -> Unit | None:
        """The unit in whose memory `tensor` (of a DTensor: its local part) lies."""
        if is_distributed(tensor):
            tensor = local_tensor(tensor)
        if not self._storages or tensor.layout is not torch.strided or is_func_tensor(tensor):
            return None
        storage = tensor.untyped_storage()
        found = self._storages.get(storage_id(storage))
        # A dead storage's address is used again at once by another tensor.
        return found[1] if found is not None and found[0]() is storage else None


class UnitAccess:
    """Reads units of one model."""

    def __init__(
        self,
        compute_thread: ComputeThread,
        sources: ValueSources,
        storages: StorageIndex,
        observer: AccessObserver,
    ) -> None:
        self._compute_thread = compute_thread
        self._storages = storages
        self._observer = observer
        self._pid = os.getpid()
        self.sources = sources

    def check_process(self) -> None:
        """Raise in a forked child, before any lock is taken: a thread of the parent may have held it at the fork."""
        if os.getpid() != self._pid:
            raise UsageError(
                f"the model was prepared in process {self._pid} and cannot be used in its forked child {os.getpid()}, "
                "which has none of the engine's threads\n"
                "  fix:   use the model in the parent only, or prepare another one in a child started with 'spawn'"
            )

    def acquire(self, unit: Unit) -> torch.Tensor:
        """The unit's elements in memory; they stay there while the tensor or a view of it lives."""
        self.check_process()
        self._observer.on_read(unit)
        self._compute_thread.pass_by()
        source, flat = self.sources.of(unit), unit.state.last_acquired
        if flat is not None and source.current(unit):
            return flat
        # The user may be inside inference_mode, a FakeTensorMode or a torch.func transform; what we make is ordinary.
        with ordinary_tensors():
            flat = source.acquire(unit)
        unit.state.acquired(flat)
        self._storages.add(flat.untyped_storage(), unit)
        return flat

    def unit_of(self, tensor: torch.Tensor) -> Unit | None:
        """The unit in whose memory `tensor` lies."""
        return self._storages.unit_of(tensor)

    def may_change(self, parameter: ManagedParameter) -> None:
        """The user has a tensor through which the unsharded value may change, now or later, without a trace."""
        self.sources.of(parameter.unit).may_change(parameter.unit)
        parameter.state.edit()

    def keep_edits(self, parameter: ManagedParameter) -> None:
        """Store what the user may have changed in place, or put in its place (`p.data = t`)."""
        flat = parameter.unit.state.flat
        data = offloaded_param.data_of(parameter)
        if flat is None:
            return
        if storage_id(data.untyped_storage()) != storage_id(flat.untyped_storage()):
            parameter.of(flat).copy_(data)
            offloaded_param.point(parameter, parameter.of(flat))
            # What was saved for backward before may have been a view of the old tensor.
            parameter.state.replace()
        elif not parameter.state.changed_since(version_of(parameter.parameter)):
            return
        self.keep(parameter)

    def keep(self, parameter: ManagedParameter) -> None:
        """The unsharded value is newer than what is stored: store it."""
        flat = parameter.unit.state.flat
        if flat is not None:
            self.store(parameter, flat)
            parameter.state.seen(version_of(parameter.parameter))

    def store(self, parameter: ManagedParameter, flat: torch.Tensor) -> None:
        """Store a parameter that was changed in `flat`, its unit's elements."""
        # The master copy first: it takes all bits, what is stored may not.
        self._observer.on_edit(parameter, flat)
        self.sources.of(parameter.unit).keep(parameter, flat)
