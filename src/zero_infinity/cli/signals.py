"""How SIGINT and SIGTERM end a long command: in the middle of nothing that matters.

Outside of `deferred` a signal raises at once, so that `finally` blocks clean up. Inside, the first one is only noted,
for the loop to see when its step is done; a second one raises. Of several ranks all stop after the same step.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class SignalWatch:
    """Which signal came, if any. Made by `watched`."""

    def __init__(self) -> None:
        self._signal: signal.Signals | None = None
        self._deferring = False
        self._agreed = False

    @property
    def requested(self) -> bool:
        return self._signal is not None

    @property
    def name(self) -> str:
        return self._signal.name if self._signal is not None else "no signal"

    @property
    def number(self) -> int:
        """Of the signal that came; 0: none."""
        return 0 if self._signal is None else int(self._signal)

    @property
    def is_agreed(self) -> bool:
        """Whether all ranks stop for it."""
        return self._agreed

    def agree(self, numbers: Iterable[int]) -> None:
        """These came on the ranks, this one among them, by the end of a step: all stop for the same one, or for none.

        One that came here since then waits for the next step, when the others know of it too.
        """
        came = max(numbers)
        if came:
            self._signal = signal.Signals(came)
            self._agreed = True

    @property
    def exit_code(self) -> int:
        """0, or what a shell reports of a process that the signal ended."""
        return 0 if self._signal is None else 128 + self._signal

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """The first signal in here waits to be looked at."""
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
def watched() -> Iterator[SignalWatch]:
    """Signals in here go to the `SignalWatch`; who handled them before does so again afterwards."""
    interruption = SignalWatch()
    if threading.current_thread() is not threading.main_thread():
        yield interruption  # Python delivers signals to the main thread, and only that may set handlers
        return
    before = {number: signal.signal(number, interruption.handle) for number in _SIGNALS}
    try:
        yield interruption
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
