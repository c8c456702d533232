"""Gradients of one unit on their way through a sum over ranks: this rank's own, the average, and several averages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from zero_infinity.comm.reduce_scatter import LocalGradients, ReducedShard
from zero_infinity.optim.chunk_update import FreshGradients
from zero_infinity.optim.state_records import Segment
from zero_infinity.params.unit import ManagedParameter, Unit
from zero_infinity.policy.partition import Span


def local_gradients(unit: Unit, pieces: Mapping[int, torch.Tensor], *, stays: bool = False) -> LocalGradients:
    """Return this rank's gradients of a unit, flat, by their offset in the unit. `stays`: the sum, on the device."""
    sum_dtype = torch.float64 if unit.dtype is torch.float64 else torch.float32
    return LocalGradients(unit.shards, sum_dtype, pieces, stays=stays)


class ReducedGradients:
    """The average over ranks of the gradients of one unit's parameters: the shard that this rank updates."""

    __slots__ = ("_scale", "_shard", "parameters")

    def __init__(self, parameters: Sequence[ManagedParameter], shard: ReducedShard, scale: float) -> None:
        self.parameters = parameters  # those with a gradient on any rank
        self._shard = shard
        self._scale = scale  # it was sent multiplied by this

    @property
    def is_ready(self) -> bool:
        return self._shard.is_ready

    @property
    def is_partial(self) -> bool:
        self._shard.wait()
        return self._shard.kind.is_partial

    def part(self, segment: Segment) -> torch.Tensor | None:
        """Return the elements of `segment`; None if no rank has a gradient of its parameter. Waits."""
        if segment.parameter not in self.parameters:
            return None
        first = segment.parameter.offset - self._shard.span.start
        part = self._shard.wait()[first + segment.start : first + segment.stop]
        return part if self._scale == 1 else part / self._scale

    def on_device(self) -> tuple[Span, torch.Tensor]:
        """Return the shard where it was summed, for what this thread launches from now on."""
        there = self._shard.there()
        return self._shard.span, there if self._scale == 1 else there / self._scale


class HeldGradients:
    """All sums of one unit that wait for `step()`; they add up."""

    is_partial = False

    def __init__(self) -> None:
        self.parameters: dict[ManagedParameter, None] = {}
        self._sums: list[FreshGradients] = []

    def add(self, parameters: Iterable[ManagedParameter], gradients: FreshGradients) -> None:
        self.parameters.update(dict.fromkeys(parameters))
        self._sums.append(gradients)

    @property
    def is_ready(self) -> bool:
        return all(gradients.is_ready for gradients in self._sums)

    def part(self, segment: Segment) -> torch.Tensor | None:
        parts = [part for gradients in self._sums if (part := gradients.part(segment)) is not None]
        return sum(parts[1:], parts[0]) if parts else None
