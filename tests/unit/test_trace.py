from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from zero_infinity import trace as traces
from zero_infinity.errors import ConfigError
from zero_infinity.trace import Category, Trace


def small() -> Trace:
    trace = Trace("a step", {"RAM": 1000})
    trace.span("layer.0", Category.COMPUTE, "compute", 0.0, 0.5)
    trace.span("layer.1", Category.FETCH, "NVMe", 0.25, 1.0, 4096)
    trace.held("RAM", 0.5, 700)
    return trace


def test_round_trip(tmp_path: Path) -> None:
    small().write(tmp_path / "t.json")
    again = traces.read(tmp_path / "t.json")
    assert (list(again.spans), list(again.samples)) == (list(small().spans), list(small().samples))
    assert (again.title, again.budgets, again.num_dropped) == ("a step", {"RAM": 1000}, 0)


def test_the_file_is_what_chrome_reads(tmp_path: Path) -> None:
    small().write(tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert [event["ph"] for event in events] == ["M", "M", "X", "X", "C"]
    fetch = events[3]
    assert (fetch["name"], fetch["cat"], fetch["ts"], fetch["dur"], fetch["args"]) == (
        "layer.1", "fetch", 250000.0, 1000000.0, {"bytes": 4096},
    )  # fmt: skip


def test_an_empty_trace_is_a_file_too(tmp_path: Path) -> None:
    Trace().write(tmp_path / "t.json")
    assert list(traces.read(tmp_path / "t.json").spans) == []


def test_many_threads_lose_nothing() -> None:
    trace = Trace()

    def record(lane: str) -> None:
        for number in range(2000):
            trace.span(str(number), Category.UPDATE, lane, float(number), 0.5)

    threads = [threading.Thread(target=record, args=(f"lane {n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(list(trace.spans)) == 8000


def test_what_is_too_much_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "MAX_EVENTS", 1)
    trace = small()
    assert len(list(trace.spans)) == 1
    assert trace.num_dropped == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "is not a trace"), ("[]", "no traceEvents"), ('{"traceEvents": [{"ph": "X"}]}', "not one of ours")],
)
def test_other_files_are_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        traces.read(tmp_path / "t.json")


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        traces.read(tmp_path / "no.json")
