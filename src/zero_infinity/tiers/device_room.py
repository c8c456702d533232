"""The budget of a device's cache: careful at first, then what was free at the peak of a step, less after a failure.

With `device_memory=None` the budget is learnt after the first steps, and the ranks take the smallest. With a number it
stays, until the device runs out of memory: then the cache shrinks, and is learnt like the other, up to that number.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from zero_infinity.byte_sizes import format_bytes
from zero_infinity.comm.channel import Channel
from zero_infinity.comm.topics import DEVICE_MEMORY
from zero_infinity.config import ConfigWarning
from zero_infinity.policy.activation_stays import ActivationStays
from zero_infinity.policy.device_room import (
    first_budget,
    is_learnt_after,
    is_worth_changing,
    learnt_budget,
)
from zero_infinity.tiers.device_cache import DeviceCache
from zero_infinity.tiers.others_peak import OthersPeak
from zero_infinity.tiers.torch_accelerator import TorchAccelerator


class LimitedMemory(Protocol):
    """The memory whose budget changes."""

    @property
    def others(self) -> OthersPeak: ...

    @property
    def held_bytes(self) -> int: ...

    def give_back(self) -> None:
        """Return everything to the device that is not in use."""


@dataclass(frozen=True, slots=True)
class CachedCopies:
    """A cache of copies, seen from its budget."""

    memory: LimitedMemory
    limit: Callable[[int], None]  # sets the budget
    total_bytes: Callable[[], int]  # the size of all copies that it may hold


class DeviceRoom:
    """Sets the budget of one cache of copies on a device."""

    def __init__(
        self,
        cache: CachedCopies,
        *,
        budget: int,
        least: int,
        is_measured: bool,
        channel: Channel | None,
        trains: bool,
        stays: ActivationStays,
    ) -> None:
        """`budget`: what the layout counts on; more may be learnt if it `is_measured`.
        `channel` to the other ranks, if copies are gathered from them: only together they may change the budget.
        """
        self._cache = cache
        self._memory = cache.memory
        self._least = least
        self._most = None if is_measured else budget
        self._channel = channel
        self._trains = trains
        self._stays = stays
        self._others_bytes = 0  # without saved tensors that stay by this budget
        self._num_forwards = 0  # of a model that is not trained
        self._has_warned = False
        self._known_failures = self._memory.others.num_failures()
        self._is_mid_step = False
        self._has_shrunk = False  # in this step
        self._is_learning = is_measured
        self.budget = budget
        self._set(first_budget(budget, least) if is_measured else budget)
        if is_measured:
            self._memory.others.watch()

    @property
    def others_bytes(self) -> int:
        """The most that everything else has taken on the device at once, as far as it was measured."""
        return self._others_bytes

    # ------------------------------------------------------------------ steps

    def begin_forward(self) -> None:
        """The model's forward begins. If a step was left unfinished, the device may have run out of memory in it."""
        if self._is_mid_step and self._memory.others.num_failures() > self._known_failures:
            self.shrink("in a step before this one")
        self._is_mid_step = True
        self._share()  # units may have left the cache

    def end_forward(self) -> None:
        """The model's forward has ended: a step, if it is not trained."""
        if not self._trains:
            self._num_forwards += 1
            self.end_step(self._num_forwards)

    def end_step(self, num_steps: int) -> None:
        """Learn the budget from the peak of the steps so far."""
        self._is_mid_step = False
        is_due = self._has_shrunk or is_learnt_after(num_steps)
        if not is_due or not self._is_learning:
            return
        self._has_shrunk = False
        learnt = self._learnt()
        if self._channel is not None:
            said = self._channel.agree(DEVICE_MEMORY, [learnt])
            learnt = min(numbers[0] for numbers in said)
        if is_worth_changing(self.budget, learnt):
            self._set(learnt)

    def _learnt(self) -> int:
        others = self._memory.others
        others.note(self._memory.held_bytes)
        self._others_bytes = max(self._others_bytes, others.num_bytes - self._stays.peak_bytes)
        learnt = learnt_budget(others.capacity(), self._others_bytes, self._least)
        return learnt if self._most is None else min(learnt, self._most)

    # ------------------------------------------------------------------ the device runs out of memory

    def shrink(self, when: str) -> bool:
        """The device ran out of memory. Shrink the cache, so that another attempt may succeed; False if it cannot."""
        self._known_failures = self._memory.others.num_failures()
        if self._channel is not None or self.budget <= self._least:
            self._memory.give_back()
            return False
        before = self.budget
        self._set(self._least)
        self._others_bytes = 0
        self._memory.give_back()
        # The rest of this step may need still more: only its end shows how much is left for the cache.
        self._has_shrunk = self._is_learning = True
        self._memory.others.watch()
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"the device ran out of memory {when}: the cache of parameters on it shrinks from "
                f"{format_bytes(before)} to {format_bytes(self.budget)} until the step ends, and then to what it has "
                "left free\n  fix:   smaller batches or checkpoint_activations=True leave more; reported once",
                ConfigWarning,
                stacklevel=2,
            )
        return True

    def _set(self, budget: int) -> None:
        """Give the cache this much."""
        self.budget = budget
        self._cache.limit(budget)
        self._share()

    def _share(self) -> None:
        """What the cache never needs, since all copies fit, is for saved tensors."""
        self._stays.room = max(0, self.budget - self._cache.total_bytes())


def make_device_room(
    accelerator: TorchAccelerator,
    cache: DeviceCache,
    look_ahead: Callable[[int], int],
    *,
    least: int,
    channel: Channel | None,
    trains: bool,
    stays: ActivationStays,
) -> DeviceRoom:
    """Return what sets the budget of `cache`, and its look-ahead by that."""

    def limit(budget: int) -> None:
        cache.limit(budget, look_ahead(budget))
        accelerator.memory.limit(budget)

    return DeviceRoom(
        CachedCopies(accelerator.memory, limit, lambda: cache.total_bytes),
        budget=accelerator.budget,
        least=least,
        is_measured=accelerator.is_measured,
        channel=channel,
        trains=trains,
        stays=stays,
    )
