"""The queue for room: order of grants, cancellation, delivery of callbacks."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from support.patience import SECONDS

from zero_infinity.storage.buffer import Buffer
from zero_infinity.storage.buffer_pool import BufferPool
from zero_infinity.storage.pages import PAGE_BYTES

PAGE = PAGE_BYTES


@pytest.fixture
def pool() -> Iterator[BufferPool]:
    pool = BufferPool(16 * PAGE)
    yield pool
    pool.close()


def test_a_request_is_granted_before_it_returns_when_there_is_room(pool: BufferPool) -> None:
    granted: list[tuple[int, Buffer]] = []
    request = pool.request(PAGE, lambda buffer: granted.append((threading.get_ident(), buffer)))
    assert [(thread, buffer.num_bytes) for thread, buffer in granted] == [(threading.get_ident(), PAGE)]
    assert not request.cancel()


def test_small_requests_do_not_overtake_a_large_one(pool: BufferPool) -> None:
    first, second = pool.take(8 * PAGE), pool.take(6 * PAGE)
    order: list[str] = []
    for name, num_pages in (("large", 10), ("small", 1), ("other", 1)):
        pool.request(num_pages * PAGE, lambda _, name=name: order.append(name))  # type: ignore[misc]
    assert order == []  # two pages are free, but the large one was first
    assert pool.num_waiting == 3
    assert pool.try_take(PAGE) is None
    assert not pool.try_charge(1)
    second.release()
    assert order == []
    first.release()
    assert order == ["large", "small", "other"]


def test_cancelling_the_head_lets_the_others_go_on(pool: BufferPool) -> None:
    pool.take(8 * PAGE)
    order: list[str] = []
    large = pool.request(10 * PAGE, lambda _: order.append("large"))
    small = pool.request(PAGE, lambda _: order.append("small"))
    assert large.cancel()
    assert not large.cancel()
    assert order == ["small"]
    assert not small.cancel()


def test_blocking_take_and_charge_wait_in_the_same_queue(pool: BufferPool) -> None:
    held = pool.take(16 * PAGE)
    order: list[str] = []

    def charge() -> None:
        pool.charge(12 * PAGE)
        order.append("charge")
        pool.discharge(12 * PAGE)

    def take() -> None:
        buffer = pool.take(8 * PAGE)
        order.append("take")
        buffer.release()

    threads = []
    for count, target in enumerate((charge, take), start=1):
        threads.append(threading.Thread(target=target))
        threads[-1].start()
        while pool.num_waiting < count:
            time.sleep(0.001)
    held.release()
    for thread in threads:
        thread.join(SECONDS)
    assert order == ["charge", "take"]
    assert pool.held_bytes == 0


def test_callbacks_run_without_the_lock_and_a_long_queue_is_no_deep_stack(pool: BufferPool) -> None:
    held = pool.take(16 * PAGE)
    served: list[int] = []

    def on_grant(buffer: Buffer) -> None:
        served.append(len(served))
        buffer.release()  # which serves the next one

    for _ in range(3000):
        pool.request(16 * PAGE, on_grant)
    held.release()
    assert len(served) == 3000
    assert (pool.held_bytes, pool.num_waiting) == (0, 0)


def test_a_callback_may_request_and_take(pool: BufferPool) -> None:
    log: list[str] = []

    def outer(buffer: Buffer) -> None:
        pool.request(PAGE, lambda _: log.append("inner"))
        log.append("after inner")
        pool.take(PAGE).release()
        buffer.release()

    held = pool.take(16 * PAGE)
    pool.request(8 * PAGE, outer)
    held.release()
    assert log == ["inner", "after inner"]
    assert pool.held_bytes == PAGE


def test_a_failing_callback_raises_where_it_ran_and_the_others_still_run(pool: BufferPool) -> None:
    def fail(buffer: Buffer) -> None:
        buffer.release()
        raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        pool.request(PAGE, fail)
    held = pool.take(16 * PAGE)
    granted: list[Buffer] = []
    pool.request(4 * PAGE, fail)
    pool.request(4 * PAGE, granted.append)
    with pytest.raises(ValueError, match="boom"):
        held.release()
    assert [b.num_bytes for b in granted] == [4 * PAGE]
    held = pool.take(12 * PAGE)
    pool.request(4 * PAGE, fail)
    pool.request(5 * PAGE, fail)
    with pytest.raises(ExceptionGroup, match="several callbacks failed"):
        held.release()
    assert (pool.held_bytes, pool.num_waiting) == (4 * PAGE, 0)


@pytest.mark.parametrize("call", ["take", "charge"])
def test_an_interrupted_take_or_charge_leaves_no_trace(
    pool: BufferPool, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    pool.take(10 * PAGE)

    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pool, "collect", interrupt)
    with pytest.raises(KeyboardInterrupt):
        getattr(pool, call)(8 * PAGE)
    assert (pool.num_waiting, pool.held_bytes) == (0, 10 * PAGE)
    monkeypatch.undo()
    pool.take(6 * PAGE)
