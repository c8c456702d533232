"""One contender, seen from the benchmark: a process that takes a step when it is told to.

Owns the life of the process and the conversation with it (`messages.py`); what the process does is in `worker.py`.
Imports no torch.

While others are measured a contender is stopped (SIGSTOP), so that none of its threads computes, reads ahead or writes
back, neither to its advantage nor to the others' cost. On its next turn it continues where it was.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from benchmarks.turns.messages import FinishReport, Race, Sample, Setting, StartReport
from benchmarks.turns.process_usage import Usage, usage

WORKER = (sys.executable, "-m", "benchmarks.turns.worker")

_STOP_SECONDS = 2.0  # how long a stop may take: a thread that is in a direct transfer stops after it
_END_SECONDS = 10.0
_ROOT = Path(__file__).parents[2]


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
        self.start_info: StartReport | None = None
        self.start_seconds: float | None = None  # from launch to the first step, imports included
        self.samples: list[Sample] = []
        self.usages: list[Usage] = []  # of its tree of processes: when it had started, and after each step
        self.finish_info: FinishReport | None = None
        self.error: str | None = None
        self._race = race
        self._timeout = timeout
        self._command = command
        # The process finds this package wherever it is started.
        path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
        self._environment = {**os.environ, **(environment or {}), "PYTHONPATH": path}
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
        self.start_info = StartReport(**self._hear())
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
        self.finish_info = FinishReport(**self._hear())
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
