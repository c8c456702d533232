"""`zero-infinity bench hardware`: measures this machine into a profile for `plan` and `simulate`.

Owns the measurements and the profile's text. Each figure is the best of a few short measurements: a profile describes
the machine, not its current load. torch is imported only when it is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType

from zero_infinity.byte_sizes import format_rate, parse_bytes
from zero_infinity.errors import ConfigError
from zero_infinity.machine import host_memory
from zero_infinity.planner import hardware
from zero_infinity.storage.io_engine import NUM_THREADS, REQUEST_BYTES, IOEngine
from zero_infinity.storage.io_speed import IOSpeed, IOWorkload, measure, scratch_memory
from zero_infinity.storage.striped_files import FileDevice

_MIB = 1 << 20
_SCRATCH_BYTES = 64 * _MIB
_NUM_ROUNDS = 5
_COPY_BYTES = 256 * _MIB
_UPDATE_ELEMENTS = 8 << 20
_UPDATE_BYTES_PER_ELEMENT = 28  # float32: value, gradient, momentum, variance read; all but the gradient written
# The model that shows the engine's own cost.
_NUM_LAYERS = 24
_WIDTH = 256
_MEMORY = 6 << 20  # a third of the states
_WARM_UP_STEPS = 6
_NUM_STEPS = 12
_CHUNKS_A_LAYER = 2  # of 256 KiB, the engine's minimum, for a record of 512 KiB
_BLOCKS_A_STEP = _NUM_LAYERS * (2 + _CHUNKS_A_LAYER)  # used forward and backward, and updated

_EPILOG = """\
examples:
  zero-infinity bench hardware /mnt/nvme -o this-machine.toml
  zero-infinity plan --hardware this-machine.toml --model gpt3-1.3b
"""


@dataclass(frozen=True, slots=True)
class HardwareFigures:
    """The measurements: operations and bytes per second, seconds, bytes."""

    flops: float
    update_rate: float
    copy_rate: float
    drive_read: float
    drive_write: float
    drive_latency: float
    drive_cpu: float  # seconds per byte
    block_cpu: float  # seconds per block, the engine's own work
    memory: int
    drive_space: int
    num_cores: int
    matmul_flops: tuple[tuple[float, float], ...] = ()  # by the side of a cube
    attention_flops: float = 0.0
    saved_rate: float = 0.0


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Measure computation, memory, drives and the engine's own cost, and write them as a profile for "
        "plan and simulate."
    )
    parser.epilog = _EPILOG
    parser.add_argument(
        "directories", metavar="DIR", nargs="+", help="directory for swap space, as in nvme=; several are striped"
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="profile to write, .toml (default: print it)")
    parser.add_argument("--size", default="512MiB", metavar="SIZE", help="bytes moved per run (default 512MiB)")
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object instead")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.output is not None and args.output.suffix != ".toml":
        raise ConfigError(
            f"--output {args.output}: a profile's name ends in .toml\n"
            f"  fix:   --output {args.output.with_suffix('.toml')}"
        )
    num_bytes = parse_bytes(args.size) // REQUEST_BYTES * REQUEST_BYTES
    if num_bytes < 2 * REQUEST_BYTES:
        raise ConfigError(f"--size {args.size} is too small to measure\n  fix:   --size 32MiB or more")
    figures = take_figures(args.directories, num_bytes)
    text = profile_text(figures, platform.node() or "this machine", datetime.now(UTC).strftime("%Y-%m-%d"))
    hardware.parse(text, "measured")
    if args.json:
        print(json.dumps(asdict(figures)))
    if args.output is None:
        if not args.json:
            print(text, end="")
        return 0
    try:
        args.output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output {args.output}: cannot be written: {error.strerror}") from None
    print(f"written: {args.output}; try zero-infinity plan --hardware {args.output} --model gpt3-1.3b", file=sys.stderr)
    return 0


def take_figures(directories: list[str], num_bytes: int) -> HardwareFigures:
    drive = measure_drive(directories, num_bytes)
    import torch

    from zero_infinity.cli.bench_compute import measure_compute

    compute = measure_compute()
    return HardwareFigures(
        flops=compute.matmul_flops[-1][1],
        update_rate=_update_rate(torch),
        copy_rate=copy_rate(torch),
        drive_read=drive.read,
        drive_write=drive.write,
        drive_latency=drive.latency,
        drive_cpu=drive.cpu_seconds_per_byte,
        block_cpu=block_cpu_seconds(directories[0], drive.cpu_seconds_per_byte),
        memory=host_memory().total,
        drive_space=sum(shutil.disk_usage(directory).free for directory in directories),
        num_cores=len(os.sched_getaffinity(0)),
        matmul_flops=compute.matmul_flops,
        attention_flops=compute.attention_flops,
        saved_rate=compute.saved_rate,
    )


@dataclass(frozen=True, slots=True)
class DriveSpeed:
    """Swap space as the engine uses it: bytes per second, seconds per small read, CPU seconds per byte."""

    read: float
    write: float
    latency: float
    cpu_seconds_per_byte: float


def measure_drive(directories: list[str], num_bytes: int) -> DriveSpeed:
    memory = memoryview(scratch_memory(_SCRATCH_BYTES))

    def speed(workload: IOWorkload, request_bytes: int, amount: int, num_threads: int) -> IOSpeed:
        device = FileDevice(directories)
        device.extend(num_bytes)
        engine = IOEngine(device, num_threads, request_bytes)
        try:
            # Blocks must be written before they can be read from the drive.
            measure(engine, memory, IOWorkload.WRITE, request_bytes, amount)
            return measure(engine, memory, workload, request_bytes, amount)
        finally:
            engine.close()

    def best(workload: IOWorkload) -> IOSpeed:
        speeds = [speed(workload, REQUEST_BYTES, num_bytes, NUM_THREADS) for _ in range(2)]
        return max(speeds, key=lambda one: one.bytes_per_second)

    read, write = best(IOWorkload.READ), best(IOWorkload.WRITE)
    small = 4096
    return DriveSpeed(
        read.bytes_per_second,
        write.bytes_per_second,
        small / speed(IOWorkload.READ, small, 64 * small, 1).bytes_per_second,
        max(one.cores / one.bytes_per_second for one in (read, write)),
    )


def _best_seconds(action: Callable[[], object]) -> float:
    action()  # the first call sets up threads and memory
    times = []
    for _ in range(_NUM_ROUNDS):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return min(times)


def copy_rate(torch: ModuleType) -> float:
    """Bytes per second, read and written together."""
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * _COPY_BYTES / _best_seconds(lambda: target.copy_(source))


def _update_rate(torch: ModuleType) -> float:
    """Bytes per second that a fused AdamW moves."""
    parameter = torch.nn.Parameter(torch.zeros(_UPDATE_ELEMENTS))
    parameter.grad = torch.ones(_UPDATE_ELEMENTS)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    return _UPDATE_BYTES_PER_ELEMENT * _UPDATE_ELEMENTS / _best_seconds(optimizer.step)


def block_cpu_seconds(directory: str, drive_cpu_seconds_per_byte: float) -> float:
    """The engine's own CPU seconds per block that it uses, moves or updates.

    A model that takes almost no time to compute is trained from a drive and in plain PyTorch, on one thread. The
    difference, minus the CPU time of the drive's transfers, is Python: hooks, decisions, requests, the wrapped
    optimizer. It does not depend on the model.
    """
    import torch

    from zero_infinity import api
    from zero_infinity.config import Config

    def build() -> torch.nn.Module:
        return torch.nn.Sequential(*(torch.nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(_NUM_LAYERS)))

    def cpu_seconds(model: torch.nn.Module, optimizer: torch.optim.Optimizer, settle: Callable[[], object]) -> float:
        times = []
        for _ in range(_WARM_UP_STEPS + _NUM_STEPS):
            start = time.process_time()
            model(inputs).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            settle()
            times.append(time.process_time() - start)
        return statistics.median(times[_WARM_UP_STEPS:])

    inputs = torch.ones(1, _WIDTH)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # idle threads spin, which counts as CPU time
    try:
        plain = build()
        plain_seconds = cpu_seconds(plain, torch.optim.AdamW(plain.parameters(), fused=True), lambda: None)
        with tempfile.TemporaryDirectory(dir=directory) as swap:
            model = build()
            model, optimizer = api.prepare(
                model, torch.optim.AdamW(model.parameters(), fused=True), Config(memory=_MEMORY, nvme=swap)
            )
            seconds = cpu_seconds(model, optimizer, lambda: api.synchronize(model))
            stats = api.stats(model)
    finally:
        torch.set_num_threads(num_threads)
    moved = (stats.bytes_read + stats.bytes_written) / (_WARM_UP_STEPS + _NUM_STEPS)
    return max(1e-6, (seconds - plain_seconds - moved * drive_cpu_seconds_per_byte) / _BLOCKS_A_STEP)


def profile_text(figures: HardwareFigures, name: str, date: str) -> str:
    """The profile. An accelerator is not measured: the CPU computes, out of host memory."""

    def figure(value: float, how: str) -> str:
        return f'{{ value = {value:.4g}, source = "measured {date}: {how}" }}'

    def size(num_bytes: int, how: str) -> str:
        return f'{{ value = "{num_bytes}", source = "measured {date}: {how}" }}'

    copied = f"copies in memory, {format_rate(figures.copy_rate)}"
    return f"""\
