"""Runs a function so that it can pause anywhere below: in a thread of its own, while its caller waits.

Only one of the two threads runs at a time: the caller in `resume`, or the function between two pauses. So the function
needs no locks, and what it calls need not know that it may pause. Torch keeps some of its state for each thread (modes,
autocast, the stream of a device): the function begins with its caller's.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from zero_infinity.accumulation.thread_state import ThreadState

Result = TypeVar("Result")


class CancelledError(Exception):
    """Raised where a coroutine has paused, to end it."""


class Coroutine(Generic[Result]):
    """A function that runs while its caller waits for it."""

    def __init__(self, function: Callable[[], Result], name: str) -> None:
        self._function: Callable[[], Result] | None = function
        self._error: BaseException | None = None
        self._is_cancelled = False
        # Held by one who may not run. A lock, because a thread may release one that another has acquired.
        self._turn, self._callers_turn = threading.Lock(), threading.Lock()
        self._turn.acquire()
        self._callers_turn.acquire()
        context, state = contextvars.copy_context(), ThreadState()
        # A daemon: an interrupt may leave it in a kernel, which is no reason for the process not to end.
        self._thread = threading.Thread(target=lambda: context.run(self._run, state), name=name, daemon=True)
        self.has_ended = False
        self.result: Result | None = None

    def resume(self) -> None:
        """Let it run until it pauses or ends. Raises its error."""
        if self._thread.ident is None:
            self._thread.start()
        else:
            self._turn.release()
        self._wait()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def pause(self) -> None:
        """Called in it: let the caller run until it resumes this."""
        self._callers_turn.release()
        self._turn.acquire()
        if self._is_cancelled:
            raise CancelledError

    def cancel(self) -> None:
        """End it at its pause, with all `finally` clauses and hooks of what it has called."""
        if self.has_ended or self._thread.ident is None:
            return
        self._is_cancelled = True
        while not self.has_ended:  # someone may have caught the error and gone on
            self._turn.release()
            self._wait()
        self._error = None

    def _wait(self) -> None:
        """Wait for the turn. An interrupt is raised once the coroutine has paused; a second one at once."""
        interrupt: BaseException | None = None
        while True:
            try:
                self._callers_turn.acquire()
                break
            except BaseException as error:
                if interrupt is not None:
                    raise
                interrupt = error
        if self.has_ended:
            self._thread.join()
        if interrupt is not None:
            raise interrupt

    def _run(self, state: ThreadState) -> None:
        # Not kept: the function may refer to what holds this, and only the garbage collector would free both.
        function, self._function = self._function, None
        try:
            with state.here():
                self.result = function() if function is not None else None
        except BaseException as error:  # noqa: BLE001 - the caller raises it
            self._error = error
        finally:
            self.has_ended = True
            self._callers_turn.release()
