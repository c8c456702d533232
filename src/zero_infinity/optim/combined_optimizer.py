"""Several optimizers as one: Muon for matrices and AdamW for the rest, as training loops write them.

It is a real `torch.optim.Optimizer`, which also works in plain PyTorch. Each parameter group says in "optimizer" whose
it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from zero_infinity._torch import copy_without_step_hooks, plain_step
from zero_infinity.errors import UsageError

_OWNER = "optimizer"


class CombinedOptimizer(Optimizer):
    """The groups of several optimizers. A step steps each of them over its own groups."""

    def __init__(self, *optimizers: Optimizer) -> None:
        if len(optimizers) < 2 or not all(isinstance(one, Optimizer) for one in optimizers):
            given = ", ".join(type(one).__name__ for one in optimizers)
            raise UsageError(
                f"zi.combine_optimizers takes two or more optimizers, and got ({given})\n"
                "  fix:   zi.combine_optimizers(muon, adamw)"
            )
        self.members: dict[str, Optimizer] = {}
        for one in optimizers:
            kind = type(one).__name__
            same_kind = sum(type(other) is type(one) for other in self.members.values())
            self.members[f"{kind} {same_kind + 1}" if same_kind else kind] = one
        try:
            super().__init__([{"params": group["params"]} for one in optimizers for group in one.param_groups], {})
        except ValueError as error:
            raise UsageError(
                f"these optimizers cannot be combined: {error}\n  fix:   give each parameter to one of them"
            ) from error
        for name, one in self.members.items():
            for group in one.param_groups:
                group[_OWNER] = name
            self.state.update(one.state)
        self.param_groups = [group for one in optimizers for group in one.param_groups]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step each optimizer. Their own step hooks are not called."""
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        for name, one in self.members.items():
            groups = [group for group in self.param_groups if group[_OWNER] == name]
            if groups:
                stepper = copy_without_step_hooks(one)
                stepper.state, stepper.param_groups = self.state, groups
                plain_step(type(one))(stepper)
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the states of one that was combined in the same way."""
        owners = [group.get(_OWNER) for group in state_dict["param_groups"]]
        if owners != [group[_OWNER] for group in self.param_groups]:
            raise UsageError(f"the state is of groups of {owners}, and these are of {list(self.members)}")
        super().load_state_dict(state_dict)
        for name, one in self.members.items():  # schedulers of a member change its groups
            one.param_groups = [group for group in self.param_groups if group[_OWNER] == name]


def combine_optimizers(*optimizers: Optimizer) -> CombinedOptimizer:
    """Combine optimizers into one for `prepare`, such as Muon for matrices and AdamW for the rest.

    Args:
        optimizers: Each over parameters of its own. Their parameter groups are shared, so that learning-rate schedulers
            of each still work. Step with what `prepare` returns.

    Returns:
        An optimizer that also works without `prepare`.
    """
    return CombinedOptimizer(*optimizers)


def owner_of_group(optimizer: Optimizer, group: Mapping[str, Any]) -> Optimizer:
    """The optimizer that updates the group: `optimizer` itself, or one that it combines."""
    return optimizer.members[group[_OWNER]] if isinstance(optimizer, CombinedOptimizer) else optimizer


def single_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizer itself, and those that it combines."""
    return [optimizer, *(optimizer.members.values() if isinstance(optimizer, CombinedOptimizer) else ())]
