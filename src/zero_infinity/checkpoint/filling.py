"""Brings tensors from files into a model's blocks, converted on the way, within the engine's memory budget.

Block by block: a block gets its room in memory (without being read from its drive), threads fill it with the pieces of
tensors that belong there, and the store writes it home when the next ones need the room.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch

from zero_infinity.checkpoint.contents import BlockContent, Contents, Key, Part, order_of
from zero_infinity.checkpoint.crew import Crew, Job
from zero_infinity.checkpoint.stored import StoredTensor
from zero_infinity.runtime.record import Record
from zero_infinity.runtime.unit import ManagedParameter, Unit

Source = StoredTensor | torch.Tensor  # in a file, or in memory


class Filling:
    """Fills the blocks of one model."""

    def __init__(self, contents: Contents, crew: Crew, *, replaces_records: bool) -> None:
        self._contents = contents
        self._crew = crew
        self._replaces_records = replaces_records  # or only the master copies in them

    def fill_unit(self, unit: Unit, sources: Mapping[Key, Source]) -> None:
        """The values of a unit's parameters; those that have no source stay as they are."""
        content = self._contents.of_unit(unit)
        self._fill(content, sources, replaces=all(part.key in sources for part in content.parts))

    def fill_record(
        self, record: Record, slots: Mapping[ManagedParameter, tuple[str, ...]], sources: Mapping[Key, Source]
    ) -> None:
        """The states of a unit's parameters."""
        for content in self._contents.of_record(record, slots):
            is_all = all(part.key in sources for part in content.parts)
            self._fill(content, sources, replaces=self._replaces_records and is_all)

    def _fill(self, content: BlockContent, sources: Mapping[Key, Source], *, replaces: bool) -> None:
        parts = [part for part in content.parts if part.key in sources]
        if not parts:
            return
        residency, store, block = self._contents.host.residency, self._contents.host.store, content.block
        if replaces and not block.leased:
            # It need not be read before. (What has no part is padding, or a state that nobody has yet.)
            residency.expire(block)
        residency.access(block)
        residency.wait(block)
        with residency.pinned(block), store.changing(block) as memory, torch.no_grad():
            flat = memory.view(content.dtype)
            self._crew.run(job for part in parts for job in self._jobs(part, sources[part.key], flat))
        store.mark_dirty(block)

    def _jobs(self, part: Part, source: Source, flat: torch.Tensor) -> Iterator[Job]:
        target = flat[part.at : part.at + part.stop - part.start]
        if isinstance(source, StoredTensor) and source.order == order_of(part.owner):
            for number in source.pieces(part.start, part.stop):
                yield partial(_copy_piece, source, number, part, target)
            return

        def copy_whole(room: memoryview) -> None:
            whole = source.whole(room) if isinstance(source, StoredTensor) else source
            owner = part.owner.whole or part.owner
            target.copy_(owner.flattened(whole)[part.start : part.stop])

        yield copy_whole


def _copy_piece(source: StoredTensor, number: int, part: Part, target: torch.Tensor, room: memoryview) -> None:
    """Copy what a piece has of a part."""

    def copy(elements: torch.Tensor, first: int) -> None:
        start, stop = max(first, part.start), min(first + len(elements), part.stop)
        if start < stop:
            target[start - part.start : stop - part.start].copy_(elements[start - first : stop - first])

    source.read_piece(number, room, copy)
