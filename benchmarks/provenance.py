"""Where a result comes from: command, commit, machine and date. Every JSON file of a benchmark has them."""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import shlex
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from zero_infinity.byte_sizes import format_bytes
from zero_infinity.machine import host_memory


@dataclass(frozen=True, slots=True)
class Provenance:
    """As it goes into a JSON file. Made before the measurement: files may change while it runs."""

    command: str
    date: str
    commit: str | None
    machine: dict[str, object]

    def in_words(self) -> str:
        machine = ", ".join(str(value) for value in self.machine.values())
        return f"{self.date}, commit {self.commit or 'unknown'}, {machine}"


def provenance(directory: str | os.PathLike[str]) -> Provenance:
    """Of a measurement that this process is about to make, with its swap space in `directory`."""
    return Provenance(
        command=f"python -m benchmarks {shlex.join(sys.argv[1:])}",
        date=datetime.datetime.now().astimezone().isoformat(timespec="minutes"),
        commit=_commit(),
        machine=_machine(os.fspath(directory)),
    )


def keep(content: str, name: str, out: Path | None) -> None:
    """Write a benchmark's JSON where `--out` says, if it does: the benchmark `numbers` makes tables of these files."""
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / f"{name}.json").write_text(content + "\n", encoding="utf-8")


def _machine(nvme: str) -> dict[str, object]:
    memory = host_memory()
    found: dict[str, object] = {
        "cpu": f"{os.cpu_count()} cores {_cpu_name()}",
        "memory": f"{format_bytes(memory.total)} RAM",
        "drive": f"{_file_system(nvme)} drive",
        "system": f"Linux {platform.release().partition('-')[0]}" if sys.platform == "linux" else platform.platform(),
        "python": f"Python {platform.python_version()}",
        "load": f"load {os.getloadavg()[0]:.1f} before",
    }
    for package in ("torch", "deepspeed"):  # without importing them
        with contextlib.suppress(PackageNotFoundError):
            found[package] = f"{package} {version(package)}"
    return found


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _file_system(directory: str) -> str:
    """The type of the file system that a directory is on: of its longest mount point."""
    path, best = os.path.realpath(directory), ("", "unknown")
    try:
        for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
            _, mount, kind = line.split()[:3]
            if (path == mount or path.startswith(mount.rstrip("/") + "/")) and len(mount) > len(best[0]):
                best = (mount, kind)
    except OSError:
        pass
    return best[1]


def _commit() -> str | None:
    """The commit of this source, with a mark when files differ from it; None outside of a repository."""

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), *words], capture_output=True, text=True, check=True, timeout=20
        )
        return done.stdout.strip()

    try:
        changed = git("--no-optional-locks", "status", "--porcelain", "--untracked-files=no", ".")
        return git("rev-parse", "--short=12", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None
