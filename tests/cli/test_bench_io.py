"""`zero-infinity bench io`, run for real on a small size."""

from __future__ import annotations

import json
import os
import shutil
import stat
from pathlib import Path

import pytest

from zero_infinity.cli import bench_io
from zero_infinity.cli.bench_io import FioSetting
from zero_infinity.cli.main import main


@pytest.fixture
def no_fio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")


@pytest.mark.usefixtures("no_fio")
def test_json_is_one_object_with_every_setting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "io", str(tmp_path), "--size", "16MiB", "--json"]) == 0
    output = capsys.readouterr()
    report = json.loads(output.out)
    assert report["directories"] == [str(tmp_path)]
    assert report["num_bytes"] == 16 << 20
    settings = {(row["workload"], row["request_bytes"], row["num_threads"]) for row in report["sweep"]}
    # Requests of 16 MiB need twice that for the mixed workload.
    assert settings == {
        (workload, request << 20, threads)
        for workload in ("read", "write", "mixed")
        for request in (1, 4, 8)
        for threads in (1, 2, 4, 8)
    }
    for row in report["sweep"]:
        assert row["bytes_per_second"] > 1e6
        assert 0 <= row["p50_seconds"] <= row["p99_seconds"] < 60
        assert row["cores"] >= 0
    for workload in ("read", "write", "mixed"):
        rows = [row for row in report["sweep"] if row["workload"] == workload]
        assert report["best"][workload] == max(rows, key=lambda row: row["bytes_per_second"])
    assert report["fio"] == {}
    assert "read, requests of 1.0 MiB, 4 threads\n" in output.err  # progress: plain lines, not on stdout
    assert "fio is not in PATH" in output.err
    assert os.listdir(tmp_path) == []


@pytest.mark.usefixtures("no_fio")
def test_tables_over_two_directories(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    assert main(["bench", "io", str(tmp_path / "a"), str(tmp_path / "b"), "--size", "2MiB"]) == 0
    output = capsys.readouterr().out
    assert "GB/s" in output
    assert output.count("read *") == output.count("write *") == output.count("mixed *") == 1


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
def test_fio_is_run_on_the_same_file_and_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = (FioSetting("io_uring", 1 << 20, 4), FioSetting("psync", 1 << 20, 4))
    monkeypatch.setattr(bench_io, "_FIO_SETTINGS", settings)
    monkeypatch.setattr(bench_io, "_NUM_ROUNDS", 2)
    assert main(["bench", "io", str(tmp_path), "--size", "32MiB", "--json"]) == 0
    output = capsys.readouterr()
    report = json.loads(output.out)["fio"]
    if not report:
        pytest.skip(f"fio does not run here: {output.err.splitlines()[-1]}")
    for workload in ("read", "write"):
        row = report[workload]
        assert row["ratio"] == pytest.approx(row["ours"]["bytes_per_second"] / row["fio"]["bytes_per_second"])
        assert row["fio"]["ioengine"] in ("io_uring", "psync")
        assert row["fio"]["bytes_per_second"] > 1e6
        assert 0 < row["fio"]["p50_seconds"] <= row["fio"]["p99_seconds"]
    assert os.listdir(tmp_path) == []


def test_both_engines_of_fio_cover_the_same_bytes() -> None:
    one = FioSetting("io_uring", 4 << 20, 16).arguments(100 << 20)
    assert {"--size=104857600", "--iodepth=16"} <= set(one)
    many = FioSetting("psync", 4 << 20, 4).arguments(100 << 20)
    assert {"--size=25165824", "--numjobs=4", "--offset_increment=25165824"} <= set(many)


def test_a_fio_that_fails_costs_the_comparison_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "bin" / "fio"
    broken.parent.mkdir()
    broken.write_text("#!/bin/sh\necho 'io_uring is forbidden' >&2\nexit 1\n")
    broken.chmod(broken.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{broken.parent}:/bin:/usr/bin")
    assert main(["bench", "io", str(tmp_path), "--size", "16MiB", "--json"]) == 0
    output = capsys.readouterr()
    assert json.loads(output.out)["fio"] == {}
    assert "no comparison: fio could not run: io_uring is forbidden" in output.err


def test_mistakes_are_told_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "io", str(tmp_path), "--size", "1KiB"]) == 2
    assert "--size 1KiB is too small" in capsys.readouterr().err
    assert main(["bench", "io", str(tmp_path / "missing")]) == 1
    error = capsys.readouterr().err
    assert "does not exist\n  fix:   mkdir -p" in error
    assert "Traceback" not in error
    assert main(["bench", "io"]) == 2


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "io", "--help"]) == 0
    assert "examples:\n  zero-infinity bench io /mnt/nvme" in capsys.readouterr().out
