"""Probes whether an optimizer is element-wise, and which per-element state it keeps.

This is tested, not assumed: some steps of the optimizer itself on whole parameters are compared with updates of slices
as the engine does them. Those that are not are probed once more, with whole parameters (`parameter_probe.py`).
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.optim import Optimizer

from zero_infinity.errors import UsageError
from zero_infinity.optim.group_settings import advanced, same
from zero_infinity.optim.parameter_probe import check_kept
from zero_infinity.optim.probe_steps import PlainSteps, draw, first_line, probed_calls
from zero_infinity.optim.update_rule import Scalars, UpdateRule, copy_scalars, hyperparameters_of, split_state

# A matrix and a vector, cut into several slices with a tail that is not a multiple of the vector width; and a matrix
# that is large enough, whole and in slices, for optimizers that treat small parameters differently (8-bit states).
_SHAPES_AND_CUTS: list[tuple[tuple[int, ...], int]] = [((13, 37), 192), ((70,), 32), ((80, 128), 4160)]


def probe_state_names(optimizer: Optimizer, group: dict[str, Any], dtype: torch.dtype) -> tuple[str, ...]:
    """Return the names of this group's per-element state; raises `UsageError` if slices differ from the whole."""
    kind = type(optimizer).__name__
    starts, gradients = draw([shape for shape, _ in _SHAPES_AND_CUTS], dtype)
    with torch.random.fork_rng(devices=[]):
        try:
            whole = PlainSteps(optimizer, group, starts)
            whole.step(gradients[0])
        except Exception as error:
            raise UsageError(_refusal(kind, f"it fails on parameters of its own ({first_line(error)})")) from error
        try:
            sliced = [
                _Sliced(optimizer, group, start, cut) for start, (_, cut) in zip(starts, _SHAPES_AND_CUTS, strict=True)
            ]
            for number, (now, method) in enumerate(probed_calls(optimizer, gradients)):
                if number:
                    whole.step(now, method)
                for one, gradient in zip(sliced, now, strict=True):
                    one.step(gradient, method)
                check_kept(kind, whole)
                _compare(kind, whole, sliced)
        except UsageError:
            raise
        except Exception as error:
            reason = f"it fails on a flat slice of a parameter ({first_line(error)})"
            raise UsageError(_refusal(kind, reason)) from error
    names = {one.names for one in sliced}
    if len(names) > 1:
        raise UsageError(_refusal(kind, "its states depend on the size of a parameter"))
    return names.pop()


class _Sliced:
    """One parameter, updated in slices as the engine does."""

    def __init__(self, optimizer: Optimizer, group: dict[str, Any], start: torch.Tensor, cut: int) -> None:
        self.values = start.clone()
        self.group = copy.deepcopy(hyperparameters_of(group))
        self.names: tuple[str, ...] = ()
        self._optimizer = optimizer
        self._rules = {"step": UpdateRule(optimizer)}
        self._cut = cut
        self._pieces = list(self.values.view(-1).split(cut))
        self._states: list[dict[str, torch.Tensor]] = [{} for _ in self._pieces]
        self._scalars: Scalars = {}

    def step(self, gradient: torch.Tensor, method: str) -> None:
        rule = self._rules.setdefault(method, UpdateRule(self._optimizer, method))
        scalars: Scalars = {}
        for index, part in enumerate(gradient.view(-1).split(self._cut)):
            piece = self._pieces[index]
            state = rule.apply(piece, part.clone(), self._states[index], copy_scalars(self._scalars), self.group)
            self._states[index], scalars = split_state(state, piece.shape)
            self._check(piece, self._states[index], scalars)
            self.names = tuple(self._states[index])
        self._scalars = scalars
        self.group.update(advanced(rule, self.group))

    def _check(self, piece: torch.Tensor, tensors: dict[str, torch.Tensor], scalars: Scalars) -> None:
        kind = type(self._optimizer).__name__
        for name, value in scalars.items():
            if isinstance(value, torch.Tensor) and value.numel() > 1:
                raise UsageError(_refusal(kind, f"state {name!r} does not have the parameter's shape"))
        for name, value in tensors.items():
            if type(value) is not torch.Tensor:
                reason = f"state {name!r} is a {type(value).__name__}, whose bytes are not one number per element"
                raise UsageError(_refusal(kind, reason))
            if value.dtype != piece.dtype:
                raise UsageError(_refusal(kind, f"state {name!r} is {value.dtype}, and records are {piece.dtype}"))


def _compare(kind: str, whole: PlainSteps, sliced: list[_Sliced]) -> None:
    """Raise if the two ways have come to different values."""
    for name, value in whole.group.items():
        if name != "params" and not all(same(one.group.get(name), value) for one in sliced):
            reason = f"it computes {name!r} in its parameter group from all gradients together"
            raise UsageError(_refusal(kind, reason))
    if not all(torch.equal(one.values, value) for one, value in zip(sliced, whole.values, strict=True)):
        raise UsageError(_refusal(kind, "updating a slice of a parameter differs from updating the whole"))


def _refusal(kind: str, reason: str) -> str:
    return (
        f"the optimizer {kind} cannot be streamed in slices: {reason}\n"
        "  fix:   use an element-wise optimizer (AdamW, Adam, SGD, Adagrad, RMSprop, Adamax, NAdam, RAdam, Lion, ...)"
    )
