"""The save that runs while training continues: at most one at a time, on a thread of its own.

The compute thread waits for it at known points (the next save or load, `zi.synchronize`), where it also gets its
errors. Knows nothing of what is saved: `shard_writer.py` writes, `storage/snapshot_guard.py` keeps blocks unchanged
until they are written, `save.py` orders the phases.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable

from zero_infinity.comm.channel import Channel
from zero_infinity.comm.process_group import RankGroup
from zero_infinity.errors import again
from zero_infinity.interrupts import through


class BackgroundSave:
    """Made with the engine, for as long as that lives. The process does not exit before a running save has ended."""

    def __init__(self, ranks: RankGroup | None) -> None:
        self._ranks = ranks
        self._channel: Channel | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def connect(self) -> Channel | None:
        """The thread's own channel to the other ranks. Connects at the first call, which all ranks make together."""
        if self._ranks is not None and self._channel is None:
            self._channel = self._ranks.channel("checkpoints")
        return self._channel

    def start(self, work: Callable[[], None]) -> None:
        """Run `work` on a thread. `wait` first: the last one must have ended."""
        self._thread = threading.Thread(target=self._run, args=(work,), name="zero-infinity-zi.save")
        self._thread.start()

    def wait(self) -> None:
        """Wait for its end; raise its error, once."""
        while self.is_running:
            with through():
                self._join()
        error = self._take_error()
        if error is not None:
            raise again(error)

    def close(self) -> None:
        """Wait for its end at shutdown, when an error can only be a warning."""
        self._join()
        error = self._take_error()
        if error is not None:
            warnings.warn(f"zi.save failed: {error}", stacklevel=2)

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _take_error(self) -> BaseException | None:
        error, self._error, self._thread = self._error, None, None
        return error

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised on the compute thread by wait()
            self._error = error.with_traceback(None)  # whose frames hold the model
