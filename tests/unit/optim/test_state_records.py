"""Units and records: where each element lies, and how records are cut."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from zero_infinity.optim.state_records import cut
from zero_infinity.params.find_parameters import find_parameters
from zero_infinity.params.unit import Unit, dense_stride, make_unit
from zero_infinity.policy.alignment import GRAIN
from zero_infinity.policy.chunk_size import chunk_elements
from zero_infinity.policy.partition import RankPartition, Sharding
from zero_infinity.policy.unit_sizes import ElementBytes
from zero_infinity.policy.zero_stage import ZeroStage

CPU = torch.device("cpu")
shapes = st.lists(st.integers(1, 9), max_size=4).map(tuple)


def unit_of(*tensors: torch.Tensor) -> Unit:
    named = [(f"p{number}", nn.Parameter(tensor)) for number, tensor in enumerate(tensors)]
    return make_unit("unit", named, dtype=torch.float32, compute_dtype=torch.float32, device=CPU)


@given(st.lists(shapes, min_size=1, max_size=5))
def test_parameters_lie_apart_and_start_at_multiples_of_the_grain(found: list[tuple[int, ...]]) -> None:
    unit = unit_of(*(torch.zeros(shape) for shape in found))
    end = 0
    for parameter in unit.parameters:
        assert parameter.offset % GRAIN == 0
        assert parameter.offset >= end
        end = parameter.offset + parameter.num_elements
    assert end <= unit.num_elements < end + GRAIN


@given(st.lists(shapes, min_size=1, max_size=4), st.data())
def test_what_is_put_in_comes_out(found: list[tuple[int, ...]], data: st.DataObject) -> None:
    """Also for transposed and sliced parameters, which keep their values and, when dense, their strides."""
    tensors = []
    for shape in found:
        order = data.draw(st.permutations(range(len(shape))))
        tensors.append(
            torch.randn([shape[axis] for axis in order]).permute([order.index(axis) for axis in range(len(shape))])
        )
    unit = unit_of(*tensors)
    flat = torch.full((unit.num_elements,), math.nan)
    for parameter, tensor in zip(unit.parameters, tensors, strict=True):
        parameter.of(flat).copy_(tensor)
    for parameter, tensor in zip(unit.parameters, tensors, strict=True):
        assert torch.equal(parameter.of(flat), tensor)
        assert parameter.of(flat).stride() == tensor.stride()
        begin = parameter.offset
        assert torch.equal(parameter.flattened(tensor), flat[begin : begin + parameter.num_elements])
        assert torch.equal(parameter.flattened(tensor.contiguous()), flat[begin : begin + parameter.num_elements])


@given(st.lists(st.integers(1, 700), min_size=1, max_size=6), st.integers(1, 1500), st.data())
def test_chunks_cover_each_trained_element_once(lengths: list[int], chunk: int, data: st.DataObject) -> None:
    unit = unit_of(*(torch.zeros(length) for length in lengths))
    trained = [p for p in unit.parameters if data.draw(st.booleans())]
    num_ranks = data.draw(st.integers(1, 5))
    layout = Sharding(data.draw(st.integers(0, num_ranks - 1)), RankPartition(num_ranks), ZeroStage.PARAMETERS).layout(
        unit.num_elements, 0
    )
    covered: dict[int, int] = {}
    last = 0
    for start, stop, segments in cut(trained, chunk_elements(chunk, ElementBytes(1, 1, 1)), layout.owned):
        assert start % GRAIN == stop % GRAIN == 0
        assert last <= start < stop
        assert stop - start <= max(GRAIN, chunk // GRAIN * GRAIN)
        last = stop
        for segment in segments:
            assert start <= segment.parameter.offset + segment.start
            assert segment.parameter.offset + segment.start == start + segment.offset
            assert start + segment.offset + segment.stop - segment.start <= stop
            for element in range(segment.start, segment.stop):
                place = segment.parameter.offset + element
                covered[place] = covered.get(place, 0) + 1
    mine = range(layout.owned.start, layout.owned.stop)
    expected = {p.offset + element for p in trained for element in range(p.num_elements) if p.offset + element in mine}
    assert covered.keys() == expected
    assert set(covered.values()) <= {1}


@pytest.mark.parametrize(
    ("tensor", "stride"),
    [
        (torch.zeros(2, 3), (3, 1)),
        (torch.zeros(3, 2).t(), (1, 2)),
        (torch.zeros(2, 3, 4, 5).contiguous(memory_format=torch.channels_last), (60, 1, 15, 3)),
        (torch.zeros(4, 6)[:, ::2], (3, 1)),
        (torch.zeros(4, 6)[:, :3], (3, 1)),
        (torch.zeros(1).expand(5), (1,)),
        (torch.zeros(()), ()),
        (torch.zeros(1, 4), (4, 1)),
    ],
)
def test_dense_layouts_are_kept_and_others_become_row_major(tensor: torch.Tensor, stride: tuple[int, ...]) -> None:
    assert dense_stride(tensor) == stride


def test_each_parameter_belongs_to_its_first_owner() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    model.empty = nn.Parameter(torch.empty(0))
    model.counts = nn.Parameter(torch.zeros(3, dtype=torch.int64), requires_grad=False)
    found = {name: [full for full, _ in parameters] for _, name, parameters in find_parameters(model)}
    assert found == {"0": ["0.weight", "0.bias"], "1": ["1.bias"]}
