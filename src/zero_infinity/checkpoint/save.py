"""Saves a checkpoint: all ranks write their parts of the same files, rank 0 publishes them.

The order of the phases and what ranks agree on are here. What is saved is in `snapshot`, how bytes are written in
`shard_writer`, how the result becomes a checkpoint atomically in `checkpoint_directory`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zero_infinity.checkpoint import rank_state
from zero_infinity.checkpoint.checkpoint_directory import CheckpointDraft
from zero_infinity.checkpoint.file_io import create, write_whole
from zero_infinity.checkpoint.file_layout import FilePlace, FilePlan, WrittenPart, entries_of, plan_files
from zero_infinity.checkpoint.io_thread_pool import Progress, ProgressMeter
from zero_infinity.checkpoint.manifest import MANIFEST, FileEntry
from zero_infinity.checkpoint.rank_parts import BlockContent, Key
from zero_infinity.checkpoint.shard_writer import ShardWriter
from zero_infinity.checkpoint.snapshot import Snapshot, Which
from zero_infinity.checkpoint.strict_json import parse, read_bytes
from zero_infinity.checkpoint.training_view import TrainingView
from zero_infinity.comm.checkpoint_agreement import Agreement
from zero_infinity.errors import CheckpointError, UsageError
from zero_infinity.storage.crc32 import crc32

_MAX_PARTS_BYTES = 1 << 32


@dataclass(frozen=True, slots=True)
class _Target:
    """Where a save goes. `draft`: on rank 0 only."""

    directory: Path
    folder: Path
    draft: CheckpointDraft | None
    keep: int | None
    files: Mapping[str, FilePlan]
    places: Mapping[Key, FilePlace]


class CheckpointSave:
    """One checkpoint of one model, on one rank."""

    def __init__(self, model: nn.Module, view: TrainingView, *, with_optimizer: bool, which: Which = Which.ALL) -> None:
        self._view = view
        view.background_save.wait()
        self._agreement = Agreement("zi.save", view.ranks, view.step_channel)
        with self._agreement.agreed("finishing updates"):
            view.rest()
            self._snapshot = Snapshot(
                model, view, self._agreement.num_ranks, with_optimizer=with_optimizer, which=which
            )

    def write(
        self,
        directory: Path,
        extra: Mapping[str, Any],
        keep: int | None,
        *,
        background: bool = False,
        progress: Progress | None = None,
    ) -> Path:
        """Write it; returns its folder. `background`: the folder it will have when a thread has written it."""
        agreement, snapshot = self._agreement, self._snapshot
        with agreement.agreed("checks"):
            self._check(keep, background=background)
            rank_data = rank_state.to_bytes(extra, self._view.device)
            files, places = plan_files(snapshot.kinds)
        agreement.same(
            "the names, shapes or states to save", snapshot.describe(), "the same model and steps on every rank"
        )
        draft = None
        try:
            with agreement.agreed("reserving space"):
                if agreement.rank == 0:
                    draft = CheckpointDraft(directory)
                    for name, file in files.items():
                        create(draft.path / name, file.beginning, file.num_bytes)
            folder = directory / agreement.of_first("the folder", draft.path.name if draft is not None else "")
            target = _Target(directory, folder, draft, keep, files, places)
            if background:
                return self._start_background(target, rank_data, progress)
            with agreement.agreed("writing"), closing(self._open(target, rank_data, progress)) as writer:
                writer.write_now(self._blocks(), self._values())
                self._finish(target, writer)
            final = self._publish(agreement, target, writer, None)
            return directory / agreement.of_first("its name", final)
        except BaseException:
            if draft is not None:
                draft.discard()
            raise

    def _check(self, keep: int | None, *, background: bool) -> None:
        if keep is not None and (not isinstance(keep, int) or keep < 1):
            raise UsageError(f"keep={keep!r} would keep no checkpoint\n  fix:   keep=1 or more, or None for all")
        if background and self._view.verify:
            raise UsageError(
                "background=True reads blocks directly from the drive, where verify=True cannot check them\n"
                "  fix:   save in the foreground, or prepare the model without verify"
            )

    # ------------------------------------------------------------------ in the background

    def _start_background(self, target: _Target, rank_data: bytes, progress: Progress | None) -> Path:
        """Guard this moment's values, and let a thread write them."""
        agreement, background, draft = self._agreement, self._view.background_save, target.draft
        # The thread talks to other ranks over a channel of its own.
        of_thread = Agreement("zi.save", self._view.ranks, background.connect())
        name = agreement.of_first("its name", draft.next_name(self._snapshot.step) if draft is not None else "")
        writer = None
        try:
            with agreement.agreed("starting"):
                writer = self._open(target, rank_data, progress)
                # Training first reads parameters, and then updates states from the last layer to the first.
                states = list(self._snapshot.state_blocks())
                writer.start([*self._snapshot.parameter_blocks(), *reversed(states)], self._values())
            background.start(partial(self._run_background, of_thread, target, writer, name))
        except BaseException:
            if writer is not None:
                writer.close()
            raise
        return target.directory / name

    def _run_background(self, agreement: Agreement, target: _Target, writer: ShardWriter, name: str) -> None:
        """Runs on the thread, while training continues."""
        try:
            with agreement.agreed("writing"), closing(writer):
                self._finish(target, writer)
            self._publish(agreement, target, writer, name)
        except BaseException:
            if target.draft is not None:
                target.draft.discard()
            raise

    # ------------------------------------------------------------------ the phases

    def _open(self, target: _Target, rank_data: bytes, progress: Progress | None) -> ShardWriter:
        rank = self._agreement.rank
        if not target.folder.is_dir():
            raise CheckpointError(
                f"{target.folder} was created by rank 0 and does not exist for rank {rank}\n"
                "  fix:   save to a file system that all machines share"
            )
        write_whole(target.folder / rank_state.file_of(rank), rank_data)
        meter = ProgressMeter(progress)
        writer = ShardWriter(self._view, rank, target.folder, target.files, target.places, meter)
        if progress is not None:
            meter.total = writer.num_bytes(self._blocks()) + sum(v.nbytes for v in self._values().values())
        return writer

    def _finish(self, target: _Target, writer: ShardWriter) -> None:
        """Make this rank's bytes durable, and tell rank 0 their checksums."""
        writer.finish()
        rank = self._agreement.rank
        if rank:
            parts = [[*part.key, part.start, part.num_bytes, part.crc32] for part in writer.written]
            write_whole(target.folder / _parts_file(rank), json.dumps({"parts": parts}).encode())

    def _publish(self, agreement: Agreement, target: _Target, writer: ShardWriter, name: str | None) -> str:
        with agreement.agreed("publishing"):
            if target.draft is None:
                return ""
            self._write_manifest(target, writer)
            return target.draft.publish(self._snapshot.step, target.keep, name).name

    def _write_manifest(self, target: _Target, writer: ShardWriter) -> None:
        folder, ranks = target.folder, range(self._agreement.num_ranks)
        by_others = itertools.chain.from_iterable(_take_parts(folder, rank) for rank in ranks[1:])
        entries = entries_of(target.places, [*writer.written, *by_others])
        rank_files = {}
        for rank in ranks:
            data = read_bytes(folder / rank_state.file_of(rank), _MAX_PARTS_BYTES)
            rank_files[rank_state.file_of(rank)] = FileEntry(len(data), crc32(data))
        manifest = self._snapshot.manifest(target.files, rank_files, entries)
        write_whole(folder / MANIFEST, manifest.to_bytes())

    def _values(self) -> dict[Key, torch.Tensor]:
        """Tensors outside of blocks, which every rank has. Rank 0 writes them."""
        return self._snapshot.values if self._agreement.rank == 0 else {}

    def _blocks(self) -> Iterator[BlockContent]:
        yield from self._snapshot.parameter_blocks()
        yield from self._snapshot.state_blocks()


def _parts_file(rank: int) -> str:
    return f"parts-{rank:05}.json"


def _take_parts(folder: Path, rank: int) -> Iterator[WrittenPart]:
    """Read and remove the list of what another rank has written."""
    path = folder / _parts_file(rank)
    for section, name, start, num_bytes, checksum in parse(read_bytes(path, _MAX_PARTS_BYTES), path)["parts"]:
        yield WrittenPart((section, name), start, num_bytes, checksum)
    path.unlink()
