"""Where a module gets a unit's elements from.

`HostUnits`: straight from the host's block, no copy; when the model runs on the CPU in the dtype that is stored.
`DeviceCache`: from a copy at the place of computation (an accelerator, the CPU in another dtype, or the CPU of a rank
that stores a part of each unit). The copies are a tier of their own above the host's, with their own budget and the
same policy; what it fetches is an access to the tier below, so each hop runs ahead of the next.

Where ranks store parts, a copy is gathered from all of them, so all have to make the same copies in the same order.
Therefore nothing but the order of accesses decides there, not whether a tensor has died yet or whether a copy is done.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch

from zero_infinity.comm.channel import Channel, Topic
from zero_infinity.engine_parts import PolicyFactory
from zero_infinity.errors import CapacityError, DivergenceError, again
from zero_infinity.interrupts import through
from zero_infinity.one_core_thread import use_one_core
from zero_infinity.params.unit import ManagedParameter, Unit
from zero_infinity.policy.cache_policy import CachePolicy, Decision, NoRoomError
from zero_infinity.policy.unit_sizes import copy_bytes
from zero_infinity.storage.block_store import BlockStore
from zero_infinity.tiers.accelerator import ComputeDevice, DeviceMemory
from zero_infinity.tiers.host_cache import HostCache
from zero_infinity.trace import COPIES, HOST, Category
from zero_infinity.units import format_bytes

# Numbers of groups of several units are apart from those of units.
_JOINED = 1 << 32
# How often who waits for the copying thread looks whether it is still there.
_POLL_SECONDS = 0.1


class UnitSource(Protocol):
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

    def write_home(self) -> None:
        """Write what users may have changed into the blocks, which are about to be read."""


class HostUnits:
    """Units straight from their blocks."""

    def __init__(self, host_cache: HostCache) -> None:
        self._host_cache = host_cache

    def acquire(self, unit: Unit) -> torch.Tensor:
        block = unit.the_block()
        self._host_cache.access(block)
        self._host_cache.wait(block)
        return self._host_cache.store.lease(block)[: unit.stored_bytes].view(unit.dtype)

    def current(self, unit: Unit) -> bool:
        return self._host_cache.store.ready(unit.the_block())

    def pin(self, unit: Unit) -> None:
        self._host_cache.pin(unit.the_block())

    def unpin(self, unit: Unit) -> None:
        self._host_cache.unpin(unit.the_block())

    def keep(self, parameter: ManagedParameter, flat: torch.Tensor) -> None:  # noqa: ARG002 - it is there already
        self._host_cache.store.mark_dirty(parameter.unit.the_block())

    def may_change(self, unit: Unit) -> None:
        self._host_cache.store.mark_dirty(unit.the_block())

    def aliased(self, unit: Unit) -> bool:
        return unit.the_block().leased

    def updated(self, unit: Unit) -> None:
        """The update changes the block itself."""

    def end_cycle(self, *, same_order: bool) -> None:
        """The tier below has its own."""

    def write_home(self) -> None:
        """It is written there in the first place."""


class _Copy:
    """One unit's elements at the place of computation."""

    __slots__ = ("dropped", "error", "make_safe", "memory", "ready", "unit", "written")

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.memory: DeviceMemory | None = None
        self.make_safe: Callable[[], None] | None = None
        self.ready = threading.Event()
        self.error: BaseException | None = None
        self.dropped = False
        self.written = False  # a user's tensor over it may have been written to

    def flat(self) -> torch.Tensor:
        if self.memory is None:
            raise RuntimeError(f"the copy of {self.unit.name!r} has no memory")
        return self.memory.tensor()[: _copy_bytes(self.unit)].view(self.unit.compute_dtype)


class _Group:
    """Units that are copied together: mostly one."""

    __slots__ = ("key", "name", "number", "units")

    def __init__(self, key: int, number: int, name: str, units: Sequence[Unit]) -> None:
        self.key = key
        self.number = number  # the same on every rank
        self.name = name
        self.units = units


