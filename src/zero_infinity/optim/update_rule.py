"""Applies the user's `torch.optim` class to slices of parameters.

An element-wise optimizer computes the same bits for a slice as for the whole, so states can be streamed in chunks and
no optimizer has to be reimplemented. Whether a class *is* element-wise is tested by `elementwise_probe.py`.

Scalars of the state (a step count) stay in memory, per parameter; tensors of the parameter's shape go to the record.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from zero_infinity._torch import copy_without_step_hooks, plain_step
from zero_infinity.errors import UsageError
from zero_infinity.params.dynamo import no_compiling

Scalars = dict[str, Any]
Hyperparameters = dict[str, Any]


class UpdateRule:
    """One optimizer class with one parameter group's settings. Not thread-safe: one worker calls it."""

    def __init__(self, optimizer: Optimizer, method: str = "step") -> None:
        """`method`: what is called instead of `step` (`weight_exchange.py`)."""
        # A shallow copy has the class's settings but none of the user's step hooks, states or parameters.
        self._stepper = copy_without_step_hooks(optimizer)
        self.kind = type(optimizer).__name__
        self._step = plain_step(type(optimizer)) if method == "step" else getattr(type(optimizer), method)

    def apply(
        self,
        values: torch.Tensor,
        gradient: torch.Tensor,
        state: dict[str, torch.Tensor],
        scalars: Scalars,
        hyperparameters: Hyperparameters,
    ) -> dict[str, Any]:
        """Run one step on `values` in place; returns the new state (the given tensors where there were any).

        What the optimizer writes into its group is in `settings` until the next call.
        """
        return self.apply_together([(values, gradient, {**state, **scalars})], hyperparameters)[0]

    def apply_together(
        self, slices: Sequence[tuple[torch.Tensor, torch.Tensor, dict[str, Any]]], hyperparameters: Hyperparameters
    ) -> list[dict[str, Any]]:
        """Run one step on several slices: values, which change in place, their gradient and their state."""
        self._stepper.state = defaultdict(dict)
        for values, gradient, state in slices:
            values.grad = gradient
            if state:
                self._stepper.state[values] = {n: _placed(v, values, hyperparameters) for n, v in state.items()}
        # Cloned: an optimizer may count in a tensor, and the next slices need the settings of the same step.
        group = {**hyperparameters_of(hyperparameters), "params": [values for values, _, _ in slices]}
        self._stepper.param_groups = [group]
        memory = [values.detach() for values, _, _ in slices]
        with no_compiling():
            self._step(self._stepper)
        for (values, _, _), kept in zip(slices, memory, strict=True):
            values.grad = None
            if values.data_ptr() != kept.data_ptr() or values.shape != kept.shape:
                self._take_new_memory(values, kept)
        return [self._stepper.state.pop(values, {}) for values, _, _ in slices]

    def _take_new_memory(self, values: torch.Tensor, kept: torch.Tensor) -> None:
        """The optimizer has given a parameter another tensor (`p.data = ...`) instead of changing it in place."""
        if values.shape != kept.shape:
            raise UsageError(
                f"the optimizer {self.kind} cannot be streamed: it changes the shape of a parameter from "
                f"{list(kept.shape)} to {list(values.shape)}\n"
                "  fix:   an optimizer whose step leaves shapes as they are; reshape before zi.prepare"
            )
        kept.copy_(values)
        values.data = kept

    @property
    def settings(self) -> Hyperparameters:
        """The settings of the group after the last update."""
        found: Hyperparameters = self._stepper.param_groups[0]
        return found


def _placed(value: Any, values: torch.Tensor, hyperparameters: Hyperparameters) -> Any:
    """Return a state where this update needs it: a step count that was loaded may come from another kind of place."""
    if not isinstance(value, torch.Tensor) or value.dim() > 0 or value.device == values.device:
        return value
    counts_there = values.is_cpu or hyperparameters.get("fused") or hyperparameters.get("capturable")
    return value.to(values.device) if counts_there else value


def exchanges_weights(optimizer: Optimizer) -> bool:
    """True if its `train()` and `eval()` exchange the weights to train with and those to evaluate with."""
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))


def hyperparameters_of(group: dict[str, Any]) -> Hyperparameters:
    """Return the current settings of a parameter group, isolated from later changes (by an LR scheduler)."""
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in group.items()
        if name != "params"
    }


def split_state(state: dict[str, Any], shape: torch.Size) -> tuple[dict[str, torch.Tensor], Scalars]:
    """Split a state into tensors with one value per element, and the rest."""
    tensors: dict[str, torch.Tensor] = {}
    scalars: Scalars = {}
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.shape == shape and value.dim() > 0:
            tensors[name] = value
        else:
            scalars[name] = value
    return tensors, scalars


def copy_scalars(scalars: Scalars) -> Scalars:
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in scalars.items()}
