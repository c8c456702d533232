"""Tensors of an open checkpoint: every byte that is read is verified against its checksum here.

A tensor is read piece by piece, each piece has a CRC-32 in the manifest. Headers and rank files have one each. Tensors
of other safetensors files (pretrained weights) have none and are read unverified.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from zero_infinity.checkpoint import manifest as manifests
from zero_infinity.checkpoint.file_io import OpenFile
from zero_infinity.checkpoint.manifest import MODEL, PIECE_BYTES, FileEntry
from zero_infinity.checkpoint.rank_parts import Key
from zero_infinity.checkpoint.safetensors_header import DTYPES, num_bytes_of, read_header
from zero_infinity.checkpoint.strict_json import read_bytes
from zero_infinity.errors import CheckpointError
from zero_infinity.policy.alignment import ALIGNMENT
from zero_infinity.storage.crc32 import crc32

_MAX_RANK_FILE_BYTES = 1 << 30

UseElements = Callable[[torch.Tensor, int], None]  # elements, and the index of the first one


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor whose bytes are in `file` from `start` on. `crc32`: one checksum per piece, or None."""

    name: str
    file: OpenFile
    start: int
    dtype_name: str
    shape: tuple[int, ...]
    crc32: tuple[int, ...] | None = None
    order: tuple[int, ...] | None = None

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.dtype_name]

    @property
    def num_bytes(self) -> int:
        return num_bytes_of(self.dtype_name, self.shape)

    @property
    def true_shape(self) -> tuple[int, ...]:
        """The shape of the model's tensor."""
        if self.order is None:
            return self.shape
        sizes = dict(zip(self.order, self.shape, strict=True))
        return tuple(sizes[dimension] for dimension in range(len(sizes)))

    def on_meta(self) -> torch.Tensor:
        """A tensor of the same shape and dtype without memory."""
        return torch.empty(self.true_shape, dtype=self.dtype, device="meta")

    def pieces(self, first: int, last: int) -> range:
        """Numbers of the pieces that have elements `first` to `last` (exclusive)."""
        width = self.dtype.itemsize
        return range(first * width // PIECE_BYTES, -(-last * width // PIECE_BYTES)) if first < last else range(0)

    def elements(self, number: int) -> range:
        """Indices of a piece's elements."""
        width = self.dtype.itemsize
        return range(number * PIECE_BYTES // width, min((number + 1) * PIECE_BYTES, self.num_bytes) // width)

    def read_piece(self, number: int, room: memoryview, use: UseElements) -> None:
        """Read one piece through `room` (at least two pages); raise if it is not what was written."""
        position = number * PIECE_BYTES
        end = min(position + PIECE_BYTES, self.num_bytes)
        width = self.dtype.itemsize
        most = max(ALIGNMENT, len(room) - 2 * ALIGNMENT) // width * width  # reads are widened to whole pages
        crc = 0
        while position < end:
            memory = self.file.read(self.start + position, min(most, end - position), room)
            if self.crc32 is not None:
                crc = crc32(memory, crc)
            use(torch.frombuffer(memory, dtype=self.dtype), position // width)
            position += len(memory)
        self._check(number, crc)

    def read_into(self, number: int, memory: memoryview) -> bool:
        """Read one whole piece straight into `memory`; False if it has to be read by `read_piece`."""
        if not self.file.read_into(self.start + number * PIECE_BYTES, memory):
            return False
        self._check(number, crc32(memory) if self.crc32 is not None else 0)
        return True

    def _check(self, number: int, crc: int) -> None:
        """Raise if `crc` is not the checksum of the piece in the manifest."""
        if self.crc32 is not None and crc != self.crc32[number]:
            begin = self.start + number * PIECE_BYTES
            end = min((number + 1) * PIECE_BYTES, self.num_bytes)
            raise CheckpointError(
                f"{self.file.path} is damaged: bytes {begin:,} to {self.start + end:,}, of {self.name!r}, have the "
                f"checksum {crc:#010x}, not {self.crc32[number]:#010x}\n"
                "  fix:   load an earlier checkpoint, or a copy of this one from another drive"
            )

    def read_whole(self, room: memoryview, use: UseElements) -> None:
        """Read the whole tensor, in the model's order of dimensions."""
        use(self.whole(room), 0)

    def whole(self, room: memoryview) -> torch.Tensor:
        """The whole tensor in memory, with the model's shape."""
        flat = torch.empty(self.num_bytes // self.dtype.itemsize, dtype=self.dtype)

        def keep(elements: torch.Tensor, first: int) -> None:
            flat[first : first + len(elements)] = elements

        for number in self.pieces(0, len(flat)):
            self.read_piece(number, room, keep)
        stored = flat.view(self.shape)
        if self.order is None:
            return stored
        return stored.permute([self.order.index(dimension) for dimension in range(len(self.order))])


class OpenCheckpoint:
    """A checkpoint whose manifest and headers were read and agree. Files stay open until `stack` is closed."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self.manifest = manifests.read(folder)
        self.tensors: dict[Key, StoredTensor] = {}
        for name, file in self.manifest.files.items():
            if name.endswith(".safetensors"):
                self._open(name, file, stack)
        for section, tensors in self.manifest.tensors.items():
            for name, tensor in tensors.items():
                if (section, name) not in self.tensors:
                    raise CheckpointError(f"{folder / tensor.file} has no tensor {name!r}, which is in the manifest")

    def _open(self, name: str, file: FileEntry, stack: ExitStack) -> None:
        path = self.folder / name
        beginning, entries = read_header(path)
        if crc32(beginning) != file.crc32 or path.stat().st_size != file.num_bytes:
            raise CheckpointError(
                f"{path} is damaged: it has {path.stat().st_size:,} bytes and a header with the checksum "
                f"{crc32(beginning):#010x}, the manifest has {file.num_bytes:,} and {file.crc32:#010x}"
            )
        section = name.partition("-")[0]
        opened = stack.enter_context(OpenFile(path))
        for tensor, place in entries.items():
            known = self.manifest.tensors[section].get(tensor)
            if known is None or (known.file, known.dtype, known.shape) != (name, place.dtype, place.shape):
                raise CheckpointError(f"{path} is damaged: its tensor {tensor!r} differs from the manifest")
            self.tensors[section, tensor] = StoredTensor(
                tensor, opened, place.start, known.dtype, known.shape, known.crc32, known.order
            )

    def read_rank_file(self, name: str) -> bytes:
        """The content of a rank's file."""
        path, entry = self.folder / name, self.manifest.files.get(name)
        if entry is None:
            raise CheckpointError(f"{self.folder} is damaged: its manifest has no {name}")
        data = read_bytes(path, _MAX_RANK_FILE_BYTES)
        if len(data) != entry.num_bytes or crc32(data) != entry.crc32:
            raise CheckpointError(
                f"{path} is damaged: it has {len(data):,} bytes with the checksum {crc32(data):#010x}, the manifest "
                f"has {entry.num_bytes:,} with {entry.crc32:#010x}"
            )
        return data

    def saved_name(self, name: str) -> str | None:
        """The first name of what was saved under `name`; None when nothing was."""
        first = self.manifest.tied.get(name, name)
        return first if (MODEL, first) in self.tensors else None

    def names_of(self, saved: str) -> list[str]:
        """Every name of what was first saved under `saved`."""
        return [saved, *(name for name, first in self.manifest.tied.items() if first == saved)]
