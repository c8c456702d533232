"""The optimizer of a prepared model: a real `torch.optim.Optimizer` over streamed states.

It shares its parameter groups with the user's optimizer, so LR schedulers work on either. `step()` submits the updates
that backward has not submitted yet and returns without waiting for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from zero_infinity._torch import mark_stepped
from zero_infinity.errors import UsageError
from zero_infinity.optim.combined_optimizer import single_optimizers
from zero_infinity.optim.optimizer_state_dict import OptimizerStateDict


class StreamedTraining(Protocol):
    """The part of the engine that the streamed optimizer drives."""

    @property
    def states(self) -> OptimizerStateDict: ...

    @property
    def grad_norm(self) -> torch.Tensor | None: ...

    def step(self) -> bool: ...

    def settle(self) -> None: ...

    def discard_gradients(self, *, set_to_none: bool) -> None: ...

    def accumulating(self) -> AbstractContextManager[None]: ...


class StreamedStates(MutableMapping[torch.Tensor, dict[str, Any]]):
    """What the plain optimizer's `state` would be. Tensors are copies: a state that is assigned is stored.

    On several ranks all of them read or assign the state of a parameter together, and have it whole.
    """

    def __init__(self, engine: StreamedTraining) -> None:
        self._engine = engine

    @property
    def _states(self) -> OptimizerStateDict:
        self._engine.settle()
        return self._engine.states

    def __getitem__(self, parameter: torch.Tensor) -> dict[str, Any]:
        state = self._states.state_of(parameter)
        if state is None:
            raise KeyError(parameter)
        return state

    def __setitem__(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        self._states.set_state(parameter, state)

    def __delitem__(self, parameter: torch.Tensor) -> None:
        raise UsageError(
            "the optimizer state of one parameter cannot be removed\n"
            "  fix:   assign another one: optimizer.state[parameter] = {...}"
        )

    def __contains__(self, parameter: object) -> bool:
        return isinstance(parameter, torch.Tensor) and self._states.has_state(parameter)

    def __iter__(self) -> Iterator[torch.Tensor]:
        states = self._states
        parameters = (p for group in states.optimizer.param_groups for p in group["params"])
        return filter(states.has_state, parameters)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class StreamedOptimizer(Optimizer):
    """Updates parameters whose states live in blocks, with the class of the user's optimizer."""

    def __init__(self, engine: StreamedTraining, optimizer: Optimizer) -> None:
        super().__init__([{"params": group["params"]} for group in optimizer.param_groups], optimizer.defaults)
        self.param_groups = optimizer.param_groups
        self._engine = engine
        self._skipped = False

    @property  # type: ignore[override]
    def state(self) -> MutableMapping[torch.Tensor, dict[str, Any]]:
        """The states, each read on access and stored when it is assigned.

        torch.distributed.checkpoint runs a step with zero gradients if an optimizer has no state.
        """
        return StreamedStates(self._engine)

    @state.setter
    def state(self, _: object) -> None:
        """Ignored: the base class sets an empty state in its `__init__`."""

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
        self._engine.settle()
        return self._engine.states.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the states of a plain optimizer's `state_dict()`."""
        self._engine.settle()
        self._engine.states.load_state_dict(state_dict)
        # Loading creates new groups, which schedulers change through either optimizer.
        self.param_groups = self._engine.states.optimizer.param_groups

    def __getstate__(self) -> dict[str, Any]:
        raise UsageError("a streamed optimizer cannot be pickled or copied\n  fix:   use optimizer.state_dict()")

    def __repr__(self) -> str:
        return f"Streamed{self._engine.states.optimizer!r}"
