"""Unshards parameters for exactly as long as they are needed.

A parameter is unsharded if it points at its values and offloaded if it points at a NaN cell. Only one thread at a time
may swap parameters: a kernel on another thread holds the tensor object, not its memory. Values come from
`params/unit_values.py`; shards of other ranks are all-gathered in `tiers/copier.py`.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from zero_infinity._torch import no_torch_function, version_of
from zero_infinity.comm.channel import Channel
from zero_infinity.disable_modes import ordinary_tensors
from zero_infinity.errors import UsageError
from zero_infinity.interrupts import held, through
from zero_infinity.params import offloaded_param
from zero_infinity.params.dtensor import local_of
from zero_infinity.params.parameter_store import ParameterStore
from zero_infinity.params.saved_tensors import SavedTensorHooks
from zero_infinity.params.shared_edits import sharing_edits
from zero_infinity.params.unit import ManagedParameter
from zero_infinity.params.unit_access import UnitAccess


class ParameterOwner(Protocol):
    """The owner of the parameters: a model that is being built, or one that trains."""

    @property
    def parameter_store(self) -> ParameterStore: ...

    def on_copy(self, original: ManagedParameter, copy: nn.Parameter) -> None:
        """A deep copy of a parameter was made."""

    def showing_gradients(self, parameters: Sequence[ManagedParameter]) -> AbstractContextManager[None]:
        """Inside, retained gradients are in `.grad` of the unsharded parameters; changes are kept."""

    @property
    def edit_channel(self) -> Channel | None:
        """The compute thread's channel to ranks that share edits of gathered values."""


