from __future__ import annotations

from functools import partial

import pytest

from zero_infinity.checkpoint.io_thread_pool import IOThreadPool, ProgressMeter
from zero_infinity.policy.alignment import ALIGNMENT
from zero_infinity.storage.pages import address_of


@pytest.mark.parametrize("num_bytes", [0, 1 << 16, 1 << 20, 64 << 20])
def test_buffers_are_aligned_and_together_within_the_memory(num_bytes: int) -> None:
    rooms: dict[int, int] = {}

    def job(room: memoryview) -> None:
        rooms[address_of(room)] = len(room)

    with IOThreadPool(num_bytes) as pool:
        pool.run([job] * 200)
        assert 0 < pool.room_bytes <= min(rooms.values()) - 2 * ALIGNMENT
    assert sum(rooms.values()) <= max(num_bytes, 4 * ALIGNMENT)
    assert not any(address % ALIGNMENT for address in rooms)


def test_after_an_error_no_job_is_started() -> None:
    done: list[int] = []

    def job(number: int, room: memoryview) -> None:
        if number == 3:
            raise ValueError("third")
        done.append(number)

    with IOThreadPool(0) as pool, pytest.raises(ValueError, match="third"):
        pool.run(partial(job, number) for number in range(10))
    assert done == [0, 1, 2]


def test_bytes_are_added_up_to_the_total() -> None:
    seen: list[tuple[int, int]] = []
    meter = ProgressMeter(lambda done, total: seen.append((done, total)), 10)
    for _ in range(3):
        meter.add(4)
    assert seen == [(4, 10), (8, 10), (10, 10)]
    ProgressMeter(None).add(3)
