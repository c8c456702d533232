"""The training loop of `zero-infinity train`: an ordinary PyTorch loop over a prepared model.

Owns the order (data, model, optimizer, prepare, steps, summary) and the measurement of steps. The options come as a
`TrainJob`; a `Progress` shows the steps.
"""

from __future__ import annotations

import json
import math
import resource
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from zero_infinity import api
from zero_infinity.byte_sizes import format_bytes, format_count
from zero_infinity.cli.progress_display import Progress, Step
from zero_infinity.cli.ranks import Ranks
from zero_infinity.cli.signals import SignalWatch
from zero_infinity.cli.train_checkpoints import Checkpoints, SaveOptions
from zero_infinity.cli.train_output import write_folder
from zero_infinity.cli.train_summary import RankFigures, Summary, figures_of, summarize
from zero_infinity.cli.train_workload import DataJob, FineTune, make_workload
from zero_infinity.config import Config
from zero_infinity.engine_stats import Stats
from zero_infinity.errors import UsageError
from zero_infinity.models.presets import Shape

_MOMENTUM = 0.9


@dataclass(frozen=True, slots=True)
class TrainJob:
    """Model, data and hyperparameters of a run."""

    model: Shape | Path | FineTune  # the built-in model, a Hugging Face config, or a folder with a tokenizer
    data: DataJob
    steps: int
    optimizer: str
    lr: float
    warmup: int
    pretrained: Path | None = None  # initial weights of a model that is trained on bytes
    save: SaveOptions | None = None
    output: Path | None = None  # folder for what was trained, as save_pretrained writes it


def train(job: TrainJob, config: Config, interruption: SignalWatch, progress: Progress, ranks: Ranks) -> Summary:
    """Train until the last step, or until a signal came: then all ranks stop after the same step."""
    seed = job.data.seed
    with ranks.agreed("reading the data"):
        workload = make_workload(job.model, job.data, ranks)
    batches = workload.batches
    ranks.all_same("the data", workload.describe(), "the same files under --data on every machine")
    torch.manual_seed(seed)
    with build_context(config):
        model = workload.build()
    model, optimizer = api.prepare(model, make_optimizer(job.optimizer, model, job.lr), config)
    schedule = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / (job.warmup + 1)))
    if ranks.rank:
        torch.manual_seed(seed + ranks.rank)  # weights are the same on all ranks, dropout is not
    num_batches = config.gradient_accumulation_steps
    settings: dict[str, float | None] = {
        "lr": job.lr,
        "warmup": job.warmup,
        "seed": seed,
        "batch": job.data.batch,
        "accumulate": num_batches,
    }
    if isinstance(job.model, FineTune):
        settings["lora"] = job.model.lora
    checkpoints = Checkpoints(job.save, model, optimizer, schedule, batches, settings, progress)
    progress.say(_opening(api.stats(model), workload.describe(), ranks.num_ranks, config.stage))
    first = checkpoints.resume()
    if job.pretrained is not None and not first:
        with progress.transfer("loading") as shown:
            api.load_pretrained(model, job.pretrained, progress=shown)
    before = api.stats(model)
    tokens_per_step = ranks.num_ranks * num_batches * job.data.batch * workload.seq
    losses: list[float] = []
    started = time.perf_counter()
    meter = _Meter(before, started, job.steps, tokens_per_step, ranks)
    with interruption.deferred(), progress.live():
        while first + len(losses) < job.steps and not interruption.is_agreed:
            loss = 0.0
            for part in workload.losses(model, num_batches, ranks):
                part.backward()
                loss += part.item()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            step = meter.measure(first + len(losses) + 1, loss, api.stats(model), interruption)
            if not math.isfinite(step.loss):
                raise UsageError(
                    f"the loss is {step.loss} at step {step.step}: training has diverged\n  fix:   --lr {job.lr / 10:g}"
                )
            losses.append(step.loss)
            progress.show(step)
            checkpoints.after_step(step.step)
        checkpoints.at_end(first + len(losses))
        api.synchronize(model)
        after = api.stats(model)
    seconds = time.perf_counter() - started
    if job.output is not None:
        with progress.transfer("writing") as shown:
            write_folder(job.output, model, job.model, shown)
    process_peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    mine = figures_of(ranks.rank, before, after, steps=len(losses), process_peak=process_peak)
    told = ranks.tell_text("figures", json.dumps(asdict(mine)))
    if ranks.num_ranks > 1:
        api.close(model)  # on all ranks now: their threads may wait for each other
    return summarize(
        [RankFigures(**json.loads(figures)) for figures in told],
        parameters=after.num_parameters,
        losses=tuple(losses),
        first_step=first,
        tokens=len(losses) * tokens_per_step,
        seconds=seconds,
        stage=config.stage,
        interrupted_by=interruption.name if interruption.requested else None,
    )


