"""Gathers units whose elements are sharded over ranks; takes part in gathers of units that only other ranks want.

For one thread. Which unit is gathered next is what all ranks agree on (`comm/proposals.py`).
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from zero_infinity.comm.channel import Channel
from zero_infinity.comm.proposals import Chosen, Proposals
from zero_infinity.comm.topics import IDLE, PAUSE, Topic
from zero_infinity.errors import DivergenceError
from zero_infinity.policy.partition import Span
from zero_infinity.storage.block import Block
from zero_infinity.storage.block_store import BlockStore
from zero_infinity.storage.pages import PAGE_BYTES

# A unit that only some ranks want is sent in parts of this size.
_PART_BYTES = 1 << 18
# How long this rank may wait for something else before it takes part in what others gather; once ranks have wanted
# different units, it is likely that another rank waits.
_PATIENCE_SECONDS, _SHORT_PATIENCE_SECONDS = 1.0, 0.02


class ShardSource(Protocol):
    """A unit of which this rank stores a shard."""

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def spans(self) -> tuple[Span, ...]: ...
    @property
    def stored(self) -> Span: ...
    @property
    def is_updated_early(self) -> bool:
        """True if an update of it was submitted before `optimizer.step()`, which ranks have not called yet."""

    def the_block(self) -> Block: ...


class UnitGather:
    """The gathers of one thread."""

    def __init__(self, store: BlockStore, channel: Channel) -> None:
        self.channel = channel
        self._store = store
        self._proposals = Proposals(channel)
        self._known: dict[int, tuple[Topic, Sequence[ShardSource]]] = {}

    def register(self, number: int, name: str, sources: Sequence[ShardSource]) -> None:
        """Other ranks may gather these units together, by this number."""
        self._known[number] = (Topic("parameter gather", number, name), sources)

    @property
    def num_differences(self) -> int:
        """Number of gathers that not every rank wanted: the same on every rank while all pause."""
        return self._proposals.num_differences

    @property
    def patience_seconds(self) -> float:
        """How long the compute thread may wait before this one should take part in what other ranks gather."""
        return _SHORT_PATIENCE_SECONDS if self.num_differences else _PATIENCE_SECONDS

    def __call__(self, topic: Topic, wholes: Sequence[tuple[torch.Tensor, Sequence[Span]]]) -> None:
        """Gather these units, in which this rank's shards are in place, after what other ranks want first."""
        while (chosen := self._proposals.choose(topic)) is not None and chosen.number != topic.number:
            self._take_part(chosen)
        if chosen is None or chosen.is_common:
            self.channel.gather(topic, wholes)
            return
        for whole, spans in wholes:
            here = whole.cpu()
            for parts in _parts(spans, whole.element_size()):
                self.channel.gather_parts(topic, chosen.wanted_by, here, parts)
            if here is not whole:
                whole.copy_(here)

    def take_part_until_all_pause(self) -> None:
        """Take part in what other ranks gather until every rank does only that."""
        while True:
            chosen = self._proposals.choose(PAUSE)
            if chosen is not None:
                self._take_part(chosen)
            elif self._proposals.all_pause:
                return

    def take_part_once(self) -> None:
        """Take part in the next gather of other ranks, if there is one."""
        chosen = self._proposals.choose(IDLE)
        if chosen is not None:
            self._take_part(chosen)

    def _take_part(self, chosen: Chosen) -> None:
        """Send this rank's shards of units that other ranks want."""
        topic, sources = self._known[chosen.number]
        staging = memoryview(mmap.mmap(-1, _PART_BYTES + 2 * PAGE_BYTES))
        for source in sources:
            block, width = source.the_block(), source.dtype.itemsize
            if block.on_device is not None:
                torch.accelerator.synchronize(block.on_device.device)  # no stream of this thread waits for its update
            elif not source.is_updated_early:
                self._store.wait_unchanged(block)
            for parts in _parts(source.spans, width):
                mine = parts[self.channel.rank]
                first = (mine.start - source.stored.start) * width
                sent = torch.empty(0, dtype=source.dtype)
                if len(mine):
                    memory = self._store.peek(block, first, first + len(mine) * width, staging)
                    sent = torch.frombuffer(memory, dtype=source.dtype)
                if source.is_updated_early and not self._store.has_changes(block):
                    raise DivergenceError(
                        f"ranks diverged: {topic.name!r} is read by {sorted(chosen.wanted_by)} (ranks) after it was "
                        "updated here, and before optimizer.step()\n"
                        '  fix:   update="after_backward" in zi.Config runs every update in step()'
                    )
                self.channel.send_parts(topic, chosen.wanted_by, sent)


def _parts(spans: Sequence[Span], width: int) -> Iterator[list[Span]]:
    """Cut every rank's shard into the same number of parts."""
    size = _PART_BYTES // width
    for done in range(0, max(map(len, spans), default=0), size):
        yield [Span(min(s.start + done, s.stop), min(s.start + done + size, s.stop)) for s in spans]
