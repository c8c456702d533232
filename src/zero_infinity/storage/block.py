"""What a block is: its place at home, its stays in memory and the order of its uses. Data only; `blocks` moves it."""

from __future__ import annotations

import enum
from collections import deque

from zero_infinity.policy.memory_budget import Home
from zero_infinity.policy.sizes import round_up
from zero_infinity.storage.allocator import PAGE_BYTES
from zero_infinity.storage.buffer_pool import Buffer, BufferRequest
from zero_infinity.storage.io_types import IOTicket, Priority
from zero_infinity.units import format_bytes


class Residence(enum.Enum):
    """Where a block's bytes are, seen from the fast tier."""

    ABSENT = "absent"  # only at home
    QUEUED = "queued"  # waits for room
    READING = "reading"
    PRESENT = "present"


class BlockStay:
    """One stay of a block in memory, from the fetch that asks for room to the eviction that gives it back."""

    __slots__ = ("buffer", "evicting", "request", "residence", "turns")

    def __init__(self) -> None:
        self.residence = Residence.QUEUED
        self.request: BufferRequest | None = None
        self.buffer: Buffer | None = None
        self.turns = 0  # of workers that will use the buffer, or do so now
        self.evicting = False


class BlockUse(enum.Enum):
    """What a place in the order of a block's uses is for."""

    CHANGE = "change"
    READ = "read"
    EXPIRE = "expire"  # the content dies


class Turn:
    """One place in the order of a block's uses."""

    __slots__ = ("claimed", "use", "visit")

    def __init__(self, use: BlockUse, visit: BlockStay | None, *, claimed: bool = False) -> None:
        self.use = use
        self.visit = visit  # that it keeps in memory
        self.claimed = claimed  # it belongs to one call, and is not for whichever worker comes next


class Block:
    """A named byte string. Its fields belong to the store and change only under the store's lock."""

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
        "ticket",
        "turns",
        "visits",
    )

    def __init__(self, key: int, name: str, num_bytes: int, home: Home, offset: int | None) -> None:
        self.key = key  # unique in its store
        self.name = name
        self.num_bytes = num_bytes
        self.home = home
        self.offset = offset  # in the engine's address space; None when the home is RAM
        self.has_content = False
        self.dirty = False  # the buffer is newer than the home
        # The first is the present one; a later one was asked for before the one before it had left.
        self.visits: deque[BlockStay] = deque()
        self.turns: deque[Turn] = deque()  # that have not ended, in the order in which they began
        self.ticket: IOTicket | None = None  # the read or write in flight
        self.priority = Priority.PREFETCH
        self.checksum: int | None = None

    def __repr__(self) -> str:
        stays = ", ".join(
            f"{v.residence.value}{'-' * v.evicting}{f' turns={v.turns}' if v.turns else ''}" for v in self.visits
        )
        return f"<Block {self.name} {format_bytes(self.num_bytes)}{'*' * self.dirty} {stays or 'absent'}>"

    def rename(self, name: str) -> None:
        """What it holds has got another name."""
        self.name = name

    @property
    def residence(self) -> Residence:
        visit = self._present_visit()
        return Residence.ABSENT if visit is None else visit.residence

    @property
    def held_bytes(self) -> int:
        """What it takes of a budget when it is present."""
        return round_up(self.num_bytes, PAGE_BYTES)

    @property
    def stored_bytes(self) -> int:
        """What it takes at home, and what one transfer of it moves."""
        return round_up(self.num_bytes)

    @property
    def leased(self) -> bool:
        """Whether a tensor over its memory is alive."""
        visit = self._present_visit()
        return visit is not None and visit.buffer is not None and visit.buffer.leases > 0

    def _present_visit(self) -> BlockStay | None:
        # Also read without the lock, while another thread may end the last visit: so one access and no test before it.
        try:
            return self.visits[0]
        except IndexError:
            return None
