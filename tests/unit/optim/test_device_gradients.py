"""Gradients that stay on the device until the step. Here the device is the CPU."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import nn

from zero_infinity.optim.device_gradients import DeviceGradients
from zero_infinity.optim.state_records import StateRecord, make_device_chunk
from zero_infinity.params.unit import ManagedParameter, make_unit
from zero_infinity.policy.partition import RankPartition, Sharding, Span
from zero_infinity.policy.zero_stage import ZeroStage
from zero_infinity.storage.block_store import BlockStore
from zero_infinity.storage.buffer_pool import BufferPool

CPU = torch.device("cpu")


def gradients_of(sharding: Sharding | None = None) -> tuple[DeviceGradients, StateRecord, list[ManagedParameter]]:
    store = BlockStore(BufferPool(1 << 20))
    named = [("a", nn.Parameter(torch.zeros(4, 5))), ("b", nn.Parameter(torch.zeros(2000)))]
    unit = make_unit(
        "unit",
        named,
        dtype=torch.float32,
        compute_dtype=torch.float32,
        device=CPU,
        sharding=sharding or Sharding(),
    )
    unit.state.store_in(store.create_on_device("unit", unit.stored_bytes, CPU))
    record = StateRecord(
        unit, torch.float32, has_master=False, state_names=dict.fromkeys(unit.parameters, ("exp_avg",))
    )
    make_device_chunk(record, store, CPU)
    return DeviceGradients({unit: record}), record, unit.parameters


class Reduced:
    """An average that has arrived."""

    def __init__(self, parameters: Iterable[ManagedParameter], span: Span, value: float) -> None:
        self.parameters = list(parameters)
        self._span = span
        self._value = value
        self.is_used = False

    def on_device(self) -> tuple[Span, torch.Tensor]:
        self.is_used = True
        return self._span, torch.full((len(self._span),), self._value)


def test_the_first_gradient_is_kept_as_it_is_and_others_are_added() -> None:
    gradients, record, (a, b) = gradients_of()
    assert gradients.is_home_of(a.unit)
    assert not gradients
    first = torch.ones(20)
    gradients.add(a, first)
    assert gradients.take(a).data_ptr() == first.data_ptr()
    assert not gradients
    gradients.add(a, first)
    gradients.add(a, torch.full((20,), 2.0, dtype=torch.float64))
    assert a in gradients
    assert b not in gradients
    assert gradients.units == [a.unit]
    assert gradients.parameters_of(a.unit) == [a]
    segments = {segment.parameter: segment for segment in record.chunks[0].segments}
    part = gradients.part(segments[a])
    assert part is not None
    assert part.eq(3).all()
    assert gradients.part(segments[b]) is None
    whole = torch.zeros(20)
    gradients.copy_into(a, whole)
    assert whole.eq(3).all()
    gradients.clear()
    assert a not in gradients


def test_a_replaced_gradient_is_a_copy() -> None:
    gradients, _, (a, _) = gradients_of()
    mine = torch.ones(20)
    gradients.replace(a, mine)
    mine.zero_()
    assert gradients.take(a).eq(1).all()


def test_norms_and_squares() -> None:
    gradients, _, (a, b) = gradients_of()
    values = {a: torch.randn(20), b: torch.randn(2000)}
    for parameter, value in values.items():
        gradients.add(parameter, value.clone())
    for parameter, norm in gradients.norms().items():
        assert torch.equal(norm, torch.linalg.vector_norm(values[parameter]))
    for segment, square in gradients.squares().items():
        assert abs(square - values[segment.parameter].double().square().sum().item()) < 1e-9 * square


def test_averages_are_taken_in_when_they_are_needed_and_one_may_be_on_its_way() -> None:
    sharding = Sharding(1, RankPartition(2), ZeroStage.GRADIENTS)
    gradients, record, (a, b) = gradients_of(sharding)
    span = record.unit.owned
    one, two, three = (Reduced([a, b], span, value) for value in (1.0, 2.0, 4.0))
    gradients.add_reduced(record.unit, one)
    assert not one.is_used
    assert a in gradients
    gradients.add_reduced(record.unit, two)
    assert one.is_used
    assert not two.is_used
    gradients.add_reduced(record.unit, three)
    gradients.settle()
    assert gradients.units == [record.unit]
    whole = torch.zeros(2000)
    gradients.copy_into(b, whole)
    begin = max(0, span.start - b.offset)
    assert whole[begin:].eq(7).all()
    assert whole[:begin].eq(0).all()
    assert begin > 0
    assert sum(gradients.squares().values()) == pytest.approx(49.0 * (2000 - begin))
    gradients.replace(b, torch.arange(2000.0))
    assert torch.equal(gradients.take(b), torch.arange(float(begin), 2000.0))
