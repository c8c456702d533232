"""Optimizer states as the user sees them: `optimizer.state`, read, changed, set or dropped.

A tensor in it is a stand-in without memory (`retained_gradient.py`): what is changed in place is stored in the record.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, NoReturn, Protocol

import torch

from zero_infinity.errors import UsageError
from zero_infinity.optim.nested_state import flat_state, nested_state
from zero_infinity.optim.optimizer_state_dict import OptimizerStateDict
from zero_infinity.optim.retained_gradient import retained_gradient


class StatesOwner(Protocol):
    """The training whose states these are."""

    @property
    def states(self) -> OptimizerStateDict: ...

    def settle(self) -> None:
        """Wait until every submitted update is done."""


class StreamedStates(MutableMapping[torch.Tensor, dict[str, Any]]):
    """What the plain optimizer's `state` would be. On several ranks all of them read and change it alike."""

    def __init__(self, owner: StatesOwner) -> None:
        self._owner = owner

    def __getitem__(self, parameter: torch.Tensor) -> dict[str, Any]:
        states = self._settled()
        if not states.is_managed(parameter):
            state = states.state_of(parameter)
            if state is None:
                raise KeyError(parameter)
            return state
        if not states.has_state(parameter):
            raise KeyError(parameter)
        return UserState(states, parameter)

    def __setitem__(self, parameter: torch.Tensor, state: Mapping[str, Any]) -> None:
        self._settled().set_state(parameter, _plain(state))

    def __delitem__(self, parameter: torch.Tensor) -> None:
        if parameter not in self:
            raise KeyError(parameter)
        self._settled().forget_state(parameter)

    def __contains__(self, parameter: object) -> bool:
        return isinstance(parameter, torch.Tensor) and self._settled().has_state(parameter)

    def __iter__(self) -> Iterator[torch.Tensor]:
        states = self._settled()
        return iter([p for group in states.optimizer.param_groups for p in group["params"] if states.has_state(p)])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def replace(self, states: Mapping[torch.Tensor, Mapping[str, Any]]) -> None:
        """Do what `optimizer.state = states` does."""
        found = {parameter: dict(state) for parameter, state in states.items()}
        self.clear()
        self.update(found)

    def _settled(self) -> OptimizerStateDict:
        self._owner.settle()
        return self._owner.states


class UserState(dict[str, Any]):
    """The state of one parameter. What is set in it is stored."""

    def __init__(self, states: OptimizerStateDict, parameter: torch.Tensor) -> None:
        flat = states.flat_state_of(parameter)
        shown = {
            name: retained_gradient(_StateTensor(states, parameter, name), value, value.stride())
            if isinstance(value, torch.Tensor)
            else value
            for name, value in flat.items()
        }
        super().__init__(nested_state(shown))
        self._states = states
        self._parameter = parameter

    def __setitem__(self, name: str, value: Any) -> None:
        state = self._states.state_of(self._parameter) or {}
        self._states.set_state(self._parameter, {**state, **_plain({name: value})})
        super().__setitem__(name, value)

    def update(self, *args: Any, **kwargs: Any) -> None:
        changes = dict(*args, **kwargs)
        state = self._states.state_of(self._parameter) or {}
        self._states.set_state(self._parameter, {**state, **_plain(changes)})
        super().update(changes)

    def _refuse(self, *_: Any) -> NoReturn:
        raise UsageError(
            "a part of a parameter's optimizer state cannot be removed after zi.prepare\n"
            "  fix:   `del optimizer.state[parameter]` begins anew"
        )

    __delitem__ = clear = pop = popitem = setdefault = __ior__ = _refuse


def _plain(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state without stand-ins: what they stand for may be what is about to be replaced."""
    flat = flat_state(dict(state))
    return nested_state({n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in flat.items()})


class _StateTensor:
    """One tensor of a parameter's state, whole over ranks and tiles."""

    def __init__(self, states: OptimizerStateDict, parameter: torch.Tensor, name: str) -> None:
        self._states = states
        self._parameter = parameter
        self._name = name

    def read(self) -> torch.Tensor:
        found: torch.Tensor = self._states.flat_state_of(self._parameter)[self._name]
        return found.clone()

    def write(self, values: torch.Tensor) -> None:
        flat = {**self._states.flat_state_of(self._parameter), self._name: values}
        self._states.set_state(self._parameter, nested_state(flat))

    def zero(self) -> None:
        self.write(torch.zeros_like(self.read()))
