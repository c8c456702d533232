"""The optimizer of a model that is not trained."""

from __future__ import annotations

import torch
from torch import nn

from zero_infinity.optim.no_updates import NoUpdates, is_trained


def test_only_it_has_nothing_to_train() -> None:
    assert not is_trained(NoUpdates())
    assert is_trained(torch.optim.SGD(nn.Linear(2, 2).parameters()))


def test_a_step_changes_nothing() -> None:
    nothing = NoUpdates()
    nothing.step()
    assert not nothing.param_groups
    assert not nothing.state
