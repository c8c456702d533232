"""Exports a checkpoint's weights as safetensors files that `from_pretrained` of transformers reads.

Needs neither the model's code nor its memory: tensors are copied piece by piece, verified, and converted to another
dtype if requested. If transformers is installed and knows the model, fused weights get the names and shapes of its
files (`hf_names`); those are in memory one at a time.
"""

from __future__ import annotations

import json
import mmap
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zero_infinity.checkpoint.checkpoint_directory import find
from zero_infinity.checkpoint.copy_into_block import to_file_bytes
from zero_infinity.checkpoint.file_io import OpenFile, create, write_whole
from zero_infinity.checkpoint.file_layout import SHARD_BYTES, FilePlace, TensorKind, plan_files
from zero_infinity.checkpoint.hf_names import NameConversion, NamePlan, plan_export
from zero_infinity.checkpoint.io_thread_pool import IOThreadPool, Job, Progress, ProgressMeter
from zero_infinity.checkpoint.manifest import MODEL, Manifest
from zero_infinity.checkpoint.rank_parts import Key
from zero_infinity.checkpoint.safetensors_header import DTYPES
from zero_infinity.checkpoint.save import CheckpointSave
from zero_infinity.checkpoint.snapshot import Which
from zero_infinity.checkpoint.training_view import TrainingView
from zero_infinity.checkpoint.verify import OpenCheckpoint
from zero_infinity.checkpoint.weight_files import write_index
from zero_infinity.checkpoint.weight_writer import check_folder, folder_beside, kind_of, new_folder
from zero_infinity.comm.checkpoint_agreement import Agreement
from zero_infinity.errors import UsageError
from zero_infinity.params.packed_layers import HOLDER

_ROOM_BYTES = 20 << 20
_PAGES_BYTES = (2 << 20) + (8 << 10)


def export_checkpoint(
    checkpoint: Path,
    directory: Path,
    *,
    dtype: torch.dtype | None = None,
    model: nn.Module | None = None,
    progress: Progress | None = None,
) -> int:
    """Write the weights of `checkpoint` to the new folder `directory`; returns their bytes.

    `dtype`: of floating-point weights (default: as saved). `model`: used to convert names, if available.
    """
    check_folder(directory, dtype)
    with ExitStack() as stack:
        opened = OpenCheckpoint(find(checkpoint), stack)
        export = _Export(opened, dtype, model or _from_config(opened.manifest))
        files, places = plan_files(export.kinds, SHARD_BYTES)
        num_bytes = sum(kind.num_bytes for kind in export.kinds.values())
        with new_folder(directory) as aside:
            for name, file in files.items():
                create(aside / name, file.beginning, file.num_bytes)
            export.write(aside, places, ProgressMeter(progress, num_bytes))
            write_index(aside, {name: place.file for (_, name), place in places.items()}, num_bytes)
            for name, values in _settings(opened.manifest, dtype).items():
                write_whole(aside / name, json.dumps(values, indent=2).encode() + b"\n")
    return num_bytes


class WeightExport:
    """Exports a prepared model: all ranks save a temporary checkpoint, which rank 0 exports."""

    def __init__(self, model: nn.Module, view: TrainingView) -> None:
        self._model = model
        self._view = view
        self._agreement = Agreement("zi.export", view.ranks, view.step_channel)

    def write(self, directory: Path, dtype: torch.dtype | None, progress: Progress | None = None) -> None:
        agreement = self._agreement
        aside = None
        with agreement.agreed("creating the folder"):
            if agreement.rank == 0:
                check_folder(directory, dtype)
                aside = folder_beside(directory)
        try:
            name = agreement.of_first("the folder", aside.name if aside is not None else "")
            saving = CheckpointSave(self._model, self._view, with_optimizer=False, which=Which.OF_PART)
            saved = saving.write(directory.parent / name, {}, None, progress=progress)
            with agreement.agreed("writing"):
                if agreement.rank == 0:
                    export_checkpoint(saved, directory, dtype=dtype, model=self._model, progress=progress)
        finally:
            if aside is not None:
                shutil.rmtree(aside)


def _refuse_quantised(names: Iterable[str]) -> None:
    found = next((name for name in names if name.split(".")[-1] == HOLDER), None)
    if found is not None:
        raise UsageError(
            f"{found!r} has weights as their library quantised them, which from_pretrained cannot read\n"
            "  fix:   export adapters only (model.save_pretrained, or save_model of the trainer), or the weights that "
            "were quantised"
        )


