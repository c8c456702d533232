"""Scales the times of a plan's operators to one block that was timed, and says what a plan's time rests on. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from zero_infinity.errors import ConfigError
from zero_infinity.planner.hardware import Hardware
from zero_infinity.planner.model_shapes import ModelShape, OperatorShape
from zero_infinity.planner.roofline import compute_seconds
from zero_infinity.planner.step_program import OperatorRun, StepPhase
from zero_infinity.planner.training_job import Workload


class Basis(enum.Enum):
    """What the time of computation rests on, from the best to the worst."""

    TIMED = "one block of this model, timed on this machine"
    MEASURED = "rates measured on this machine"
    ESTIMATED = "data sheets and estimates in the profile"


# How far the measured step may be from the plan, as factors: round numbers that no series of runs has confirmed yet.
_RANGES = {Basis.TIMED: (0.85, 1.2), Basis.MEASURED: (0.75, 1.4), Basis.ESTIMATED: (0.6, 1.7)}


@dataclass(frozen=True, slots=True)
class TimeRange:
    """Between which seconds a step is to be expected."""

    low: float
    high: float
    basis: Basis


def time_range(seconds: float, model: ModelShape, hardware: Hardware) -> TimeRange:
    """The range of a planned time."""
    if any(operator.seconds is not None for operator in model.operators):
        basis = Basis.TIMED
    else:
        measured = hardware.sources.get("flops", "").startswith("measured")
        basis = Basis.MEASURED if measured else Basis.ESTIMATED
    low, high = _RANGES[basis]
    return TimeRange(low * seconds, high * seconds, basis)


def calibrated(workload: Workload, forward: float, backward: float) -> ModelShape:
    """The workload's model with times: operators in blocks add up to those of the block that was timed.

    What is outside blocks is scaled by the same factors.
    """
    model = workload.model
    first = [operator for operator in model.operators if operator.block == 0]
    if not first:
        raise ConfigError(f"{model.name} has no repeated blocks: there is none to time")
    planned = [sum(_seconds(operator, phase, workload) for operator in first) for phase in _TIMED]
    scales = [seconds / max(plan, 1e-12) for seconds, plan in zip((forward, backward), planned, strict=True)]
    timed = []
    for operator in model.operators:
        times = [scale * _seconds(operator, p, workload) for scale, p in zip(scales, _TIMED, strict=True)]
        timed.append(replace(operator, seconds=(times[0], times[1])))
    return replace(model, operators=tuple(timed))


_TIMED = (StepPhase.FORWARD, StepPhase.BACKWARD)


def _seconds(operator: OperatorShape, phase: StepPhase, workload: Workload) -> float:
    return compute_seconds(OperatorRun(operator, phase, needs_weight=False), workload)
