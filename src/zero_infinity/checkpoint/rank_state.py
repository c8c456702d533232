"""What each rank has of its own: the states of its random generators, and what the user gives as `extra`."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from zero_infinity.checkpoint import json_codec
from zero_infinity.checkpoint.manifest import Manifest
from zero_infinity.checkpoint.strict_json import JsonFields, parse, read_bytes
from zero_infinity.errors import CheckpointError, UsageError
from zero_infinity.storage.checksum import crc32

_MAX_BYTES = 1 << 30


def file_of(rank: int) -> str:
    return f"rank-{rank:05}.json"


def to_bytes(extra: Mapping[str, Any]) -> bytes:
    """This rank's state as it is now; objects in `extra` that have a `state_dict` give that."""
    states = {}
    if not isinstance(extra, Mapping):
        raise UsageError(f"extra is a {type(extra).__name__}, not a dict\n  fix:   extra={{'name': value, ...}}")
    for name, value in extra.items():
        if not isinstance(name, str):
            raise UsageError(f"extra has the key {name!r}, which is no text\n  fix:   extra={{'name': value, ...}}")
        state = value.state_dict() if callable(getattr(value, "state_dict", None)) else value
        states[name] = json_codec.encode(state, f"extra[{name!r}]")
    random_states = json_codec.encode(_random_states(), "the random states")
    return json.dumps({"random": random_states, "extra": states}, indent=1, allow_nan=False).encode()


def read(folder: Path, manifest: Manifest, rank: int) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """The random states that a rank of this number had, if there was one, and its `extra`, else that of the first."""
    is_own = rank < manifest.num_ranks
    name = file_of(rank if is_own else 0)
    entry = manifest.files.get(name)
    path = folder / name
    if entry is None:
        raise CheckpointError(f"{folder} is damaged: its manifest knows no {name}")
    data = read_bytes(path, _MAX_BYTES)
    if len(data) != entry.num_bytes or crc32(data) != entry.crc32:
        raise CheckpointError(f"{path} is damaged: its checksum is not the one in the manifest")
    fields = JsonFields(parse(data, path), str(path))
    extra = {key: json_codec.decode(value, f"{path}: extra[{key!r}]") for key, value in fields.table("extra").items()}
    states = json_codec.decode(fields.table("random"), f"{path}: the random states")
    return (states if is_own else None), extra


def restore_random(states: dict[str, Any]) -> None:
    """Let random generators go on from where they were."""
    try:
        _restore_random(states)
    except (KeyError, TypeError, ValueError, RuntimeError, IndexError) as error:
        raise CheckpointError(f"the random states of the checkpoint are none: {error}") from error


def _restore_random(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device is not None and states.get("device") == device.type:
        torch.get_device_module(device).set_rng_state(states["accelerator"])


def restore_objects(extra: Mapping[str, Any], objects: Mapping[str, Any]) -> None:
    """Give objects with a `load_state_dict` their states."""
    for name, target in objects.items():
        if callable(getattr(target, "load_state_dict", None)):
            target.load_state_dict(extra[name])


def check_objects(extra: Mapping[str, Any], objects: Mapping[str, Any], folder: Path) -> None:
    missing = [name for name in objects if name not in extra]
    if missing:
        raise CheckpointError(
            f"{folder} has no extra {', '.join(map(repr, missing))}; it has {', '.join(map(repr, extra)) or 'none'}\n"
            "  fix:   leave it out of zi.load(extra=...)"
        )


def _random_states() -> dict[str, Any]:
    states = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state(),
    }
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device is not None:
        states["device"] = device.type
        states["accelerator"] = torch.get_device_module(device).get_rng_state()
    return states
