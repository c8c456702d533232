from __future__ import annotations

import errno
import fcntl
import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from zero_infinity.cli import doctor
from zero_infinity.cli.main import main
from zero_infinity.machine import HostMemory


@pytest.fixture
def no_torch_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the part that imports torch, which has a test of its own."""
    monkeypatch.setattr(doctor, "_check_torch", lambda directory: iter([doctor.Check("torch", "left out")]))


def test_real_invocation(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "zero_infinity", "doctor", str(tmp_path), "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    checks = {check["name"]: check for check in json.loads(result.stdout)["checks"]}
    assert list(checks) == [
        "kernel", "Python", "torch", "accelerator", "threads", "CPU matmul", "transformers", "memory", "cgroup limit",
        "locked memory", "huge pages", "directory", "file system", "free space", "direct I/O",
    ]  # fmt: skip
    assert result.returncode == (1 if any(check["status"] == "fail" for check in checks.values()) else 0)
    assert "GFLOP/s" in checks["CPU matmul"]["value"]
    assert all(bool(check["remedy"]) == (check["status"] != "ok") for check in checks.values())
    assert list(tmp_path.iterdir()) == []


def test_table(
    no_torch_probe: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "300")  # wide enough not to break the path
    directory = tmp_path / "[bold]"  # not markup
    directory.mkdir()
    main(["doctor", str(directory)])
    output = capsys.readouterr().out
    assert "remedy" in output
    assert "[bold]" in output


def test_missing_directory_fails(no_torch_probe: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(tmp_path / "no"), "--json"]) == 1
    check = json.loads(capsys.readouterr().out)["checks"][-1]
    assert (check["name"], check["status"]) == ("directory", "fail")
    assert check["remedy"].startswith(f"mkdir -p {tmp_path}/no")
    assert not (tmp_path / "no").exists()


def test_file_instead_of_directory(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    (check,) = doctor._check_directory(path)
    assert (check.status, check.remedy) == ("fail", "give a directory")


@pytest.mark.parametrize(
    ("number", "status", "remedy"),
    [
        (errno.EINVAL, "warn", "ext4"),
        (errno.EROFS, "fail", "read-only"),
        (errno.ENOSPC, "fail", "free some space"),
        (errno.EIO, "fail", "use another drive"),
    ],
)
def test_direct_io_that_fails(
    number: int, status: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    check = doctor._check_direct_io(tmp_path)
    assert check.status == status
    assert remedy in check.remedy


def test_direct_io_that_loses_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwritev", lambda descriptor, buffers, offset: 512)
    monkeypatch.setattr(os, "preadv", lambda descriptor, buffers, offset: 4096)
    assert doctor._check_direct_io(tmp_path).status == "fail"


@pytest.mark.parametrize(
    ("num_cores", "num_threads", "setting", "status"),
    [(8, 8, None, "ok"), (8, 4, None, "ok"), (8, 1, "1", "warn"), (2, 8, "8", "warn"), (1, 1, "1", "ok")],
)
def test_threads(num_cores: int, num_threads: int, setting: str | None, status: str) -> None:
    assert doctor._check_threads(num_cores, num_threads, setting).status == status


@pytest.mark.parametrize(
    ("text", "value", "status"),
    [
        ("always [madvise] never", "madvise", "ok"),
        ("[always] madvise never", "always", "ok"),
        ("always madvise [never]", "never", "warn"),
        (None, "not in this kernel", "warn"),
    ],
)
def test_huge_pages(text: str | None, value: str, status: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "enabled").write_text(text)
    check = doctor._check_huge_pages(tmp_path / "enabled")
    assert (check.value, check.status) == (value, status)


def test_slow_16_bit_arithmetic_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    speeds = {torch.float32: 100.0, torch.bfloat16: 0.5, torch.float16: 0.5}
    monkeypatch.setattr(doctor, "_gigaflops", lambda torch, dtype: speeds[dtype])
    check = doctor._check_half_precision(torch)
    assert check.status == "warn"
    assert 'compute_dtype="float32"' in check.remedy
    speeds[torch.bfloat16] = 200.0
    assert doctor._check_half_precision(torch).status == "ok"


def test_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # an import then raises
    (check,) = doctor._check_torch(Path())
    assert (check.name, check.status, check.remedy) == ("torch", "fail", "pip install torch")


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert doctor._check_transformers().status == "warn"


def test_low_memory_and_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = HostMemory(physical=16 * 1024**3, limit=4 * 1024**3, available=1024**3)
    monkeypatch.setattr(doctor, "host_memory", lambda: memory)
    ram, limit = doctor._check_memory()
    assert (ram.value, ram.status) == ("1.0 GiB available of 4.0 GiB", "warn")
    assert limit.value == "4.0 GiB"


def test_a_file_system_in_memory_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "_file_system_type", lambda path: "tmpfs")
    assert doctor._check_file_system(tmp_path).status == "warn"
    monkeypatch.setattr(doctor, "_file_system_type", lambda path: "nfs4")
    assert "local drive" in doctor._check_file_system(tmp_path).remedy


def test_file_system_type_of_proc() -> None:
    assert doctor._file_system_type(Path("/proc")) == "proc"
