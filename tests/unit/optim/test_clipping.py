"""Clipping has the bits of torch's own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from zero_infinity.optim.clipping import clip_factor, global_norms, total_norm
from zero_infinity.params import offloaded_param
from zero_infinity.params.unit import make_unit

DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def parameters_with(dtypes: list[torch.dtype], seed: int) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for number, dtype in enumerate(dtypes):
        parameter = nn.Parameter(torch.zeros(3 + number, 5, dtype=dtype))
        parameter.grad = torch.randn(3 + number, 5, generator=generator).to(dtype)
        made.append(parameter)
    return made


def norms_of(parameters: list[nn.Parameter]) -> dict[nn.Parameter, torch.Tensor]:
    return {p: torch.linalg.vector_norm(p.grad) for p in parameters if p.grad is not None}


@given(st.lists(st.sampled_from(DTYPES), min_size=1, max_size=12), st.integers(0, 1000), st.sampled_from([0.1, 1, 1e3]))
def test_the_norm_and_the_clipped_gradients_are_torchs_bit_for_bit(
    dtypes: list[torch.dtype], seed: int, max_norm: float
) -> None:
    """The order in which torch adds up norms of several dtypes decides about the last bit."""
    ours, theirs = parameters_with(dtypes, seed), parameters_with(dtypes, seed)
    expected = nn.utils.clip_grad_norm_(theirs, max_norm)
    norms = norms_of(ours)
    norm, factor = clip_factor(global_norms(norms), ours, max_norm)
    assert norm.dtype == expected.dtype
    assert torch.equal(norm, expected)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.grad is not None
        assert other.grad is not None
        assert torch.equal(mine.grad.mul(factor), other.grad)


def test_parameters_without_a_gradient_and_those_not_asked_for_do_not_count() -> None:
    first, second, third = parameters_with([torch.float32] * 3, 0)
    second.grad = None
    norms = global_norms(norms_of([first, second, third]))
    norm, _ = clip_factor(norms, [first, second], 1.0)
    assert torch.equal(norm, norms[first])


def test_without_gradients_the_norm_is_zero_and_nothing_is_clipped() -> None:
    norm, factor = clip_factor({}, parameters_with([torch.float32], 0), 1.0)
    assert (norm.item(), factor.item()) == (0.0, 1.0)
    assert torch.equal(total_norm([]), nn.utils.clip_grad_norm_([], 1.0))


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_gradients_that_are_not_finite_give_torchs_norm(value: float) -> None:
    (parameter,) = parameters_with([torch.float32], 0)
    assert parameter.grad is not None
    parameter.grad[0, 0] = value
    norm, factor = clip_factor(global_norms(norms_of([parameter])), [parameter], 1.0)
    expected = nn.utils.clip_grad_norm_([parameter], 1.0)
    assert norm.isnan().item() == expected.isnan().item()
    assert norm.isinf().item() == expected.isinf().item()
    assert factor.isnan().item() == expected.isnan().item()


def test_the_norms_of_a_managed_parameter_are_found_by_it() -> None:
    (parameter,) = parameters_with([torch.float32], 0)
    unit = make_unit(
        "layer",
        [("layer.weight", parameter)],
        dtype=torch.float32,
        compute_dtype=torch.float32,
        device=torch.device("cpu"),
    )
    (managed,) = unit.parameters
    parameter.__dict__[offloaded_param.ATTRIBUTE] = managed
    norm, _ = clip_factor(global_norms({managed: torch.tensor(3.0)}), [parameter], 1.0)
    assert norm == 3.0
