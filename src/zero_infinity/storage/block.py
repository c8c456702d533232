"""A block: a named byte string, its place in its home, its stays in memory and its uses. Data only.

`BlockMover` moves blocks, `BlockStore` is the interface to them.
"""

from __future__ import annotations

from collections import deque

from zero_infinity.errors import UsageError
from zero_infinity.policy.memory_budget import Home
from zero_infinity.policy.sizes import round_up
from zero_infinity.storage.block_stay import BlockStay, Residence
from zero_infinity.storage.block_uses import BlockUses
from zero_infinity.storage.buffer import Buffer
from zero_infinity.storage.io_engine import IOTicket
from zero_infinity.storage.io_types import Priority
from zero_infinity.storage.pages import PAGE_BYTES
from zero_infinity.units import format_bytes


class Block:
    """A named byte string. Its fields belong to the store and change only under the lock of the store."""

    __slots__ = (
        "checksum",
        "dirty",
        "has_content",
        "home",
        "key",
        "name",
        "num_bytes",
        "offset",
        "priority",
        "stays",
        "ticket",
        "uses",
    )

    def __init__(self, key: int, name: str, num_bytes: int, home: Home, offset: int | None) -> None:
        self.key = key  # unique in its store
        self.name = name
        self.num_bytes = num_bytes
        self.home = home
        self.offset = offset  # in the address space of the I/O engine; None if the home is RAM
        self.has_content = False
        self.dirty = False  # the buffer is newer than the home
        # The first is the current one. A later one was requested before the previous one had left.
        self.stays: deque[BlockStay] = deque()
        self.uses = BlockUses()
        self.ticket: IOTicket | None = None  # the read or write in flight
        self.priority = Priority.PREFETCH
        self.checksum: int | None = None

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

    def mark_changed(self) -> None:
        """The buffer was written to: it is newer than the home."""
        self.dirty = self.has_content = True

    def _current_stay(self) -> BlockStay | None:
        # Also read without the lock, while another thread may end the last stay: so one access, without a test before.
        try:
            return self.stays[0]
        except IndexError:
            return None
