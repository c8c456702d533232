"""The benchmark `capacity`: the largest model that trains within a real memory limit.

The models differ only in their number of layers. Each trial is a process in a control group with the limit. It builds
the model and takes three steps, or fails: killed by the kernel, or with an error of its own. The largest model is tried
first, then the search halves. This library takes six steps, because it learns the order of blocks and the early updates
in the first three; what its fastest step moves is shown next to the drive's own speed. The largest model is trained
again without the limit, by plain PyTorch if it fits in the machine, and the losses must be equal, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.control_group import control_group
from benchmarks.drive_alone import drive_alone
from benchmarks.peers.command import PEERS, Peer, build_extensions, extensions_folder, make_contender
from benchmarks.provenance import keep, provenance
from benchmarks.tables import aligned
from benchmarks.turns.contender import WORKER, Contender
from benchmarks.turns.messages import STATE_BYTES, Race, Setting
from zero_infinity.byte_sizes import format_bytes, format_count, format_seconds, parse_bytes
from zero_infinity.cli import signals
from zero_infinity.cli.progress_display import status_lines
from zero_infinity.errors import ConfigError
from zero_infinity.machine import host_memory
from zero_infinity.storage.io_speed import IOWorkload

_NUM_STEPS = 3
_STEADY_STEPS = 6
_DRIVE_BYTES = 8 << 30
_SEQ = 32
_HEAD_WIDTH = 64
_LR = 1e-4
_GRADIENT_BYTES = 4  # a parameter; its states are STATE_BYTES
# The engine's part of the limit: the rest is for torch itself (0.3 GiB) and activations.
_ENGINE_SHARE = 0.45
_EPILOG = """\
examples:
  python -m benchmarks capacity /mnt/nvme --limit 2GiB
  python -m benchmarks capacity /mnt/nvme --limit 2GiB --peers --out bench-out
