"""Which tensor goes where in which file: from names, shapes and dtypes alone, the same on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zero_infinity.checkpoint.manifest import PIECE_BYTES, FileEntry, TensorEntry, num_pieces
from zero_infinity.checkpoint.rank_parts import Key
from zero_infinity.checkpoint.safetensors_header import compose, num_bytes_of
from zero_infinity.errors import CheckpointError
from zero_infinity.policy.alignment import ALIGNMENT
from zero_infinity.storage.crc32 import combine_all, crc32

# As Hugging Face shards models: small enough to copy and to resume a download, large enough to be few.
SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True, slots=True)
class TensorKind:
    """Dtype, shape and dimension order of a tensor in a file."""

    dtype: str
    shape: tuple[int, ...]
    order: tuple[int, ...] | None = None

    @property
    def num_bytes(self) -> int:
        return num_bytes_of(self.dtype, self.shape)


@dataclass(frozen=True, slots=True)
class FilePlace:
    """Where in which file a tensor's bytes start."""

    file: str
    start: int
    kind: TensorKind


@dataclass(frozen=True, slots=True)
class WrittenPart:
    """Bytes of a tensor that a rank has written, starting at `start`."""

    key: Key
    start: int
    num_bytes: int
    crc32: int


@dataclass(frozen=True, slots=True)
class FilePlan:
    """A safetensors file: its header and its final size."""

    beginning: bytes
    num_bytes: int

    @property
    def entry(self) -> FileEntry:
        return FileEntry(self.num_bytes, crc32(self.beginning))


def plan_files(
    kinds: Mapping[Key, TensorKind], shard_bytes: int = SHARD_BYTES
) -> tuple[dict[str, FilePlan], dict[Key, FilePlace]]:
    """Assign tensors to files of at most `shard_bytes` (or one tensor)."""
    files: dict[str, FilePlan] = {}
    places: dict[Key, FilePlace] = {}
    for section in dict.fromkeys(section for section, _ in kinds):
        shards = _shards({name: kind for (own, name), kind in kinds.items() if own == section}, shard_bytes)
        for number, shard in enumerate(shards):
            file = f"{section}-{number + 1:05}-of-{len(shards):05}.safetensors"
            beginning, entries = compose({name: (kind.dtype, kind.shape) for name, kind in shard.items()})
            end = max((entry.stop for entry in entries.values()), default=len(beginning))
            files[file] = FilePlan(beginning, end)
            places.update({(section, n): FilePlace(file, entry.start, shard[n]) for n, entry in entries.items()})
    return files, places


def _shards(kinds: Mapping[str, TensorKind], shard_bytes: int) -> list[dict[str, TensorKind]]:
    shards: list[dict[str, TensorKind]] = [{}]
    size = 0
    # Tensors of whole pages come first, so that as many as possible are page-aligned, for direct I/O.
    for name, kind in sorted(kinds.items(), key=lambda item: _rank(item[1])):
        if shards[-1] and size + kind.num_bytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = kind
        size += kind.num_bytes
    return shards


def _rank(kind: TensorKind) -> tuple[bool, int]:
    """Sort key: whole pages in their given order, then the others, large ones first."""
    is_broken = kind.num_bytes % ALIGNMENT != 0
    return is_broken, -kind.num_bytes if is_broken else 0


def entries_of(places: Mapping[Key, FilePlace], written: Sequence[WrittenPart]) -> dict[Key, TensorEntry]:
    """Manifest entries, with checksums per piece combined from what all ranks have written."""
    by_key: dict[Key, list[WrittenPart]] = {key: [] for key in places}
    for part in written:
        by_key[part.key].append(part)
    entries = {}
    for key, place in places.items():
        kind = place.kind
        checksums = _piece_checksums(key, kind.num_bytes, sorted(by_key[key], key=lambda part: part.start))
        entries[key] = TensorEntry(place.file, kind.dtype, kind.shape, checksums, kind.order)
    return entries


def _piece_checksums(key: Key, num_bytes: int, parts: Sequence[WrittenPart]) -> tuple[int, ...]:
    pieces: list[list[tuple[int, int]]] = [[] for _ in range(num_pieces(num_bytes))]
    position = 0
    for part in parts:
        if part.start != position:
            raise CheckpointError(f"{key[1]!r}: byte {position:,} was written by no rank or by two")
        pieces[position // PIECE_BYTES].append((part.crc32, part.num_bytes))
        position += part.num_bytes
    if position != num_bytes:
        raise CheckpointError(f"{key[1]!r}: {position:,} of {num_bytes:,} bytes were written")
    return tuple(combine_all(piece) for piece in pieces)
