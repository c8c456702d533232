"""Reports the progress of a save or load to a callback of the user."""

from __future__ import annotations

import threading
from collections.abc import Callable

Progress = Callable[[int, int], None]  # bytes moved so far by this rank, and bytes in all


class ProgressMeter:
    """Counts bytes moved by several threads. Calls `progress` after each piece, one call at a time."""

    def __init__(self, progress: Progress | None, total: int = 0) -> None:
        self._progress = progress
        self._lock = threading.Lock()
        self._done = 0
        self.total = total

    def add(self, num_bytes: int) -> None:
        if self._progress is not None:
            with self._lock:
                self._done = min(self.total, self._done + num_bytes)
                self._progress(self._done, self.total)
