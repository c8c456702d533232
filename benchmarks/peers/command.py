"""The benchmark `peers`: this library relative to plain PyTorch, DeepSpeed, FSDP2 and memory-mapped files.

Every contender is a script of `peers/scripts` in its own process. Steps are interleaved, and a process is stopped while
others are measured. All of them at once would not fit in memory, so they run in heats, and each heat includes plain
PyTorch: a ratio is to plain PyTorch's step of the same round. Several contests vary batch and model, because compute
grows with the batch while the cost of offloading does not, and because a process's fixed memory hides that of a small
model. A contender that fails is a row with its error; the others go on.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from benchmarks.free_port import free_port
from benchmarks.peers import plot
from benchmarks.peers.report import Building, Contest, Entry, PeersReport
from benchmarks.provenance import provenance
from benchmarks.turns.contender import Contender
from benchmarks.turns.messages import Race, Setting
from benchmarks.turns.options import SWAP_PREFIX, add_turns, race_of, swap_directory
from benchmarks.turns.rounds import compete
from zero_infinity.cli import signals
from zero_infinity.cli.progress_display import status_lines
from zero_infinity.errors import ConfigError

_BUILD_SECONDS = 1800.0  # it takes 2 to 6 minutes on two cores
_BUILD = """
from deepspeed.accelerator import get_accelerator
for name in ("ShareMemCommBuilder", "CPUAdamBuilder", "AsyncIOBuilder"):
    get_accelerator().create_op_builder(name).load(verbose=False)
"""
_CONTESTS = "6x1024:4x256,6x1024:1x64,48x512:1x64"
_EPILOG = """\
examples:
  python -m benchmarks peers --nvme /mnt/nvme --out bench-out
  python -m benchmarks peers --only 1/8,mapped,fsdp2 --steps 5 --contests 6x1024:1x64

