"""Reading swap files into device memory past the host: where it is possible. tests/device has it at work."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from zero_infinity.storage.striped_files import FileDevice
from zero_infinity.storage.swap_device import FileRange
from zero_infinity.tiers import direct_read

CUDA = torch.device("cuda", 0)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The reads that a device without a driver was asked for."""
    reads: list[tuple[str, int]] = []

    class File:
        def __init__(self, name: str, flags: int) -> None:
            self._name = name

        def load_storage(self, storage: torch.UntypedStorage, offset: int) -> None:
            reads.append((self._name, offset))
            storage.fill_(len(reads))

    module = SimpleNamespace(gds=SimpleNamespace(GdsFile=File))
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    return reads


def test_a_target_is_filled_range_by_range(opened: list[tuple[str, int]]) -> None:
    whole = torch.zeros(10, dtype=torch.uint8)
    reader = direct_read.DirectReader(CUDA)
    reader.read(whole[2:8], [FileRange(7, 4096, 4), FileRange(8, 0, 2)])
    assert opened == [("/proc/self/fd/7", 4096), ("/proc/self/fd/8", 0)]
    assert whole.tolist() == [0, 0, 1, 1, 1, 1, 2, 2, 0, 0]
    assert reader.bytes_read == 6


def test_striped_bytes_are_in_their_files(tmp_path: Path) -> None:
    device = FileDevice([tmp_path, tmp_path], stripe_bytes=8192)
    device.extend(40960)
    one, two = device.descriptors
    assert device.file_ranges(4096, 16384) == [
        FileRange(one, 4096, 4096),
        FileRange(two, 0, 8192),
        FileRange(one, 8192, 4096),
    ]
    device.close()


def test_a_device_without_the_calls_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace())
    device = torch.device("xpu", 0)
    assert direct_read.why_not(device, tmp_path) == "torch has it for cuda, not for xpu"
    assert direct_read.find_direct_reader(device, [tmp_path]) is None


def test_a_directory_that_cannot_be_used_is_named(tmp_path: Path, opened: list[tuple[str, int]]) -> None:
    assert "does not exist" in str(direct_read.why_not(CUDA, tmp_path / "gone"))


def test_cuda_without_a_driver_is_a_reason_and_no_error(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one here")
    assert direct_read.why_not(CUDA, tmp_path)
