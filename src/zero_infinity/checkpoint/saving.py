"""Writes a checkpoint: every rank its own parts of the same files, within the engine's memory budget.

Blocks are read where they are, in memory or on their drive, piece by piece; nothing is fetched for it, so that training
goes on afterwards with the same blocks in memory. Whole tensors are never put together.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zero_infinity.checkpoint import rank_state
from zero_infinity.checkpoint.contents import (
    BlockContent,
    Contents,
    Key,
    contents_of,
    first_element,
    order_of,
    state_key,
)
from zero_infinity.checkpoint.conversion import hugging_face_files
from zero_infinity.checkpoint.council import Council
from zero_infinity.checkpoint.crew import Crew, Job
from zero_infinity.checkpoint.directory import Aside
from zero_infinity.checkpoint.manifest import (
    MANIFEST,
    MODEL,
    OPTIMIZER,
    PIECE_BYTES,
    FileEntry,
    GroupEntry,
    Manifest,
    OptimizerEntry,
    StateEntry,
)
from zero_infinity.checkpoint.piece_io import OpenFile, congruent, create, write_whole
from zero_infinity.checkpoint.plan import FilePlan, Kind, Place, Written, entries_of, plan_files
from zero_infinity.checkpoint.strict_json import parse, read_bytes
from zero_infinity.checkpoint.tensor_file import NAMES
from zero_infinity.checkpoint.values import as_real, bytes_of, dtype_name
from zero_infinity.checksum import crc32
from zero_infinity.errors import CheckpointError, UsageError
from zero_infinity.runtime.engine import TrainingEngine
from zero_infinity.runtime.record import MASTER
from zero_infinity.runtime.unit import ManagedParameter
from zero_infinity.runtime.update_rule import split_state

_MAX_PARTS_BYTES = 1 << 32


class Saving:
    """One checkpoint of one model, on one rank."""

    def __init__(self, model: nn.Module, engine: TrainingEngine, *, with_optimizer: bool) -> None:
        self._model = model
        self._engine = engine
        self._council = Council("zi.save", engine.ranks, engine.step_wire)
        with self._council.agreed("coming to rest"):
            engine.rest()
            self._contents = contents_of(model, engine.host, engine.records)
            self._states = _states(self._contents, engine) if with_optimizer else None
            # What is in memory as it is: buffers, parameters in no unit, and their states.
            self._values: dict[Key, torch.Tensor] = {(MODEL, n): as_real(t) for n, t in self._contents.plain.items()}
            self._kinds = self._find_kinds()
        self._written: list[Written] = []

    # ------------------------------------------------------------------ what there is

    def _find_kinds(self) -> dict[Key, Kind]:
        kinds: dict[Key, Kind] = {}
        for name, known in self._contents.managed.items():
            kinds[MODEL, name] = _kind(known, self._contents.value_dtype(known))
        for (section, name), value in self._values.items():
            kinds[section, name] = Kind(dtype_name(value, name), tuple(value.shape))
        for name, state in (self._states or {}).items():
            owner = self._contents.managed.get(name)
            for slot in state.slots:
                key = (OPTIMIZER, state_key(slot, name))
                if owner is not None:
                    kinds[key] = _kind(owner, self._engine.records[owner.parts[0].unit].dtype)
                else:
                    parameter = next(p for p, names in self._contents.names.items() if names[0] == name)
                    value = self._values[key] = as_real(self._engine.user_optimizer.state[parameter][slot])
                    kinds[key] = Kind(dtype_name(value, name), tuple(value.shape))
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

    def write(self, directory: Path, extra: Mapping[str, Any], keep: int | None) -> Path:
        """Write it; returns the folder that it is in."""
        engine, council = self._engine, self._council
        with council.agreed("checks"):
            if keep is not None and (not isinstance(keep, int) or keep < 1):
                raise UsageError(f"keep={keep!r} would keep no checkpoint\n  fix:   keep=1 or more, or None for all")
            mine = rank_state.to_bytes(extra)
            files, places = plan_files(self._kinds)
            plan = json.dumps([engine.num_steps, [[*key, kind.dtype, kind.shape] for key, kind in self._kinds.items()]])
        council.same("the names, shapes or states to save", plan, "the same model and steps on every rank")
        aside = None
        try:
            with council.agreed("making room"):
                if council.rank == 0:
                    aside = Aside(directory)
                    for name, file in files.items():
                        create(aside.path / name, file.beginning, file.num_bytes)
            folder = directory / council.of_first("the folder", aside.path.name if aside is not None else "")
            with council.agreed("writing"):
                self._write_parts(folder, files, places, mine)
            final = None
            with council.agreed("naming it"):
                if aside is not None:
                    self._write_manifest(folder, files, places)
                    final = aside.publish(engine.num_steps, keep)
            return directory / council.of_first("its name", final.name if final is not None else "")
        except BaseException:
            if aside is not None:
                aside.discard()
            raise

    def _write_parts(
        self, folder: Path, files: Mapping[str, FilePlan], places: Mapping[Key, Place], mine: bytes
    ) -> None:
        rank = self._council.rank
        if not folder.is_dir():
            raise CheckpointError(
                f"{folder} was made by rank 0 and is not there for rank {rank}\n"
                "  fix:   save to a file system that all machines share"
            )
        write_whole(folder / rank_state.file_of(rank), mine)
        with ExitStack() as stack:
            opened = {name: stack.enter_context(OpenFile(folder / name, writable=True)) for name in files}
            with Crew(self._engine.placement.set_aside) as crew:
                if self._engine.config.verify:
                    for content in self._blocks():
                        self._write_verified(content, crew, opened, places)
                else:
                    crew.run(
                        job for content in self._blocks() for job in self._block_jobs(content, crew, opened, places)
                    )
                if rank == 0:
                    crew.run(self._value_jobs(crew, opened, places))
            for file in opened.values():
                file.sync()
        if rank:
            parts = [[*part.key, part.start, part.num_bytes, part.crc32] for part in self._written]
            write_whole(folder / _parts_file(rank), json.dumps({"parts": parts}).encode())

    def _blocks(self) -> Iterator[BlockContent]:
        contents = self._contents
        slots = self._slots()
        for unit in contents.units:
            yield contents.of_unit(unit)
            if unit in contents.records:
                yield from contents.of_record(contents.records[unit], slots)

    def _write_verified(
        self, content: BlockContent, crew: Crew, opened: Mapping[str, OpenFile], places: Mapping[Key, Place]
    ) -> None:
        """By way of memory, where the store checks what comes back from a drive."""
        residency = self._engine.residency
        residency.access(content.block)
        residency.wait(content.block)
        with residency.pinned(content.block):
            crew.run(self._block_jobs(content, crew, opened, places))

    def _block_jobs(
        self, content: BlockContent, crew: Crew, opened: Mapping[str, OpenFile], places: Mapping[Key, Place]
    ) -> Iterator[Job]:
        store, rank, width = self._engine.store, self._council.rank, content.dtype.itemsize
        for part in content.parts:
            mine, begin = part.owner.spans[rank], first_element(part.owner)
            first, last = max(part.start, begin + mine.start), min(part.stop, begin + mine.stop)
            if part.is_derived or first >= last:
                continue
            place = places[part.key]
            in_block = (part.at - part.start) * width  # what is to be added to a place in the tensor
            for start, stop in cut(first * width, last * width, crew.room_bytes):

                def peek(room: memoryview, start: int = start + in_block, stop: int = stop + in_block) -> memoryview:
                    return store.peek(content.block, start, stop, room)

                yield self._job(part.key, opened[place.file], place.start, start, peek)

    def _value_jobs(self, crew: Crew, opened: Mapping[str, OpenFile], places: Mapping[Key, Place]) -> Iterator[Job]:
        for key, value in self._values.items():
            data = memoryview(bytes_of(value))
            for start, stop in cut(0, len(data), crew.room_bytes):
                place = places[key]
                yield self._job(key, opened[place.file], place.start, start, partial(_in_memory, data[start:stop]))

    def _job(self, key: Key, file: OpenFile, begin: int, start: int, read: Callable[[memoryview], memoryview]) -> Job:
        def job(room: memoryview) -> None:
            data = congruent(read(room), begin + start, room)
            file.write(begin + start, data)
            self._written.append(Written(key, start, len(data), crc32(data)))

        return job

    # ------------------------------------------------------------------ the manifest

    def _write_manifest(self, folder: Path, files: Mapping[str, FilePlan], places: Mapping[Key, Place]) -> None:
        ranks = range(self._council.num_ranks)
        written = list(itertools.chain(self._written, *(_take_parts(folder, rank) for rank in ranks[1:])))
        entries = entries_of(places, written)
        own_files = {}
        for rank in ranks:
            data = read_bytes(folder / rank_state.file_of(rank), _MAX_PARTS_BYTES)
            own_files[rank_state.file_of(rank)] = FileEntry(len(data), crc32(data))
        scale = self._engine.loss_scale
        manifest = Manifest(
            step=self._engine.num_steps,
            num_ranks=len(ranks),
            model_class=type(self._model).__name__,
            model_config=hugging_face_files(self._model),
            tensors={
                section: {name: entry for (own, name), entry in entries.items() if own == section}
                for section in (MODEL, OPTIMIZER)
            },
            tied=self._contents.tied,
            optimizer=self._optimizer_entry(),
            loss_scale=scale.state_dict() if scale is not None else None,
            files={**{name: file.entry for name, file in files.items()}, **own_files},
        )
        write_whole(folder / MANIFEST, manifest.to_bytes())

    def _optimizer_entry(self) -> OptimizerEntry | None:
        if self._states is None:
            return None
        optimizer, names = self._engine.user_optimizer, self._contents.names
        groups = tuple(
            GroupEntry(
                {name: value for name, value in group.items() if name != "params"},
                tuple(names[parameter][0] for parameter in group["params"]),
            )
            for group in optimizer.param_groups
        )
        return OptimizerEntry(type(optimizer).__name__, groups, self._states)


def cut(start: int, stop: int, most: int) -> Iterator[tuple[int, int]]:
    """Cut bytes `start` to `stop` of a tensor where a checksum ends, and so that a piece has at most `most`."""
    while start < stop:
        end = min(stop, start + most, (start // PIECE_BYTES + 1) * PIECE_BYTES)
        yield start, end
        start = end


def _kind(known: ManagedParameter, dtype: torch.dtype) -> Kind:
    order = order_of(known)
    shape = tuple(known.shape) if order is None else tuple(known.shape[number] for number in order)
    return Kind(NAMES[dtype], shape, order)


def _in_memory(data: memoryview, _: memoryview) -> memoryview:
    return data


def _parts_file(rank: int) -> str:
    return f"parts-{rank:05}.json"


def _take_parts(folder: Path, rank: int) -> Iterator[Written]:
    """What another rank says that it has written; it need not say so again."""
    path = folder / _parts_file(rank)
    for section, name, start, num_bytes, checksum in parse(read_bytes(path, _MAX_PARTS_BYTES), path)["parts"]:
        yield Written((section, name), start, num_bytes, checksum)
    path.unlink()


def _states(contents: Contents, engine: TrainingEngine) -> dict[str, StateEntry]:
    """The optimizer's states of all parameters that have one."""
    states = {}
    for parameter, names in contents.names.items():
        known = contents.managed.get(names[0])
        if known is not None:
            part = known.parts[0]  # tiles have the same scalars
            record = engine.records.get(part.unit)
            if record is not None and part in record.started:
                states[names[0]] = StateEntry(record.started[part], dict(record.scalars[part]))
        elif engine.user_optimizer.state.get(parameter):
            state = engine.user_optimizer.state[parameter]
            states[names[0]] = StateEntry(tuple(state), split_state(state, parameter.shape)[1])
    return states
