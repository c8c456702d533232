"""One contender of `bench train`, seen from the command: a process that takes a step when it is told to.

Owns the process's life and the protocol: one JSON object a line, over the pipes of its stdin and stdout. What is said,
and by whom, is in `Contender`; what the process does is `bench_worker`. Imports no torch.

Between its turns a contender is stopped (SIGSTOP), so that no thread of it works, reads ahead or writes back while
the others are measured: neither to its advantage nor to their cost. When its next turn begins, it goes on exactly where
it was, as it would have without a pause.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from zero_infinity.cli.process_tree import Usage, usage

WORKER = (sys.executable, "-m", "zero_infinity.cli.bench_worker")

_STOP_SECONDS = 2.0  # how long a stop may take: a thread that is in a direct transfer stops after it
_END_SECONDS = 10.0
_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


@dataclass(frozen=True, slots=True)
class Race:
    """What every contender trains, alike."""

    layers: int
    hidden: int
    heads: int
    batch: int
    seq: int
    seed: int
    lr: float
    num_steps: int


@dataclass(frozen=True, slots=True)
class Setting:
    """What one contender does differently. Without `memory` it is plain PyTorch."""

    name: str
    memory: int | None = None
    nvme: str | None = None  # a directory; None: the states stay in RAM
    fraction: float | None = None  # of the states that `memory` is, where that was asked for
    # Of ablations and growth (bench_variant, bench_ranks): further settings, parts of the engine that are left out,
    # the speed of emulated links, how many ranks share the batch, and the memory of an emulated device.
    options: Mapping[str, object] = field(default_factory=dict)
    without: str | None = None
    bytes_per_second: float | None = None
    ranks: int = 1
    device_memory: int | None = None

    @property
    def is_plain(self) -> bool:
        return self.memory is None


@dataclass(frozen=True, slots=True)
class Start:
    """What a contender says when it can take its first step."""

    num_parameters: int
    weight_bytes: int
    build_seconds: float  # making the model; with the engine straight into its tiers
    prepare_seconds: float  # zi.prepare; nothing for plain PyTorch
    torch: str
    num_threads: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One step, as its contender measured it."""

    seconds: float
    cpu_seconds: float  # of all its threads
    waited_seconds: float
    drain_seconds: float  # the part of `seconds` after step(), for updates that were still under way
    bytes_read: int
    bytes_written: int
    others_cpu_seconds: float  # what the machine did for others meanwhile
    loss: float


@dataclass(frozen=True, slots=True)
class Finish:
    """What a contender says at the end."""

    peak_rss: int
    memory_peak: int  # held by the engine; 0 for plain PyTorch
    num_deviations: int
    weights: str  # checksum of every parameter's final bits


class ContenderError(Exception):
    """A contender cannot go on; the message is for the table."""


