"""Decides how each parameter group is updated: element-wise, in slices of any size, or by whole parameters.

Both are probed, never assumed. Slices are tried first: they need the least memory and divide evenly over ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from zero_infinity.errors import UsageError
from zero_infinity.optim.combined_optimizer import single_optimizers
from zero_infinity.optim.elementwise_probe import probe_state_names
from zero_infinity.optim.group_settings import in_training
from zero_infinity.optim.own_steps import check_single_settings, check_wrapped
from zero_infinity.optim.parameter_probe import measure_state, probe_parameters, refusal
from zero_infinity.optim.state_slots import WholeState
from zero_infinity.optim.update_rule import exchanges_weights
from zero_infinity.params.unit import ManagedParameter

# What a streamed pass over parameters cannot do, by class name: why, and what to do instead.
_REFUSED = {
    "LBFGS": (
        "it needs a closure that evaluates the model several times in one step, and products of all gradients with "
        "those of earlier steps",
        "AdamW or Muon; LBFGS in plain PyTorch if the model fits in memory",
    ),
    "SparseAdam": (
        "it changes only rows that a batch has touched, and a dense gradient does not tell those from rows whose "
        "gradient is zero",
        "Adagrad or SGD, which leave rows without a gradient as they are, also with nn.Embedding(sparse=True); or Adam",
    ),
}


class UpdateKinds:
    """How one optimizer updates the parameters of its groups. Each group is probed once for each dtype."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        # Names of states per element, or the steps until the state of a whole parameter has all its names.
        self._found: dict[tuple[int, torch.dtype], tuple[str, ...] | int] = {}
        self._states: dict[Any, WholeState] = {}

    def groups(self) -> dict[torch.Tensor, int]:
        """The number of the group of each parameter."""
        return {p: number for number, group in enumerate(self.optimizer.param_groups) for p in group["params"]}

    def is_whole(self, group: int, dtype: torch.dtype) -> bool:
        """True if the parameters of this group are updated whole."""
        return isinstance(self._probe(group, dtype), int)

    def element_names(self, group: int, dtype: torch.dtype) -> tuple[str, ...]:
        """Return the names of the states per element."""
        names = self._probe(group, dtype)
        return names if isinstance(names, tuple) else ()

    def whole_state(self, parameter: ManagedParameter, dtype: torch.dtype) -> WholeState:
        """Return the state of a parameter that is updated whole. Runs one step on a parameter of this shape."""
        group = parameter.group or 0
        if parameter.is_distributed:
            reason = f"it needs {parameter.name!r} whole, and each rank has a part of it (DTensor)"
            raise refusal(type(self.optimizer).__name__, reason)
        key = (group, dtype, parameter.shape, parameter.stride)
        if key not in self._states:
            num_steps = self._probe(group, dtype)
            like = torch.empty_strided(parameter.shape, parameter.stride, dtype=dtype, device="meta")
            settings = in_training(self.optimizer, self.optimizer.param_groups[group])
            self._states[key] = measure_state(
                self.optimizer, settings, like, dtype, num_steps if isinstance(num_steps, int) else 1
            )
        return self._states[key]

    def _probe(self, group: int, dtype: torch.dtype) -> tuple[str, ...] | int:
        if (group, dtype) not in self._found:
            self._check()
            settings = in_training(self.optimizer, self.optimizer.param_groups[group])
            try:
                self._found[group, dtype] = probe_state_names(self.optimizer, settings, dtype)
            except UsageError:
                self._found[group, dtype] = probe_parameters(self.optimizer, settings, dtype)
        return self._found[group, dtype]

    def _check(self) -> None:
        """Raise if the optimizer is known to need more than updates."""
        for optimizer in single_optimizers(self.optimizer):
            kind = type(optimizer).__name__
            if kind in _REFUSED:
                raise refusal(kind, *_REFUSED[kind])
            if exchanges_weights(optimizer) and optimizer is not self.optimizer:
                reason = "its train() and eval() exchange all weights, and combined optimizers have no such methods"
                raise refusal(kind, reason, "give all parameters to it, and prepare it alone")
            check_wrapped(optimizer)
            check_single_settings(optimizer)
