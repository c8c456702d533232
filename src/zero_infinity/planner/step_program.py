"""The order of one step: which operator computes when, and what follows it. Pure; knows neither time nor links."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from zero_infinity.planner.model_shapes import OUTSIDE, ModelShape, OperatorShape


class StepPhase(enum.StrEnum):
    FORWARD = "forward"
    REACH = "reach"  # backward comes to a checkpointed segment: its last weight is fetched before it is computed again
    RECOMPUTE = "recompute"
    BACKWARD = "backward"


_PASSES = {StepPhase.FORWARD: 1, StepPhase.REACH: 0, StepPhase.RECOMPUTE: 1}


@dataclass(frozen=True, slots=True)
class OperatorRun:
    """An operator computes once."""

    operator: OperatorShape
    phase: StepPhase
    needs_weight: bool
    completes: str | None = None  # the unit whose gradient is complete after this
    stores: int | None = None  # the checkpoint that is taken before it
    loads: int | None = None  # the checkpoint that it needs

    @property
    def flops_per_token(self) -> float:
        return self.operator.flops_per_token * _PASSES.get(self.phase, self.operator.num_backward)

    @property
    def seconds(self) -> float | None:
        """As measured, if it was."""
        measured = self.operator.seconds
        if measured is None or self.phase is StepPhase.REACH:
            return None
        return measured[self.phase is StepPhase.BACKWARD]


def step(model: ModelShape, interval: int) -> list[OperatorRun]:
    """One forward and backward pass, with a checkpoint every `interval` blocks (0: none)."""
    first_use: dict[str, int] = {}
    frozen = {name for name, states in model.unit_states.items() if states.is_frozen}
    for index, operator in enumerate(model.operators):
        if operator.num_parameters and operator.unit not in frozen:
            first_use.setdefault(operator.unit, index)
    uses = list(_forward(model, interval))
    # Backward ends at the first weight that is trained.
    first_trained = min(first_use.values(), default=len(model.operators))
    for segment in reversed(_segments(model, interval)):
        if segment[-1] < first_trained:
            continue
        uses += _backward(model, segment, first_use, interval)
    return uses


def _needs_weight(operator: OperatorShape) -> bool:
    return operator.num_parameters > 0


def _checkpoint(operator: OperatorShape, interval: int) -> int | None:
    return operator.block // interval if interval and operator.block != OUTSIDE else None


def _forward(model: ModelShape, interval: int) -> Iterator[OperatorRun]:
    taken: set[int] = set()
    for operator in model.operators:
        checkpoint = _checkpoint(operator, interval)
        stores = None
        if checkpoint is not None and checkpoint not in taken:
            taken.add(checkpoint)
            stores = checkpoint
        yield OperatorRun(operator, StepPhase.FORWARD, _needs_weight(operator), stores=stores)


def _segments(model: ModelShape, interval: int) -> list[list[int]]:
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


def _backward(model: ModelShape, segment: list[int], first_use: dict[str, int], interval: int) -> Iterator[OperatorRun]:
    operators = [model.operators[index] for index in segment]
    checkpoint = _checkpoint(operators[0], interval)
    reached = checkpoint is not None and _needs_weight(operators[-1])
    if reached:
        yield OperatorRun(operators[-1], StepPhase.REACH, needs_weight=True)
    if checkpoint is not None:
        for number, operator in enumerate(operators):
            loads = checkpoint if number == 0 else None
            yield OperatorRun(operator, StepPhase.RECOMPUTE, _needs_weight(operator), loads=loads)
    for index, operator in zip(reversed(segment), reversed(operators), strict=True):
        last = operator.num_parameters > 0 and first_use.get(operator.unit) == index
        in_hand = reached and index == segment[-1]
        needs_weight = _needs_weight(operator) and operator.weight_in_backward and not in_hand
        yield OperatorRun(operator, StepPhase.BACKWARD, needs_weight, completes=operator.unit if last else None)
