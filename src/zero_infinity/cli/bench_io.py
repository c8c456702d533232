"""`zero-infinity bench io DIR`: bandwidth of swap space in a directory, compared with fio if installed.

Owns the settings, the rounds, the command line of fio and the report. `storage/io_speed.py` measures one transfer
pattern with one setting.

Drives and shared machines vary by tens of percent from one second to the next, so the runs are interleaved (ours, fio,
ours, fio, ...) on the same file, and medians are compared.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields

from rich.console import Console
from rich.table import Table

from zero_infinity.byte_sizes import format_bytes, format_seconds, parse_bytes
from zero_infinity.cli.progress_display import status_lines
from zero_infinity.errors import ConfigError
from zero_infinity.storage.io_engine import NUM_THREADS, REQUEST_BYTES, IOEngine
from zero_infinity.storage.io_speed import IOSpeed, IOWorkload, measure, scratch_memory
from zero_infinity.storage.striped_files import FileDevice

_MIB = 1 << 20
_REQUESTS = (1 * _MIB, 4 * _MIB, 8 * _MIB, 16 * _MIB)
_THREADS = (1, 2, 4, 8)
_NUM_ROUNDS = 5
_MEMORY_BYTES = 128 * _MIB

_SPEED_HEADINGS = ("GB/s", "cores", "p50", "p99")
_EPILOG = """\
examples:
  zero-infinity bench io /mnt/nvme
  zero-infinity bench io /mnt/a /mnt/b --size 4GiB --json

