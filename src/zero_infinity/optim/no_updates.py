"""The optimizer of a model that is not trained: it has no parameters, so there are no records and no gradients."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from torch.optim import Optimizer


class NoUpdates(Optimizer):
    """Stands for the optimizer that a model prepared for inference does not have."""

    def __init__(self) -> None:
        # The base class refuses to have no parameters.
        self.defaults = {}
        self.state = defaultdict(dict)
        self.param_groups = []

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Nothing to do."""


def is_trained(optimizer: Optimizer) -> bool:
    """True if it has parameters to update; every other optimizer than `NoUpdates` has."""
    return bool(optimizer.param_groups)
