"""The manifest of a checkpoint, and the format of checkpoints. Reads and writes the manifest, no tensors.

    manifest.json                      names, shapes, dtypes, checksums, and everything that is not a tensor
    model-00001-of-00002.safetensors   parameters and buffers, whole, under the names of `model.state_dict()`
    optimizer-00001-of-....safetensors optimizer states per element, as "exp_avg/NAME"
    rank-00000.json                    one per rank that saved: its random states and its `extra`

The safetensors files are identical, byte for byte, for any number of ranks, stage and budget.

Every byte is covered by a checksum: tensors by a CRC-32 per piece, headers and rank files by one each (verified in
`verify.py`), and the manifest by a SHA-256 of itself in its first line (verified here).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero_infinity.checkpoint import json_codec
from zero_infinity.checkpoint.safetensors_header import DTYPES, num_bytes_of
from zero_infinity.checkpoint.strict_json import JsonFields, parse, read_bytes
from zero_infinity.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT = "zero_infinity checkpoint"
VERSION = 1
# A checksum covers this many bytes of a tensor. Loading a part of a tensor reads all pieces that overlap it.
PIECE_BYTES = 2 << 20

MODEL, OPTIMIZER = "model", "optimizer"
FILE_NAME = re.compile(r"(model|optimizer)-\d{5,9}-of-\d{5,9}\.safetensors|rank-\d{5,9}\.json")
_MAX_BYTES = 1 << 30
_FIRST_LINE = re.compile(rb'\{"sha256": "([0-9a-f]{64})",\n')


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor in one of the files.

    `order`: the order in which dimensions are stored, if that is not row-major (channels_last).
    """

    file: str
    dtype: str
    shape: tuple[int, ...]
    crc32: tuple[int, ...]
    order: tuple[int, ...] | None = None

    @property
    def num_bytes(self) -> int:
        return num_bytes_of(self.dtype, self.shape)


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file's size, and the checksum of its header (of tensors) or of the whole (of a rank)."""

    num_bytes: int
    crc32: int


@dataclass(frozen=True, slots=True)
class GroupEntry:
    """A parameter group of the optimizer."""

    settings: dict[str, Any]
    parameters: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StateEntry:
    """The optimizer's state of one parameter: names in the optimizer's order; what is not a scalar is a tensor."""

    names: tuple[str, ...]
    scalars: dict[str, Any]

    @property
    def slots(self) -> tuple[str, ...]:
        return tuple(name for name in self.names if name not in self.scalars)


@dataclass(frozen=True, slots=True)
class OptimizerEntry:
    """The optimizer without its tensors."""

    kind: str
    groups: tuple[GroupEntry, ...]
    states: dict[str, StateEntry]  # by parameter

    def as_json(self) -> dict[str, Any]:
        groups, encode = [], json_codec.encode
        for group in self.groups:
            settings = encode(group.settings, "param_groups")
            groups.append({"settings": settings, "parameters": list(group.parameters)})
        states = {
            name: {"names": list(state.names), "scalars": encode(state.scalars, f"the state of {name}")}
            for name, state in self.states.items()
        }
        return {"class": self.kind, "groups": groups, "states": states}


@dataclass(frozen=True, slots=True)
class Manifest:
    """One checkpoint."""

    step: int
    num_ranks: int  # that wrote it
    model_class: str
    model_config: dict[str, Any] | None  # of a Hugging Face model
    tensors: dict[str, dict[str, TensorEntry]]  # by section and name
    tied: dict[str, str]  # further names of parameters
    optimizer: OptimizerEntry | None
    loss_scale: dict[str, float] | None
    files: dict[str, FileEntry]

    def to_bytes(self) -> bytes:
        body = json.dumps(self._as_json(), indent=1, allow_nan=False).encode()
        rest = body.removeprefix(b"{\n") + b"\n"
        return b'{"sha256": "%s",\n' % hashlib.sha256(rest).hexdigest().encode() + rest

    def _as_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": VERSION,
            "step": self.step,
            "num_ranks": self.num_ranks,
            "piece_bytes": PIECE_BYTES,
            "model_class": self.model_class,
            "model_config": self.model_config,
            "loss_scale": self.loss_scale,
            "tied": self.tied,
            "optimizer": None if self.optimizer is None else self.optimizer.as_json(),
            "files": {name: {"bytes": file.num_bytes, "crc32": file.crc32} for name, file in self.files.items()},
            "tensors": {
                section: {name: _tensor_as_json(tensor) for name, tensor in tensors.items()}
                for section, tensors in self.tensors.items()
            },
        }


def _tensor_as_json(tensor: TensorEntry) -> dict[str, Any]:
    order = {"order": list(tensor.order)} if tensor.order is not None else {}
    shape, crc32 = list(tensor.shape), list(tensor.crc32)
    return {"file": tensor.file, "dtype": tensor.dtype, "shape": shape, **order, "crc32": crc32}


