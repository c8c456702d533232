"""Loads a checkpoint into a prepared model, whose ranks, stage, budget and dtypes may differ.

Everything that can be checked is checked before any value is replaced. Then each rank reads what it keeps
(`shard_reader`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zero_infinity.checkpoint import rank_state
from zero_infinity.checkpoint.checkpoint_directory import find
from zero_infinity.checkpoint.io_thread_pool import IOThreadPool, Progress, ProgressMeter
from zero_infinity.checkpoint.manifest import MODEL, OPTIMIZER, OptimizerEntry
from zero_infinity.checkpoint.rank_parts import as_real, contents_of, state_key
from zero_infinity.checkpoint.shard_reader import FillTask, ShardReader
from zero_infinity.checkpoint.tensor_matching import TensorMatch, match
from zero_infinity.checkpoint.training_view import TrainingView
from zero_infinity.checkpoint.verify import OpenCheckpoint, StoredTensor
from zero_infinity.comm.checkpoint_agreement import Agreement
from zero_infinity.errors import CheckpointError
from zero_infinity.interrupts import held
from zero_infinity.optim.update_rule import copy_scalars


class CheckpointLoad:
    """One checkpoint into one model, on one rank."""

    def __init__(self, model: nn.Module, view: TrainingView, *, with_optimizer: bool, strict: bool) -> None:
        self._view = view
        self._optimizer = view.user_optimizer if with_optimizer else None
        self._contents = contents_of(model, view)
        self._strict = strict
        self._agreement = Agreement("zi.load", view.ranks, view.step_channel)

    def read(self, path: Path, objects: Mapping[str, Any], progress: Progress | None = None) -> dict[str, Any]:
        """Load it; returns what was saved as `extra`."""
        agreement, view = self._agreement, self._view
        view.background_save.wait()
        with ExitStack() as stack:
            folder = self._find(path)
            with agreement.agreed("checks"):
                checkpoint = OpenCheckpoint(folder, stack)
                manifest = checkpoint.manifest
                random_states, extra = rank_state.read(checkpoint, agreement.rank)
                rank_state.check_objects(extra, objects, folder)
                found, problems = match(self._contents, checkpoint, self._optimizer, strict=self._strict)
                problems.raise_if_any(
                    f"{folder} does not fit the model",
                    "build both as they were saved, or strict=False to skip what either side lacks",
                )
            digest = manifest.to_bytes()[:128].decode()
            agreement.same("the checkpoint", digest, "the same path, on a file system that all machines share")
            with agreement.agreed("reading"), held(), view.replacing():
                self._fill(found, ProgressMeter(progress))
                if self._optimizer is not None and manifest.optimizer is not None:
                    self._take_settings(manifest.optimizer)
                    self._take_states(found)
            if self._optimizer is not None:
                view.go_on_from(manifest.step)
                if manifest.loss_scale is not None and view.loss_scale is not None:
                    view.loss_scale.load_state_dict(manifest.loss_scale)
                if random_states is not None:
                    rank_state.restore_random(random_states, view.device)
            rank_state.restore_objects(extra, objects)
        return extra

    def _find(self, path: Path) -> Path:
        """Rank 0 decides which one is the latest."""
        agreement = self._agreement
        name = ""
        with agreement.agreed("finding the checkpoint"):
            if agreement.rank == 0:
                found = find(path)
                name = found.name if found != path else ""
            elif not path.is_dir():
                raise CheckpointError(
                    f"{path} does not exist for rank {agreement.rank}\n  fix:   a file system that all machines share"
                )
        return path / agreement.of_first("its name", name)

    # ------------------------------------------------------------------ values and states

    def _fill(self, found: TensorMatch, meter: ProgressMeter) -> None:
        contents, view = self._contents, self._view
        with view.staging() as num_bytes, IOThreadPool(num_bytes) as thread_pool:
            with_records = self._optimizer is not None
            filling = ShardReader(contents, view, thread_pool, meter, replaces_records=with_records)

            def tasks() -> Iterator[FillTask]:
                return (task for unit in contents.units for task in filling.tasks(unit, found.sources, found.states))

            meter.total = sum(task.num_bytes for task in tasks())
            filling.run(tasks())
            with torch.no_grad():
                for name, value in contents.plain.items():
                    source = found.sources.get((MODEL, name))
                    if source is not None:
                        thread_pool.run([partial(_copy_whole, source, value)])

    def _take_settings(self, entry: OptimizerEntry) -> None:
        for group, saved in zip(self._view.user_optimizer.param_groups, entry.groups, strict=True):
            group.update(copy_scalars(saved.settings))

    def _take_states(self, found: TensorMatch) -> None:
        view, contents = self._view, self._contents
        view.state_io.forget_states()
        for parameter, (name, *_) in contents.names.items():
            state = found.states.get(name)
            known = contents.managed.get(name)
            if known is None:
                view.user_optimizer.state.pop(parameter, None)
            if state is None:
                continue
            if known is not None:
                view.state_io.restore_scalars(known, state.names, state.scalars)
                continue
            values = copy_scalars(state.scalars)
            for slot in state.slots:
                values[slot] = torch.empty_like(parameter.data)
                source = found.sources[OPTIMIZER, state_key(slot, name)]
                with IOThreadPool(0) as thread_pool:
                    thread_pool.run([partial(_copy_whole, source, values[slot])])
            view.user_optimizer.state[parameter] = {name: values[name] for name in state.names}


def _copy_whole(source: StoredTensor, value: torch.Tensor, room: memoryview) -> None:
    as_real(value).copy_(source.whole(room))