class _Export:
    """The tensors to write and their sources."""

    def __init__(self, opened: OpenCheckpoint, dtype: torch.dtype | None, model: nn.Module | None) -> None:
        self._sources = {name: tensor for (section, name), tensor in opened.tensors.items() if section == MODEL}
        _refuse_quantised(self._sources)
        self._dtype = dtype
        self._model = model
        self._plan = self._names()
        self.kinds: dict[Key, TensorKind] = {}
        for target, source in self._plan.direct.items():
            tensor = self._sources[source]
            self.kinds[MODEL, target] = self._kind(tensor.dtype, tensor.true_shape)
        for conversion in self._plan.conversions:
            for target, made in self._apply(conversion, meta=True).items():
                self.kinds[MODEL, target] = self._kind(made.dtype, tuple(made.shape))

    def _names(self) -> NamePlan:
        try:
            plan = plan_export(self._model, self._sources)
            for conversion in plan.conversions:
                self._apply(conversion, meta=True)
        except Exception:  # noqa: BLE001 - what transformers cannot convert keeps its names, which can be read as well
            return NamePlan({name: name for name in self._sources})
        return plan

    def _kind(self, dtype: torch.dtype, shape: tuple[int, ...]) -> TensorKind:
        return kind_of(dtype, shape, self._dtype)

    def _apply(self, conversion: NameConversion, *, meta: bool) -> dict[str, torch.Tensor]:
        return conversion.apply(self._model or nn.Module(), partial(self._read, meta=meta))

    def _read(self, name: str, *, meta: bool) -> torch.Tensor:
        source = self._sources[name]
        if meta:
            return source.on_meta()
        return source.whole(memoryview(mmap.mmap(-1, _PAGES_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)))

    def write(self, folder: Path, places: Mapping[Key, FilePlace], meter: ProgressMeter) -> None:
        names = dict.fromkeys(place.file for place in places.values())
        with ExitStack() as stack:
            opened = {name: stack.enter_context(OpenFile(folder / name, writable=True)) for name in names}

            def put(target: str, elements: torch.Tensor, first: int) -> None:
                """Write elements of a tensor, from the one with index `first` on."""
                place = places[MODEL, target]
                data = to_file_bytes(elements, place.kind.dtype)
                opened[place.file].write(place.start + first * DTYPES[place.kind.dtype].itemsize, data)
                meter.add(len(data))

            with IOThreadPool(_ROOM_BYTES) as thread_pool:
                thread_pool.run(self._direct_jobs(put))
                for conversion in self._plan.conversions:
                    for target, made in self._apply(conversion, meta=False).items():
                        put(target, made, 0)
            for file in opened.values():
                file.sync()

    def _direct_jobs(self, put: Callable[[str, torch.Tensor, int], None]) -> Iterator[Job]:
        for target, name in self._plan.direct.items():
            source, use = self._sources[name], partial(put, target)
            if source.order is not None:
                yield partial(source.read_whole, use=use)
            else:
                for number in source.pieces(0, source.num_bytes // source.dtype.itemsize):
                    yield partial(source.read_piece, number, use=use)


def _settings(manifest: Manifest, dtype: torch.dtype | None) -> dict[str, Any]:
    """The JSON files that accompany the weights of a Hugging Face model."""
    files = {}
    for name in ("config.json", "generation_config.json"):
        values = (manifest.model_config or {}).get(name)
        if isinstance(values, dict):
            files[name] = dict(values)
    if "config.json" in files:
        floating = [DTYPES[tensor.dtype] for tensor in manifest.tensors[MODEL].values()]
        saved = next((found for found in floating if found.is_floating_point), torch.float32)
        files["config.json"]["dtype"] = str(dtype or saved).removeprefix("torch.")
    return files


def _from_config(manifest: Manifest) -> nn.Module | None:
    """The model on the meta device, if transformers is installed and knows it."""
    config = (manifest.model_config or {}).get("config.json")
    if not isinstance(config, dict):
        return None
    try:
        import transformers

        kind: Any = getattr(transformers, manifest.model_class)
        with torch.device("meta"):
            model: nn.Module = kind(transformers.AutoConfig.for_model(**config))
    except Exception:  # noqa: BLE001 - names are not converted then
        return None
    return model
