from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zero_infinity.optim.nested_state import flat_state, nested_state, plain_values_of, tensors_of

leaves = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.just([]))
states = st.dictionaries(
    st.text("abc_", min_size=1, max_size=4), st.recursive(leaves, lambda inner: st.lists(inner, min_size=1, max_size=3))
)


@given(states)
def test_there_and_back(state: dict[str, Any]) -> None:
    assert nested_state(flat_state(state)) == state


def test_names_of_lists() -> None:
    one, other = torch.ones(2), torch.zeros(3, 3)
    flat = flat_state({"step": 3, "Q": [one, [], [other, None]]})
    assert list(flat) == ["step", "Q[0]", "Q[1]", "Q[2][0]", "Q[2][1]"]
    assert tensors_of(flat).keys() == {"Q[0]", "Q[2][0]"}
    assert plain_values_of(flat) == {"step": 3, "Q[1]": [], "Q[2][1]": None}
    back = nested_state(flat)
    assert back["Q"][0] is one
    assert back["Q"][2][0] is other


def test_what_no_record_can_hold() -> None:
    with pytest.raises(TypeError, match=r"state 'a\[1\]' is a set"):
        flat_state({"a": [1, {2}]})
