"""Folders of safetensors files as Hugging Face lays them out: one file, or several with an index.

Knows which file has which tensor. Names are converted in `hf_names`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from zero_infinity.checkpoint.file_io import OpenFile, write_whole
from zero_infinity.checkpoint.safetensors_header import read_header
from zero_infinity.checkpoint.strict_json import JsonFields, parse, read_bytes
from zero_infinity.checkpoint.verify import StoredTensor
from zero_infinity.errors import CheckpointError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,250}\.safetensors")
_MAX_INDEX_BYTES = 1 << 28


def open_weights(path: Path, stack: ExitStack) -> dict[str, StoredTensor]:
    """The tensors of a file, of an index, or of a folder that has either."""
    if path.is_file():
        return _open_indexed(path, stack) if path.suffix == ".json" else _open(path, stack)
    if (path / INDEX).is_file():
        return _open_indexed(path / INDEX, stack)
    if (path / SINGLE).is_file():
        return _open(path / SINGLE, stack)
    if not path.exists():
        raise CheckpointError(f"{path} does not exist\n  fix:   a .safetensors file, or a folder of them")
    if (path / ".metadata").is_file():
        raise CheckpointError(
            f"{path} is a checkpoint of torch.distributed.checkpoint, whose .metadata is a pickle; "
            "pickles can run code and are not read\n"
            "  fix:   if you trust it: state = model.state_dict(); dcp.load(state, checkpoint_id=path); "
            "model.load_state_dict(state). Or write it with HuggingFaceStorageWriter, as safetensors"
        )
    if any(path.glob("shard-*.safetensors")):
        raise CheckpointError(
            f"{path} has each rank's parts of tensors (torch.distributed.checkpoint), not whole tensors\n"
            "  fix:   also write whole tensors: HuggingFaceStorageWriter(..., enable_consolidation=True)"
        )
    pickled = " (pickled weights can run code and are not read)" if [*path.glob("*.bin"), *path.glob("*.pt*")] else ""
    raise CheckpointError(
        f"{path} has neither {SINGLE} nor {INDEX}{pickled}\n"
        "  fix:   a folder written by model.save_pretrained(...) of transformers, or a .safetensors file"
    )


def _open(path: Path, stack: ExitStack) -> dict[str, StoredTensor]:
    entries = read_header(path)[1]
    file = stack.enter_context(OpenFile(path))
    return {name: StoredTensor(name, file, e.start, e.dtype, e.shape) for name, e in entries.items()}


def _open_indexed(path: Path, stack: ExitStack) -> dict[str, StoredTensor]:
    folder = path.parent
    places = JsonFields(parse(read_bytes(path, _MAX_INDEX_BYTES), path), str(path)).table("weight_map")
    for name, file in places.items():
        if not isinstance(file, str) or _FILE_NAME.fullmatch(file) is None:
            raise CheckpointError(
                f"{path} is damaged: {name[:200]!r} is in {str(file)[:200]!r}, which is not a valid file name"
            )
    files = {file: _open(folder / file, stack) for file in dict.fromkeys(places.values())}
    for name, file in places.items():
        if name not in files[file]:
            raise CheckpointError(f"{folder / file} has no tensor {name!r}, which {path.name} lists")
    return {name: files[file][name] for name, file in places.items()}


def write_index(folder: Path, files: Mapping[str, str], num_bytes: int) -> None:
    """Write the index of tensors (name -> file); a single file gets its conventional name instead."""
    names = set(files.values())
    if len(names) == 1:
        os.rename(folder / names.pop(), folder / SINGLE)
        return
    index = {"metadata": {"total_size": num_bytes}, "weight_map": files}
    write_whole(folder / INDEX, json.dumps(index, indent=2).encode() + b"\n")
