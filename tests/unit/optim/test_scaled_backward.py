"""What a backward reaches, and what its modes leave behind. (What is scaled: tests/equivalence/test_loss_scaling.py.)"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import BaseTorchFunctionMode
from torch.utils.checkpoint import checkpoint

from zero_infinity._torch import change_function_modes
from zero_infinity.optim.loss_scale import LossScale
from zero_infinity.optim.scaled_backward import BackwardScaling, Leaves


@pytest.fixture(autouse=True)
def no_modes() -> Iterator[None]:
    """Of models of earlier tests, which may be collected at any moment."""
    kept: list[Any] = []

    def take(modes: list[Any]) -> list[Any]:
        kept.extend(modes)
        return []

    change_function_modes(take)
    yield
    change_function_modes(lambda _: kept)


def num_modes() -> int:
    return torch._C._len_torch_function_stack()


def test_leaves_of_a_graph_are_found_once() -> None:
    x, layer = torch.ones(2, requires_grad=True), nn.Linear(2, 2)
    leaves = Leaves((layer(layer(x) * x).sum(),), None)
    assert {id(leaf) for leaf in leaves.others} == {id(x), id(layer.weight), id(layer.bias)}
    assert len(leaves.others) == 3
    assert not leaves.scales
    assert not leaves.has_reentrant


def test_only_inputs_count_if_there_are_any() -> None:
    x, layer = torch.ones(2, requires_grad=True), nn.Linear(2, 2)
    leaves = Leaves((layer(x).sum(),), [x])
    assert [id(leaf) for leaf in leaves.others] == [id(x)]


def test_a_reentrant_checkpoint_is_seen() -> None:
    x, layer = torch.ones(2, requires_grad=True), nn.Linear(2, 2)
    assert Leaves((checkpoint(layer, x, use_reentrant=True).sum(),), None).has_reentrant


def test_others_are_unscaled_until_the_end() -> None:
    x = torch.ones(2, requires_grad=True)
    loss = x.sum()
    with ExitStack() as stack:
        Leaves((loss,), None).unscale_others(stack, 4.0)
        loss.backward(torch.tensor(4.0))
    x.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2, 2]


def test_the_mode_is_below_the_users_and_goes_at_the_end_of_the_step() -> None:
    before, loss_scale = num_modes(), LossScale()
    scaling = BackwardScaling(loss_scale)
    with BaseTorchFunctionMode():
        scaling.expect_backward()
        scaling.expect_backward()
        assert num_modes() == before + 2
    assert num_modes() == before + 1
    with BaseTorchFunctionMode():
        scaling.end_step()
        assert num_modes() == before + 1
    assert num_modes() == before


def test_without_gradients_no_backward_is_expected() -> None:
    before = num_modes()
    with torch.no_grad():
        BackwardScaling(LossScale()).expect_backward()
    assert num_modes() == before


def test_the_mode_of_a_model_that_is_gone_goes_with_the_next() -> None:
    before, loss_scale = num_modes(), LossScale()
    gone = LossScale()
    BackwardScaling(gone).expect_backward()
    del gone
    scaling = BackwardScaling(loss_scale)
    scaling.expect_backward()
    assert num_modes() == before + 1
    scaling.end_step()
    assert num_modes() == before


@pytest.mark.parametrize("is_gone", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_another_model_is_compiled_while_a_backward_is_expected(is_gone: bool) -> None:
    loss_scale = LossScale()
    scaling = BackwardScaling(loss_scale)
    scaling.expect_backward()
    layer, x = nn.Linear(2, 2), torch.ones(2)
    if is_gone:
        del loss_scale, scaling
    try:
        assert torch.equal(torch.compile(layer, backend="eager", fullgraph=True)(x), layer(x))
    finally:
        torch._dynamo.reset()
        if not is_gone:
            scaling.end_step()
