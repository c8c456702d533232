"""Traces: spans in lanes and held bytes, recorded in memory and written as Chrome trace JSON.

Owns the record and its file format, which chrome://tracing and ui.perfetto.dev open, and which `zero-infinity report`
draws. It does not know the source of the events: a real run on its clock, or the simulator on a virtual one.

Recording costs one tuple and one `deque.append`, which is atomic in CPython: any thread may record, without a lock.
Nothing is written before `write`. A trace keeps its latest events, up to a limit set at construction.
"""

from __future__ import annotations

import enum
import functools
import json
import os
import threading
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from pathlib import Path
from typing import Any, TextIO

from zero_infinity.errors import ConfigError

# An event takes about 200 bytes of memory: beyond this many, the oldest are dropped and only counted.
MAX_EVENTS = 2_000_000
# Lanes and tiers that a run and a simulation share.
PHASES = "phase"  # of the step: forward, backward, update
COMPUTE = "compute"
WAIT = "wait"
UPDATE = "update"
RANKS = "device to device"
DEVICE = "device"
COPIES = "copies"  # of parameters, in RAM, if there is no device
HOST = "RAM"
STORAGE = "NVMe"
_MICRO = 1e6  # Chrome uses microseconds
_PROCESS = 1
_SAME_MOMENT = 1e-9  # seconds: float sums are not exact, and the file has no more digits


class Category(enum.StrEnum):
    """The kind of a span; the report colours by it."""

    PHASE = "phase"  # a part of the step, including everything in it
    COMPUTE = "compute"
    FETCH = "fetch"  # towards the device: NVMe to host, host to device
    COLLECTIVE = "collective"
    GRADIENT = "gradient"  # away from the device
    UPDATE = "update"
    WRITE_BACK = "write-back"
    ACTIVATION = "activation"
    WAIT = "wait"  # the compute thread waited


@dataclass(frozen=True, slots=True)
class TraceSpan:
    name: str  # of the module
    category: str
    lane: str  # a thread or a link
    start: float  # seconds
    seconds: float
    num_bytes: int = 0  # moved, if any


@dataclass(frozen=True, slots=True)
class MemorySample:
    """Bytes that a tier holds from this moment on."""

    tier: str
    time: float
    num_bytes: int


_SpanTuple = tuple[str, str, str, float, float, int]
_SampleTuple = tuple[str, float, int]


