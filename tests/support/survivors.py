"""Ranks of which one is killed before its n-th word to the others, and how long the others live on.

A word is anything by which ranks talk: a connection that is made, an exchange, a call of the key-value store. The
program goes through every phase: prepare, training, a save, a save in the background, a load, the end. So the words,
counted, are its moments, and killing before each of them kills in every phase.
"""

from __future__ import annotations

import atexit
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zero_infinity as zi
from support import forkserver
from support.patience import SECONDS, wait_until
from support.ports import free_port
from support.rank_scripts import adamw, small_blocks
from zero_infinity.comm import channel, process_group, transport
from zero_infinity.storage.crc32 import crc32

WIDTH = 48


@dataclass(frozen=True, slots=True)
class Survivor:
    """How one rank that was not killed has ended."""

    rank: int
    seconds: float  # after the kill; infinite if it did not end
    error: str | None
    exit_code: int | None


@dataclass(frozen=True, slots=True)
class Kill:
    """Which rank is killed, and before which of its words."""

    num_ranks: int
    rank: int
    word: int
    stage: int = 3
    tcp: bool = False  # rank 0 has the key-value store
    signal: int = signal.SIGKILL  # SIGSTOP: goes on after `pause`
    pause: float = 0.0
    timeout: float = 1800.0  # of the process group
    seconds: float | None = None  # after the start of training, instead of a word
    connection: str | None = None  # while this one is made, after its address was published, instead of a word


@dataclass(frozen=True, slots=True)
class Killed:
    """What came of it."""

    where: str | None  # the killed rank's phase; None if it got to its end first
    survivors: list[Survivor]
    words: int  # of the rank that said most
    weights: set[int]  # checksums of the final ones, of ranks that got there
    stopped: str | None = None  # the error of the rank that was stopped


class _Words:
    """Counts this rank's words."""

    def __init__(self, act: Callable[[], None], at: int) -> None:
        self._lock = threading.Lock()
        self._act, self._at = act, at
        self.count = 0

    def counted(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            with self._lock:
                self.count += 1
                due = self.count == self._at
            if due:
                self._act()
            return real(*arguments, **named)

        return call


class _Publishes(torch.distributed.Store):
    """A store that calls `act` when a key was set."""

    def __init__(self, store: torch.distributed.Store, act: Callable[[], None]) -> None:
        super().__init__()
        self._store, self._act = store, act

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)
        self._act()


def _die_connecting(name: str, act: Callable[[], None]) -> None:
    """Call `act` when this rank has published its address for connections of this name."""
    real = transport.TorchTransport.connect

    def connect(self: transport.TorchTransport, this: str) -> Any:
        if this == name:
            self._torch_store = _Publishes(self._torch_store, act)  # type: ignore[assignment]
        return real(self, this)

    transport.TorchTransport.connect = connect  # type: ignore[method-assign]


