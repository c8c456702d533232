from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import zero_infinity as zi
from zero_infinity.optim import update_kind
from zero_infinity.optim.update_kind import UpdateKinds
from zero_infinity.params.unit import make_unit


def of(kind: type[Optimizer]) -> UpdateKinds:
    return UpdateKinds(kind([nn.Parameter(torch.zeros(2, 2))], lr=0.1))  # type: ignore[call-arg]


def test_slices_are_preferred() -> None:
    adamw, muon = of(torch.optim.AdamW), of(torch.optim.Muon)
    assert not adamw.is_whole(0, torch.float32)
    assert adamw.element_names(0, torch.float32) == ("exp_avg", "exp_avg_sq")
    assert muon.is_whole(0, torch.float32)


def test_each_group_and_each_shape_is_probed_once() -> None:
    kinds = of(torch.optim.Muon)
    tensors = [("a", nn.Parameter(torch.zeros(4, 6))), ("b", nn.Parameter(torch.zeros(4, 6)))]
    unit = make_unit("unit", tensors, dtype=torch.float32, compute_dtype=torch.float32, device=torch.device("cpu"))
    with (
        mock.patch.object(update_kind, "probe_parameters", side_effect=update_kind.probe_parameters) as probed,
        mock.patch.object(update_kind, "measure_state", side_effect=update_kind.measure_state) as measured,
    ):
        states = [kinds.whole_state(parameter, torch.float32) for parameter in unit.parameters]
    assert states[0].forms["momentum_buffer"].shape == (4, 6)
    assert states[0] is states[1]
    assert (probed.call_count, measured.call_count) == (1, 1)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (torch.optim.LBFGS, "closure that evaluates the model several times"),
        (torch.optim.SparseAdam, "rows that a batch has touched"),
    ],
)
def test_what_is_known_to_need_more_than_updates(kind: type[Optimizer], reason: str) -> None:
    with pytest.raises(zi.UsageError, match=reason):
        of(kind).is_whole(0, torch.float32)
