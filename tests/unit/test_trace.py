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


def test_the_oldest_go_and_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "MAX_EVENTS", 2)
    trace = small()
    assert [span.name for span in trace.spans] == ["layer.1"]
    assert len(list(trace.samples)) == 1
    assert trace.num_dropped == 1
    few = Trace(max_events=1)
    few.held("RAM", 0.0, 1)
    few.held("RAM", 1.0, 2)
    assert [(sample.num_bytes, few.num_dropped) for sample in few.samples] == [(2, 1)]


def test_what_is_under_way_at_once_gets_rows_of_one_name(tmp_path: Path) -> None:
    trace = Trace()
    for start, seconds in ((0.0, 2.0), (1.0, 2.0), (2.0, 1.0), (2.5, 1.0)):
        trace.span("layer", Category.FETCH, "NVMe", start, seconds, 1)
    trace.span("layer", Category.COMPUTE, "compute", 0.0, 1.0)
    trace.write(tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    rows = [event["tid"] for event in events if event["ph"] == "X"]
    assert rows == [1, 3, 1, 4, 2]
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert names == {1: "NVMe", 2: "compute", 3: "NVMe", 4: "NVMe"}
    assert list(traces.read(tmp_path / "t.json").spans) == list(trace.spans)


def test_the_file_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small().write(tmp_path / "t.json")
    before = (tmp_path / "t.json").read_text()
    broken = small()
    broken.span("x", Category.COMPUTE, "compute", 0.0, 1.0, object())  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        broken.write(tmp_path / "t.json")
    assert (tmp_path / "t.json").read_text() == before
    (tmp_path / "link.json").symlink_to("t.json")
    Trace("another").write(tmp_path / "link.json")
    assert traces.read(tmp_path / "t.json").title == "another"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.json", "t.json"]
    small().write("/dev/null")
    assert not Path("/dev/null").is_file()


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "is not a trace"), ("[]", "no traceEvents"), ('{"traceEvents": [{"ph": "X"}]}', "has an unknown event")],
)
def test_other_files_are_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        traces.read(tmp_path / "t.json")


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        traces.read(tmp_path / "no.json")
