"""`zero-infinity bench plan`: the planner against runs on this machine: bytes moved, bytes held, time of a step.

Each configuration trains a small model within a budget. In turn with its steps the same model takes steps in plain
PyTorch: how fast this machine computes and updates at the moment is what the prediction is told, together with the
drive's speed. How the engine spends its budget, what it reads and writes and what it waits for is predicted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from zero_infinity.cli.bench_hardware import measure_drive
from zero_infinity.errors import ConfigError
from zero_infinity.machine import host_memory
from zero_infinity.plan.simulator import WARM_UP_STEPS
from zero_infinity.units import format_bytes, format_seconds
from zero_infinity.workload.presets import Shape

_NUM_ROUNDS = 2
_STEPS_A_ROUND = 4
_DRIVE_BYTES = 128 << 20
_STATE_BYTES = 12  # a parameter in float32: value, momentum, variance
_EPILOG = "example: zero-infinity bench plan /mnt/nvme"


@dataclass(frozen=True, slots=True)
class Configuration:
    """What is trained, and in how much memory: a part of its states, or None for RAM without a drive."""

    name: str
    shape: Shape
    batch: int
    part: float | None
    early: bool = True

    @property
    def memory(self) -> int:
        states = _STATE_BYTES * self.shape.num_parameters
        return int(states * self.part) if self.part is not None else 2 * states


_WIDE = Shape(layers=4, hidden=512, heads=8, seq=128)  # 13M parameters, 149 MiB of states
_DEEP = Shape(layers=12, hidden=256, heads=4, seq=128)  # 10M parameters, 109 MiB of states
CONFIGURATIONS = (
    Configuration("wide, RAM", _WIDE, 4, None),
    Configuration("wide, all fits", _WIDE, 4, 2.0),
    Configuration("wide, 1/2", _WIDE, 4, 1 / 2),
    Configuration("wide, 1/4", _WIDE, 4, 1 / 4),
    Configuration("wide, 1/2, after backward", _WIDE, 4, 1 / 2, early=False),
    Configuration("wide, 1/4, after backward", _WIDE, 4, 1 / 4, early=False),
    Configuration("wide, 1/4, one sequence", _WIDE, 1, 1 / 4),
    Configuration("wide, 1/2, one sequence", _WIDE, 1, 1 / 2),
    Configuration("deep, 1/2", _DEEP, 4, 1 / 2),
    Configuration("deep, 1/4", _DEEP, 4, 1 / 4),
    Configuration("deep, 1/8", _DEEP, 4, 1 / 8),
    Configuration("deep, 1/8, after backward", _DEEP, 4, 1 / 8, early=False),
)


@dataclass(frozen=True, slots=True)
class Calibration:
    """What plain PyTorch and the drive did in turn with the run."""

    compute_seconds: float
    update_seconds: float
    drive_read: float
    drive_write: float


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one step, predicted or measured."""

    seconds: float
    read: int
    written: int
    held: int


@dataclass(frozen=True, slots=True)
class Comparison:
    name: str
    memory: int
    predicted: Figures
    measured: Figures

    @property
    def bytes_are_exact(self) -> bool:
        return (self.predicted.read, self.predicted.written) == (self.measured.read, self.measured.written)

    @property
    def held_error(self) -> float:
        return self.predicted.held / self.measured.held - 1

    @property
    def time_error(self) -> float:
        return self.predicted.seconds / self.measured.seconds - 1


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("plan", help="the planner against runs on this machine", epilog=_EPILOG)
    parser.add_argument("directory", metavar="DIR", type=Path, help="where the swap space goes")
    parser.add_argument("--only", metavar="TEXT", default="", help="configurations whose name has this in it")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    chosen = [configuration for configuration in CONFIGURATIONS if args.only in configuration.name]
    if not chosen:
        names = ", ".join(configuration.name for configuration in CONFIGURATIONS)
        raise ConfigError(f"--only {args.only!r} is in no configuration's name; there are: {names}")
    if not args.directory.is_dir():
        raise ConfigError(f"{args.directory} is not a directory")
    results: list[Comparison] = []
    console = Console(stderr=True)
    for configuration in chosen:
        console.print(f"running: {configuration.name}", style="dim")
        calibration, measured = measure(configuration, args.directory)
        results.append(
            Comparison(configuration.name, configuration.memory, predict(configuration, calibration), measured)
        )
    if args.json:
        print(json.dumps(_as_json(results), indent=2))
    else:
        _print(Console(), results)
    return 0


