from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from zero_infinity.activations.activation_arena import ActivationArena
from zero_infinity.activations.activation_storage import ActivationSlot

CPU = torch.device("cpu")


def filled(number: int, num_bytes: int) -> torch.Tensor:
    return torch.full((num_bytes,), number % 251, dtype=torch.uint8)


def step(arena: ActivationArena, sizes: list[int]) -> list[ActivationSlot]:
    """A forward and a backward: what was put there comes back, last first."""
    slots = [arena.put(filled(number, size)) for number, size in enumerate(sizes)]
    for number, size in reversed(list(enumerate(sizes))):
        into = torch.empty(size, dtype=torch.uint8)
        slots[number].take(into)
        assert torch.equal(into, filled(number, size))
    arena.end_cycle()
    return slots


def is_inside(arena: ActivationArena, slot: ActivationSlot) -> bool:
    start = arena._memory.data_ptr()
    return start <= slot.fetch().data_ptr() < start + arena.total_bytes


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
    kept = arena.put(filled(7, 4096))
    step(arena, [4096, 4096])
    into = torch.empty(4096, dtype=torch.uint8)
    kept.take(into)
    assert torch.equal(into, filled(7, 4096))
    assert arena.held_bytes == 0


@given(st.lists(st.lists(st.tuples(st.integers(1, 20_000), st.integers(0, 9)), max_size=8), max_size=6))
def test_whatever_comes_and_goes_keeps_its_bytes(steps: list[list[tuple[int, int]]]) -> None:
    """Each step puts some, and takes or drops whichever of all that are there."""
    arena = ActivationArena(CPU)
    there: list[tuple[int, int, ActivationSlot]] = []
    number = 0
    for puts in steps:
        for size, which in puts:
            number += 1
            there.append((number, size, arena.put(filled(number, size))))
            if which < len(there):
                old, old_size, slot = there.pop(which)
                if which % 3:
                    into = torch.empty(old_size, dtype=torch.uint8)
                    slot.take(into)
                    assert torch.equal(into, filled(old, old_size))
                else:
                    slot.drop()
        arena.end_cycle()
    for old, size, slot in there:
        into = torch.empty(size, dtype=torch.uint8)
        slot.take(into)
        assert torch.equal(into, filled(old, size))
    assert arena.held_bytes == 0
