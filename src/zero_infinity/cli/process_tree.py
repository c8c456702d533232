"""What a process and its children have used so far, as the kernel counts it."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
# Fields of /proc/PID/stat after the name, which may have blanks: user and system time, own and of children that ended.
_TIMES = slice(11, 15)


@dataclass(frozen=True, slots=True)
class Usage:
    """Of a whole tree of processes. Subtract two to see what happened between them."""

    cpu_seconds: float
    read_bytes: int  # from drives, whoever asked: direct I/O, and what the page cache did not have
    written_bytes: int  # to drives, counted when a page of a file becomes dirty
    peak_rss: int  # each process's own peak, added up


def usage(pid: int) -> Usage:
    """Of the process and all of its descendants that are alive. A process that ends meanwhile counts as nothing."""
    cpu, read, written, peak = 0.0, 0, 0, 0
    for process in _tree(pid):
        with contextlib.suppress(OSError, ValueError):
            folder = Path(f"/proc/{process}")
            cpu += sum(map(int, (folder / "stat").read_text().rpartition(")")[2].split()[_TIMES])) / _TICKS
            peak += 1024 * int(_fields(folder / "status").get("VmHWM", "0 kB").split()[0])
            moved = _fields(folder / "io")
            read += int(moved["read_bytes"])
            written += int(moved["write_bytes"])
    return Usage(cpu, read, written, peak)


def _tree(pid: int) -> list[int]:
    found = [pid]
    for process in found:  # grows while it is walked
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{process}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
    return found


def _fields(file: Path) -> dict[str, str]:
    """Lines of "name: value"."""
    return {name: value.strip() for name, _, value in (line.partition(":") for line in file.read_text().splitlines())}
