"""One stay of a block in memory, from the fetch that queues for room to the eviction that frees it. Data only."""

from __future__ import annotations

import enum

from zero_infinity.storage.buffer import Buffer
from zero_infinity.storage.grant_queue import BufferRequest


class Residence(enum.Enum):
    """Where the bytes of a block are, seen from memory."""

    ABSENT = "absent"  # only in its home
    QUEUED = "queued"  # waits for room
    READING = "reading"
    PRESENT = "present"


class BlockStay:
    """One stay. Its fields change only under the lock of the store."""

    __slots__ = ("buffer", "evicting", "num_uses", "request", "residence")

    def __init__(self) -> None:
        self.residence = Residence.QUEUED
        self.request: BufferRequest | None = None
        self.buffer: Buffer | None = None
        self.num_uses = 0  # requested and not ended: they keep the stay in memory
        self.evicting = False
