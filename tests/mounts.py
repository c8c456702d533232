"""Real small file systems for tests: mounted for one test, or the test is skipped with the reason."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def mounted(directory: Path, *arguments: str) -> Iterator[Path]:
    """`mount ARGUMENTS directory`, and unmounted again."""
    directory.mkdir(exist_ok=True)
    done = subprocess.run(["mount", *arguments, str(directory)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"mount {' '.join(arguments)} is not possible here: {done.stderr.strip()}")
    try:
        yield directory
    finally:
        # Lazily: a test that failed may have left a file open, and its own error is the one to show.
        subprocess.run(["umount", "-l", str(directory)], check=True)


@contextlib.contextmanager
def image(directory: Path, kind: str, num_bytes: int) -> Iterator[Path]:
    """A loop-mounted ext2 (which has no fallocate) or ext4 of `num_bytes`."""
    if shutil.which(f"mkfs.{kind}") is None:
        pytest.skip(f"mkfs.{kind} is not installed")
    file = directory / f"{kind}.image"
    with file.open("wb") as handle:
        handle.truncate(num_bytes)
    subprocess.run([f"mkfs.{kind}", "-q", "-m", "0", str(file)], check=True)
    with mounted(directory / kind, "-o", "loop", "-t", kind, str(file)) as path:
        yield path
