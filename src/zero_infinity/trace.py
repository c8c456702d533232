"""What happened when: spans in lanes and held bytes, in memory while it runs, as Chrome trace JSON afterwards.

Owns the record and its file format, which chrome://tracing and ui.perfetto.dev open, and which `zero-infinity report`
draws. It does not know who records: a real run on its clock, or the simulator on a virtual one.

Recording costs one tuple and one `list.append`, which the interpreter makes atomic: any thread may record, without a
lock. Nothing is written before `write`.
"""

from __future__ import annotations

import enum
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zero_infinity.errors import ConfigError

# A span is about 150 bytes in memory: beyond this many, later ones are only counted.
MAX_EVENTS = 2_000_000
_MICRO = 1e6  # Chrome counts in microseconds
_PROCESS = 1


class Category(enum.StrEnum):
    """What a span is about; the report colours by it."""

    COMPUTE = "compute"
    FETCH = "fetch"  # towards the device: NVMe to host, host to device
    COLLECTIVE = "collective"
    GRADIENT = "gradient"  # away from the device
    UPDATE = "update"
    WRITE_BACK = "write-back"
    ACTIVATION = "activation"
    WAIT = "wait"  # the computing thread stood still


@dataclass(frozen=True, slots=True)
class Span:
    name: str  # of the module
    category: str
    lane: str  # of a thread, or of a link
    start: float  # seconds
    seconds: float
    num_bytes: int = 0  # that moved, where something did


@dataclass(frozen=True, slots=True)
class Sample:
    """Bytes that a tier holds from this moment on."""

    tier: str
    time: float
    num_bytes: int


@dataclass(slots=True)
class Trace:
    """Spans and samples in the order in which they were recorded."""

    title: str = ""
    budgets: dict[str, int] = field(default_factory=dict)  # tier -> bytes
    num_dropped: int = 0
    _spans: list[tuple[str, str, str, float, float, int]] = field(default_factory=list)
    _samples: list[tuple[str, float, int]] = field(default_factory=list)

    def span(self, name: str, category: Category, lane: str, start: float, seconds: float, num_bytes: int = 0) -> None:
        """Something took `seconds` from `start` on."""
        if len(self._spans) < MAX_EVENTS:
            self._spans.append((name, category, lane, start, seconds, num_bytes))
        else:
            self.num_dropped += 1

    def held(self, tier: str, time: float, num_bytes: int) -> None:
        """A tier holds that much from `time` on."""
        if len(self._samples) < MAX_EVENTS:
            self._samples.append((tier, time, num_bytes))
        else:
            self.num_dropped += 1

    @property
    def spans(self) -> Iterator[Span]:
        return (Span(*values) for values in list(self._spans))

    @property
    def samples(self) -> Iterator[Sample]:
        return (Sample(*values) for values in list(self._samples))

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write Chrome trace JSON; events one a line, so that a large file can be read as text."""
        with Path(path).open("w", encoding="utf-8") as file:
            other = {"title": self.title, "budgets": self.budgets, "num_dropped": self.num_dropped}
            file.write(f'{{"otherData": {json.dumps(other)},\n"displayTimeUnit": "ms",\n"traceEvents": [\n')
            separator = ""
            for event in self._events():
                file.write(separator + json.dumps(event))
                separator = ",\n"
            file.write("\n]}\n")

    def _events(self) -> Iterator[dict[str, Any]]:
        lanes = {lane: number for number, lane in enumerate(dict.fromkeys(span.lane for span in self.spans), 1)}
        for lane, number in lanes.items():
            yield {"ph": "M", "name": "thread_name", "pid": _PROCESS, "tid": number, "args": {"name": lane}}
        for span in self.spans:
            event: dict[str, Any] = {
                "ph": "X",
                "name": span.name,
                "cat": span.category,
                "pid": _PROCESS,
                "tid": lanes[span.lane],
                "ts": round(span.start * _MICRO, 3),
                "dur": round(span.seconds * _MICRO, 3),
            }
            if span.num_bytes:
                event["args"] = {"bytes": span.num_bytes}
            yield event
        for sample in self.samples:
            yield {
                "ph": "C",
                "name": f"held: {sample.tier}",
                "pid": _PROCESS,
                "ts": round(sample.time * _MICRO, 3),
                "args": {"bytes": sample.num_bytes},
            }


def read(path: str | os.PathLike[str]) -> Trace:
    """A trace from its file; `ConfigError` when it is not one."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: is not a trace: {error}") from None
    if not isinstance(content, dict) or not isinstance(content.get("traceEvents"), list):
        raise ConfigError(f"{path}: is not a trace: it has no traceEvents")
    other = content.get("otherData", {})
    trace = Trace(str(other.get("title", "")), dict(other.get("budgets", {})), int(other.get("num_dropped", 0)))
    try:
        _take_events(trace, content["traceEvents"])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path}: has an event that is not one of ours: {error!r}") from None
    return trace


def _take_events(trace: Trace, events: list[dict[str, Any]]) -> None:
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    for event in events:
        if event["ph"] == "X":
            num_bytes = int(event.get("args", {}).get("bytes", 0))
            lane = lanes.get(event["tid"], str(event["tid"]))
            start, seconds = event["ts"] / _MICRO, event["dur"] / _MICRO
            trace._spans.append((event["name"], event["cat"], lane, start, seconds, num_bytes))
        elif event["ph"] == "C":
            tier = event["name"].removeprefix("held: ")
            trace._samples.append((tier, event["ts"] / _MICRO, int(event["args"]["bytes"])))
