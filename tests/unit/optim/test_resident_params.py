"""Parameters that no unit has are trained as in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import nn

from zero_infinity.comm.channel import Channel
from zero_infinity.comm.topics import Topic
from zero_infinity.optim.resident_params import ResidentParameters
from zero_infinity.policy.partition import Span


def trained() -> tuple[nn.Parameter, nn.Parameter, torch.optim.Optimizer]:
    generator = torch.Generator().manual_seed(0)
    resident = nn.Parameter(torch.randn(3, dtype=torch.complex64, generator=generator))
    other = nn.Parameter(torch.ones(3))
    for parameter in (resident, other):
        parameter.grad = torch.randn(3, dtype=parameter.dtype, generator=generator)
    return resident, other, torch.optim.Adam([resident, other], lr=0.1)


def test_a_step_updates_them_alone_with_the_bits_of_torch() -> None:
    resident, other, optimizer = trained()
    expected, _, plain = trained()
    residents = ResidentParameters(optimizer, {resident: None})
    assert residents
    for _ in range(2):
        residents.step([])
        plain.step()
    assert torch.equal(resident, expected)
    assert other.tolist() == [1] * 3
    state = residents.state(resident)
    assert state is not None
    assert state["step"] == 2
    assert residents.state(other) is None
    assert other not in optimizer.state


def test_gradients_are_multiplied_by_the_factors_in_their_order() -> None:
    resident, _, optimizer = trained()
    assert resident.grad is not None
    expected = resident.grad * torch.tensor(0.3) * torch.tensor(0.7)
    ResidentParameters(optimizer, {resident: None}).step([torch.tensor(0.3), torch.tensor(0.7)])
    assert torch.equal(resident.grad, expected)


def test_the_users_hooks_are_not_called_for_a_part_of_a_step() -> None:
    resident, _, optimizer = trained()
    calls: list[object] = []
    optimizer.register_step_pre_hook(lambda *args: calls.append(args))
    ResidentParameters(optimizer, {resident: None}).step([])
    assert calls == []


def test_without_any_there_is_nothing_to_do() -> None:
    _, other, optimizer = trained()
    residents = ResidentParameters(optimizer, {})
    assert not residents
    residents.step([])
    assert other.tolist() == [1] * 3
    assert residents.norms() == {}


def test_gradients_are_dropped_or_set_to_zero() -> None:
    resident, _, optimizer = trained()
    residents = ResidentParameters(optimizer, {resident: None})
    assert resident.grad is not None
    assert torch.equal(residents.norms()[resident], torch.linalg.vector_norm(resident.grad))
    residents.zero_grad(set_to_none=False)
    assert resident.grad.tolist() == [0] * 3
    residents.zero_grad(set_to_none=True)
    assert resident.grad is None
    assert residents.norms() == {}


class OtherRank:
    """Rank 1's channel to a rank whose gradients are all 2, where it has some."""

    rank, num_ranks = 1, 2

    def __init__(self, has: list[bool]) -> None:
        self._has = has

    def agree(self, _: Topic, say: Sequence[int]) -> list[list[int]]:
        return [[*map(int, self._has)], list(say)]

    def gather(self, _: Topic, wholes: Sequence[tuple[torch.Tensor, Sequence[Span]]]) -> None:
        for whole, spans in wholes:
            whole[spans[0].start : spans[0].stop] = 2


def test_gradients_are_averaged_and_a_rank_without_one_counts_as_zeros() -> None:
    parameters = [nn.Parameter(torch.zeros(2, dtype=torch.complex64)) for _ in range(3)]
    parameters[0].grad = torch.full((2,), 4 + 6j)
    empty = nn.Parameter(torch.zeros(0))
    empty.grad = torch.zeros(0)
    optimizer = torch.optim.SGD([*parameters, empty], lr=1)
    residents = ResidentParameters(optimizer, dict.fromkeys([*parameters, empty]))
    residents.average(cast(Channel, OtherRank([True, True, False, False])))
    both, theirs, nobodys = (parameter.grad for parameter in parameters)
    assert both is not None
    assert theirs is not None
    assert both.tolist() == [3 + 4j] * 2
    assert theirs.tolist() == [1 + 1j] * 2
    assert nobodys is None
