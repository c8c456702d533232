from __future__ import annotations

from zero_infinity.policy.alignment import ALIGNMENT, GRAIN
from zero_infinity.policy.homes import Home
from zero_infinity.policy.unit_sizes import ElementBytes, UnitElements, UnitSize, copy_bytes, stored_bytes, unit_size

ADAM = ElementBytes(parameter=4, record=8, gradient=4)
MIXED = ElementBytes(parameter=2, record=12, gradient=4)
MIB = 2**20


def test_a_unit_of_one_rank() -> None:
    found = unit_size("layer", UnitElements(MIB, MIB, MIB), MIXED, is_reduced=False)
    assert found == UnitSize("layer", parameters=2 * MIB, record=12 * MIB, gradients=4 * MIB, arriving=4 * MIB)


def test_a_unit_of_four_ranks() -> None:
    """A sum takes memory beside the gradient that it is made of."""
    elements = UnitElements(stored=MIB, trained=4 * MIB, updated=MIB)
    found = unit_size("layer", elements, ADAM, is_reduced=True, copied=16 * MIB, home=Home.RAM)
    assert (found.parameters, found.record, found.gradients) == (4 * MIB, 8 * MIB, 4 * MIB)
    assert found.arriving == 16 * MIB + 4 * MIB
    assert (found.copied, found.home) == (16 * MIB, Home.RAM)


def test_whole_gradients_are_kept_where_a_part_is_updated() -> None:
    elements = UnitElements(stored=4 * MIB, trained=4 * MIB, updated=MIB)
    found = unit_size("layer", elements, ADAM, is_reduced=True, whole_gradients=True)
    assert (found.parameters, found.record, found.gradients) == (16 * MIB, 8 * MIB, 16 * MIB)


def test_what_is_not_trained_has_neither_record_nor_gradients() -> None:
    frozen = ElementBytes(4, record=0, gradient=0)
    found = unit_size("layer", UnitElements(1000, 0, 0), frozen, is_reduced=True)
    assert found == UnitSize("layer", parameters=ALIGNMENT, record=0, gradients=0, arriving=0)


def test_a_rank_that_stores_nothing_has_a_block_all_the_same() -> None:
    assert stored_bytes(0, 4) == 4 * GRAIN
    assert stored_bytes(1024, 2) == 2048


def test_a_copy_in_another_dtype_is_gathered_in_its_own_first() -> None:
    assert copy_bytes(MIB, stored=2, computed=4, staged=False) == 4 * MIB
    assert copy_bytes(MIB, stored=2, computed=4, staged=True) == 6 * MIB
    assert copy_bytes(10, stored=2, computed=4, staged=True) == 2 * ALIGNMENT
