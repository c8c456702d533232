"""How one byte budget of host memory is divided, and whether it is enough. Pure; decided before any data moves.

    budget = buffers + resident + set aside + cache

*Buffers*: copies of parameters that modules compute with, and gradient buckets. *Resident*: small units stay in memory
with their records as long as all of them together are a sliver of the budget; moving a bias costs a request and saves
nothing. Without NVMe everything is resident. *Set aside*: room for gradients between autograd and the update. *Cache*:
what the cache policy fills with the blocks that are used next.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from zero_infinity.errors import CapacityError
from zero_infinity.policy.sizes import ALIGNMENT, HUGE_PAGE_BYTES, round_up
from zero_infinity.units import format_bytes, suggest_bytes

# A unit of at most this many bytes is small...
_SMALL_BYTES = 256 * 1024
# ...and stays resident while all small units take at most this share of the budget.
_SMALL_SHARE = 1 / 16
# A chunk of a record is at most this share of the cache, with room for four chunks beside what is needed at once, and
# within the bounds below. Each chunk costs an update some Python, during which the computation waits: compared with
# 1/24 a step at 1/8 of the states is 3% shorter; 1/8 is no better, and waits longer (dev/LOG.md, 2026-11-16). Large
# chunks are whole huge pages, which can be remapped without copying when free memory is fragmented.
_CHUNK_SHARE = 1 / 12
_CHUNKS_BESIDE = 4
_MIN_CHUNK_BYTES = 256 * 1024
_MAX_CHUNK_BYTES = 16 * 1024 * 1024
# Gradients on their way to the update may take this share of the budget (or one whole unit's, if that is more).
_GRADIENT_SHARE = 1 / 8
# How far blocks are fetched ahead: twice the largest unit with its record, so that the drive is never idle while one
# large unit is computed and updated, or at least the bytes below. The rest of the cache keeps blocks from one step to
# the next and saves their transfers. A small cache looks ahead by at most this share of itself: at 1/8 of the states
# 2/3 waits 4% of the time, 0.9 not at all, and both move as many bytes (dev/LOG.md, 2026-11-18).
_LOOKAHEAD_SHARE = 0.9
_LOOKAHEAD_UNITS = 2
_LEAST_LOOKAHEAD_BYTES = 64 << 20
# Copies of parameters in another dtype may take this share of memory (or two of the largest, if that is more).
_COPY_SHARE = 1 / 8
# Units gathered from all ranks may take this share.
_GATHER_SHARE = 1 / 4
# Copies are made ahead of use as far as this share of their room allows.
_COPY_LOOKAHEAD_SHARE = 1 / 3
# Gradient buckets: about 1/64 of memory each, within these bounds. Messages of a MiB reach the bandwidth of a socket;
# larger ones only take memory.
_BUCKETS_IN_MEMORY = 64
_MIN_BUCKET_BYTES = 64 << 10
_MAX_BUCKET_BYTES = 4 << 20


class Home(enum.Enum):
    """The slowest tier that a block may be evicted to."""

    NVME = "nvme"
    RAM = "ram"


@dataclass(frozen=True, slots=True)
class UnitSize:
    """Bytes of one unit on this rank (`policy/unit_sizes.py` computes them)."""

    name: str
    parameters: int
    record: int
    gradients: int  # kept until the update
    arriving: int  # in memory before they are used or kept
    home: Home | None = None  # if it was decided earlier
    copied: int = 0  # the copy that modules compute with; 0 if they compute with the stored parameters

    @property
    def is_small(self) -> bool:
        return self.parameters <= _SMALL_BYTES

    def total(self, chunk_bytes: int) -> int:
        """All of it in blocks, each of whole pages."""
        num_chunks = -(-max(self.record, self.gradients) // chunk_bytes)
        return round_up(self.parameters) + self.record + self.gradients + 2 * ALIGNMENT * num_chunks


@dataclass(frozen=True, slots=True)
class SharedBuffers:
    """Host memory that holds no blocks. Ranks agree on these sizes."""

    copies: int = 0  # for parameters gathered from all ranks, or converted to another dtype
    bucket: int = 0  # for gradients sent to other ranks, and as much for those received

    @property
    def total(self) -> int:
        return self.copies + 2 * self.bucket


@dataclass(frozen=True, slots=True)
class MemoryDivision:
    """The division of a budget, without buffers."""

    homes: tuple[Home, ...]  # of the units, in their order
    resident: int
    set_aside: int  # for gradients
    cache: int
    lookahead: int
    chunk_bytes: int  # of one record, about
    swap: int  # bytes to reserve on NVMe
    least: int = 0  # the smallest cache that would do

    @property
    def needed(self) -> int:
        return self.resident + self.set_aside + self.cache


def shared_buffers(
    units: Sequence[UnitSize], copied_at_once: int, memory: int, *, gathered: bool, num_ranks: int
) -> SharedBuffers:
    """The buffers of a rank with `memory` bytes.

    `copied_at_once`: the most bytes of copies that one module needs. `gathered`: copies are gathered from all ranks.
    """
    copies = [unit.copied for unit in units if unit.copied]
    return SharedBuffers(
        copies=_room_for_copies(copies, copied_at_once, memory, gathered=gathered) if copies else 0,
        bucket=_bucket_bytes(memory) if num_ranks > 1 else 0,
    )


def place(
    units: Sequence[UnitSize],
    budget: int,
    together: Sequence[tuple[str, int]],
    *,
    nvme: bool,
    activations: bool = False,
) -> MemoryDivision:
    """Divide `budget` bytes; raises `CapacityError` if they are not enough.

    `together`: modules whose parameters are needed all at once, with the bytes of these parameters.
    `activations`: offloaded activations share the cache.
    """
    gradients = max((u.arriving for u in units), default=0)
    if not nvme:
        return _all_resident(units, budget, gradients)
    homes = _homes(units, budget)
    resident = sum(u.total(_MIN_CHUNK_BYTES) for u, home in zip(units, homes, strict=True) if home is Home.RAM)
    moving = [u for u, home in zip(units, homes, strict=True) if home is Home.NVME]
    all_gradients = sum(u.arriving for u in units)
    # Room for the largest unit's gradients and for all small ones beside it: those need not wait for its update.
    small = sum(u.arriving for u, home in zip(units, homes, strict=True) if home is Home.RAM)
    set_aside = min(all_gradients, max(gradients + small, int(budget * _GRADIENT_SHARE)))
    at_once = max([u.parameters for u in moving] + [size for _, size in together], default=0)
    chunk = _chunk_bytes(budget - resident - set_aside, at_once)
    everything = sum(u.total(chunk) for u in moving)
    most = budget if activations else everything
    cache = min(budget - resident - set_aside, most)
    least = _minimum(moving, together, chunk)
    _check(moving, together, budget, resident, gradients, least)
    if cache < least:
        # Tight: set aside only what one unit's gradients need.
        set_aside = gradients
        cache = min(budget - resident - set_aside, most)
    return MemoryDivision(homes, resident, set_aside, cache, _lookahead(moving, cache), chunk, everything, least)


def copy_lookahead(room: int) -> int:
    """How many bytes of copies are made ahead of use, out of `room` bytes for copies."""
    return int(room * _COPY_LOOKAHEAD_SHARE)


def room_while_building(memory: int) -> int:
    """Room for units that are gathered while a model is being built, when their sizes are not known yet."""
    return int(memory * _GATHER_SHARE)


def home_while_building(num_bytes: int, resident_bytes: int, budget: int, *, nvme: bool) -> Home:
    """The home of a unit in a model that is being built, where small units take `resident_bytes` so far."""
    states = 4  # parameters, two states and gradients, as with Adam: what it will take in training
    small = num_bytes <= _SMALL_BYTES and states * (resident_bytes + round_up(num_bytes)) <= budget * _SMALL_SHARE
    return Home.RAM if small or not nvme else Home.NVME


def _all_resident(units: Sequence[UnitSize], budget: int, gradients: int) -> MemoryDivision:
    states = sum(u.total(_MAX_CHUNK_BYTES) for u in units)
    if states + gradients > budget:
        raise CapacityError(
            f"the states take {format_bytes(states + gradients)} of host memory, but memory is {format_bytes(budget)} "
            "and there is no nvme to put the rest on\n"
            f'  fix:   nvme="/path/on/a/drive", or memory={suggest_bytes(states + gradients)}'
        )
    return MemoryDivision((Home.RAM,) * len(units), states, gradients, 0, 0, _MAX_CHUNK_BYTES, 0)


def _homes(units: Sequence[UnitSize], budget: int) -> tuple[Home, ...]:
    small_bytes = sum(u.total(_MIN_CHUNK_BYTES) for u in units if u.is_small)
    small_home = Home.RAM if small_bytes <= budget * _SMALL_SHARE else Home.NVME
    return tuple(u.home or (small_home if u.is_small else Home.NVME) for u in units)


def _room_for_copies(sizes: Sequence[int], at_once: int, memory: int, *, gathered: bool) -> int:
    share = _GATHER_SHARE if gathered else _COPY_SHARE
    return max(at_once + max(sizes), min(sum(sizes), round_up(int(memory * share))))


def _bucket_bytes(memory: int) -> int:
    """Does not depend on the model (ZeRO-R's constant-size buffers)."""
    return max(_MIN_BUCKET_BYTES, min(_MAX_BUCKET_BYTES, round_up(memory // _BUCKETS_IN_MEMORY)))


def _chunk_bytes(cache: int, at_once: int) -> int:
    wanted = max(0, min(int(cache * _CHUNK_SHARE), (cache - at_once) // _CHUNKS_BESIDE))
    if wanted > HUGE_PAGE_BYTES:
        wanted = round(wanted / HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    return max(_MIN_CHUNK_BYTES, min(_MAX_CHUNK_BYTES, round_up(wanted)))


def _lookahead(moving: Sequence[UnitSize], cache: int) -> int:
    largest = max((u.parameters + u.record for u in moving), default=0)
    return min(int(cache * _LOOKAHEAD_SHARE), max(_LOOKAHEAD_UNITS * largest, _LEAST_LOOKAHEAD_BYTES))


def _minimum(moving: Sequence[UnitSize], together: Sequence[tuple[str, int]], chunk: int) -> int:
    """The least cache: what is needed at once, or the parameters of a unit and two chunks (record, gradient)."""
    update = max((u.parameters + min(2 * chunk, round_up(u.record) + round_up(u.gradients)) for u in moving), default=0)
    return max(update, max((size for _, size in together), default=0))


def _check(
    moving: Sequence[UnitSize],
    together: Sequence[tuple[str, int]],
    budget: int,
    resident: int,
    gradients: int,
    least: int,
) -> None:
    minimum = resident + gradients + least
    if minimum <= budget:
        return
    largest = ("all small units", resident)  # if no unit moves there is nothing else to name
    name, size = max([*together, *((u.name, u.parameters) for u in moving)], key=lambda p: p[1], default=largest)
    raise CapacityError(
        f"{name!r} needs {format_bytes(size)} of host memory for its parameters and {format_bytes(gradients)} for "
        f"gradients to be trained, {format_bytes(minimum)} with two chunks of optimizer state, but memory is "
        f"{format_bytes(budget)}\n"
        f"  fix:   memory={suggest_bytes(minimum)}"
    )
