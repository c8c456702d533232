"""Swap files: unnamed, reserved, direct where possible; and the errors for a directory that cannot hold one."""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
import warnings
from pathlib import Path

import pytest
from mounts import image, mounted
from support.swap import round_trip

from zero_infinity.errors import SwapSpaceError
from zero_infinity.policy.alignment import ALIGNMENT
from zero_infinity.storage.striped_files import FileDevice

MIB = 1 << 20


def test_the_file_has_no_name_is_private_and_its_space_is_taken(tmp_path: Path) -> None:
    device = FileDevice(tmp_path)
    device.extend(MIB)
    status = os.fstat(device.descriptors[0])
    assert os.listdir(tmp_path) == []
    assert (status.st_nlink, status.st_mode & 0o777, status.st_size) == (0, 0o600, MIB)
    assert status.st_blocks * 512 >= MIB
    assert not os.get_inheritable(device.descriptors[0])
    assert round_trip(device, 8192, 65536)
    device.close()
    device.close()


def test_direct_io_is_on_where_the_file_system_has_it(tmp_path: Path) -> None:
    with image(tmp_path, "ext4", 16 * MIB) as path:
        device = FileDevice(str(path))
        assert device.direct
        assert device.alignment == ALIGNMENT
        assert fcntl.fcntl(device.descriptors[0], fcntl.F_GETFL) & os.O_DIRECT
        device.extend(MIB)
        assert round_trip(device, 0, MIB)
        device.close()


def test_without_o_tmpfile_a_private_directory_is_made_and_removed_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really_open, really_mkdtemp = os.open, tempfile.mkdtemp
    made: list[tuple[str, int]] = []

    def open_without(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), path)
        return really_open(path, flags, mode)

    def mkdtemp(**arguments: str) -> str:
        path = really_mkdtemp(**arguments)
        made.append((path, os.stat(path).st_mode & 0o777))
        return path

    monkeypatch.setattr(os, "open", open_without)
    monkeypatch.setattr(tempfile, "mkdtemp", mkdtemp)
    (tmp_path / "swap").write_text("someone else's")
    device = FileDevice(tmp_path)
    device.extend(MIB)
    assert os.listdir(tmp_path) == ["swap"]
    assert [(os.path.dirname(path), mode) for path, mode in made] == [(str(tmp_path), 0o700)]
    assert os.fstat(device.descriptors[0]).st_nlink == 0
    assert round_trip(device, 0, 8192)
    device.close()
    assert (tmp_path / "swap").read_text() == "someone else's"


def test_a_file_system_without_direct_io_is_used_through_the_page_cache_and_says_so_once(tmp_path: Path) -> None:
    with mounted(tmp_path / "ram", "-t", "ramfs", "ramfs") as path, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        device = FileDevice(path)
        assert not device.direct
        assert device.alignment == 1
        for _ in range(3):
            device.extend(MIB)
        assert device.write(memoryview(b"abc"), 5) == 3
        assert round_trip(device, MIB + 77, 100_001)
        device.close()
    texts = [str(warning.message) for warning in caught]
    assert len([text for text in texts if "no direct I/O" in text and str(path) in text]) == 1
    assert len([text for text in texts if "cannot reserve" in text]) == 1  # ramfs has no fallocate either
    assert {warning.category for warning in caught} == {RuntimeWarning}
    assert {warning.filename for warning in caught} <= {__file__, FileDevice.__init__.__code__.co_filename}