def read(folder: Path) -> Manifest:
    """Read a manifest and check every field. The other files are not looked at."""
    path = folder / MANIFEST
    data = read_bytes(path, _MAX_BYTES)
    first = _FIRST_LINE.match(data)
    values = parse(data, path)
    fields = JsonFields(values, str(path))
    if values.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not the manifest of a zero_infinity checkpoint")
    version = values.get("version")
    if version != VERSION or isinstance(version, bool):
        raise CheckpointError(
            f"{path} has version {str(version)[:40]} of the format; this library reads version {VERSION}\n"
            "  fix:   load it with the zero_infinity that wrote it, or a later one"
        )
    if first is None or hashlib.sha256(data[first.end() :]).hexdigest() != first.group(1).decode():
        raise CheckpointError(f"{path} is damaged: its content does not match its SHA-256")
    if fields.count("piece_bytes") != PIECE_BYTES:
        raise CheckpointError(f"{path}: pieces of {fields.count('piece_bytes')} bytes, not {PIECE_BYTES}")
    files = {name: _file(name, value, path) for name, value in fields.table("files").items()}
    sections = JsonFields(fields.table("tensors"), f"{path}: tensors")
    tensors = {
        section: {name: _tensor(name, value, path, files) for name, value in sections.table(section).items()}
        for section in (MODEL, OPTIMIZER)
    }
    loss_scale, config = values.get("loss_scale"), values.get("model_config")
    return Manifest(
        step=fields.count("step"),
        num_ranks=fields.count("num_ranks"),
        model_class=fields.text("model_class"),
        model_config=config if isinstance(config, dict) else None,
        tensors=tensors,
        tied=_tied(fields.table("tied"), tensors[MODEL], path),
        optimizer=None if values.get("optimizer") is None else _optimizer(fields.table("optimizer"), path),
        loss_scale=None if loss_scale is None else _loss_scale(loss_scale, path),
        files=files,
    )


def _file(name: str, value: object, path: Path) -> FileEntry:
    # This also rejects "../x" and absolute paths.
    if FILE_NAME.fullmatch(name) is None:
        raise CheckpointError(f"{path} is damaged: {name[:200]!r} is not the name of a checkpoint file")
    fields = JsonFields(value, f"{path}: file {name!r}")
    return FileEntry(fields.count("bytes"), fields.count("crc32"))


def _tensor(name: str, value: object, path: Path, files: Mapping[str, FileEntry]) -> TensorEntry:
    fields = JsonFields(value, f"{path}: tensor {name[:200]!r}")
    file, dtype, shape = fields.text("file"), fields.text("dtype"), fields.counts("shape")
    order = fields.counts("order") if "order" in fields.values else None
    if dtype not in DTYPES or file not in files or len(shape) > 64:
        raise CheckpointError(f"{fields.where} is damaged: {dtype[:40]!r} in {file[:200]!r}")
    if order is not None and sorted(order) != list(range(len(shape))):
        raise CheckpointError(f"{fields.where} is damaged: {list(order)} is not an order of {len(shape)} dimensions")
    entry = TensorEntry(file, dtype, shape, fields.counts("crc32"), order)
    if len(entry.crc32) != num_pieces(entry.num_bytes):
        raise CheckpointError(
            f"{fields.where} is damaged: {len(entry.crc32)} checksums for {num_pieces(entry.num_bytes)} pieces"
        )
    return entry


def num_pieces(num_bytes: int) -> int:
    return -(-num_bytes // PIECE_BYTES)


def _tied(values: Mapping[str, object], model: Mapping[str, TensorEntry], path: Path) -> dict[str, str]:
    tied = {}
    for name, other in values.items():
        if not isinstance(other, str) or other not in model or name in model:
            raise CheckpointError(f"{path} is damaged: {name[:200]!r} is tied to {str(other)[:200]!r}")
        tied[name] = other
    return tied


def _optimizer(values: dict[str, Any], path: Path) -> OptimizerEntry:
    fields = JsonFields(values, f"{path}: optimizer")
    groups = []
    for value in fields.items("groups"):
        group = JsonFields(value, f"{path}: a parameter group")
        settings = _decoded(group, "settings")
        if "params" in settings:  # would replace the optimizer's parameters
            raise CheckpointError(f"{group.where} is damaged: its settings have 'params'")
        groups.append(GroupEntry(settings, group.texts("parameters")))
    states = {}
    for name, value in fields.table("states").items():
        state = JsonFields(value, f"{path}: the state of {name[:200]!r}")
        states[name] = StateEntry(state.texts("names"), _decoded(state, "scalars"))
    return OptimizerEntry(fields.text("class"), tuple(groups), states)


def _loss_scale(value: object, path: Path) -> dict[str, float]:
    fields = JsonFields(value, f"{path}: the loss scale")
    scale = fields.values.get("scale")
    if not isinstance(scale, float) or scale <= 0:
        raise CheckpointError(f"{fields.where} is damaged: {str(scale)[:40]!r}")
    return {"scale": scale, "num_skipped": fields.count("num_skipped"), "num_good": fields.count("num_good")}


def _decoded(fields: JsonFields, name: str) -> dict[str, Any]:
    value = json_codec.decode(fields.table(name), fields.where)
    if not isinstance(value, dict):
        raise CheckpointError(f"{fields.where} is damaged: {name!r} is not a JSON object")
    return value
