"""`zero-infinity bench io DIR`: bandwidth of swap space in a directory, compared with fio.

Owns the settings, the rounds and the report. `storage/io_speed.py` measures one transfer pattern with one setting, and
`bench_io_fio.py` runs fio.

Drives and shared machines vary by tens of percent from one second to the next, so the runs are interleaved (ours, fio,
ours, fio, ...) on the same file, and medians are compared.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

from zero_infinity.cli import bench_io_fio as fio
from zero_infinity.errors import ConfigError
from zero_infinity.storage.io_engine import NUM_THREADS, REQUEST_BYTES, IOEngine
from zero_infinity.storage.io_speed import IOSpeed, IOWorkload, measure, scratch_memory
from zero_infinity.storage.striped_files import FileDevice
from zero_infinity.units import format_bytes, format_seconds, parse_bytes

_MIB = 1 << 20
_REQUESTS = (1 * _MIB, 4 * _MIB, 8 * _MIB, 16 * _MIB)
_THREADS = (1, 2, 4, 8)
_FIO_SETTINGS = (
    *(fio.FioSetting("io_uring", request, depth) for request in _REQUESTS[:3] for depth in (4, 16)),
    *(fio.FioSetting("psync", request, 4) for request in _REQUESTS[1:3]),
)
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
class FioComparison:
    """The engine's default setting against fio's best setting; medians of the rounds."""

    workload: IOWorkload
    ours: IOSpeed
    theirs: IOSpeed
    fio_setting: fio.FioSetting

    @property
    def ratio(self) -> float:
        return self.ours.bytes_per_second / self.theirs.bytes_per_second


class _BenchFile(FileDevice):
    """Swap space that several I/O engines use one after the other."""

    def close(self) -> None:
        """Do nothing when an engine closes: see `remove`."""

    def remove(self) -> None:
        super().close()


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "io",
        help="read, write and mixed bandwidth of swap space in a directory",
        description="Measure read, write and mixed bandwidth of swap space, by request size and number of threads. "
        "The files have no name and are gone afterwards.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
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
        memory = memoryview(scratch_memory(_MEMORY_BYTES))
        with _progress() as say:
            say(f"writing {format_bytes(num_bytes)} in {', '.join(args.directories)}")
            _measure(device, memory, IOSetting(IOWorkload.WRITE, _MIB, NUM_THREADS), num_bytes)
            sweep = _sweep(device, memory, num_bytes, say)
            comparisons = _compare(device, memory, num_bytes, say)
        direct = device.direct
    finally:
        device.remove()
    if args.json:
        print(json.dumps(_as_json(args.directories, num_bytes, direct, sweep, comparisons)))
    else:
        _print_tables(args.directories, num_bytes, sweep, comparisons)
    return 0


def _measure(device: FileDevice, memory: memoryview, setting: IOSetting, num_bytes: int) -> IOSpeed:
    engine = IOEngine(device, setting.num_threads, setting.request_bytes)
    try:
        return measure(engine, memory, setting.workload, setting.request_bytes, num_bytes)
    finally:
        engine.close()


def _sweep(
    device: FileDevice, memory: memoryview, num_bytes: int, say: Callable[[str], None]
) -> dict[IOSetting, IOSpeed]:
    results: dict[IOSetting, IOSpeed] = {}
    for workload in IOWorkload:
        for request_bytes in _REQUESTS:
            if 2 * request_bytes > num_bytes:
                continue
            for num_threads in _THREADS:
                say(f"{workload.value}, requests of {format_bytes(request_bytes)}, {num_threads} threads")
                setting = IOSetting(workload, request_bytes, num_threads)
                results[setting] = _measure(device, memory, setting, num_bytes)
    return results


def _compare(device: FileDevice, memory: memoryview, num_bytes: int, say: Callable[[str], None]) -> list[FioComparison]:
    """Compare with fio, if it is installed; it cannot stripe over directories as we do."""
    executable = fio.find()
    settings = [setting for setting in _FIO_SETTINGS if setting.request_bytes * setting.depth <= num_bytes]
    if executable is None:
        say("no comparison: fio is not in PATH")
        return []
    if len(device.descriptors) > 1 or not settings:
        say("no comparison: " + ("the size is too small" if not settings else "fio cannot stripe over directories"))
        return []

    def run_fio(workload: IOWorkload, setting: fio.FioSetting) -> IOSpeed:
        return fio.measure(executable, device.descriptors[0], workload, setting, num_bytes, direct=device.direct)

    comparisons: list[FioComparison] = []
    try:
        for workload in (IOWorkload.READ, IOWorkload.WRITE):
            say(f"fio, {workload.value}: finding its best setting")
            best = max(settings, key=lambda setting: run_fio(workload, setting).bytes_per_second)
            own = IOSetting(workload, min(REQUEST_BYTES, num_bytes), NUM_THREADS)
            ours: list[IOSpeed] = []
            theirs: list[IOSpeed] = []
            for index in range(_NUM_ROUNDS):
                say(f"ours and fio interleaved, {workload.value}: round {index + 1} of {_NUM_ROUNDS}")
                ours.append(_measure(device, memory, own, num_bytes))
                theirs.append(run_fio(workload, best))
            comparisons.append(FioComparison(workload, _median(ours), _median(theirs), best))
    except (subprocess.SubprocessError, ValueError, KeyError) as error:
        detail = getattr(error, "stderr", None) or error
        print(f"no comparison: fio could not run: {str(detail).strip()}", file=sys.stderr)
        return []
    return comparisons


def _median(speeds: list[IOSpeed]) -> IOSpeed:
    return IOSpeed(
        bytes_per_second=statistics.median(speed.bytes_per_second for speed in speeds),
        cores=statistics.median(speed.cores for speed in speeds),
        p50_seconds=statistics.median(speed.p50_seconds for speed in speeds),
        p99_seconds=statistics.median(speed.p99_seconds for speed in speeds),
    )


def _best(sweep: dict[IOSetting, IOSpeed], workload: IOWorkload) -> IOSetting:
    return max(
        (setting for setting in sweep if setting.workload is workload),
        key=lambda setting: sweep[setting].bytes_per_second,
    )


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Shows the current measurement on stderr: a status line on a terminal, plain lines elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: print(text, file=sys.stderr, flush=True)
        return
    with console.status("") as status:
        yield status.update


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
    table = Table(
        "workload",
        "request",
        "threads",
        *_SPEED_HEADINGS,
        title=f"{', '.join(directories)}: {format_bytes(num_bytes)} each; * is the best",
    )
    for workload in IOWorkload:
        best = _best(sweep, workload)
        for setting in (setting for setting in sweep if setting.workload is workload):
            mark = "*" if setting == best else " "
            table.add_row(
                f"{workload.value} {mark}",
                format_bytes(setting.request_bytes),
                str(setting.num_threads),
                *_speed_cells(sweep[setting]),
            )
        table.add_section()
    console.print(table)
    if not comparisons:
        return
    table = Table(
        "workload",
        "who",
        *_SPEED_HEADINGS,
        "ratio",
        title=f"compared with fio, interleaved: medians of {_NUM_ROUNDS} rounds",
    )
    for comparison in comparisons:
        ours = f"ours, {format_bytes(REQUEST_BYTES)} x {NUM_THREADS}"
        theirs = f"fio, {comparison.fio_setting}"
        table.add_row(comparison.workload.value, ours, *_speed_cells(comparison.ours), f"{comparison.ratio:.2f}")
        table.add_row("", theirs, *_speed_cells(comparison.theirs), "1.00")
    console.print(table)


def _speed_cells(speed: IOSpeed) -> tuple[str, str, str, str]:
    return (
        f"{speed.bytes_per_second / 1e9:.2f}",
        f"{speed.cores:.2f}",
        format_seconds(speed.p50_seconds),
        format_seconds(speed.p99_seconds),
    )