name = "{_plain(name)}"
description = "{figures.num_cores} cores, measured {date}; the CPU computes"
devices_per_node = {{ value = 1, source = "definition" }}
flops = {figure(figures.flops, "the largest float32 matmul that was measured")}
{_roofline(figures, date)}\
update_rate = {figure(figures.update_rate, "fused AdamW in float32, bytes read and written")}
block_cpu_seconds = {figure(figures.block_cpu, "the engine's own work per block, in steps of a small model")}

[[tiers]]
name = "RAM"
kind = "host"
capacity = {size(figures.memory, "the machine's, or its container's limit")}
read = {figure(figures.copy_rate, copied)}

[[tiers]]
name = "NVMe"
kind = "storage"
capacity = {size(figures.drive_space, "free space")}
read = {figure(figures.drive_read, "the engine's own transfers")}
write = {figure(figures.drive_write, "the engine's own transfers")}
latency = {figure(figures.drive_latency, "reads of 4 KiB, one at a time")}
cpu_seconds_per_byte = {figure(figures.drive_cpu, "of this process while it transferred")}
"""


def _roofline(figures: HardwareFigures, date: str) -> str:
    if not figures.matmul_flops:
        return ""
    pairs = ", ".join(f"[{side:g}, {rate:.4g}]" for side, rate in figures.matmul_flops)
    saved = "bytes that a norm, a gate and a residual save, by their forward's seconds"
    return f"""\
matmul_flops = {{ value = [{pairs}], source = "measured {date}: float32 matmul of cubes, by their side" }}
attention_flops = {{ value = {figures.attention_flops:.4g}, source = "measured {date}: causal attention, float32" }}
saved_rate = {{ value = {figures.saved_rate:.4g}, source = "measured {date}: {saved}" }}
"""


def _plain(text: str) -> str:
    """`text` without characters that would need escaping in TOML."""
    return "".join(character for character in text if character.isprintable() and character not in '"\\')
