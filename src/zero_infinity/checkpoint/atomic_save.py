"""Makes a save atomic: a directory with a checkpoint's name is always complete, whenever a process was killed.

Files are written to a hidden directory (`CheckpointDraft`). Files and directory are made durable, then one rename gives
the directory its final name. The link `latest` is replaced by a rename as well. Drafts of killed runs are removed by
the next save (`pruning`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from pathlib import Path

from zero_infinity.checkpoint.file_io import storage_errors, sync_directory
from zero_infinity.checkpoint.find_checkpoint import LATEST, next_name
from zero_infinity.checkpoint.pruning import lock_directory, prune, remove_flat, remove_leftovers


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
