"""What a contender's process asks of the system: to die with its parent, and what has been used so far."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


def end_with(parent: int) -> None:
    """For the process: die with the parent, also while stopped. Elsewhere than on Linux the end of stdin has to do."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before
            os._exit(1)


def machine_cpu_seconds() -> float:
    """What all processes have used so far; 0 where it is not told."""
    with contextlib.suppress(OSError):
        user, nice, system, _, _, irq, soft_irq = map(int, Path("/proc/stat").read_text().split(maxsplit=8)[1:8])
        return (user + nice + system + irq + soft_irq) / os.sysconf("SC_CLK_TCK")
    return 0.0


def peak_rss(pid: int | str = "self") -> int:
    """The most memory that a process has had resident (VmHWM, which psutil does not report)."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
