"""What tables have in common: where a result comes from, sizes, the model."""

from __future__ import annotations

from typing import Any

_GIB = 2**30
# How benchmarks were called while they were part of the package. Results keep the command as it was typed.
_OLD_CALL, _CALL = "zero-infinity bench ", "python -m benchmarks "


def origin(result: dict[str, Any]) -> str:
    """The command as it is called today, the commit, the date and the machine."""
    command = result["command"].replace(_OLD_CALL, _CALL)
    machine = ", ".join(str(value) for key, value in result["machine"].items() if key != "load")
    return f"`{command}`, commit {result['commit']}, {result['date'][:10]}; {machine}"


def size(num_bytes: float) -> str:
    return f"{num_bytes / _GIB:.1f} GiB" if num_bytes >= _GIB else f"{num_bytes / 2**20:.0f} MiB"


def model(race: dict[str, Any]) -> str:
    return f"{race['layers']} layers x {race['hidden']}, batch {race['batch']} x {race['seq']}"
