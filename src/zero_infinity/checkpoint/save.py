"""Saves a model: what there is to save of this moment, which files it goes to, and when these are a checkpoint.

Every rank writes its own parts of the same files (`writing`), within the engine's memory budget.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zero_infinity.checkpoint import rank_state
from zero_infinity.checkpoint.atomic_save import CheckpointDraft
from zero_infinity.checkpoint.dtype_conversion import as_real, dtype_name
from zero_infinity.checkpoint.file_io import create, write_whole
from zero_infinity.checkpoint.file_layout import FilePlan, TensorKind, WrittenPart, entries_of, plan_files
from zero_infinity.checkpoint.hf_names import hugging_face_files
from zero_infinity.checkpoint.manifest import (
    MANIFEST,
    MODEL,
    OPTIMIZER,
    FileEntry,
    GroupEntry,
    Manifest,
    OptimizerEntry,
    StateEntry,
)
from zero_infinity.checkpoint.model_contents import (
    BlockContent,
    Key,
    ModelContents,
    contents_of,
    order_of,
    state_key,
)
from zero_infinity.checkpoint.progress import Progress, ProgressMeter
from zero_infinity.checkpoint.safetensors_header import NAMES
from zero_infinity.checkpoint.shard_writer import ShardWriter
from zero_infinity.checkpoint.strict_json import parse, read_bytes
from zero_infinity.checkpoint.training_view import TrainingView
from zero_infinity.comm.agreement import Agreement
from zero_infinity.errors import CheckpointError, UsageError
from zero_infinity.optim.state_records import MASTER
from zero_infinity.optim.update_rule import copy_scalars, split_state
from zero_infinity.params.unit import ManagedParameter
from zero_infinity.storage.checksum import crc32

_MAX_PARTS_BYTES = 1 << 32


class CheckpointSave:
    """One checkpoint of one model, on one rank."""

    def __init__(self, model: nn.Module, engine: TrainingView, *, with_optimizer: bool) -> None:
        self._model = model
        self._engine = engine
        engine.background_save.wait()
        self._agreement = Agreement("zi.save", engine.ranks, engine.step_channel)
        with self._agreement.agreed("coming to rest"):
            engine.rest()
            self._contents = contents_of(model, engine)
            self._states = _states(self._contents, engine) if with_optimizer else None
            # What is in memory as it is: buffers, parameters in no unit, and their states.
            self._values: dict[Key, torch.Tensor] = {(MODEL, n): as_real(t) for n, t in self._contents.plain.items()}
            self._kinds = self._find_kinds()
        self._step = engine.num_steps
        self._num_units = len(self._contents.units)

    # ------------------------------------------------------------------ what there is

    def _find_kinds(self) -> dict[Key, TensorKind]:
        kinds: dict[Key, TensorKind] = {}
        for name, known in self._contents.managed.items():
            kinds[MODEL, name] = _kind(known, self._contents.value_dtype(known))
        for (section, name), value in self._values.items():
            kinds[section, name] = TensorKind(dtype_name(value, name), tuple(value.shape))
        for name, state in (self._states or {}).items():
            owner = self._contents.managed.get(name)
            for slot in state.slots:
                key = (OPTIMIZER, state_key(slot, name))
                if owner is not None:
                    kinds[key] = _kind(owner, self._engine.records[owner.parts[0].unit].dtype)
                else:
                    parameter = next(p for p, names in self._contents.names.items() if names[0] == name)
                    value = self._values[key] = as_real(self._engine.user_optimizer.state[parameter][slot])
                    kinds[key] = TensorKind(dtype_name(value, name), tuple(value.shape))
        return kinds

    def _slots(self) -> dict[ManagedParameter, tuple[str, ...]]:
        """What is to be read of each parameter's optimizer record."""
        slots = {}
        for name, known in self._contents.managed.items():
            state = (self._states or {}).get(name)
            for part in known.parts:
                record = self._engine.records.get(part.unit)
                if record is not None and part in record.state_names:
                    master = (MASTER,) if record.has_master else ()
                    slots[part] = master + (state.slots if state is not None else ())
        return slots

    # ------------------------------------------------------------------ writing

    def write(
        self,
        directory: Path,
        extra: Mapping[str, Any],
        keep: int | None,
        *,
        background: bool = False,
        progress: Progress | None = None,
    ) -> Path:
        """Write it; returns the folder that it is in. `background`: or will be in, when a thread has written it."""
        engine, agreement = self._engine, self._agreement
        with agreement.agreed("checks"):
            self._check(keep, background=background)
            mine = rank_state.to_bytes(extra)
            files, places = plan_files(self._kinds)
            self._files, self._places = files, places
            self._manifest = self._make_manifest(files)
            plan = json.dumps([engine.num_steps, [[*key, kind.dtype, kind.shape] for key, kind in self._kinds.items()]])
        agreement.same("the names, shapes or states to save", plan, "the same model and steps on every rank")
        aside = None
        try:
            with agreement.agreed("making room"):
                if agreement.rank == 0:
                    aside = CheckpointDraft(directory)
                    for name, file in files.items():
                        create(aside.path / name, file.beginning, file.num_bytes)
            folder = directory / agreement.of_first("the folder", aside.path.name if aside is not None else "")
            if background:
                return self._begin(directory, folder, aside, mine, keep, progress)
            with agreement.agreed("writing"), closing(self._open(folder, mine, progress)) as writing:
                writing.write_now(self._blocks(), self._own_values())
                self._end(folder, writing)
            final = self._publish(agreement, folder, writing, aside, keep, None)
            return directory / agreement.of_first("its name", final)
        except BaseException:
            if aside is not None:
                aside.discard()
            raise

    def _check(self, keep: int | None, *, background: bool) -> None:
        if keep is not None and (not isinstance(keep, int) or keep < 1):
            raise UsageError(f"keep={keep!r} would keep no checkpoint\n  fix:   keep=1 or more, or None for all")
        if background and self._engine.verify:
            raise UsageError(
                "background=True reads blocks past memory, where verify=True could not check them\n"
                "  fix:   save in the foreground, or prepare the model without verify"
            )

    def _begin(
        self,
        directory: Path,
        folder: Path,
        aside: CheckpointDraft | None,
        mine: bytes,
        keep: int | None,
        progress: Progress | None,
    ) -> Path:
        """Keep this moment, and let a thread write it."""
        agreement, background = self._agreement, self._engine.background_save
        # All that the thread says to other ranks goes by a wire of its own.
        beside = Agreement("zi.save", self._engine.ranks, background.connect())
        name = agreement.of_first("its name", aside.next_name(self._engine.num_steps) if aside is not None else "")
        writing = None
        try:
            with agreement.agreed("beginning"):
                writing = self._open(folder, mine, progress)
                blocks = list(self._blocks())
                # Training reads parameters first, and updates states from the last layer to the first.
                writing.start([*blocks[: self._num_units], *blocks[: self._num_units - 1 : -1]], self._own_values())
            background.start(partial(self._go_on, beside, folder, writing, aside, keep, name))
        except BaseException:
            if writing is not None:
                writing.close()
            raise
        return directory / name

    def _go_on(
        self,
        agreement: Agreement,
        folder: Path,
        writing: ShardWriter,
        aside: CheckpointDraft | None,
        keep: int | None,
        name: str,
    ) -> None:
        """Runs beside training."""
        try:
            with agreement.agreed("writing"), closing(writing):
                self._end(folder, writing)
            self._publish(agreement, folder, writing, aside, keep, name)
        except BaseException:
            if aside is not None:
                aside.discard()
            raise

    # ------------------------------------------------------------------ writing

    def _open(self, folder: Path, mine: bytes, progress: Progress | None) -> ShardWriter:
        rank = self._agreement.rank
        if not folder.is_dir():
            raise CheckpointError(
                f"{folder} was made by rank 0 and is not there for rank {rank}\n"
                "  fix:   save to a file system that all machines share"
            )
        write_whole(folder / rank_state.file_of(rank), mine)
        meter = ProgressMeter(progress)
        writing = ShardWriter(self._engine, rank, folder, self._files, self._places, meter)
        if progress is not None:
            meter.total = writing.num_bytes(self._blocks()) + sum(v.nbytes for v in self._own_values().values())
        return writing

    def _end(self, folder: Path, writing: ShardWriter) -> None:
        writing.finish()
        rank = self._agreement.rank
        if rank:
            parts = [[*part.key, part.start, part.num_bytes, part.crc32] for part in writing.written]
            write_whole(folder / _parts_file(rank), json.dumps({"parts": parts}).encode())

    def _publish(
        self,
        agreement: Agreement,
        folder: Path,
        writing: ShardWriter,
        aside: CheckpointDraft | None,
        keep: int | None,
        name: str | None,
    ) -> str:
        with agreement.agreed("naming it"):
            if aside is None:
                return ""
            self._write_manifest(folder, writing.written)
            return aside.publish(self._step, keep, name).name

    def _own_values(self) -> dict[Key, torch.Tensor]:
        """What is in memory as it is, which the first rank writes."""
        return self._values if self._agreement.rank == 0 else {}

    def _blocks(self) -> Iterator[BlockContent]:
        """Of parameters, and then of states."""
        contents = self._contents
        slots = self._slots()
        yield from map(contents.of_unit, contents.units)
        for unit in contents.units:
            if unit in contents.records:
                yield from contents.of_record(contents.records[unit], slots)

    # ------------------------------------------------------------------ the manifest

    def _make_manifest(self, files: Mapping[str, FilePlan]) -> Manifest:
        """As far as it is known before anything is written, and of this moment."""
        scale = self._engine.loss_scale
        return Manifest(
            step=self._step,
            num_ranks=self._agreement.num_ranks,
            model_class=type(self._model).__name__,
            model_config=hugging_face_files(self._model),
            tensors={},
            tied=self._contents.tied,
            optimizer=self._optimizer_entry(),
            loss_scale=scale.state_dict() if scale is not None else None,
            files={name: file.entry for name, file in files.items()},
        )

    def _write_manifest(self, folder: Path, written: Sequence[WrittenPart]) -> None:
        ranks = range(self._agreement.num_ranks)
        entries = entries_of(
            self._places, list(itertools.chain(written, *(_take_parts(folder, rank) for rank in ranks[1:])))
        )
        tensors = {
            section: {name: entry for (own, name), entry in entries.items() if own == section}
            for section in (MODEL, OPTIMIZER)
        }
        own_files = {}
        for rank in ranks:
            data = read_bytes(folder / rank_state.file_of(rank), _MAX_PARTS_BYTES)
            own_files[rank_state.file_of(rank)] = FileEntry(len(data), crc32(data))
        manifest = replace(self._manifest, tensors=tensors, files={**self._manifest.files, **own_files})
        write_whole(folder / MANIFEST, manifest.to_bytes())

    def _optimizer_entry(self) -> OptimizerEntry | None:
        if self._states is None:
            return None
        optimizer, names = self._engine.user_optimizer, self._contents.names
        groups = tuple(
            GroupEntry(
                copy.deepcopy({name: value for name, value in group.items() if name != "params"}),
                tuple(names[parameter][0] for parameter in group["params"]),
            )
            for group in optimizer.param_groups
        )
        return OptimizerEntry(type(optimizer).__name__, groups, self._states)


