"""The optimizer of a prepared model: a real `torch.optim.Optimizer` over streamed states.

It shares its parameter groups with the user's optimizer, so LR schedulers work on either. `step()` submits the updates
that backward has not submitted yet and returns without waiting for them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from zero_infinity._torch import mark_stepped, share_step_hooks, state_dict_hooks
from zero_infinity.errors import UsageError
from zero_infinity.optim.combined_optimizer import single_optimizers
from zero_infinity.optim.optimizer_state_dict import OptimizerStateDict
from zero_infinity.optim.update_rule import exchanges_weights
from zero_infinity.optim.user_states import StreamedStates


class StreamedTraining(Protocol):
    """The part of the engine that the streamed optimizer drives."""

    @property
    def states(self) -> OptimizerStateDict: ...

    @property
    def grad_norm(self) -> torch.Tensor | None: ...

    def step(self) -> bool: ...

    def exchange_weights(self, method: str) -> None: ...

    def settle(self) -> None: ...

    def discard_gradients(self, *, set_to_none: bool) -> None: ...

    def accumulating(self) -> AbstractContextManager[None]: ...


class StreamedOptimizer(Optimizer):
    """Updates parameters whose states live in blocks, with the class of the user's optimizer."""

    def __init__(self, engine: StreamedTraining, optimizer: Optimizer) -> None:
        super().__init__([{"params": group["params"]} for group in optimizer.param_groups], optimizer.defaults)
        self._engine = engine
        self._skipped = False
        share_step_hooks(optimizer, self)
        self_reference = weakref.ref(self)  # the user's optimizer may outlive this one

        def loaded(_: Optimizer) -> None:
            streamed = self_reference()
            if streamed is not None:
                streamed.engine.settle()
                streamed.engine.states.take_loaded()

        optimizer.register_load_state_dict_post_hook(loaded)

    @property  # type: ignore[override]
    def state(self) -> MutableMapping[torch.Tensor, dict[str, Any]]:
        """The states, each read on access; changes are kept.

        torch.distributed.checkpoint runs a step with zero gradients if an optimizer has no state.
        """
        return StreamedStates(self._engine)

    @state.setter
    def state(self, states: Mapping[torch.Tensor, Mapping[str, Any]]) -> None:
        if hasattr(self, "_engine"):  # the base class sets an empty state in its `__init__`
            StreamedStates(self._engine).replace(states)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of the user's optimizer, which schedulers change through either."""
        return self._engine.states.optimizer.param_groups if hasattr(self, "_engine") else self._own_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        if hasattr(self, "_engine"):
            self._engine.states.optimizer.param_groups = groups
        else:
            self._own_groups = groups

    @property
    def engine(self) -> StreamedTraining:
        """The training that this optimizer drives."""
        return self._engine

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """The global gradient norm of the last step, if `max_grad_norm` is set."""
        return self._engine.grad_norm

    @property
    def step_was_skipped(self) -> bool:
        """True if gradients had overflowed in float16 at the last step, which then changed nothing."""
        return self._skipped

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Finish the update that backward began.

        A closure (forward and backward) is called once, first; its result is returned.
        """
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        self._engine.states.check_nothing_set()
        self._skipped = not self._engine.step()
        # A scheduler created on the plain optimizer checks whether that optimizer has stepped.
        for optimizer in single_optimizers(self._engine.states.optimizer):
            mark_stepped(optimizer)
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop unused gradients. A finished step has already consumed its own."""
        self._engine.discard_gradients(set_to_none=set_to_none)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside this context only accumulate; the next one outside completes the step."""
        with self._engine.accumulating():
            yield

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if hasattr(self, "_engine"):
            raise UsageError(
                "a parameter group cannot be added after zi.prepare: it would have no state records\n"
                "  fix:   add it to the optimizer before zi.prepare"
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the states in memory, in the form of the plain optimizer's `state_dict()`."""
        hooks = [state_dict_hooks(one) for one in (self._engine.states.optimizer, self)]
        for before, _ in hooks:
            for pre_hook in before:
                pre_hook(self)
        self._engine.settle()
        found = self._engine.states.state_dict()
        for _, after in hooks:
            for post_hook in after:
                found = post_hook(self, found) or found
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the states of a plain optimizer's `state_dict()`."""
        self._engine.settle()
        self._engine.states.load_state_dict(state_dict)

    def register_load_state_dict_pre_hook(
        self, hook: Callable[[Optimizer, dict[str, Any]], dict[str, Any] | None], prepend: bool = False
    ) -> RemovableHandle:
        """As torch's: called before `load_state_dict`."""
        plain = self._engine.states.optimizer
        return plain.register_load_state_dict_pre_hook(lambda _, states: hook(self, states), prepend)

    def register_load_state_dict_post_hook(
        self, hook: Callable[[Optimizer], None], prepend: bool = False
    ) -> RemovableHandle:
        """As torch's: called after `load_state_dict`."""
        plain = self._engine.states.optimizer
        return plain.register_load_state_dict_post_hook(lambda _: hook(self), prepend)

    def __getstate__(self) -> dict[str, Any]:
        raise UsageError("a streamed optimizer cannot be pickled or copied\n  fix:   use optimizer.state_dict()")

    def __repr__(self) -> str:
        return f"Streamed{self._engine.states.optimizer!r}"


class ExchangingOptimizer(StreamedOptimizer):
    """The streamed form of an optimizer whose `train()` and `eval()` exchange all weights (schedule-free)."""

    def train(self) -> None:
        """Go on with the weights that are trained. Over ranks, every rank calls it."""
        self.engine.exchange_weights("train")

    def eval(self) -> None:
        """Show the averaged weights, to evaluate or save. Over ranks, every rank calls it."""
        self.engine.exchange_weights("eval")


def streamed_optimizer(engine: StreamedTraining, optimizer: Optimizer) -> StreamedOptimizer:
    """Return what `prepare` returns for the user's optimizer, with the methods that it has."""
    return (ExchangingOptimizer if exchanges_weights(optimizer) else StreamedOptimizer)(engine, optimizer)
