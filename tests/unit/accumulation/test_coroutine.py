from __future__ import annotations

import contextvars
import gc
import threading
import weakref
from collections.abc import Callable

import pytest

from zero_infinity.accumulation.coroutine import CancelledError, Coroutine

number = contextvars.ContextVar("number", default=0)


def counting(said: list[str], name: str, num_pauses: int) -> Coroutine[str]:
    def run() -> str:
        for turn in range(num_pauses):
            said.append(f"{name}{turn}")
            coroutine.pause()
        return name

    coroutine: Coroutine[str] = Coroutine(run, name)
    return coroutine


def test_two_take_turns() -> None:
    said: list[str] = []
    first, second = counting(said, "a", 2), counting(said, "b", 3)
    for _ in range(3):
        first.resume() if not first.has_ended else None
        second.resume()
    assert said == ["a0", "b0", "a1", "b1", "b2"]
    assert first.result == "a"
    assert first.has_ended
    assert not second.has_ended
    second.resume()
    assert second.result == "b"


def test_its_error_is_its_callers() -> None:
    coroutine: Coroutine[None] = Coroutine(lambda: [][0], "fails")
    with pytest.raises(IndexError):
        coroutine.resume()
    assert coroutine.has_ended


def test_cancelled_it_ends_with_its_clauses() -> None:
    ended: list[str] = []

    def run() -> None:
        try:
            try:
                coroutine.pause()
            except CancelledError:  # as code that catches everything
                coroutine.pause()
        finally:
            ended.append(threading.current_thread().name)

    coroutine: Coroutine[None] = Coroutine(run, "cancelled")
    coroutine.resume()
    coroutine.cancel()
    assert ended == ["cancelled"]
    coroutine.cancel()  # nothing left to do
    assert "cancelled" not in [thread.name for thread in threading.enumerate()]


def test_it_has_the_context_of_its_caller() -> None:
    token = number.set(3)
    coroutine = Coroutine(number.get, "context")
    number.reset(token)
    coroutine.resume()
    assert coroutine.result == 3


def test_an_interrupt_waits_until_it_has_paused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The main thread is interrupted where it waits for its turn."""

    class Interrupted:
        def __init__(self, lock: threading.Lock, acquire: Callable[[], bool]) -> None:
            self.lock, self.release, self.num_calls, self.wait = lock, lock.release, 0, acquire

        def acquire(self) -> bool:
            self.num_calls += 1
            if self.num_calls == 1:
                raise KeyboardInterrupt
            return self.wait()

    said: list[str] = []
    coroutine = counting(said, "a", 1)
    lock = coroutine._callers_turn
    monkeypatch.setattr(coroutine, "_callers_turn", Interrupted(lock, lock.acquire))
    with pytest.raises(KeyboardInterrupt):
        coroutine.resume()
    assert said == ["a0"]  # it has got to its pause
    coroutine.cancel()
    assert coroutine.has_ended


def test_it_is_freed_with_its_owner() -> None:
    class Owner:
        def __init__(self) -> None:
            self.coroutine: Coroutine[int] = Coroutine(lambda: id(self), "owned")

    owner = Owner()
    owner.coroutine.resume()
    gone = weakref.ref(owner)
    gc.disable()
    try:
        del owner
        assert gone() is None
    finally:
        gc.enable()
