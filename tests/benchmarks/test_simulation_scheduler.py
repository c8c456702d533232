"""The simulation's threads: they take turns that the seed decides, on a clock that jumps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.simulation.primitives import namespaces
from benchmarks.simulation.scheduler import Scheduler


def scheduler(seed: int = 0) -> Scheduler:
    return Scheduler(seed, preemption=0.5, limit_seconds=100.0, limit_turns=10_000)


def threads(made: Scheduler) -> Any:
    return next(value for model, value in namespaces(made).items() if getattr(model, "__name__", "") == "threading")


def order_of(seed: int) -> list[int]:
    made, seen = scheduler(seed), []
    lock = threads(made).Lock()

    def work(number: int) -> Callable[[], None]:
        def run() -> None:
            for _ in range(5):
                with lock:
                    seen.append(number)

        return run

    made.run([work(number) for number in range(3)])
    return seen


def test_the_seed_decides_about_the_order() -> None:
    assert order_of(1) == order_of(1)
    assert len({tuple(order_of(seed)) for seed in range(8)}) > 1


def test_a_lock_has_one_owner() -> None:
    made = scheduler()
    lock, inside = threads(made).Lock(), []

    def work() -> None:
        with lock:
            inside.append(1)
            made.sleep(1.0)
            assert len(inside) == 1
            inside.clear()

    made.run([work] * 4)
    assert made.stuck is None
    assert made.now == pytest.approx(4.0)


def test_waits_take_virtual_time_and_end_early_when_they_are_notified() -> None:
    made = scheduler()
    changed, results = threads(made).Condition(), {}

    def wait(seconds: float) -> Callable[[], None]:
        def run() -> None:
            with changed:
                results[seconds] = changed.wait(seconds), made.now

        return run

    def notify() -> None:
        made.sleep(5.0)
        with changed:
            changed.notify_all()

    made.run([wait(2.0), wait(50.0), notify])
    assert results == {2.0: (False, 2.0), 50.0: (True, 5.0)}


def test_a_deadlock_is_told_with_everybodys_place() -> None:
    made = scheduler()
    one, other = threads(made).Lock(), threads(made).Lock()

    def work(first: Any, second: Any) -> Callable[[], None]:
        def run() -> None:
            with first:
                made.sleep(1.0)
                with second:
                    pass

        return run

    made.run([work(one, other), work(other, one)])
    assert made.stuck is not None
    assert made.stuck.startswith("nobody can run")
    assert made.stuck.count("with second:") == 2


def test_a_killed_rank_unwinds_unseen() -> None:
    made = scheduler()
    steps: list[str] = []
    event = threads(made).Event()

    def victim() -> None:
        try:
            event.wait()
        finally:
            steps.append("unwinds")
            made.sleep(10.0)  # raises
            steps.append("sleeps")

    def other() -> None:
        made.sleep(1.0)
        made.kill(0)
        made.sleep(1.0)
        steps.append("goes on")

    made.run([victim, other])
    assert steps == ["unwinds", "goes on"]
    assert made.now == pytest.approx(2.0)
    assert made.stuck is None
