"""How one byte budget is divided, and whether it is enough: decided once, before anything moves.

    budget = resident + set aside + cache

*Resident*: small units stay in memory with their records when all of them together are a sliver of the budget; moving
a bias costs a request and saves nothing. Without NVMe everything is resident. *Set aside*: room for the gradients that
autograd has made and the worker has not used yet. *Cache*: what the policy fills with the blocks that are used next.
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
# ...and stays resident while all small ones take at most this part of the budget.
_SMALL_SHARE = 1 / 16
# Records are cut so that one is at most this part of the cache, with room for four beside what is needed at once, and
# within these bounds. An update takes Python for each chunk, while the computation stands still: against 1/24 a step at
# 1/8 of the states is 3% shorter; 1/8 is no better, and waits longer (dev/LOG.md, 2026-11-16). Large chunks are whole
# huge pages, which can be moved uncopied when free memory lies in pieces.
_CHUNK_SHARE = 1 / 12
_CHUNKS_BESIDE = 4
_MIN_CHUNK_BYTES = 256 * 1024
_MAX_CHUNK_BYTES = 16 * 1024 * 1024
# Gradients on their way to the worker may take this part of the budget (or one whole unit's, if that is more).
_GRADIENT_SHARE = 1 / 8
# How far blocks are fetched ahead: as far as the largest unit, its record and as much again reach, so that the drive is
# never idle while one large unit is computed and updated, or this many bytes; what is left of the cache keeps blocks
# from one step to the next, and saves their transfers. In small caches as far as this part of them reaches: at 1/8 of
# the states 2/3 waits 4% of the time, 0.9 not at all, and moves as many bytes (dev/LOG.md, 2026-11-18).
_LOOKAHEAD_SHARE = 0.9
_LOOKAHEAD_UNITS = 2
_LEAST_LOOKAHEAD_BYTES = 64 << 20
# Copies of parameters in another dtype may take this part of the memory (or two of the largest, if that is more).
_COPY_SHARE = 1 / 8
# Whole units, gathered from ranks that store parts, may take this part.
_GATHER_SHARE = 1 / 4
# Buckets in which gradients go to other ranks: about 1/64 of the memory, twice, and within these bounds. Messages of a
# MiB reach the bandwidth of a socket; larger ones only take memory.
_BUCKETS_IN_MEMORY = 64
_MIN_BUCKET_BYTES = 64 << 10
_MAX_BUCKET_BYTES = 4 << 20


class Home(enum.Enum):
    """The slowest tier that a block may be pushed down to."""

    NVME = "nvme"
    RAM = "ram"


@dataclass(frozen=True, slots=True)
class UnitSize:
    """What a unit takes on this rank: its parameters, its record, gradients that are kept and those that arrive."""

    name: str
    parameters: int
    record: int
    gradients: int
    arriving: int  # gradients in memory before they are used or kept
    home: Home | None = None  # when that was decided before

    @property
    def is_small(self) -> bool:
        return self.parameters <= _SMALL_BYTES

    def total(self, chunk_bytes: int) -> int:
        """All of it in blocks, which are whole pages each."""
        num_chunks = -(-max(self.record, self.gradients) // chunk_bytes)
        return round_up(self.parameters) + self.record + self.gradients + 2 * ALIGNMENT * num_chunks


@dataclass(frozen=True, slots=True)
class MemoryDivision:
    """The division of a budget."""

    homes: tuple[Home, ...]  # of the units, in their order
    resident: int
    set_aside: int
    cache: int
    lookahead: int
    chunk_bytes: int  # of one record, about
    swap: int  # bytes to reserve on NVMe
    least: int = 0  # the smallest cache that would do

    @property
    def needed(self) -> int:
        return self.resident + self.set_aside + self.cache


def place(
    units: Sequence[UnitSize],
    budget: int,
    together: Sequence[tuple[str, int]],
    *,
    nvme: bool,
    activations: bool = False,
) -> MemoryDivision:
    """Divide `budget` bytes; `CapacityError` when it cannot work. `activations`: they share the cache.

    `together`: modules whose parameters are needed all at once, with the bytes of these.
    """
    gradients = max((u.arriving for u in units), default=0)
    if not nvme:
        resident = sum(u.total(_MAX_CHUNK_BYTES) for u in units) + gradients
        if resident > budget:
            raise CapacityError(
                f"the states take {format_bytes(resident)} of host memory, but memory is {format_bytes(budget)} "
                "and there is no nvme to put the rest on\n"
                f'  fix:   nvme="/path/on/a/drive", or memory={suggest_bytes(resident)}'
            )
        homes = (Home.RAM,) * len(units)
        return MemoryDivision(homes, resident - gradients, gradients, 0, 0, _MAX_CHUNK_BYTES, 0)
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
    _check(moving, together, budget, resident, gradients, chunk)
    least = _minimum(moving, together, chunk)
    if cache < least:
        # Tight: only what one unit's gradients need is set aside.
        set_aside = gradients
        cache = min(budget - resident - set_aside, most)
    return MemoryDivision(homes, resident, set_aside, cache, _lookahead(moving, cache), chunk, everything, least)


def room_for_copies(sizes: Sequence[int], at_once: int, memory: int, *, gathered: bool) -> int:
    """For copies of these sizes, of which `at_once` bytes are needed at once. `gathered`: from parts on all ranks."""
    share = _GATHER_SHARE if gathered else _COPY_SHARE
    return max(at_once + max(sizes), min(sum(sizes), round_up(int(memory * share))))


def room_while_building(memory: int) -> int:
    """For whole units that are gathered while a model is built, of which no sizes are known yet."""
    return int(memory * _GATHER_SHARE)


def bucket_bytes(memory: int) -> int:
    """Of rows that leave, and as much for rows that come in: constant, whatever the model."""
    return max(_MIN_BUCKET_BYTES, min(_MAX_BUCKET_BYTES, round_up(memory // _BUCKETS_IN_MEMORY)))


def _homes(units: Sequence[UnitSize], budget: int) -> tuple[Home, ...]:
    small_bytes = sum(u.total(_MIN_CHUNK_BYTES) for u in units if u.is_small)
    small_home = Home.RAM if small_bytes <= budget * _SMALL_SHARE else Home.NVME
    return tuple(u.home or (small_home if u.is_small else Home.NVME) for u in units)


def home_while_building(num_bytes: int, resident_bytes: int, budget: int, *, nvme: bool) -> Home:
    """Where a unit of a model that is still being built goes, when small ones take `resident_bytes` so far."""
    states = 4  # parameters, two states and gradients, as for Adam: what it will take when it is trained
    small = num_bytes <= _SMALL_BYTES and states * (resident_bytes + round_up(num_bytes)) <= budget * _SMALL_SHARE
    return Home.RAM if small or not nvme else Home.NVME


def _chunk_bytes(cache: int, at_once: int) -> int:
    wanted = max(0, min(int(cache * _CHUNK_SHARE), (cache - at_once) // _CHUNKS_BESIDE))
    if wanted > HUGE_PAGE_BYTES:
        wanted = round(wanted / HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    return max(_MIN_CHUNK_BYTES, min(_MAX_CHUNK_BYTES, round_up(wanted)))


def _lookahead(moving: Sequence[UnitSize], cache: int) -> int:
    largest = max((u.parameters + u.record for u in moving), default=0)
    return min(int(cache * _LOOKAHEAD_SHARE), max(_LOOKAHEAD_UNITS * largest, _LEAST_LOOKAHEAD_BYTES))


def _minimum(moving: Sequence[UnitSize], together: Sequence[tuple[str, int]], chunk: int) -> int:
    """The least cache: what is needed at once, or the largest unit's parameters and two chunks (record, gradient)."""
    update = max((u.parameters + min(2 * chunk, round_up(u.record) + round_up(u.gradients)) for u in moving), default=0)
    return max(update, max((size for _, size in together), default=0))


def _check(
    moving: Sequence[UnitSize],
    together: Sequence[tuple[str, int]],
    budget: int,
    resident: int,
    gradients: int,
    chunk: int,
) -> None:
    minimum = resident + gradients + _minimum(moving, together, chunk)
    if minimum <= budget:
        return
    largest = ("all small units", resident)  # nothing else is left to name when no unit moves
    name, size = max([*together, *((u.name, u.parameters) for u in moving)], key=lambda p: p[1], default=largest)
    raise CapacityError(
        f"{name!r} needs {format_bytes(size)} of host memory for its parameters and {format_bytes(gradients)} for "
        f"gradients to be trained, {format_bytes(minimum)} with two chunks of optimizer state, but memory is "
        f"{format_bytes(budget)}\n"
        f"  fix:   memory={suggest_bytes(minimum)}"
    )