With fio in PATH and one directory, the engine's transfers are also compared with fio's best setting.
"""


@dataclass(frozen=True, slots=True)
class IOSetting:
    workload: IOWorkload
    request_bytes: int
    num_threads: int


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


_FIO_SETTINGS = (
    *(FioSetting("io_uring", request, depth) for request in _REQUESTS[:3] for depth in (4, 16)),
    *(FioSetting("psync", request, 4) for request in _REQUESTS[1:3]),
)


@dataclass(frozen=True, slots=True)
class FioComparison:
    """The engine's default setting against fio's best setting; medians of the rounds."""

    workload: IOWorkload
    ours: IOSpeed
    theirs: IOSpeed
    fio_setting: FioSetting

    @property
    def ratio(self) -> float:
        return self.ours.bytes_per_second / self.theirs.bytes_per_second


class _BenchFile(FileDevice):
    """Swap space that several I/O engines use one after the other."""

    def close(self) -> None:
        """Do nothing when an engine closes: see `remove`."""

    def remove(self) -> None:
        super().close()


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Measure read, write and mixed bandwidth of swap space, by request size and number of threads. "
        "The files have no name and are gone afterwards."
    )
    parser.epilog = _EPILOG
    parser.add_argument(
        "directories", metavar="DIR", nargs="+", help="directory for swap space, as in nvme=; several are striped"
    )
    parser.add_argument("--size", default="2GiB", metavar="SIZE", help="bytes moved per measurement (default 2GiB)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    num_bytes = parse_bytes(args.size) // _MIB * _MIB
    if num_bytes < 2 * _MIB:
        raise ConfigError(
            f"--size {args.size} is too small to measure\n  fix:   --size 2MiB or more (2GiB for stable figures)"
        )
    device = _BenchFile(args.directories)
    try:
        device.extend(num_bytes)
        with status_lines() as say:
            say(f"writing {format_bytes(num_bytes)} in {', '.join(args.directories)}")
            bench = _Bench(device, memoryview(scratch_memory(_MEMORY_BYTES)), num_bytes, say)
            bench.measure(IOSetting(IOWorkload.WRITE, _MIB, NUM_THREADS))
            sweep, comparisons = bench.sweep(), bench.compare()
        direct = device.direct
    finally:
        device.remove()
    if args.json:
        print(json.dumps(_as_json(args.directories, num_bytes, direct, sweep, comparisons)))
    else:
        _print_tables(args.directories, num_bytes, sweep, comparisons)
    return 0


@dataclass(frozen=True, slots=True)
class _Bench:
    """Measurements on one file."""

    device: FileDevice
    memory: memoryview
    num_bytes: int
    say: Callable[[str], None]

    def measure(self, setting: IOSetting) -> IOSpeed:
        engine = IOEngine(self.device, setting.num_threads, setting.request_bytes)
        try:
            return measure(engine, self.memory, setting.workload, setting.request_bytes, self.num_bytes)
        finally:
            engine.close()

    def sweep(self) -> dict[IOSetting, IOSpeed]:
        results: dict[IOSetting, IOSpeed] = {}
        requests = [request_bytes for request_bytes in _REQUESTS if 2 * request_bytes <= self.num_bytes]
        for setting in itertools.starmap(IOSetting, itertools.product(IOWorkload, requests, _THREADS)):
            size = format_bytes(setting.request_bytes)
            self.say(f"{setting.workload.value}, requests of {size}, {setting.num_threads} threads")
            results[setting] = self.measure(setting)
        return results

    def compare(self) -> list[FioComparison]:
        """Compare with fio, if it is installed; it cannot stripe over directories as we do."""
        settings = [setting for setting in _FIO_SETTINGS if setting.request_bytes * setting.depth <= self.num_bytes]
        problem = (
            "fio is not in PATH"
            if shutil.which("fio") is None
            else "the size is too small"
            if not settings
            else "fio cannot stripe over directories"
            if len(self.device.descriptors) > 1
            else None
        )
        if problem is not None:
            self.say(f"no comparison: {problem}")
            return []
        try:
            return [self._compare(workload, settings) for workload in (IOWorkload.READ, IOWorkload.WRITE)]
        except (subprocess.SubprocessError, ValueError, KeyError) as error:
            detail = getattr(error, "stderr", None) or error
            print(f"no comparison: fio could not run: {str(detail).strip()}", file=sys.stderr)
            return []

    def _compare(self, workload: IOWorkload, settings: list[FioSetting]) -> FioComparison:
        self.say(f"fio, {workload.value}: finding its best setting")
        best = max(settings, key=lambda setting: self.run_fio(workload, setting).bytes_per_second)
        own = IOSetting(workload, min(REQUEST_BYTES, self.num_bytes), NUM_THREADS)
        ours, theirs = [], []
        for index in range(_NUM_ROUNDS):
            self.say(f"ours and fio interleaved, {workload.value}: round {index + 1} of {_NUM_ROUNDS}")
            ours.append(self.measure(own))
            theirs.append(self.run_fio(workload, best))
        return FioComparison(workload, _median(ours), _median(theirs), best)

    def run_fio(self, workload: IOWorkload, setting: FioSetting) -> IOSpeed:
        """Run fio once. Raises `subprocess.SubprocessError` or `ValueError` if it fails."""
        command = [
            "fio",
            "--name=zero-infinity",
            # The file that we measure: the same blocks of the same drive. It has no name, so nothing is left behind.
            f"--filename=/proc/{os.getpid()}/fd/{self.device.descriptors[0]}",
            "--allow_file_create=0",
            f"--direct={int(self.device.direct)}",
            f"--rw={workload.value}",
            *setting.arguments(self.num_bytes),
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


def _median(speeds: list[IOSpeed]) -> IOSpeed:
    return IOSpeed(*(statistics.median(getattr(one, field.name) for one in speeds) for field in fields(IOSpeed)))


def _best(sweep: dict[IOSetting, IOSpeed], workload: IOWorkload) -> IOSetting:
    return max((s for s in sweep if s.workload is workload), key=lambda setting: sweep[setting].bytes_per_second)


def _as_json(
    directories: list[str],
    num_bytes: int,
    direct: bool,
    sweep: dict[IOSetting, IOSpeed],
    comparisons: list[FioComparison],
) -> dict[str, object]:
    def row(setting: IOSetting) -> dict[str, object]:
        return {**asdict(setting), "workload": setting.workload.value, **asdict(sweep[setting])}

    return {
        "directories": directories,
        "num_bytes": num_bytes,
        "direct": direct,
        "sweep": [row(setting) for setting in sweep],
        "best": {workload.value: row(_best(sweep, workload)) for workload in IOWorkload},
        "engine": {"request_bytes": REQUEST_BYTES, "num_threads": NUM_THREADS},
        "fio": {
            comparison.workload.value: {
                "ours": asdict(comparison.ours),
                "fio": {**asdict(comparison.fio_setting), **asdict(comparison.theirs)},
                "ratio": comparison.ratio,
            }
            for comparison in comparisons
        },
    }


def _print_tables(
    directories: list[str], num_bytes: int, sweep: dict[IOSetting, IOSpeed], comparisons: list[FioComparison]
) -> None:
    console = Console()
    title = f"{', '.join(directories)}: {format_bytes(num_bytes)} each; * is the best"
    table = Table("workload", "request", "threads", *_SPEED_HEADINGS, title=title)
    for workload in IOWorkload:
        best = _best(sweep, workload)
        for setting in (setting for setting in sweep if setting.workload is workload):
            name = f"{workload.value} {'*' if setting == best else ' '}"
            size, threads = format_bytes(setting.request_bytes), str(setting.num_threads)
            table.add_row(name, size, threads, *_speed_cells(sweep[setting]))
        table.add_section()
    console.print(table)
    if not comparisons:
        return
    title = f"compared with fio, interleaved: medians of {_NUM_ROUNDS} rounds"
    table = Table("workload", "who", *_SPEED_HEADINGS, "ratio", title=title)
    for comparison in comparisons:
        ours = f"ours, {format_bytes(REQUEST_BYTES)} x {NUM_THREADS}"
        theirs = f"fio, {comparison.fio_setting}"
        table.add_row(comparison.workload.value, ours, *_speed_cells(comparison.ours), f"{comparison.ratio:.2f}")
        table.add_row("", theirs, *_speed_cells(comparison.theirs), "1.00")
    console.print(table)


def _speed_cells(speed: IOSpeed) -> tuple[str, str, str, str]:
    rate, cores = f"{speed.bytes_per_second / 1e9:.2f}", f"{speed.cores:.2f}"
    return rate, cores, format_seconds(speed.p50_seconds), format_seconds(speed.p99_seconds)
