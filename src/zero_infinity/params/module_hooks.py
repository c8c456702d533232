"""Module hooks that unshard a module's parameters before its forward and reshard them after it.

A module that owns parameters and has no child that does (nn.Linear, nn.LSTM, a norm) unshards all of them for its
forward. The parameters of other modules (a root with a position table) are unsharded by `__torch_function__`, one
operation at a time: unsharding them for a forward that contains the whole model would pin them throughout.
"""

from __future__ import annotations

import threading
import types
import weakref
from typing import Any, Protocol

from torch import nn

from zero_infinity._torch import current_graph_task_id, pop_saved_tensor_hooks
from zero_infinity.errors import UsageError
from zero_infinity.interrupts import held
from zero_infinity.params.dynamo import not_compiled
from zero_infinity.params.state_dict import attach_state_dict_hooks
from zero_infinity.params.uncopied_hook import Hook
from zero_infinity.params.unit import ManagedParameter
from zero_infinity.params.unshard import Unsharder
from zero_infinity.run_trace import FORWARD, RunTrace


class BeforeForward(Hook):
    """Unshards the module's own parameters and pushes the saved-tensor hooks."""

    def __init__(
        self, module: nn.Module, unsharder: Unsharder, stack: ForwardStack, parameters: list[ManagedParameter]
    ) -> None:
        self._kind = type(module)
        self._unsharder = unsharder
        self._stack = stack
        self._parameters = parameters

    @not_compiled
    def __call__(self, module: nn.Module, _: Any) -> None:
        if type(module) is not self._kind:
            _refuse_fully_shard(module)
        with held():
            self._stack.enter(module)
            self._unsharder.unshard(self._parameters, watched=True)
            self._stack.entered(self._parameters, hooks_pushed=self._unsharder.hooks.push())


def _refuse_fully_shard(module: nn.Module) -> None:
    """`fully_shard` changes the class of a module, and replaces its parameters by some that nothing here knows."""
    if any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__):
        raise UsageError(
            f"fully_shard was called on {type(module).__name__}, a part of a prepared model: its new parameters are "
            "not those that zi.prepare trains\n  fix:   leave fully_shard out; stage=3 of zi.Config does its work"
        )


class AfterForward(Hook):
    """Undoes `BeforeForward`."""

    def __init__(self, stack: ForwardStack) -> None:
        self._stack = stack

    @not_compiled
    def __call__(self, module: nn.Module, _: Any, __: Any) -> None:
        with held():
            self._stack.leave(module)


class Discarding(Protocol):
    """An object with gradients that are not in `p.grad`."""

    def discard_gradients(self, *, set_to_none: bool) -> None: ...


class ZeroGradients(Hook):
    """The model's `zero_grad`: gradients that wait for step() are not on its parameters."""

    def __init__(self, model: nn.Module, engine: Discarding) -> None:
        self._model = weakref.ref(model)
        self._engine = weakref.ref(engine)

    def __call__(self, set_to_none: bool = True) -> None:
        model, engine = self._model(), self._engine()
        if engine is not None:
            engine.discard_gradients(set_to_none=set_to_none)
        if model is not None:
            type(model).zero_grad(model, set_to_none)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo[id(self._model())]
        return types.MethodType(type(copied).zero_grad, copied)


class ForwardObserver(Protocol):
    """Is told of calls of the model, or of a part of it, from outside of it."""

    def on_call(self, module: nn.Module) -> None:
        """A forward begins that is inside no other one, nor inside a backward."""


class ForwardEntry:
    """A forward in progress."""

    __slots__ = ("backward", "hooks_pushed", "module", "parameters")

    def __init__(self, module: nn.Module, backward: int) -> None:
        self.module = module
        self.backward = backward  # that recomputes it; -1: none
        self.parameters: list[ManagedParameter] = []
        self.hooks_pushed = False


class ForwardStack:
    """The forwards in progress, so that an interrupt leaves nothing unsharded.

    After an exception in forward our after-hooks still run; after a KeyboardInterrupt they do not. What that leaves
    behind is cleaned up at the next call of the outermost module; for a forward inside a backward, at the next one
    outside.
    """

    def __init__(self, unsharder: Unsharder, observer: ForwardObserver, run_trace: RunTrace | None = None) -> None:
        self._unsharder = unsharder
        self._observer = observer
        self._run_trace = run_trace
        self._entries: list[ForwardEntry] = []
        self._thread = 0

    def enter(self, module: nn.Module) -> None:
        thread = threading.get_ident()
        if self._entries and self._thread != thread:
            raise UsageError(
                f"{type(module).__name__} is called by a second thread while another one is inside the model\n"
                "  fix:   run one forward or backward at a time per prepared model"
            )
        self._thread = thread
        backward = current_graph_task_id()
        if backward < 0:
            while self._entries and self._entries[-1].backward >= 0:
                self._undo(self._entries.pop())
        if self._entries and (self._entries[0].module, self._entries[0].backward) == (module, backward):
            self.clear()
        if not self._entries and backward < 0:  # not a recomputation in backward
            self._observer.on_call(module)
            if self._run_trace is not None:
                self._run_trace.begin(FORWARD)
        self._entries.append(ForwardEntry(module, backward))

    def entered(self, parameters: list[ManagedParameter], *, hooks_pushed: bool) -> None:
        self._entries[-1].parameters = parameters
        self._entries[-1].hooks_pushed = hooks_pushed

    def leave(self, module: nn.Module) -> None:
        if self._thread != threading.get_ident():
            return  # of a refused call
        while any(entry.module is module for entry in self._entries):
            entry = self._entries.pop()
            self._undo(entry)
            if entry.module is module:
                break
        if self._run_trace is not None and not self._entries:
            self._run_trace.end(FORWARD)

    def clear(self) -> None:
        while self._entries:
            self._undo(self._entries.pop())

    def exchange(self, entries: list[ForwardEntry]) -> list[ForwardEntry]:
        """This thread goes on, inside of these forwards. Returns those of the thread that has stopped."""
        before, self._entries = self._entries, entries
        self.go_on_here()
        return before

    def go_on_here(self) -> None:
        """This thread goes on where another one has stopped."""
        self._thread = threading.get_ident()
        self._unsharder.go_on_here()

    def _undo(self, entry: ForwardEntry) -> None:
        # The end of a backward has already removed the hooks that were pushed inside it.
        if entry.hooks_pushed and entry.backward == current_graph_task_id():
            pop_saved_tensor_hooks()
        self._unsharder.reshard(entry.parameters)


def attach(
    model: nn.Module, unsharder: Unsharder, stack: ForwardStack, owners: dict[nn.Module, list[ManagedParameter]]
) -> None:
    """Register hooks on every module; `owners` maps modules to their parameters."""
    for module in model.modules():
        # A tile is unsharded by the operation that uses it.
        parameters = [p for p in owners.get(module, []) if p.whole is None]
        if any(child in owners for child in module.modules() if child is not module):
            parameters = []
        module.register_forward_pre_hook(BeforeForward(module, unsharder, stack, parameters), prepend=True)
        # always_call: ordinary hooks are skipped by an exception and by checkpoint's early stop of a recomputation.
        module.register_forward_hook(AfterForward(stack), always_call=True)
        attach_state_dict_hooks(module, unsharder.owner.parameter_store.state_dicts)
