"""The state of one parameter as a flat table, and back: some optimizers keep lists of tensors, one for each dimension.

The third tensor of a list "Q" is called "Q[2]" in the flat table, in records and in checkpoints.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch

_INDEX = re.compile(r"\[(\d+)\]")
# What a state may have beside tensors: values that a checkpoint keeps exactly.
_PLAIN = (bool, int, float, str, type(None))


def flat_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return tensors and plain values by name; raises `TypeError` for anything else."""
    return {name: leaf for key, value in state.items() for name, leaf in _leaves(str(key), value)}


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, list) and value:
        for number, item in enumerate(value):
            yield from _leaves(f"{name}[{number}]", item)
    elif isinstance(value, torch.Tensor | list) or type(value) in _PLAIN:
        yield name, value
    else:
        raise TypeError(f"state {name!r} is a {type(value).__name__}")


def nested_state(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state whose flat table this is."""
    state: dict[str, Any] = {}
    for name, leaf in flat.items():
        key = name.partition("[")[0]
        path = [int(number) for number in _INDEX.findall(name)]
        if not path:
            state[name] = leaf
            continue
        items = state.setdefault(key, [])
        for number in path[:-1]:
            if number == len(items):
                items.append([])
            items = items[number]
        items.append(leaf)
    return state


def tensors_of(flat: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of a flat table."""
    return {name: leaf for name, leaf in flat.items() if isinstance(leaf, torch.Tensor)}


def plain_values_of(flat: Mapping[str, Any]) -> dict[str, Any]:
    """What is not a tensor."""
    return {name: leaf for name, leaf in flat.items() if not isinstance(leaf, torch.Tensor)}
