"""Each rank's own state in a checkpoint: random number generators, and what the user passes as `extra`."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from zero_infinity.checkpoint import json_codec
from zero_infinity.checkpoint.strict_json import JsonFields, parse
from zero_infinity.checkpoint.verify import OpenCheckpoint
from zero_infinity.errors import CheckpointError, UsageError


def file_of(rank: int) -> str:
    return f"rank-{rank:05}.json"


def to_bytes(extra: Mapping[str, Any], device: torch.device) -> bytes:
    """This rank's current state; its model computes on `device`. Objects in `extra` may have a `state_dict`."""
    states = {}
    if not isinstance(extra, Mapping):
        raise UsageError(f"extra is a {type(extra).__name__}, not a dict\n  fix:   extra={{'name': value, ...}}")
    for name, value in extra.items():
        if not isinstance(name, str):
            raise UsageError(f"extra has the key {name!r}, not a str\n  fix:   extra={{'name': value, ...}}")
        state = value.state_dict() if callable(getattr(value, "state_dict", None)) else value
        states[name] = json_codec.encode(state, f"extra[{name!r}]")
    random_states = json_codec.encode(_random_states(device), "the random states")
    return json.dumps({"random": random_states, "extra": states}, indent=1, allow_nan=False).encode()


def read(checkpoint: OpenCheckpoint, rank: int) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """The random states of the rank with this number (None if there was none), and its `extra` (or that of rank 0)."""
    is_own = rank < checkpoint.manifest.num_ranks
    name = file_of(rank if is_own else 0)
    path = checkpoint.folder / name
    fields = JsonFields(parse(checkpoint.read_rank_file(name), path), str(path))
    extra = {key: json_codec.decode(value, f"{path}: extra[{key!r}]") for key, value in fields.table("extra").items()}
    states = json_codec.decode(fields.table("random"), f"{path}: the random states")
    return (states if is_own else None), extra


def restore_random(states: dict[str, Any], device: torch.device) -> None:
    """Restore the random number generators; the model computes on `device`."""
    try:
        torch.set_rng_state(states["torch"])
        random.setstate(states["python"])
        np.random.set_state(states["numpy"])
        accelerator = _accelerator(device)
        if accelerator is not None and states.get("device") == accelerator.type:
            torch.get_device_module(accelerator).set_rng_state(states["accelerator"], accelerator)
    except (KeyError, TypeError, ValueError, RuntimeError, IndexError) as error:
        raise CheckpointError(f"the random states of the checkpoint are damaged: {error}") from error


def restore_objects(extra: Mapping[str, Any], objects: Mapping[str, Any]) -> None:
    """Call `load_state_dict` of the objects that have one."""
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


def _random_states(device: torch.device) -> dict[str, Any]:
    states = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()}
    accelerator = _accelerator(device)
    if accelerator is not None:
        states["device"] = accelerator.type
        states["accelerator"] = torch.get_device_module(accelerator).get_rng_state(accelerator)
    return states


def _accelerator(device: torch.device) -> torch.device | None:
    """Each accelerator has a generator. The model's may not be the current one."""
    return device if device.type != "cpu" else torch.accelerator.current_accelerator(check_available=True)
