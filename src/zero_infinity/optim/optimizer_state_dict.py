"""The optimizer state in plain PyTorch's form: `state`, `state_dict()`, `load_state_dict()` over records."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zero_infinity._torch import copy_without_step_hooks
from zero_infinity.errors import UsageError
from zero_infinity.optim.combined_optimizer import CombinedOptimizer
from zero_infinity.optim.nested_state import flat_state
from zero_infinity.optim.optimizer_state_io import OptimizerStateIO
from zero_infinity.optim.resident_params import ResidentParameters
from zero_infinity.optim.state_records import StateRecord
from zero_infinity.params.offloaded_param import managed
from zero_infinity.params.unit import ManagedParameter, Unit


class OptimizerStateDict:
    """Reads and writes the states of one optimizer. No update may be in flight."""

    def __init__(
        self,
        optimizer: Optimizer,
        managed_parameters: Mapping[nn.Parameter, ManagedParameter],
        records: Mapping[Unit, StateRecord],
        state_io: OptimizerStateIO,
        resident: ResidentParameters,
    ) -> None:
        self.optimizer = optimizer
        self._managed = managed_parameters
        self._records = records
        self._state_io = state_io
        self._resident = resident
        self._num_loads = 0

    def state_dict(self) -> dict[str, Any]:
        """Return what the plain optimizer's `state_dict()` would be, in memory."""
        numbers = {p: i for i, p in enumerate(p for g in self.optimizer.param_groups for p in g["params"])}
        if type(self.optimizer).state_dict is not Optimizer.state_dict:
            return self._in_own_form(numbers)
        groups = [
            {**{k: v for k, v in group.items() if k != "params"}, "params": [numbers[p] for p in group["params"]]}
            for group in self.optimizer.param_groups
        ]
        states = {number: self.state_of(p) for p, number in numbers.items()}
        return {"state": {n: state for n, state in states.items() if state is not None}, "param_groups": groups}

    def _in_own_form(self, parameters: Iterable[torch.Tensor]) -> dict[str, Any]:
        """What a class returns that has a `state_dict` of its own (bitsandbytes)."""
        plain: Any = copy_without_step_hooks(self.optimizer)
        states = {parameter: self.state_of(parameter) for parameter in parameters}
        plain.state = defaultdict(dict, {p: state for p, state in states.items() if state is not None})
        found: dict[str, Any] = type(self.optimizer).state_dict(plain)
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the states of a plain optimizer's `state_dict()`."""
        for parameter, state in self._states_in(state_dict).items():
            known = managed(parameter)
            if known is not None:
                self._state_io.check_state(known, state)
        before = self._num_loads
        self.optimizer.load_state_dict(state_dict)
        if self._num_loads == before:  # a class with a `load_state_dict` of its own need not call the hook
            self.take_loaded()

    def take_loaded(self) -> None:
        """The user's optimizer has loaded a state dict: its states replace those in records."""
        self._num_loads += 1
        self._state_io.forget_states()
        self.take_states()

    def _states_in(self, state_dict: dict[str, Any]) -> dict[torch.Tensor, dict[str, Any]]:
        """The state of each parameter in a state dict."""
        if type(self.optimizer).load_state_dict not in (Optimizer.load_state_dict, CombinedOptimizer.load_state_dict):
            trial: Any = copy_without_step_hooks(self.optimizer)
            trial.state, trial.param_groups = defaultdict(dict), list(self.optimizer.param_groups)
            type(self.optimizer).load_state_dict(trial, state_dict)
            return dict(trial.state)
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        # State keys are whatever identifies a parameter in the groups: a number, or a name (dcp.get_state_dict).
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        pairs = zip(keys, parameters, strict=False)  # the optimizer checks the lengths
        return {p: state_dict["state"][key] for key, p in pairs if key in state_dict["state"]}

    def check_nothing_set(self) -> None:
        """Raise if states were set on the user's own optimizer, where no update sees them."""
        state = self.optimizer.state
        found = next((known for p, known in self._managed.items() if state.get(p)), None) if state else None
        if found is not None:
            raise UsageError(
                f"the optimizer state of {found.name!r} was set on the optimizer that was given to zi.prepare, whose "
                "states are not used\n  fix:   set it on the optimizer that zi.prepare has returned"
            )

    def take_states(self) -> None:
        """Move states of the user's optimizer into records."""
        state = self.optimizer.state
        taken = [(p, m) for p, m in self._managed.items() if m.group is not None and p in state]
        for parameter, known in taken:
            self._state_io.write_state(known, state[parameter])
        for parameter, _ in taken:
            del state[parameter]

    def state_of(self, parameter: torch.Tensor) -> dict[str, Any] | None:
        """Return the state of one parameter, in memory; None if it has none yet."""
        known = managed(parameter)
        return self._state_io.read_state(known) if known is not None else self._resident.state(parameter)

    def is_managed(self, parameter: torch.Tensor) -> bool:
        """True if the state is kept in records."""
        return managed(parameter) is not None

    def flat_state_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Return the state of one parameter by flat names, in memory."""
        return flat_state(self.state_of(parameter) or {})

    def set_state(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        """Replace the state of one parameter."""
        known = managed(parameter)
        if known is not None and known.group is not None:
            self._state_io.write_state(known, state)
        elif known is None and self._resident.has(parameter):
            self.optimizer.state[parameter] = state
        else:
            name = known.name if known is not None else f"tensor of {list(parameter.shape)}"
            raise UsageError(
                f"{name!r} is not trained by this optimizer, and has no state\n"
                "  fix:   a parameter of the prepared model that was in the optimizer when the model was prepared"
            )

    def forget_state(self, parameter: torch.Tensor) -> None:
        """Reset one parameter to the state before its first step."""
        known = managed(parameter)
        if known is None:
            self.optimizer.state.pop(parameter, None)
        else:
            self._state_io.forget_state(known)

    def has_state(self, parameter: torch.Tensor) -> bool:
        known = managed(parameter)
        if known is None:
            return self._resident.state(parameter) is not None
        record = self._records.get(known.parts[0].unit)
        return record is not None and known.parts[0] in record.started
