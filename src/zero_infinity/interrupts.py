"""Ctrl-C reaches the engine only where it can take it.

Python runs a signal handler in the main thread, between any two bytecodes, and that of SIGINT raises KeyboardInterrupt.
In the middle of the engine's bookkeeping (a block decided upon and not yet fetched, a parameter shown and not yet
counted) that leaves halves which disagree for ever. So the engine's entries are `held`: a SIGINT that comes inside is
kept. Where it waits, or calls the user's own code, it lets interrupts `through`; everything there is in order. What
was kept is raised again when the outermost `held` ends.

Masking the signal would not do: it would reach another thread, and the handler runs in the main thread all the same.
"""

from __future__ import annotations

# The functions behind `signal`: without its conversions to and from enums, which take 20 us.
import _signal  # type: ignore[import-not-found]
import threading
from types import FrameType, TracebackType
from typing import Any


class _Keeper:
    """Takes SIGINT's place while interrupts are held, and gives it back."""

    def __init__(self) -> None:
        self.is_holding = False
        self._kept = False
        self._before: Any = None  # who handled SIGINT

    def hold(self) -> bool:
        """Hold from now on; False when that is not possible or not needed."""
        if self.is_holding or threading.get_ident() != _main_thread():
            return False
        self._before = _signal.getsignal(_signal.SIGINT)
        if not callable(self._before):  # ignored, deadly, or not Python's: none of them raises
            return False
        self._kept = False
        _signal.signal(_signal.SIGINT, self._keep)
        self.is_holding = True
        return True

    def let_go(self) -> None:
        self.is_holding = False
        _signal.signal(_signal.SIGINT, self._before)
        if self._kept:
            self._kept = False
            _signal.raise_signal(_signal.SIGINT)

    def _keep(self, _: int, __: FrameType | None) -> None:
        self._kept = True


def _main_thread() -> int | None:
    return threading.main_thread().ident


_keeper = _Keeper()


class held:  # noqa: N801 - a context manager reads like a function
    """Interrupts in here are kept until the end, or until they are let `through`."""

    __slots__ = ("_mine",)

    def __enter__(self) -> None:
        self._mine = _keeper.hold()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._mine:
            _keeper.let_go()


class through:  # noqa: N801 - a context manager reads like a function
    """Inside `held`: interrupts in here come at once."""

    __slots__ = ("_was_holding",)

    def __enter__(self) -> None:
        self._was_holding = _keeper.is_holding and threading.get_ident() == _main_thread()
        if self._was_holding:
            try:
                _keeper.let_go()
            except BaseException:
                _keeper.hold()
                raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._was_holding:
            _keeper.hold()
