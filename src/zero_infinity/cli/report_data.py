"""Computes the data of the report page from a trace: lanes, memory, traffic and waits.

A page has a few thousand pixels, a trace up to a million spans: adjacent spans of one category within a pixel are
merged, and each pixel keeps the highest memory sample.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from zero_infinity.trace import COMPUTE, PHASES, WAIT, Category, MemorySample, Trace, TraceSpan

_PIXELS = 4000  # along the time axis: enough to zoom in a few times
_MAX_WAITS = 20
# These lanes come first, in this order; others follow by their first span.
_FIRST_LANES = (PHASES, COMPUTE, WAIT)


def page_data(trace: Trace) -> dict[str, Any]:
    spans, samples = list(trace.spans), list(trace.samples)
    start = min([s.start for s in spans] + [s.time for s in samples], default=0.0)
    end = max([s.start + s.seconds for s in spans] + [s.time for s in samples], default=0.0)
    seconds = max(end - start, 1e-9)
    return {
        "title": trace.title or "A training run",
        "seconds": seconds,
        "num_spans": len(spans),
        "num_dropped": trace.num_dropped,
        "lanes": _lanes(spans, start, seconds / _PIXELS),
        "memory": _memory(samples, trace.budgets, start, seconds / _PIXELS),
        "traffic": _traffic(spans, seconds),
        "waits": _waits(spans),
        "totals": _totals(spans),
    }


def _lanes(spans: list[TraceSpan], start: float, resolution: float) -> list[dict[str, Any]]:
    by_lane: dict[str, list[TraceSpan]] = defaultdict(list)
    for span in spans:
        by_lane[span.lane].append(span)
    order = [lane for lane in _FIRST_LANES if lane in by_lane] + [lane for lane in by_lane if lane not in _FIRST_LANES]
    return [
        {
            "name": lane,
            "spans": [
                [round(s.start - start, 9), round(s.seconds, 9), s.category, s.name, s.num_bytes]
                for s in _merged(by_lane[lane], resolution)
            ],
        }
        for lane in order
    ]


def _merged(spans: Iterable[TraceSpan], resolution: float) -> list[TraceSpan]:
    """Merge short adjacent spans of one category."""
    merged: list[TraceSpan] = []
    for span in sorted(spans, key=lambda s: s.start):
        if merged and merged[-1].category == span.category and span.seconds < resolution:
            last = merged[-1]
            if span.start - (last.start + last.seconds) < resolution and last.seconds < 2 * resolution:
                name = last.name if last.name == span.name or last.name.endswith(" …") else f"{last.name} …"
                length = max(last.seconds, span.start + span.seconds - last.start)
                merged[-1] = TraceSpan(
                    name, last.category, last.lane, last.start, length, last.num_bytes + span.num_bytes
                )
                continue
        merged.append(span)
    return merged


def _memory(
    samples: list[MemorySample], budgets: dict[str, int], start: float, resolution: float
) -> list[dict[str, Any]]:
    highest: dict[str, dict[int, int]] = defaultdict(dict)
    for sample in samples:
        bucket = int((sample.time - start) / resolution)
        highest[sample.tier][bucket] = max(highest[sample.tier].get(bucket, 0), sample.num_bytes)
    return [
        {
            "tier": tier,
            "budget": budgets.get(tier),
            "points": [[round(bucket * resolution, 9), num_bytes] for bucket, num_bytes in sorted(buckets.items())],
        }
        for tier, buckets in highest.items()
    ]


def _traffic(spans: list[TraceSpan], seconds: float) -> list[dict[str, Any]]:
    num_bytes: dict[str, int] = defaultdict(int)
    busy: dict[str, float] = defaultdict(float)  # at least one transfer is running
    until: dict[str, float] = defaultdict(lambda: -math.inf)
    for span in sorted((s for s in spans if s.num_bytes), key=lambda s: s.start):
        end = span.start + span.seconds
        num_bytes[span.lane] += span.num_bytes
        busy[span.lane] += max(0.0, end - max(span.start, until[span.lane]))
        until[span.lane] = max(until[span.lane], end)
    return [
        {"link": link, "bytes": num_bytes[link], "busy": min(1.0, busy[link] / seconds), "busy_seconds": busy[link]}
        for link in sorted(num_bytes, key=lambda name: -busy[name])
    ]


def _waits(spans: list[TraceSpan]) -> list[dict[str, Any]]:
    waits: dict[str, float] = defaultdict(float)
    for span in spans:
        if span.category == Category.WAIT:
            waits[span.name] += span.seconds
    largest = sorted(waits.items(), key=lambda item: -item[1])
    rows = [{"module": name, "seconds": seconds} for name, seconds in largest[:_MAX_WAITS]]
    rest = sum(seconds for _, seconds in largest[_MAX_WAITS:])
    return [*rows, {"module": f"{len(largest) - _MAX_WAITS} others", "seconds": rest}] if rest else rows


def _totals(spans: list[TraceSpan]) -> dict[str, float]:
    totals: dict[str, float] = defaultdict(float)
    for span in spans:
        totals[span.category] += span.seconds
    return dict(totals)
