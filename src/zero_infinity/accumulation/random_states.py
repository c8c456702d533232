"""The random states that micro-batches of an ordinary loop would begin with, known before any of them has run.

In a loop the second micro-batch begins with the random state that the first one has left. Here the second one runs its
first block before the first one has ended. How far a forward moves a generator does not depend on the generator's
state. So that distance is measured once and predicted from then on; the caller checks the prediction when the forwards
end.

The generator of the CPU (a Mersenne twister) moves by a number of draws; those of devices (counters) by an offset.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from typing import Any

import torch

_TWIST = 624  # draws between two changes of the whole state
_ARRAY = slice(24, 24 + _TWIST * 8)  # its bytes in a generator's state; those before have the position in it
_LEFT = slice(8, 12)
_COUNTER_BYTES = 16  # of a device's state: seed and offset
# More than any forward draws; a measurement takes some 10 ns for each.
_MOST_DRAWS = 50_000_000


@dataclass(frozen=True, slots=True)
class Distance:
    """How far generators moved."""

    draws: int = 0
    offset: int = 0

    def __bool__(self) -> bool:
        return bool(self.draws or self.offset)


@dataclass(frozen=True, slots=True, eq=False)
class RandomState:
    """The state of torch's generator for the CPU, and of that for one accelerator."""

    host: torch.Tensor
    there: torch.Tensor | None
    device: torch.device

    def put_back(self) -> None:
        torch.set_rng_state(self.host)
        if self.there is not None:
            torch.get_device_module(self.device).set_rng_state(self.there, self.device)

    def equals(self, other: RandomState) -> bool:
        if self.there is not None and other.there is not None and not torch.equal(self.there, other.there):
            return False
        return torch.equal(self.host, other.host)

    def moved(self, distance: Distance) -> RandomState:
        """Return the state that far from this one."""
        host, there = self.host, self.there
        if distance.draws:
            generator = torch.Generator()
            generator.set_state(host)
            _draw(generator, distance.draws)
            host = generator.get_state()
        if there is not None and distance.offset:
            there = there.clone()
            there.view(torch.int64)[1] += distance.offset
        return RandomState(host, there, self.device)

    def distance_to(self, later: RandomState) -> Distance | None:
        """Return how far a later state is; None if that is not known."""
        draws = 0 if torch.equal(self.host, later.host) else _num_draws(self.host, later.host)
        offset = 0
        if self.there is not None and later.there is not None and not torch.equal(self.there, later.there):
            if self.there.numel() != _COUNTER_BYTES:
                return None
            (seed, before), (other_seed, after) = self.there.view(torch.int64), later.there.view(torch.int64)
            if seed != other_seed:
                return None
            offset = int(after - before)
        return Distance(draws, offset) if draws is not None else None


def random_state(device: torch.device) -> RandomState:
    """Return the state now; `device` is the one that computes."""
    there = torch.get_device_module(device).get_rng_state(device) if device.type != "cpu" else None
    return RandomState(torch.get_rng_state(), there, device)


def other_generators() -> list[Any]:
    """Return the states of generators that are not predicted: Python's and numpy's."""
    numpy = sys.modules.get("numpy.random")
    return [random.getstate(), numpy.get_state(legacy=True)[1:3] if numpy is not None else None]


def are_same(before: list[Any], after: list[Any]) -> bool:
    """True if none of the other generators was used."""
    (python, numbers), (python_now, numbers_now) = before, after
    if python != python_now or (numbers is None) != (numbers_now is None):
        return False
    return numbers is None or (numbers[1] == numbers_now[1] and bool((numbers[0] == numbers_now[0]).all()))


def _num_draws(before: torch.Tensor, after: torch.Tensor) -> int | None:
    """Return after how many draws the generator gets from one state to another; None if it does not."""
    generator = torch.Generator()
    generator.set_state(before)
    state, draws = before, 0
    while not torch.equal(state[_ARRAY], after[_ARRAY]):
        if draws > _MOST_DRAWS:
            return None
        draws += _draw(generator, _left(state))
        state = generator.get_state()
    rest = _left(state) - _left(after)
    if rest < 0:
        return None
    _draw(generator, rest)
    return draws + rest if torch.equal(generator.get_state(), after) else None


def _left(state: torch.Tensor) -> int:
    """Return the draws until the next twist."""
    return int(state[_LEFT].view(torch.int32).item())


def _draw(generator: torch.Generator, number: int) -> int:
    torch.empty(number, dtype=torch.int32).random_(generator=generator)
    return number
