"""Work on a thread of its own that the training thread waits for at known points, where it also gets its errors."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable

from zero_infinity.errors import again
from zero_infinity.interrupts import through


class BackgroundTask:
    """Something that has been begun. The process does not end before it has."""

    def __init__(self, name: str, work: Callable[[], None]) -> None:
        self._name = name
        self._error: BaseException | None = None
        self._is_told = False
        self._thread = threading.Thread(target=self._run, args=(work,), name=f"zero-infinity-{name}")
        self._thread.start()

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait for its end; raise what it failed with, if nobody was told before."""
        while self._thread.is_alive():
            with through():
                self._thread.join()
        if self._error is not None and not self._is_told:
            self._is_told = True
            raise again(self._error)

    def end(self) -> None:
        """Wait for its end where nobody could be told of an error otherwise than by a warning."""
        self._thread.join()
        if self._error is not None and not self._is_told:
            self._is_told = True
            warnings.warn(f"{self._name} failed: {self._error}", stacklevel=2)

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised on the training thread by wait()
            self._error = error.with_traceback(None)  # whose frames hold the model
