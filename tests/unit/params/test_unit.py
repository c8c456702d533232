"""The layout of units: what lies where, and what cannot be managed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zero_infinity.params.unit import Unit, dense_stride, make_unit
from zero_infinity.policy.partition import RankPartition, Sharding, Span
from zero_infinity.policy.zero_stage import ZeroStage


def unit_of(*shapes: tuple[int, ...], sharding: Sharding | None = None) -> Unit:
    named = [(f"layer.{number}", nn.Parameter(torch.randn(shape))) for number, shape in enumerate(shapes)]
    return make_unit(
        "layer",
        named,
        dtype=torch.float32,
        compute_dtype=torch.float32,
        device=torch.device("cpu"),
        sharding=sharding or Sharding(),
    )


def test_every_parameter_begins_at_a_multiple_of_64_elements() -> None:
    unit = unit_of((5, 7), (64,), (3,))
    assert [(p.offset, p.end) for p in unit.parameters] == [(0, 35), (64, 128), (128, 131)]
    assert unit.num_elements == 192
    assert [unit.parameter_at(offset).offset for offset in (0, 34, 64, 127, 130)] == [0, 0, 64, 64, 128]


def test_a_parameter_finds_itself_in_its_units_elements() -> None:
    unit = unit_of((5, 7), (3,))
    flat = torch.zeros(unit.num_elements)
    for managed in unit.parameters:
        managed.of(flat).copy_(managed.parameter.detach())
        assert torch.equal(managed.of(flat), managed.parameter)
        assert torch.equal(managed.flattened(managed.parameter.detach()), flat[managed.offset : managed.end])


def test_other_strides_are_kept_if_they_are_dense() -> None:
    image = torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)
    assert dense_stride(image) == image.stride()
    assert dense_stride(torch.zeros(6, 4)[::2]) == (4, 1)
    assert dense_stride(torch.zeros(3, 4).t()) == (1, 4)


def test_shards_of_a_parameter_are_counted_from_its_first_element() -> None:
    unit = unit_of((100,), (100,), sharding=Sharding(0, RankPartition(2), ZeroStage.PARAMETERS))
    assert unit.spans == (Span(0, 128), Span(128, 256))
    assert unit.stored == Span(0, 128)
    first, second = unit.parameters
    assert [len(span) for span in first.spans] == [100, 0]
    assert [len(span) for span in second.spans] == [0, 100]


def test_a_unit_without_a_block_says_so() -> None:
    unit = unit_of((3,))
    assert not unit.is_stored
    with pytest.raises(RuntimeError, match="unit 'layer' has no block yet"):
        unit.the_block()
