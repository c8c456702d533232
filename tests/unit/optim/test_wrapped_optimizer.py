"""What may be assigned to `optimizer.state`. That it arrives is in tests/equivalence and tests/multirank."""

from __future__ import annotations

import pytest
import torch
from support.prepared import prepare_small

import zero_infinity as zi


def test_a_state_that_is_not_the_parameters_own_is_refused() -> None:
    model, optimizer, _ = prepare_small()
    weight = model[0].weight
    state = optimizer.state[weight]
    with pytest.raises(zi.UsageError, match=r"'exp_avg' of '0.weight' is \[3, 4\], and the parameter \[4, 4\]"):
        optimizer.state[weight] = {**state, "exp_avg": torch.zeros(3, 4)}
    with pytest.raises(zi.UsageError, match=r"lacks \['exp_avg_sq'\]"):
        optimizer.state[weight] = {"step": state["step"], "exp_avg": state["exp_avg"]}
    with pytest.raises(zi.UsageError, match="is not trained by this optimizer"):
        optimizer.state[torch.zeros(2)] = state
    assert torch.equal(optimizer.state[weight]["exp_avg"], state["exp_avg"])