DeepSpeed has to be installed in the same environment, with a C++ compiler, ninja and libaio's headers:
`make bench-peers` makes such an environment. Without it, its rows say so.
"""


@dataclass(frozen=True, slots=True)
class Peer:
    """One way to train. `fraction`: of the states that its memory budget is, where it has one."""

    key: str
    name: str
    script: str
    fraction: float | None = None
    on_drive: bool = False
    distributed: bool = False

    @property
    def is_ours(self) -> bool:
        return self.script == "ours"

    @property
    def needs_building(self) -> bool:
        return self.script.startswith("deepspeed")


PLAIN = Peer("plain", "plain PyTorch", "plain")
# Who is to be compared takes turns in one heat. Pages of mapped files are written by the kernel whenever it likes, also
# in the turns of others: so they have a heat of their own.
HEATS = (
    (
        Peer("fits", "this library, all fits in RAM", "ours", 2.0),
        Peer("1/2", "this library, NVMe, 1/2 in RAM", "ours", 1 / 2, on_drive=True),
        Peer("1/8", "this library, NVMe, 1/8 in RAM", "ours", 1 / 8, on_drive=True),
        Peer("ds-cpu", "DeepSpeed, all in RAM", "deepspeed_cpu", distributed=True),
        Peer("ds-nvme", "DeepSpeed, optimizer on NVMe", "deepspeed_nvme", on_drive=True, distributed=True),
        Peer("ds-params", "DeepSpeed, all on NVMe", "deepspeed_nvme_params", on_drive=True, distributed=True),
        Peer(
            "ds-pipe", "DeepSpeed, all on NVMe, pipelined", "deepspeed_nvme_pipelined", on_drive=True, distributed=True
        ),
    ),
    (
        Peer("again", "plain PyTorch again", "plain"),
        Peer("fsdp2", "FSDP2, CPU offload", "fsdp2", distributed=True),
    ),
    (Peer("mapped", "by hand: mapped files", "mapped", on_drive=True),),
)
PEERS = {peer.key: peer for heat in HEATS for peer in heat}
# Who is in the contests of other models than the first: whoever is compared with DeepSpeed's fastest. A whole first
# heat of a larger model would not fit in memory.
_WITH_OTHER_MODELS = ("fits", "1/2", "1/8", "ds-cpu")


@dataclass(frozen=True, slots=True)
class Subject:
    """What is trained in one contest."""

    layers: int
    hidden: int
    batch: int
    seq: int

    @property
    def network(self) -> tuple[int, int]:
        return self.layers, self.hidden


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "peers",
        help="a training step against DeepSpeed, FSDP2 and memory-mapped files",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_turns(parser)
    parser.add_argument("--contests", default=_CONTESTS, metavar="LIST", help="blocks x width : sequences x bytes in "
                        f"each ({_CONTESTS})")  # fmt: skip
    parser.add_argument("--only", metavar="LIST", help=f"of {','.join(PEERS)} (all; with models other than the first, "
                        f"{','.join(_WITH_OTHER_MODELS)})")  # fmt: skip
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    subjects = _subjects(args.contests)
    heats = [_chosen(args.only, is_first_model=subject.network == subjects[0].network) for subject in subjects]
    with signals.watched(), swap_directory(args.nvme) as nvme, extensions_folder() as extensions:
        origin = provenance(nvme)
        with status_lines() as say:
            building = None
            if any(peer.needs_building for contest in heats for heat in contest for peer in heat):
                say("DeepSpeed compiles its extensions")
                building = build_extensions(extensions)
            contests = []
            for subject, contest in zip(subjects, heats, strict=True):
                vars(args).update(asdict(subject))  # as if they were options: `race_of` takes them from there
                contests.append(_hold(args, contest, nvme, extensions, say))
    report = PeersReport(origin, building, contests)
    if args.json:
        print(report.to_json())
    else:
        report.print(Console())
    if args.out is not None:
        _write(report, args.out)
    return 1 if any(contest.our_faults() for contest in contests) else 0


def _hold(
    args: argparse.Namespace, heats: list[list[Peer]], nvme: str, extensions: str, say: Callable[[str], None]
) -> Contest:
    """All heats of one contest."""
    race = race_of(args)
    results = []
    for number, heat in enumerate(heats, 1):
        names = ", ".join(peer.name for peer in heat)
        what = f"{race.layers} layers x {race.hidden}, batch {race.batch} x {race.seq}"
        say(f"{what}, heat {number} of {len(heats)}: {names}")
        entrants = (PLAIN, *heat)
        with tempfile.TemporaryDirectory(prefix=SWAP_PREFIX, dir=nvme) as space:
            contenders = [
                make_contender(peer, race, Path(space, str(place)), extensions, args.timeout)
                for place, peer in enumerate(entrants)
            ]
            compete(contenders, race.num_steps, say, patience=args.patience)
        pairs = zip(entrants, contenders, strict=True)
        results.append([Entry(peer.key, peer.script, peer.is_ours, contender) for peer, contender in pairs])
    return Contest(race, args.warmup, results)


def _chosen(only: str | None, *, is_first_model: bool) -> list[list[Peer]]:
    """The heats of one contest."""
    keys = [key.strip() for key in only.split(",") if key.strip()] if only is not None else list(PEERS)
    for key in keys:
        if key not in PEERS:
            raise ConfigError(f"--only {only}: {key!r} is not one of {', '.join(PEERS)}")
    if only is None and not is_first_model:
        keys = list(_WITH_OTHER_MODELS)
    return [chosen for heat in HEATS if (chosen := [peer for peer in heat if peer.key in keys])]


def _subjects(text: str) -> list[Subject]:
    """Of a list such as 6x1024:4x256,48x512:1x64."""
    number = r"([1-9]\d*)"
    found = [re.fullmatch(f"{number}x{number}:{number}x{number}", part.strip()) for part in text.split(",")]
    subjects = [Subject(*map(int, match.groups())) for match in found if match]
    if len(subjects) < len(found):
        raise ConfigError(
            f"--contests {text}: blocks x width : sequences x bytes in each, with commas between them, as {_CONTESTS}"
        )
    return subjects


def make_contender(
    peer: Peer,
    race: Race,
    space: Path,
    extensions: str,
    timeout: float,
    wrap: Callable[[Sequence[str]], list[str]] = list,
) -> Contender:
    """The process of one peer; `wrap` changes its command, say into one inside a control group."""
    memory = int(race.state_bytes * peer.fraction) if peer.fraction is not None else None
    if peer.on_drive:
        space.mkdir(parents=True, exist_ok=True)
    setting = Setting(peer.name, memory, str(space) if peer.on_drive else None, peer.fraction)
    command = wrap([sys.executable, "-m", f"benchmarks.peers.scripts.{peer.script}"])
    environment = _launcher(extensions) if peer.distributed else None
    return Contender(race, setting, timeout=timeout, command=command, environment=environment)


def build_extensions(folder: str) -> Building:
    """Let DeepSpeed compile what it needs, once, before anybody is measured."""
    started = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, "-c", _BUILD],
            env={**os.environ, **_launcher(folder)},
            capture_output=True,
            text=True,
            timeout=_BUILD_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Building(_BUILD_SECONDS, f"not built in {_BUILD_SECONDS:g} s")
    error = (done.stderr.strip().splitlines() or ["no message"])[-1] if done.returncode else None
    return Building(time.monotonic() - started, error)


@contextmanager
def extensions_folder() -> Iterator[str]:
    """Of this run alone: a build that was killed leaves a lock, for which the next one would wait for ever."""
    with tempfile.TemporaryDirectory(prefix="zero-infinity-extensions-") as folder:
        yield folder


def _launcher(extensions: str) -> dict[str, str]:
    """What a launcher says to the only rank."""
    port = free_port()
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return {**rank, "DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": extensions}


def _write(report: PeersReport, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    stem = directory / "peers"
    stem.with_suffix(".json").write_text(report.to_json() + "\n", encoding="utf-8")
    drawn = plot.draw(report, stem)
    print(f"written: {stem}.json{''.join(f', {file.suffix}' for file in drawn)}", file=sys.stderr)
