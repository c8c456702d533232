"""Runs a script under a real memory limit: a child process in a control group (v1 or v2); skips where none is allowed."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.patience import SECONDS, wait_until

ROOT = Path("/sys/fs/cgroup")

# The child sets its own limit when everything that is not the engine's is in memory (torch, its thread pools, a first
# step of a tiny model), so what a run needs beyond that is measured in the very process that is limited.
_LIMIT = """
import json, os, sys
from pathlib import Path

GROUP = Path({group!r})

def anonymous_bytes():
    lines = dict(line.split() for line in (GROUP / "memory.stat").read_text().splitlines())
    return int(lines.get("anon") or lines["total_rss"])

def limit(num_bytes):
    '''From here on the process may take this much more than it has.'''
    for name in ("memory.force_empty", "memory.reclaim"):
        if (GROUP / name).exists():
            try: (GROUP / name).write_text("1G" if name == "memory.reclaim" else "0")
            except OSError: pass
    used = int((GROUP / {usage!r}).read_text())
    (GROUP / {limit!r}).write_text(str(used + num_bytes))
    return used

def peak_bytes():
    return int((GROUP / {peak!r}).read_text()) if (GROUP / {peak!r}).exists() else None

def report(**values):
    print("REPORT" + json.dumps(values), flush=True)
"""


@dataclass(frozen=True, slots=True)
class Group:
    """A control group that one process is put into."""

    path: Path
    version: int

    @property
    def prologue(self) -> str:
        names = {1: ("usage_in_bytes", "limit_in_bytes", "max_usage_in_bytes"), 2: ("current", "max", "peak")}
        usage, limit, peak = (f"memory.{name}" for name in names[self.version])
        return _LIMIT.format(group=str(self.path), usage=usage, limit=limit, peak=peak)

    def num_kills(self) -> int:
        """How many processes of this group the kernel killed for lack of memory."""
        file = self.path / ("memory.oom_control" if self.version == 1 else "memory.events")
        counts = dict(line.split() for line in file.read_text().splitlines())
        return int(counts["oom_kill"])


@contextlib.contextmanager
def control_group() -> Iterator[Group]:
    path, version = _place()
    group = path / f"zero-infinity-test-{uuid.uuid4().hex[:12]}"
    try:
        group.mkdir()
        (group / "cgroup.procs").read_text()
        if version == 2 and not (group / "memory.max").exists():
            raise OSError("the memory controller is not enabled here")
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        pytest.skip(f"no control group can be made in {path}: {error}")
    try:
        yield Group(group, version)
    finally:
        wait_until(lambda: _removed(group))  # a killed process leaves its group a moment later


def _removed(group: Path) -> bool:
    with contextlib.suppress(OSError):
        group.rmdir()
    return not group.exists()


def _place() -> tuple[Path, int]:
    """This process's own group, under which others can be made."""
    groups = dict(line.strip().split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    if "memory" in groups:
        own = ROOT / "memory" / groups["memory"].lstrip("/")
        return (own if own.exists() else ROOT / "memory"), 1
    return ROOT / groups.get("", "/").lstrip("/"), 2


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process ended."""

    returncode: int
    report: dict[str, Any] | None
    output: str


def run_limited(group: Group, script: str) -> Ended:
    """Run a script inside the group; it can call `limit(num_bytes)` and `report(**values)`."""

    def enter() -> None:
        (group.path / "cgroup.procs").write_text(str(os.getpid()))

    done = subprocess.run(
        [sys.executable, "-c", group.prologue + script],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
        preexec_fn=enter,
    )
    reports = [line.removeprefix("REPORT") for line in done.stdout.splitlines() if line.startswith("REPORT")]
    return Ended(done.returncode, json.loads(reports[-1]) if reports else None, done.stdout + done.stderr)
