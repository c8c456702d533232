"""Shows parameters their bytes for as long as they are needed, and no longer.

Two rules carry the correctness. *Memory is handed on only when the storage over it has died*: `buffers` sees to it.
*A parameter is offloaded only when nothing saved it unpacked*: autograd saves a leaf as the Parameter object itself, so
resharding it would turn a saved value into NaN. Therefore, wherever a parameter is unsharded, saved-tensor hooks are on
top that replace a tensor over a unit's storage by a handle (unit, size, stride, offset), fetched again at unpack; every
other tensor goes to the hooks that were on top before (`torch.utils.checkpoint`'s, the user's `save_on_cpu`).

Parameters are swapped by one thread at a time: a kernel running elsewhere holds the tensor, not its memory.
"""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from zero_infinity._torch import (
    dtensor_around,
    is_func_tensor,
    local_tensor,
    negated_view,
    no_torch_function,
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
    saved_tensor_hooks_allowed,
    spec_of,
    storage_id,
    top_saved_tensor_hooks,
    version_of,
)
from zero_infinity.errors import UsageError
from zero_infinity.interrupts import held, through
from zero_infinity.params import offloaded_param
from zero_infinity.params.disable_modes import ordinary_tensors
from zero_infinity.params.dtensor import is_distributed, local_of
from zero_infinity.params.unit import ManagedParameter, Unit

# Dead storages that may be remembered beyond as many as are alive.
_DEAD_STORAGES = 8


class SavedHandle:
    """A saved tensor that lies in a unit: what is needed to find it again."""

    __slots__ = ("__weakref__", "kind", "offset", "parameter", "size", "spec", "stride", "version")

    def __init__(
        self,
        parameter: ManagedParameter,
        size: torch.Size,
        stride: tuple[int, ...],
        offset: int,
        kind: tuple[torch.dtype, bool, bool] | None = None,
        spec: Any = None,
    ) -> None:
        self.parameter = parameter
        self.size = size
        self.stride = stride
        self.offset = offset
        self.kind = kind  # of a view that is not simply a part: its dtype, whether it is conjugated, and negated
        self.spec = spec  # of the DTensor around it, if there was one
        self.version = parameter.version
        parameter.unit.saved(self)

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """The saved tensor in its unit's elements."""
        local = self._part_of(flat)
        return local if self.spec is None else dtensor_around(local, self.spec)

    def _part_of(self, flat: torch.Tensor) -> torch.Tensor:
        if self.kind is None:
            return flat.as_strided(self.size, self.stride, self.offset)
        dtype, conjugated, negated = self.kind
        tensor = flat.view(dtype).as_strided(self.size, self.stride, self.offset)
        tensor = tensor.conj() if conjugated else tensor
        return negated_view(tensor) if negated else tensor


class Restorable(Protocol):
    """What is held in the place of a saved tensor that is kept elsewhere."""

    def restore(self) -> torch.Tensor: ...


class PackSaved(Protocol):
    """Who keeps saved tensors elsewhere."""

    def __call__(self, tensor: torch.Tensor, *, is_input: bool) -> Restorable | None:
        """What is held in the place of `tensor`; None when it stays. `is_input`: of a block that is recomputed."""


