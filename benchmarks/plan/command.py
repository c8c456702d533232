"""The benchmark `plan`: the planner's predictions against runs on this machine: bytes moved, bytes held, step time.

Each configuration trains a model within a budget, on one rank or two (`rank_run.py`). Its steps are interleaved with
steps of the same model in plain PyTorch. The prediction is given the times of modules measured there, the speed of the
drive and of the link, and the engine's own cost of a block (`bench_hardware`, measured once on another
model). How the engine spends its budget, what it moves and what it waits for is predicted.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.plan.rank_run import Calibration, PlanConfiguration, StepFigures, run_rank
from benchmarks.provenance import keep, provenance
from zero_infinity.byte_sizes import format_bytes, format_seconds
from zero_infinity.cli.bench_hardware import block_cpu_seconds, measure_drive
from zero_infinity.errors import ConfigError
from zero_infinity.machine import host_memory
from zero_infinity.models.presets import Shape
from zero_infinity.trace import RANKS

_DRIVE_BYTES = 128 << 20
_MB = 1e6
_EPILOG = "example: python -m benchmarks plan /mnt/nvme"

_WIDE = Shape(layers=4, hidden=1024, heads=16, seq=256)  # 51M parameters, 583 MiB of states
_DEEP = Shape(layers=12, hidden=512, heads=8, seq=256)  # 38M parameters, 438 MiB of states
CONFIGURATIONS = (
    PlanConfiguration("wide, RAM", _WIDE, 2, None),
    PlanConfiguration("wide, all fits", _WIDE, 2, 2.0),
    PlanConfiguration("wide, 1/2", _WIDE, 2, 1 / 2),
    PlanConfiguration("wide, 1/4", _WIDE, 2, 1 / 4),
    PlanConfiguration("wide, 1/8", _WIDE, 2, 1 / 8),
    PlanConfiguration("wide, 1/4, after backward", _WIDE, 2, 1 / 4, early=False),
    PlanConfiguration("wide, 1/4, six sequences", _WIDE, 6, 1 / 4, steps_a_round=2),
    PlanConfiguration("deep, 1/2", _DEEP, 2, 1 / 2),
    PlanConfiguration("deep, 1/8", _DEEP, 2, 1 / 8),
    PlanConfiguration("deep, 1/4, after backward", _DEEP, 2, 1 / 4, early=False),
    PlanConfiguration("wide, 1/2, drive of 500 MB/s", _WIDE, 2, 1 / 2, drive_rate=500 * _MB, steps_a_round=2),
    PlanConfiguration("deep, 1/4, drive of 250 MB/s", _DEEP, 2, 1 / 4, drive_rate=250 * _MB, steps_a_round=2),
    PlanConfiguration("deep, device behind 500 MB/s", _DEEP, 2, None, device_rate=500 * _MB, steps_a_round=2),
    PlanConfiguration("deep, RAM, 2 ranks", _DEEP, 1, None, num_ranks=2),
    PlanConfiguration("deep, 1/2, 2 ranks", _DEEP, 1, 1 / 2, num_ranks=2),
    PlanConfiguration("wide, 1/4, 2 ranks", _WIDE, 1, 1 / 4, num_ranks=2),
    PlanConfiguration("deep, 1/2, 2 ranks, drives of 200 MB/s", _DEEP, 1, 1 / 2, num_ranks=2, drive_rate=200 * _MB),
)


@dataclass(frozen=True, slots=True)
class PlanComparison:
    configuration: PlanConfiguration
    predicted: StepFigures
    measured: StepFigures
    plain_seconds: float

    @property
    def bytes_are_exact(self) -> bool:
        return self.moved(self.predicted) == self.moved(self.measured)

    @staticmethod
    def moved(figures: StepFigures) -> tuple[int, int, int, int]:
        return figures.read, figures.written, figures.sent, figures.uploaded

    @property
    def byte_verdict(self) -> str:
        planned, measured = (sum(self.moved(figures)) for figures in (self.predicted, self.measured))
        return "exact" if self.bytes_are_exact else f"{planned / max(1, measured) - 1:+.2%}"

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
    parser.add_argument("--out", type=Path, metavar="DIR", help="write plan.json there")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    chosen = [configuration for configuration in CONFIGURATIONS if args.only in configuration.name]
    if not chosen:
        names = "; ".join(configuration.name for configuration in CONFIGURATIONS)
        raise ConfigError(f"--only {args.only!r} is in no configuration's name; there are: {names}")
    if not args.directory.is_dir():
        raise ConfigError(f"{args.directory} is not a directory")
    directory: Path = args.directory.absolute()
    origin = provenance(directory)
    drive = measure_drive([str(directory)], _DRIVE_BYTES)
    block = block_cpu_seconds(str(directory), drive.cpu_seconds_per_byte)
    results: list[PlanComparison] = []
    console = Console(stderr=True)
    for configuration in chosen:
        console.print(f"running: {configuration.name}", style="dim")
        calibration, measured = measure(configuration, directory)
        predicted = predict(configuration, calibration, block)
        result = PlanComparison(configuration, predicted, measured, calibration.plain_seconds)
        results.append(result)
        times = f"{format_seconds(predicted.seconds)} planned, {format_seconds(measured.seconds)} measured"
        console.print(f"  {times}, {result.time_error:+.0%}; bytes {result.byte_verdict}", style="dim")
    content = json.dumps({**asdict(origin), **_as_json(results, block)}, indent=1)
    if args.json:
        print(content)
    else:
        _print(Console(), results, block)
    keep(content, "plan", args.out)
    return 0


def measure(configuration: PlanConfiguration, directory: Path) -> tuple[Calibration, StepFigures]:
    """Run it; what the first rank says."""
    context = multiprocessing.get_context("spawn")
    num_ranks = configuration.num_ranks
    with (
        tempfile.TemporaryDirectory() as scratch,
        ProcessPoolExecutor(num_ranks, mp_context=context) as pool,
    ):
        arguments = (configuration, directory, str(Path(scratch) / "store"))
        ranks = [pool.submit(run_rank, rank, *arguments) for rank in range(num_ranks)]
        first, *_ = [rank.result() for rank in ranks]
        return first


def predict(configuration: PlanConfiguration, calibration: Calibration, block: float) -> StepFigures:
    """What the planner says, given how fast plain PyTorch, the drive and the link were."""
    import torch

    from zero_infinity.activations.block_finder import repeated_blocks
    from zero_infinity.models.byte_gpt import ByteGPT
    from zero_infinity.planner import module_shapes
    from zero_infinity.planner.hardware import Hardware, HardwareTier, TierKind
    from zero_infinity.planner.plan_inputs import prepare
    from zero_infinity.planner.simulator import simulate
    from zero_infinity.planner.training_job import SINGLE, TrainingJob

    shape, num_ranks, drive = configuration.shape, configuration.num_ranks, calibration.drive
    with torch.device("meta"):
        tokens = torch.zeros(configuration.batch, shape.seq, dtype=torch.long)
        inputs = {"tokens": tokens, "targets": tokens}
        network = ByteGPT(shape)
        model = module_shapes.describe(
            network,
            inputs,
            batch=configuration.batch,
            seq=shape.seq,
            name=configuration.name,
            dtype_bytes=4,
            blocks=repeated_blocks(network),
        )
    # The emulated accelerator copies the bytes, and then waits as long as its link would take.
    link = 1 / (1 / configuration.device_rate + 2 / calibration.copy_rate) if configuration.device_rate else 1e10
    tiers = [HardwareTier("RAM", TierKind.HOST, host_memory().total, link, link, link, 0.0)]
    if configuration.device_memory is not None:
        tiers.insert(0, HardwareTier("device", TierKind.DEVICE, 1 << 50, 1e12, 1e12, 1e12, 0.0))
    if configuration.part is not None:
        limit = configuration.drive_rate or drive.read
        read, write = min(num_ranks * limit, drive.read), min(num_ranks * limit, drive.write)
        cpu = drive.cpu_seconds_per_byte
        tiers.append(
            HardwareTier("NVMe", TierKind.STORAGE, 1 << 50, read, write, limit, drive.latency, cpu_seconds_per_byte=cpu)
        )
    hardware = Hardware(
        name="this machine",
        description="",
        devices_per_node=num_ranks,
        flops=1.0,  # modules are timed
        node_link=calibration.link_rate,
        cluster_link=calibration.link_rate,
        link_latency=0.0,
        update_rate=SINGLE.update * shape.num_parameters / calibration.update_seconds * num_ranks,
        tiers=tuple(tiers),
        sources={},
        link_cpu_seconds_per_byte=calibration.link_cpu_seconds_per_byte,
        block_cpu_seconds=block,
    )
    job = TrainingJob(
        batch=configuration.batch,
        states=SINGLE,
        memory=num_ranks * configuration.memory,
        device_memory=configuration.device_memory,
        interval=0,
        early_update=configuration.early,
        # With a drive in the settings the engine has every state at home there, also when all of it fits in memory.
        parameters_on="NVMe" if configuration.part is not None else None,
        optimizer_on="NVMe" if configuration.part is not None else None,
    )
    outcome = simulate(prepare(model.timed(calibration.modules), hardware, job))
    moved = {traffic.link: traffic.num_bytes for traffic in outcome.traffic}
    return StepFigures(
        outcome.seconds,
        outcome.read_bytes,
        outcome.written_bytes,
        outcome.peak_bytes["RAM"],
        moved[RANKS],
        moved["RAM to device"],
    )


def _print(console: Console, results: list[PlanComparison], block: float) -> None:
    table = Table("configuration", "memory", title="the plan against the run: one step", title_justify="left")
    for heading in ("NVMe", "ranks", "device", "bytes", "held", "plain", "planned", "measured", "error"):
        table.add_column(heading, justify="right")
    for result in results:
        measured = result.measured
        table.add_row(
            result.configuration.name,
            format_bytes(result.configuration.memory),
            format_bytes(measured.read + measured.written),
            format_bytes(measured.sent),
            format_bytes(measured.uploaded),
            result.byte_verdict,
            f"{result.held_error:+.1%}",
            format_seconds(result.plain_seconds),
            format_seconds(result.predicted.seconds),
            format_seconds(measured.seconds),
            f"{result.time_error:+.0%}",
        )
    console.print(table)
    exact = sum(result.bytes_are_exact for result in results)
    held = max(abs(result.held_error) for result in results)
    errors = [abs(result.time_error) for result in results]
    median = statistics.median(errors)
    console.print(
        f"bytes exact in {exact} of {len(results)}; held within {held:.1%}; time off by {median:.0%} "
        f"(median), {max(errors):.0%} at most; the engine takes {1e3 * block:.2f} ms of CPU a block"
    )


def _as_json(results: list[PlanComparison], block: float) -> dict[str, object]:
    return {
        "comparisons": [
            {
                "name": result.configuration.name,
                "memory": result.configuration.memory,
                "num_ranks": result.configuration.num_ranks,
                "plain_seconds": result.plain_seconds,
                "predicted": asdict(result.predicted),
                "measured": asdict(result.measured),
                "bytes_are_exact": result.bytes_are_exact,
                "held_error": result.held_error,
                "time_error": result.time_error,
            }
            for result in results
        ],
        "median_time_error": statistics.median(abs(result.time_error) for result in results),
        "block_cpu_seconds": block,
    }
