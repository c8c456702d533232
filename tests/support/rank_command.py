"""`zero-infinity train` on several ranks of this machine, with what torchrun puts into their environment.

They are forked from a server that has torch loaded, which takes far less time than `torchrun`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from support import forkserver
from support.patience import SECONDS
from support.ports import free_port
from zero_infinity.cli.main import main


@dataclass(frozen=True, slots=True)
class Ended:
    """How one rank ended."""

    code: int | None
    out: str
    err: str


def _rank(
    rank: int, num_ranks: int, port: int, folder: str, argv: list[str], change: Callable[[int], None] | None
) -> None:
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
    if change is not None:
        change(rank)
    sys.exit(main(["train", *argv]))


class Running:
    """A command on several ranks."""

    def __init__(
        self, folder: Path, num_ranks: int, *argv: str, change: Callable[[int], None] | None = None, **own: list[str]
    ) -> None:
        self.folder = folder
        context = forkserver.context()
        port = free_port()
        self.processes = [
            context.Process(
                target=_rank,
                args=(rank, num_ranks, port, str(folder), [*argv, *own.get(f"rank{rank}", [])], change),
            )
            for rank in range(num_ranks)
        ]
        for process in self.processes:
            process.start()

    def await_steps(self, number: int) -> None:
        deadline = time.monotonic() + SECONDS
        while (self.folder / "out0").exists() is False or (self.folder / "out0").read_text().count("\n") < number:
            assert time.monotonic() < deadline
            assert self.processes[0].is_alive(), (self.folder / "err0").read_text()
            time.sleep(0.05)

    def end(self) -> list[Ended]:
        deadline = time.monotonic() + SECONDS
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        late = [process for process in self.processes if process.is_alive()]
        for process in late:
            process.kill()
            process.join()
        ended = [
            Ended(p.exitcode, (self.folder / f"out{rank}").read_text(), (self.folder / f"err{rank}").read_text())
            for rank, p in enumerate(self.processes)
        ]
        assert not late, ended
        return ended
