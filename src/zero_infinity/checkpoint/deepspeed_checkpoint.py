"""Reads the weights of DeepSpeed's checkpoints: of ZeRO stages 1 to 3, universal ones, and those without ZeRO.

A parameter is put together when it is asked for, from the parts that ranks have saved; files are mapped, not loaded.
Optimizer states are not read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from zero_infinity.checkpoint.file_layout import TensorKind
from zero_infinity.checkpoint.tensors_of_pickle import Ignored, read_tensors, read_value
from zero_infinity.checkpoint.weight_writer import kind_of
from zero_infinity.errors import CheckpointError

_OF_RANK = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_(optim|model)_states\.pt")
_FIX = (
    "  fix:   DeepSpeed's own script in the folder above it: python zero_to_fp32.py . weights --safe_serialization; "
    "then zi.load_pretrained(model, 'weights')"
)


@dataclass(slots=True)
class DeepSpeedWeights:
    """The weights of a checkpoint: their names and sizes now, each value when it is asked for."""

    kinds: dict[str, TensorKind] = field(default_factory=dict)
    _makers: dict[str, Callable[[], torch.Tensor]] = field(default_factory=dict)

    def add(self, name: str, dtype: torch.dtype, shape: Sequence[int], convert: torch.dtype | None, make: Any) -> None:
        self.kinds[name] = kind_of(dtype, shape, convert)
        self._makers[name] = make

    def leave_out(self, name: str) -> None:
        self.kinds.pop(name, None)
        self._makers.pop(name, None)

    def values(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, make in self._makers.items():
            yield name, make()


def read_deepspeed(path: Path, dtype: torch.dtype | None = None) -> DeepSpeedWeights:
    """Find the weights of a checkpoint: its folder, or the one above it with `latest`; `dtype`: what to convert to."""
    folder = _folder(path)
    if (folder / "zero").is_dir():
        return _universal(folder, dtype)
    files = [file for file in folder.iterdir() if file.name.endswith("_states.pt")]
    if not files:
        raise CheckpointError(f"{folder} has no *_states.pt: this is not a checkpoint of DeepSpeed")
    _refuse_others(folder, files)
    by_rank: dict[str, dict[int, Path]] = {"optim": {}, "model": {}}
    for file in files:
        if (found := _OF_RANK.fullmatch(file.name)) is not None:
            by_rank[found[3]][int(found[1])] = file
    if not by_rank["optim"]:
        return _whole(folder / "mp_rank_00_model_states.pt", dtype)
    return _zero(folder, by_rank["optim"], by_rank["model"], dtype)


def _folder(path: Path) -> Path:
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a folder\n  fix:   the folder that engine.save_checkpoint was given")
    for name in ("latest_universal", "latest"):
        if (path / name).is_file():
            tag = (path / name).read_text(encoding="utf-8").strip()
            if not tag or Path(tag).name != tag or not (path / tag).is_dir():
                raise CheckpointError(f"{path / name} names {tag[:200]!r}, which is no folder beside it")
            return path / tag
    return path


def _refuse_others(folder: Path, files: Sequence[Path]) -> None:
    for file in files:
        if "expert" in file.name or file.name.startswith("layer_"):
            kind = "experts" if "expert" in file.name else "pipeline stages"
            raise CheckpointError(f"{folder} has files of {kind} ({file.name}), which are not read\n{_FIX}")
        found = re.search(r"mp_rank_(\d+)_", file.name)
        if found is not None and int(found[1]):
            raise CheckpointError(f"{folder} is of several tensor-parallel ranks ({file.name})\n{_FIX}")


def _whole(file: Path, dtype: torch.dtype | None) -> DeepSpeedWeights:
    """Without ZeRO each rank has everything."""
    weights = DeepSpeedWeights()
    seen: dict[tuple[int, torch.Size], str] = {}
    for name, value in _table(read_tensors(file), "module", file).items():
        if isinstance(value, torch.Tensor):
            place = (value.data_ptr(), value.shape)
            if value.numel() and place in seen:
                continue  # tied
            seen[place] = name
            weights.add(name, value.dtype, value.shape, dtype, value.clone)
    return weights


def _universal(folder: Path, dtype: torch.dtype | None) -> DeepSpeedWeights:
    """A folder for each parameter that was trained; the rest is in the files of the model, as with ZeRO."""
    by_rank = {}
    for file in folder.glob("*_model_states.pt"):
        found = _OF_RANK.fullmatch(file.name)
        by_rank[int(found[1]) if found is not None else 0] = file
    files = [by_rank[rank] for rank in sorted(by_rank)]
    _refuse_others(folder, files)
    models = [read_tensors(file) for file in files]
    shapes: dict[str, Sequence[int]] = {}
    for group in (models[0].get("param_shapes") or []) if models else []:
        shapes.update(group)
    weights = DeepSpeedWeights()
    for file in sorted((folder / "zero").rglob("fp32.pt")):
        name = str(file.parent.relative_to(folder / "zero"))
        value = _parameter_of(file, shapes.get(name))
        make = partial(_parameter_of, file, shapes.get(name))
        weights.add(name, value.dtype, value.shape, dtype, make)
    if not weights.kinds:
        raise CheckpointError(f"{folder / 'zero'} has no parameter")
    if models:
        _add_buffers(weights, models[0], files[0], dtype)
        _add_frozen(weights, models, dtype)
    return weights


def _parameter_of(file: Path, shape: Sequence[int] | None) -> torch.Tensor:
    """Of stages 1 and 2 in a mapping; of stage 3 as a vector, which may be padded."""
    found = read_value(file)
    value = found.get("param") if isinstance(found, dict) else found
    if not isinstance(value, torch.Tensor):
        raise CheckpointError(f"{file} has no tensor 'param'")
    if isinstance(found, dict):
        return value
    if shape is None or value.numel() < math.prod(shape):
        raise CheckpointError(
            f"{file} has {value.numel():,} elements, and *_model_states.pt does not say in which shape"
        )
    return value.flatten()[: math.prod(shape)].view(shape)


def _zero(
    folder: Path, optim_files: Mapping[int, Path], model_files: Mapping[int, Path], dtype: torch.dtype | None
) -> DeepSpeedWeights:
    files = [optim_files[rank] for rank in sorted(optim_files)]
    states = [_table(read_tensors(file), "optimizer_state_dict", file) for file in files]
    stage = _number(states[0].get("zero_stage"))
    counts = states[0].get("partition_count")
    num_ranks = max(map(_number, counts)) if isinstance(counts, list) else _number(counts)
    if sorted(optim_files) != list(range(num_ranks)):
        raise CheckpointError(
            f"{folder} has the states of {len(optim_files)} ranks, and {num_ranks} ranks have saved it\n"
            "  fix:   copy the files of all ranks into one folder"
        )
    if stage == 3:
        models = [read_tensors(model_files[rank]) for rank in sorted(model_files)]
        first, first_file = models[0] if models else {}, model_files.get(0, folder)
        if len(models) != num_ranks:
            raise CheckpointError(f"{folder} has {len(models)} *_model_states.pt, and {num_ranks} ranks have saved it")
        groups = [_tensors(state.get("fp32_flat_groups"), "fp32_flat_groups", folder) for state in states]
    else:
        first_file = folder / "mp_rank_00_model_states.pt"
        models = [first := read_tensors(first_file)]
        groups = [
            _tensors(state.get("single_partition_of_fp32_groups"), "single_partition_of_fp32_groups", folder)
            for state in states
        ]
    shapes = first.get("param_shapes")
    if not isinstance(shapes, list) or not all(isinstance(group, dict) for group in shapes):
        raise CheckpointError(f"{first_file} has no 'param_shapes'\n{_FIX}")
    weights = DeepSpeedWeights()
    _add_buffers(weights, first, first_file, dtype)
    _add_frozen(weights, models, dtype)
    add = _add_stage_3 if stage == 3 else _add_stage_2
    add(weights, shapes, groups, folder, dtype)
    for name in first.get("shared_params") or {}:  # tied: saved under the other name
        weights.leave_out(name)
    return weights


def _add_buffers(weights: DeepSpeedWeights, states: Mapping[str, Any], file: Path, dtype: torch.dtype | None) -> None:
    module = _table(states, "module", file)
    for name in states.get("buffer_names") or []:
        value = module.get(name)
        if isinstance(value, torch.Tensor):
            weights.add(name, value.dtype, value.shape, dtype, value.clone)


def _add_frozen(weights: DeepSpeedWeights, models: Sequence[Mapping[str, Any]], dtype: torch.dtype | None) -> None:
    """Frozen parameters are in the files of the model: whole, or at stage 3 in equal parts."""
    for name, shape in (models[0].get("frozen_param_shapes") or {}).items():
        parts = [model["frozen_param_fragments"][name].flatten() for model in models]
        make = partial(_joined, parts, math.prod(shape), shape)
        weights.add(name, parts[0].dtype, shape, dtype, make)


def _joined(parts: Sequence[torch.Tensor], numel: int, shape: Sequence[int]) -> torch.Tensor:
    return torch.cat(list(parts))[:numel].view(shape)


def _add_stage_2(
    weights: DeepSpeedWeights,
    shapes: Sequence[Mapping[str, Sequence[int]]],
    groups: Sequence[Sequence[torch.Tensor]],
    folder: Path,
    dtype: torch.dtype | None,
) -> None:
    """Each group is one long vector, of which each rank has a part."""
    for number, group in enumerate(shapes):
        parts = [of_rank[number] for of_rank in groups]
        offset = 0
        for name, shape in group.items():
            numel = math.prod(shape)
            weights.add(
                name,
                parts[0].dtype,
                shape,
                dtype,
                lambda p=parts, o=offset, n=numel, s=shape: torch.cat(_slices(p, o, n)).view(s),
            )
            offset += numel
        _check_length(folder, offset, sum(part.numel() for part in parts), 2 * len(groups))


def _add_stage_3(
    weights: DeepSpeedWeights,
    shapes: Sequence[Mapping[str, Sequence[int]]],
    groups: Sequence[Sequence[torch.Tensor]],
    folder: Path,
    dtype: torch.dtype | None,
) -> None:
    """Each parameter is cut into equal parts, one for each rank; a rank's parts follow each other over its groups."""
    offset = 0
    for name, shape in (pair for group in shapes for pair in group.items()):
        numel = math.prod(shape)
        part = math.ceil(numel / len(groups))

        def make(at: int = offset, part: int = part, numel: int = numel, shape: Any = shape) -> torch.Tensor:
            return torch.cat([x for of_rank in groups for x in _slices(of_rank, at, part)])[:numel].view(shape)

        weights.add(name, groups[0][0].dtype, shape, dtype, make)
        offset += part
    for of_rank in groups:
        _check_length(folder, offset, sum(vector.numel() for vector in of_rank), 1)


