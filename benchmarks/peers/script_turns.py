"""What the scripts of all peers share: what to train, on which data, and when to take a step.

A script is an ordinary loop over batches. `Turns.batches` yields one each time the benchmark asks for a step, and
`Turns.stepped` reports what the step took. An exception is reported, too. The protocol is in `turns/messages.py`.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from benchmarks.turns.child_process import end_with, machine_cpu_seconds, peak_rss
from benchmarks.turns.messages import FinishReport, Race, Sample, Setting, StartReport
from zero_infinity.models.text import ByteBatches, standard_library


class Turns:
    """The conversation with the command. Made once, when everything is imported."""

    def __init__(self) -> None:
        # From here on descriptor 1 is stderr, so that a print is not mistaken for an answer.
        self._answers = open(os.dup(1), "w", encoding="utf-8")  # noqa: SIM115 - for the life of the process
        os.dup2(2, 1)
        sys.excepthook = self._tell
        self._answer({"process": os.getpid()})
        order = json.loads(sys.stdin.readline())
        end_with(order["parent"])
        self._race = Race(**order["race"])
        setting = Setting(**order["setting"])
        self._started = time.perf_counter()
        self._drain = False
        self.shape = self._race.shape
        self.seed, self.lr, self.batch = self._race.seed, self._race.lr, self._race.batch
        self.memory = setting.memory or 0
        self.directory = setting.nvme or ""

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs and targets, one pair for each step that the command asks for."""
        source = ByteBatches(standard_library(), self._race.batch, self._race.seq, self._race.seed)
        batches = [next(source) for _ in range(self._race.num_steps)]
        self._answer(asdict(self._start()))
        for line in sys.stdin:
            order = json.loads(line)
            if order["do"] == "finish":
                self._answer(asdict(FinishReport(peak_rss(), 0, 0, "")))
                return
            self._busy, self._cpu, self._wall = machine_cpu_seconds(), time.process_time(), time.perf_counter()
            yield batches.pop(0)

    def stepped(self, loss: Tensor) -> None:
        """The step is over; `loss` is its loss."""
        value = loss.item()
        wall, cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu
        others = max(0.0, machine_cpu_seconds() - self._busy - cpu)
        self._answer(asdict(Sample(wall, cpu, 0.0, 0.0, 0, 0, others, value)))

    def _start(self) -> StartReport:
        count = self.shape.num_parameters
        seconds = time.perf_counter() - self._started
        return StartReport(count, 4 * count, seconds, 0.0, torch.__version__, torch.get_num_threads())

    def _answer(self, message: dict[str, object]) -> None:
        print(json.dumps(message), file=self._answers, flush=True)

    def _tell(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        traceback.print_exception(kind, error, trace)
        lines = str(error).strip().splitlines()
        frames = traceback.extract_tb(trace)
        place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
        self._answer({"error": f"{kind.__name__}{': ' + lines[0] if lines else ''}{place}"})
