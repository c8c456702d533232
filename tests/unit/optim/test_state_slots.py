from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import zero_infinity as zi
from zero_infinity.optim.state_slots import TensorForm, check_forms, element_slots, record_bytes, whole_slots

dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.uint8, torch.float64, torch.int64])
forms = st.builds(
    lambda shape, dtype: TensorForm(torch.Size(shape), torch.empty(shape, device="meta").stride(), dtype),
    st.lists(st.integers(0, 5), max_size=3),
    dtypes,
)


@given(st.lists(forms, max_size=5), st.integers(0, 3), st.integers(1, 200))
def test_slots_lie_apart_and_hold_what_is_put_in(found: list[TensorForm], num_slices: int, num_elements: int) -> None:
    names = {f"state{number}": form for number, form in enumerate(found)}
    before = element_slots({f"slice{number}": torch.float32 for number in range(num_slices)}, num_elements)
    slots = whole_slots(before, names)
    assert list(slots) == [*before, *names]
    memory = torch.zeros(record_bytes(slots), dtype=torch.uint8)
    for number, slot in enumerate(slots.values()):
        assert slot.form is None or slot.start % 64 == 0
        slot.of(memory).fill_(number + 1)
    for number, slot in enumerate(slots.values()):
        assert torch.equal(slot.of(memory), torch.full((slot.num_elements,), number + 1, dtype=slot.dtype))


def test_a_form_keeps_the_order_of_its_elements() -> None:
    column_major = torch.arange(6.0).reshape(3, 2).t()
    form = TensorForm(column_major.shape, column_major.stride(), column_major.dtype)
    flat = form.flattened(column_major.contiguous())
    assert flat.tolist() == [0, 1, 2, 3, 4, 5]
    assert torch.equal(form.of(flat), column_major)
    assert form.of(flat).stride() == column_major.stride()
    assert form.num_bytes == 24


def test_states_that_change_their_shape_are_refused() -> None:
    form = TensorForm(torch.Size([3]), (1,), torch.float32)
    check_forms("a", {"rows": torch.zeros(3)}, {"rows": form})
    with pytest.raises(zi.UsageError, match=r"'rows' of 'a' is \[4\] of torch.float32, and was \[3\] of torch.float32"):
        check_forms("a", {"rows": torch.zeros(4)}, {"rows": form})
    with pytest.raises(zi.UsageError, match="was not there when the optimizer was probed"):
        check_forms("a", {"columns": torch.zeros(4)}, {"rows": form})
