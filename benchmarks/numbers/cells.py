"""What tables have in common: where a result comes from, sizes, the model."""

from __future__ import annotations

from typing import Any

_GIB = 2**30


def origin(result: dict[str, Any]) -> str:
    machine = ", ".join(str(value) for key, value in result["machine"].items() if key != "load")
    return f"`{result['command']}`, commit {result['commit']}, {result['date'][:10]}; {machine}"


def size(num_bytes: float) -> str:
    return f"{num_bytes / _GIB:.1f} GiB" if num_bytes >= _GIB else f"{num_bytes / 2**20:.0f} MiB"


def model(race: dict[str, Any]) -> str:
    return f"{race['layers']} layers x {race['hidden']}, batch {race['batch']} x {race['seq']}"
