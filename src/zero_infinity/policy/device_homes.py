"""Which units live in device memory for good: parameters, optimizer record and gradients. Pure arithmetic.

Every record is used once in a step, always in the same order. Whatever a cache of records did, a record that is not in
device memory would have to go up and down once a step: 12 bytes a parameter each way with Adam in float32. Updating it
on the host moves its parameters up and its gradient down, 2 to 4 bytes each way. So records are never streamed over the
device's link: the best is a fixed set that stays, and nothing of it ever moves.

What a byte of device memory is worth decides how large that set is:
1. *Streaming* needs room for the copies that are used together, and as much again twice for what comes next.
2. *NVMe* is the slowest link, and a record crosses it twice a step. As long as the states on the host are more than
   its memory, units move to the device, down to the room for streaming.
3. *Copies.* A byte of a copy that stays saves a byte of upload in each step. A byte of a home saves less, because most
   of it is the record. So next the parameters of all other units have room to stay.
4. *Homes* get what is left.

Small units come first: a transfer costs more than their bytes. Then the first units of the model: their gradients come
last in backward and their new values are needed first, so nothing hides what they move.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zero_infinity.policy.homes import is_small

# Room for streaming, in multiples of the copies that are used together: in use, and ahead (`lookahead.py` takes 1/3).
_STREAMED = 3


@dataclass(frozen=True, slots=True)
class DeviceUnit:
    """The bytes of a unit on one rank, by where it lives."""

    parameters: int  # as stored
    at_home: int  # on the device: parameters, record and gradients
    copy: int  # that modules compute with while it lives on the host
    copy_at_home: int  # the same while it lives on the device; 0 if they compute with what is stored
    on_host: int  # parameters, record and gradients
    may_move: bool = True  # False: it has to live on the host


@dataclass(frozen=True, slots=True)
class DeviceDivision:
    """The division of device memory."""

    at_home: tuple[bool, ...]  # for each unit
    homes: int  # bytes of units that live there
    copies: int  # bytes for copies of the others


def divide_device(
    units: Sequence[DeviceUnit], budget: int, together: Sequence[Sequence[int]], host_room: int
) -> DeviceDivision:
    """Choose the units that live on a device with `budget` bytes.

    `together`: the numbers of the units that a module needs all at once. `host_room`: bytes of host memory for states.
    """
    everything = range(len(units))
    if all(unit.may_move for unit in units):
        needed = sum(unit.at_home for unit in units)
        if needed + _streaming([unit.copy_at_home for unit in units], together) <= budget:
            return _division(units, everything, budget)
    order = [n for n in everything if units[n].may_move and is_small(units[n].parameters)]
    order += [n for n in everything if units[n].may_move and not is_small(units[n].parameters)]
    streaming = _streaming([max(unit.copy, unit.copy_at_home) for unit in units], together)
    copies = sum(unit.copy for unit in units)
    on_host = sum(unit.on_host for unit in units)
    chosen: dict[int, None] = {}
    homes = 0
    for lets_copies_stay in (False, True):
        for number in order:
            unit = units[number]
            after = copies - unit.copy + unit.copy_at_home
            room = after if lets_copies_stay else min(after, streaming)
            if number in chosen or homes + unit.at_home + room > budget:
                continue
            if lets_copies_stay or on_host > host_room:
                chosen[number] = None
                homes += unit.at_home
                copies = after
                on_host -= unit.on_host
    return _division(units, sorted(chosen), budget)


def _streaming(copies: Sequence[int], together: Sequence[Sequence[int]]) -> int:
    at_once = max((sum(copies[number] for number in group) for group in together), default=0)
    return min(sum(copies), _STREAMED * at_once)


def _division(units: Sequence[DeviceUnit], chosen: Sequence[int], budget: int) -> DeviceDivision:
    homes = sum(units[number].at_home for number in chosen)
    found = frozenset(chosen)
    return DeviceDivision(tuple(number in found for number in range(len(units))), homes, budget - homes)
