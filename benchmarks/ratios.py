"""A quantity of one contender relative to another's, taken round by round."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ratios:
    """Of one quantity against the plain contender's, over the rounds."""

    median: float
    minimum: float
    p10: float
    p90: float
    best: float  # the least value against the plain contender's least value


def ratios(values: Sequence[float], plain: Sequence[float]) -> Ratios | None:
    found = [value / base for value, base in zip(values, plain, strict=False) if base > 0]
    if not found:
        return None
    return Ratios(
        median=statistics.median(found),
        minimum=min(found),
        p10=_percentile(found, 0.1),
        p90=_percentile(found, 0.9),
        best=min(values) / min(plain),
    )


def _percentile(values: Iterable[float], part: float) -> float:
    """Linear between the two nearest."""
    ordered = sorted(values)
    place = part * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])
