"""Every transition of a unit's and a parameter's state, and every one that is refused."""

from __future__ import annotations

import pytest
import torch

from zero_infinity.params.unit_state import Origin, ParameterState, Pending, UnitState, Visibility
from zero_infinity.policy.homes import Home
from zero_infinity.storage.block import Block


def block() -> Block:
    return Block(0, "unit", 4096, Home.RAM, None)


def test_a_unit_is_planned_until_it_has_a_block() -> None:
    state = UnitState()
    assert (state.visibility, state.block) == (Visibility.PLANNED, None)
    home = block()
    state.store_in(home)
    assert state.visibility is Visibility.OFFLOADED
    assert state.block is home


def test_a_second_block_is_refused() -> None:
    state = UnitState()
    first = block()
    state.store_in(first)
    with pytest.raises(RuntimeError, match="a unit that is offloaded and has nothing pending gets a second block"):
        state.store_in(block())
    assert state.block is first


def test_a_unit_is_unsharded_until_its_last_parameter_is_resharded() -> None:
    state, flat = UnitState(), torch.zeros(8)
    state.store_in(block())
    state.unshard(flat)
    state.unshard(flat)
    assert state.visibility is Visibility.UNSHARDED
    assert not state.reshard()
    assert state.flat is flat
    assert state.reshard()
    assert (state.visibility, state.flat) == (Visibility.OFFLOADED, None)


def test_a_unit_without_a_block_of_its_own_is_unsharded_all_the_same() -> None:
    state = UnitState()
    state.unshard(torch.zeros(8))
    assert state.visibility is Visibility.UNSHARDED
    assert state.reshard()
    assert state.visibility is Visibility.PLANNED


def test_a_unit_has_one_place_while_it_is_unsharded() -> None:
    state, flat = UnitState(), torch.zeros(8)
    state.unshard(flat)
    with pytest.raises(RuntimeError, match="a unit that is unsharded and has nothing pending is unsharded in two"):
        state.unshard(torch.zeros(8))
    assert state.flat is flat
    assert state.reshard(), "the refused one does not count"
    state.unshard(torch.ones(8))


def test_resharding_what_is_not_unsharded_is_refused() -> None:
    state = UnitState()
    with pytest.raises(RuntimeError, match="planned .* is resharded and was not unsharded"):
        state.reshard()
    state.store_in(block())
    state.unshard(torch.zeros(8))
    state.reshard()
    with pytest.raises(RuntimeError, match="offloaded .* is resharded and was not unsharded"):
        state.reshard()


def test_what_was_acquired_is_known_as_long_as_somebody_holds_it() -> None:
    state = UnitState()
    assert state.last_acquired is None
    flat = torch.zeros(8)
    state.acquired(flat)
    assert state.last_acquired is flat
    del flat
    assert state.last_acquired is None
    flat = torch.zeros(8)
    state.acquired(flat)
    state.forget_acquired()
    assert state.last_acquired is None


def test_an_update_is_pending_until_the_step_ends() -> None:
    state = UnitState()
    assert state.pending is Pending.NOTHING
    state.submit_update()
    assert state.pending is Pending.UPDATE
    with pytest.raises(RuntimeError, match="planned and has update pending is updated twice in one step"):
        state.submit_update()
    state.end_step()
    assert state.pending is Pending.NOTHING
    state.end_step()
    state.submit_update()


def test_a_parameter_is_unsharded_as_often_as_it_is_resharded() -> None:
    state = ParameterState()
    assert not state.is_unsharded
    assert [state.unshard(), state.unshard()] == [True, False]
    assert state.is_unsharded
    assert [state.reshard(), state.reshard()] == [False, True]
    assert not state.is_unsharded
    with pytest.raises(RuntimeError, match="a parameter is resharded and was not unsharded"):
        state.reshard()
    assert state.unshard()


def test_an_edit_is_remembered_until_it_is_taken() -> None:
    state = ParameterState()
    assert (state.origin, state.is_edited) == (Origin.STORED, False)
    state.edit()
    state.edit()
    assert (state.origin, state.is_edited) == (Origin.EDITED, True)
    state.edits_taken()
    assert (state.origin, state.is_edited) == (Origin.STORED, False)


def test_any_other_version_than_the_stored_one_is_a_change() -> None:
    state = ParameterState()
    assert not state.changed_since(0)
    state.seen(5)
    assert state.changed_since(0)
    assert not state.changed_since(5)
    assert state.changed_since(4), "an older one, too: the parameter may have been put in another's place"


def test_replaced_values_are_counted() -> None:
    state = ParameterState()
    state.replace()
    state.replace()
    assert state.num_changes == 2
