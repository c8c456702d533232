"""Finds checkpoints in a directory by their names, and the latest one among them. Changes nothing."""

from __future__ import annotations

import re
from pathlib import Path

from zero_infinity.checkpoint.file_io import storage_errors
from zero_infinity.checkpoint.manifest import MANIFEST
from zero_infinity.errors import CheckpointError

LATEST = "latest"
_NAME = re.compile(r"step-(\d{8,})(?:-(\d+))?")


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
