"""`train --save` and `--resume`: when a run saves, and where it resumes.

A run that is stopped by a signal saves after the step at which all ranks agree to stop. A run that loses a rank does
not save; the next one resumes from the last checkpoint.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from zero_infinity import api
from zero_infinity.byte_sizes import format_bytes
from zero_infinity.checkpoint.checkpoint_directory import CheckpointDraft, has_checkpoint
from zero_infinity.cli.progress_display import Progress
from zero_infinity.cli.train_workload import Positioned
from zero_infinity.errors import ConfigError
from zero_infinity.optim.wrapped_optimizer import StreamedOptimizer


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """The options of the command."""

    directory: Path
    every: int | None
    keep: int | None
    resume: bool
    background: bool
    trained_only: bool = False  # of adapters: the base is in its own folder


@dataclass(slots=True)
class Checkpoints:
    """The checkpoints of one run."""

    _options: SaveOptions | None
    _model: nn.Module
    _optimizer: StreamedOptimizer
    _schedule: LRScheduler
    _batches: Positioned
    _settings: dict[str, Any]  # must be those of the run that is resumed
    _progress: Progress
    _last: int | None = None  # the step that was saved last
    _begun: tuple[int, Path, float] | None = None  # a running save: step, folder, start time

    def resume(self) -> int:
        """Resume from the latest checkpoint, with --resume and if there is one; returns the number of steps done."""
        if self._options is None or not self._options.resume or not has_checkpoint(self._options.directory):
            return 0
        start = time.perf_counter()
        directory = self._options.directory
        with self._progress.transfer("loading") as shown:
            strict = not self._options.trained_only
            extra = api.load(directory, self._model, self._optimizer, strict=strict, progress=shown)
        missing = [name for name in self._extra() if name not in extra]
        if missing:
            raise ConfigError(
                f"{directory} was not saved by zero-infinity train: it has no {', '.join(missing)}\n"
                "  fix:   load it with zi.load in a script, or use another directory"
            )
        self._check_settings(extra["settings"])
        self._schedule.load_state_dict(extra["schedule"])
        self._batches.position = int(extra["position"])
        self._last = api.stats(self._model).num_steps
        self._progress.say(f"goes on after step {self._last}, from {directory} ({time.perf_counter() - start:.1f} s)")
        return self._last

    def _extra(self) -> dict[str, Any]:
        """What a run needs to resume, besides model and optimizer states."""
        return {"schedule": self._schedule, "position": self._batches.position, "settings": self._settings}

    def _check_settings(self, saved: Mapping[str, Any]) -> None:
        for name, value in self._settings.items():
            if saved.get(name) != value:
                raise ConfigError(
                    f"--{name} is {value}, but the run in {self._options and self._options.directory} was begun with "
                    f"{saved.get(name)}\n  fix:   --{name} {saved.get(name)}, or another directory without --resume"
                )

    def after_step(self, step: int) -> None:
        """Save if it is due."""
        self._look()
        if self._options is not None and self._options.every is not None and step % self._options.every == 0:
            self._save(self._options, step, background=self._options.background)

    def at_end(self, step: int) -> None:
        """Save after the last step, or after the step at which all ranks stop for a signal."""
        if self._options is not None and step != self._last:
            self._save(self._options, step, background=False)
        elif self._begun is not None:
            api.synchronize(self._model)
        self._look()

    def _save(self, options: SaveOptions, step: int, *, background: bool) -> None:
        if self._begun is not None:
            api.synchronize(self._model)
            self._look()
        start = time.perf_counter()
        with nullcontext() if background else self._progress.transfer("saving") as shown:
            folder = api.save(
                options.directory,
                self._model,
                self._optimizer,
                extra=self._extra(),
                keep=options.keep,
                background=background,
                trained_only=options.trained_only,
                progress=shown,
            )
        self._last = step
        self._begun = (step, folder, start)
        if background:
            stopped = time.perf_counter() - start
            self._progress.say(f"saving step {step} as {folder} while training goes on, after {stopped:.1f} s")
        else:
            self._look()

    def _look(self) -> None:
        """Report a finished save. If it failed, the next save raises the error, on all ranks."""
        if self._begun is None or api.engine_of(self._model).background_save.is_running:
            return
        (step, folder, start), self._begun = self._begun, None
        if folder.exists():
            seconds = time.perf_counter() - start
            num_bytes = sum(file.stat().st_size for file in folder.iterdir())
            self._progress.say(
                f"saved step {step} as {folder}: {format_bytes(num_bytes)} in {seconds:.1f} s "
                f"({num_bytes / seconds / 1e6:,.0f} MB/s)"
            )


def options_of(args: argparse.Namespace, *, is_first: bool) -> SaveOptions | None:
    """The options of --save, checked before anything is built. `is_first`: on the rank that writes."""
    directory, background = args.save, args.save_in_background
    if directory is None:
        for name in ("save_every", "keep", "resume", "save_in_background"):
            if getattr(args, name):
                raise ConfigError(f"--{name.replace('_', '-')} needs --save DIR")
        return None
    if background and args.save_every is None:
        raise ConfigError(
            "--save-in-background needs --save-every N: the save at the end has no training to overlap with"
        )
    if is_first:
        if not args.resume and has_checkpoint(directory):
            raise ConfigError(
                f"{directory} has checkpoints of an earlier run\n"
                "  fix:   --resume to continue from the latest, or another DIR"
            )
        # Fail now, not after the last step, if the directory cannot be written.
        CheckpointDraft(directory).discard()
    return SaveOptions(directory, args.save_every, args.keep, args.resume, background, args.lora is not None)
