"""Benchmarks are not part of the wheel, and `python -m benchmarks` lists and explains them."""

from __future__ import annotations

import ast
import shutil
import zipfile
from pathlib import Path

import pytest
from setuptools import build_meta

from benchmarks.__main__ import BENCHMARKS, main

ROOT = Path(__file__).parents[2]


def test_the_wheel_has_the_commands_and_no_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = tmp_path / "project"
    project.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, project)
    for name in ("src", "benchmarks"):  # copies: setuptools writes into them
        shutil.copytree(ROOT / name, project / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    monkeypatch.chdir(project)
    monkeypatch.setattr("sys.argv", ["setup.py"])
    wheel = build_meta.build_wheel(str(tmp_path))
    with zipfile.ZipFile(tmp_path / wheel) as archive:
        files = [name for name in archive.namelist() if ".dist-info/" not in name]
    assert {name.split("/")[0] for name in files} == {"zero_infinity"}
    assert sorted(name for name in files if "bench" in name) == [
        "zero_infinity/cli/bench.py",
        "zero_infinity/cli/bench_compute.py",
        "zero_infinity/cli/bench_device.py",
        "zero_infinity/cli/bench_hardware.py",
        "zero_infinity/cli/bench_io.py",
    ]


def test_the_library_never_imports_a_benchmark() -> None:
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.split(".")[0] == "benchmarks" for name in names), path


def test_the_help_lists_every_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert all(f"    {name}" in printed for name in BENCHMARKS)
    assert main(["nothing"]) == 2
    assert main([]) == 2


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_has_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    assert f"-m benchmarks {name} " in " ".join(capsys.readouterr().out.partition("example")[2].split())
