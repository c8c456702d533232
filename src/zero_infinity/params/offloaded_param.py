"""Offloaded parameters: NaN placeholders that unshard themselves in any torch function that uses them.

An offloaded parameter is still the user's `nn.Parameter` object, with its true shape, dtype and device. Only its class
is changed to `OffloadedParameter` (for a subclass of `nn.Parameter`: to a class derived from both), and its data is one
NaN element expanded to the shape. It takes no memory, and code that bypasses `__torch_function__` sees NaN, never
plausible numbers.

Any torch function called with an offloaded parameter goes through `__torch_function__`. Metadata is answered directly;
for everything else the parameter is unsharded (its bytes are fetched), the function runs, and it is offloaded again.
So `F.linear(x, other.weight)`, tied weights, `nn.MultiheadAttention`'s inner projections, an L2 penalty in the loss and
code outside any forward work unchanged.

A parameter that is unsharded for its module's forward is a `WatchedParameter`, without `__torch_function__`: functions
go straight to torch, and only accesses that can change a value undetected (`.data`, `.detach()`, `.numpy()`) are
reported.
"""

from __future__ import annotations

import copy
import functools
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from zero_infinity._torch import (
    HAS_COMPATIBLE_TYPE,
    METADATA_GETTERS,
    METADATA_METHODS,
    METADATA_SETTERS,
    no_torch_function,
    set_local_tensor,
    swap_tensor_impl,
)
from zero_infinity.errors import UsageError
from zero_infinity.params.dtensor import local_of
from zero_infinity.params.dynamo import not_compiled
from zero_infinity.params.unit import ATTRIBUTE, ManagedParameter

# The attribute that holds a parameter's ParameterAccess.
_ACCESS = ATTRIBUTE + "_access"
_GET_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_GET_GRAD = torch.Tensor.grad.__get__  # type: ignore[union-attr]
_SET_GRAD = torch.Tensor.grad.__set__  # type: ignore[union-attr]


class ParameterAccess(Protocol):
    """An object that can unshard a parameter."""

    def call_unsharded(
        self, parameters: Sequence[ManagedParameter], func: Callable[..., Any], call: Callable[[], Any]
    ) -> Any:
        """Run `call`, which calls `func`, while the parameters are unsharded."""

    def copied(self, original: ManagedParameter, copy: nn.Parameter) -> None:
        """A deep copy of `original` was made."""

    def may_change(self, parameter: ManagedParameter) -> None:
        """The user has a tensor through which the unsharded value may change undetected, now or later."""

    def read(self, parameter: ManagedParameter) -> torch.Tensor:
        """Return its values in memory, which stay while the tensor or a view of it is alive."""

    def changed(self, parameter: ManagedParameter) -> None:
        """The values that `read` has returned were changed."""

    @property
    def makes_state_dict(self) -> bool:
        """True while a state_dict is made, whose tensors are copies."""


def managed(parameter: torch.Tensor) -> ManagedParameter | None:
    """Return what manages a parameter; None for a plain one."""
    found: ManagedParameter | None = parameter.__dict__.get(ATTRIBUTE)
    return found


def access_of(parameter: ManagedParameter) -> ParameterAccess:
    """Return the object that unshards a parameter."""
    access: ParameterAccess = parameter.parameter.__dict__[_ACCESS]
    return access


def adopt(parameter: ManagedParameter, access: ParameterAccess) -> None:
    """From now on `access` unshards this parameter."""
    parameter.parameter.__dict__[ATTRIBUTE] = parameter
    parameter.parameter.__dict__[_ACCESS] = access


def reshard(parameter: ManagedParameter) -> None:
    """Point the parameter at its NaN cell and change its class. Its old data is freed unless it is referenced."""
    with no_torch_function():  # it may already be offloaded, by its previous owner
        point(parameter, parameter.offloaded_data)
    parameter.parameter.__class__ = _as(OffloadedParameter, parameter.plain_class)


