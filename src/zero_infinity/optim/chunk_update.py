"""Jobs of the update worker: update a unit with gradients chunk by chunk, or retain them for later.

A gradient is *fresh* (in memory, from this backward) or *retained* (in the chunks' gradient blocks, from earlier ones),
or both: then their sum is used.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from zero_infinity.one_core_thread import cores
from zero_infinity.optim.flat_gradient import FlatGradient
from zero_infinity.optim.nested_state import flat_state, nested_state, plain_values_of, tensors_of
from zero_infinity.optim.rounded_slots import RoundedSlots, counted
from zero_infinity.optim.state_records import MASTER, Chunk, Segment, StateRecord
from zero_infinity.optim.state_slots import TensorForm, check_forms
from zero_infinity.optim.update_rule import Hyperparameters, Scalars, UpdateRule, split_state
from zero_infinity.params.unit import ManagedParameter
from zero_infinity.storage.block import Block
from zero_infinity.storage.block_store import BlockStore
from zero_infinity.tiers.rounded_copies import take_edits
from zero_infinity.trace import UPDATE, Category, Trace


class FreshGradients(Protocol):
    """Gradients of one unit that are in memory or will be soon."""

    @property
    def is_ready(self) -> bool: ...

    @property
    def is_partial(self) -> bool:
        """True if other gradients of the same backward may follow. Waits."""

    def part(self, segment: Segment) -> torch.Tensor | None:
        """Return the elements of `segment`, which may be modified; None if its parameter has none. Waits."""


class PostponedGradients:
    """Gradients of an update that was not made, since they are partial: they wait for `step()`."""

    is_ready = True
    is_partial = True

    def __init__(self) -> None:
        self._parts: dict[Segment, torch.Tensor] = {}

    def __bool__(self) -> bool:
        return bool(self._parts)

    def put(self, segment: Segment, gradient: torch.Tensor) -> None:
        self._parts[segment] = gradient

    def part(self, segment: Segment) -> torch.Tensor | None:
        return self._parts.get(segment)


class WholeGradients:
    """Gradients as computed by autograd, flat, by parameter."""

    is_partial = False

    def __init__(self, flats: Mapping[ManagedParameter, FlatGradient]) -> None:
        self._flats = flats

    @property
    def is_ready(self) -> bool:
        return all(flat.is_here for flat in self._flats.values())

    def part(self, segment: Segment) -> torch.Tensor | None:
        flat = self._flats.get(segment.parameter)
        return None if flat is None else flat.wait()[segment.start : segment.stop]


@dataclass(slots=True)
class UnitUpdate:
    """The update of one unit."""

    record: StateRecord
    fresh: FreshGradients
    retained: Collection[ManagedParameter]
    hyperparameters: dict[ManagedParameter, Hyperparameters]
    rule: UpdateRule
    factors: tuple[torch.Tensor, ...]  # gradients are multiplied by each in turn (unscale, clip)
    done: Callable[[], None]
    postponed: PostponedGradients = field(default_factory=PostponedGradients)
    keeps_gradients: bool = False  # retained gradients, multiplied by `factors`, stay in their blocks
    # Of the thread that submits it: sums over a whole parameter depend on how many threads share them.
    num_threads: int = field(default_factory=torch.get_num_threads)
    _states: list[tuple[ManagedParameter, tuple[str, ...], Scalars]] = field(default_factory=list)

    @property
    def is_ready(self) -> bool:
        return self.fresh.is_ready

    @property
    def chunks(self) -> list[Chunk]:
        return self.record.chunks

    def blocks(self, chunk: Chunk) -> list[Block]:
        """Return the blocks held for the update of `chunk`, the unit's own block first."""
        blocks = (self.record.unit.the_block(), chunk.gradient if self.retained else None, chunk.record)
        return [block for block in blocks if block is not None]

    def apply(self, chunk: Chunk, store: BlockStore) -> None:
        """Update one chunk. New scalars are stored at the end, because the other chunks need the old ones."""
        is_partial = False
        try:
            is_partial = self.fresh.is_partial
            with ExitStack() as stack:
                values = stack.enter_context(store.changing(self.record.unit.the_block())).view(self.record.unit.dtype)
                states = stack.enter_context(store.changing(chunk.record)) if chunk.record else None
                kept = stack.enter_context(store.changing(chunk.gradient)) if self.retained else None
                for segment in chunk.segments:
                    gradient = self._gradient_of(segment, kept)
                    if gradient is not None and is_partial:
                        self.postponed.put(segment, gradient.clone())
                    elif gradient is not None:
                        start = time.perf_counter()
                        new = self._update_segment(segment, chunk, values, states, gradient)
                        self._states.append((segment.parameter, *new))
                        if store.trace is not None:
                            self._note(store.trace, segment, start)
        finally:
            for block in self.blocks(chunk)[1:]:
                store.unhold(block, dirty=(block is chunk.record and not is_partial) or self.keeps_gradients)

    def finish(self, store: BlockStore) -> None:
        if self.fresh.is_partial:
            store.unhold(self.record.unit.the_block(), dirty=False)
            self._end()
            return
        store.unhold(self.record.unit.the_block(), dirty=True)
        updated = {parameter for parameter, _, _ in self._states}
        for parameter in self.hyperparameters:
            if parameter not in updated and not self._is_here(parameter):
                self._states.append(
                    (parameter, *advanced(self.record, parameter, self.rule, self.hyperparameters[parameter]))
                )
        for parameter, names, scalars in self._states:
            self.record.started[parameter] = names
            self.record.scalars[parameter] = scalars
            parameter.state.edits_taken()
        self._end()

    def _end(self) -> None:
        self.done()
        self.fresh = self.postponed  # whoever still has this job needs the gradients no more

    def _note(self, trace: Trace, segment: Segment, start: float) -> None:
        """Record the update of a segment."""
        num_bytes = (segment.stop - segment.start) * self.record.dtype.itemsize * len(self.record.slots)
        trace.span(self.record.unit.name, Category.UPDATE, UPDATE, start, time.perf_counter() - start, num_bytes)

    def _is_here(self, parameter: ManagedParameter) -> bool:
        return any(segment.parameter is parameter for chunk in self.chunks for segment in chunk.segments)

    def _gradient_of(self, segment: Segment, kept: torch.Tensor | None) -> torch.Tensor | None:
        fresh = self.fresh.part(segment)
        if kept is None or segment.parameter not in self.retained:
            return fresh
        retained = part_of(kept, segment, self.record.dtype)
        return retained if fresh is None else fresh.to(self.record.dtype).add_(retained)

    def _update_segment(
        self,
        segment: Segment,
        chunk: Chunk,
        values: torch.Tensor,
        states: torch.Tensor | None,
        gradient: torch.Tensor,
    ) -> tuple[tuple[str, ...], Scalars]:
        record, parameter = self.record, segment.parameter
        first = parameter.offset + segment.start - record.unit.stored.start
        stored = values[first : first + segment.stop - segment.start]
        slots = {
            name: chunk.state(states, name, segment)
            for name in record.master + record.state_names[parameter]
            if states is not None
        }
        master = slots.pop(MASTER) if record.has_master else stored
        if record.has_master and parameter.state.is_edited:
            take_edits(master, stored)
        gradient = gradient.to(record.dtype)
        for factor in self.factors:
            gradient.mul_(factor)
        update = self._update_whole if parameter in record.wholes else self._update_slice
        if not record.rounds:
            new = update(parameter, master, gradient, slots)
        else:
            rounded = RoundedSlots(record, segment, master, slots)
            new = rounded.finish(*update(parameter, rounded.values, gradient, rounded.slots))
        if record.has_master:
            stored.copy_(master)
        return new

    def _update_slice(
        self, parameter: ManagedParameter, values: torch.Tensor, gradient: torch.Tensor, slots: dict[str, torch.Tensor]
    ) -> tuple[tuple[str, ...], Scalars]:
        known = parameter in self.record.started
        scalars = self.record.scalars_of(parameter)
        settings = self.hyperparameters[parameter]
        result = self.rule.apply(values, gradient, slots if known else {}, scalars, settings)
        tensors, scalars = split_state(result, values.shape)
        for name, tensor in tensors.items():
            if tensor.data_ptr() != slots[name].data_ptr():
                slots[name].copy_(tensor)
        return tuple(result), scalars

    def _update_whole(
        self, parameter: ManagedParameter, values: torch.Tensor, gradient: torch.Tensor, slots: dict[str, torch.Tensor]
    ) -> tuple[tuple[str, ...], Scalars]:
        names, scalars = self.record.names_of(parameter), self.record.scalars_of(parameter)
        forms = self.record.wholes[parameter].forms
        kept: dict[str, Any] = {n: forms[n].of(slots[n]) if n in forms else scalars[n] for n in names}
        own = TensorForm(parameter.shape, parameter.stride, values.dtype)
        with cores(self.num_threads):
            result = self.rule.apply(
                own.of(values), own.of(gradient), nested_state(kept), {}, self.hyperparameters[parameter]
            )
        new = flat_state(result)
        check_forms(parameter.name, tensors_of(new), forms)
        # All are read before any is written: an optimizer may have exchanged two of them.
        changed = {name: tensor for name, tensor in tensors_of(new).items() if tensor is not kept.get(name)}
        is_kept = {tensor.data_ptr() for tensor in tensors_of(kept).values()}
        copies = {name: tensor.clone() if tensor.data_ptr() in is_kept else tensor for name, tensor in changed.items()}
        for name, tensor in copies.items():
            forms[name].of(slots[name]).copy_(tensor)
        return tuple(new), plain_values_of(new)


