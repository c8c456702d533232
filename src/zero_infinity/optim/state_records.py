"""Optimizer state records: the per-element state of a unit, cut into chunks that stream through memory.

A chunk covers a range of a unit's elements and owns two blocks: the *record* (master weights if there are any, then
each state, contiguous, so that one sequential read and one write move them all) and the *gradient*, which has content
only while a gradient waits for its update.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch.optim import Optimizer

from zero_infinity.optim.elementwise_probe import probe_state_names
from zero_infinity.optim.update_rule import Scalars
from zero_infinity.params.unit import ManagedParameter, Unit
from zero_infinity.policy.alignment import round_up_elements
from zero_infinity.policy.chunk_size import chunk_elements
from zero_infinity.policy.homes import Home
from zero_infinity.policy.partition import Span
from zero_infinity.policy.unit_sizes import ElementBytes
from zero_infinity.storage.block import Block
from zero_infinity.storage.block_store import BlockStore

MASTER = "master"


@dataclass(frozen=True, slots=True)
class Segment:
    """The part of one parameter that lies in a chunk: elements `start` to `stop` of the parameter."""

    parameter: ManagedParameter
    start: int
    stop: int
    offset: int  # elements from the start of the chunk


@dataclass(eq=False, slots=True)
class Chunk:
    """Elements `start` to `stop` of a unit."""

    start: int
    stop: int
    segments: tuple[Segment, ...]
    slots: tuple[str, ...]  # the record's values per element, in order
    record: Block | None  # None if the optimizer has no state per element, or another rank has it
    gradient: Block

    @property
    def num_elements(self) -> int:
        return self.stop - self.start

    def slot(self, memory: torch.Tensor, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Return one slot of the record whose bytes are `memory`."""
        width = self.num_elements * dtype.itemsize
        begin = self.slots.index(name) * width
        return memory[begin : begin + width].view(dtype)


@dataclass(eq=False, slots=True)
class StateRecord:
    """All chunks of a unit, and the scalars of each of its trained parameters."""

    unit: Unit
    dtype: torch.dtype  # of master weights and states
    has_master: bool
    state_names: dict[ManagedParameter, tuple[str, ...]]
    chunks: list[Chunk] = field(default_factory=list)  # of the elements that this rank updates
    # Of the elements whose gradients it keeps: the same, except on a rank that keeps whole gradients and updates a
    # shard.
    gradient_chunks: list[Chunk] = field(default_factory=list)
    scalars: dict[ManagedParameter, Scalars] = field(default_factory=dict)
    # Parameters that have a state by now, with all its names in the optimizer's order.
    started: dict[ManagedParameter, tuple[str, ...]] = field(default_factory=dict)

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the values per element."""
        names = dict.fromkeys(name for names in self.state_names.values() for name in names)
        return ((MASTER,) if self.has_master else ()) + tuple(names)

    @property
    def widths(self) -> ElementBytes:
        """Bytes per element."""
        itemsize = self.dtype.itemsize
        return ElementBytes(self.unit.dtype.itemsize, record=len(self.slots) * itemsize, gradient=itemsize)

    def num_elements(self, span: Span) -> int:
        """Return the elements from the first to the last trained one in `span`: the most that chunks cover."""
        trained = list(self.state_names)
        return len(span.overlap(trained[0].offset, round_up_elements(trained[-1].end)))


class StateRecordMaker:
    """Makes the records of units for one optimizer, which is probed once per parameter group and dtype."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._names: dict[tuple[int, torch.dtype], tuple[str, ...]] = {}

    def make(self, unit: Unit, dtype: torch.dtype) -> StateRecord | None:
        """Return the record of a unit, without chunks yet; None if nothing in it is trained."""
        state_names = {p: self._state_names(p.group, dtype) for p in unit.parameters if p.group is not None}
        return (
            StateRecord(unit, dtype, has_master=dtype != unit.dtype, state_names=state_names) if state_names else None
        )

    def _state_names(self, group: int, dtype: torch.dtype) -> tuple[str, ...]:
        if (group, dtype) not in self._names:
            settings = self._optimizer.param_groups[group]
            self._names[group, dtype] = probe_state_names(self._optimizer, settings, dtype)
        return self._names[group, dtype]


def make_chunks(
    record: StateRecord, chunk_bytes: int, home: Home, store: BlockStore, *, whole_gradients: bool
) -> Iterator[Block]:
    """Split the record into chunks of about `chunk_bytes`; yields their blocks."""
    slots = record.slots
    num_elements = chunk_elements(chunk_bytes, record.widths)
    owned = record.unit.owned
    others = (Span(0, owned.start), Span(owned.stop, record.unit.num_elements)) if whole_gradients else ()
    for span in (owned, *others):
        for start, stop, segments in cut(list(record.state_names), num_elements, span):
            name = f"{record.unit.name}[{len(record.gradient_chunks)}]"
            size = (stop - start) * record.dtype.itemsize
            is_kept = bool(slots) and span is owned
            kept = store.create(f"{name} optimizer record", size * len(slots), home) if is_kept else None
            chunk = Chunk(start, stop, segments, slots, kept, store.create(f"{name} gradient", size, home))
            record.gradient_chunks.append(chunk)
            if span is owned:
                record.chunks.append(chunk)
            yield from (block for block in (kept, chunk.gradient) if block is not None)


def make_device_chunk(record: StateRecord, store: BlockStore, device: torch.device) -> None:
    """Give a record that lives on the device its memory: one chunk. Its gradients stay where they are computed."""
    owned = record.unit.owned
    for start, stop, segments in cut(list(record.state_names), len(owned), owned):
        name, size = f"{record.unit.name}[0]", (stop - start) * record.dtype.itemsize
        slots = record.slots
        kept = store.create_on_device(f"{name} optimizer record", size * len(slots), device) if slots else None
        gradient = store.create(f"{name} gradient", size, Home.DEVICE)  # never gets memory
        record.chunks.append(Chunk(start, stop, segments, slots, kept, gradient))


def cut(
    trained: list[ManagedParameter], num_elements: int, span: Span
) -> Iterator[tuple[int, int, tuple[Segment, ...]]]:
    """Split the trained parameters inside `span` into ranges of at most `num_elements` (whole grains) elements.

    Ranges start at multiples of GRAIN. Frozen parameters are left out.
    """
    start = 0
    segments: list[Segment] = []
    for parameter in trained:
        mine = span.overlap(parameter.offset, parameter.end)
        done = mine.start - parameter.offset
        while parameter.offset + done < mine.stop:
            begin = parameter.offset + done
            if segments and begin - start >= num_elements:
                yield start, _end(start, segments), tuple(segments)
                segments = []
            if not segments:
                start = begin
            take = min(start + num_elements, mine.stop) - begin
            segments.append(Segment(parameter, done, done + take, begin - start))
            done += take
    if segments:
        yield start, _end(start, segments), tuple(segments)


def _end(start: int, segments: list[Segment]) -> int:
    last = segments[-1]
    return start + round_up_elements(last.offset + last.stop - last.start)
