"""Reads of swap files into device memory that bypass the host: GPUDirect Storage, where torch and the machine have it.

Owns the calls to `GdsFile`, which the module of a device (`torch.cuda`) has as `gds`. A probe decides whether it is
used: it writes a page into a swap file and reads it back on the device.

Facts that decide the code (torch 2.13, `cuFileRead`):
- A read blocks the thread that asks for it, and no stream knows of it: whoever reuses memory waits for its earlier
  readers first, and what is launched afterwards needs no event.
- It fills a whole storage. A part of a storage is a storage, too.
- Swap files have no name; `/proc/self/fd` opens them once more.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from zero_infinity.errors import StorageError
from zero_infinity.policy.alignment import ALIGNMENT
from zero_infinity.storage.swap_device import FileRange
from zero_infinity.storage.swap_file import SwapFile


class DirectReader:
    """Reads ranges of open files into the memory of one device. Used by one thread."""

    def __init__(self, device: torch.device) -> None:
        self._gds = torch.get_device_module(device).gds
        self._files: dict[int, Any] = {}  # by the descriptor of the swap file
        self.bytes_read = 0

    def read(self, target: torch.Tensor, ranges: Sequence[FileRange]) -> None:
        """Fill `target` with these bytes. Nothing on the device may still use its memory."""
        storage, start = target.untyped_storage(), target.storage_offset() * target.element_size()
        for part in ranges:
            self._file(part.descriptor).load_storage(storage[start : start + part.num_bytes], part.offset)
            start += part.num_bytes
            self.bytes_read += part.num_bytes

    def close(self) -> None:
        """Close its files: as long as they are open, the swap space is not free."""
        self._files.clear()

    def _file(self, descriptor: int) -> Any:
        file = self._files.get(descriptor)
        if file is None:
            file = self._files[descriptor] = self._gds.GdsFile(f"/proc/self/fd/{descriptor}", os.O_RDONLY)
        return file


def find_direct_reader(device: torch.device, directories: Iterable[Path]) -> DirectReader | None:
    """Return a reader of swap files in these directories; None if one of them cannot be read by the device."""
    if any(why_not(device, directory) is not None for directory in directories):
        return None
    return DirectReader(device)


def why_not(device: torch.device, directory: Path) -> str | None:
    """Return why swap files in a directory cannot be read by a device past the host; None if they can."""
    if not hasattr(torch.get_device_module(device), "gds"):
        return f"torch has it for cuda, not for {device.type}"
    try:
        file = SwapFile(directory)
    except (StorageError, RuntimeWarning) as error:
        return str(error).splitlines()[0]
    try:
        return _problem(device, file)
    except (OSError, RuntimeError, AttributeError) as error:
        return (str(error) or type(error).__name__).splitlines()[0]
    finally:
        file.close()


def _problem(device: torch.device, file: SwapFile) -> str | None:
    pattern = torch.arange(ALIGNMENT, dtype=torch.int32).to(torch.uint8)
    file.grow(2 * ALIGNMENT)
    written = torch.get_device_module(device).gds.GdsFile(f"/proc/self/fd/{file.descriptor}", os.O_RDWR)
    source = pattern.to(device)
    written.save_storage(source.untyped_storage(), offset=ALIGNMENT)
    target = torch.zeros_like(source)
    torch.accelerator.synchronize(device)
    reader = DirectReader(device)
    reader.read(target, [FileRange(file.descriptor, ALIGNMENT, ALIGNMENT)])
    return None if torch.equal(target.cpu(), pattern) else "the bytes read differ from those written"
