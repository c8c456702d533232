"""An engine's collectives on an accelerator: launched by all of its threads in one order, the same on every rank.

A collective occupies the device's queue until the other ranks' part of it runs. If two threads launched theirs in one
order on one rank and in the other order on another, each device would wait for the other for ever: NCCL and torch both
ask for one order, over all communicators. So rank 0 numbers the launches, each as soon as every rank is about to make
it, and every rank launches by number. A thread waits here for other launches only, never for the device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

import torch

from zero_infinity.errors import EngineClosedError

# To every rank (the second list), from every rank (the first), by rank.
AllToAll = Callable[[list[torch.Tensor], list[torch.Tensor]], object]


class DeviceGroup:
    """The ranks' process group for tensors on an accelerator."""

    def __init__(self, all_to_all: AllToAll) -> None:
        self._all_to_all = all_to_all
        self._changed = threading.Condition()
        self._num_given = 0
        self._num_launched = 0
        self._is_cut = False

    def next_number(self) -> int:
        """Return the number of a launch; for rank 0, which tells the others."""
        with self._changed:
            self._num_given += 1
            return self._num_given - 1

    def launch(self, number: int, exchanges: Iterable[tuple[list[torch.Tensor], list[torch.Tensor]]]) -> None:
        """Launch these, each a list of what is received and one of what is sent, once every earlier launch is made."""
        with self._changed:
            while self._num_launched != number and not self._is_cut:
                self._changed.wait()
            if self._is_cut:
                raise EngineClosedError("the connections between ranks were closed before a collective was launched")
            try:
                for received, sent in exchanges:
                    self._all_to_all(received, sent)
            finally:
                self._num_launched += 1
                self._changed.notify_all()

    def cut(self) -> None:
        """Launch nothing more: threads that wait for earlier launches, or come later, get an error."""
        with self._changed:
            self._is_cut = True
            self._changed.notify_all()
