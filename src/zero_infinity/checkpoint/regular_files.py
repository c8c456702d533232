"""Opens the files of a checkpoint for reading: regular files alone, since a FIFO or a device could block for ever.

Links are followed: what they lead to is checked like any other file.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from zero_infinity.errors import CheckpointError

_KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


def open_regular(path: str | os.PathLike[str], flags: int) -> int:
    """Return a descriptor of the file at `path`."""
    check_regular(path, os.stat(path).st_mode)
    descriptor = os.open(path, flags | os.O_NONBLOCK)  # without effect on a regular file
    try:
        check_regular(path, os.fstat(descriptor).st_mode)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def check_regular(path: str | os.PathLike[str], mode: int) -> None:
    """Raise unless this is the mode of a regular file, or of a directory, which cannot block and is told by its use."""
    kind = _KINDS.get(stat.S_IFMT(mode))
    if kind is not None:
        raise CheckpointError(
            f"{Path(path)} is {kind}, not a regular file\n  fix:   remove it, or load a copy of the checkpoint"
        )
