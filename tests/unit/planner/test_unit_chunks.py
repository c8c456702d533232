from __future__ import annotations

from zero_infinity.planner.training_job import SINGLE
from zero_infinity.planner.unit_chunks import chunk_sizes
from zero_infinity.planner.unit_states import UnitStates, WholeParameter, frozen


def test_slices_have_whole_grains_and_cover_everything() -> None:
    sizes = list(chunk_sizes(UnitStates(SINGLE, 1000), 8 * 256))
    assert [size.num_elements for size in sizes] == [256, 256, 256, 232]
    assert [size.record_bytes for size in sizes] == [8 * n for n in (256, 256, 256, 232)]
    assert [size.gradient_bytes for size in sizes] == [4 * n for n in (256, 256, 256, 232)]


def test_whole_parameters_have_one_chunk_each() -> None:
    states = UnitStates(SINGLE, 64, (WholeParameter(4096, 100),))
    assert [(s.num_elements, s.record_bytes) for s in chunk_sizes(states, 8 * 256)] == [(64, 512), (4096, 100)]


def test_gradients_of_other_ranks_have_no_record() -> None:
    mine, other = chunk_sizes(UnitStates(SINGLE, 128), 8 * 256, num_others=1)
    assert (mine.is_updated, other.is_updated) == (True, False)
    assert (other.record_bytes, other.gradient_bytes) == (0, 512)


def test_frozen_units_have_none() -> None:
    assert not list(chunk_sizes(frozen(4), 1 << 20))
