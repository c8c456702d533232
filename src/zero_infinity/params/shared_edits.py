"""Edits of gathered values on several ranks: those of one rank become everybody's.

A rank's edits are found by comparing checksums, since changes through `.data` or numpy cannot be detected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from zero_infinity.comm.channel import Channel
from zero_infinity.comm.topics import EDITS
from zero_infinity.errors import UsageError
from zero_infinity.params import offloaded_param
from zero_infinity.params.dtensor import local_of
from zero_infinity.params.unit import ManagedParameter
from zero_infinity.storage.crc32 import crc32

_SAME, _EDITED, _ABSENT = 0, 1, 2  # what a rank says of a value


@dataclass(frozen=True, slots=True)
class _Value:
    """A value that the user may edit."""

    name: str
    parameter: ManagedParameter
    get: Callable[[], torch.Tensor | None]

    def flat(self) -> torch.Tensor | None:
        found = self.get()
        return self.parameter.flattened(found.detach()) if found is not None else None

    def checksum(self) -> int | None:
        flat = self.flat()
        return crc32(flat.cpu().view(torch.uint8).numpy().data) if flat is not None else None


@contextmanager
def sharing_edits(
    channel: Channel | None, parameters: Sequence[ManagedParameter], modifier_rank: int | None
) -> Iterator[None]:
    """The unsharded parameters and their gradients may be edited inside; then all ranks get one rank's edits."""
    num_ranks = channel.num_ranks if channel is not None else 1
    if modifier_rank is not None and not 0 <= modifier_rank < num_ranks:
        raise UsageError(
            f"modifier_rank is {modifier_rank}, but there {'is 1 rank' if num_ranks == 1 else f'are {num_ranks} ranks'}"
            f"\n  fix:   a rank from 0 to {num_ranks - 1}"
        )
    if channel is None:
        yield
        return
    values = [value for parameter in parameters for value in _values_of(parameter)]
    before = [value.checksum() for value in values]
    yield
    changes = [_change(old, value.checksum()) for old, value in zip(before, values, strict=True)]
    _share(channel, values, changes, modifier_rank or 0)


def _values_of(parameter: ManagedParameter) -> list[_Value]:
    def gradient() -> torch.Tensor | None:
        found = parameter.parameter.grad
        return local_of(found) if found is not None else None

    return [
        _Value(parameter.name, parameter, lambda: offloaded_param.data_of(parameter)),
        _Value(f"the gradient of {parameter.name}", parameter, gradient),
    ]


def _change(before: int | None, after: int | None) -> int:
    if after is None:
        return _ABSENT if before is None else _EDITED
    return _SAME if before == after else _EDITED


def _share(channel: Channel, values: Sequence[_Value], changes: Sequence[int], modifier: int) -> None:
    said = channel.agree(EDITS, [modifier, *changes])
    if any(numbers[0] != modifier for numbers in said):
        raise UsageError(
            f"ranks differ in modifier_rank= of zi.gathered: {[numbers[0] for numbers in said]}, by rank\n"
            "  fix:   the same value on every rank"
        )
    lost = []
    for number, value in enumerate(values):
        editors = [rank for rank, numbers in enumerate(said) if numbers[1 + number] == _EDITED]
        if editors:
            _spread(channel, value, modifier)
            if modifier not in editors:
                lost.append((value.name, editors[0]))
    if lost:
        name, rank = lost[0]
        more = f" (and {len(lost) - 1} more)" if len(lost) > 1 else ""
        raise UsageError(
            f"{name!r}{more} was edited inside zi.gathered on rank {rank} and not on rank {modifier}, whose values "
            f"every rank gets: the edit is dropped\n"
            f"  fix:   the same edit on rank {modifier} or on all ranks, or zi.gathered(..., modifier_rank={rank})"
        )


def _spread(channel: Channel, value: _Value, modifier: int) -> None:
    flat = value.flat()
    has = [bool(one) for (one,) in channel.agree(EDITS, [flat is not None])]
    if flat is None or not all(has):
        without = [rank for rank, one in enumerate(has) if not one]
        raise UsageError(
            f"{value.name!r} was set or removed inside zi.gathered, and ranks {without} have none\n"
            "  fix:   set or remove a gradient on every rank"
        )
    here = flat.cpu()
    channel.spread(EDITS, here, source=modifier)
    found = value.get()
    if found is not None:
        with torch.no_grad():
            found.copy_(here.as_strided(value.parameter.shape, value.parameter.stride))
