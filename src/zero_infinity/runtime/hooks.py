"""Module hooks: the ordinary path by which a model's parameters are exposed and parked.

A module that owns parameters and has no child that does (nn.Linear, nn.LSTM, a norm) exposes all of them for its forward.
The parameters of any other module (a root with a position table) are left to the safety net, one operation at a time:
exposing them for a forward that contains the whole model would pin them for all of it.

Hooks are objects that refuse to be copied or pickled along: a deep copy of a prepared model is a plain model.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch._C import _autograd
from torch.utils.hooks import RemovableHandle

from zero_infinity.runtime.exposure import Exposure
from zero_infinity.runtime.unit import ManagedParameter


class _Inert:
    """What a copied model has in the place of a hook."""

    def __call__(self, *_: Any) -> None:
        return None


class ModuleHooks:
    """The pair of hooks of one module."""

    def __init__(self, exposure: Exposure, stack: ForwardStack, parameters: list[ManagedParameter]) -> None:
        self._exposure = exposure
        self._stack = stack
        self._parameters = parameters

    def before(self, module: nn.Module, _: Any) -> None:
        self._stack.enter(module)
        self._exposure.expose(self._parameters)
        self._stack.entered(self._parameters, hooks_pushed=self._exposure.push_hooks())

    def after(self, module: nn.Module, _: Any, __: Any) -> None:
        self._stack.leave(module)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Inert:
        return _Inert()


class _Entry:
    """One forward that is under way."""

    __slots__ = ("hooks_pushed", "module", "parameters")

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.parameters: list[ManagedParameter] = []
        self.hooks_pushed = False


class ForwardStack:
    """The forwards that are under way, so that whatever interrupts them leaves nothing exposed.

    An exception in forward still runs our after-hooks; a KeyboardInterrupt does not. What it leaves behind is cleaned up
    when the outermost module is called again.
    """

    def __init__(self, exposure: Exposure) -> None:
        self._exposure = exposure
        self._entries: list[_Entry] = []

    def enter(self, module: nn.Module) -> None:
        if self._entries and self._entries[0].module is module:
            self.clear()
        self._entries.append(_Entry(module))

    def entered(self, parameters: list[ManagedParameter], *, hooks_pushed: bool) -> None:
        self._entries[-1].parameters = parameters
        self._entries[-1].hooks_pushed = hooks_pushed

    def leave(self, module: nn.Module) -> None:
        while any(entry.module is module for entry in self._entries):
            entry = self._entries.pop()
            self._undo(entry)
            if entry.module is module:
                return

    def clear(self) -> None:
        while self._entries:
            self._undo(self._entries.pop())

    def _undo(self, entry: _Entry) -> None:
        if entry.hooks_pushed:
            _autograd._pop_saved_tensors_default_hooks()
        self._exposure.park(entry.parameters)


def attach(
    model: nn.Module, exposure: Exposure, owners: dict[nn.Module, list[ManagedParameter]]
) -> list[RemovableHandle]:
    """Put hooks on every module; `owners` says which parameters belong to which."""
    stack = ForwardStack(exposure)
    handles = []
    for module in model.modules():
        parameters = owners.get(module, [])
        if any(child in owners for child in module.modules() if child is not module):
            parameters = []
        hooks = ModuleHooks(exposure, stack, parameters)
        handles.append(module.register_forward_pre_hook(hooks.before, prepend=True))
        # always_call: an exception, or checkpoint's early stop of a recomputation, skips ordinary hooks.
        handles.append(module.register_forward_hook(hooks.after, always_call=True))
    return handles
