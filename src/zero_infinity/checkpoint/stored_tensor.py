"""Tensors in files, read piece by piece, checked against their checksums where there are some."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from zero_infinity.checkpoint.manifest import PIECE_BYTES
from zero_infinity.checkpoint.piece_io import OpenFile
from zero_infinity.checkpoint.tensor_file import DTYPES, num_bytes_of
from zero_infinity.errors import CheckpointError
from zero_infinity.policy.sizes import ALIGNMENT
from zero_infinity.storage.checksum import crc32

Use = Callable[[torch.Tensor, int], None]  # elements, and the number of the first one


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor whose bytes are in `file` from `start` on; `crc32` has one checksum for each piece, or is None."""

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

    def pieces(self, first: int, last: int) -> range:
        """Numbers of the pieces that have the elements from `first` to before `last`."""
        width = self.dtype.itemsize
        return range(first * width // PIECE_BYTES, -(-last * width // PIECE_BYTES)) if first < last else range(0)

    def elements(self, number: int) -> range:
        """Those of a piece."""
        width = self.dtype.itemsize
        return range(number * PIECE_BYTES // width, min((number + 1) * PIECE_BYTES, self.num_bytes) // width)

    def read_piece(self, number: int, room: memoryview, use: Use) -> None:
        """Read one piece through `room` (pages, two at least); raise when it is not what was written."""
        position = number * PIECE_BYTES
        end = min(position + PIECE_BYTES, self.num_bytes)
        width = self.dtype.itemsize
        most = max(ALIGNMENT, len(room) - 2 * ALIGNMENT) // width * width  # pages around it are read, too
        crc = 0
        while position < end:
            memory = self.file.read(self.start + position, min(most, end - position), room)
            if self.crc32 is not None:
                crc = crc32(memory, crc)
            use(torch.frombuffer(memory, dtype=self.dtype), position // width)
            position += len(memory)
        self._check(number, crc)

    def read_into(self, number: int, memory: memoryview) -> bool:
        """Read one whole piece straight into its place; False where it has to go by `read_piece`."""
        if not self.file.read_into(self.start + number * PIECE_BYTES, memory):
            return False
        self._check(number, crc32(memory) if self.crc32 is not None else 0)
        return True

    def _check(self, number: int, crc: int) -> None:
        """Raise when that is not the checksum that a piece had."""
        if self.crc32 is not None and crc != self.crc32[number]:
            begin = self.start + number * PIECE_BYTES
            end = min((number + 1) * PIECE_BYTES, self.num_bytes)
            raise CheckpointError(
                f"{self.file.path} is damaged: bytes {begin:,} to {self.start + end:,}, of {self.name!r}, have the "
                f"checksum {crc:#010x}, not {self.crc32[number]:#010x}\n"
                "  fix:   load an earlier checkpoint, or a copy of this one from another drive"
            )

    def whole(self, room: memoryview) -> torch.Tensor:
        """All of it, in memory, as the model's tensor would be."""
        flat = torch.empty(self.num_bytes // self.dtype.itemsize, dtype=self.dtype)

        def keep(elements: torch.Tensor, first: int) -> None:
            flat[first : first + len(elements)] = elements

        for number in self.pieces(0, len(flat)):
            self.read_piece(number, room, keep)
        stored = flat.view(self.shape)
        if self.order is None:
            return stored
        return stored.permute([self.order.index(dimension) for dimension in range(len(self.order))])