def _slices(vectors: Sequence[torch.Tensor], offset: int, numel: int) -> list[torch.Tensor]:
    """The elements from `offset` on of vectors that follow each other."""
    found = []
    for vector in vectors:
        if numel and offset < vector.numel():
            taken = min(numel, vector.numel() - offset)
            found.append(vector.flatten()[offset : offset + taken])
            numel -= taken
            offset = 0
        else:
            offset -= vector.numel() if numel else 0
    return found or [vectors[0].flatten()[:0]]


def _check_length(folder: Path, needed: int, there: int, align: int) -> None:
    """The vectors may be padded to a multiple of `align`, not more."""
    if not needed <= there <= math.ceil(needed / align) * align:
        raise CheckpointError(f"{folder} has {there:,} elements where its parameters have {needed:,}\n{_FIX}")


def _table(states: Mapping[str, Any], name: str, file: Path) -> dict[str, Any]:
    found = states.get(name)
    if not isinstance(found, dict):
        raise CheckpointError(
            f"{file} has no {name!r}: this is not a checkpoint of DeepSpeed that is known here\n{_FIX}"
        )
    return found


def _tensors(found: Any, name: str, folder: Path) -> list[torch.Tensor]:
    if not isinstance(found, list) or not found or not all(isinstance(value, torch.Tensor) for value in found):
        raise CheckpointError(f"{folder} has no list of tensors {name!r}\n{_FIX}")
    return found


def _number(value: Any) -> int:
    """A number, which may be of an enumeration that was not imported."""
    if isinstance(value, Ignored) and value.arguments:
        value = value.arguments[0]
    return int(value) if isinstance(value, int) else 0