class Contender:
    """The process. `launch`, `greet`, `start`, a `step` as often as it has steps, `finish`; and `kill` at any time."""

    def __init__(
        self,
        race: Race,
        setting: Setting,
        *,
        timeout: float,
        command: Sequence[str] = WORKER,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.setting = setting
        self.start_info: Start | None = None
        self.start_seconds: float | None = None  # from launch to the first step, imports included
        self.samples: list[Sample] = []
        self.usages: list[Usage] = []  # of its tree of processes: when it had started, and after each step
        self.finish_info: Finish | None = None
        self.error: str | None = None
        self._race = race
        self._timeout = timeout
        self._command = command
        self._environment = {**os.environ, **environment} if environment else None
        self._launched = 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None
        self._unread = b""

    @property
    def alive(self) -> bool:
        return self.error is None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    # Each of these notes an error in `error` instead of raising it: the others go on.

    def launch(self) -> None:
        """Begin the process, which then imports torch; does not wait for that."""
        self._attempt(self._launch)

    def greet(self) -> None:
        """Wait until it has done so, and waits for orders."""
        self._attempt(self._greet)

    def start(self) -> None:
        """Let it build its model."""
        self._attempt(self._start)

    def step(self, *, drain: bool) -> None:
        self._attempt(lambda: self._step(drain=drain))

    def finish(self) -> None:
        self._attempt(self._finish)
        self.kill()

    def _attempt(self, action: Callable[[], None]) -> None:
        if self.error is not None:
            return
        try:
            action()
        except (ContenderError, OSError, ValueError, TypeError, KeyError) as error:
            self.error = str(error) or type(error).__name__
            self.kill()

    def _launch(self) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `kill`
        # A group of its own: Ctrl-C on the terminal is for the command, which then ends its contenders.
        self._launched = time.monotonic()
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=self._environment,
            process_group=0,
        )

    def _greet(self) -> None:
        self._hear()

    def _start(self) -> None:
        self._say({"race": asdict(self._race), "setting": asdict(self.setting), "parent": os.getpid()})
        self.start_info = Start(**self._hear())
        self.start_seconds = time.monotonic() - self._launched
        self._stop()

    def _step(self, *, drain: bool) -> None:
        self._continue()
        self._say({"do": "step", "drain": drain})
        self.samples.append(Sample(**self._hear()))
        self._stop()

    def _finish(self) -> None:
        self._continue()
        self._say({"do": "finish"})
        self.finish_info = Finish(**self._hear())
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._running().wait(_END_SECONDS)

    def kill(self) -> None:
        """End the process, whatever it does, and wait for its end. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):  # its whole group: a compiler that it started, too
                    os.killpg(process.pid, signal.SIGKILL)
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):  # what it did not read any more
                        pipe.close()
            process.wait()
        if self._log is not None:
            self._log.close()
            self._log = None

    # ------------------------------------------------------------------ the protocol

    def _say(self, message: Mapping[str, object]) -> None:
        process = self._running()
        try:
            if process.stdin is not None:
                process.stdin.write(json.dumps(message).encode() + b"\n")
                process.stdin.flush()
        except BrokenPipeError:
            raise self._death() from None

    def _hear(self) -> dict[str, Any]:
        """The next line, as an object."""
        deadline = time.monotonic() + self._timeout
        process = self._running()
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout or 0, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise ContenderError(f"no answer in {self._timeout:g} s")
                received = os.read(process.stdout.fileno() if process.stdout else 0, 1 << 16)
                if not received:
                    raise self._death()
                self._unread += received
        line, _, self._unread = self._unread.partition(b"\n")
        answer = json.loads(line)
        if not isinstance(answer, dict):
            raise ContenderError(f"it answered {line[:80]!r}")
        if "error" in answer:
            raise ContenderError(answer["error"])
        return answer

    def _death(self) -> ContenderError:
        try:
            code = self._running().wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            return ContenderError("it closed its output")
        how = f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return ContenderError(how + self._last_words())

    def _last_words(self) -> str:
        if self._log is None:
            return ""
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return f": {lines[-1]}" if lines else ""

    # ------------------------------------------------------------------ turns

    def _stop(self) -> None:
        """Stop all of its threads and processes, wait until they stand still, and note what was used until then."""
        pid = self._running().pid
        self._stand_still(pid)
        self.usages.append(usage(pid))

    @staticmethod
    def _stand_still(pid: int) -> None:
        os.killpg(pid, signal.SIGSTOP)
        deadline = time.monotonic() + _STOP_SECONDS
        while os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
            if time.monotonic() > deadline:
                return  # it stops when it can
            time.sleep(0.0002)

    def _continue(self) -> None:
        os.killpg(self._running().pid, signal.SIGCONT)

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise ContenderError("it does not run")
        return self._process


def end_with(parent: int) -> None:
    """For the process: die with the parent, also while stopped. Elsewhere than on Linux the end of stdin has to do."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before
            os._exit(1)


def machine_cpu_seconds() -> float:
    """What all processes have used so far; 0 where it is not told."""
    with contextlib.suppress(OSError):
        user, nice, system, _, _, irq, soft_irq = map(int, Path("/proc/stat").read_text().split(maxsplit=8)[1:8])
        return (user + nice + system + irq + soft_irq) / os.sysconf("SC_CLK_TCK")
    return 0.0
