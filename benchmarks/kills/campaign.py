"""One setting, killed many times: the disturbed run is resumed after each kill, and starts over at its end.

After each kill the latest checkpoint must be complete and not older than before, every other rank must have ended and
named the killed one, and nothing may be left. A run that gets to its end must have the undisturbed run's weights, byte
for byte.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.kills.forked import Ended, Run
from zero_infinity.checkpoint.checkpoint_directory import find, has_checkpoint
from zero_infinity.checkpoint.manifest import read

SHAPE = ["--layers", "2", "--hidden", "64", "--heads", "2", "--seq", "32", "--warmup", "2", "--memory", "1300KiB"]
KEEP = 2


@dataclass(frozen=True, slots=True)
class Setting:
    """What is killed."""

    num_ranks: int
    background: bool

    def __str__(self) -> str:
        ranks = "1 rank" if self.num_ranks == 1 else f"{self.num_ranks} ranks"
        return f"{ranks}, saves in the {'background' if self.background else 'foreground'}"


@dataclass(slots=True)
class Figures:
    """What came of it."""

    setting: Setting
    num_kills: int = 0
    num_ends: int = 0  # runs that got to their end, with the same bits
    seconds: list[float] = field(default_factory=list)  # that survivors lived on
    num_unnamed: int = 0  # survivors of a rank that they needed, which did not name it
    left: list[str] = field(default_factory=list)  # behind


class Campaign:
    """Kills one setting. `data` is the text that is trained on."""

    def __init__(self, directory: Path, setting: Setting, steps: int, seed: int, data: Path) -> None:
        self.figures = Figures(setting)
        self._directory = directory
        self._setting = setting
        self._steps = steps
        self._data = data
        self._choice = random.Random(f"{seed} {setting}")
        self._swap = directory / "swap"
        self._swap.mkdir(parents=True)
        self._last = 0  # the step of the latest checkpoint
        self._disturbed = 0

    def run(self, num_kills: int, deadline: float) -> Figures:
        """Kill that many times, or until the deadline, and let the last run get to its end."""
        start = time.monotonic()
        self._to_the_end("undisturbed")
        seconds = time.monotonic() - start
        while self.figures.num_kills < num_kills and time.monotonic() < deadline:
            run = self._start(self._folder)
            if self._setting.num_ranks > 1:
                run.await_joined()
            victim = self._choice.randrange(self._setting.num_ranks)
            killed = run.kill(victim, self._choice.uniform(0, seconds))
            self._look(run, victim if killed else None)
        self._to_the_end(self._folder)
        self._compare(self._folder)
        return self.figures

    @property
    def _folder(self) -> str:
        return f"disturbed{self._disturbed}"

    def _start(self, name: str) -> Run:
        setting, folder = self._setting, self._directory / name
        folder.mkdir(exist_ok=True)
        saving = ["--save", str(folder / "saved"), "--save-every", "1", "--keep", str(KEEP), "--resume"]
        saving += ["--save-in-background"] if setting.background else []
        # A directory of its own that the command makes for swap space would be left, empty, by each kill.
        places = ["--nvme", str(self._swap), "--data", str(self._data)]
        return Run(folder, setting.num_ranks, [*SHAPE, *places, "--steps", str(self._steps), *saving])

    def _to_the_end(self, name: str) -> None:
        for rank, ended in enumerate(self._start(name).end()):
            if ended.code:
                sys.exit(f"{self._setting}: rank {rank} of {name} has failed: {ended.errors}")

    def _look(self, run: Run, victim: int | None) -> None:
        """After a run that was killed, or got to its end."""
        ended, figures = run.end(), self.figures
        if victim is None:
            self._check_codes(ended)
            self._compare(self._folder)
            figures.num_ends += 1
            self._disturbed, self._last = self._disturbed + 1, 0
            return
        figures.num_kills += 1
        survivors = [one for rank, one in enumerate(ended) if rank != victim]
        figures.seconds += [one.seconds for one in survivors]
        # A survivor without an error was at its end, and needed nobody.
        figures.num_unnamed += sum(bool(one.code) and f"rank {victim} " not in one.errors for one in survivors)
        figures.left += self._left_behind(run.pids)
        saved = self._directory / self._folder / "saved"
        step = read(find(saved)).step if has_checkpoint(saved) else 0
        if step < self._last:
            sys.exit(f"{self._setting}: the latest checkpoint is of step {step}, and was of {self._last}")
        self._last = step

    def _check_codes(self, ended: list[Ended]) -> None:
        for rank, one in enumerate(ended):
            if one.code:
                sys.exit(f"{self._setting}: rank {rank} ended with {one.code} and was not killed: {one.errors}")

    def _compare(self, name: str) -> None:
        if _tensor_files(self._directory / name) != _tensor_files(self._directory / "undisturbed"):
            sys.exit(f"{self._directory / name} differs from the undisturbed run")
        names = sorted(path.name for path in (self._directory / name / "saved").iterdir())
        self.figures.left += [each for each in names if each.startswith(".")]
        if len(names) != KEEP + 1:
            self.figures.left.append(f"{name}: {names}")

    def _left_behind(self, pids: list[int]) -> Iterator[str]:
        """Swap files, shared memory and processes of a run that has ended."""
        yield from os.listdir(self._swap)
        yield from (name for name in os.listdir("/dev/shm") if any(f"_{pid}_" in name for pid in pids))
        yield from (f"process {pid}" for pid in pids if os.path.exists(f"/proc/{pid}"))


def _tensor_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in find(folder / "saved").iterdir() if path.suffix == ".safetensors"}
