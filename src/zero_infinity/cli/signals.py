"""Stops long commands cleanly on SIGINT and SIGTERM.

Outside `deferred` a signal raises at once, so that `finally` blocks clean up. Inside, the first signal is recorded and
checked by the loop after each step; a second one raises. With several ranks all stop after the same step.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class SignalWatch:
    """The signal that was received, if any. Created by `watched`."""

    def __init__(self) -> None:
        self._signal: signal.Signals | None = None
        self._deferring = False
        self.is_agreed = False  # all ranks have agreed to stop

    @property
    def requested(self) -> bool:
        return self._signal is not None

    @property
    def name(self) -> str:
        return self._signal.name if self._signal is not None else "no signal"

    @property
    def number(self) -> int:
        """Number of the signal; 0 if there was none."""
        return 0 if self._signal is None else int(self._signal)

    def agree(self, numbers: Iterable[int]) -> None:
        """Agree on the signals that the ranks had received by the end of a step: all stop for the same one, or none.

        A signal received here since then counts after the next step, when the other ranks know of it.
        """
        came = max(numbers)
        if came:
            self._signal = signal.Signals(came)
            self.is_agreed = True

    @property
    def exit_code(self) -> int:
        """0, or 128 + signal as shells report it."""
        return 0 if self._signal is None else 128 + self._signal

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Inside, the first signal is recorded and does not raise."""
        self._deferring = True
        try:
            yield
        finally:
            self._deferring = False

    def handle(self, number: int, _: FrameType | None) -> None:
        first = self._signal is None
        self._signal = signal.Signals(number)
        if self._deferring and first:
            return
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(self.exit_code)


@contextmanager
def immediate() -> Iterator[None]:
    """Inside, a signal ends the process at once: for a wait in C++ in which no handler of Python runs."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_DFL) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def watched() -> Iterator[SignalWatch]:
    """Inside, a `SignalWatch` handles signals; the previous handlers are restored afterwards."""
    interruption = SignalWatch()
    if threading.current_thread() is not threading.main_thread():
        yield interruption  # only the main thread may set handlers
        return
    before = {number: signal.signal(number, interruption.handle) for number in _SIGNALS}
    try:
        yield interruption
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
