"""A swap device that fails on request: the engine's own device, wrapped."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable

from support.fake_device import FakeRequest
from zero_infinity.storage.io_types import Direction
from zero_infinity.storage.striped_files import FileDevice


class FaultyDevice(FileDevice):
    """A real swap file whose requests fail when `fails` says so (set it at any time)."""

    fails: Callable[[FakeRequest], bool]
    made: list[FaultyDevice]
    error_number = errno.EIO

    def __init__(self, paths: object) -> None:
        super().__init__(paths)  # type: ignore[arg-type]
        self.requests: list[FakeRequest] = []
        self.failed: list[FakeRequest] = []
        self._run_trace = threading.Lock()
        type(self).made.append(self)

    def read(self, memory: memoryview, offset: int) -> int:
        self._meet(Direction.READ, memory, offset)
        return super().read(memory, offset)

    def write(self, memory: memoryview, offset: int) -> int:
        self._meet(Direction.WRITE, memory, offset)
        return super().write(memory, offset)

    def _meet(self, direction: Direction, memory: memoryview, offset: int) -> None:
        with self._run_trace:
            request = FakeRequest(len(self.requests), direction, offset, len(memory))
            self.requests.append(request)
        if type(self).fails(request):
            self.failed.append(request)
            raise OSError(self.error_number, os.strerror(self.error_number))


def break_device(fails: Callable[[FakeRequest], bool] = lambda _: False, number: int = errno.EIO) -> type[FaultyDevice]:
    """A class of such devices, for `EngineParts`; its `fails` can be changed at any time."""

    class Broken(FaultyDevice):
        error_number = number

    Broken.fails = staticmethod(fails)  # type: ignore[assignment]
    Broken.made = []
    return Broken
