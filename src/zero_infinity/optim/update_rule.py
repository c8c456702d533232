"""Applies the user's `torch.optim` class to slices of parameters, after probing that it is element-wise.

An element-wise optimizer computes the same bits for a slice as for the whole, so states can be streamed in chunks and
no optimizer has to be reimplemented. Whether a class *is* element-wise is tested, not assumed: a probe runs it on a
small tensor, whole and in slices, and compares. The probe also finds the per-element state that it keeps.

Scalars of the state (a step count) stay in memory, per parameter; tensors of the parameter's shape go to the record.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch.optim import Optimizer

from zero_infinity._torch import copy_without_step_hooks, plain_step
from zero_infinity.errors import UsageError
from zero_infinity.params.dynamo import no_compiling

Scalars = dict[str, Any]
Hyperparameters = dict[str, Any]

# Large enough for several slices, with a tail that is not a multiple of the vector width.
_PROBE_SHAPE = (13, 37)
_PROBE_CUT = 192
_PROBE_STEPS = 3


class UpdateRule:
    """One optimizer class with one parameter group's settings. Not thread-safe: one worker calls it."""

    def __init__(self, optimizer: Optimizer) -> None:
        # A shallow copy has the class's settings but none of the user's step hooks, states or parameters.
        self._stepper = copy_without_step_hooks(optimizer)
        self._step = plain_step(type(optimizer))

    def apply(
        self,
        values: torch.Tensor,
        gradient: torch.Tensor,
        state: dict[str, torch.Tensor],
        scalars: Scalars,
        hyperparameters: Hyperparameters,
    ) -> dict[str, Any]:
        """Run one step on `values` in place; returns the new state (the given tensors where there were any)."""
        values.grad = gradient
        self._stepper.state = defaultdict(dict)
        if state or scalars:
            self._stepper.state[values] = {**state, **scalars}
        self._stepper.param_groups = [{**hyperparameters, "params": [values]}]
        with no_compiling():
            self._step(self._stepper)
        values.grad = None
        new_state: dict[str, Any] = self._stepper.state.pop(values, {})
        return new_state


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


def probe_state_names(optimizer: Optimizer, group: dict[str, Any], dtype: torch.dtype) -> tuple[str, ...]:
    """Return the names of this group's per-element state; raises `UsageError` if slices differ from the whole."""
    kind = type(optimizer).__name__
    if kind in _REFUSED:
        raise UsageError(_refusal(kind, _REFUSED[kind]))
    rule = UpdateRule(optimizer)
    hyperparameters = hyperparameters_of(group)
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(_PROBE_SHAPE, generator=generator).to(dtype)
    gradients = [torch.randn(_PROBE_SHAPE, generator=generator).to(dtype) for _ in range(_PROBE_STEPS)]
    try:
        whole, names = _run(rule, start, gradients, hyperparameters, cut=start.numel())
        sliced, _ = _run(rule, start, gradients, hyperparameters, cut=_PROBE_CUT)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(_refusal(kind, f"it fails on a flat slice of a parameter ({error})")) from error
    if not torch.equal(whole, sliced):
        raise UsageError(_refusal(kind, "updating a slice of a parameter differs from updating the whole"))
    return names


def _run(
    rule: UpdateRule, start: torch.Tensor, gradients: list[torch.Tensor], hyperparameters: Hyperparameters, cut: int
) -> tuple[torch.Tensor, tuple[str, ...]]:
    values = start.clone()
    names: tuple[str, ...] = ()
    whole = cut >= values.numel()
    pieces = [values] if whole else list(values.view(-1).split(cut))
    states: list[dict[str, Any]] = [{} for _ in pieces]
    for gradient in gradients:
        parts = [gradient] if whole else list(gradient.view(-1).split(cut))
        for index, (piece, part) in enumerate(zip(pieces, parts, strict=True)):
            tensors, scalars = split_state(states[index], piece.shape)
            states[index] = rule.apply(piece, part.clone(), tensors, scalars, hyperparameters)
            for name, value in states[index].items():
                if isinstance(value, torch.Tensor) and value.numel() > 1 and value.shape != piece.shape:
                    raise UsageError(
                        _refusal(type(rule._stepper).__name__, f"state {name!r} does not have the parameter's shape")
                    )
            names = tuple(split_state(states[index], piece.shape)[0])
    return values, names


_REFUSED = {
    "LBFGS": "it needs a closure that evaluates the model several times in one step",
    "SparseAdam": "it needs sparse gradients, which are not streamed",
    "Muon": "it orthogonalises whole matrices, so updating a slice differs from updating the whole",
    "Adafactor": "it keeps row and column statistics of whole matrices",
}


def _refusal(kind: str, reason: str) -> str:
    return (
        f"torch.optim.{kind} cannot be streamed: {reason}\n"
        "  fix:   use an element-wise optimizer (AdamW, Adam, SGD, Adagrad, RMSprop, Adamax, NAdam, RAdam, ...)"
    )