@dataclass(slots=True)
class RetainGradients:
    """Adds one unit's fresh gradients to its retained ones."""

    record: StateRecord
    fresh: FreshGradients
    retained: Collection[ManagedParameter]  # that already have a retained gradient
    squares: dict[Segment, float] | None  # receives the sum of squares of each segment, if norms are needed
    done: Callable[[], None]

    @property
    def is_ready(self) -> bool:
        return self.fresh.is_ready

    @property
    def chunks(self) -> list[Chunk]:
        return self.record.chunks

    def blocks(self, chunk: Chunk) -> list[Block]:
        return [chunk.gradient]

    def apply(self, chunk: Chunk, store: BlockStore) -> None:
        try:
            with store.changing(chunk.gradient) as memory:
                for segment in chunk.segments:
                    self._retain(segment, part_of(memory, segment, self.record.dtype))
        finally:
            store.unhold(chunk.gradient, dirty=True)

    def finish(self, _: BlockStore) -> None:
        self.done()

    def _retain(self, segment: Segment, kept: torch.Tensor) -> None:
        part = self.fresh.part(segment)
        if part is None:
            return
        if segment.parameter in self.retained:
            kept.add_(part)
        else:
            kept.copy_(part)
        if self.squares is not None:
            self.squares[segment] = torch.linalg.vector_norm(kept, dtype=torch.float64).square().item()


def advanced(
    record: StateRecord, parameter: ManagedParameter, rule: UpdateRule, hyperparameters: Hyperparameters
) -> tuple[tuple[str, ...], Scalars]:
    """Count the step of a parameter whose elements are all on other ranks: scalars are the same on every rank.

    Those of a parameter that is updated whole may depend on its gradient: the others ask its rank when they need them
    (`optimizer_state_io.py: share_scalars`). Returns the names in its state, and the scalars.
    """
    if parameter in record.wholes:
        return record.wholes[parameter].names, {}
    nothing = torch.empty(0, dtype=record.dtype)
    known = parameter in record.started
    state = {name: nothing.clone() for name in record.state_names[parameter]} if known else {}
    result = rule.apply(nothing, nothing.clone(), state, record.scalars_of(parameter), hyperparameters)
    names, scalars = tuple(result), split_state(result, nothing.shape)[1]
    return counted(record, parameter, names, scalars) if record.rounds else (names, scalars)


def part_of(memory: torch.Tensor, segment: Segment, dtype: torch.dtype) -> torch.Tensor:
    """Return a segment's elements of its chunk's gradient block."""
    return memory.view(dtype)[segment.offset : segment.offset + segment.stop - segment.start]
