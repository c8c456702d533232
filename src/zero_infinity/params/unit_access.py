"""Reads units and stores user edits: the only path to a unit's values."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable
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

# Dead storages to remember in addition to as many as are alive.
_DEAD_STORAGES = 8


class AccessObserver(Protocol):
    """Is told about reads and user edits."""

    def before_reads(self, unit: Unit) -> None:
        """The unit is about to be read beside others, which will be in memory then."""

    def on_read(self, unit: Unit) -> None:
        """The compute thread is about to read a unit's values."""

    def on_edit(self, parameter: ManagedParameter, flat: torch.Tensor) -> None:
        """The user has changed the parameter in `flat`, its unit's elements. Called before that is stored."""


class StorageIndex:
    """Maps a tensor to the unit in whose memory it lies."""

    def __init__(self) -> None:
        # By address; includes dead ones. No finalizers: an interrupt could strike inside one.
        self._storages: dict[int, tuple[weakref.ref[torch.UntypedStorage], Unit]] = {}
        self._forget_dead_at = _DEAD_STORAGES

    def add(self, storage: torch.UntypedStorage, unit: Unit) -> None:
        if len(self._storages) >= self._forget_dead_at:
            self._storages = {a: known for a, known in self._storages.items() if known[0]() is not None}
            self._forget_dead_at = 2 * len(self._storages) + _DEAD_STORAGES
        self._storages[storage_id(storage)] = (weakref.ref(storage), unit)

    def unit_of(self, tensor: torch.Tensor) -> Unit | None:
        """Return the unit in whose memory `tensor` (for a DTensor: its local part) lies."""
        if is_distributed(tensor):
            tensor = local_tensor(tensor)
        if not self._storages or tensor.layout is not torch.strided or is_func_tensor(tensor):
            return None
        storage = tensor.untyped_storage()
        found = self._storages.get(storage_id(storage))
        # The address of a dead storage is soon reused by another tensor.
        return found[1] if found is not None and found[0]() is storage else None


class UnitAccess:
    """Reads the units of one model."""

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

    def expect(self, units: Iterable[Unit]) -> None:
        """These units are about to be acquired together: an update that waits for that would not fit beside them."""
        self.check_process()
        for unit in units:
            self._observer.before_reads(unit)

    def acquire(self, unit: Unit) -> torch.Tensor:
        """Return the unit's elements in memory; they stay while the tensor or a view of it is alive."""
        self.check_process()
        self._observer.on_read(unit)
        self._compute_thread.pass_by()
        source, flat = self.sources.of(unit), unit.state.last_acquired
        if flat is not None and source.current(unit):
            return flat
        # The user may be inside inference_mode, a FakeTensorMode or a torch.func transform; our tensors must be
        # ordinary.
        with ordinary_tensors():
            flat = source.acquire(unit)
        unit.state.acquired(flat)
        self._storages.add(flat.untyped_storage(), unit)
        return flat

    def unit_of(self, tensor: torch.Tensor) -> Unit | None:
        """Return the unit in whose memory `tensor` lies."""
        return self._storages.unit_of(tensor)

    def may_change(self, parameter: ManagedParameter) -> None:
        """The user has a tensor through which the unsharded value may change undetected, now or later."""
        self.sources.of(parameter.unit).may_change(parameter.unit)
        parameter.state.edit()

    def keep_edits(self, parameter: ManagedParameter) -> None:
        """Store what the user may have changed in place or replaced (`p.data = t`)."""
        flat = parameter.unit.state.flat
        data = offloaded_param.data_of(parameter)
        if flat is None:
            return
        if storage_id(data.untyped_storage()) != storage_id(flat.untyped_storage()):
            parameter.of(flat).copy_(data)
            offloaded_param.point(parameter, parameter.of(flat))
            # Tensors saved for backward before this may be views of the old tensor.
            parameter.state.replace()
        elif not parameter.state.changed_since(version_of(parameter.parameter)):
            return
        self.keep(parameter)

    def keep(self, parameter: ManagedParameter) -> None:
        """The unsharded value is newer than the stored one: store it."""
        flat = parameter.unit.state.flat
        if flat is not None:
            self.store(parameter, flat)
            parameter.state.seen(version_of(parameter.parameter))

    def store(self, parameter: ManagedParameter, flat: torch.Tensor) -> None:
        """Store a parameter that was changed in `flat`, its unit's elements."""
        # The master weights first: they take all bits, the stored value may not.
        self._observer.on_edit(parameter, flat)
        self.sources.of(parameter.unit).keep(parameter, flat)
