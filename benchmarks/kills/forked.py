"""Runs of `zero-infinity train` whose ranks are forked from a server that has torch loaded.

A rank starts in hundredths of a second instead of seconds, so that a thousand runs can be killed. There is no launcher:
survivors end by themselves.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from benchmarks.free_port import free_port

# Longer than any survivor may live on.
_PATIENCE_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Ended:
    """One rank of a run that has ended."""

    code: int
    errors: str  # what it printed there
    seconds: float  # after the kill, if there was one


def context() -> ForkServerContext:
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(["benchmarks.kills.preloaded"])
    return made


def start_server() -> None:
    """Start the server, so that the time of the first run is that of any other."""
    first = context().Process(target=_nothing)
    first.start()
    first.join()


def _nothing() -> None:
    pass


class Run:
    """One run of several ranks in `folder`, which gets their output."""

    def __init__(self, folder: Path, num_ranks: int, argv: Sequence[str]) -> None:
        self._folder = folder
        self._num_ranks = num_ranks
        port = free_port()
        made = context()
        for stale in folder.glob("joined*"):
            stale.unlink()
        self._processes: list[Any] = [
            made.Process(target=_rank, args=(rank, num_ranks, port, str(folder), list(argv)))
            for rank in range(num_ranks)
        ]
        self.start = time.monotonic()
        for process in self._processes:
            process.start()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    @property
    def has_ended(self) -> bool:
        return not any(process.is_alive() for process in self._processes)

    def await_joined(self) -> None:
        """Return when all ranks have joined: torch itself waits for a rank that never does."""
        while not self.has_ended and len(list(self._folder.glob("joined*"))) < self._num_ranks:
            time.sleep(0.005)

    def kill(self, rank: int, seconds: float) -> bool:
        """Kill a rank after some time; False if it ended before."""
        victim = self._processes[rank]
        victim.join(seconds)
        if victim.exitcode is not None:
            return False
        with contextlib.suppress(ProcessLookupError):  # it ends just now
            os.kill(victim.pid, signal.SIGKILL)
        victim.join()
        return bool(victim.exitcode == -signal.SIGKILL)

    def end(self) -> list[Ended]:
        """How every rank has ended; one that does not is killed, and its time is infinite."""
        since = time.monotonic()
        seconds = [0.0] * self._num_ranks
        running = {process.sentinel: rank for rank, process in enumerate(self._processes)}
        while running and time.monotonic() < since + _PATIENCE_SECONDS:
            for sentinel in wait(list(running), 0.5):
                seconds[running.pop(sentinel)] = time.monotonic() - since
        for rank in running.values():
            seconds[rank] = float("inf")
            self._processes[rank].kill()
        for process in self._processes:
            process.join()
        errors = [(self._folder / f"err{rank}") for rank in range(self._num_ranks)]
        texts = [path.read_text(errors="replace") if path.exists() else "" for path in errors]
        return [
            Ended(process.exitcode, text, took)
            for process, text, took in zip(self._processes, texts, seconds, strict=True)
        ]


def _rank(rank: int, num_ranks: int, port: int, folder: str, argv: list[str]) -> None:
    import torch

    from zero_infinity.cli.main import main

    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(num_ranks),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(num_ranks),
        GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    os.chdir(folder)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{name}{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    torch.set_num_threads(1)
    join = torch.distributed.init_process_group

    def joined(*arguments: Any, **named: Any) -> None:
        join(*arguments, **named)
        Path(f"joined{rank}").touch()

    torch.distributed.init_process_group = joined
    sys.exit(main(["train", *argv]))
