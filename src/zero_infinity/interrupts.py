"""Delays Ctrl-C (SIGINT) until the engine is in a consistent state.

Python runs a signal handler in the main thread, between any two bytecodes, and the handler of SIGINT raises
KeyboardInterrupt. In the middle of the engine's bookkeeping (a fetch is decided but not started, a parameter is
unsharded but not counted) that would leave inconsistent state for good. So the engine's entry points are `held`: a
SIGINT inside is recorded. Where the engine waits, or calls user code, its state is consistent and it lets interrupts
`through`. A recorded interrupt is raised when the outermost `held` ends.

Masking the signal would not work: another thread would receive it, and the handler runs in the main thread anyway.
"""

from __future__ import annotations

# The functions underlying `signal`, without its conversions to and from enums, which take 20 us.
import _signal  # type: ignore[import-not-found]
import threading
from types import FrameType, TracebackType
from typing import Any


class _Keeper:
    """Replaces the SIGINT handler while interrupts are held, and restores it."""

    def __init__(self) -> None:
        self.is_holding = False
        self._kept = False
        self._before: Any = None  # the original SIGINT handler

    def hold(self) -> bool:
        """Hold interrupts from now on; False if that is not possible or not needed."""
        if self.is_holding or threading.get_ident() != _main_thread():
            return False
        self._before = _signal.getsignal(_signal.SIGINT)
        if not callable(self._before):  # ignored, default action, or not set by Python: none of them raises
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
    """Interrupts inside are delayed until the end, or until they are let `through`."""

    __slots__ = ("_mine",)

    def __enter__(self) -> None:
        self._mine = _keeper.hold()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._mine:
            _keeper.let_go()


class through:  # noqa: N801 - a context manager reads like a function
    """Inside `held`: interrupts in this context are raised immediately."""

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
