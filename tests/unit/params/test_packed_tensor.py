from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from zero_infinity import UsageError
from zero_infinity.params.packed_tensor import HolderPart, PackedTensor, packed, part_of, turn_into, values_of

CPU = torch.device("cpu")
VIEWS = {
    "t": lambda x: x.t(),
    "flat": lambda x: x.reshape(-1, 1) if x.is_contiguous() else x,
    "bytes": lambda x: x.view(torch.uint8) if x.is_contiguous() else x,
    "row": lambda x: x[-1:],
    "every other": lambda x: x[:, ::2],
    "narrow": lambda x: x.narrow(0, 0, max(1, x.shape[0] // 2)),
    "none": lambda x: x[:, None].squeeze(1),
    "expand": lambda x: x[:1].expand(3, -1),
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "split": lambda x: x.split(1)[0],
    "chunk": lambda x: torch.chunk(x, 2, dim=1)[-1],
}


def holder(*tensors: torch.Tensor) -> list[PackedTensor]:
    """Packed tensors with these values, 64 bytes apart."""
    data = torch.full((sum(64 + tensor.nbytes for tensor in tensors),), 99, dtype=torch.uint8)
    parameter = nn.Parameter(data, requires_grad=False)
    made, start = [], 64
    for tensor in tensors:
        part = HolderPart(parameter, start, tensor.nbytes)
        part.of(data, tensor.dtype).copy_(tensor.flatten())
        made.append(packed(part, tensor, tensor.stride(), CPU))
        start += tensor.nbytes + 64
    return made


@given(
    dtype=st.sampled_from([torch.int8, torch.uint8, torch.float32, torch.int64]),
    chain=st.lists(st.sampled_from(sorted(VIEWS)), max_size=5),
)
def test_views_are_those_of_a_plain_tensor_and_read_nothing(dtype: torch.dtype, chain: list[str]) -> None:
    plain = torch.arange(96).reshape(6, 16).to(dtype)
    mine: torch.Tensor = holder(torch.zeros(4), plain)[1]
    for name in chain:
        plain, mine = VIEWS[name](plain), VIEWS[name](mine)
        assert isinstance(mine, PackedTensor)
        assert (mine.shape, mine.stride(), mine.dtype) == (plain.shape, plain.stride(), plain.dtype)
        assert mine.storage_offset() == plain.storage_offset()
    assert torch.equal(values_of(mine), plain)
    assert torch.equal(mine + 1, plain + 1)
    assert torch.equal(torch.cat([mine, mine]), torch.cat([plain, plain]))
    assert mine.tolist() == plain.tolist()
    assert repr(mine) == repr(plain)


def test_writes_reach_the_holder_and_return_the_tensor() -> None:
    (mine,) = holder(torch.arange(12).reshape(3, 4))
    assert mine[1].add_(10) is not mine
    assert mine.mul_(2) is mine
    torch.add(mine, 1, out=mine)
    assert values_of(mine).tolist() == [[1, 3, 5, 7], [29, 31, 33, 35], [17, 19, 21, 23]]
    other = torch.zeros(3, 4, dtype=torch.int64)
    other.copy_(mine)
    assert torch.equal(other, values_of(mine))


def test_gradients_flow_past_it() -> None:
    (mine,) = holder(torch.tensor([2.0, 3.0]))
    x = torch.ones(2, requires_grad=True)
    (x * mine).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 3.0]


class Special(nn.Parameter):
    note: str

    def __deepcopy__(self, memo: object) -> Special:
        copied = Special(self.data.clone(), requires_grad=False)
        copied.note = self.note
        return copied


def test_a_parameter_stays_the_same_object_of_its_class() -> None:
    values = torch.arange(6, dtype=torch.int8)
    parameter = Special(values.clone(), requires_grad=False)
    parameter.note = "scales"
    before = id(parameter)
    turn_into(parameter, holder(values)[0])
    assert id(parameter) == before
    assert isinstance(parameter, Special)
    assert isinstance(parameter, PackedTensor)
    assert parameter.note == "scales"
    assert not parameter.requires_grad
    parameter.data = parameter.view(-1)
    assert torch.equal(parameter + 0, values)
    copied = copy.deepcopy(parameter)
    assert type(copied) is Special
    assert copied.note == "scales"
    assert torch.equal(copied, values)
    turn_into(parameter, packed(part_of(parameter), parameter, parameter.stride(), torch.device("meta")))
    assert parameter.is_meta
    assert isinstance(parameter, Special)


def test_other_data_is_an_edit_or_an_error() -> None:
    (mine,) = holder(torch.zeros(3))
    mine.data = torch.ones(3)
    assert values_of(mine).tolist() == [1, 1, 1]
    for other in (torch.ones(4), torch.ones(3, dtype=torch.int64)):
        with pytest.raises(UsageError, match=r"(?s)replaced by one of shape .*before zi.prepare"):
            mine.data = other
