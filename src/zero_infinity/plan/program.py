"""The order of one step: which operator computes when, and what follows it. Pure; knows neither time nor links."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from zero_infinity.plan.model import OUTSIDE, Model, Operator


class Phase(enum.StrEnum):
    FORWARD = "forward"
    REACH = "reach"  # backward comes to a checkpointed segment: its last weight is fetched before it is computed again
    RECOMPUTE = "recompute"
    BACKWARD = "backward"


_PASSES = {Phase.FORWARD: 1, Phase.REACH: 0, Phase.RECOMPUTE: 1, Phase.BACKWARD: 2}


@dataclass(frozen=True, slots=True)
class Use:
    """An operator computes once."""

    operator: Operator
    phase: Phase
    needs_weight: bool
    completes: str | None = None  # the unit whose gradient is complete after this
    stores: int | None = None  # the checkpoint that is taken before it
    loads: int | None = None  # the checkpoint that it needs

    @property
    def flops_per_token(self) -> float:
        return self.operator.flops_per_token * _PASSES[self.phase]

    @property
    def seconds(self) -> float | None:
        """As measured, if it was."""
        measured = self.operator.seconds
        if measured is None or self.phase is Phase.REACH:
            return None
        return measured[self.phase is Phase.BACKWARD]


def step(model: Model, interval: int) -> list[Use]:
    """One forward and backward pass, with a checkpoint every `interval` blocks (0: none)."""
    first_use: dict[str, int] = {}
    for index, operator in enumerate(model.operators):
        if operator.num_parameters:
            first_use.setdefault(operator.unit, index)
    uses = list(_forward(model, interval))
    for segment in reversed(_segments(model, interval)):
        uses += _backward(model, segment, first_use, interval)
    return uses


def _needs_weight(operator: Operator) -> bool:
    return operator.num_parameters > 0


def _checkpoint(operator: Operator, interval: int) -> int | None:
    return operator.block // interval if interval and operator.block != OUTSIDE else None


def _forward(model: Model, interval: int) -> Iterator[Use]:
    taken: set[int] = set()
    for operator in model.operators:
        checkpoint = _checkpoint(operator, interval)
        stores = None
        if checkpoint is not None and checkpoint not in taken:
            taken.add(checkpoint)
            stores = checkpoint
        yield Use(operator, Phase.FORWARD, _needs_weight(operator), stores=stores)


def _segments(model: Model, interval: int) -> list[list[int]]:
    """Consecutive operators that are computed again together; those outside blocks on their own."""
    segments: list[list[int]] = []
    before: int | None = None
    for index, operator in enumerate(model.operators):
        checkpoint = _checkpoint(operator, interval)
        if segments and checkpoint is not None and checkpoint == before:
            segments[-1].append(index)
        else:
            segments.append([index])
        before = checkpoint
    return segments


def _backward(model: Model, segment: list[int], first_use: dict[str, int], interval: int) -> Iterator[Use]:
    operators = [model.operators[index] for index in segment]
    checkpoint = _checkpoint(operators[0], interval)
    reached = checkpoint is not None and _needs_weight(operators[-1])
    if reached:
        yield Use(operators[-1], Phase.REACH, needs_weight=True)
    if checkpoint is not None:
        for number, operator in enumerate(operators):
            loads = checkpoint if number == 0 else None
            yield Use(operator, Phase.RECOMPUTE, _needs_weight(operator), loads=loads)
    for index, operator in zip(reversed(segment), reversed(operators), strict=True):
        last = operator.num_parameters > 0 and first_use[operator.unit] == index
        in_hand = reached and index == segment[-1]
        needs_weight = _needs_weight(operator) and operator.weight_in_backward and not in_hand
        yield Use(operator, Phase.BACKWARD, needs_weight, completes=operator.unit if last else None)
