"""Writes tensors that come one at a time as a new folder of safetensors files, as Hugging Face lays them out.

The folder appears when it is complete. Names, dtypes and shapes are known before the first value.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from zero_infinity.checkpoint.copy_into_block import to_file_bytes
from zero_infinity.checkpoint.file_io import OpenFile, create, storage_errors, sync_directory, write_whole
from zero_infinity.checkpoint.file_layout import SHARD_BYTES, TensorKind, plan_files
from zero_infinity.checkpoint.manifest import MODEL
from zero_infinity.checkpoint.safetensors_header import NAMES
from zero_infinity.checkpoint.weight_files import write_index
from zero_infinity.errors import ConfigError, UsageError


def kind_of(dtype: torch.dtype, shape: Iterable[int], convert: torch.dtype | None = None) -> TensorKind:
    """How a tensor is stored; `convert`: the dtype of floating-point ones."""
    return TensorKind(NAMES[convert if convert is not None and dtype.is_floating_point else dtype], tuple(shape))


def check_folder(directory: Path, dtype: torch.dtype | None) -> None:
    """Raise if weights cannot be written there, or not in this dtype."""
    if dtype is not None and (dtype not in NAMES or not dtype.is_floating_point):
        raise ConfigError(f"dtype {dtype} is not supported for weights\n  fix:   one of float32, bfloat16, float16")
    with storage_errors(directory, "export to"):
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise UsageError(f"{directory} exists and is not empty\n  fix:   export to a new folder")


def folder_beside(directory: Path) -> Path:
    """A new folder to write to, on the same file system as `directory`."""
    with storage_errors(directory, "export to"):
        directory.parent.mkdir(parents=True, exist_ok=True)
        aside = directory.parent / f".exporting-{secrets.token_hex(8)}"
        aside.mkdir()
    return aside


@contextmanager
def new_folder(directory: Path) -> Iterator[Path]:
    """Yield a folder to write files to, which becomes `directory` at the end."""
    aside = folder_beside(directory)
    try:
        yield aside
        with storage_errors(directory, "name"):
            sync_directory(aside)
            aside.rename(directory)
            sync_directory(directory.parent)
    except BaseException:
        shutil.rmtree(aside)
        raise


def write_weights(
    directory: Path,
    kinds: Mapping[str, TensorKind],
    values: Iterable[tuple[str, torch.Tensor]],
    others: Mapping[str, bytes] | None = None,
) -> int:
    """Write `values`, each converted to its kind's dtype, and the files `others`; returns the bytes of the weights."""
    check_folder(directory, None)
    files, places = plan_files({(MODEL, name): kind for name, kind in kinds.items()}, SHARD_BYTES)
    num_bytes = sum(kind.num_bytes for kind in kinds.values())
    with new_folder(directory) as aside:
        for name, file in files.items():
            create(aside / name, file.beginning, file.num_bytes)
        missing = set(kinds)
        with ExitStack() as stack:
            opened = {name: stack.enter_context(OpenFile(aside / name, writable=True)) for name in files}
            for name, value in values:
                place = places[MODEL, name]
                if tuple(value.shape) != place.kind.shape:
                    raise UsageError(f"{name!r} has the shape {tuple(value.shape)}, not {place.kind.shape}")
                opened[place.file].write(place.start, to_file_bytes(value.detach().contiguous(), place.kind.dtype))
                missing.discard(name)
            if missing:
                raise UsageError(f"{len(missing)} tensors have no value, {min(missing)!r} among them")
            for written in opened.values():
                written.sync()
        write_index(aside, {name: place.file for (_, name), place in places.items()}, num_bytes)
        for name, data in (others or {}).items():
            write_whole(aside / name, data)
    return num_bytes
