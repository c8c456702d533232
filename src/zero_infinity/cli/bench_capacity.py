"""`zero-infinity bench capacity`: the largest model that trains within a real memory limit.

One family of models, of which only the number of layers differs. Each trial is a process in a control group with the
limit; it builds the model and takes three steps, or fails: killed by the kernel, or with an error of its own. The
largest is tried first, then halves. What this library trained within the limit is trained once more without one, by
plain PyTorch where that fits in the machine, and the losses are compared bit for bit.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from zero_infinity.cli import interruption
from zero_infinity.cli.bench_contender import WORKER, Contender, Race, Setting
from zero_infinity.cli.control_group import control_group
from zero_infinity.errors import ConfigError
from zero_infinity.machine import host_memory
from zero_infinity.units import format_bytes, format_count, format_seconds, parse_bytes
from zero_infinity.workload.presets import Shape

_NUM_STEPS = 3
_SEQ = 64
_HEAD_WIDTH = 128
_LR = 1e-4
_STATE_BYTES = 16  # a parameter in float32 with AdamW: value, gradient, momentum, variance
# The engine's part of the limit: the rest is for torch itself (0.3 GiB) and activations.
_ENGINE_SHARE = 0.5
_EPILOG = "example: zero-infinity bench capacity /mnt/nvme --limit 2GiB"


@dataclass(frozen=True, slots=True)
class Trial:
    """One model in one process."""

    layers: int
    num_parameters: int
    losses: tuple[float, ...]
    seconds: float | None  # of the fastest step
    peak_bytes: int | None  # of its control group: memory of all kinds
    error: str | None


@dataclass(frozen=True, slots=True)
class Capacity:
    """The largest model of one way to train, and why the next one failed."""

    name: str
    largest: Trial | None
    failed: Trial | None


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("capacity", help="the largest model within a real memory limit", epilog=_EPILOG)
    parser.add_argument("directory", metavar="DIR", type=Path, help="where the swap space goes")
    parser.add_argument("--limit", default="2GiB", metavar="SIZE", help="of the control group (2GiB)")
    parser.add_argument(
        "--layers", type=int, default=20, metavar="N", help="the largest model that is tried (20: 1.0B)"
    )
    parser.add_argument("--hidden", type=int, default=2048, metavar="N", help="its width (2048: 50M a layer)")
    parser.add_argument("--timeout", type=float, default=1800, metavar="SECONDS", help="for one step (1800)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    limit = parse_bytes(args.limit)
    if not args.directory.is_dir():
        raise ConfigError(f"{args.directory} is not a directory")
    if args.layers < 1 or args.hidden < _HEAD_WIDTH or args.hidden % _HEAD_WIDTH:
        raise ConfigError(f"--layers is at least 1, and --hidden a multiple of {_HEAD_WIDTH}")
    console = Console(stderr=True)

    def attempt(setting: Setting, layers: int, limit: int | None) -> Trial:
        result = try_to_train(_race(layers, args.hidden), setting, limit, args.timeout)
        outcome = result.error or f"{format_seconds(result.seconds or 0.0)} a step"
        where = f"within {format_bytes(limit)}" if limit is not None else "without a limit"
        console.print(f"{setting.name}, {layers} layers {where}: {outcome}", style="dim", markup=False)
        return result

    with interruption.watched(), _swap_space(args.directory) as nvme:
        plain = Setting("plain PyTorch")
        ours = Setting("this library", int(limit * _ENGINE_SHARE), nvme)
        found = [largest(setting, args.layers, limit, attempt) for setting in (plain, ours)]
        reference = _reference(found[1], plain, attempt, nvme)
    differs = reference is not None and found[1].largest is not None and reference.losses != found[1].largest.losses
    if args.json:
        print(json.dumps(_as_json(limit, found, reference), indent=2))
    else:
        _print(Console(), limit, found, reference)
    return 1 if differs or found[1].largest is None else 0


def largest(setting: Setting, most: int, limit: int, attempt: Callable[[Setting, int, int | None], Trial]) -> Capacity:
    """Try the largest model first; then halve what is between what trained and what did not."""
    trained: Trial | None = None
    failed: Trial | None = None
    low, high = 0, most + 1  # layers that train, layers that do not (or were not asked for)
    layers = most
    while low < layers < high:
        trial = attempt(setting, layers, limit)
        if trial.error is None:
            trained, low = trial, layers
        else:
            failed, high = trial, layers
        layers = (low + high) // 2
    return Capacity(setting.name, trained, failed)


def try_to_train(race: Race, setting: Setting, limit: int | None, timeout: float) -> Trial:
    """Three steps in a process of its own."""
    shape = Shape(race.layers, race.hidden, race.heads, race.seq)
    if limit is None:
        contender = Contender(race, setting, timeout=timeout)
        _train(contender)
        return _trial(race, shape, contender, None, contender.error)
    with control_group(limit) as group:
        contender = Contender(race, setting, timeout=timeout, command=group.inside(WORKER))
        _train(contender)
        error = contender.error
        if error is not None and group.num_kills:
            error = f"killed by the kernel: more than {format_bytes(limit)} of memory"
        return _trial(race, shape, contender, group.peak_bytes, error)


def _train(contender: Contender) -> None:
    try:
        contender.launch()
        contender.greet()
        contender.start()
        for _ in range(_NUM_STEPS):
            contender.step(drain=True)
    finally:
        contender.kill()


def _trial(race: Race, shape: Shape, contender: Contender, peak: int | None, error: str | None) -> Trial:
    seconds = min((sample.seconds for sample in contender.samples), default=None)
    losses = tuple(sample.loss for sample in contender.samples)
    return Trial(race.layers, shape.num_parameters, losses, seconds, peak, error)


def _reference(
    found: Capacity, plain: Setting, attempt: Callable[[Setting, int, int | None], Trial], nvme: str
) -> Trial | None:
    """The largest model once more, without a limit."""
    if found.largest is None:
        return None
    memory = host_memory().available
    needed = _STATE_BYTES * found.largest.num_parameters
    # A fifth more, for torch and activations; else the engine without a limit, which is plain PyTorch bit for bit.
    setting = plain if 1.2 * needed < memory else Setting("this library", memory // 2, nvme)
    return attempt(setting, found.largest.layers, None)


def _race(layers: int, hidden: int) -> Race:
    return Race(layers, hidden, hidden // _HEAD_WIDTH, batch=1, seq=_SEQ, seed=0, lr=_LR, num_steps=_NUM_STEPS)


@contextmanager
def _swap_space(directory: Path) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="zero-infinity-", dir=directory) as path:
        yield path


def _print(console: Console, limit: int, found: list[Capacity], reference: Trial | None) -> None:
    table = Table("", title=f"the largest model within {format_bytes(limit)}, 3 steps", title_justify="left")
    for heading in ("parameters", "states", "peak", "s/step"):
        table.add_column(heading, justify="right")
    table.add_column("the next one")
    for capacity in found:
        best, failed = capacity.largest, capacity.failed
        row = ["none", "", "", ""]
        if best is not None:
            states = format_bytes(_STATE_BYTES * best.num_parameters)
            peak = format_bytes(best.peak_bytes) if best.peak_bytes is not None else ""
            row = [format_count(best.num_parameters), states, peak, f"{best.seconds or 0.0:.1f}"]
        why = "not tried" if failed is None else f"{format_count(failed.num_parameters)}: {failed.error}"
        table.add_row(capacity.name, *row, why)
    console.print(table)
    ours = found[1].largest
    if ours is not None and reference is not None:
        equal = "equal, bit for bit" if ours.losses == reference.losses else f"DIFFERENT: {reference.losses}"
        losses = ", ".join(f"{loss:.6f}" for loss in ours.losses)
        console.print(f"losses {losses}; of a run without a limit: {reference.error or equal}")


def _as_json(limit: int, found: list[Capacity], reference: Trial | None) -> dict[str, object]:
    return {
        "limit": limit,
        "capacities": [asdict(capacity) for capacity in found],
        "without_a_limit": asdict(reference) if reference is not None else None,
    }
