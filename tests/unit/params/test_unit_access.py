"""Reading units, and knowing in whose memory a tensor lies."""

from __future__ import annotations

import itertools
import os
from typing import Any, cast

import pytest
import torch
from torch import nn

from zero_infinity.errors import UsageError
from zero_infinity.params import offloaded_param, unit_access
from zero_infinity.params.unit import ManagedParameter, Unit, make_unit
from zero_infinity.params.unit_access import StorageIndex, UnitAccess
from zero_infinity.params.unit_values import UnitValues, ValueSources
from zero_infinity.tiers.compute_thread import ComputeThread


def unit_of(name: str = "layer", number: int = 0) -> Unit:
    return make_unit(
        name,
        [(f"{name}.weight", nn.Parameter(torch.zeros(8, 8))), (f"{name}.bias", nn.Parameter(torch.zeros(8)))],
        dtype=torch.float32,
        compute_dtype=torch.float32,
        device=torch.device("cpu"),
        number=number,
    )


# ---------------------------------------------------------------------- StorageIndex


def test_a_view_lies_in_the_memory_of_its_unit() -> None:
    index, unit, other = StorageIndex(), unit_of("a"), unit_of("b", 1)
    flat, other_flat = torch.zeros(128), torch.zeros(128)
    assert index.unit_of(flat) is None
    index.add(flat.untyped_storage(), unit)
    index.add(other_flat.untyped_storage(), other)
    assert index.unit_of(flat[3:5]) is unit
    assert index.unit_of(flat.view(torch.int32)) is unit
    assert index.unit_of(other_flat.view(2, 64).t()) is other
    assert index.unit_of(flat.clone()) is None


def test_tensors_without_a_storage_lie_nowhere() -> None:
    index, unit = StorageIndex(), unit_of()
    flat = torch.zeros(128)
    index.add(flat.untyped_storage(), unit)
    assert index.unit_of(torch.eye(3).to_sparse()) is None


def test_an_address_that_is_used_again_belongs_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unit_access, "storage_id", lambda _: 4711)
    index, unit = StorageIndex(), unit_of()
    flat = torch.zeros(128)
    index.add(flat.untyped_storage(), unit)
    assert index.unit_of(flat) is unit
    del flat
    again = torch.zeros(128)
    assert index.unit_of(again) is None
    index.add(again.untyped_storage(), unit)
    assert index.unit_of(again) is unit


def test_dead_storages_are_forgotten_and_living_ones_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    index, unit, alive = StorageIndex(), unit_of(), [torch.zeros(4) for _ in range(5)]
    for flat in alive:
        index.add(flat.untyped_storage(), unit)
    addresses = itertools.count(-1, -1)
    with monkeypatch.context() as patch:
        # None is used again: each dead one would be remembered.
        patch.setattr(unit_access, "storage_id", lambda _: next(addresses))
        for _ in range(200):
            index.add(torch.zeros(4).untyped_storage(), unit)
    assert len(index._storages) <= 2 * (len(alive) + 1) + unit_access._DEAD_STORAGES
    assert [index.unit_of(flat) for flat in alive] == [unit] * 5


# ---------------------------------------------------------------------- UnitAccess


class Source:
    """Has a unit's values; a new tensor for each acquisition."""

    def __init__(self) -> None:
        self.is_current = True
        self.calls: list[str] = []

    def acquire(self, unit: Unit) -> torch.Tensor:
        self.calls.append("acquire")
        return torch.arange(unit.num_elements, dtype=unit.compute_dtype)

    def current(self, _: Unit) -> bool:
        return self.is_current

    def keep(self, parameter: ManagedParameter, _: torch.Tensor) -> None:
        self.calls.append(f"keep {parameter.name}")

    def may_change(self, unit: Unit) -> None:
        self.calls.append(f"may change {unit.name}")


