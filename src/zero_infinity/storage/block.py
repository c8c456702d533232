"""A block: a named byte string, its home, its stays in memory and the order of its uses. Data and rules only.

`BlockMover` moves blocks, `BlockStore` is the interface to them; everything here changes only under the store's lock.
A *stay* is one time in memory, from the fetch that queues for room to the eviction that frees it.

The order of uses:
- A use takes its place when it is requested, not when it starts.
- Uses that change the block run one at a time, in the order of their requests, across all stays of the block.
- Uses that read the block may overlap each other, but not a change.
- The end of a content (EXPIRE) has a place in the same order: what earlier uses write is discarded, what later uses
  write is kept.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field

import torch

from zero_infinity.byte_sizes import format_bytes
from zero_infinity.errors import UsageError
from zero_infinity.policy.alignment import round_up
from zero_infinity.policy.homes import Home
from zero_infinity.storage.buffer import Buffer
from zero_infinity.storage.grant_queue import BufferRequest
from zero_infinity.storage.io_engine import IOTicket
from zero_infinity.storage.io_types import Priority
from zero_infinity.storage.pages import PAGE_BYTES


class Residence(enum.Enum):
    """Where the bytes of a block are, seen from memory."""

    ABSENT = "absent"  # only in its home
    QUEUED = "queued"  # waits for room
    READING = "reading"
    PRESENT = "present"


class UseKind(enum.Enum):
    CHANGE = "change"
    READ = "read"
    EXPIRE = "expire"  # the content is discarded


@dataclass(slots=True, eq=False)
class BlockStay:
    """One stay of a block in memory."""

    residence: Residence = Residence.QUEUED
    request: BufferRequest | None = None
    buffer: Buffer | None = None
    num_uses: int = 0  # requested and not ended: they keep the stay in memory
    evicting: bool = False


@dataclass(slots=True, eq=False)
class BlockUse:
    """One use of a block, from its request to its end."""

    kind: UseKind
    stay: BlockStay | None = None  # the stay that it keeps in memory; none for EXPIRE
    claimed: bool = False  # belongs to one caller, which holds this object; else to the next worker of its kind


class BlockUses(deque[BlockUse]):
    """The unfinished uses of one block, in the order of their requests."""

    def begin(self, kind: UseKind, stay: BlockStay, *, claimed: bool = False) -> BlockUse:
        """Request a use, which keeps `stay` in memory until it ends."""
        use = BlockUse(kind, stay, claimed)
        self.append(use)
        stay.num_uses += 1
        return use

    def end(self, use: BlockUse) -> None:
        # Not always the first: reads overlap, and a worker that gives up has not waited for its place.
        self.remove(use)
        if use.stay is not None:
            use.stay.num_uses -= 1

    def expire(self) -> None:
        """The content ends here: after all uses requested before, and before all requested later."""
        self.append(BlockUse(UseKind.EXPIRE))

    def pop_expired(self) -> bool:
        """Remove every EXPIRE that has no use before it; True if there was one: the content is to be dropped."""
        expired = False
        while self and self[0].kind is UseKind.EXPIRE:
            self.popleft()
            expired = True
        return expired

    def next_of(self, kind: UseKind) -> BlockUse | None:
        """The first use of this kind that is not claimed."""
        return next((use for use in self if use.kind is kind and not use.claimed), None)

    def has_changes(self, stay: BlockStay | None = None) -> bool:
        """True if a worker will change the block (during `stay`, if one is given)."""
        return any(use.kind is UseKind.CHANGE and (stay is None or use.stay is stay) for use in self)

    def is_due(self, use: BlockUse) -> bool:
        """True if every use that has to come before `use` has ended."""
        if use.kind is UseKind.CHANGE:
            return self[0] is use
        return next(other for other in self if other is use or other.kind is not UseKind.READ) is use

    def move(self, source: BlockStay, target: BlockStay) -> None:
        """Let every use that keeps `source` keep `target` instead."""
        for use in self:
            if use.stay is source:
                use.stay = target
        target.num_uses += source.num_uses
        source.num_uses = 0


@dataclass(slots=True, eq=False, repr=False)
class Block:
    """A named byte string."""

    key: int  # unique in its store
    name: str
    num_bytes: int
    home: Home
    offset: int | None  # in the address space of the I/O engine; None if the home is not NVMe
    has_content: bool = False
    dirty: bool = False  # the buffer is newer than the home
    # The first is the current one. A later one was requested before the previous one had left.
    stays: deque[BlockStay] = field(default_factory=deque)
    uses: BlockUses = field(default_factory=BlockUses)
    ticket: IOTicket | None = None  # the read or write in flight
    priority: Priority = Priority.PREFETCH
    checksum: int | None = None
    on_device: torch.Tensor | None = None  # its bytes, if its home is device memory: they never move

    def __repr__(self) -> str:
        stays = ", ".join(
            f"{stay.residence.value}{'-' * stay.evicting}{f' uses={stay.num_uses}' if stay.num_uses else ''}"
            for stay in self.stays
        )
        return f"<Block {self.name} {format_bytes(self.num_bytes)}{'*' * self.dirty} {stays or 'absent'}>"

    def rename(self, name: str) -> None:
        """What it holds has got another name."""
        self.name = name

    @property
    def residence(self) -> Residence:
        stay = self._current_stay()
        return Residence.ABSENT if stay is None else stay.residence

    @property
    def held_bytes(self) -> int:
        """Bytes of the memory budget that the block takes while it is present."""
        return round_up(self.num_bytes, PAGE_BYTES)

    @property
    def stored_bytes(self) -> int:
        """Bytes that it takes in its home, which is also the size of one transfer."""
        return round_up(self.num_bytes)

    @property
    def leased(self) -> bool:
        """True while a tensor over its memory is alive."""
        stay = self._current_stay()
        return stay is not None and stay.buffer is not None and stay.buffer.leases > 0

    @property
    def is_idle(self) -> bool:
        """True if it is in memory and no transfer is in flight."""
        return self.residence is Residence.PRESENT and self.ticket is None

    def present_buffer(self) -> Buffer:
        """Its buffer; an error unless it is in memory."""
        buffer = self.stays[0].buffer if self.residence is Residence.PRESENT else None
        if buffer is None:
            raise UsageError(f"block {self.name!r} is not in memory (it is {self.residence.value})")
        return buffer

    def the_device_bytes(self) -> torch.Tensor:
        """Its bytes in device memory; an error if its home is another."""
        if self.on_device is None:
            raise UsageError(f"block {self.name!r} is not in device memory")
        return self.on_device

    def mark_changed(self) -> None:
        """The buffer was written to: it is newer than the home."""
        self.dirty = self.has_content = True

    def _current_stay(self) -> BlockStay | None:
        # Also read without the lock, while another thread may end the last stay: so one access, without a test before.
        try:
            return self.stays[0]
        except IndexError:
            return None
