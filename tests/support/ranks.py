"""Several ranks on this machine: real processes, gloo over loopback.

They are forked from a server that has imported everything, which takes far less time than `torchrun`.
"""

from __future__ import annotations

import atexit
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from support import forkserver
from support.device import BACKENDS
from support.patience import SECONDS

# Far longer than a test waits: a rank that is lost has to be noticed by other means.
_GLOO_SECONDS = 10 * SECONDS


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one rank ended."""

    result: Any
    error: str | None  # "Class: message"
    exit_code: int | None


class RankFailedError(AssertionError):
    """A rank of a test that expects none to fail did."""


def run_ranks(num_ranks: int, script: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call `script(rank, *arguments)` on every rank; what each returned."""
    outcomes = try_ranks(num_ranks, script, *arguments)
    failed = [f"rank {rank}: {o.error or o.exit_code}" for rank, o in enumerate(outcomes) if o.error or o.exit_code]
    if failed:
        raise RankFailedError("\n".join(failed))
    return [outcome.result for outcome in outcomes]


def try_ranks(num_ranks: int, script: Callable[..., Any], *arguments: Any) -> list[Outcome]:
    """As `run_ranks`, for ranks that may fail."""
    context = forkserver.context()
    with tempfile.TemporaryDirectory() as directory:
        pipes = [context.Pipe(duplex=False) for _ in range(num_ranks)]
        processes = [
            context.Process(
                target=_rank, args=(rank, num_ranks, directory, pipes[rank][1], script, arguments), daemon=False
            )
            for rank in range(num_ranks)
        ]
        start = time.monotonic()
        for process in processes:
            process.start()
        for _, sender in pipes:
            sender.close()
        messages: list[tuple[Any, str | None] | None] = [None] * num_ranks
        open_pipes = {receiver: rank for rank, (receiver, _) in enumerate(pipes)}
        while open_pipes and (left := start + SECONDS - time.monotonic()) > 0:
            for receiver in wait(list(open_pipes), left):
                rank = open_pipes.pop(receiver)  # type: ignore[arg-type]
                try:
                    messages[rank] = pickle.loads(receiver.recv_bytes())  # type: ignore[union-attr]
                except EOFError:
                    messages[rank] = (None, None)
        for process in processes:
            process.join(max(0.1, start + SECONDS - time.monotonic()))
        codes = [process.exitcode for process in processes]
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
    return [
        Outcome(message[0], message[1], code)
        if message is not None
        else Outcome(None, f"did not end within {SECONDS:.0f} s", code)
        for message, code in zip(messages, codes, strict=True)
    ]


def _rank(
    rank: int, num_ranks: int, directory: str, pipe: Connection, script: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    os.environ["LOCAL_WORLD_SIZE"] = str(num_ranks)
    torch.distributed.init_process_group(
        BACKENDS,
        init_method=f"file://{Path(directory) / 'store'}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=_GLOO_SECONDS),
    )
    error = result = None
    try:
        result = script(rank, *arguments)
    except BaseException as failure:  # noqa: BLE001 - the test looks at it
        traceback.print_exc()
        error = f"{type(failure).__name__}: {failure}"
        sys.last_value = failure
    # As at the end of an interpreter, which a forked process does not get to.
    atexit._run_exitfuncs()
    # Not pipe.send: torch would send handles of shared memory, which end with this process.
    pipe.send_bytes(pickle.dumps((result, error)))
    pipe.close()
    if error is None:
        torch.distributed.destroy_process_group()
