"""The process of a contender: builds its model, then takes one step each time it is told to.

Reads and writes one JSON object a line (`messages.py`); anything else written to stdout goes to stderr. Ends with its
parent. Time is measured here, around the step, so that the pipes do not count.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.engine_variants import engine_parts
from benchmarks.turns import other_ranks
from benchmarks.turns.child_process import end_with, machine_cpu_seconds, peak_rss
from benchmarks.turns.messages import FinishReport, Race, Sample, Setting, StartReport
from zero_infinity import api
from zero_infinity.config import Config
from zero_infinity.engine_stats import Stats
from zero_infinity.errors import ZeroInfinityError
from zero_infinity.models.byte_gpt import ByteGPT
from zero_infinity.models.text import ByteBatches, standard_library
from zero_infinity.tiers.emulated_accelerator import EmulatedAccelerator

_POLL_SECONDS = 0.0005


class Trainer:
    """An ordinary training loop, one step at a time; plain, or over a prepared model."""

    def __init__(self, race: Race, setting: Setting, rank: int = 0) -> None:
        self._parts = engine_parts(setting.without, setting.bytes_per_second)
        options: dict[str, Any] = dict(setting.options)
        self._config = None if setting.memory is None else Config(memory=setting.memory, nvme=setting.nvme, **options)
        self._num_ranks = setting.ranks
        shape = race.shape
        share = race.batch // setting.ranks
        batches = ByteBatches(standard_library(), share, race.seq, race.seed, rank=rank, num_ranks=setting.ranks)
        self._batches: list[tuple[Tensor, Tensor]] = [next(batches) for _ in range(race.num_steps)]
        torch.manual_seed(race.seed)
        started = time.perf_counter()
        with self._building():
            self._model: nn.Module = ByteGPT(shape)
        built = time.perf_counter()
        # Not measured: the first optimizer of a process makes torch import its compiler, which takes seconds.
        self._optimizer: Optimizer = torch.optim.AdamW(self._model.parameters(), lr=race.lr, fused=True)
        made = time.perf_counter()
        if self._config is not None:
            device = _emulated_device(setting)
            self._model, self._optimizer = api.prepare_with(
                self._parts, self._model, self._optimizer, self._config, device=device
            )
        self.start = StartReport(
            num_parameters=shape.num_parameters,
            weight_bytes=4 * shape.num_parameters,
            build_seconds=built - started,
            prepare_seconds=time.perf_counter() - made,
            torch=torch.__version__,
            num_threads=torch.get_num_threads(),
        )

    def step(self, *, drain: bool) -> Sample:
        inputs, targets = self._batches.pop(0)
        if self._num_ranks > 1:
            dist.barrier()  # the other ranks begin when this one is told to
        before, busy = self._stats(), machine_cpu_seconds()
        cpu, wall = time.process_time(), time.perf_counter()
        loss = self._model(inputs, targets)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        value = loss.item()
        stepped = time.perf_counter()
        if drain:
            self._drain()
        wall, cpu, drained = time.perf_counter() - wall, time.process_time() - cpu, time.perf_counter() - stepped
        busy, after = machine_cpu_seconds() - busy, self._stats()
        return Sample(
            seconds=wall,
            cpu_seconds=cpu,
            waited_seconds=after.waited_seconds - before.waited_seconds if after and before else 0.0,
            drain_seconds=drained if drain else 0.0,
            bytes_read=after.bytes_read - before.bytes_read if after and before else 0,
            bytes_written=after.bytes_written - before.bytes_written if after and before else 0,
            others_cpu_seconds=max(0.0, busy - cpu),
            loss=value,
        )

    def finish(self) -> FinishReport:
        stats, peak = self._stats(), peak_rss()
        checksum = 0
        for parameter in self._model.parameters():
            with api.gathered(parameter), torch.no_grad():
                checksum = zlib.crc32(parameter.numpy().data, checksum)
        return FinishReport(
            peak_rss=peak,
            memory_peak=stats.memory_peak if stats else 0,
            num_deviations=stats.num_deviations if stats else 0,
            weights=f"{checksum:08x}",
        )

    def _building(self) -> AbstractContextManager[None]:
        return nullcontext() if self._config is None else api.init_with(self._parts, self._config)

    def _stats(self) -> Stats | None:
        return None if self._config is None else api.stats(self._model)

    def _drain(self) -> None:
        """Wait for the updates that `step()` left to the worker."""
        while (stats := self._stats()) is not None and stats.pending_updates:
            time.sleep(_POLL_SECONDS)


def main() -> int:
    with _protocol() as (commands, answers):

        def answer(message: dict[str, object]) -> None:
            print(json.dumps(message), file=answers, flush=True)

        try:
            answer({"process": os.getpid()})
            order = json.loads(commands.readline())
            end_with(order["parent"])
            race, setting = Race(**order["race"]), Setting(**order["setting"])
            if setting.ranks > 1:
                other_ranks.launch_others(race, setting)
            trainer = Trainer(race, setting)
            answer(asdict(trainer.start))
            for line in commands:
                order = json.loads(line)
                if order["do"] == "finish":
                    answer(asdict(trainer.finish()))
                    return 0
                answer(asdict(trainer.step(drain=order["drain"])))
        except Exception as error:  # noqa: BLE001 - it goes into the table
            kind = "" if isinstance(error, ZeroInfinityError) else f"{type(error).__name__}: "
            answer({"error": kind + (str(error).strip().splitlines() or ["no message"])[0]})
            return 1
    return 0


def _emulated_device(setting: Setting) -> EmulatedAccelerator | None:
    if setting.device_memory is None:
        return None
    if setting.bytes_per_second is None:
        return EmulatedAccelerator(setting.device_memory)
    return EmulatedAccelerator(setting.device_memory, bytes_per_second=setting.bytes_per_second)


@contextlib.contextmanager
def _protocol() -> Iterator[tuple[TextIO, TextIO]]:
    """Commands and answers. From here on descriptor 1 is stderr, so that a print is not mistaken for an answer."""
    with open(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        yield sys.stdin, answers


if __name__ == "__main__":
    sys.exit(main())
