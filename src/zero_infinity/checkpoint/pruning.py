"""Removes old checkpoints (`keep=`) and what killed runs have left behind. The only code that deletes checkpoints.

A directory is removed only if it has a checkpoint's name, or that of a draft, and contains a checkpoint's files alone.
A draft whose writer still runs is recognized by the lock that the writer holds.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
from pathlib import Path

from zero_infinity.checkpoint.find_checkpoint import checkpoints_in
from zero_infinity.checkpoint.manifest import FILE_NAME, MANIFEST

_DRAFT = re.compile(r"\.(saving|removing)-[0-9a-f]{16}")
_PARTS_NAME = re.compile(r"parts-\d{5,9}\.json")  # written by ranks for rank 0 during a save


def prune(directory: Path, keep: int, newest: str) -> None:
    """Remove all checkpoints but the newest `keep`, of which `newest` is one."""
    others = [path for path, _ in checkpoints_in(directory) if path.name != newest and _is_checkpoint(path)]
    for path in others[: max(0, len(others) - (keep - 1))]:
        # Rename first, which is atomic: a half-removed directory must not look like a checkpoint.
        removing = directory / f".removing-{secrets.token_hex(8)}"
        path.rename(removing)
        remove_flat(removing)


def remove_leftovers(directory: Path) -> None:
    """Remove drafts of runs that were killed."""
    for path in directory.iterdir():
        if _DRAFT.fullmatch(path.name) is None or path.is_symlink() or not path.is_dir():
            continue
        lock = lock_directory(path)
        if lock is not None:
            try:
                if _has_only_checkpoint_files(path):
                    remove_flat(path)
            finally:
                os.close(lock)


def lock_directory(path: Path) -> int | None:
    """An open descriptor that holds the directory's lock; None if another process holds it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno == errno.EWOULDBLOCK:
            os.close(descriptor)
            return None
        if error.errno not in (errno.EOPNOTSUPP, errno.ENOLCK):  # a file system without locks
            os.close(descriptor)
            raise
    return descriptor


def remove_flat(path: Path) -> None:
    """Remove a directory that contains only files."""
    for entry in path.iterdir():
        entry.unlink(missing_ok=True)
    path.rmdir()


def _is_checkpoint(path: Path) -> bool:
    return not path.is_symlink() and (path / MANIFEST).is_file() and _has_only_checkpoint_files(path)


def _has_only_checkpoint_files(path: Path) -> bool:
    names = [entry.name for entry in path.iterdir()]
    return all(name == MANIFEST or FILE_NAME.fullmatch(name) or _PARTS_NAME.fullmatch(name) for name in names)