class DeviceCache:
    """Copies of units at a place, under a byte budget."""

    def __init__(
        self,
        host_cache: HostCache,
        place: ComputeDevice,
        budget: int,
        lookahead: int,
        channel: Channel | None = None,
        *,
        tier: str = COPIES,
        make_policy: PolicyFactory = CachePolicy,
    ) -> None:
        trace = host_cache.store.trace
        self._tier = tier  # its name in a trace
        if trace is not None:
            trace.budgets[self._tier] = budget
        self.copier = Copier(host_cache.store, place, channel, lane=f"{HOST} to {self._tier}")
        # Asked when ranks want different units: units that all of them are to gather instead, if there are any.
        self.on_mismatch: Callable[[Sequence[int]], tuple[str, Sequence[Unit]] | None] = lambda _: None
        self._host_cache = host_cache
        self._is_shared = channel is not None
        self._last_key: int | None = None  # of the last access
        # An update is each rank's own affair, in its own time; copies for the next cycle come after all of them.
        self._policy = make_policy(budget, lookahead, self._in_use, wraps=not self._is_shared)
        self._groups: dict[int, _Group] = {}  # by key
        self._group_of: dict[Unit, _Group] = {}
        self._copies: dict[int, dict[Unit, _Copy]] = {}  # by key of their group
        self._outdated: set[int] = set()
        self._pins: Counter[int] = Counter()
        self._lock = threading.RLock()

    def add(self, unit: Unit) -> None:
        self._add(_Group(unit.the_block().key, unit.number, unit.name, [unit]))

    def join(self, name: str, units: Sequence[Unit]) -> None:
        """From now on these units are copied together, whichever is asked for."""
        with self._lock:
            known = [self._group_of[unit] for unit in units]
            if len(set(known)) == 1:
                return
            for group in dict.fromkeys(known):
                self._policy.forget(group.key)
                self._drop(group.key)
            self._add(_Group(known[0].key, _JOINED + known[0].number, name, list(units)))

    def group_of(self, number: int) -> tuple[str, Sequence[Unit]] | None:
        """Units that are copied together under this number."""
        found = (group for group in self._groups.values() if group.number == number and len(group.units) > 1)
        return next(((group.name, group.units) for group in found), None)

    def _add(self, group: _Group) -> None:
        self._groups[group.key] = group
        self._group_of.update(dict.fromkeys(group.units, group))
        self._policy.add(group.key, sum(copy_size(unit) for unit in group.units))

    def remove(self, unit: Unit) -> None:
        """Nothing is computed with `unit` any more, and it will have no home: what was written to its copy goes."""
        with self._lock:
            group = self._group_of.pop(unit, None)
            if group is not None:
                del self._groups[group.key]
                self._policy.forget(group.key)
                self._policy.end_cycle(same_order=False)  # what was recorded so far may have it
                for copy in self._copies.pop(group.key, {}).values():
                    self.copier.drop(copy)

    def lend(self, num_bytes: int) -> bool:
        """Let copies take that much less; False, and nothing changes, when too much is in use for that."""
        with self._lock:
            before = self._policy.budget
            if num_bytes > before:
                return False
            for key in self._policy.shrink(before - num_bytes):
                self._drop(key)
            if self._policy.cached_bytes > self._policy.budget:
                self._policy.shrink(before)
                return False
        return True

    def take_back(self, num_bytes: int) -> None:
        """What was lent is there again."""
        with self._lock:
            self._policy.shrink(self._policy.budget + num_bytes)

    # ------------------------------------------------------------------ the computing thread

    def acquire(self, unit: Unit) -> torch.Tensor:
        while True:
            try:
                return self._acquire(unit)
            except DivergenceError as divergence:
                joined = self.on_mismatch(divergence.wanted)
                if joined is None:
                    raise
                # Each rank has made room for another unit: now all have the same copies, and the same record, again.
                self._forget_all()
                self._policy.retract()
                name, units = joined
                self.join(name, units)
                if self._group_of[unit] is not self._group_of[units[0]]:
                    self._acquire(units[0])

    def _acquire(self, unit: Unit) -> torch.Tensor:
        with self._lock:
            group = self._group_of[unit]
            if not self._is_last(group):
                self._access(group)
            copy = self._copies[group.key][unit]
        if not copy.ready.is_set():
            with self._host_cache.waiting(unit.name), through():
                copy.ready.wait()
        if copy.error is not None:
            raise again(copy.error)
        if copy.make_safe is not None:
            copy.make_safe()
        return copy.flat()

    def _access(self, group: _Group) -> None:
        try:
            decision = self._policy.access(group.key)
        except NoRoomError as error:
            raise _no_room(group.name, error) from None
        self._last_key = group.key
        self._carry_out(decision)

    def _carry_out(self, decision: Decision) -> None:
        for key in decision.evict:
            self._drop(key)
        for key in decision.fetch:
            self._fetch(self._groups[key])
        trace = self._host_cache.store.trace
        if trace is not None:
            trace.held(self._tier, time.perf_counter(), self._policy.cached_bytes)

    def _is_last(self, group: _Group) -> bool:
        """Whether it is used again, and nothing else meanwhile: how often may differ between ranks."""
        return self._is_shared and self._last_key == group.key and group.key in self._copies

    def current(self, unit: Unit) -> bool:
        group = self._group_of[unit]
        copy = self._copies.get(group.key, {}).get(unit)
        return copy is not None and copy.ready.is_set() and (not self._is_shared or self._is_last(group))

    def pin(self, unit: Unit) -> None:
        self._pins[self._group_of[unit].key] += 1

    def unpin(self, unit: Unit) -> None:
        self._pins[self._group_of[unit].key] -= 1

    def keep(self, parameter: ManagedParameter, flat: torch.Tensor) -> None:
        unit = parameter.unit
        self._write_home(unit, flat)
        if unit.dtype != unit.compute_dtype:
            # What is stored is rounded; a copy that is not would give other numbers than the next one.
            part = parameter.of(flat)
            part.copy_(part.to(unit.dtype))

    def may_change(self, unit: Unit) -> None:
        self._copies[self._group_of[unit].key][unit].written = True

    def aliased(self, unit: Unit) -> bool:  # noqa: ARG002 - the update does not touch copies
        return False

    def updated(self, unit: Unit) -> None:
        with self._lock:
            group = self._group_of[unit]
            if self._is_shared:
                # It is not read again in this cycle, on no rank. What was written to it counts before the update.
                self._take_home(self._copies.get(group.key, {}).values())
                self._outdated.add(group.key)
            else:
                self._policy.forget(group.key)
                self._drop(group.key)

    def end_cycle(self, *, same_order: bool) -> None:
        with self._lock:
            for key in sorted(self._outdated):
                self._policy.forget(key)
                self._drop(key)
            self._outdated.clear()
            self._last_key = None
            # Which updates come early may differ between ranks, and changes nothing about the order of these accesses.
            self._policy.end_cycle(same_order=same_order or self._is_shared)
            if self._is_shared:
                self._carry_out(self._policy.look_ahead())

    def write_home(self) -> None:
        with self._lock:
            for copy in [copy for copies in self._copies.values() for copy in copies.values() if copy.written]:
                flat = copy.flat()
                self._write_home(copy.unit, flat)  # the user may write again: the copy stays marked
                if copy.unit.dtype != copy.unit.compute_dtype:
                    flat.copy_(flat.to(copy.unit.dtype))  # as in `keep`

    def _in_use(self, key: int) -> bool:
        if self._pins[key] or self._is_shared:
            return self._pins[key] > 0
        memories = (copy.memory for copy in self._copies[key].values())
        return any(memory is not None and memory.leases > 0 for memory in memories)

    def _fetch(self, group: _Group) -> None:
        copies = self._copies[group.key] = {unit: _Copy(unit) for unit in group.units}
        for unit in group.units:
            self._host_cache.access(unit.the_block())
            self._host_cache.store.hold_to_read(unit.the_block())
        self.copier.submit(group, list(copies.values()))

    def _drop(self, key: int) -> None:
        copies = self._copies.pop(key, {}).values()
        self._take_home(copies)
        for copy in copies:
            self.copier.drop(copy)

    def _take_home(self, copies: Iterable[_Copy]) -> None:
        for copy in copies:
            if copy.written:
                self._write_home(copy.unit, copy.flat())
                copy.written = False

    def _forget_all(self) -> None:
        """Drop every copy that nothing pins."""
        with self._lock:
            for key in [key for key in self._copies if not self._pins[key]]:
                self._policy.forget(key)
                self._drop(key)
            self._last_key = None

    def _write_home(self, unit: Unit, flat: torch.Tensor) -> None:
        block = unit.the_block()
        self._host_cache.access(block)
        self._host_cache.wait(block)
        with self._host_cache.store.changing(block) as memory:
            mine = flat[unit.stored.start : unit.stored.stop]
            memory.view(unit.dtype)[: len(mine)].copy_(self.copier.place.download(mine))
        self._host_cache.store.mark_dirty(block)


