"""Where a module gets a unit's elements from.

`HostSource`: straight from the host's block, no copy; when the model runs on the CPU in the dtype that is stored.
`ComputeCache`: from a copy at the place of computation (an accelerator, the CPU in another dtype, or the CPU of a rank
that stores a part of each unit). The copies are a tier of their own above the host's, with their own budget and the
same policy; what it fetches is an access to the tier below, so each hop runs ahead of the next.

Where ranks store parts, a copy is gathered from all of them, so all have to make the same copies in the same order.
Therefore nothing but the order of accesses decides there, not whether a tensor has died yet or whether a copy is done.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch

from zero_infinity.errors import CapacityError, again
from zero_infinity.interrupts import through
from zero_infinity.runtime.accelerator import Memory, Place
from zero_infinity.runtime.residency import Residency
from zero_infinity.runtime.unit import ManagedParameter, Unit
from zero_infinity.schedule.policy import NoRoomError, Policy
from zero_infinity.shard.wire import Topic, Wire
from zero_infinity.store.blocks import BlockStore
from zero_infinity.store.extents import round_up
from zero_infinity.units import format_bytes


class Source(Protocol):
    """Gives units' elements to whoever computes with them."""

    def acquire(self, unit: Unit) -> torch.Tensor:
        """The elements in `unit.compute_dtype`; they stay while the tensor or a view lives."""

    def current(self, unit: Unit) -> bool:
        """Whether what was last acquired is still the unit's value, in memory."""

    def pin(self, unit: Unit) -> None:
        """Keep it in memory until `unpin`."""

    def unpin(self, unit: Unit) -> None: ...

    def keep(self, parameter: ManagedParameter, flat: torch.Tensor) -> None:
        """The user has changed the parameter in `flat`, which was acquired: that is its value now."""

    def may_change(self, unit: Unit) -> None:
        """The user has a tensor through which the value may change, now or later, without a trace."""

    def aliased(self, unit: Unit) -> bool:
        """Whether a tensor is alive through which an update would be seen."""

    def updated(self, unit: Unit) -> None:
        """An update of the unit has been submitted: copies are out of date."""

    def end_cycle(self, *, same_order: bool) -> None: ...


class HostSource:
    """Units straight from their blocks."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency

    def acquire(self, unit: Unit) -> torch.Tensor:
        block = unit.the_block()
        self._residency.access(block)
        self._residency.wait(block)
        return self._residency.store.lease(block)[: unit.stored_bytes].view(unit.dtype)

    def current(self, unit: Unit) -> bool:
        return self._residency.store.ready(unit.the_block())

    def pin(self, unit: Unit) -> None:
        self._residency.pin(unit.the_block())

    def unpin(self, unit: Unit) -> None:
        self._residency.unpin(unit.the_block())

    def keep(self, parameter: ManagedParameter, flat: torch.Tensor) -> None:  # noqa: ARG002 - it is there already
        self._residency.store.mark_dirty(parameter.unit.the_block())

    def may_change(self, unit: Unit) -> None:
        self._residency.store.mark_dirty(unit.the_block())

    def aliased(self, unit: Unit) -> bool:
        return unit.the_block().leased

    def updated(self, unit: Unit) -> None:
        """The update changes the block itself."""

    def end_cycle(self, *, same_order: bool) -> None:
        """The tier below has its own."""


class _Copy:
    """One unit's elements at the place of computation."""

    __slots__ = ("dropped", "error", "make_safe", "memory", "ready", "unit", "written")

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.memory: Memory | None = None
        self.make_safe: Callable[[], None] | None = None
        self.ready = threading.Event()
        self.error: BaseException | None = None
        self.dropped = False
        self.written = False  # a user's tensor over it may have been written to

    def flat(self) -> torch.Tensor:
        if self.memory is None:
            raise RuntimeError(f"the copy of {self.unit.name!r} has no memory")
        return self.memory.tensor()[: _copy_bytes(self.unit)].view(self.unit.compute_dtype)