def show(parameter: ManagedParameter, data: torch.Tensor, *, watched: bool) -> None:
    """Point the parameter at real values and restore its class, or use one that reports hidden changes."""
    plain = parameter.plain_class
    parameter.parameter.__class__ = _as(WatchedParameter, plain) if watched else plain
    point(parameter, data)


def move(parameter: ManagedParameter, device: torch.device) -> None:
    """From now on its values are shown on `device`."""
    if parameter.cell.device != device:
        parameter.cell = parameter.cell.to(device)
        parameter.offloaded_data = parameter.cell.expand(parameter.shape)
        if managed(parameter.parameter) is parameter:
            reshard(parameter)


def point(parameter: ManagedParameter, data: torch.Tensor) -> None:
    """Replace the data of a parameter, bypassing `__torch_function__`."""
    if parameter.is_distributed:
        set_local_tensor(parameter.parameter, data)
    elif HAS_COMPATIBLE_TYPE(parameter.parameter, data):
        _SET_DATA(parameter.parameter, data)
    else:
        replace_by(parameter.parameter, data)


def replace_by(parameter: nn.Parameter, data: torch.Tensor) -> None:
    """Let a parameter have data of a device whose tensors torch does not let it have (those of third parties)."""
    fresh = nn.Parameter(data, requires_grad=parameter.requires_grad)
    fresh.__class__ = parameter.__class__
    fresh.__dict__.update(parameter.__dict__)
    if weakref.getweakrefs(parameter):  # nn.LSTM has one to each of its parameters; they stay valid
        swap_tensor_impl(parameter, fresh)
    else:
        torch.utils.swap_tensors(parameter, fresh)


def data_of(parameter: ManagedParameter) -> torch.Tensor:
    """Return the data of an unsharded parameter, for internal use."""
    if parameter.is_distributed:
        return local_of(parameter.parameter)
    data: torch.Tensor = _GET_DATA(parameter.parameter)
    return data


@functools.cache
def _as(state: type[nn.Parameter], plain: type[nn.Parameter]) -> type[nn.Parameter]:
    """Return the class of a parameter in this state whose own class is `plain`; it is derived from both."""
    if plain is nn.Parameter:
        return state
    bases = (_OffloadedDTensor,) if state is OffloadedParameter and hasattr(plain, "full_tensor") else (state,)
    return types.new_class(state.__name__ + plain.__name__, (*bases, plain))


def _getters(*names: str) -> set[Any]:
    return {getattr(torch.Tensor, name).__get__ for name in names if hasattr(torch.Tensor, name)}


# Answered by the offloaded parameter itself: its shape, dtype, device and autograd fields are the true ones.
METADATA: frozenset[Any] = frozenset(
    _getters(
        *("shape", "dtype", "device", "requires_grad", "grad", "is_leaf", "layout", "ndim", "grad_fn"),
        *(
            "is_cuda",
            "is_cpu",
            "is_meta",
            "is_sparse",
            "is_sparse_csr",
            "is_quantized",
            "is_mkldnn",
            "is_xpu",
            "is_mps",
        ),
        *("is_nested", "names", "itemsize", "nbytes", "output_nr", *METADATA_GETTERS),
        *("retains_grad", "is_vulkan", "is_ipu", "is_xla", "is_maia", "is_mtia"),
    )
    | {getattr(torch.Tensor, name).__set__ for name in ("grad", "requires_grad", *METADATA_SETTERS)}
    | {
        getattr(torch.Tensor, name)
        for name in (
            *("size", "dim", "numel", "nelement", "element_size", "is_floating_point", "is_complex", "is_signed"),
            *("requires_grad_", "register_hook", "__hash__", "__len__"),
            *("is_inference", *METADATA_METHODS, "get_device", "ndimension", "is_same_size"),
        )
    }
    | {torch.is_floating_point, torch.is_complex, torch.numel, torch.is_signed, torch.is_same_size}
)
_GRADIENT_HOOKS = frozenset({torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook})
_ONLY_GRADIENTS = frozenset({torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward})
# Called by `nn.Module._apply` before it replaces a parameter by a converted tensor or another parameter.
_ABOUT_TO_CONVERT = HAS_COMPATIBLE_TYPE


