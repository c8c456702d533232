"""Swap files: nameless, reserved, striped, direct where it goes; and what is said when a directory will not do."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import tempfile
import warnings
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mounts import image, mounted

from zero_infinity.errors import ConfigError, SwapSpaceError
from zero_infinity.policy.sizes import ALIGNMENT
from zero_infinity.storage.striped_files import FileDevice
from zero_infinity.storage.swap_device import UNLIMITED, SwapDevice

MIB = 1 << 20


def aligned(data: bytes) -> memoryview:
    memory = mmap.mmap(-1, len(data))
    memory[:] = data
    return memoryview(memory)


def round_trip(device: SwapDevice, offset: int, num_bytes: int) -> bool:
    data = aligned(os.urandom(num_bytes))
    back = aligned(bytes(num_bytes))
    return device.write(data, offset) == device.read(back, offset) == num_bytes and data == back


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# What a swap file is


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


def test_descriptors_are_given_back_by_close_and_without_it(tmp_path: Path) -> None:
    before = num_descriptors()
    device = FileDevice([tmp_path, tmp_path])
    assert num_descriptors() == before + 2
    device.close()
    assert num_descriptors() == before
    FileDevice(tmp_path)
    assert num_descriptors() == before
    with pytest.raises(SwapSpaceError):
        FileDevice([tmp_path, tmp_path / "missing"])
    assert num_descriptors() == before


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


# Stripes


@given(
    num_files=st.integers(1, 4),
    stripe_pages=st.integers(1, 3),
    growth=st.lists(st.integers(1, 20), min_size=1, max_size=4),
)
def test_stripes_lie_in_turn_and_the_files_hold_exactly_the_capacity(
    num_files: int, stripe_pages: int, growth: list[int]
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        stripe = stripe_pages * ALIGNMENT
        device = FileDevice([directory] * num_files, stripe_bytes=stripe)
        for pages in growth:
            device.extend(pages * ALIGNMENT)
        sizes = [os.fstat(descriptor).st_size for descriptor in device.descriptors]
        assert device.capacity == sum(growth) * ALIGNMENT == sum(sizes)
        for page in range(sum(growth)):
            assert device.write(aligned(bytes([page]) * ALIGNMENT), page * ALIGNMENT) == ALIGNMENT
        seen: dict[int, list[int]] = {}
        for index, descriptor in enumerate(device.descriptors):
            memory = aligned(bytes(max(sizes[index], ALIGNMENT)))
            assert os.preadv(descriptor, [memory], 0) == sizes[index]  # no write went past the reservation
            seen[index] = list(memory[: sizes[index] : ALIGNMENT])
        for page in range(sum(growth)):
            assert page in seen[page // stripe_pages % num_files]
            assert 0 < device.max_request(page * ALIGNMENT) <= (UNLIMITED if num_files == 1 else stripe)
        device.close()


def test_describe_names_the_directory_and_the_offset_in_its_file(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir()
    second.mkdir()
    device = FileDevice([first, second], stripe_bytes=8192)
    assert device.describe(4096) == f"{first}/(swap file) at 4096"
    assert device.describe(8192 + 4096) == f"{second}/(swap file) at 4096"
    assert device.describe(2 * 8192) == f"{first}/(swap file) at 8192"
    device.close()


# Fallbacks


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


def test_one_buffered_and_one_direct_directory_keep_to_the_stricter_rule(tmp_path: Path) -> None:
    with mounted(tmp_path / "ram", "-t", "ramfs", "ramfs") as path, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        device = FileDevice([path, tmp_path], stripe_bytes=8192)
        assert (device.direct, device.alignment) == (False, ALIGNMENT)
        device.extend(65536)
        assert all(round_trip(device, offset, 8192) for offset in range(0, 65536, 8192))
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


# Refusals


def test_a_missing_directory(tmp_path: Path) -> None:
    path = tmp_path / "missing"
    with pytest.raises(SwapSpaceError, match=f"nvme='{path}' does not exist; fix: mkdir -p") as caught:
        FileDevice(path)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOENT, str(path))


def test_a_file_instead_of_a_directory(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("mine")
    with pytest.raises(SwapSpaceError, match=f"nvme='{path}' is a file; give a directory"):
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


def test_settings_that_cannot_be_meant(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no directory"):
        FileDevice([])
    for stripe in (0, 1000, -4096):
        with pytest.raises(ConfigError, match="stripe_bytes"):
            FileDevice(tmp_path, stripe_bytes=stripe)


# Full disks


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


@pytest.mark.filterwarnings("ignore:.*no direct I/O")
def test_when_one_of_two_directories_is_full_the_other_is_cut_back_too(tmp_path: Path) -> None:
    with mounted(tmp_path / "t", "-t", "tmpfs", "-o", "size=2m", "tmpfs") as path:
        device = FileDevice([tmp_path, path], stripe_bytes=MIB)
        device.extend(2 * MIB)
        with pytest.raises(SwapSpaceError, match=f"nvme='{path}'"):
            device.extend(16 * MIB)
        assert device.capacity == 2 * MIB
        assert [os.fstat(descriptor).st_size for descriptor in device.descriptors] == [MIB, MIB]
        device.close()


def test_a_limit_on_file_size_is_told_like_a_full_disk(tmp_path: Path) -> None:
    import resource

    device = FileDevice(tmp_path)
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, old[1]))
    try:
        with pytest.raises(SwapSpaceError, match="File too large"):
            device.extend(2 * MIB)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert device.capacity == os.fstat(device.descriptors[0]).st_size == 0
    device.close()