def _opening(stats: Stats, data: str, num_ranks: int, stage: int) -> str:
    each = " on this rank" if num_ranks > 1 else ""
    line = (
        f"{format_count(stats.num_parameters)} parameters, {format_bytes(stats.state_bytes)} of states{each} "
        f"({stats.homes}), {format_bytes(stats.memory_budget)} of memory; {data}"
    )
    return f"{line}; {num_ranks} ranks, stage {stage}" if num_ranks > 1 else line


def build_context(config: Config) -> AbstractContextManager[object]:
    """Context to build a model in: with a drive, each parameter goes to its home; without one, all fit in memory."""
    return api.init(config) if config.nvme else nullcontext()


def make_optimizer(name: str, model: nn.Module, lr: float) -> Optimizer:
    """An optimizer of `torch.optim` by its lower-case name; fused if possible: 14 times as fast on a CPU."""
    fused = {"fused": True} if name in ("adamw", "adam", "sgd", "adagrad") else {}
    momentum = {"momentum": _MOMENTUM} if name == "sgd" else {}
    kind = {known.lower(): known for known in dir(torch.optim)}[name]
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer: Optimizer = getattr(torch.optim, kind)(trained, lr=lr, **fused, **momentum)
    return optimizer


class _Meter:
    """Makes a `Step` from the engine's statistics before and after it."""

    def __init__(self, stats: Stats, now: float, steps: int, tokens: int, ranks: Ranks) -> None:
        self._ranks = ranks
        self._totals = (stats.bytes_read, stats.bytes_written, stats.waited_seconds)  # of this rank
        self._now = now
        self._steps = steps
        self._tokens = tokens
        self._recent: list[float] = []

    def measure(self, number: int, loss: float, stats: Stats, interruption: SignalWatch) -> Step:
        """Exchange figures with all ranks; the ranks also agree whether to stop for a signal."""
        before, self._totals = self._totals, (stats.bytes_read, stats.bytes_written, stats.waited_seconds)
        moved = [now - then for now, then in zip(self._totals, before, strict=True)]
        told = self._ranks.tell([loss, interruption.number, stats.memory_held, *moved])
        losses, signals, held, read, written, waited = zip(*told, strict=True)
        interruption.agree(map(int, signals))
        then, self._now = self._now, time.perf_counter()
        seconds = self._now - then
        self._recent = [*self._recent[-9:], seconds]
        return Step(
            step=number,
            steps=self._steps,
            loss=math.fsum(losses) / len(losses),
            seconds=seconds,
            tokens_per_second=self._tokens / seconds,
            memory_held=stats.memory_held,
            memory_budget=stats.memory_budget,
            read_bytes_per_second=sum(read) / seconds,
            write_bytes_per_second=sum(written) / seconds,
            wait_fraction=sum(waited) / len(waited) / seconds,
            seconds_left=(self._steps - number) * sum(self._recent) / len(self._recent),
            ranks=self._ranks.num_ranks,
            memory_held_most=int(max(held)),
        )
