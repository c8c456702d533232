"""Headers of safetensors files: where each tensor's bytes are. Reads and writes headers, no tensors.

A file is 8 bytes (length of the header, little endian), the header (JSON: name -> dtype, shape, start and end offset)
and the tensors' bytes without gaps. The safetensors package can only write whole tensors from memory. Here several
processes write pieces of tensors into files whose header was written first. The package reads these files.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from zero_infinity.byte_sizes import format_bytes
from zero_infinity.checkpoint.regular_files import open_regular
from zero_infinity.checkpoint.strict_json import JsonFields, parse
from zero_infinity.errors import CheckpointError, StorageError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

_MAX_HEADER = 100_000_000  # bytes, as in the safetensors package
_PAGE = 4096
_METADATA = "__metadata__"


@dataclass(frozen=True, slots=True)
class HeaderEntry:
    """One tensor: bytes `start` to `stop` of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def num_bytes_of(dtype: str, shape: Sequence[int]) -> int:
    return math.prod(shape) * DTYPES[dtype].itemsize


def compose(tensors: Mapping[str, tuple[str, Sequence[int]]]) -> tuple[bytes, dict[str, HeaderEntry]]:
    """The header of a file with these tensors (dtype and shape) in this order, and where each will be."""
    header: dict[str, object] = {_METADATA: {"format": "pt"}}
    position, places = 0, {}
    for name, (dtype, shape) in tensors.items():
        end = position + num_bytes_of(dtype, shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        places[name] = (dtype, tuple(shape), position, end)
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    # Padding, so that tensors start at a page.
    text += b" " * (-(len(text) + 8) % _PAGE)
    begin = len(text) + 8
    entries = {n: HeaderEntry(dtype, shape, begin + a, begin + b) for n, (dtype, shape, a, b) in places.items()}
    return len(text).to_bytes(8, "little") + text, entries


def read_header(path: Path) -> tuple[bytes, dict[str, HeaderEntry]]:
    """A file's header as bytes, and its tensors; all numbers are checked against each other and the file's size."""
    try:
        with open(path, "rb", opener=open_regular) as file:
            size = os.fstat(file.fileno()).st_size
            first = file.read(8)
            length = int.from_bytes(first, "little")
            if len(first) < 8 or length > min(_MAX_HEADER, size - 8):
                raise CheckpointError(
                    f"{path} is damaged: its header would take {length:,} bytes, but the file has {size:,}"
                )
            text = file.read(length)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except OSError as error:
        raise StorageError(error.errno, f"{path} cannot be read: {error.strerror}", str(path)) from None
    values = parse(text, path)
    values.pop(_METADATA, None)
    entries = {name: _entry(name, value, path, 8 + length) for name, value in values.items()}
    _check_places(entries, path, 8 + length, size)
    return first + text, entries


def _entry(name: str, value: object, path: Path, begin: int) -> HeaderEntry:
    fields = JsonFields(value, f"{path}: tensor {name[:200]!r}")
    dtype, shape, offsets = fields.text("dtype"), fields.counts("shape"), fields.counts("data_offsets")
    if dtype not in DTYPES:
        raise CheckpointError(f"{fields.where} has dtype {dtype[:40]!r}; supported are {', '.join(DTYPES)}")
    if len(offsets) != 2 or len(shape) > 64 or offsets[1] - offsets[0] != num_bytes_of(dtype, shape):
        raise CheckpointError(f"{fields.where} is damaged: {dtype} {list(shape)} does not fit bytes {list(offsets)}")
    return HeaderEntry(dtype, shape, begin + offsets[0], begin + offsets[1])


def _check_places(entries: Mapping[str, HeaderEntry], path: Path, begin: int, size: int) -> None:
    position = begin
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != position:
            raise CheckpointError(
                f"{path} is damaged: tensor {name[:200]!r} starts at byte {entry.start:,}, but the one before ends at "
                f"{position:,}"
            )
        position = entry.stop
    if position != size:
        raise CheckpointError(
            f"{path} is {'shorter' if size < position else 'longer'} than its header says: {size:,} bytes "
            f"({format_bytes(size)}), not {position:,}"
        )
