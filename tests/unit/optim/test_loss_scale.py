"""The loss scale: when it changes, and what it is applied to."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zero_infinity.errors import UsageError
from zero_infinity.optim import loss_scale as loss_scales
from zero_infinity.optim.loss_scale import CastInputs, LossScale


def test_an_overflow_halves_the_scale_and_skips_a_step() -> None:
    loss_scale = LossScale()
    assert loss_scale.scale == 2.0**16
    loss_scale.judge(overflowed=True)
    assert (loss_scale.scale, loss_scale.num_skipped) == (2.0**15, 1)


def test_finite_norms_do_not_skip_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_scales, "_GROW_AFTER", 1)
    loss_scale = LossScale()
    assert not loss_scale.skips([torch.tensor(1.0), torch.tensor(2.0)])
    assert (loss_scale.scale, loss_scale.num_skipped) == (2.0**17, 0)


@pytest.mark.parametrize("overflow", [float("inf"), float("nan")])
def test_one_norm_that_is_not_finite_skips_the_step(overflow: float) -> None:
    loss_scale = LossScale()
    assert loss_scale.skips([torch.tensor(1.0), torch.tensor(overflow)])
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


def test_a_gradient_that_arrives_is_divided_by_what_its_backward_began_with() -> None:
    loss_scale = LossScale()
    divisors: list[float] = []
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda _: divisors.append(loss_scale.divisor))
    with loss_scale.applying(8.0):
        x.sum().backward()
    assert divisors == [8.0]
    assert loss_scale.divisor == 1.0, "set by hand"
    with pytest.raises(UsageError, match="loss scale"):
        x.sum().backward()


def test_floating_point_inputs_are_cast_wherever_they_are() -> None:
    numbers = torch.arange(3)
    args, kwargs = CastInputs(torch.float16)(
        nn.Identity(), (torch.ones(2), [numbers]), {"x": torch.ones(1), "flag": True}
    )
    assert args[0].dtype == torch.float16
    assert args[1][0] is numbers
    assert kwargs["x"].dtype == torch.float16
    assert kwargs["flag"] is True
