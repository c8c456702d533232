from __future__ import annotations

from zero_infinity.planner.rank_links import VirtualLink
from zero_infinity.trace import Category, Trace


def test_a_link_does_one_thing_after_the_other() -> None:
    link = VirtualLink("drive")
    assert link.occupy("a", Category.FETCH, ready=1.0, seconds=2.0, num_bytes=10) == 3.0
    assert link.occupy("b", Category.FETCH, ready=0.0, seconds=1.0, num_bytes=5) == 4.0
    assert link.occupy("c", Category.FETCH, ready=9.0, seconds=1.0) == 10.0
    assert (link.busy_seconds, link.num_bytes) == (4.0, 15)


def test_latency_delays_the_bytes_and_not_the_next_transfer() -> None:
    link = VirtualLink("drive", latency=0.5)
    assert link.occupy("a", Category.FETCH, 0.0, 1.0) == 1.5
    assert link.occupy("b", Category.FETCH, 0.0, 1.0) == 2.5


def test_transfers_take_time_of_the_cores() -> None:
    link = VirtualLink("drive", cpu_seconds_per_byte=0.25)
    link.occupy("a", Category.FETCH, 0.0, 1.0, num_bytes=8)
    assert link.cpu_seconds == 2.0


def test_what_takes_no_time_is_not_traced() -> None:
    trace = Trace("test", {})
    link = VirtualLink("drive", trace=trace)
    link.occupy("nothing", Category.FETCH, 0.0, 0.0)
    assert not list(trace.spans)
    link.occupy("something", Category.FETCH, 0.0, 1.0)
    assert [span.name for span in trace.spans] == ["something"]
