from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from zero_infinity.activations.activation_arena import ActivationArena

CPU = torch.device("cpu")


def filled(number: int, num_bytes: int) -> torch.Tensor:
    return torch.full((num_bytes,), number % 251, dtype=torch.uint8)


def put(arena: ActivationArena, data: torch.Tensor) -> Any:
    return arena.put(data, data)


def step(arena: ActivationArena, sizes: list[int]) -> list[Any]:
    """A forward and a backward: what was put there comes back, last first."""
    slots = [put(arena, filled(number, size)) for number, size in enumerate(sizes)]
    for number, size in reversed(list(enumerate(sizes))):
        assert torch.equal(slots[number].take(), filled(number, size))
    arena.end_cycle()
    return slots


def is_inside(arena: ActivationArena, slot: Any) -> bool:
    start = arena._memory.data_ptr()
    return start <= slot.kept.data_ptr() < start + arena.total_bytes


def test_the_first_step_tells_the_size_and_the_rest_is_inside() -> None:
    arena = ActivationArena(CPU)
    sizes = [5000, 4096, 70_000, 1]
    assert not any(is_inside(arena, slot) for slot in step(arena, sizes))
    memory = arena._memory
    assert arena.total_bytes == 8192 + 4096 + 73_728 + 4096
    for _ in range(5):
        assert all(is_inside(arena, slot) for slot in step(arena, sizes))
        assert arena._memory is memory
    step(arena, [*sizes, 10])
    assert all(is_inside(arena, slot) for slot in step(arena, [*sizes, 10]))


def test_it_does_not_grow_under_what_is_kept() -> None:
    arena = ActivationArena(CPU)
    step(arena, [4096])
    kept = put(arena, filled(7, 4096))
    step(arena, [4096, 4096])
    assert torch.equal(kept.take(), filled(7, 4096))
    assert arena.held_bytes == 0


@given(st.lists(st.lists(st.tuples(st.integers(1, 20_000), st.integers(0, 9)), max_size=8), max_size=6))
def test_whatever_comes_and_goes_keeps_its_bytes(steps: list[list[tuple[int, int]]]) -> None:
    """Each step puts some, and takes or drops whichever of all that are there."""
    arena = ActivationArena(CPU)
    there: list[tuple[int, int, Any]] = []
    number = 0
    for puts in steps:
        for size, which in puts:
            number += 1
            there.append((number, size, put(arena, filled(number, size))))
            if which < len(there):
                old, old_size, slot = there.pop(which)
                if which % 3:
                    assert torch.equal(slot.take(), filled(old, old_size))
                else:
                    slot.drop()
        arena.end_cycle()
    for old, size, slot in there:
        assert torch.equal(slot.take(), filled(old, size))
    assert arena.held_bytes == 0
