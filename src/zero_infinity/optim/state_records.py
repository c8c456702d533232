"""Optimizer state records: the states of a unit, cut into chunks that stream through memory.

A chunk covers a range of a unit's elements and owns two blocks: the *record* (master weights if there are any, then
each state, contiguous, so that one sequential read and one write move them all) and the *gradient*, which has content
only while a gradient waits for its update. A parameter that its optimizer must see whole has one chunk of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch

from zero_infinity.optim.state_slots import Slot, TensorForm, WholeState, element_slots, record_bytes, whole_slots
from zero_infinity.optim.stochastic_rounding import NUM_ROUNDINGS
from zero_infinity.optim.update_kind import UpdateKinds
from zero_infinity.optim.update_rule import Scalars, copy_scalars
from zero_infinity.params.precision import Precision
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
    slots: dict[str, Slot]  # of the record, in order
    record: Block | None  # None if the optimizer has no state here, or another rank has it
    gradient: Block

    @property
    def num_elements(self) -> int:
        return self.stop - self.start

    def state(self, memory: torch.Tensor, name: str, segment: Segment) -> torch.Tensor:
        """Return a segment's part of one slot, flat, given the bytes of the record; all of it for a whole parameter."""
        slot = self.slots[name]
        flat = slot.of(memory)
        return flat if slot.form is not None else flat[segment.offset : segment.offset + segment.stop - segment.start]


@dataclass(eq=False, slots=True)
class StateRecord:
    """All chunks of a unit, and the scalars of each of its trained parameters."""

    unit: Unit
    dtype: torch.dtype  # of master weights, of gradients, and of the arithmetic of updates
    has_master: bool
    state_names: dict[ManagedParameter, tuple[str, ...]]  # of the tensors in the record
    wholes: dict[ManagedParameter, WholeState] = field(default_factory=dict)  # of those that are updated whole
    chunks: list[Chunk] = field(default_factory=list)  # of the elements that this rank updates
    # Of the elements whose gradients it keeps: the same, except on a rank that keeps whole gradients and updates a
    # shard.
    gradient_chunks: list[Chunk] = field(default_factory=list)
    scalars: dict[ManagedParameter, Scalars] = field(default_factory=dict)
    state_dtype: torch.dtype | None = None  # that of states, if they are kept in fewer bits
    rounding_seed: int = 0
    # Parameters that have a state by now, with all its names in the optimizer's order (`nested_state.py`).
    started: dict[ManagedParameter, tuple[str, ...]] = field(default_factory=dict)

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the values per element, of parameters that are updated in slices."""
        names = dict.fromkeys(n for p, names in self.state_names.items() if p not in self.wholes for n in names)
        return (*self.master, *names)

    @property
    def rounds(self) -> bool:
        """True if an update computes in more bits than something is kept in, and rounds it."""
        return self.state_dtype is not None or (self.unit.dtype != self.dtype and not self.has_master)

    def names_of(self, parameter: ManagedParameter) -> tuple[str, ...]:
        """What the optimizer keeps for a parameter by now, in its order."""
        return tuple(name for name in self.started.get(parameter, ()) if name != NUM_ROUNDINGS)

    def scalars_of(self, parameter: ManagedParameter) -> Scalars:
        """Copies of those that are not in the record's blocks."""
        kept = self.scalars.get(parameter, {}) if parameter in self.started else {}
        return copy_scalars({name: value for name, value in kept.items() if name != NUM_ROUNDINGS})

    def kept_dtype(self, name: str, dtype: torch.dtype | None = None) -> torch.dtype:
        """The dtype of a slot for a state that the optimizer has in `dtype` (by default, in that of updates)."""
        own = self.dtype if dtype is None else dtype
        return self.state_dtype if self.state_dtype is not None and own == self.dtype and name != MASTER else own

    @property
    def master(self) -> tuple[str, ...]:
        """The name of the slot of master weights, if there are any."""
        return (MASTER,) if self.has_master else ()

    @property
    def widths(self) -> ElementBytes:
        """Bytes per element, of parameters that are updated in slices."""
        record = sum(self.kept_dtype(name).itemsize for name in self.slots)
        return ElementBytes(self.unit.dtype.itemsize, record=record, gradient=self.dtype.itemsize)

    def num_elements(self, span: Span) -> int:
        """Return the elements from the first to the last trained one in `span`: the most that chunks cover."""
        trained = list(self.state_names)
        return len(span.overlap(trained[0].offset, round_up_elements(trained[-1].end)))

    def wide_dtype(self, parameter: ManagedParameter, name: str) -> torch.dtype:
        """The dtype in which the optimizer has a state."""
        whole = self.wholes.get(parameter)
        return self.dtype if whole is None or name not in whole.forms else whole.forms[name].dtype

    def form_of(self, parameter: ManagedParameter, name: str) -> TensorForm:
        """The form of a state, or of the master weights."""
        whole = self.wholes.get(parameter)
        if whole is not None and name in whole.forms:
            form = whole.forms[name]
            return replace(form, dtype=self.kept_dtype(name, form.dtype))
        return TensorForm(parameter.shape, parameter.stride, self.kept_dtype(name))

    def slots_of(self, num_elements: int) -> dict[str, Slot]:
        """The slots of a chunk of elements."""
        return element_slots({name: self.kept_dtype(name) for name in self.slots}, num_elements)

    def whole_slots(self, parameter: ManagedParameter) -> dict[str, Slot]:
        """The slots of a parameter that is updated whole."""
        own = element_slots(dict.fromkeys(self.master, self.dtype), round_up_elements(parameter.num_elements))
        return whole_slots(own, {name: self.form_of(parameter, name) for name in self.wholes[parameter].forms})

    def whole_sizes(self, span: Span) -> dict[ManagedParameter, int]:
        """Bytes of the record of each parameter in `span` that is updated whole."""
        return {
            parameter: record_bytes(self.whole_slots(parameter))
            for parameter in self.wholes
            if len(span.overlap(parameter.offset, parameter.end))
        }


