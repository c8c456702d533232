"""The loss scale: when it changes, and what it is applied to."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from zero_infinity.optim import loss_scale as loss_scales
from zero_infinity.optim.loss_scale import CastInputs, LossScale, ScaleOutputs


def test_an_overflow_halves_the_scale_and_skips_a_step() -> None:
    loss_scale = LossScale()
    assert loss_scale.scale == 2.0**16
    loss_scale.judge(overflowed=True)
    assert (loss_scale.scale, loss_scale.num_skipped) == (2.0**15, 1)


def test_the_scale_of_this_step_is_undone_and_not_that_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_scales, "_GROW_AFTER", 1)
    loss_scale = LossScale()
    factor = loss_scale.unscale_factor([torch.tensor(1.0), torch.tensor(2.0)])
    assert factor is not None
    assert factor.item() == 2.0**-16
    assert (loss_scale.scale, loss_scale.num_skipped) == (2.0**17, 0)


@pytest.mark.parametrize("overflow", [float("inf"), float("nan")])
def test_one_norm_that_is_not_finite_skips_the_step(overflow: float) -> None:
    loss_scale = LossScale()
    assert loss_scale.unscale_factor([torch.tensor(1.0), torch.tensor(overflow)]) is None
    assert (loss_scale.scale, loss_scale.num_skipped) == (2.0**15, 1)


def test_a_long_run_without_overflow_doubles_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_scales, "_GROW_AFTER", 3)
    loss_scale = LossScale()
    for overflowed in (False, False, True, False, False):
        loss_scale.judge(overflowed=overflowed)
    assert loss_scale.scale == 2.0**15, "the run began anew"
    loss_scale.judge(overflowed=False)
    assert loss_scale.scale == 2.0**16
    for _ in range(3):
        loss_scale.judge(overflowed=False)
    assert loss_scale.scale == 2.0**17


def test_a_checkpoint_has_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_scales, "_GROW_AFTER", 2)
    first, second = LossScale(), LossScale()
    for overflowed in (True, False):
        first.judge(overflowed=overflowed)
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()
    second.judge(overflowed=False)
    assert second.scale == 2.0**16


class Output(NamedTuple):
    logits: torch.Tensor
    extra: Any


def test_gradients_are_scaled_where_they_enter_the_model_and_values_are_not() -> None:
    loss_scale = LossScale()
    x, y = (torch.ones(2, requires_grad=True) for _ in range(2))
    numbers = torch.arange(3)
    output = ScaleOutputs(loss_scale)(nn.Identity(), (), Output(x * 2, {"more": [y * 3], "numbers": numbers, "n": 4}))
    assert isinstance(output, Output)
    assert output.logits.tolist() == [2, 2]
    assert output.extra["numbers"] is numbers
    assert output.extra["n"] == 4
    (output.logits.sum() + output.extra["more"][0].sum()).backward()
    assert x.grad is not None
    assert y.grad is not None
    assert x.grad.tolist() == [2 * loss_scale.scale] * 2
    assert y.grad.tolist() == [3 * loss_scale.scale] * 2


def test_outputs_without_a_gradient_stay_as_they_are() -> None:
    tensor = torch.ones(2)
    assert ScaleOutputs(LossScale())(nn.Identity(), (), tensor) is tensor


def test_the_scale_is_that_of_the_backward_not_of_the_forward() -> None:
    loss_scale = LossScale()
    x = torch.ones(1, requires_grad=True)
    output = ScaleOutputs(loss_scale)(nn.Identity(), (), x)
    loss_scale.judge(overflowed=True)
    output.backward()
    assert x.grad is not None
    assert x.grad.item() == 2.0**15


def test_floating_point_inputs_are_cast_wherever_they_are() -> None:
    numbers = torch.arange(3)
    args, kwargs = CastInputs(torch.float16)(
        nn.Identity(), (torch.ones(2), [numbers]), {"x": torch.ones(1), "flag": True}
    )
    assert args[0].dtype == torch.float16
    assert args[1][0] is numbers
    assert kwargs["x"].dtype == torch.float16
    assert kwargs["flag"] is True
