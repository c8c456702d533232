"""Runs fio on our own swap file and reads its report, for `bench io`.

Owns the command line and the JSON of fio. fio is optional.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass

from zero_infinity.storage.io_speed import IOSpeed, IOWorkload
from zero_infinity.units import format_bytes


@dataclass(frozen=True, slots=True)
class FioSetting:
    """`depth` requests in flight: from one process with io_uring, or from as many threads with pread and pwrite."""

    ioengine: str  # "io_uring" or "psync"
    request_bytes: int
    depth: int

    def arguments(self, num_bytes: int) -> list[str]:
        # Each psync thread works on its own part of the file.
        num_jobs = self.depth if self.ioengine == "psync" else 1
        part = num_bytes // num_jobs // self.request_bytes * self.request_bytes
        arguments = [f"--ioengine={self.ioengine}", f"--bs={self.request_bytes}", f"--size={part}"]
        if num_jobs == 1:
            return [*arguments, f"--iodepth={self.depth}"]
        return [*arguments, "--thread", f"--numjobs={num_jobs}", f"--offset_increment={part}", "--group_reporting"]

    def __str__(self) -> str:
        return f"{self.ioengine} {format_bytes(self.request_bytes)} x {self.depth}"


def find() -> str | None:
    return shutil.which("fio")


def measure(
    executable: str, descriptor: int, workload: IOWorkload, setting: FioSetting, num_bytes: int, *, direct: bool
) -> IOSpeed:
    """Run fio once. Raises `subprocess.SubprocessError` or `ValueError` if it fails."""
    command = [
        executable,
        "--name=zero-infinity",
        # The file that we measure: the same blocks of the same drive. It has no name, so nothing is left behind.
        f"--filename=/proc/{os.getpid()}/fd/{descriptor}",
        "--allow_file_create=0",
        f"--direct={int(direct)}",
        f"--rw={workload.value}",
        *setting.arguments(num_bytes),
        "--output-format=json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    # fio may print notes before the report.
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    report = job[workload.value]
    percentile = report["clat_ns"]["percentile"]
    return IOSpeed(
        bytes_per_second=float(report["bw_bytes"]),
        # fio gives the share of one thread on average.
        cores=(job["usr_cpu"] + job["sys_cpu"]) / 100 * (setting.depth if setting.ioengine == "psync" else 1),
        p50_seconds=percentile["50.000000"] / 1e9,
        p99_seconds=percentile["99.000000"] / 1e9,
    )
