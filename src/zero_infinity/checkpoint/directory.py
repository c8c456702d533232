"""Checkpoints in a directory: how one comes into being whole or not at all, which is the latest, and which have to go.

A checkpoint is written into a hidden directory aside, its files and then the directory are made durable, and one rename
gives it its name. So whatever has a checkpoint's name is whole, whenever the process, or the machine, was stopped.
`latest` is a symbolic link, replaced by a rename as well.

What a killed run has left aside is removed by the next save: it is known by its name, and by nobody holding the lock
that its writer holds. Nothing else is ever removed, except for what `keep` asks for: checkpoints, by their names and
only when there is nothing but a checkpoint's files in them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path

from zero_infinity.checkpoint.manifest import FILE_NAME, MANIFEST
from zero_infinity.errors import CheckpointError, StorageError, TransferError

LATEST = "latest"
_NAME = re.compile(r"step-(\d{8,})(?:-(\d+))?")
_ASIDE = re.compile(r"\.(saving|removing)-[0-9a-f]{16}")
PARTS_NAME = re.compile(r"parts-\d{5,9}\.json")  # what ranks tell each other while a checkpoint is written


def find(path: Path) -> Path:
    """The checkpoint that is meant: `path` itself, or the latest in it, which is then `path` and one name."""
    with storage_errors(path, "look for a checkpoint in"):
        found = _found(path)
        if found is not None:
            return found
        if not path.is_dir():
            reason = "it is a file" if path.exists() else "it does not exist"
            raise CheckpointError(f"{path} is no checkpoint: {reason}")
        of_torch = "; it is one of torch.distributed.checkpoint" if (path / ".metadata").is_file() else ""
        raise CheckpointError(
            f"{path} has no checkpoint: neither {MANIFEST} nor {LATEST}/{MANIFEST} is there{of_torch}\n"
            "  fix:   the directory that zi.save was given, or one of the checkpoints in it"
        )


def has_checkpoint(path: Path) -> bool:
    """Whether `find` would find one."""
    with storage_errors(path, "look for a checkpoint in"):
        return _found(path) is not None


def _found(path: Path) -> Path | None:
    if (path / MANIFEST).is_file():
        return path
    latest = path / LATEST
    if (latest / MANIFEST).is_file():
        folder = latest.resolve()
        return path / folder.name if folder.parent == path.resolve() else latest
    # A process may be killed between naming a checkpoint and pointing at it, the one that is pointed at may have been
    # removed by hand, and not everything that copies folders copies links.
    whole = [folder for folder, _ in _checkpoints(path) if (folder / MANIFEST).is_file()] if path.is_dir() else []
    return whole[-1] if whole else None


class CheckpointDraft:
    """A checkpoint that is being written, by the rank that made it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        with storage_errors(directory, "make a checkpoint in"):
            directory.mkdir(parents=True, exist_ok=True)
            _remove_leftovers(directory)
            self.path = directory / f".saving-{secrets.token_hex(8)}"
            self.path.mkdir()
            try:
                self._lock = _locked(self.path)
            except OSError:
                self.path.rmdir()
                raise

    def publish(self, step: int, keep: int | None, name: str | None = None) -> Path:
        """Give it its name: from here on it is the latest. Then remove those beyond the newest `keep`.

        `name`: one that it was promised. Else the next of its step.
        """
        with storage_errors(self._directory, "name a checkpoint in"):
            sync_directory(self.path)
            final = self._rename(name or self.next_name(step))
            self._unlock()  # it is a checkpoint from here on
            sync_directory(self._directory)
            self._point_latest(final.name)
        if keep is not None:
            with storage_errors(self._directory, "remove an old checkpoint in"):
                _prune(self._directory, keep, final.name)
        return final

    def next_name(self, step: int) -> str:
        """A name that no checkpoint has: one of the same step may be there, from before a restart."""
        used = {numbers for _, numbers in _checkpoints(self._directory)}
        again = 1 + max((number for known, number in used if known == step), default=-1)
        return f"step-{step:08}-{again}" if again else f"step-{step:08}"

    def _rename(self, name: str) -> Path:
        final = self._directory / name
        if final.exists() or final.is_symlink():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(final))
        self.path.rename(final)
        return final

    def _point_latest(self, name: str) -> None:
        link = self._directory / f".latest-{secrets.token_hex(8)}"
        link.symlink_to(name)
        try:
            link.rename(self._directory / LATEST)
        except OSError:
            link.unlink()
            raise
        sync_directory(self._directory)

    def discard(self) -> None:
        """It is not to be: remove what is there of it."""
        if self._lock is not None:
            # What cannot be removed the next save removes. Why it is not to be is the error to tell.
            with contextlib.suppress(OSError):
                _remove(self.path)
            self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


@contextlib.contextmanager
def storage_errors(path: Path, act: str) -> Iterator[None]:
    """An error of the file system in here says what could not be done, and where."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        fix = "\n  fix:   free some space there, or save to a larger drive" if full else ""
        where = error.filename or path
        message = f"cannot {act} {path}: {error.strerror} ({where}){fix}"
        raise TransferError(error.errno, message, str(path)) from error


def sync_directory(path: Path) -> None:
    """Make the names in it durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _checkpoints(directory: Path) -> list[tuple[Path, tuple[int, int]]]:
    """With their steps, and a number among those of the same step; oldest first."""
    found = []
    for entry in directory.iterdir():
        match = _NAME.fullmatch(entry.name)
        if match is not None:
            found.append((entry, (int(match[1]), int(match[2] or 0))))
    return sorted(found, key=lambda item: item[1])


def _prune(directory: Path, keep: int, newest: str) -> None:
    # What only has such a name takes nobody's place.
    others = [path for path, _ in _checkpoints(directory) if path.name != newest and _is_checkpoint(path)]
    for path in others[: max(0, len(others) - (keep - 1))]:
        # First the name goes, at once: what is half removed must not look like a checkpoint.
        removing = directory / f".removing-{secrets.token_hex(8)}"
        path.rename(removing)
        _remove(removing)


def _remove_leftovers(directory: Path) -> None:
    for path in directory.iterdir():
        if _ASIDE.fullmatch(path.name) is None or path.is_symlink() or not path.is_dir():
            continue
        lock = _locked(path)
        if lock is not None:
            try:
                if _is_only_ours(path):
                    _remove(path)
            finally:
                os.close(lock)


def _locked(path: Path) -> int | None:
    """An open descriptor that holds the directory's lock; None when another process holds it."""
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


def _is_checkpoint(path: Path) -> bool:
    """And nothing else."""
    return not path.is_symlink() and (path / MANIFEST).is_file() and _is_only_ours(path)


def _is_only_ours(path: Path) -> bool:
    names = [entry.name for entry in path.iterdir()]
    return all(name == MANIFEST or FILE_NAME.fullmatch(name) or PARTS_NAME.fullmatch(name) for name in names)


def _remove(path: Path) -> None:
    for entry in path.iterdir():
        entry.unlink(missing_ok=True)
    path.rmdir()
