"""Probes whether an optimizer updates each parameter on its own, and measures the states it keeps for one.

As with `elementwise_probe.py` this is tested: steps on all parameters together are compared with steps on each alone,
with its state moved in between, as records move it. The forms of states are measured on parameters of the true shape:
some optimizers keep factors of a matrix, cut large ones into blocks, or quantise only those above a size.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from zero_infinity.errors import UsageError
from zero_infinity.optim.group_settings import advanced, same
from zero_infinity.optim.nested_state import flat_state, nested_state, tensors_of
from zero_infinity.optim.probe_steps import PlainSteps, draw, first_line, probed_calls
from zero_infinity.optim.state_slots import TensorForm, WholeState
from zero_infinity.optim.update_rule import UpdateRule, hyperparameters_of
from zero_infinity.params.unit import dense_stride

# By number of dimensions; several of each, so that an optimizer that mixes parameters is found out.
_SHAPES: dict[int, list[tuple[int, ...]]] = {
    0: [(), ()],
    1: [(70,), (33,)],
    2: [(13, 37), (40, 24), (80, 128)],
    3: [(4, 6, 10), (6, 8, 3)],
    4: [(6, 4, 3, 3), (8, 6, 2, 2)],
}


def probe_parameters(optimizer: Optimizer, group: dict[str, Any], dtype: torch.dtype) -> int:
    """Return after how many steps states keep their names; raises `UsageError` if parameters depend on each other."""
    kind = type(optimizer).__name__
    dims = dict.fromkeys(parameter.dim() for parameter in group["params"] if parameter.numel())
    starts, gradients = draw([shape for dim in dims for shape in _SHAPES.get(dim, [(2,) * dim, (3,) * dim])], dtype)
    names: list[list[tuple[str, ...]]] = []
    with torch.random.fork_rng(devices=[]):
        try:
            together = PlainSteps(optimizer, group, starts)
            together.step(gradients[0])
        except Exception as error:
            raise refusal(kind, f"it fails on parameters of its own ({first_line(error)})") from error
        try:
            alone = [_Alone(optimizer, group, start) for start in starts]
            for number, (now, method) in enumerate(probed_calls(optimizer, gradients)):
                if number:
                    together.step(now, method)
                for one, gradient in zip(alone, now, strict=True):
                    one.step(gradient, method)
                check_kept(kind, together)
                _compare(kind, together, alone)
                names.append([tuple(one.state) for one in alone])
        except (UsageError, TypeError) as error:
            raise error if isinstance(error, UsageError) else refusal(kind, first_line(error)) from error
        except Exception as error:
            raise refusal(kind, f"it fails on a parameter alone ({first_line(error)})") from error
    return next(number + 1 for number, found in enumerate(names) if found == names[-1])


def measure_state(
    optimizer: Optimizer, group: dict[str, Any], parameter: torch.Tensor, dtype: torch.dtype, num_steps: int
) -> WholeState:
    """Return the state of a parameter of this shape after `num_steps` steps."""
    shape, stride = parameter.shape, dense_stride(parameter)
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        one = _Alone(optimizer, group, torch.empty_strided(shape, stride, dtype=dtype).normal_(generator=generator))
        for _ in range(num_steps):
            one.step(torch.empty_strided(shape, stride, dtype=dtype).normal_(generator=generator))
    return WholeState(tuple(one.state), form_of(one.state))


def form_of(state: Mapping[str, Any]) -> dict[str, TensorForm]:
    """The forms of the tensors of a flat state."""
    return {name: TensorForm(t.shape, dense_stride(t), t.dtype) for name, t in tensors_of(state).items()}


class _Alone:
    """One parameter, updated as the engine does: its state is moved after each step."""

    def __init__(self, optimizer: Optimizer, group: dict[str, Any], start: torch.Tensor) -> None:
        self.values = start.clone()
        self.group = {**copy.deepcopy(hyperparameters_of(group)), "params": group["params"]}
        self.state: dict[str, Any] = {}
        self._rules = {"step": UpdateRule(optimizer)}
        self._optimizer = optimizer

    def step(self, gradient: torch.Tensor, method: str = "step") -> None:
        gradient = gradient.clone()
        rule = self._rules.setdefault(method, UpdateRule(self._optimizer, method))
        self.state = flat_state(rule.apply(self.values, gradient, nested_state(self.state), {}, self.group))
        for name, value in tensors_of(self.state).items():
            self._check(name, value, gradient)
            form = TensorForm(value.shape, dense_stride(value), value.dtype)
            self.state[name] = form.of(form.flattened(value).clone())
        self.group.update(advanced(rule, self.group))

    def _check(self, name: str, value: torch.Tensor, gradient: torch.Tensor) -> None:
        if type(value) is not torch.Tensor or value.layout is not torch.strided or value.device.type != "cpu":
            reason = f"state {name!r} is a {type(value).__name__} ({value.layout}, {value.device}), not plain memory"
            raise refusal(type(self._optimizer).__name__, reason)
        for what, other in (("the gradient", gradient), ("the parameter", self.values)):
            if value.numel() and value.untyped_storage().data_ptr() == other.untyped_storage().data_ptr():
                raise refusal(type(self._optimizer).__name__, f"state {name!r} is {what} itself, not a copy of it")


def _compare(kind: str, together: PlainSteps, alone: list[_Alone]) -> None:
    """Raise if the two ways have come to different values."""
    for name, value in together.group.items():
        if name != "params" and not all(same(one.group.get(name), value) for one in alone):
            raise refusal(kind, f"it computes {name!r} in its parameter group from all gradients together")
    if any(not isinstance(key, torch.Tensor) for key in together.states):
        raise refusal(kind, "it keeps a state that belongs to no parameter")
    for one, value in zip(alone, together.values, strict=True):
        if not _equal(one.values, value):
            raise refusal(kind, "a step on one parameter alone differs from a step on all of them")
        state = flat_state(together.states.get(value, {}))
        if state.keys() != one.state.keys():
            raise refusal(kind, "the state of a parameter depends on other parameters")
        for name, found in one.state.items():
            if not (_equal(found, state[name]) if isinstance(found, torch.Tensor) else same(found, state[name])):
                raise refusal(kind, f"state {name!r} depends on other parameters")


def check_kept(kind: str, steps: PlainSteps) -> None:
    """Raise if the optimizer keeps a gradient on itself, from one step to the next."""
    name = steps.keeps_a_gradient()
    if name is not None:
        reason = f"it keeps a gradient in its attribute {name!r}, and the memory of gradients is used again"
        raise refusal(kind, reason, "a copy of the gradient, in the optimizer's `state` of the parameter")


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one.nan_to_num(), other.nan_to_num())


def refusal(kind: str, reason: str, fix: str | None = None) -> UsageError:
    """The error for an optimizer; `fix`: the nearest thing that works."""
    near = "an optimizer that updates each parameter on its own: AdamW, SGD, Adagrad, RMSprop, Lion, Muon, Adafactor, "
    return UsageError(f"the optimizer {kind} cannot be streamed: {reason}\n  fix:   {fix or near + 'LAMB, ...'}")