class Copier:
    """Makes copies, in order, on a thread of its own. It refers to a unit only while a copy of it is being made."""

    def __init__(self, store: BlockStore, place: ComputeDevice, channel: Channel | None, *, lane: str) -> None:
        self.place = place
        self._lane = lane  # in a trace
        self._channel = channel
        self._store = store
        self._changed = threading.Condition(threading.Lock())
        self._num_pending = 0
        self._tasks: queue.SimpleQueue[tuple[_Group, list[_Copy]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="zero-infinity-copy", daemon=True)
        self._thread.start()

    def submit(self, group: _Group, copies: list[_Copy]) -> None:
        with self._changed:
            self._num_pending += 1
        self._tasks.put((group, copies))

    def drain(self) -> None:
        """Wait until every copy is made, also those that nobody wants any more. A failure is for who acquires it."""
        with self._changed:
            while self._num_pending and self._thread.is_alive():
                with through():
                    self._changed.wait(_POLL_SECONDS)

    def drop(self, copy: _Copy) -> None:
        """Nobody needs the copy any more."""
        with self._changed:
            copy.dropped = True
            if copy.ready.is_set() and copy.memory is not None:
                copy.memory.release()

    def close(self) -> None:
        """End the thread after the copy that it makes now."""
        self._tasks.put(None)
        if self._channel is not None:
            self._channel.end(self._thread)
        elif threading.current_thread() is not self._thread:
            self._thread.join()
        self.place.close()

    def _work(self) -> None:
        use_one_core()
        failed: BaseException | None = None  # of an exchange: there are none after that
        while (task := self._tasks.get()) is not None:
            group, copies = task
            try:
                if failed is not None:
                    raise again(failed)
                self._make(group, copies)
            except BaseException as error:  # noqa: BLE001 - raised by whoever acquires the copy
                for copy in copies:
                    copy.error = error.with_traceback(None)  # its frames hold the copies, and their memory
                # When ranks want different units nothing was exchanged, and they may find a way to go on.
                if self._channel is not None and not isinstance(error, DivergenceError):
                    failed = error
            with self._changed:
                for copy in copies:
                    copy.ready.set()
                    if copy.dropped and copy.memory is not None:
                        copy.memory.release()
                self._num_pending -= 1
                self._changed.notify_all()
            del task, group, copies, copy

    def _make(self, group: _Group, copies: list[_Copy]) -> None:
        with torch.no_grad():
            if self._channel is not None:
                self._gather(self._channel, group, copies)
                return
            for copy in copies:
                unit = copy.unit
                if not copy.dropped:
                    copy.memory = self.place.allocate(_copy_bytes(unit))
                with self._store.reading(unit.the_block()) as memory:
                    if copy.memory is not None:
                        copy.make_safe = self._upload(unit, memory.view(unit.dtype), copy.flat())

    def _upload(self, unit: Unit, source: torch.Tensor, target: torch.Tensor) -> Callable[[], None]:
        start = time.perf_counter()
        make_safe = self.place.upload(source, target)
        if self._store.trace is not None:
            seconds = time.perf_counter() - start
            self._store.trace.span(unit.name, Category.FETCH, self._lane, start, seconds, source.nbytes)
        return make_safe

    def _gather(self, channel: Channel, group: _Group, copies: list[_Copy]) -> None:
        """Also copies that are not wanted any more: the other ranks count on it."""
        wholes = []
        for copy in copies:
            unit = copy.unit
            with self._store.reading(unit.the_block()) as memory:
                copy.memory = self.place.allocate(_copy_bytes(unit))
                whole = copy.flat()
                if unit.dtype != unit.compute_dtype:
                    whole = torch.empty(unit.num_elements, dtype=unit.dtype, device=whole.device)
                stored = memory.view(unit.dtype)[: len(unit.stored)]
                self._upload(unit, stored, whole[unit.stored.start : unit.stored.stop])()
                wholes.append((whole, unit.spans))
        topic = Topic("parameter gather", group.number, group.name)
        channel.agree(topic)
        channel.gather(topic, wholes)
        for copy, (whole, _) in zip(copies, wholes, strict=True):
            if whole.dtype != copy.unit.compute_dtype:
                copy.flat().copy_(whole)


def _copy_bytes(unit: Unit) -> int:
    return unit.num_elements * unit.compute_dtype.itemsize


def copy_size(unit: Unit) -> int:
    """What a copy takes, with what is needed while it is made."""
    staged = unit.is_stored_in_parts and unit.dtype != unit.compute_dtype
    return copy_bytes(
        unit.num_elements, stored=unit.dtype.itemsize, computed=unit.compute_dtype.itemsize, staged=staged
    )


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


def _no_room(name: str, error: NoRoomError) -> CapacityError:
    if error.needed > error.budget:
        # The room is a part of the memory: so much more of one is so much more of the other.
        return CapacityError(
            f"{name!r} is needed whole and takes {format_bytes(error.needed)}, but there is room for "
            f"{format_bytes(error.budget)} of whole units\n"
            f"  fix:   {math.ceil(10 * error.needed / error.budget) / 10:g} times as much memory (device_memory, when "
            "computing on an accelerator)"
        )
    return CapacityError(
        f"{name!r} needs {format_bytes(error.needed)} where it is computed, but the {format_bytes(error.budget)} "
        f"there are in use by {len(error.in_use)} other units\n"
        "  fix:   more device_memory (or memory, when computing on the CPU in another dtype)"
    )
