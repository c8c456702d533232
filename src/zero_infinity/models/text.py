"""Training text: files as one byte string, and seeded random batches of windows of it.

Owns which files are used, their order, and which windows make up a batch. Memory is bounded: only the list of files is
kept, and a window is read from its file when needed. Batch `i` depends only on the seed and `i`, so a position is one
integer, and training resumes from it without replaying earlier batches.
"""

from __future__ import annotations

import os
import random
import sysconfig
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from zero_infinity.byte_sizes import format_bytes
from zero_infinity.errors import ConfigError, StorageError

# Caches, installed packages and version control data are not training text.
_SKIPPED_FOLDERS = {"__pycache__", "site-packages", "dist-packages", "node_modules"}
_SNIFFED_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Text:
    """Concatenated files, with the start of each and the total length."""

    files: tuple[Path, ...]
    starts: tuple[int, ...]
    num_bytes: int

    @classmethod
    def from_files(cls, files: Iterable[Path]) -> Self:
        """Use these files, in this order; empty ones are skipped."""
        sizes = {file: size for file in files if (size := file.stat().st_size) > 0}
        *starts, total = accumulate(sizes.values(), initial=0)
        return cls(tuple(sizes), tuple(starts), total)

    def read(self, start: int, num_bytes: int) -> bytearray:
        """Return `num_bytes` starting at `start`, across file boundaries."""
        result = bytearray()
        index = bisect_right(self.starts, start) - 1
        while len(result) < num_bytes:
            offset = start + len(result) - self.starts[index]
            file_end = self.starts[index + 1] if index + 1 < len(self.starts) else self.num_bytes
            wanted = min(num_bytes - len(result), file_end - self.starts[index] - offset)
            result += _read_part(self.files[index], offset, wanted)
            index += 1
        return result


@dataclass(slots=True)
class ByteBatches:
    """Endless batches of random windows of a text, chosen by `seed`. `position` is the number of the next batch."""

    text: Text
    batch: int
    seq: int
    seed: int = 0
    position: int = 0
    # Each rank takes its own slice of the batch of `num_ranks * batch` that a single rank would take.
    rank: int = 0
    num_ranks: int = 1

    def __post_init__(self) -> None:
        if self.text.num_bytes < self.seq + 1:
            raise ConfigError(
                f"the data is {format_bytes(self.text.num_bytes)} of text, but a sequence takes {self.seq + 1} bytes\n"
                f"  fix:   --data with more text, or --seq {max(self.text.num_bytes - 1, 1)}"
            )

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        """Return tokens and their targets, both (batch, seq): a target is the next byte."""
        # Python guarantees the same numbers for a string seed in every version.
        choice = random.Random(f"{self.seed}/{self.position}")
        last = self.text.num_bytes - self.seq - 1
        windows = bytearray()
        starts = [choice.randint(0, last) for _ in range(self.num_ranks * self.batch)]
        for start in starts[self.rank * self.batch : (self.rank + 1) * self.batch]:
            windows += self.text.read(start, self.seq + 1)
        tokens = torch.frombuffer(windows, dtype=torch.uint8).view(self.batch, self.seq + 1).long()
        self.position += 1
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def collect(paths: Sequence[Path]) -> Text:
    """Return the text in files and folders. A named file is always used; of a folder, only text files."""
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            files += _text_files(path)
        elif path.is_file():
            files.append(path)
        else:
            problem = "is neither a file nor a folder" if path.exists() else "does not exist"
            raise ConfigError(f"data: {path} {problem}\n  fix:   pass text files or a folder of them to --data")
    text = Text.from_files(dict.fromkeys(files))
    if not text.num_bytes:
        raise ConfigError(f"data: there is no text in {', '.join(map(str, paths))}")
    return text


def standard_library() -> Text:
    """Return the source of Python's standard library: text that every machine with Python has."""
    folder = Path(sysconfig.get_path("stdlib"))
    return Text.from_files(file for file in _text_files(folder) if file.suffix == ".py")


def _text_files(folder: Path) -> Iterator[Path]:
    """Yield files without a zero byte at their start, in name order; no hidden files."""
    for directory, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in _SKIPPED_FOLDERS and not name.startswith("."))
        for name in sorted(names):
            file = Path(directory, name)
            if (
                not name.startswith(".")
                and file.is_file()
                and b"\0" not in _read_part(file, 0, _SNIFFED_BYTES, least=0)
            ):
                yield file


def _read_part(file: Path, offset: int, num_bytes: int, least: int | None = None) -> bytes:
    """Return bytes of a file; an error if there are fewer than `least` (by default, all of them)."""
    try:
        with file.open("rb", buffering=0) as handle:
            part = os.pread(handle.fileno(), num_bytes, offset)
    except OSError as error:
        message = f"data: {file} cannot be read: {error.strerror}"
        raise StorageError(error.errno, message, str(file)) from None
    if len(part) < (num_bytes if least is None else least):
        raise ConfigError(
            f"data: {file} has become shorter: {num_bytes} bytes at {offset:,} were requested, {len(part)} were read\n"
            "  fix:   do not change the files during training"
        )
    return part
