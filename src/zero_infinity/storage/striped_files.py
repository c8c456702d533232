"""Swap space striped over one or several directories.

Owns the mapping from an address to a file and an offset in it: stripe 0 is in the first directory, stripe 1 in the
second, and so on round-robin (RAID 0), so that a large transfer keeps every drive busy. `SwapFile` creates each file
and reserves its space; the I/O engine decides what is transferred when.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from zero_infinity.errors import ConfigError, StorageError
from zero_infinity.policy.alignment import ALIGNMENT
from zero_infinity.storage.swap_device import UNLIMITED, FileRange
from zero_infinity.storage.swap_file import SwapFile

# As large as a request of the I/O engine: a smaller stripe would split every request without benefit, and a larger one
# would leave drives idle in a transfer of a few requests.
STRIPE_BYTES = 8 << 20


class FileDevice:
    """A `SwapDevice` over unnamed files, one in each of `paths`."""

    def __init__(
        self, paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]], *, stripe_bytes: int = STRIPE_BYTES
    ) -> None:
        directories = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
        if not directories:
            raise ConfigError("nvme names no directory\n  fix:   set nvme to a path or a list of paths")
        if stripe_bytes <= 0 or stripe_bytes % ALIGNMENT:
            raise ConfigError(f"stripe_bytes must be a positive multiple of {ALIGNMENT}, not {stripe_bytes}")
        self._stripe_bytes = stripe_bytes
        self.capacity = 0
        self._files: list[SwapFile] = []
        try:
            for directory in directories:
                self._files.append(SwapFile(directory))
        except BaseException:  # also a RuntimeWarning that a warning filter turns into an error
            self.close()
            raise
        self.alignment = ALIGNMENT if any(file.direct for file in self._files) else 1

    @property
    def direct(self) -> bool:
        """True if every directory supports direct I/O."""
        return all(file.direct for file in self._files)

    @property
    def descriptors(self) -> tuple[int, ...]:
        """File descriptors in stripe order, for tools that open the same file (/proc/self/fd/N)."""
        return tuple(file.descriptor for file in self._files)

    def extend(self, num_bytes: int) -> None:
        capacity = self.capacity + num_bytes
        grown: list[tuple[SwapFile, int]] = []
        try:
            for index, file in enumerate(self._files):
                old, new = file.size, self._file_size(index, capacity)
                if new > old:
                    file.grow(new)
                    grown.append((file, old))
        except (StorageError, RuntimeWarning):  # the latter where a warning filter turns it into an error
            for file, size in grown:
                file.cut(size)
            raise
        self.capacity = capacity

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

    def file_ranges(self, offset: int, num_bytes: int) -> list[FileRange]:
        ranges: list[FileRange] = []
        stop = offset + num_bytes
        while offset < stop:
            part = min(stop - offset, self.max_request(offset))
            file, file_offset = self._locate(offset)
            ranges.append(FileRange(file.descriptor, file_offset, part))
            offset += part
        return ranges

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
        """How many of `capacity` bytes are in file `index`."""
        num_stripes, rest = divmod(capacity, self._stripe_bytes)
        rows, last = divmod(num_stripes, len(self._files))
        if index < last:
            return (rows + 1) * self._stripe_bytes
        return rows * self._stripe_bytes + (rest if index == last else 0)
