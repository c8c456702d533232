"""When the heap is trimmed."""

from __future__ import annotations

import pytest
from support.forkserver import in_own_process

from zero_infinity.storage import heap
from zero_infinity.storage.buffer_pool import BufferPool
from zero_infinity.storage.heap import HeapTrimmer

MIB = 1 << 20


class Heap:
    """A heap of a given size, of which a given part is in use."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.size = self.used = 100 * MIB
        self.num_trims = 0
        monkeypatch.setattr(heap, "trim_heap", self.trim)
        monkeypatch.setattr(HeapTrimmer, "_resident_bytes", lambda _: self.size)

    def trim(self) -> None:
        self.num_trims += 1
        self.size = self.used


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Heap:
    return Heap(monkeypatch)


def trimmer(budget: int = 64 * MIB) -> HeapTrimmer:
    return HeapTrimmer(BufferPool(budget))


def test_what_was_in_use_once_is_left_alone(memory: Heap) -> None:
    heap_trimmer = trimmer()
    for size in (100, 300, 150, 300, 100):
        memory.size = memory.used = size * MIB
        heap_trimmer.trim_if_grown()
    num_trims = memory.num_trims
    memory.size = 307 * MIB  # less than an eighth of the budget more
    heap_trimmer.trim_if_grown()
    assert memory.num_trims == num_trims == 1


def test_holes_are_given_back_and_come_to_no_more_than_an_eighth_of_the_budget(memory: Heap) -> None:
    heap_trimmer = trimmer()
    largest = 0
    for _ in range(100):
        memory.size += MIB
        heap_trimmer.trim_if_grown()
        largest = max(largest, memory.size)
    assert memory.num_trims == 100 // 9
    assert largest <= 108 * MIB


def test_holes_among_many_activations_are_left_alone_up_to_half_of_these(memory: Heap) -> None:
    heap_trimmer = trimmer()
    memory.size = memory.used = 900 * MIB  # 800 of them since the baseline
    heap_trimmer.trim_if_grown()
    num_trims = memory.num_trims
    memory.size = 1300 * MIB
    heap_trimmer.trim_if_grown()
    assert memory.num_trims == num_trims
    memory.size += MIB
    heap_trimmer.trim_if_grown()
    assert memory.num_trims == num_trims + 1


def test_a_model_that_needs_more_is_not_trimmed_for_ever(memory: Heap) -> None:
    heap_trimmer = trimmer()
    memory.size = memory.used = 200 * MIB
    for _ in range(100):
        heap_trimmer.trim_if_grown()
    assert memory.num_trims == 1


def test_small_budgets_do_not_trim_for_a_few_pages(memory: Heap) -> None:
    heap_trimmer = trimmer(budget=MIB)
    memory.size += 3 * MIB
    heap_trimmer.trim_if_grown()
    assert memory.num_trims == 0


@in_own_process
def test_real_holes_are_given_back() -> None:
    import torch

    heap_trimmer = trimmer(budget=MIB)
    layers = [torch.ones(64 * 1024) for _ in range(400)]  # 100 MiB, in pieces that the heap is used for
    kept = layers[::40]
    full = heap_trimmer._resident_bytes()
    heap_trimmer._needed = 0
    del layers
    heap_trimmer.trim_if_grown()
    assert heap_trimmer._resident_bytes() < full - 60 * MIB
    assert all(bool(layer.eq(1).all()) for layer in kept)


@in_own_process
def test_memory_that_a_step_frees_is_there_for_the_next_one_without_page_faults() -> None:
    import resource

    import torch

    trimmer(budget=MIB)

    def step() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        tensors = [torch.ones(size * MIB // 4) for size in (1, 40, 30, 20, 60)]
        tensors.clear()
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    step()
    assert min(step() for _ in range(3)) < 1000  # of 38,656 pages


def test_what_a_model_took_before_it_moved_is_not_counted_as_needed(memory: Heap) -> None:
    memory.size = memory.used = 900 * MIB
    heap_trimmer = trimmer()
    memory.used = 100 * MIB
    heap_trimmer.reset_baseline()
    assert memory.size == 100 * MIB
    memory.size = 120 * MIB
    heap_trimmer.trim_if_grown()
    assert memory.size == 100 * MIB


def test_a_closed_trimmer_keeps_no_file_open() -> None:
    import os

    heap_trimmer = trimmer()
    assert heap_trimmer._resident_bytes() > 0
    descriptor = heap_trimmer._statm
    assert descriptor is not None
    heap_trimmer.close()
    heap_trimmer.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    heap_trimmer.trim_if_grown()
