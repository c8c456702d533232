"""What a process and its children have used so far, as the kernel counts it."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import psutil

from benchmarks.turns.child_process import peak_rss


@dataclass(frozen=True, slots=True)
class Usage:
    """Of a whole tree of processes. Subtract two to see what happened between them."""

    cpu_seconds: float
    read_bytes: int  # from drives, whoever asked: direct I/O, and what the page cache did not have
    written_bytes: int  # to drives, counted when a page of a file becomes dirty
    peak_rss: int  # each process's own peak, added up


def usage(pid: int) -> Usage:
    """Of the process and all of its living descendants. A process that ends meanwhile counts as nothing."""
    cpu, read, written, peak = 0.0, 0, 0, 0
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            with contextlib.suppress(psutil.Error, OSError):
                moved = process.io_counters()
                cpu += sum(process.cpu_times()[:4])  # user and system, its own and of children that ended
                peak += peak_rss(process.pid)
                read += moved.read_bytes
                written += moved.write_bytes
    return Usage(cpu, read, written, peak)