class ComputeCache:
    """Copies of units at a place, under a byte budget."""

    def __init__(
        self, residency: Residency, place: Place, budget: int, lookahead: int, wire: Wire | None = None
    ) -> None:
        self.copier = Copier(residency.store, place, wire)
        self._residency = residency
        self._is_shared = wire is not None
        self._last_key: int | None = None  # of the last access
        self._policy = Policy(budget, lookahead, self._in_use)
        self._units: dict[int, Unit] = {}
        self._copies: dict[int, _Copy] = {}
        self._pins: Counter[int] = Counter()
        self._lock = threading.RLock()

    def add(self, unit: Unit) -> None:
        self._units[_key(unit)] = unit
        self._policy.add(_key(unit), copy_size(unit))

    # ------------------------------------------------------------------ the computing thread

    def acquire(self, unit: Unit) -> torch.Tensor:
        with self._lock:
            if not self._is_last(unit):
                self._access(unit)
            copy = self._copies[_key(unit)]
        if not copy.ready.is_set():
            start = time.perf_counter()
            with through():
                copy.ready.wait()
            self._residency.waited_seconds += time.perf_counter() - start
        if copy.error is not None:
            raise copy.error
        if copy.make_safe is not None:
            copy.make_safe()
        return copy.flat()

    def _access(self, unit: Unit) -> None:
        try:
            decision = self._policy.access(_key(unit))
        except NoRoomError as error:
            raise _no_room(unit, error) from None
        self._last_key = _key(unit)
        for key in decision.evict:
            self._drop(key)
        for key in decision.fetch:
            self._fetch(self._units[key])

    def _is_last(self, unit: Unit) -> bool:
        """Whether it is used again, and by nobody else meanwhile: how often may differ between ranks."""
        return self._is_shared and self._last_key == _key(unit) and _key(unit) in self._copies

    def current(self, unit: Unit) -> bool:
        copy = self._copies.get(_key(unit))
        return copy is not None and copy.ready.is_set() and (not self._is_shared or self._is_last(unit))

    def pin(self, unit: Unit) -> None:
        self._pins[_key(unit)] += 1

    def unpin(self, unit: Unit) -> None:
        self._pins[_key(unit)] -= 1

    def keep(self, parameter: ManagedParameter, flat: torch.Tensor) -> None:
        unit = parameter.unit
        self._write_home(unit, flat)
        if unit.dtype != unit.compute_dtype:
            # What is stored is rounded; a copy that is not would give other numbers than the next one.
            part = parameter.of(flat)
            part.copy_(part.to(unit.dtype))

    def may_change(self, unit: Unit) -> None:
        self._copies[_key(unit)].written = True

    def aliased(self, unit: Unit) -> bool:  # noqa: ARG002 - the update does not touch copies
        return False

    def updated(self, unit: Unit) -> None:
        with self._lock:
            self._policy.forget(_key(unit))
            self._drop(_key(unit))

    def end_cycle(self, *, same_order: bool) -> None:
        with self._lock:
            self._policy.end_cycle(same_order=same_order)

    def _in_use(self, key: int) -> bool:
        if self._pins[key] or self._is_shared:
            return self._pins[key] > 0
        memory = self._copies[key].memory
        return memory is not None and memory.leases > 0

    def _fetch(self, unit: Unit) -> None:
        copy = self._copies[_key(unit)] = _Copy(unit)
        block = unit.the_block()
        self._residency.access(block)
        self._residency.store.hold_to_read(block)
        self.copier.submit(copy)

    def _drop(self, key: int) -> None:
        copy = self._copies.pop(key, None)
        if copy is None:
            return
        if copy.written:
            self._write_home(copy.unit, copy.flat())
        self.copier.drop(copy)

    def _write_home(self, unit: Unit, flat: torch.Tensor) -> None:
        block = unit.the_block()
        self._residency.access(block)
        self._residency.wait(block)
        with self._residency.store.changing(block) as memory:
            mine = flat[unit.stored.start : unit.stored.stop]
            memory.view(unit.dtype)[: len(mine)].copy_(self.copier.place.download(mine))
        self._residency.store.mark_dirty(block)