def test_direct_io_that_fails_only_at_the_first_transfer_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really_write = os.pwritev

    def pwritev(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return really_write(descriptor, buffers, offset)

    monkeypatch.setattr(os, "pwritev", pwritev)
    with pytest.warns(RuntimeWarning, match="no direct I/O"):
        device = FileDevice(tmp_path)
    assert not device.direct
    device.extend(MIB)
    assert round_trip(device, 100, 5000)
    device.close()


def test_without_fallocate_the_free_space_is_checked_and_the_doubt_is_said(tmp_path: Path) -> None:
    """ext2: os.posix_fallocate fails there with EINVAL on a direct descriptor, so it must not be used."""
    with image(tmp_path, "ext2", 16 * MIB) as path:
        device = FileDevice(path)
        with pytest.warns(RuntimeWarning, match="cannot reserve space"):
            device.extend(4 * MIB)
        assert device.direct
        assert round_trip(device, MIB, 2 * MIB)
        with pytest.raises(SwapSpaceError, match=r"64\.0 MiB of swap space is needed"):
            device.extend(64 * MIB)
        assert device.capacity == os.fstat(device.descriptors[0]).st_size == 4 * MIB
        device.close()


def test_a_missing_directory(tmp_path: Path) -> None:
    path = tmp_path / "missing"
    with pytest.raises(SwapSpaceError, match=f"nvme='{path}' does not exist\n  fix:   mkdir -p") as caught:
        FileDevice(path)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOENT, str(path))


def test_a_file_instead_of_a_directory(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("mine")
    with pytest.raises(SwapSpaceError, match=f"nvme='{path}' is a file\n  fix:   give a directory"):
        FileDevice(path)
    with pytest.raises(SwapSpaceError, match="leads through a file"):
        FileDevice(path / "deeper")
    assert path.read_text() == "mine"


def test_a_read_only_file_system(tmp_path: Path) -> None:
    with (
        mounted(tmp_path / "ro", "-t", "tmpfs", "-o", "ro", "tmpfs") as path,
        pytest.raises(SwapSpaceError, match=f"nvme='{path}' is on a read-only file system") as caught,
    ):
        FileDevice(path)
    assert caught.value.errno == errno.EROFS


def test_a_directory_that_may_not_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    if os.geteuid() == 0:
        os.seteuid(65534)
        restore = True
    else:
        restore = False
    try:
        with pytest.raises(SwapSpaceError, match="may not be written by user"):
            FileDevice(tmp_path)
    finally:
        if restore:
            os.seteuid(0)
        tmp_path.chmod(0o755)


@pytest.mark.parametrize("kind", ["ext4", "tmpfs"])
@pytest.mark.filterwarnings("ignore:.*no direct I/O")  # tmpfs has it since Linux 6.6
def test_a_full_disk_is_an_error_at_the_reservation_and_nothing_is_half_grown(tmp_path: Path, kind: str) -> None:
    small = (
        image(tmp_path, "ext4", 16 * MIB)
        if kind == "ext4"
        else mounted(tmp_path / "t", "-t", "tmpfs", "-o", "size=12m", "tmpfs")
    )
    with small as path:
        device = FileDevice(path)
        device.extend(2 * MIB)
        used = os.fstat(device.descriptors[0]).st_blocks
        free = os.statvfs(path).f_bavail * os.statvfs(path).f_frsize
        with pytest.raises(SwapSpaceError, match=r"nvme='.*': 64\.0 MiB of swap space is needed, .* is free") as caught:
            device.extend(64 * MIB)
        assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(path))
        assert f"{free / MIB:.1f} MiB is free" in str(caught.value)
        status = os.fstat(device.descriptors[0])
        assert (device.capacity, status.st_size) == (2 * MIB, 2 * MIB)
        assert (status.st_blocks - used) * 512 < 64 << 10  # ext4 may keep a block of its extent tree
        device.extend(MIB)
        assert round_trip(device, 2 * MIB, MIB)
        device.close()


def test_a_limit_on_file_size_is_told_like_a_full_disk(tmp_path: Path) -> None:
    import resource

    device = FileDevice(tmp_path)
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, old[1]))
    try:
        with pytest.raises(SwapSpaceError, match=r"File too large.*\n  fix:   raise the limit of the size of files"):
            device.extend(2 * MIB)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert device.capacity == os.fstat(device.descriptors[0]).st_size == 0
    device.close()
