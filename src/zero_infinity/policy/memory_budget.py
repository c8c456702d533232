"""How one byte budget of host memory is divided, and whether it is enough. Pure; decided before any data moves.

    budget = buffers + resident + set aside + cache

*Buffers*: copies of parameters that modules compute with, and gradient buckets. *Resident*: units whose home is RAM
(`homes.py`), with their records. *Set aside*: room for gradients between autograd and the update. *Cache*: what the
cache policy fills with the blocks that are used next, as far ahead as `lookahead.py` says, in chunks of the size that
`chunk_size.py` says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zero_infinity.byte_sizes import format_bytes, suggest_bytes
from zero_infinity.errors import CapacityError
from zero_infinity.policy import chunk_size
from zero_infinity.policy.alignment import round_up
from zero_infinity.policy.homes import Home, choose_homes
from zero_infinity.policy.lookahead import inference_lookahead, lookahead_bytes
from zero_infinity.policy.unit_sizes import UnitSize

# Gradients on their way to the update may take this share of the budget (or one whole unit's, if that is more).
_GRADIENT_SHARE = 1 / 8
# Copies of parameters in another dtype may take this share of memory (or two of the largest, if that is more).
_COPY_SHARE = 1 / 8
# Units gathered from all ranks may take this share.
_GATHER_SHARE = 1 / 4
# Gradient buckets: about 1/64 of memory each, within these bounds. Messages of a MiB reach the bandwidth of a socket;
# larger ones only take memory.
_BUCKETS_IN_MEMORY = 64
_MIN_BUCKET_BYTES = 64 << 10
_MAX_BUCKET_BYTES = 4 << 20


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
    trains: bool = True,
) -> MemoryDivision:
    """Divide `budget` bytes; raises `CapacityError` if they are not enough.

    `together`: modules whose parameters are needed all at once, with the bytes of these parameters.
    `activations`: offloaded activations share the cache. `trains`: false for inference.
    """
    gradients = max((u.arriving for u in units), default=0)
    if not nvme:
        return _all_resident(units, budget, gradients)
    homes = choose_homes(units, budget, chunk_size.MIN_CHUNK_BYTES)
    staying = [u for u, home in zip(units, homes, strict=True) if home is Home.RAM]
    resident = sum(u.total(chunk_size.MIN_CHUNK_BYTES) for u in staying)
    moving = [u for u, home in zip(units, homes, strict=True) if home is Home.NVME]
    all_gradients = sum(u.arriving for u in units)
    # Room for the largest unit's gradients and for all small ones beside it: those need not wait for its update.
    small = sum(u.arriving for u in staying)
    set_aside = min(all_gradients, max(gradients + small, int(budget * _GRADIENT_SHARE)))
    at_once = max([u.parameters for u in moving] + [size for _, size in together], default=0)
    chunk = chunk_size.choose_chunk_bytes(budget - resident - set_aside, at_once)
    everything = sum(u.total(chunk) for u in moving)
    most = budget if activations else everything
    cache = min(budget - resident - set_aside, most)
    least = _minimum(moving, together, chunk)
    _check(moving, together, budget, resident, gradients, least, trains=trains)
    if cache < least:
        # Tight: set aside only what one unit's gradients need.
        set_aside = gradients
        cache = min(budget - resident - set_aside, most)
    ahead = lookahead_bytes(moving, cache) if trains else inference_lookahead([u.parameters for u in moving], cache)
    return MemoryDivision(homes, resident, set_aside, cache, ahead, chunk, everything, least)


def room_while_building(memory: int) -> int:
    """Room for units that are gathered while a model is being built, when their sizes are not known yet."""
    return int(memory * _GATHER_SHARE)


def _all_resident(units: Sequence[UnitSize], budget: int, gradients: int) -> MemoryDivision:
    states = sum(u.total(chunk_size.MAX_CHUNK_BYTES) for u in units)
    if states + gradients > budget:
        raise CapacityError(
            f"the states take {format_bytes(states + gradients)} of host memory, but memory is {format_bytes(budget)} "
            "and there is no nvme to put the rest on\n"
            f'  fix:   nvme="/path/on/a/drive", or memory={suggest_bytes(states + gradients)}'
        )
    return MemoryDivision((Home.RAM,) * len(units), states, gradients, 0, 0, chunk_size.MAX_CHUNK_BYTES, 0)


def _room_for_copies(sizes: Sequence[int], at_once: int, memory: int, *, gathered: bool) -> int:
    share = _GATHER_SHARE if gathered else _COPY_SHARE
    return max(at_once + max(sizes), min(sum(sizes), round_up(int(memory * share))))


def _bucket_bytes(memory: int) -> int:
    """Does not depend on the model (ZeRO-R's constant-size buffers)."""
    return max(_MIN_BUCKET_BYTES, min(_MAX_BUCKET_BYTES, round_up(memory // _BUCKETS_IN_MEMORY)))


def _minimum(moving: Sequence[UnitSize], together: Sequence[tuple[str, int]], chunk: int) -> int:
    """The least cache: what is needed at once, or the parameters of a unit and two chunks (record, gradient)."""
    update = max((u.parameters + _least_chunks(u, chunk) for u in moving), default=0)
    return max(update, max((size for _, size in together), default=0))


def _least_chunks(unit: UnitSize, chunk: int) -> int:
    """A record and a gradient: of a chunk, or of the largest parameter that is updated whole."""
    return max(min(2 * chunk, round_up(unit.record) + round_up(unit.gradients)), unit.largest_whole)


def _check(
    moving: Sequence[UnitSize],
    together: Sequence[tuple[str, int]],
    budget: int,
    resident: int,
    gradients: int,
    least: int,
    *,
    trains: bool,
) -> None:
    minimum = resident + gradients + least
    if minimum <= budget:
        return
    largest = ("all small units", resident)  # if no unit moves there is nothing else to name
    name, size = max([*together, *((u.name, u.parameters) for u in moving)], key=lambda p: p[1], default=largest)
    needed = (
        f"{format_bytes(size)} of host memory for its parameters and {format_bytes(gradients)} for gradients to be "
        f"trained, {format_bytes(minimum)} with {_chunks(moving)}"
        if trains
        else f"{format_bytes(minimum)} of host memory for its parameters, with those that stay resident"
    )
    raise CapacityError(
        f"{name!r} needs {needed}, but memory is {format_bytes(budget)}\n  fix:   memory={suggest_bytes(minimum)}"
    )


def _chunks(units: Sequence[UnitSize]) -> str:
    """What an update needs beside parameters and fresh gradients."""
    unit = max(units, key=lambda unit: unit.largest_whole, default=None)
    if unit is None or not unit.largest_whole:
        return "two chunks of optimizer state"
    return f"the optimizer states of a whole parameter of {unit.name!r}, which the optimizer does not update in slices"