class Copier:
    """Makes copies, in order, on a thread of its own. It refers to a unit only while a copy of it is being made."""

    def __init__(self, store: BlockStore, place: Place, wire: Wire | None = None) -> None:
        self.place = place
        self._wire = wire
        self._store = store
        self._lock = threading.Lock()
        self._tasks: queue.SimpleQueue[_Copy | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="zero-infinity-copy", daemon=True)
        self._thread.start()

    def submit(self, copy: _Copy) -> None:
        self._tasks.put(copy)

    def drop(self, copy: _Copy) -> None:
        """Nobody needs the copy any more."""
        with self._lock:
            copy.dropped = True
            if copy.ready.is_set() and copy.memory is not None:
                copy.memory.release()

    def close(self) -> None:
        """End the thread after the copy that it makes now."""
        self._tasks.put(None)
        if self._wire is not None:
            self._wire.end(self._thread)
        elif threading.current_thread() is not self._thread:
            self._thread.join()
        self.place.close()

    def _work(self) -> None:
        torch.set_num_threads(1)
        failed: BaseException | None = None  # of an exchange: there are none after that
        while (copy := self._tasks.get()) is not None:
            try:
                if failed is not None:
                    raise again(failed)
                self._make(copy)
            except BaseException as error:  # noqa: BLE001 - raised by whoever acquires the copy
                copy.error = error.with_traceback(None)
                if self._wire is not None:
                    failed = copy.error
            with self._lock:
                copy.ready.set()
                if copy.dropped and copy.memory is not None:
                    copy.memory.release()
            del copy

    def _make(self, copy: _Copy) -> None:
        unit = copy.unit
        if not copy.dropped or self._wire is not None:
            copy.memory = self.place.allocate(_copy_bytes(unit))
        with self._store.reading(unit.the_block()) as memory, torch.no_grad():
            if self._wire is not None:
                self._gather(self._wire, copy, memory.view(unit.dtype))
            elif copy.memory is not None:
                copy.make_safe = self.place.upload(memory.view(unit.dtype), copy.flat())

    def _gather(self, wire: Wire, copy: _Copy, stored: torch.Tensor) -> None:
        unit, flat = copy.unit, copy.flat()
        whole = flat
        if unit.dtype != unit.compute_dtype:
            whole = torch.empty(unit.num_elements, dtype=unit.dtype, device=flat.device)
        self.place.upload(stored[: len(unit.stored)], whole[unit.stored.start : unit.stored.stop])()
        topic = Topic("parameter gather", unit.number, unit.name)
        wire.agree(topic)
        wire.gather(topic, [(whole, unit.spans)])
        if whole is not flat:
            flat.copy_(whole)


def _key(unit: Unit) -> int:
    return unit.the_block().key


def _copy_bytes(unit: Unit) -> int:
    return unit.num_elements * unit.compute_dtype.itemsize


def copy_size(unit: Unit) -> int:
    """What a copy takes, with what is needed while it is made."""
    staged = unit.is_stored_in_parts and unit.dtype != unit.compute_dtype
    return round_up(_copy_bytes(unit)) + (round_up(unit.num_elements * unit.dtype.itemsize) if staged else 0)


def check_room(together: Iterable[Sequence[Unit]], budget: int) -> None:
    """Raise when units that are needed at once do not fit where they are computed."""
    for units in together:
        needed = sum(copy_size(unit) for unit in units)
        if needed <= budget:
            continue
        raise CapacityError(
            f"{units[0].name!r} needs {format_bytes(needed)} of device memory to be used, but device_memory is "
            f"{format_bytes(budget)}\n  fix:   device_memory={-(-needed // 2**20)}MiB or more"
        )


def _no_room(unit: Unit, error: NoRoomError) -> CapacityError:
    return CapacityError(
        f"{unit.name!r} needs {format_bytes(error.needed)} where it is computed, but the {format_bytes(error.budget)} "
        f"there are in use by {len(error.in_use)} other units\n"
        "  fix:   more device_memory (or memory, when computing on the CPU in another dtype)"
    )
