"""Swap space striped over several directories."""

from __future__ import annotations

import os
import tempfile
import warnings
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mounts import mounted
from support.forkserver import in_own_process
from support.swap import aligned, round_trip

from zero_infinity.errors import ConfigError, SwapSpaceError
from zero_infinity.policy.alignment import ALIGNMENT
from zero_infinity.storage.striped_files import FileDevice
from zero_infinity.storage.swap_device import UNLIMITED

MIB = 1 << 20


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@in_own_process
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


def test_one_buffered_and_one_direct_directory_keep_to_the_stricter_rule(tmp_path: Path) -> None:
    with mounted(tmp_path / "ram", "-t", "ramfs", "ramfs") as path, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        device = FileDevice([path, tmp_path], stripe_bytes=8192)
        assert (device.direct, device.alignment) == (False, ALIGNMENT)
        device.extend(65536)
        assert all(round_trip(device, offset, 8192) for offset in range(0, 65536, 8192))
        device.close()


def test_settings_that_cannot_be_meant(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no directory"):
        FileDevice([])
    for stripe in (0, 1000, -4096):
        with pytest.raises(ConfigError, match="stripe_bytes"):
            FileDevice(tmp_path, stripe_bytes=stripe)


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
