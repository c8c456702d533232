"""Text files as one long string of bytes, and batches of windows of it.

Owns which files are taken, in which order, and which windows make up a batch. Memory is bounded: only the list of
files is kept, and a window is read from its file when it is needed. Batch `i` is a function of the seed and of `i`
alone, so a position is one integer, and training goes on from it without replaying what came before.
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

from zero_infinity.errors import ConfigError, StorageError
from zero_infinity.units import format_bytes

# Caches, installed packages and what version control keeps are not what anyone means by the text in a folder.
_SKIPPED_FOLDERS = {"__pycache__", "site-packages", "dist-packages", "node_modules"}
_SNIFFED_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Text:
    """Files, one after the other, with where each begins and the length of the whole."""

    files: tuple[Path, ...]
    starts: tuple[int, ...]
    num_bytes: int

    @classmethod
    def from_files(cls, files: Iterable[Path]) -> Self:
        """These files, in this order; empty ones are left out."""
        sizes = {file: size for file in files if (size := file.stat().st_size) > 0}
        *starts, total = accumulate(sizes.values(), initial=0)
        return cls(tuple(sizes), tuple(starts), total)

    def read(self, start: int, num_bytes: int) -> bytearray:
        """`num_bytes` from `start` on, over the ends of files."""
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
    """Endless batches of windows of a text, chosen at random by `seed`. `position` is the number of the next batch."""

    text: Text
    batch: int
    seq: int
    seed: int = 0
    position: int = 0
    # Of several ranks each takes its own slice of the batch that one alone would take, of `num_ranks * batch`.
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
        """Tokens and their targets, both (batch, seq): a target is the byte after."""
        # Python promises the same numbers for a text seed in every version.
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
    """The text in files and folders. A file that was named is taken as it is; of a folder, what looks like text."""
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            files += _text_files(path)
        elif path.is_file():
            files.append(path)
        else:
            problem = "is no file and no folder" if path.exists() else "does not exist"
            raise ConfigError(f"data: {path} {problem}\n  fix:   --data with text files or a folder of them")
    text = Text.from_files(dict.fromkeys(files))
    if not text.num_bytes:
        raise ConfigError(f"data: there is no text in {', '.join(map(str, paths))}")
    return text


def standard_library() -> Text:
    """The source of Python's own library: text that every machine with Python has."""
    folder = Path(sysconfig.get_path("stdlib"))
    return Text.from_files(file for file in _text_files(folder) if file.suffix == ".py")


def _text_files(folder: Path) -> Iterator[Path]:
    """Files without a zero byte at their beginning, in the order of their names; nothing hidden."""
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
    """Bytes of a file; an error when there are fewer than `least` (all of them where it is not given)."""
    try:
        with file.open("rb", buffering=0) as handle:
            part = os.pread(handle.fileno(), num_bytes, offset)
    except OSError as error:
        message = f"data: {file} cannot be read: {error.strerror}"
        raise StorageError(error.errno, message, str(file)) from None
    if len(part) < (num_bytes if least is None else least):
        raise ConfigError(
            f"data: {file} has become shorter: {num_bytes} bytes at {offset:,} were asked for, {len(part)} came\n"
            "  fix:   leave the files alone while they are trained on"
        )
    return part
