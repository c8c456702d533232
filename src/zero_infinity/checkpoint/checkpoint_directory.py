"""A directory of checkpoints: names, the latest one, atomic publication, and removal of old ones.

A directory with a checkpoint's name is always complete, whenever a process was killed: files are written to a hidden
directory (`CheckpointDraft`) and made durable, then one rename gives it its final name. The link `latest` is replaced
by a rename as well.

The only code that deletes checkpoints (`keep=`, and drafts that killed runs have left behind). A directory is removed
only if it has the name of a checkpoint or a draft, and contains a checkpoint's files alone. A draft whose writer still
runs is recognized by the lock that the writer holds.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
from pathlib import Path

from zero_infinity.checkpoint.file_io import storage_errors, sync_directory
from zero_infinity.checkpoint.manifest import FILE_NAME, MANIFEST
from zero_infinity.errors import CheckpointError

LATEST = "latest"
_NAME = re.compile(r"step-(\d{8,})(?:-(\d+))?")
_DRAFT = re.compile(r"\.(saving|removing)-[0-9a-f]{16}")
_PARTS_NAME = re.compile(r"parts-\d{5,9}\.json")  # written by ranks for rank 0 during a save


# ---------------------------------------------------------------------- finding


def find(path: Path) -> Path:
    """The checkpoint at `path`: `path` itself, or the latest one in it."""
    with storage_errors(path, "look for a checkpoint in"):
        found = _found(path)
        if found is not None:
            return found
        if not path.is_dir():
            reason = "it is a file" if path.exists() else "it does not exist"
            raise CheckpointError(
                f"{path} is not a checkpoint: {reason}\n"
                "  fix:   pass the directory that was given to zi.save, or one of the checkpoints in it"
            )
        of_torch = "; it is one of torch.distributed.checkpoint" if (path / ".metadata").is_file() else ""
        raise CheckpointError(
            f"{path} has no checkpoint: neither {MANIFEST} nor {LATEST}/{MANIFEST} is there{of_torch}\n"
            "  fix:   pass the directory that was given to zi.save, or one of the checkpoints in it"
        )


def has_checkpoint(path: Path) -> bool:
    """True if `find` would find one."""
    with storage_errors(path, "look for a checkpoint in"):
        return _found(path) is not None


def _found(path: Path) -> Path | None:
    if (path / MANIFEST).is_file():
        return path
    latest = path / LATEST
    if (latest / MANIFEST).is_file():
        folder = latest.resolve()
        return path / folder.name if folder.parent == path.resolve() else latest
    # The link may be missing or stale: the process was killed between renaming the checkpoint and updating the link,
    # the checkpoint was removed by hand, or the directory was copied by a tool that skips links.
    complete = [folder for folder, _ in checkpoints_in(path) if (folder / MANIFEST).is_file()] if path.is_dir() else []
    return complete[-1] if complete else None


def checkpoints_in(directory: Path) -> list[tuple[Path, tuple[int, int]]]:
    """Entries that have a checkpoint's name, each with its step and its number within the step; oldest first."""
    found = []
    for entry in directory.iterdir():
        match = _NAME.fullmatch(entry.name)
        if match is not None:
            found.append((entry, (int(match[1]), int(match[2] or 0))))
    return sorted(found, key=lambda item: item[1])


def next_name(directory: Path, step: int) -> str:
    """An unused name. There may already be a checkpoint of the same step, from before a restart."""
    used = {numbers for _, numbers in checkpoints_in(directory)}
    again = 1 + max((number for known, number in used if known == step), default=-1)
    return f"step-{step:08}-{again}" if again else f"step-{step:08}"


# ---------------------------------------------------------------------- writing


class CheckpointDraft:
    """A checkpoint that is being written, by the rank that made it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        with storage_errors(directory, "make a checkpoint in"):
            directory.mkdir(parents=True, exist_ok=True)
            remove_leftovers(directory)
            self.path = directory / f".saving-{secrets.token_hex(8)}"
            self.path.mkdir()
            try:
                self._lock = lock_directory(self.path)
            except OSError:
                self.path.rmdir()
                raise

    def next_name(self, step: int) -> str:
        """The name under which a checkpoint of `step` would be published now."""
        return next_name(self._directory, step)

    def publish(self, step: int, keep: int | None, name: str | None = None) -> Path:
        """Rename it to `name` (default: the next unused name of `step`), make it the latest and prune older ones."""
        with storage_errors(self._directory, "name a checkpoint in"):
            sync_directory(self.path)
            final = self._rename(name or self.next_name(step))
            self._unlock()  # it is a checkpoint from here on
            sync_directory(self._directory)
            self._point_latest(final.name)
        if keep is not None:
            with storage_errors(self._directory, "remove an old checkpoint in"):
                prune(self._directory, keep, final.name)
        return final

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
        """Remove the draft, unless it was published."""
        if self._lock is not None:
            # The next save removes what cannot be removed now. The error that led here is the one to report.
            with contextlib.suppress(OSError):
                remove_flat(self.path)
            self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


# ---------------------------------------------------------------------- removing


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
