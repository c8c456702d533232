"""The optimizer that a prepared model is trained with: a real `torch.optim.Optimizer` over streamed states.

It shares its parameter groups with the optimizer that the user made, so every LR scheduler works on either. `step()`
submits what backward has not submitted yet and returns without waiting for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from zero_infinity._torch import mark_stepped
from zero_infinity.errors import UsageError
from zero_infinity.optim.optimizer_state_dict import OptimizerStateDict


class StreamedTraining(Protocol):
    """The training that a streamed optimizer drives: the engine, as far as it is used here."""

    @property
    def states(self) -> OptimizerStateDict: ...

    @property
    def grad_norm(self) -> torch.Tensor | None: ...

    def step(self) -> None: ...

    def settle(self) -> None: ...

    def discard_gradients(self, *, set_to_none: bool) -> None: ...

    def accumulating(self) -> AbstractContextManager[None]: ...


class StreamedStates(Mapping[torch.Tensor, dict[str, Any]]):
    """What the plain optimizer's `state` would be, to read: tensors are copies."""

    def __init__(self, states: OptimizerStateDict) -> None:
        self._states = states

    def __getitem__(self, parameter: torch.Tensor) -> dict[str, Any]:
        state = self._states.state_of(parameter)
        if state is None:
            raise KeyError(parameter)
        return state

    def __contains__(self, parameter: object) -> bool:
        return isinstance(parameter, torch.Tensor) and self._states.has_state(parameter)

    def __iter__(self) -> Iterator[torch.Tensor]:
        parameters = (p for group in self._states.optimizer.param_groups for p in group["params"])
        return filter(self._states.has_state, parameters)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class StreamedOptimizer(Optimizer):
    """Updates parameters whose states live in blocks, by the class of the optimizer that it was made from."""

    def __init__(self, engine: StreamedTraining, optimizer: Optimizer) -> None:
        super().__init__([{"params": group["params"]} for group in optimizer.param_groups], optimizer.defaults)
        self.param_groups = optimizer.param_groups
        self._engine = engine

    @property  # type: ignore[override]
    def state(self) -> Mapping[torch.Tensor, dict[str, Any]]:
        """The states, each read when it is asked for.

        torch.distributed.checkpoint takes a step with gradients of zero when an optimizer has none.
        """
        return StreamedStates(self._engine.states)

    @state.setter
    def state(self, _: object) -> None:
        """The base class sets an empty one when it is made."""

    @property
    def engine(self) -> StreamedTraining:
        """Whose states it updates."""
        return self._engine

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """The global gradient norm of the last step, when `max_grad_norm` is set."""
        return self._engine.grad_norm

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Finish the update that backward began."""
        if closure is not None:
            raise UsageError(
                "optimizer.step(closure) is not supported: parameters are updated while backward runs\n"
                "  fix:   call loss.backward() yourself, then optimizer.step()"
            )
        self._engine.step()
        # A scheduler made with the plain optimizer asks it whether it has ever stepped.
        mark_stepped(self._engine.states.optimizer)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients that were not used. A step has consumed its gradients already."""
        self._engine.discard_gradients(set_to_none=set_to_none)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards in here only accumulate; the one after them completes the step."""
        with self._engine.accumulating():
            yield

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if hasattr(self, "_engine"):
            raise UsageError(
                "a parameter group cannot be added after zi.prepare: its states would have no place\n"
                "  fix:   add it to the optimizer before zi.prepare"
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The states in memory, as the plain optimizer's `state_dict()` has them."""
        self._engine.settle()
        return self._engine.states.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take in the states of a plain optimizer's `state_dict()`."""
        self._engine.settle()
        self._engine.states.load_state_dict(state_dict)
        # Loading has made new groups, which schedulers change through either optimizer.
        self.param_groups = self._engine.states.optimizer.param_groups

    def __getstate__(self) -> dict[str, Any]:
        raise UsageError("a streamed optimizer cannot be pickled or copied\n  fix:   use optimizer.state_dict()")

    def __repr__(self) -> str:
        return f"Streamed{self._engine.states.optimizer!r}"
