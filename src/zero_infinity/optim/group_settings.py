"""Carries what an optimizer writes into its parameter groups (a step count, a schedule of its own) from step to step.

An update sees the settings of its step, whichever chunk it is: so writes of single updates are dropped, and the groups
are advanced once a step, as by a step of the optimizer on one number (or a matrix of one). The probe has compared that
with the optimizer itself: what depends on gradients cannot be carried, and such an optimizer is refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from zero_infinity.optim.update_rule import UpdateRule, exchanges_weights, hyperparameters_of

Group = dict[str, Any]


class GroupSettings:
    """The settings of an optimizer's groups between steps."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._rule = UpdateRule(optimizer)
        # Most optimizers write nothing, and lose no time here.
        self._written = any(advanced(self._rule, in_training(optimizer, group)) for group in optimizer.param_groups)

    def advance(self) -> None:
        """A step was taken."""
        if self._written:
            for group in self._optimizer.param_groups:
                group.update(advanced(self._rule, group))


def advanced(rule: UpdateRule, group: Group) -> Group:
    """Return the settings of a group that a step changes, with their new values."""
    before = hyperparameters_of(group)
    shape = (1,) * max([1, *(parameter.dim() for parameter in group.get("params", ())[:1])])
    rule.apply(torch.zeros(shape), torch.ones(shape), {}, {}, before)
    after = {name: value for name, value in rule.settings.items() if name != "params"}
    return {name: value for name, value in after.items() if name not in before or not same(before[name], value)}


def in_training(optimizer: Optimizer, group: Group) -> Group:
    """Return a group as it is while the optimizer trains: schedule-free ones do not step before `train()`."""
    return {**group, **advanced(UpdateRule(optimizer, "train"), group)} if exchanges_weights(optimizer) else group


def same(one: Any, other: Any) -> bool:
    """True if two settings are equal."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        both = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
        return both and one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)
