"""Where a module gets a unit's values from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
import torch
from support.block_bench import PAGE, BlockBench, wait_until
from torch import nn

from zero_infinity.params.unit import Unit, make_unit
from zero_infinity.params.unit_values import CopiedValues, HostValues, UnitValues, ValueSources
from zero_infinity.policy.cache_policy import CachePolicy
from zero_infinity.tiers.compute_thread import ComputeThread
from zero_infinity.tiers.device_cache import DeviceCache
from zero_infinity.tiers.host_cache import HostCache

NUM_ELEMENTS = PAGE // 4


def unit_of(name: str, number: int = 0, *, dtype: torch.dtype = torch.float32) -> Unit:
    parameter = nn.Parameter(torch.zeros(NUM_ELEMENTS))
    return make_unit(
        name,
        [(f"{name}.weight", parameter)],
        dtype=dtype,
        compute_dtype=torch.float32,
        device=torch.device("cpu"),
        number=number,
    )


class Waits:
    """A computing thread without updates."""

    @contextmanager
    def waiting(self, _: str) -> Iterator[None]:
        yield


class Bench(BlockBench):
    """Two pages of host memory."""

    def __init__(self) -> None:
        super().__init__(2)
        self.cache = HostCache(self.store, cast(ComputeThread, Waits()), CachePolicy, 2 * PAGE, 0)
        self.values = HostValues(self.cache)

    def unit(self, name: str, value: float) -> Unit:
        unit = unit_of(name)
        unit.state.store_in(self.block(name))
        self.cache.add(unit.the_block())
        with self.cache.writing(unit.the_block()) as memory:
            memory.view(torch.float32).fill_(value)
            del memory
        self.evict(unit)
        return unit

    def evict(self, unit: Unit) -> None:
        self.cache.drop(unit.the_block())
        wait_until(lambda: not unit.the_block().stays)


@pytest.fixture
def b() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.store.close()


def test_a_unit_has_the_default_source_until_another_one_serves_it() -> None:
    first, second = unit_of("a"), unit_of("b", 1)
    default, special = (cast(UnitValues, object()) for _ in range(2))
    sources = ValueSources(default)
    assert sources.of(first) is default
    sources.serve(first, special)
    assert sources.of(first) is special
    assert sources.of(second) is default


def test_every_source_is_named_once_in_the_order_of_the_units() -> None:
    units = [unit_of(str(number), number) for number in range(4)]
    default, special = (cast(UnitValues, object()) for _ in range(2))
    sources = ValueSources(default)
    for unit in units[::2]:
        sources.serve(unit, special)
    assert sources.of_all(units) == [special, default]
    assert sources.of_all(units[1::2]) == [default]
    assert sources.of_all([]) == []


def test_host_values_are_the_block_itself(b: Bench) -> None:
    unit = b.unit("a", 3)
    flat = b.values.acquire(unit)
    assert flat.tolist() == [3] * NUM_ELEMENTS
    assert b.values.aliased(unit)
    assert b.values.current(unit)
    flat.fill_(4)
    assert not unit.the_block().dirty, "nobody has said so yet"
    b.values.keep(unit.parameters[0], flat)
    assert unit.the_block().dirty
    del flat
    assert not b.values.aliased(unit)
    b.evict(unit)
    assert not b.values.current(unit)
    assert b.values.acquire(unit)[0] == 4


def test_a_block_that_a_user_may_change_is_written_home(b: Bench) -> None:
    unit = b.unit("a", 3)
    b.values.acquire(unit)
    b.values.may_change(unit)
    num_writes = b.num_writes()
    b.evict(unit)
    assert b.num_writes() == num_writes + 1


def test_a_pinned_unit_stays_in_host_memory(b: Bench) -> None:
    first, second, third = (b.unit(name, 1) for name in "abc")
    b.values.acquire(first)
    b.values.pin(first)
    b.values.acquire(second)
    b.values.acquire(third)
    assert b.values.current(first)
    assert not b.values.current(second)
    b.values.unpin(first)
    b.values.acquire(second)
    assert not b.values.current(first)


class Copies:
    """A device cache that writes down its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **keywords: self.calls.append((name, (*args, *keywords.values())))


def test_copied_values_are_kept_at_home_rounded_as_they_are_stored() -> None:
    cache = Copies()
    values, unit = CopiedValues(cast(DeviceCache, cache), None), unit_of("a", dtype=torch.bfloat16)
    flat = torch.full((NUM_ELEMENTS,), 1 + 2**-12)
    values.keep(unit.parameters[0], flat)
    assert cache.calls == [("write_home", (unit, flat))]
    assert flat.tolist() == [1] * NUM_ELEMENTS, "the next forward sees what is stored"


def test_an_update_makes_copies_stale_and_is_not_seen_through_them() -> None:
    cache = Copies()
    values, unit = CopiedValues(cast(DeviceCache, cache), None), unit_of("a")
    assert not values.aliased(unit)
    values.updated(unit)
    values.end_cycle(same_order=True)
    values.write_home()
    assert cache.calls == [("invalidate", (unit,)), ("end_cycle", (True,)), ("write_back_all", ())]


class Full:
    """A cache on a device without memory for `num_failures` copies, and the memory, which may shrink `num_times`."""

    def __init__(self, num_failures: int, num_times: int) -> None:
        self.num_failures = num_failures
        self.num_times = num_times
        self.told: list[str] = []

    def acquire(self, _: Unit) -> torch.Tensor:
        if self.num_failures:
            self.num_failures -= 1
            raise torch.OutOfMemoryError
        return torch.ones(NUM_ELEMENTS)

    def shrink(self, when: str) -> bool:
        self.told.append(when)
        self.num_times -= 1
        return self.num_times >= 0


@pytest.mark.parametrize(
    ("num_failures", "num_times", "is_enough"), [(1, 0, True), (1, 1, True), (2, 2, True), (2, 0, False), (3, 1, False)]
)
def test_a_copy_is_asked_for_again_while_the_cache_shrinks(num_failures: int, num_times: int, is_enough: bool) -> None:
    """Once more even if it cannot shrink: what was not in use has been given back."""
    full = Full(num_failures, num_times)
    values, unit = CopiedValues(cast(DeviceCache, full), full), unit_of("a")
    if is_enough:
        assert values.acquire(unit).sum() == NUM_ELEMENTS
    else:
        with pytest.raises(torch.OutOfMemoryError):
            values.acquire(unit)
    assert full.told == ["when a layer was to be copied to it"] * len(full.told)
    assert full.num_failures == 0 or not is_enough


def test_copies_in_memory_that_never_shrinks_fail_at_once() -> None:
    full = Full(1, 1)
    with pytest.raises(torch.OutOfMemoryError):
        CopiedValues(cast(DeviceCache, full), None).acquire(unit_of("a"))
    assert full.told == []