def _kind(known: ManagedParameter, dtype: torch.dtype) -> TensorKind:
    order = order_of(known)
    shape = tuple(known.shape) if order is None else tuple(known.shape[number] for number in order)
    return TensorKind(NAMES[dtype], shape, order)


def _parts_file(rank: int) -> str:
    return f"parts-{rank:05}.json"


def _take_parts(folder: Path, rank: int) -> Iterator[WrittenPart]:
    """What another rank says that it has written; it need not say so again."""
    path = folder / _parts_file(rank)
    for section, name, start, num_bytes, checksum in parse(read_bytes(path, _MAX_PARTS_BYTES), path)["parts"]:
        yield WrittenPart((section, name), start, num_bytes, checksum)
    path.unlink()


def _states(contents: ModelContents, engine: TrainingView) -> dict[str, StateEntry]:
    """The optimizer's states of all parameters that have one."""
    states = {}
    for parameter, names in contents.names.items():
        known = contents.managed.get(names[0])
        if known is not None:
            part = known.parts[0]  # tiles have the same scalars
            record = engine.records.get(part.unit)
            if record is not None and part in record.started:
                states[names[0]] = StateEntry(record.started[part], copy_scalars(record.scalars[part]))
        elif engine.user_optimizer.state.get(parameter):
            state = engine.user_optimizer.state[parameter]
            states[names[0]] = StateEntry(tuple(state), copy_scalars(split_state(state, parameter.shape)[1]))
    return states
