"""Optimizer records: what the update needs per element, cut into chunks that stream through memory.

A chunk covers a range of a unit's elements and owns two blocks: the *record* (master copy if there is one, then each
state, side by side, so that one sequential read and one write move them all) and the *gradient*, which has content only
while a gradient waits for its update.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from zero_infinity.runtime.unit import GRAIN, ManagedParameter, Unit
from zero_infinity.runtime.update_rule import Scalars
from zero_infinity.store.blocks import Block

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
    slots: tuple[str, ...]  # what the record keeps per element, in order
    record: Block | None  # None when the optimizer keeps nothing per element
    gradient: Block

    @property
    def num_elements(self) -> int:
        return self.stop - self.start

    def slot(self, memory: torch.Tensor, name: str, dtype: torch.dtype) -> torch.Tensor:
        """One slot of the record whose bytes are `memory`."""
        width = self.num_elements * dtype.itemsize
        begin = self.slots.index(name) * width
        return memory[begin : begin + width].view(dtype)


@dataclass(eq=False, slots=True)
class Record:
    """All chunks of a unit, and the scalars of each of its trained parameters."""

    unit: Unit
    dtype: torch.dtype  # of master and states
    has_master: bool
    state_names: dict[ManagedParameter, tuple[str, ...]]
    chunks: list[Chunk] = field(default_factory=list)
    scalars: dict[ManagedParameter, Scalars] = field(default_factory=dict)
    started: set[ManagedParameter] = field(default_factory=set)  # those that have a state by now


def cut(trained: list[ManagedParameter], chunk_elements: int) -> Iterator[tuple[int, int, tuple[Segment, ...]]]:
    """Cut the trained parameters of a unit into ranges that start at multiples of GRAIN; frozen ones get none."""
    chunk_elements = max(GRAIN, chunk_elements // GRAIN * GRAIN)
    start = 0
    segments: list[Segment] = []
    for parameter in trained:
        done = 0
        while done < parameter.num_elements:
            begin = parameter.offset + done
            if segments and begin - start >= chunk_elements:
                yield start, _end(start, segments), tuple(segments)
                segments = []
            if not segments:
                start = begin
            take = min(start + chunk_elements - begin, parameter.num_elements - done)
            segments.append(Segment(parameter, done, done + take, begin - start))
            done += take
    if segments:
        yield start, _end(start, segments), tuple(segments)


def _end(start: int, segments: list[Segment]) -> int:
    last = segments[-1]
    return start + -(-(last.offset + last.stop - last.start) // GRAIN) * GRAIN
