"""Where units live. Which of those on the host live in RAM and which on NVMe; `device_homes.py` chooses before that.

Small units live in RAM as long as all of them together are a sliver of the budget: moving a bias costs a request and
saves nothing. All other units live on NVMe and are fetched; without NVMe everything lives in RAM. Pure arithmetic.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Protocol

from zero_infinity.policy.alignment import round_up

# A unit of at most this many bytes is small...
_SMALL_BYTES = 256 * 1024
# ...and stays resident while all small units take at most this share of the budget.
_SMALL_SHARE = 1 / 16


class Home(enum.Enum):
    """The slowest tier that a block may be evicted to."""

    NVME = "nvme"
    RAM = "ram"
    DEVICE = "device"


class SizedUnit(Protocol):
    """The part of a `UnitSize` that decides its home."""

    @property
    def parameters(self) -> int: ...
    @property
    def home(self) -> Home | None: ...
    def total(self, chunk_bytes: int) -> int: ...


def choose_homes(units: Sequence[SizedUnit], budget: int, chunk_bytes: int) -> tuple[Home, ...]:
    """The homes of these units, with NVMe and chunks of this size; a home that was decided earlier stays."""
    small_bytes = sum(unit.total(chunk_bytes) for unit in units if is_small(unit.parameters))
    of_small = home_of_small_units(small_bytes, budget)
    return tuple(unit.home or (of_small if is_small(unit.parameters) else Home.NVME) for unit in units)


def is_small(parameter_bytes: int) -> bool:
    """True if a unit with this many bytes of parameters is small."""
    return parameter_bytes <= _SMALL_BYTES


def home_of_small_units(small_bytes: int, budget: int) -> Home:
    """The home of all small units, which take `small_bytes` with their records and gradients."""
    return Home.RAM if small_bytes <= budget * _SMALL_SHARE else Home.NVME


def home_while_building(num_bytes: int, resident_bytes: int, budget: int, *, nvme: bool) -> Home:
    """The home of a unit in a model that is being built, where small units take `resident_bytes` so far."""
    states = 4  # parameters, two states and gradients, as with Adam: what it will take in training
    small = is_small(num_bytes) and states * (resident_bytes + round_up(num_bytes)) <= budget * _SMALL_SHARE
    return Home.RAM if small or not nvme else Home.NVME
