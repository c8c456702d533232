from __future__ import annotations

import warnings
from typing import Any, cast

import pytest
import torch

from zero_infinity.activations.activation_arena import ActivationArena
from zero_infinity.activations.offload import ActivationOffload
from zero_infinity.activations.replicas import Replicas
from zero_infinity.config import ConfigWarning
from zero_infinity.policy.partition import Span


class Full:
    """A shelf without room."""

    held_bytes = total_bytes = room = 0

    def put(self, data: torch.Tensor, root: torch.Tensor) -> None:
        return None

    def end_cycle(self) -> None: ...


class OtherHalf:
    """Plays the other rank of two, which has the second half of everything."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []

    def part(self, num_bytes: int) -> Span:
        return Span(0, num_bytes // 2)

    def check_same(self, whole: torch.Tensor) -> None:
        self.kept.append(whole[len(whole) // 2 :].clone())

    def gather(self, whole: torch.Tensor) -> None:
        whole[len(whole) // 2 :] = self.kept.pop()


def tensors() -> list[torch.Tensor]:
    return [torch.randn(40_000, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]


def there_and_back(activations: ActivationOffload, values: list[torch.Tensor]) -> None:
    packed: list[Any] = [activations.pack(value.clone(), is_input=True) for value in values]
    for value, view in reversed(list(zip(values, packed, strict=True))):
        assert torch.equal(view.restore(), value)


@pytest.mark.filterwarnings("ignore::zero_infinity.config.ConfigWarning")
@pytest.mark.parametrize("storage", [Full(), ActivationArena(torch.device("cpu"))])
def test_a_rank_keeps_its_part_also_where_there_is_no_room(storage: Any) -> None:
    replicas = OtherHalf()
    activations = ActivationOffload(storage, cast(Replicas, replicas))
    for _ in range(2):
        there_and_back(activations, tensors())
        activations.end_cycle()
    assert not replicas.kept
    assert storage.held_bytes == 0
    if isinstance(storage, ActivationArena):
        assert storage.total_bytes == 3 * 81_920  # a half of each, in whole pages


def test_what_is_no_input_is_not_split() -> None:
    replicas = OtherHalf()
    activations = ActivationOffload(ActivationArena(torch.device("cpu")), cast(Replicas, replicas))
    value = tensors()[0]
    view: Any = activations.pack(value, is_input=False)
    assert not replicas.kept
    assert torch.equal(view.restore(), value)


def test_without_room_a_tensor_stays_and_that_is_said_once() -> None:
    activations = ActivationOffload(cast(Any, Full()))
    first, second, _ = tensors()
    with pytest.warns(ConfigWarning, match=r"a saved tensor of 156.3 KiB stays outside .* has 0 B left"):
        assert activations.pack(first, is_input=True) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert activations.pack(second, is_input=True) is None
