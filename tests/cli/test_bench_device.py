"""`zero-infinity bench device` without an accelerator; tests/device runs it on the test device."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from zero_infinity.cli import bench_device, device_links, doctor
from zero_infinity.cli.main import main
from zero_infinity.models.presets import PRESETS

CUDA = [torch.device("cuda", index) for index in range(3)]


@pytest.fixture
def no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)


@pytest.mark.usefixtures("no_accelerator")
def test_without_an_accelerator(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "device"]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert f"needs an accelerator, but torch {torch.__version__} finds none" in output.err
    assert "fix:" in output.err


@pytest.mark.usefixtures("no_accelerator")
def test_doctor_without_an_accelerator_has_one_row(tmp_path: Path) -> None:
    (check,) = doctor._check_accelerators(tmp_path)
    assert (check.name, check.value, check.status) == ("accelerator", "none: computes on the CPU", "ok")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no/where"], "is not a directory to write to"),
        (["--out", "no/where.json"], "--out no/where.json: cannot be written"),
        (["--out", "."], "--out .: cannot be written"),
        (["--size", "lots"], "'lots' is not a size"),
        (["--batch", "0"], "'0' is not an integer of at least 1"),
    ],
)
def test_mistakes_are_found_before_a_measurement(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "device", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("room", "name"), [(1 << 20, "1M"), (2 << 30, "25M"), (16 << 30, "125M"), (1 << 40, "125M")])
def test_the_largest_model_that_fits(room: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (room, room))
    monkeypatch.setattr(bench_device, "host_memory", lambda: _Memory(1 << 40))
    assert bench_device._fitting_preset(CUDA[0]) == name
    monkeypatch.setattr(bench_device, "host_memory", lambda: _Memory(1))
    assert bench_device._fitting_preset(CUDA[0]) == next(iter(PRESETS))


class _Memory:
    def __init__(self, available: int) -> None:
        self.available = available


@pytest.mark.parametrize(
    ("missing", "text"),
    [
        ([], "between all devices"),
        ([(0, 1)], "all but cuda:0 to cuda:1"),
        ([(a, b) for a in range(3) for b in range(3)], "none"),
    ],
)
def test_peer_access(missing: Iterable[tuple[int, int]], text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: (a.index, b.index) not in missing)
    assert device_links.peer_access(CUDA) == text


def test_peer_access_of_one_device() -> None:
    assert device_links.peer_access(CUDA[:1]) == "one device only"