def program(rank: int, directory: Path, stage: int, at: Callable[[str], None]) -> int:
    """Everything that ranks do together. Returns a checksum of the weights."""
    small_blocks()
    at("prepare")
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    own = directory / str(rank)
    own.mkdir()
    config = zi.Config(memory="600KiB", nvme=own, stage=stage)
    model, optimizer = zi.prepare(model, adamw(model), config)

    def steps(count: int) -> None:
        for _ in range(count):
            model(torch.randn(4, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    at("training")
    steps(2)
    at("save")
    zi.save(directory / "saved", model, optimizer)
    at("background save")
    zi.save(directory / "saved", model, optimizer, background=True)
    steps(2)
    zi.synchronize(model)
    at("load")
    zi.load(directory / "saved", model, optimizer)
    steps(1)
    at("end")
    zi.synchronize(model)
    return crc32(b"".join(value.numpy().tobytes() for value in model.state_dict().values()))


def _run(rank: int, kill: Kill, directory: str, port: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    os.environ["LOCAL_WORLD_SIZE"] = str(kill.num_ranks)
    where = Path(directory) / "where"
    phase = "start"

    def die() -> None:
        where.write_text(f"{phase}\n{time.monotonic()}")
        os.kill(os.getpid(), kill.signal)

    def at(name: str) -> None:
        nonlocal phase
        phase = name
        if name == "training" and rank == kill.rank and kill.seconds is not None:
            threading.Timer(kill.seconds, die).start()

    transport._CONNECT_SECONDS = 10 * SECONDS  # what gloo waits for is longer than what the test does
    words = _Words(die, kill.word if rank == kill.rank else -1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}" if kill.tcp else f"file://{Path(directory) / 'store'}",
        rank=rank,
        world_size=kill.num_ranks,
        timeout=timedelta(seconds=kill.timeout),
    )
    for owner, name in (
        (channel.Channel, "_exchange"),
        (process_group.RankGroup, "channel"),
        (transport.TorchTransport, "connect"),
    ):
        setattr(owner, name, words.counted(getattr(owner, name)))
    if rank == kill.rank and kill.connection is not None:
        _die_connecting(kill.connection, die)
    error, weights = None, 0
    try:
        weights = program(rank, Path(directory), kill.stage, at)
    except BaseException as failure:  # noqa: BLE001 - the test looks at it
        traceback.print_exc()
        error = f"{type(failure).__name__}: {failure}"
        sys.last_value = failure
    threading._shutdown()  # type: ignore[attr-defined]  # as at the end of an interpreter
    atexit._run_exitfuncs()
    pipe.send_bytes(pickle.dumps((error, words.count, weights)))
    pipe.close()
    if error is None:
        torch.distributed.destroy_process_group()


def run(kill: Kill, *, patience: float = SECONDS) -> Killed:
    """Run ranks of which one is killed, or stopped for a while."""
    context = forkserver.context()
    with tempfile.TemporaryDirectory() as directory:
        port = free_port()
        pipes = [context.Pipe(duplex=False) for _ in range(kill.num_ranks)]
        processes = [
            context.Process(target=_run, args=(rank, kill, directory, port, pipes[rank][1]))
            for rank in range(kill.num_ranks)
        ]
        for process in processes:
            process.start()
        for _, sender in pipes:
            sender.close()
        where = Path(directory) / "where"
        if kill.signal == signal.SIGSTOP:
            _resume(processes[kill.rank], where, kill.pause)
        ended = _ends(processes, patience)
        messages = {rank: _message(receiver) for rank, (receiver, _) in enumerate(pipes)}
        phase, moment = where.read_text().split("\n") if where.exists() else (None, "nan")
    told = {rank: message for rank, message in messages.items() if message is not None}
    errors = {rank: error for rank, (error, _, _) in told.items()}
    return Killed(
        phase,
        [
            Survivor(rank, ended.get(rank, float("inf")) - float(moment), errors.get(rank), processes[rank].exitcode)
            for rank in range(kill.num_ranks)
            if rank != kill.rank
        ],
        max((count for _, count, _ in told.values()), default=0),
        {weights for error, _, weights in told.values() if error is None},
        errors.get(kill.rank),
    )


def _ends(processes: list[Any], patience: float) -> dict[int, float]:
    """When each process ended; those that do not are killed."""
    ended: dict[int, float] = {}
    running = {process.sentinel: rank for rank, process in enumerate(processes)}
    give_up = time.monotonic() + patience
    while running and time.monotonic() < give_up:
        for sentinel in wait(list(running), 0.5):
            ended[running.pop(sentinel)] = time.monotonic()  # type: ignore[arg-type]
    for process in processes:
        process.kill()
        process.join()
    return ended


def _resume(process: Any, where: Path, pause: float) -> None:
    wait_until(where.exists)
    time.sleep(pause)
    os.kill(process.pid, signal.SIGCONT)


def _message(receiver: Connection) -> tuple[str | None, int, int] | None:
    """What a rank said at its end; None if it was killed before."""
    try:
        message: tuple[str | None, int, int] = pickle.loads(receiver.recv_bytes())
    except EOFError:
        return None
    return message