def predict(configuration: Configuration, calibration: Calibration) -> Figures:
    """What the planner says, given how fast plain PyTorch and the drive were."""
    import torch

    from zero_infinity.cli.division import divide
    from zero_infinity.plan import modules
    from zero_infinity.plan.hardware import Hardware, Tier, TierKind
    from zero_infinity.plan.job import SINGLE, Job
    from zero_infinity.plan.setup import prepare
    from zero_infinity.plan.simulator import simulate
    from zero_infinity.workload.model import ByteGPT

    shape = configuration.shape
    with torch.device("meta"):
        tokens = torch.zeros(configuration.batch, shape.seq, dtype=torch.long)
        inputs = {"tokens": tokens, "targets": tokens}
        model = modules.describe(
            ByteGPT(shape), inputs, batch=configuration.batch, seq=shape.seq, name=configuration.name, dtype_bytes=4
        )
    flops = 3 * model.forward_flops(configuration.batch * shape.seq)
    ram = Tier("RAM", TierKind.HOST, host_memory().total, 1e10, 1e10, 1e10, 0.0)
    read, write = calibration.drive_read, calibration.drive_write
    drive = Tier("NVMe", TierKind.STORAGE, 1 << 50, read, write, max(read, write), 0.0)
    hardware = Hardware(
        name="this machine",
        description="",
        devices_per_node=1,
        flops=flops / calibration.compute_seconds,
        node_link=float("inf"),
        cluster_link=float("inf"),
        link_latency=0.0,
        update_rate=SINGLE.update * shape.num_parameters / calibration.update_seconds,
        tiers=(ram,) if configuration.part is None else (ram, drive),
        sources={},
    )
    job = Job(
        batch=configuration.batch,
        states=SINGLE,
        memory=configuration.memory,
        interval=0,
        early_update=configuration.early,
        # With a drive in the settings the engine has every state at home there, also when all of it fits in memory.
        parameters_on="NVMe" if configuration.part is not None else None,
        optimizer_on="NVMe" if configuration.part is not None else None,
    )
    outcome = simulate(prepare(model, hardware, job, divide))
    return Figures(outcome.seconds, outcome.read_bytes, outcome.written_bytes, outcome.peak_bytes["RAM"])


def measure(configuration: Configuration, directory: Path) -> tuple[Calibration, Figures]:
    """Steps of the engine and of plain PyTorch in turn."""
    import torch

    from zero_infinity import api
    from zero_infinity.config import Config
    from zero_infinity.workload.model import ByteGPT

    drive = measure_drive([str(directory)], _DRIVE_BYTES)
    torch.manual_seed(0)
    plain, model = ByteGPT(configuration.shape), ByteGPT(configuration.shape)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), fused=True)
    with tempfile.TemporaryDirectory(dir=directory) as swap:
        config = Config(
            memory=configuration.memory,
            nvme=swap if configuration.part is not None else None,
            update="auto" if configuration.early else "after_backward",
        )
        prepared, optimizer = api.prepare(model, torch.optim.AdamW(model.parameters(), fused=True), config)
        tokens = torch.randint(0, 256, (configuration.batch, configuration.shape.seq))

        def train(num_steps: int) -> float:
            """Seconds a step. What the last one leaves to do counts; what the others leave overlaps the next."""
            start = time.perf_counter()
            for _ in range(num_steps):
                prepared(tokens, tokens).backward()
                optimizer.step()
                optimizer.zero_grad()
            api.synchronize(prepared)
            return (time.perf_counter() - start) / num_steps

        # Bytes of a step that waits for its updates: what runs on into the next step would blur them by a block or two.
        before = after = api.stats(prepared)
        for _ in range(WARM_UP_STEPS + 1):  # up to the step that the simulator reports
            train(1)
            before, after = after, api.stats(prepared)
        plain(tokens, tokens).backward()
        computing: list[float] = []
        updating: list[float] = []
        stepping: list[float] = []
        for _ in range(_NUM_ROUNDS):
            for _ in range(_STEPS_A_ROUND):
                start = time.perf_counter()
                plain(tokens, tokens).backward()
                middle = time.perf_counter()
                plain_optimizer.step()
                plain_optimizer.zero_grad()
                computing.append(middle - start)
                updating.append(time.perf_counter() - middle)
            stepping.append(train(_STEPS_A_ROUND))
    figures = Figures(
        statistics.median(stepping),
        after.bytes_read - before.bytes_read,
        after.bytes_written - before.bytes_written,
        api.stats(prepared).memory_peak,
    )
    return Calibration(statistics.median(computing), statistics.median(updating), drive[0], drive[1]), figures


def _print(console: Console, results: list[Comparison]) -> None:
    table = Table("configuration", "memory", title="the plan against the run: one step", title_justify="left")
    for heading in ("read", "written", "bytes", "held", "error", "planned", "measured", "error"):
        table.add_column(heading, justify="right")
    for result in results:
        table.add_row(
            result.name,
            format_bytes(result.memory),
            format_bytes(result.measured.read),
            format_bytes(result.measured.written),
            "exact" if result.bytes_are_exact else f"{_byte_error(result):+.2%}",
            format_bytes(result.measured.held),
            f"{result.held_error:+.1%}",
            format_seconds(result.predicted.seconds),
            format_seconds(result.measured.seconds),
            f"{result.time_error:+.0%}",
        )
    console.print(table)
    exact = sum(result.bytes_are_exact for result in results)
    held = max(abs(result.held_error) for result in results)
    off = statistics.median(abs(result.time_error) for result in results)
    console.print(f"bytes exact in {exact} of {len(results)}; held within {held:.1%}; time off by {off:.0%} (median)")


def _byte_error(result: Comparison) -> float:
    planned = result.predicted.read + result.predicted.written
    return planned / max(1, result.measured.read + result.measured.written) - 1


def _as_json(results: list[Comparison]) -> dict[str, object]:
    return {
        "comparisons": [
            {
                **asdict(result),
                "bytes_are_exact": result.bytes_are_exact,
                "held_error": result.held_error,
                "time_error": result.time_error,
            }
            for result in results
        ],
        "median_time_error": statistics.median(abs(result.time_error) for result in results),
    }
