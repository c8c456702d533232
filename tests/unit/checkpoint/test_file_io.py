from __future__ import annotations

import errno
import mmap
from pathlib import Path

import pytest

import zero_infinity as zi
from zero_infinity.checkpoint.file_io import OpenFile, congruent, create, storage_errors, sync_directory, write_whole
from zero_infinity.policy.alignment import ALIGNMENT
from zero_infinity.storage.pages import address_of

SIZE = 1 << 19  # large enough for direct I/O


def aligned(num_bytes: int) -> memoryview:
    return memoryview(mmap.mmap(-1, num_bytes))


@pytest.mark.parametrize("start", [0, 8, ALIGNMENT, ALIGNMENT + 8, 3])
def test_what_is_written_is_read(start: int, tmp_path: Path) -> None:
    path = tmp_path / "file"
    create(path, b"begin", start + SIZE)
    assert path.stat().st_size == start + SIZE
    data = bytes(range(256)) * (SIZE // 256)
    room = aligned(SIZE + 2 * ALIGNMENT)
    with OpenFile(path, writable=True) as file:
        file.write(start, congruent(memoryview(data), start, room))
        file.sync()
        assert bytes(file.read(start, SIZE, aligned(SIZE + 2 * ALIGNMENT))) == data
        assert bytes(file.read(start + 8, 100, room)) == data[8:108]
        into = aligned(SIZE)
        if file.read_into(start, into):
            assert not start % ALIGNMENT
            assert bytes(into) == data
    assert path.read_bytes()[start:] == data


def test_congruent_memory_has_the_offset_of_the_file() -> None:
    room = aligned(SIZE + 2 * ALIGNMENT)
    assert address_of(congruent(memoryview(bytes(SIZE)), 24, room)) % ALIGNMENT == 24
    small = memoryview(bytes(10))
    assert congruent(small, 24, room) is small


def test_a_file_that_ends_too_early_is_named(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_whole(path, b"12345")
    with OpenFile(path) as file, pytest.raises(zi.CheckpointError, match="file ends at byte 5, 3 bytes before"):
        file.read(0, 8, aligned(4 * ALIGNMENT))


def test_files_are_not_overwritten(tmp_path: Path) -> None:
    write_whole(tmp_path / "file", b"1")
    with pytest.raises(zi.TransferError, match="cannot write .*file: File exists"):
        write_whole(tmp_path / "file", b"2")
    sync_directory(tmp_path)


def test_errors_say_what_could_not_be_done() -> None:
    problem = "cannot move /a: No space left on device .*\n  fix:   free"
    with pytest.raises(zi.TransferError, match=problem) as caught, storage_errors(Path("/a"), "move"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert caught.value.errno == errno.ENOSPC