class Observer:
    def __init__(self, calls: list[str]) -> None:
        self._calls = calls

    def before_reads(self, unit: Unit) -> None: ...

    def on_read(self, unit: Unit) -> None:
        self._calls.append(f"read {unit.name}")

    def on_edit(self, parameter: ManagedParameter, _: torch.Tensor) -> None:
        self._calls.append(f"edit {parameter.name}")


class Thread:
    def __init__(self, calls: list[str]) -> None:
        self._calls = calls

    def pass_by(self) -> None:
        self._calls.append("pass by")


class Bench:
    def __init__(self) -> None:
        self.source = Source()
        self.calls = self.source.calls
        self.storages = StorageIndex()
        self.access = UnitAccess(
            cast(ComputeThread, Thread(self.calls)),
            ValueSources(cast(UnitValues, self.source)),
            self.storages,
            Observer(self.calls),
        )
        self.unit = unit_of()
        self.weight, self.bias = self.unit.parameters

    def unshard(self) -> torch.Tensor:
        flat = self.access.acquire(self.unit)
        for managed in self.unit.parameters:
            self.unit.state.unshard(flat)
            managed.state.unshard()
            offloaded_param.point(managed, managed.of(flat))
            managed.state.seen(managed.parameter._version)
        self.calls.clear()
        return flat


def test_updates_run_before_a_unit_is_read_and_the_reader_is_known_first() -> None:
    b = Bench()
    flat = b.access.acquire(b.unit)
    assert b.calls == ["read layer", "pass by", "acquire"]
    assert b.access.unit_of(flat[5:]) is b.unit


def test_what_somebody_holds_is_given_to_the_next_reader_while_it_is_current() -> None:
    b = Bench()
    flat = b.access.acquire(b.unit)
    assert b.access.acquire(b.unit) is flat
    b.source.is_current = False
    assert b.access.acquire(b.unit) is not flat
    b.source.is_current = True
    del flat
    b.access.acquire(b.unit)
    assert b.calls.count("acquire") == 3


def test_what_is_acquired_is_an_ordinary_tensor_also_in_inference_mode() -> None:
    b = Bench()
    with torch.inference_mode():
        flat = b.access.acquire(b.unit)
    assert not flat.is_inference()


def test_a_change_in_place_is_stored_once_the_master_copy_first() -> None:
    b = Bench()
    b.unshard()
    b.access.keep_edits(b.weight)
    assert b.calls == []
    with torch.no_grad():
        b.weight.parameter.add_(1)
    for managed in b.unit.parameters:
        b.access.keep_edits(managed)
    assert b.calls == ["edit layer.weight", "keep layer.weight"]
    b.access.keep_edits(b.weight)
    assert len(b.calls) == 2


def test_a_tensor_that_was_put_in_its_place_is_copied_into_the_unit() -> None:
    b = Bench()
    flat = b.unshard()
    version = b.bias.version
    b.bias.parameter.data = torch.full((8,), 7.0)
    b.access.keep_edits(b.bias)
    assert b.bias.of(flat).tolist() == [7] * 8
    assert offloaded_param.data_of(b.bias).untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
    assert b.bias.version > version, "what was saved for backward before is out of date"
    assert b.calls == ["edit layer.bias", "keep layer.bias"]


def test_an_offloaded_parameter_has_no_edits_to_keep() -> None:
    b = Bench()
    b.access.keep_edits(b.weight)
    b.access.keep(b.weight)
    assert b.calls == []


def test_a_parameter_that_may_change_is_edited() -> None:
    b = Bench()
    b.access.may_change(b.bias)
    assert b.bias.state.is_edited
    assert not b.weight.state.is_edited
    assert b.calls == ["may change layer"]


def test_a_forked_child_is_refused_before_anything_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    b = Bench()
    pid: Any = os.getpid()
    monkeypatch.setattr(unit_access.os, "getpid", lambda: pid + 1)
    with pytest.raises(UsageError, match=f"prepared in process {pid} .* forked child {pid + 1}"):
        b.access.acquire(b.unit)
    assert b.calls == []