class OffloadedParameter(nn.Parameter):
    """The class of a parameter while it is offloaded. Instances are made by `reshard`, never directly."""

    @classmethod
    @not_compiled
    def __torch_function__(
        cls, func: Callable[..., Any], _: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        keywords = dict(kwargs or {})
        if func in _GRADIENT_HOOKS and args[0].__dict__[ATTRIBUTE].tiles:
            raise UsageError(
                f"parameter {args[0].__dict__[ATTRIBUTE].name!r} is used in tiles and never has a whole gradient: a "
                "hook on it would not be called\n  fix:   a larger tile_above in zi.Config, or register the hook "
                "before zi.prepare, which then leaves the parameter whole"
            )
        if func in METADATA:
            if func == _SET_GRAD:
                args[0].__dict__[ATTRIBUTE].set_gradient(args[1])
                return None
            with no_torch_function():
                result = func(*args, **keywords)
            return args[0].__dict__[ATTRIBUTE].gradient() if result is None and func == _GET_GRAD else result
        if func is torch.Tensor.register_post_accumulate_grad_hook:
            with no_torch_function():
                handle = func(*args, **keywords)
            # Our hook takes the gradient away, so it must run last.
            args[0].__dict__[ATTRIBUTE].hook_gradient_last()
            return handle
        if func == _SET_DATA or func is _ABOUT_TO_CONVERT:  # each look-up returns a new wrapper: equal, not identical
            check_same_kind(args[0].__dict__[ATTRIBUTE], args[1])
        if func is torch.Tensor.share_memory_:
            raise UsageError(
                f"parameter {args[0].__dict__[ATTRIBUTE].name!r} is managed by zero_infinity and cannot be moved to "
                "shared memory\n  fix:   share a copy made before zi.prepare"
            )
        if func in _ONLY_GRADIENTS:
            # It computes gradients and reads no value.
            edges = _with_edges((args, keywords))
            return func(*edges[0], **edges[1])
        # The parameter may be passed by keyword (nn.init, F.layer_norm) or inside a list (_VF.lstm).
        found = list({id(p): p for p in _offloaded_in((args, keywords))}.values())
        if not found:
            with no_torch_function():
                return func(*args, **keywords)
        for tiled in found:
            if tiled.tiled_use is not None:
                result = _use_tiles(tiled, found, func, args, keywords)
                if result is not NotImplemented:
                    return result
        return _call_unsharded(found, func, lambda: func(*args, **keywords))

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Return an ordinary parameter with the values in memory (or an offloaded one, during `zi.init`)."""
        parameter = self.__dict__[ATTRIBUTE]
        copied: nn.Parameter = _call_unsharded([parameter], copy.deepcopy, lambda: _copy_unsharded(self, memo))
        access_of(parameter).copied(parameter, copied)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(
            f"parameter {self.__dict__[ATTRIBUTE].name!r} is offloaded and cannot be pickled\n"
            "  fix:   pickle copy.deepcopy(model), or model.state_dict()"
        )


class _OffloadedDTensor(OffloadedParameter):
    """DTensor methods that read the local part and are not torch functions."""

    def to_local(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._unsharded("to_local", *args, **kwargs)

    def full_tensor(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._unsharded("full_tensor", *args, **kwargs)

    def redistribute(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._unsharded("redistribute", *args, **kwargs)

    def _unsharded(self, name: str, *args: Any, **kwargs: Any) -> torch.Tensor:
        parameter: ManagedParameter = self.__dict__[ATTRIBUTE]
        func = getattr(parameter.plain_class, name)
        result: torch.Tensor = _call_unsharded([parameter], func, lambda: func(self, *args, **kwargs))
        return result


class WatchedParameter(nn.Parameter):
    """The class of a parameter during its module's forward. Instances are made by `show`, never directly."""

    @property
    @not_compiled
    def data(self) -> torch.Tensor:
        _may_change(self)
        return super().data

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        _SET_DATA(self, value)

    @not_compiled
    def detach(self) -> torch.Tensor:
        _may_change(self)
        return super().detach()

    @not_compiled
    def numpy(self, *, force: bool = False) -> Any:
        _may_change(self)
        return super().numpy(force=force)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        watched = type(self)
        self.__class__ = self.__dict__[ATTRIBUTE].plain_class
        try:
            return _copy_unsharded(self, memo)
        finally:
            self.__class__ = watched


def _copy_unsharded(parameter: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
    """Return an unmanaged copy. Some classes copy every attribute of a tensor."""
    ours = {name: parameter.__dict__.pop(name) for name in (ATTRIBUTE, _ACCESS)}
    try:
        copied: nn.Parameter = parameter.__deepcopy__(memo)
        return copied
    finally:
        parameter.__dict__.update(ours)


def _may_change(parameter: nn.Parameter) -> None:
    known = parameter.__dict__[ATTRIBUTE]
    access_of(known).may_change(known)


def _call_unsharded(parameters: list[ManagedParameter], func: Callable[..., Any], call: Callable[[], Any]) -> Any:
    """Run `call` with all of these unsharded, whichever engines they belong to."""
    access = access_of(parameters[0])
    mine = [p for p in parameters if access_of(p) is access]
    others = [p for p in parameters if access_of(p) is not access]
    if others:
        return access.call_unsharded(mine, func, lambda: _call_unsharded(others, func, call))
    return access.call_unsharded(mine, func, call)


def _use_tiles(
    tiled: ManagedParameter,
    found: list[ManagedParameter],
    func: Callable[..., Any],
    args: tuple[Any, ...],
    keywords: dict[str, Any],
) -> Any:
    """Run `func` tile by tile, with other offloaded arguments (a bias) unsharded."""
    others = [p for p in found if p is not tiled]
    use = tiled.tiled_use
    if use is None or any(p.tiles for p in others):
        return NotImplemented
    if others:
        return _call_unsharded(others, func, lambda: use(func, args, keywords))
    return use(func, args, keywords)


def _offloaded_in(value: Any) -> Iterator[ManagedParameter]:
    if isinstance(value, OffloadedParameter):
        yield value.__dict__[ATTRIBUTE]
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _offloaded_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _offloaded_in(item)


def _with_edges(value: Any) -> Any:
    """Return the same value with each offloaded parameter replaced by its edge in the graph."""
    if isinstance(value, OffloadedParameter):
        with no_torch_function():
            return torch.autograd.graph.get_gradient_edge(value)
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(_with_edges(item) for item in value)
    if isinstance(value, dict):
        return {key: _with_edges(item) for key, item in value.items()}
    return value


def check_same_kind(parameter: ManagedParameter, data: torch.Tensor) -> None:
    """Refuse conversions that would be lost: `model.to(...)`, `.half()` etc. end in `parameter.data = converted`."""
    cell = parameter.cell
    with no_torch_function():
        data = local_of(data)
        old = (cell.dtype, cell.device, parameter.shape)
        new = (data.dtype, data.device, data.shape)
    if old != new:
        raise UsageError(
            f"parameter {parameter.name!r} is managed by zero_infinity as {old[0]} {tuple(old[2])} on {old[1]} and "
            f"cannot become {new[0]} {tuple(new[2])} on {new[1]}\n"
            "  fix:   convert the model before zi.prepare, or set param_dtype / compute_dtype in zi.Config"
        )
