"""The optimizer state in plain PyTorch's form: `state`, `state_dict()`, `load_state_dict()` over records."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zero_infinity.errors import UsageError
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

    def state_dict(self) -> dict[str, Any]:
        """Return what the plain optimizer's `state_dict()` would be, in memory."""
        numbers = {p: i for i, p in enumerate(p for g in self.optimizer.param_groups for p in g["params"])}
        groups = [
            {**{k: v for k, v in group.items() if k != "params"}, "params": [numbers[p] for p in group["params"]]}
            for group in self.optimizer.param_groups
        ]
        states = {number: self.state_of(p) for p, number in numbers.items()}
        return {"state": {n: state for n, state in states.items() if state is not None}, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the states of a plain optimizer's `state_dict()`."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        # State keys are whatever identifies a parameter in the groups: a number, or a name (dcp.get_state_dict).
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        for key, parameter in zip(keys, parameters, strict=False):  # the optimizer checks the lengths below
            if key in state_dict["state"] and parameter in self._managed:
                self._state_io.check_state(self._managed[parameter], state_dict["state"][key])
        self.optimizer.load_state_dict(state_dict)
        self._state_io.forget_states()
        self.take_states()

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

    def set_state(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        """Store the state of one parameter, which replaces the old one."""
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

    def has_state(self, parameter: torch.Tensor) -> bool:
        known = managed(parameter)
        if known is None:
            return self._resident.state(parameter) is not None
        record = self._records.get(known.parts[0].unit)
        return record is not None and known.parts[0] in record.started