class _InPlace:
    """A saved tensor that stays where it is. Under hooks torch does not see whether it was changed since: we do."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        with no_torch_function():
            # A node that saves its own output and gets it back would keep itself alive, out of the collector's sight.
            self._tensor = tensor if tensor.grad_fn is None else tensor.detach()
            self._version = version_of(tensor)

    def restore(self) -> torch.Tensor:
        with no_torch_function():
            version = version_of(self._tensor)
        if version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"{self._tensor.dtype} tensor of shape {tuple(self._tensor.shape)} is at version {version}; expected "
                f"version {self._version} instead"
            )
        return self._tensor


class _Delegated:
    """A saved tensor packed by the hooks that were on top before ours."""

    __slots__ = ("packed", "unpack")

    def __init__(self, packed: Any, unpack: Callable[[Any], torch.Tensor]) -> None:
        self.packed = packed
        self.unpack = unpack


class Unsharder:
    """Unshards and reshards the parameters of one engine."""

    def __init__(self) -> None:
        # Set when training is prepared: told of every read, and of every value that the user changed.
        self.on_read: Callable[[Unit], None] = _ignore
        self.on_edit: Callable[[ManagedParameter, torch.Tensor], None] = _ignore
        # Set while a model is being built: told of every copy.
        self.on_copy: Callable[[ManagedParameter, nn.Parameter], None] = _ignore
        # By address. Some have died: a finalizer would be one more place for an interrupt to strike.
        self._storages: dict[int, tuple[weakref.ref[torch.UntypedStorage], Unit]] = {}
        self._forget_dead_at = _DEAD_STORAGES
        # Set when training is prepared with saved tensors to be kept in blocks: who keeps them, and which.
        self.keep_saved: PackSaved = _ignore
        self.keeps_all = False
        self.num_keeping = 0  # blocks being called whose inputs are kept
        self._num_unsharded = 0
        self._thread = 0
        self._pid = os.getpid()
        self.num_copying = 0  # state_dicts being made

    def check_process(self) -> None:
        """Raise in a forked child, before any lock is taken: a thread of the parent may have held it at the fork."""
        if os.getpid() != self._pid:
            raise UsageError(
                f"the model was prepared in process {self._pid} and cannot be used in its forked child {os.getpid()}, "
                "which has none of the engine's threads\n"
                "  fix:   use the model in the parent only, or prepare another one in a child started with 'spawn'"
            )

    # ------------------------------------------------------------------ units

    def acquire(self, unit: Unit) -> torch.Tensor:
        """The unit's elements in memory; they stay there while the tensor or a view of it lives."""
        self.check_process()
        self.on_read(unit)
        flat = unit.alive() if unit.alive is not None else None
        if flat is not None and unit.the_source().current(unit):
            return flat
        # The user may be inside inference_mode, a FakeTensorMode or a torch.func transform; what we make is ordinary.
        with ordinary_tensors():
            flat = unit.the_source().acquire(unit)
        unit.alive = weakref.ref(flat)
        self._remember(flat.untyped_storage(), unit)
        return flat

    def _remember(self, storage: torch.UntypedStorage, unit: Unit) -> None:
        if len(self._storages) >= self._forget_dead_at:
            self._storages = {a: known for a, known in self._storages.items() if known[0]() is not None}
            self._forget_dead_at = 2 * len(self._storages) + _DEAD_STORAGES
        self._storages[storage_id(storage)] = (weakref.ref(storage), unit)

    def unshard(self, parameters: Sequence[ManagedParameter], *, watched: bool = False) -> None:
        """Show these parameters their values: all, or (an error, an interrupt) none.

        `watched`: to code that may change them without a trace.
        """
        thread = threading.get_ident()
        if self._num_unsharded and self._thread != thread:
            raise UsageError(
                f"parameter {parameters[0].name!r} is used by a second thread while another one is inside the model\n"
                "  fix:   run one forward or backward at a time for each prepared model"
            )
        self._thread = thread
        for done, parameter in enumerate(parameters):
            try:
                self._unshard_one(parameter, watched=watched)
            except BaseException:
                self.reshard(parameters[:done])
                raise

    def reshard(self, parameters: Sequence[ManagedParameter]) -> None:
        """Hide them again, keeping what the user may have written."""
        for parameter in reversed(parameters):
            parameter.num_unshards -= 1
            self._num_unsharded -= 1
            if not parameter.num_unshards:
                with ordinary_tensors():
                    self._keep_edits(parameter)
                    offloaded_param.reshard(parameter)
            unit = parameter.unit
            unit.num_unsharded -= 1
            if not unit.num_unsharded:
                unit.flat = None
                unit.the_source().unpin(unit)

    def call_unsharded(
        self, parameters: Sequence[ManagedParameter], func: Callable[..., Any], call: Callable[[], Any]
    ) -> Any:
        """The safety net: one torch function with these parameters unsharded."""
        with held():
            self.unshard(parameters)
            pushed = self.push_hooks()
            try:
                with through():
                    result = call()
                if self.num_copying and func is torch.Tensor.detach:
                    return result.clone()
                self._expect_changes(parameters, result)
                return result
            finally:
                if pushed:
                    pop_saved_tensor_hooks()
                self.reshard(parameters)

    def copied(self, original: ManagedParameter, copy: nn.Parameter) -> None:
        """A deep copy of `original` was made."""
        self.on_copy(original, copy)

    @contextmanager
    def unsharded(self, parameters: Sequence[ManagedParameter]) -> Iterator[None]:
        with held():
            self.unshard(parameters)
            try:
                with through():
                    yield
            finally:
                self.reshard(parameters)

    def _expect_changes(self, parameters: Sequence[ManagedParameter], result: Any) -> None:
        """A view of a parameter that is handed out (`p.data`, `p.detach()`, `p[0]`) may be written to, without a trace.

        The view keeps the unit in memory, so that what is written is found there later.
        """
        for tensor in result if isinstance(result, list | tuple) else (result,):
            if not isinstance(tensor, torch.Tensor) or isinstance(tensor, nn.Parameter):
                continue
            handle_unit = self._unit_of(tensor)
            for parameter in parameters:
                if parameter.unit is handle_unit:
                    self.may_change(parameter)

    def may_change(self, parameter: ManagedParameter) -> None:
        """The user has a tensor through which the unsharded value may change, now or later, without a trace."""
        parameter.unit.the_source().may_change(parameter.unit)
        parameter.edited = True

    def _unshard_one(self, parameter: ManagedParameter, *, watched: bool) -> None:
        unit = parameter.unit
        put_there = self._put_there(parameter) if not parameter.num_unshards else None
        if unit.flat is None:
            unit.flat = self.acquire(unit)
            unit.the_source().pin(unit)
        unit.num_unsharded += 1
        self._num_unsharded += 1
        parameter.num_unshards += 1
        if parameter.num_unshards == 1:
            with ordinary_tensors():
                offloaded_param.show(parameter, parameter.of(unit.flat), watched=watched)
                parameter.unsharded_version = version_of(parameter.parameter)
                if put_there is not None:
                    offloaded_param.show(parameter, put_there, watched=watched)
                    self._keep_edits(parameter)

    def _put_there(self, parameter: ManagedParameter) -> torch.Tensor | None:
        """What somebody has put in the place of the offloaded data by `set_`, which torch lets nobody override."""
        cell = parameter.cell
        if cell.device.type == "cpu" and not math.isnan(cell.item()):
            raise UsageError(
                f"parameter {parameter.name!r} was written to while it was offloaded_param, past the safety net\n"
                "  fix:   edit parameters inside zi.gathered([...])"
            )
        with no_torch_function():
            if local_of(parameter.parameter).data_ptr() == cell.data_ptr():
                return None
            offloaded_param.check_same_kind(parameter, parameter.parameter)
            return offloaded_param.data_of(parameter)

    def _keep_edits(self, parameter: ManagedParameter) -> None:
        """The user may have changed the value in place, or put another tensor in (`p.data = t`)."""
        unit = parameter.unit
        data = offloaded_param.data_of(parameter)
        if unit.flat is None:
            return
        if storage_id(data.untyped_storage()) != storage_id(unit.flat.untyped_storage()):
            parameter.of(unit.flat).copy_(data)
            offloaded_param.point(parameter, parameter.of(unit.flat))
            # What was saved for backward before may have been a view of the old tensor.
            parameter.num_changes += 1
        elif version_of(parameter.parameter) == parameter.unsharded_version:
            return
        self.keep(parameter)

    def keep(self, parameter: ManagedParameter) -> None:
        """The unsharded value is newer than what is stored: store it."""
        unit = parameter.unit
        if unit.flat is not None:
            # The master copy first: it takes all bits, what is stored may not.
            self.on_edit(parameter, unit.flat)
            unit.the_source().keep(parameter, unit.flat)
            parameter.unsharded_version = version_of(parameter.parameter)

    # ------------------------------------------------------------------ saved tensors

    def push_hooks(self) -> bool:
        """Put our saved-tensor hooks on top, unless they are there or hooks are forbidden (torch.func)."""
        if not saved_tensor_hooks_allowed():
            return False
        outer = top_saved_tensor_hooks()
        owner = getattr(outer[0], "__self__", None) if outer is not None else None
        if owner is self or (isinstance(owner, _ComposedHooks) and owner.unsharder is self):
            return False
        if outer is None:
            push_saved_tensor_hooks(self._pack, self._unpack)
        else:
            composed = _ComposedHooks(self, outer[0], outer[1])
            push_saved_tensor_hooks(composed.pack, composed.unpack)
        return True

    def handle_for(self, tensor: torch.Tensor) -> SavedHandle | None:
        """A handle when `tensor` lies in a unit's memory."""
        # The tensor is often the parameter itself: its shape and place are asked for past the net.
        with no_torch_function():
            spec = spec_of(tensor) if is_distributed(tensor) else None
            unit = self._unit_of(tensor)
            if unit is not None:
                local = local_of(tensor)
                offset = int(local.storage_offset())
                kind = (local.dtype, local.is_conj(), local.is_neg())
                if kind == (unit.compute_dtype, False, False):
                    return SavedHandle(unit.parameter_at(offset), local.size(), local.stride(), offset, spec=spec)
                owner = unit.parameter_at(offset * local.itemsize // unit.compute_dtype.itemsize)
                return SavedHandle(owner, local.size(), local.stride(), offset, kind, spec)
            parameter = offloaded_param.managed(tensor) if isinstance(tensor, nn.Parameter) else None
            if parameter is None:
                return None
            # An autograd.Function gets parameters as they are, and may save them so; or the user has put another tensor
            # in the place of the unsharded one.
            if parameter.num_unshards:
                with ordinary_tensors():
                    self._keep_edits(parameter)
            return SavedHandle(parameter, parameter.shape, parameter.stride, parameter.offset, spec=spec)

    def _unit_of(self, tensor: torch.Tensor) -> Unit | None:
        """The unit in whose memory `tensor` (of a DTensor: its local part) lies."""
        if is_distributed(tensor):
            tensor = local_tensor(tensor)
        if not self._storages or tensor.layout is not torch.strided or is_func_tensor(tensor):
            return None
        storage = tensor.untyped_storage()
        found = self._storages.get(storage_id(storage))
        # A dead storage's address is used again at once by another tensor.
        return found[1] if found is not None and found[0]() is storage else None

    def restore(self, handle: SavedHandle) -> torch.Tensor:
        """The tensor that was saved as `handle`."""
        if handle.version != handle.parameter.version:
            raise RuntimeError(
                f"one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{handle.parameter.name!r} was changed, or updated by optimizer.step(), after this forward"
            )
        with held():
            flat = self.acquire(handle.parameter.unit)
        return handle.of(flat)

    def _pack(self, tensor: torch.Tensor) -> SavedHandle | Restorable:
        handle = self.handle_for(tensor)
        if handle is not None:
            return handle
        if self.keeps_all or self.num_keeping:
            kept = self.keep_saved(tensor, is_input=self.num_keeping > 0)
            if kept is not None:
                return kept
        return _InPlace(tensor)

    @contextmanager
    def keeping_saved(self) -> Iterator[None]:
        """Inside, tensors that no other hooks want are kept by `keep_saved`."""
        with held():
            pushed = self.push_hooks()
            self.num_keeping += 1
            try:
                with through():
                    yield
            finally:
                self.num_keeping -= 1
                if pushed:
                    pop_saved_tensor_hooks()

    def _unpack(self, packed: SavedHandle | Restorable) -> torch.Tensor:
        return self.restore(packed) if isinstance(packed, SavedHandle) else packed.restore()


class _ComposedHooks:
    """Our hooks over somebody else's."""

    __slots__ = ("_outer_unpack", "outer_pack", "unsharder")

    def __init__(self, unsharder: Unsharder, pack: Callable[..., Any], unpack: Callable[..., torch.Tensor]) -> None:
        self.unsharder = unsharder
        self.outer_pack = pack
        self._outer_unpack = unpack

    def pack(self, tensor: torch.Tensor) -> Any:
        handle = self.unsharder.handle_for(tensor)
        return handle if handle is not None else _Delegated(self.outer_pack(tensor), self._outer_unpack)

    def unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, SavedHandle):
            return self.unsharder.restore(packed)
        restored: torch.Tensor = packed.unpack(packed.packed)
        return restored


def outer_pack() -> Callable[..., Any] | None:
    """Who packs the tensors that autograd saves now, beside ourselves."""
    top = top_saved_tensor_hooks()
    pack = top[0] if top is not None else None
    while isinstance(owner := getattr(pack, "__self__", None), _ComposedHooks):
        pack = owner.outer_pack
    return pack


def _ignore(*_: Any, **__: Any) -> None:
    return None
