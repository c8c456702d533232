from __future__ import annotations

import zlib
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from support.prepared import Prepared

import zero_infinity as zi
from zero_infinity.checkpoint import manifest
from zero_infinity.checkpoint.file_io import OpenFile
from zero_infinity.checkpoint.verify import OpenCheckpoint, StoredTensor


def room() -> memoryview:
    return memoryview(bytearray(1 << 15))


def test_a_tensor_is_read_in_pieces_with_the_shape_of_the_model(tmp_path: Path) -> None:
    values = torch.arange(12, dtype=torch.float32)
    data = b"8 bytes." + values.numpy().tobytes()
    (tmp_path / "file").write_bytes(data)
    crc = zlib.crc32(data[8:])
    with OpenFile(tmp_path / "file") as file:
        stored = StoredTensor("a", file, 8, "F32", (4, 3), (crc,), (1, 0))
        assert stored.true_shape == (3, 4)
        assert torch.equal(stored.whole(room()), values.view(4, 3).t())
        wrong = StoredTensor("a", file, 8, "F32", (4, 3), (crc ^ 1,))
        with pytest.raises(zi.CheckpointError, match=f"bytes 8 to 56, of 'a', have the checksum {crc:#010x}, not"):
            wrong.whole(room())
        assert torch.equal(StoredTensor("a", file, 8, "F32", (12,)).whole(room()), values)  # without a checksum


def test_pieces_and_their_elements(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("zero_infinity.checkpoint.verify.PIECE_BYTES", 16)
    (tmp_path / "file").write_bytes(b"")
    with OpenFile(tmp_path / "file") as file:
        stored = StoredTensor("a", file, 0, "F32", (10,))
        assert [list(stored.elements(number)) for number in stored.pieces(3, 9)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
        assert list(stored.pieces(4, 4)) == []


def test_headers_and_rank_files_are_compared_with_the_manifest(prepared: Prepared, tmp_path: Path) -> None:
    model, optimizer, _ = prepared
    folder = zi.save(tmp_path, model, optimizer)
    with ExitStack() as stack:
        opened = OpenCheckpoint(folder, stack)
        assert opened.saved_name("2.weight") == "0.weight"
        assert opened.names_of("0.weight") == ["0.weight", "2.weight"]
        assert opened.read_rank_file("rank-00000.json") == (folder / "rank-00000.json").read_bytes()
        with pytest.raises(zi.CheckpointError, match="its manifest has no rank-00001.json"):
            opened.read_rank_file("rank-00001.json")
        (folder / "rank-00000.json").write_bytes(b"{}")
        with pytest.raises(zi.CheckpointError, match="it has 2 bytes with the checksum"):
            opened.read_rank_file("rank-00000.json")
    file = folder / "model-00001-of-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[data.index(b" ")] = ord("\n")  # still JSON, and the same
    file.write_bytes(data)
    size = manifest.read(folder).files[file.name].num_bytes
    with ExitStack() as stack, pytest.raises(zi.CheckpointError, match=f"damaged: it has {size:,} bytes and a header"):
        OpenCheckpoint(folder, stack)
