from __future__ import annotations

import zlib

import pytest

import zero_infinity as zi
from zero_infinity.checkpoint.file_layout import TensorKind, WrittenPart, entries_of, plan_files
from zero_infinity.checkpoint.manifest import PIECE_BYTES

KINDS = {
    ("model", "odd"): TensorKind("F32", (3,)),
    ("model", "page"): TensorKind("F32", (1024,)),
    ("model", "larger"): TensorKind("F32", (500,)),
    ("optimizer", "exp_avg/odd"): TensorKind("F32", (3,)),
}


def test_whole_pages_come_first_and_then_large_ones() -> None:
    files, places = plan_files(KINDS)
    assert list(files) == ["model-00001-of-00001.safetensors", "optimizer-00001-of-00001.safetensors"]
    ordered = sorted((place.start, name) for (section, name), place in places.items() if section == "model")
    assert [name for _, name in ordered] == ["page", "larger", "odd"]
    assert ordered[0][0] == len(files["model-00001-of-00001.safetensors"].beginning)
    assert files["model-00001-of-00001.safetensors"].num_bytes == ordered[2][0] + 12


def test_files_have_at_most_the_given_size_or_one_tensor() -> None:
    _, places = plan_files(KINDS, shard_bytes=2012)
    assert [place.file for key, place in places.items() if key[1] == "page"] == ["model-00001-of-00002.safetensors"]
    assert places["model", "larger"].file == places["model", "odd"].file == "model-00002-of-00002.safetensors"


def test_checksums_of_pieces_are_combined_from_parts() -> None:
    data = bytes(range(256)) * (PIECE_BYTES // 256) + b"the end."
    key = ("model", "a")
    _, places = plan_files({key: TensorKind("U8", (len(data),))})
    cuts = [0, 100, PIECE_BYTES, PIECE_BYTES + 3, len(data)]
    parts = [WrittenPart(key, a, b - a, zlib.crc32(data[a:b])) for a, b in zip(cuts, cuts[1:], strict=False)]
    entry = entries_of(places, parts[::-1])[key]
    assert entry.crc32 == (zlib.crc32(data[:PIECE_BYTES]), zlib.crc32(data[PIECE_BYTES:]))
    with pytest.raises(zi.CheckpointError, match="'a': byte 100 was written by no rank or by two"):
        entries_of(places, [parts[0], *parts[2:]])
    with pytest.raises(zi.CheckpointError, match="2,097,155 of 2,097,160 bytes were written"):
        entries_of(places, parts[:3])
