from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from zero_infinity.accumulation.random_states import Distance, are_same, other_generators, random_state

CPU = torch.device("cpu")
DRAWS: dict[str, Callable[[], object]] = {
    "nothing": lambda: None,
    "one": lambda: torch.rand([]),
    "dropout": lambda: nn.functional.dropout(torch.ones(10_000)),
    "many": lambda: torch.rand(3000),
    "a permutation": lambda: torch.randperm(100),
    "some": lambda: (torch.rand(623), torch.randint(0, 7, (5,)), torch.rand(1)),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_what_a_forward_draws_is_predicted(draw: Callable[[], object]) -> None:
    torch.manual_seed(0)
    before = random_state(CPU)
    draw()
    distance = before.distance_to(random_state(CPU))
    assert distance is not None
    torch.manual_seed(7)
    torch.rand(100)
    predicted = random_state(CPU).moved(distance)
    draw()
    assert predicted.equals(random_state(CPU))
    assert bool(distance) == (draw is not DRAWS["nothing"])


def test_half_used_pairs_of_normals_are_not_predicted() -> None:
    """The generator keeps the second one: its next state depends on more than draws."""
    torch.manual_seed(0)
    before = random_state(CPU)
    torch.randn(7)
    assert before.distance_to(random_state(CPU)) is None


def test_states_of_another_seed_are_not_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zero_infinity.accumulation.random_states._MOST_DRAWS", 2000)
    torch.manual_seed(0)
    before = random_state(CPU)
    torch.manual_seed(1)
    assert before.distance_to(random_state(CPU)) is None


def test_put_back() -> None:
    state = random_state(CPU)
    first = torch.rand(3)
    state.put_back()
    assert torch.equal(first, torch.rand(3))
    assert not Distance()


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_other_generators(draw: Callable[[], float]) -> None:
    before = other_generators()
    assert are_same(before, other_generators())
    draw()
    assert not are_same(before, other_generators())
