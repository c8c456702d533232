"""Reads tensors, numbers, strings and containers of them from files of `torch.save`, and nothing else.

torch's restricted reader (`weights_only=True`) runs no code of a file. What a file names besides tensors becomes an
inert object here, so that a file with settings or loss scalers of another library can be read for its tensors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from zero_infinity.errors import CheckpointError


class Ignored:
    """Stands for an object of a class that is not imported; keeps the arguments it was made with."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: object) -> None:
        """Forget it."""


def read_tensors(path: Path) -> dict[str, Any]:
    """Return the mapping in a file; tensors stay in the file (mapped) until they are used."""
    found = read_value(path)
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} has a {type(found).__name__}, not a mapping")
    return found


def read_value(path: Path) -> Any:
    """Return what a file has: a tensor, or a container of tensors."""
    try:
        named = get_unsafe_globals_in_checkpoint(path)
        # A class of its own for each name: torch looks them up by value, too.
        stand_ins: list[Any] = [(type("Ignored", (Ignored,), {"__qualname__": name}), name) for name in named]
        with safe_globals(stand_ins):
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist") from None
    except Exception as error:
        text = str(error)
        reason = (text.partition("WeightsUnpickler error:")[2] or text).strip().partition("\n")[0][:300]
        raise CheckpointError(
            f"{path} cannot be read as tensors only: {reason}\n"
            "  fix:   if you trust the file, convert it with the library that wrote it"
        ) from error
