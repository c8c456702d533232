"""Making connections to all other ranks, on a thread of its own.

gloo waits for a rank that has published its address and does not connect: five times its timeout, and nothing ends that
wait when the rank is killed meanwhile. So the thread that needs the connections does not wait inside gloo. It asks for
the state now and then, and exchanges it with the other ranks over connections that it has already, which break at once.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable

from zero_infinity.comm.transport import Connections


class AttemptState(enum.IntEnum):
    """How far an attempt is."""

    CONNECTING = 0
    CONNECTED = 1
    FAILED = 2


class ConnectionAttempt:
    """One attempt. It begins when it is made, and may outlive its use."""

    def __init__(self, connect: Callable[[], Connections]) -> None:
        self._connect = connect
        self._made: Connections | None = None
        self._error: RuntimeError | None = None
        self._ended = threading.Event()
        # A daemon: if a rank is lost, nobody waits for what gloo does about it.
        threading.Thread(target=self._run, name="zero-infinity-connect", daemon=True).start()

    def state(self, seconds: float) -> AttemptState:
        """Wait so long, or until it ends."""
        if not self._ended.wait(seconds):
            return AttemptState.CONNECTING
        return AttemptState.CONNECTED if self._error is None else AttemptState.FAILED

    def result(self) -> Connections:
        """Wait for its end. Raises the RuntimeError that ended it."""
        self._ended.wait()
        if self._made is None:
            raise self._error or RuntimeError("no connections were made")
        return self._made

    def _run(self) -> None:
        try:
            self._made = self._connect()
        except RuntimeError as error:
            self._error = error
        self._ended.set()
