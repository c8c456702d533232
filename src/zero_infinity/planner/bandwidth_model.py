"""How much bandwidth training needs (arXiv 2104.07857, section 4). Pure.

    efficiency = compute time / (compute time + communication time) = ait x bw / (ait x bw + peak)

`ait`, the arithmetic intensity, is operations per byte moved. The equation looks at one kind of data at a time and
overlaps nothing: it says what must be had, not how long a step takes; that is the simulator's answer.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

# Achieved by a V100 with communication switched off: from 62 (hidden 8K) to 78 (hidden 64K) TFLOP/s (section 4.2).
V100_PEAK = 70e12
V100_PEAK_RANGE = (62e12, 78e12)


class DataKind(enum.StrEnum):
    """What moves in a step."""

    PARAMETERS = "parameters and gradients"
    OPTIMIZER = "optimizer states"
    ACTIVATIONS = "activation checkpoints"

    @property
    def can_overlap(self) -> bool:
        """Whether computation can hide it in the paper's system: its optimizer step comes after backward."""
        return self is not DataKind.OPTIMIZER


def parameter_intensity(batch: float, seq: int) -> float:
    """Three loads of the parameters and one store of the gradients, 2 bytes each: seq x batch."""
    return seq * batch


def optimizer_intensity(batch: float, seq: int) -> float:
    """16 bytes a parameter read and written: seq x batch / 4."""
    return seq * batch / 4


def checkpoint_intensity(hidden: int, interval: int = 1) -> float:
    """A checkpoint is stored and loaded once: 24 x hidden x interval."""
    return 24.0 * hidden * interval


def efficiency(intensity: float, bytes_per_second: float, peak: float = V100_PEAK) -> float:
    return intensity * bytes_per_second / (intensity * bytes_per_second + peak)


def required_bandwidth(intensity: float, target: float, peak: float = V100_PEAK) -> float:
    """The bandwidth at which `efficiency` is `target`."""
    return target * peak / ((1 - target) * intensity)


@dataclass(frozen=True, slots=True)
class Requirement:
    """What one kind of data needs for the efficiency that is aimed at."""

    data: DataKind
    target: float
    bytes_per_second: float
    aggregate: bool  # over all devices (each moves its shard), not for each one


def requirements(batch: float, seq: int, hidden: int, interval: int, peak: float) -> list[Requirement]:
    """The paper's targets: half of the peak where the transfer can hide, 90% where it cannot."""
    kinds = (
        (DataKind.PARAMETERS, 0.5, parameter_intensity(batch, seq)),
        (DataKind.OPTIMIZER, 0.9, optimizer_intensity(batch, seq)),
        (DataKind.ACTIVATIONS, 0.5, checkpoint_intensity(hidden, interval)),
    )
    return [
        Requirement(data, target, required_bandwidth(intensity, target, peak), aggregate=data is DataKind.OPTIMIZER)
        for data, target, intensity in kinds
    ]


def owner_bandwidth(link: float, gather: float) -> float:
    """A parameter with one owner: through that one's host link, then broadcast. More devices do not help."""
    return min(link, gather)


def partitioned_bandwidth(num_devices: int, link: float, gather: float) -> float:
    """A parameter split over all devices: every host link at once, then an all-gather."""
    return min(num_devices * link, gather)