"""
# What other systems are tried; those that keep everything in RAM cannot do better than plain PyTorch.
_PEERS = ("fsdp2", "mapped", "ds-cpu", "ds-nvme", "ds-params")


@dataclass(frozen=True, slots=True)
class Way:
    """One way to train: a setting of the benchmark `train`'s worker, or a peer's script."""

    name: str
    setting: Setting | None = None
    peer: Peer | None = None
    num_steps: int = _NUM_STEPS


@dataclass(frozen=True, slots=True)
class Trial:
    """One model in one process."""

    layers: int
    num_parameters: int
    losses: tuple[float, ...]
    seconds: float | None  # of the fastest step
    start_seconds: float | None  # from the process's launch to its first step
    peak_bytes: int | None  # of its control group: memory of all kinds
    error: str | None
    moved_bytes: int = 0  # in the fastest step, from and to the drive


@dataclass(frozen=True, slots=True)
class Capacity:
    """The largest model of one way to train, and why the next one failed."""

    name: str
    largest: Trial | None
    failed: Trial | None


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "capacity",
        help="the largest model within a real memory limit",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", metavar="DIR", type=Path, help="where the swap space goes")
    parser.add_argument("--limit", default="2GiB", metavar="SIZE", help="of the control group (2GiB)")
    parser.add_argument(
        "--layers", type=int, default=112, metavar="N", help="the largest model that is tried (112: 1.4B)"
    )
    parser.add_argument("--hidden", type=int, default=1024, metavar="N", help="its width (1024: 13M a layer)")
    parser.add_argument(
        "--peers", action="store_true", help="also FSDP2, mapped files and DeepSpeed: see the benchmark peers"
    )
    parser.add_argument("--timeout", type=float, default=600, metavar="SECONDS", help="for one step (600)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write capacity.json there")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    limit = parse_bytes(args.limit)
    if not args.directory.is_dir():
        raise ConfigError(f"{args.directory} is not a directory")
    if args.layers < 1 or args.hidden < _HEAD_WIDTH or args.hidden % _HEAD_WIDTH:
        raise ConfigError(f"--layers is at least 1, and --hidden a multiple of {_HEAD_WIDTH}")
    origin = provenance(args.directory)
    with signals.watched(), status_lines() as say, _swap_space(args.directory) as nvme, extensions_folder() as built:

        def attempt(way: Way, layers: int, limit: int | None) -> Trial:
            where = f"within {format_bytes(limit)}" if limit is not None else "without a limit"
            what = f"{way.name}, {layers} layers {where}"
            say(f"{what}: starting")
            trainee = Trainee(_race(layers, args.hidden, way.num_steps), way, nvme, built, args.timeout)
            result = trainee.train(limit, lambda step: say(f"{what}: {step}"))
            say(f"{what}: {result.error or f'{format_seconds(result.seconds or 0.0)} a step'}")
            return result

        plain = Way("plain PyTorch", Setting("plain PyTorch"))
        ours = Way("this library", Setting("this library", int(limit * _ENGINE_SHARE), nvme), num_steps=_STEADY_STEPS)
        ways = [plain, ours]
        if args.peers:
            say("DeepSpeed compiles its extensions")
            build_extensions(built)
            ways += [Way(PEERS[key].name, peer=PEERS[key]) for key in _PEERS]
        found = [largest(way, args.layers, limit, attempt) for way in ways]
        reference = _reference(found[1], replace(plain, num_steps=_STEADY_STEPS), attempt, nvme)
        drive = None
        if found[1].largest is not None and found[1].largest.moved_bytes:
            say("the drive alone")
            drive = drive_alone(Path(nvme), _DRIVE_BYTES, IOWorkload.MIXED)
    differs = reference is not None and found[1].largest is not None and reference.losses != found[1].largest.losses
    content = json.dumps(
        {
            **asdict(origin),
            "limit": limit,
            "hidden": args.hidden,
            "capacities": [asdict(capacity) for capacity in found],
            "without_a_limit": asdict(reference) if reference is not None else None,
            "drive": drive,  # bytes a second, half read and half written
        },
        indent=1,
    )
    if args.json:
        print(content)
    else:
        _print(Console(), limit, found, reference, drive)
    keep(content, "capacity", args.out)
    return 1 if differs or found[1].largest is None else 0


def largest(way: Way, most: int, limit: int, attempt: Callable[[Way, int, int | None], Trial]) -> Capacity:
    """Try the largest model first; then halve what is between what trained and what did not."""
    trained: Trial | None = None
    failed: Trial | None = None
    low, high = 0, most + 1  # layers that train, layers that do not (or were not asked for)
    layers = most
    while low < layers < high:
        trial = attempt(way, layers, limit)
        if trial.error is None:
            trained, low = trial, layers
        else:
            failed, high = trial, layers
        layers = (low + high) // 2
    return Capacity(way.name, trained, failed)


@dataclass(frozen=True, slots=True)
class Trainee:
    """One model in a process of its own, which takes a few steps."""

    race: Race
    way: Way
    nvme: str
    extensions: str
    timeout: float

    def train(self, limit: int | None, say: Callable[[str], None]) -> Trial:
        with tempfile.TemporaryDirectory(dir=self.nvme) as space:
            if limit is None:
                contender = self._contender(list, space)
                _train(contender, self.race.num_steps, say)
                return self._trial(contender, None, contender.error)
            with control_group(limit) as group:
                contender = self._contender(group.inside, space)
                _train(contender, self.race.num_steps, say)
                error = contender.error
                if error is not None and group.num_kills:
                    error = f"killed by the kernel: more than {format_bytes(limit)} of memory"
                return self._trial(contender, group.peak_bytes, error)

    def _contender(self, wrap: Callable[[Sequence[str]], list[str]], space: str) -> Contender:
        if self.way.peer is not None:
            return make_contender(self.way.peer, self.race, Path(space), self.extensions, self.timeout, wrap)
        setting = self.way.setting or Setting(self.way.name)
        return Contender(self.race, setting, timeout=self.timeout, command=wrap(WORKER))

    def _trial(self, contender: Contender, peak: int | None, error: str | None) -> Trial:
        race = self.race
        fastest = min(contender.samples, key=lambda sample: sample.seconds, default=None)
        losses = tuple(sample.loss for sample in contender.samples)
        if error is None and not all(map(math.isfinite, losses)):
            error = f"a loss is not finite: {losses}"
        count = race.shape.num_parameters
        seconds = fastest.seconds if fastest is not None else None
        moved = fastest.bytes_read + fastest.bytes_written if fastest is not None else 0
        return Trial(race.layers, count, losses, seconds, contender.start_seconds, peak, error, moved)


def _train(contender: Contender, num_steps: int, say: Callable[[str], None]) -> None:
    try:
        contender.launch()
        contender.greet()
        contender.start()
        for number in range(1, num_steps + 1):
            contender.step(drain=True)
            if contender.alive:
                say(f"step {number} of {num_steps}, {format_seconds(contender.samples[-1].seconds)}")
    finally:
        contender.kill()


def _reference(
    found: Capacity, plain: Way, attempt: Callable[[Way, int, int | None], Trial], nvme: str
) -> Trial | None:
    """The largest model once more, without a limit."""
    if found.largest is None:
        return None
    memory = host_memory().available
    needed = (STATE_BYTES + _GRADIENT_BYTES) * found.largest.num_parameters
    # A fifth more, for torch and activations; else the engine without a limit, which is plain PyTorch bit for bit.
    engine = Way("this library", Setting("this library", memory // 2, nvme), num_steps=plain.num_steps)
    return attempt(plain if 1.2 * needed < memory else engine, found.largest.layers, None)


def _race(layers: int, hidden: int, num_steps: int) -> Race:
    return Race(layers, hidden, hidden // _HEAD_WIDTH, batch=1, seq=_SEQ, seed=0, lr=_LR, num_steps=num_steps)


@contextmanager
def _swap_space(directory: Path) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="zero-infinity-", dir=directory) as path:
        yield path


def _print(console: Console, limit: int, found: list[Capacity], reference: Trial | None, drive: float | None) -> None:
    """A table on a terminal, aligned lines elsewhere."""
    title = f"the largest model within {format_bytes(limit)}, {_NUM_STEPS} steps or more"
    headings = ["", "parameters", "states", "peak", "s/step", "start", "the next one"]
    rows = [_row(capacity) for capacity in found]
    if console.is_terminal:
        table = Table(title=title, title_justify="left")
        for number, heading in enumerate(headings):
            table.add_column(heading, justify="right" if 0 < number < len(headings) - 1 else "left")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    else:
        print(f"{title}\n{aligned([headings, *rows])}", flush=True)
    ours = found[1].largest
    if ours is not None and reference is not None:
        equal = "equal, bit for bit" if ours.losses == reference.losses else f"DIFFERENT: {reference.losses}"
        losses = ", ".join(f"{loss:.6f}" for loss in ours.losses)
        told = f"losses {losses}; of a run without a limit: {reference.error or equal}"
        console.print(told, markup=False, highlight=False, soft_wrap=True)
    if ours is not None and ours.seconds and drive is not None:
        rate = ours.moved_bytes / ours.seconds
        told = f"{format_bytes(ours.moved_bytes)} to and from the drive in its fastest step, {rate / 1e9:.2f} GB/s: "
        told += f"{rate / drive:.2f} of what the drive does alone"
        console.print(told, markup=False, highlight=False, soft_wrap=True)


def _row(capacity: Capacity) -> list[str]:
    best, failed = capacity.largest, capacity.failed
    row = ["none", "", "", "", ""]
    if best is not None:
        states = format_bytes(STATE_BYTES * best.num_parameters)
        peak = format_bytes(best.peak_bytes) if best.peak_bytes is not None else ""
        start = format_seconds(best.start_seconds or 0.0)
        row = [format_count(best.num_parameters), states, peak, f"{best.seconds or 0.0:.1f}", start]
    why = "not tried" if failed is None else f"{format_count(failed.num_parameters)}: {failed.error}"
    return [capacity.name, *row, why]