class Unsharder:
    """Unshards and reshards the parameters of one model."""

    def __init__(self, owner: ParameterOwner, access: UnitAccess, hooks: SavedTensorHooks) -> None:
        self.owner = owner
        self.access = access
        self.hooks = hooks
        self._state_dicts = owner.parameter_store.state_dicts
        self._num_unsharded = 0
        self._thread = 0

    def unshard(self, parameters: Sequence[ManagedParameter], *, watched: bool = False) -> None:
        """Unshard these parameters: all of them, or none (on an error or interrupt).

        `watched`: for code that may change them undetected.
        """
        thread = threading.get_ident()
        if self._num_unsharded and self._thread != thread:
            raise UsageError(
                f"parameter {parameters[0].name!r} is used by a second thread while another one is inside the model\n"
                "  fix:   run one forward or backward at a time per prepared model"
            )
        self._thread = thread
        self.access.expect(dict.fromkeys(parameter.unit for parameter in parameters))
        for done, parameter in enumerate(parameters):
            try:
                self._unshard_one(parameter, watched=watched)
            except BaseException:
                self.reshard(parameters[:done])
                raise

    def reshard(self, parameters: Sequence[ManagedParameter]) -> None:
        """Reshard them and store user changes."""
        for parameter in reversed(parameters):
            self._num_unsharded -= 1
            if parameter.state.reshard():
                with ordinary_tensors():
                    self.access.keep_edits(parameter)
                    offloaded_param.reshard(parameter)
            if parameter.unit.state.reshard():
                self.access.sources.of(parameter.unit).unpin(parameter.unit)

    @contextmanager
    def unsharded(self, parameters: Sequence[ManagedParameter]) -> Iterator[None]:
        """These parameters are unsharded inside this context."""
        with held():
            self.unshard(parameters)
            try:
                with through():
                    yield
            finally:
                self.reshard(parameters)

    @contextmanager
    def gathered(self, parameters: Sequence[ManagedParameter], modifier_rank: int | None) -> Iterator[None]:
        """Inside, these parameters are unsharded and show retained gradients; changes are kept."""
        with self.unsharded(parameters), self.owner.showing_gradients(parameters):
            try:
                with sharing_edits(self.owner.edit_channel, parameters, modifier_rank):
                    yield
            finally:
                for managed in parameters:
                    # Changes through .data or numpy cannot be detected: assume that there were some.
                    self.access.keep(managed)

    def go_on_here(self) -> None:
        """This thread goes on where another one has stopped."""
        self._thread = threading.get_ident()

    # ------------------------------------------------------------------ called by `__torch_function__`

    def call_unsharded(
        self, parameters: Sequence[ManagedParameter], func: Callable[..., Any], call: Callable[[], Any]
    ) -> Any:
        """Call one torch function with these parameters unsharded."""
        with held():
            self.unshard(parameters)
            pushed = self.hooks.push()
            try:
                with through():
                    result = call()
                if self._state_dicts.is_open and func is torch.Tensor.detach:
                    return result.clone()
                self._expect_changes(parameters, result)
                return result
            finally:
                if pushed:
                    self.hooks.pop()
                self.reshard(parameters)

    def copied(self, original: ManagedParameter, copy: nn.Parameter) -> None:
        """A deep copy of `original` was made."""
        self.owner.on_copy(original, copy)

    def read(self, parameter: ManagedParameter) -> torch.Tensor:
        """Return its values in memory, which stay while the tensor or a view of it is alive."""
        return parameter.of(self._flat_of(parameter))

    def changed(self, parameter: ManagedParameter) -> None:
        """The values that `read` has returned, and that are still alive, were changed."""
        with held():
            self.access.store(parameter, self._flat_of(parameter))

    @property
    def makes_state_dict(self) -> bool:
        """True while a state_dict is made, whose tensors are copies."""
        return self._state_dicts.is_open

    def may_change(self, parameter: ManagedParameter) -> None:
        """The user has a tensor through which the unsharded value may change undetected, now or later."""
        self.access.may_change(parameter)

    def _expect_changes(self, parameters: Sequence[ManagedParameter], result: Any) -> None:
        """Expect undetected writes through a view of a parameter that is returned (`p.data`, `p.detach()`, `p[0]`).

        The view keeps the unit in memory, so the written values are found there later.
        """
        for tensor in result if isinstance(result, list | tuple) else (result,):
            if not isinstance(tensor, torch.Tensor) or isinstance(tensor, nn.Parameter):
                continue
            unit = self.access.unit_of(tensor)
            for parameter in parameters:
                if parameter.unit is unit:
                    self.may_change(parameter)

    # ------------------------------------------------------------------ inside

    def _flat_of(self, parameter: ManagedParameter) -> torch.Tensor:
        """Return its unit's elements in memory: the same memory as long as something refers to it."""
        flat = parameter.unit.state.flat
        if flat is None:
            with held():
                flat = self.access.acquire(parameter.unit)
        return flat

    def _unshard_one(self, parameter: ManagedParameter, *, watched: bool) -> None:
        unit = parameter.unit
        put_there = self._put_there(parameter) if not parameter.state.is_unsharded else None
        flat = unit.state.flat
        if flat is None:
            flat = self.access.acquire(unit)
            self.access.sources.of(unit).pin(unit)
        unit.state.unshard(flat)
        self._num_unsharded += 1
        if parameter.state.unshard():
            with ordinary_tensors():
                offloaded_param.show(parameter, parameter.of(flat), watched=watched)
                parameter.state.seen(version_of(parameter.parameter))
                if put_there is not None:
                    offloaded_param.show(parameter, put_there, watched=watched)
                    self.access.keep_edits(parameter)

    def _put_there(self, parameter: ManagedParameter) -> torch.Tensor | None:
        """Return data that the user has put on the offloaded parameter with `set_`, which cannot be overridden."""
        cell = parameter.cell
        if cell.device.type == "cpu" and cell.is_floating_point() and not math.isnan(cell.item()):
            raise UsageError(
                f"parameter {parameter.name!r} was written to while it was offloaded, bypassing the safety net\n"
                "  fix:   edit parameters inside zi.gathered([...])"
            )
        with no_torch_function():
            if local_of(parameter.parameter).data_ptr() == cell.data_ptr():
                return None
            offloaded_param.check_same_kind(parameter, parameter.parameter)
            return offloaded_param.data_of(parameter)


def unsharder_of(managed: ManagedParameter) -> Unsharder:
    """Return the unsharder of a parameter."""
    access = offloaded_param.access_of(managed)
    if not isinstance(access, Unsharder):
        raise TypeError(f"parameter {managed.name!r} is unsharded by {type(access).__name__}")
    return access


def store_of(managed: ManagedParameter) -> ParameterStore:
    """Return the store of a parameter."""
    return unsharder_of(managed).owner.parameter_store