def make_record(unit: Unit, precision: Precision, kinds: UpdateKinds, *, rounding_seed: int = 0) -> StateRecord | None:
    """Return the record of a unit, without chunks yet; None if nothing in it is trained."""
    trained = [p for p in unit.parameters if p.group is not None]
    if not trained:
        return None
    dtype = precision.optimized
    wholes = {p: kinds.whole_state(p, dtype) for p in trained if kinds.is_whole(p.group or 0, dtype)}
    names = {p: tuple(wholes[p].forms) if p in wholes else kinds.element_names(p.group or 0, dtype) for p in trained}
    return StateRecord(
        unit,
        dtype,
        has_master=precision.has_master,
        state_names=names,
        wholes=wholes,
        state_dtype=precision.states if precision.states.itemsize < dtype.itemsize else None,
        rounding_seed=rounding_seed,
    )


def make_chunks(
    record: StateRecord, chunk_bytes: int, home: Home, store: BlockStore, *, whole_gradients: bool
) -> Iterator[Block]:
    """Split the record into chunks of about `chunk_bytes`, or of whole parameters; yields their blocks."""
    num_elements = chunk_elements(chunk_bytes, record.widths)
    owned = record.unit.owned
    others = (Span(0, owned.start), Span(owned.stop, record.unit.num_elements)) if whole_gradients else ()
    for span in (owned, *others):
        for start, stop, segments in _cut_record(record, num_elements, span):
            name = f"{record.unit.name}[{len(record.gradient_chunks)}]"
            first = segments[0].parameter
            slots = record.whole_slots(first) if first in record.wholes else record.slots_of(stop - start)
            is_kept = bool(slots) and span is owned
            kept = store.create(f"{name} optimizer record", record_bytes(slots), home) if is_kept else None
            gradient = store.create(f"{name} gradient", (stop - start) * record.dtype.itemsize, home)
            chunk = Chunk(start, stop, segments, slots, kept, gradient)
            record.gradient_chunks.append(chunk)
            if span is owned:
                record.chunks.append(chunk)
            yield from (block for block in (kept, chunk.gradient) if block is not None)


def make_device_chunk(record: StateRecord, store: BlockStore, device: torch.device) -> None:
    """Give a record that lives on the device its memory: one chunk. Its gradients stay where they are computed."""
    owned = record.unit.owned
    for start, stop, segments in cut(list(record.state_names), len(owned), owned):
        name, size = f"{record.unit.name}[0]", (stop - start) * record.dtype.itemsize
        slots = record.slots_of(stop - start)
        kept = store.create_on_device(f"{name} optimizer record", record_bytes(slots), device) if slots else None
        gradient = store.create(f"{name} gradient", size, Home.DEVICE)  # never gets memory
        record.chunks.append(Chunk(start, stop, segments, slots, kept, gradient))


def _cut_record(record: StateRecord, num_elements: int, span: Span) -> Iterator[tuple[int, int, tuple[Segment, ...]]]:
    """Cut the trained parameters, but not those that are updated whole, each of which is alone."""
    for is_whole, run in itertools.groupby(record.state_names, lambda parameter: parameter in record.wholes):
        for members in [[one] for one in run] if is_whole else [list(run)]:
            most = round_up_elements(members[0].num_elements) if is_whole else num_elements
            yield from cut(members, most, span)


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