@dataclass(slots=True)
class Trace:
    """Spans and samples in the order in which they were recorded."""

    title: str = ""
    budgets: dict[str, int] = field(default_factory=dict)  # tier -> bytes
    num_dropped: int = 0  # approximate: threads do not synchronise to count
    max_events: int | None = None  # None: MAX_EVENTS
    _events: deque[_SpanTuple | _SampleTuple] = field(init=False)

    def __post_init__(self) -> None:
        self._events = deque(maxlen=MAX_EVENTS if self.max_events is None else self.max_events)

    def span(self, name: str, category: Category, lane: str, start: float, seconds: float, num_bytes: int = 0) -> None:
        """Record something that took `seconds`, beginning at `start`."""
        events = self._events
        if len(events) == events.maxlen:
            self.num_dropped += 1
        events.append((name, category, lane, start, seconds, num_bytes))

    def held(self, tier: str, time: float, num_bytes: int) -> None:
        """Record that a tier holds `num_bytes` from `time` on."""
        events = self._events
        if len(events) == events.maxlen:
            self.num_dropped += 1
        events.append((tier, time, num_bytes))

    @property
    def spans(self) -> Iterator[TraceSpan]:
        return (TraceSpan(*event) for event in list(self._events) if len(event) == 6)

    @property
    def samples(self) -> Iterator[MemorySample]:
        return (MemorySample(*event) for event in list(self._events) if len(event) == 3)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write Chrome trace JSON, one event per line, so that a large file can be read as text.

        It is written to a temporary file and then renamed: readers see the complete old file or the complete new one.
        """
        target = Path(os.path.realpath(path))
        if target.exists() and not target.is_file():  # a pipe, /dev/null
            with target.open("w", encoding="utf-8") as file:
                self._write(file)
            return
        aside = target.with_name(f".{target.name}.{os.getpid()}-{threading.get_ident()}")
        try:
            with aside.open("w", encoding="utf-8") as file:
                self._write(file)
            aside.replace(target)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise

    def _write(self, file: TextIO) -> None:
        other = {"title": self.title, "budgets": self.budgets, "num_dropped": self.num_dropped}
        file.write(f'{{"otherData": {json.dumps(other)},\n"displayTimeUnit": "ms",\n"traceEvents": [\n')
        file.write(",\n".join(_chrome_events(list(self.spans), self.samples)))
        file.write("\n]}\n")


def _chrome_events(spans: list[TraceSpan], samples: Iterator[MemorySample]) -> Iterator[str]:
    """Yield JSON, formatted by hand: more than twice as fast as `json`, and there are few names."""
    quoted = functools.cache(json.dumps)
    rows, names = _rows(spans)
    for number, lane in enumerate(names, 1):
        name = quoted(lane)
        yield f'{{"ph": "M", "name": "thread_name", "pid": {_PROCESS}, "tid": {number}, "args": {{"name": {name}}}}}'
    for span, row in zip(spans, rows, strict=True):
        args = f', "args": {{"bytes": {span.num_bytes:d}}}' if span.num_bytes else ""
        yield (
            f'{{"ph": "X", "name": {quoted(span.name)}, "cat": "{span.category}", "pid": {_PROCESS}, "tid": {row}, '
            f'"ts": {span.start * _MICRO:.3f}, "dur": {span.seconds * _MICRO:.3f}{args}}}'
        )
    for sample in samples:
        name = quoted(f"held: {sample.tier}")
        yield (
            f'{{"ph": "C", "name": {name}, "pid": {_PROCESS}, "ts": {sample.time * _MICRO:.3f}, '
            f'"args": {{"bytes": {sample.num_bytes:d}}}}}'
        )


def _rows(spans: list[TraceSpan]) -> tuple[list[int], list[str]]:
    """Return a row for each span, and the lane of each row (starting at 1).

    Viewers require the spans of a row to be sequential. Spans of a lane that overlap (four requests at one drive) get
    separate rows; the rows of a lane share its name.
    """
    names = list(dict.fromkeys(span.lane for span in spans))
    free = {lane: number for number, lane in enumerate(names, 1)}  # first unused row of each lane
    ends: defaultdict[str, list[tuple[float, int]]] = defaultdict(list)  # of the last span in each row
    rows = [0] * len(spans)
    for index in sorted(range(len(spans)), key=lambda i: spans[i].start):
        span = spans[index]
        in_lane = ends[span.lane]
        if in_lane and in_lane[0][0] <= span.start + _SAME_MOMENT:
            row = heappop(in_lane)[1]
        elif span.lane in free:
            row = free.pop(span.lane)
        else:
            names.append(span.lane)
            row = len(names)
        rows[index] = row
        heappush(in_lane, (span.start + span.seconds, row))
    return rows, names


def read(path: str | os.PathLike[str]) -> Trace:
    """Read a trace from its file; raises `ConfigError` if it is not one."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: is not a trace: {error}") from None
    if not isinstance(content, dict) or not isinstance(content.get("traceEvents"), list):
        raise ConfigError(f"{path}: is not a trace: it has no traceEvents")
    other = content.get("otherData", {})
    trace = Trace(
        str(other.get("title", "")),
        dict(other.get("budgets", {})),
        int(other.get("num_dropped", 0)),
        max_events=len(content["traceEvents"]),
    )
    try:
        _take_events(trace, content["traceEvents"])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path}: has an unknown event: {error!r}") from None
    return trace


def _take_events(trace: Trace, events: list[dict[str, Any]]) -> None:
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    for event in events:
        if event["ph"] == "X":
            num_bytes = int(event.get("args", {}).get("bytes", 0))
            lane = lanes.get(event["tid"], str(event["tid"]))
            start, seconds = event["ts"] / _MICRO, event["dur"] / _MICRO
            trace._events.append((event["name"], event["cat"], lane, start, seconds, num_bytes))
        elif event["ph"] == "C":
            tier = event["name"].removeprefix("held: ")
            trace._events.append((tier, event["ts"] / _MICRO, int(event["args"]["bytes"])))
