"""Swap space over one or several directories, striped.

Owns the map from an address to a file and an offset in it: stripe 0 lies in the first directory, stripe 1 in the
second and so on in turn (RAID 0), so that a large transfer keeps every drive busy. What one file is and how its
space is reserved is `SwapFile`'s business; who transfers what and when is the queue's.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from zero_infinity.errors import ConfigError, StorageError
from zero_infinity.policy.sizes import ALIGNMENT
from zero_infinity.storage.swap_device import UNLIMITED
from zero_infinity.storage.swap_file import SwapFile

# As large as the queue's requests: a smaller stripe would cut every request in two for nothing, and a larger one
# would leave drives idle in a transfer of a few requests.
STRIPE_BYTES = 8 << 20


class FileDevice:
    """A `Device` over nameless files, one in each of `paths`."""

    def __init__(
        self, paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]], *, stripe_bytes: int = STRIPE_BYTES
    ) -> None:
        directories = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
        if not directories:
            raise ConfigError("nvme names no directory; give a path or several")
        if stripe_bytes <= 0 or stripe_bytes % ALIGNMENT:
            raise ConfigError(f"stripe_bytes must be a multiple of {ALIGNMENT} above 0, not {stripe_bytes}")
        self._stripe_bytes = stripe_bytes
        self._capacity = 0
        self._files: list[SwapFile] = []
        try:
            for directory in directories:
                self._files.append(SwapFile(directory))
        except BaseException:  # also a RuntimeWarning that a filter has turned into an error
            self.close()
            raise
        self._alignment = ALIGNMENT if any(file.direct for file in self._files) else 1

    @property
    def capacity(self) -> int:
        return self._capacity

    @property
    def alignment(self) -> int:
        return self._alignment

    @property
    def direct(self) -> bool:
        """Whether every directory has direct I/O."""
        return all(file.direct for file in self._files)

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The files' descriptors, in stripe order: for tools that look at the same file (/proc/self/fd/N)."""
        return tuple(file.descriptor for file in self._files)

    def extend(self, num_bytes: int) -> None:
        capacity = self._capacity + num_bytes
        grown: list[tuple[SwapFile, int]] = []
        try:
            for index, file in enumerate(self._files):
                old, new = file.size, self._file_size(index, capacity)
                if new > old:
                    file.grow(new)
                    grown.append((file, old))
        except (StorageError, RuntimeWarning):  # the latter where a filter makes it an error
            for file, size in grown:
                file.cut(size)
            raise
        self._capacity = capacity

    def read(self, memory: memoryview, offset: int) -> int:
        file, file_offset = self._locate(offset)
        return file.read(memory, file_offset)

    def write(self, memory: memoryview, offset: int) -> int:
        file, file_offset = self._locate(offset)
        return file.write(memory, file_offset)

    def max_request(self, offset: int) -> int:
        if len(self._files) == 1:
            return UNLIMITED
        return self._stripe_bytes - offset % self._stripe_bytes

    def describe(self, offset: int) -> str:
        file, file_offset = self._locate(offset)
        return f"{file.directory}/(swap file) at {file_offset}"

    def close(self) -> None:
        for file in self._files:
            file.close()

    def _locate(self, offset: int) -> tuple[SwapFile, int]:
        files = self._files
        if len(files) == 1:
            return files[0], offset
        stripe, within = divmod(offset, self._stripe_bytes)
        row, index = divmod(stripe, len(files))
        return files[index], row * self._stripe_bytes + within

    def _file_size(self, index: int, capacity: int) -> int:
        """How much of `capacity` bytes lies in file `index`."""
        num_stripes, rest = divmod(capacity, self._stripe_bytes)
        rows, last = divmod(num_stripes, len(self._files))
        if index < last:
            return (rows + 1) * self._stripe_bytes
        return rows * self._stripe_bytes + (rest if index == last else 0)
