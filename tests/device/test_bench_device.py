"""`zero-infinity doctor` and `zero-infinity bench device` on the test device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.device import DEVICE, EXTENSION, WHY_NOT

import zero_infinity as zi
from zero_infinity.cli import device_links, device_steps
from zero_infinity.cli.main import main
from zero_infinity.models import presets
from zero_infinity.models.presets import Shape

if EXTENSION is None:
    pytest.skip(str(WHY_NOT), allow_module_level=True)

TINY = Shape(layers=2, hidden=64, heads=2, seq=32)
RUNS = ["plain again", "plain, update on the host", "states fit", "parameters fit", "half of the parameters", "least"]


@pytest.fixture
def job() -> device_steps.Job:
    return device_steps.Job(DEVICE, TINY, batch=2, num_turns=1)


@pytest.fixture
def tiny_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(presets.PRESETS, "1M", TINY)


@pytest.fixture
def slow_link() -> object:
    """Copies at 50 MB/s, each kernel 5 ms longer."""
    torch.accelerator.synchronize(DEVICE)
    EXTENSION.set_delays(probability=0.0, kernel_seconds=0.005, bytes_per_second=50e6)
    yield
    torch.accelerator.synchronize(DEVICE)
    EXTENSION.set_delays(probability=0.1, max_seconds=2e-4)


def bench(*arguments: str) -> int:
    return main(["bench", "device", *arguments, "--preset", "1M", "--batch", "2", "--turns", "1", "--size", "1MiB"])


def test_doctor_shows_each_device_and_its_link(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", str(tmp_path), "--json"])
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert checks["accelerator"]["value"] == "lag:0, lag:1, lag:2, lag:3"
    for index in range(4):
        assert "GiB free of 4.0 GiB" in checks[f"lag:{index}"]["value"]
        assert checks[f"lag:{index} link"]["value"].count("/s pinned") == 2
        assert checks[f"lag:{index} link"]["value"].count("/s unpinned") == 2
    assert checks["peer access"]["value"] == "unknown: torch does not tell for lag"
    assert checks["GPUDirect Storage"]["value"] == "works"
    assert all(checks[name]["status"] == "ok" for name in checks if name.startswith("lag"))
    assert list(tmp_path.iterdir()) == []


def test_doctor_says_which_device_has_no_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.accelerator.memory.empty_cache()
    EXTENSION.set_limit(2, 1 << 19)
    try:
        assert main(["doctor", str(tmp_path), "--json"]) == 1
    finally:
        EXTENSION.set_limit(2, 4 << 30)
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert checks["lag:2"]["status"] == "fail"
    assert "out of memory" in checks["lag:2"]["value"]
    assert "lag:3 link" in checks  # the others are measured


def test_rates_of_a_slow_link(slow_link: object) -> None:
    rates = device_links.link_rates(DEVICE, 1 << 20)
    assert 5e6 < rates.up_pinned < 55e6
    assert 5e6 < rates.down_pinned < 55e6
    assert 5e6 < device_links.both_ways(DEVICE, 1 << 20) < 110e6


def test_a_copy_on_its_own_stream_is_hidden(slow_link: object) -> None:
    found = device_links.overlap(DEVICE, 8 << 20)
    assert found.copy_seconds > 0.16
    assert found.hidden_fraction > 0.3


@pytest.mark.parametrize(("together", "fraction"), [(3.0, 0.0), (2.5, 0.5), (2.0, 1.0), (1.9, 1.0), (3.5, 0.0)])
def test_hidden_fraction(together: float, fraction: float) -> None:
    assert device_links.Overlap(1.0, 2.0, together).hidden_fraction == fraction


def test_a_copy_takes_a_part_of_the_free_memory() -> None:
    torch.accelerator.memory.empty_cache()
    EXTENSION.set_limit(DEVICE.index, torch.accelerator.memory_allocated(DEVICE) + (16 << 20))
    try:
        assert device_links.copy_size(DEVICE, 64 << 20) <= 2 << 20
    finally:
        EXTENSION.set_limit(DEVICE.index, 4 << 30)
    assert device_links.copy_size(DEVICE, 64 << 20) == 64 << 20


@pytest.mark.usefixtures("tiny_preset")
def test_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drive, out = tmp_path / "drive", tmp_path / "device.json"
    drive.mkdir()
    assert bench(str(drive), "--json", "--out", str(out)) == 0
    output = capsys.readouterr()
    report = json.loads(output.out)
    assert report == json.loads(out.read_text())
    assert (report["version"], report["errors"]) == (1, [])
    assert (report["device"]["device"], report["num_devices"]) == ("lag:1", 4)
    assert all(report["links"][f"{way}_{kind}"] > 0 for way in ("up", "down") for kind in ("pinned", "unpinned"))
    assert report["both_ways"]["bytes_per_second"] > 0
    assert 0 <= report["overlap"]["hidden_fraction"] <= 1
    rows = {row["name"]: row for row in report["steps"]}
    assert list(rows) == [*RUNS, "half, states on NVMe", "least, states on NVMe"]
    for row in rows.values():
        assert row["losses_identical_to_plain"]
        assert row["losses_identical_to_host_update"]
        assert row["max_loss_difference"] == 0
        assert row["ratio"] == pytest.approx(row["seconds"] / row["plain_seconds"])
    assert rows["least"]["budget"]["device_memory"] < rows["half of the parameters"]["budget"]["device_memory"]
    assert rows["least"]["step_bytes"]["uploaded"] > rows["parameters fit"]["step_bytes"]["uploaded"]
    assert rows["least"]["step_bytes"]["read"] == 0 < rows["least, states on NVMe"]["step_bytes"]["read"]
    assert "steps: least, states on NVMe\n" in output.err  # progress
    assert list(drive.iterdir()) == []
    assert str(tmp_path) not in out.read_text()  # the result is to be sent


@pytest.mark.usefixtures("tiny_preset")
def test_tables_and_a_run_that_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(job: device_steps.Job, budget: device_steps.Budget, directory: Path | None) -> device_steps.StepResult:
        if budget.name == "least":
            raise RuntimeError("no kernel [image]\nsecond line")
        return device_steps.StepResult(0.2, 0.1, False, 1e-6, (2.0, 1.0), budget, device_steps.LinkBytes(1, 2, 3, 4))

    monkeypatch.setattr(device_steps, "compare_budget", broken)
    monkeypatch.setenv("COLUMNS", "200")
    assert bench() == 1
    output = capsys.readouterr()
    assert all(name in output.out for name in RUNS)
    assert "differ by 1.0e-06" in output.out
    assert "failed: steps: least: no kernel [image]" in output.out
    assert "steps: least: failed: no kernel [image]" in output.err


def test_bytes_are_those_that_the_device_counts(job: device_steps.Job) -> None:
    budget = device_steps.Budget("half", job.parameter_bytes // 2)
    training = device_steps.PreparedTraining(job, budget, nvme=None)
    try:
        before = training.traffic()
        batches = [job.tokens(step) for step in range(4)]
        torch.accelerator.synchronize(DEVICE)
        EXTENSION.reset_counts(DEVICE.index)
        for tokens in batches:
            training.step(tokens)
        training.settle()
        torch.accelerator.synchronize(DEVICE)
        counted = EXTENSION.counts(DEVICE.index)
        after = training.traffic()
    finally:
        training.close()
    assert after.uploaded - before.uploaded == counted["uploaded"] > 0
    assert after.downloaded - before.downloaded == counted["downloaded"] > 0


def test_losses_that_differ_are_seen(job: device_steps.Job) -> None:
    class Wrong(device_steps.PlainTraining):
        def step(self, tokens: torch.Tensor) -> torch.Tensor:
            return super().step(tokens).nextafter(torch.full((), 9.0, device=tokens.device))

    result = device_steps.compare(job, lambda: Wrong(job))
    assert not result.is_identical
    assert 0 < result.max_loss_difference < 1e-5


def test_the_least_device_memory_is_the_least(job: device_steps.Job) -> None:
    least = device_steps.least_device_memory(job)
    device_steps.PreparedTraining(job, device_steps.Budget("least", least), nvme=None).close()
    less = least - job.parameter_bytes // 64 - 1
    with pytest.raises(zi.CapacityError, match="of device memory"):
        device_steps.PreparedTraining(job, device_steps.Budget("less", less), nvme=None)
