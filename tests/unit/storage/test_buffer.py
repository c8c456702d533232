"""Buffers and leases: memory is reused only when no tensor refers to it."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Iterator

import pytest
import torch

from zero_infinity.errors import UsageError
from zero_infinity.storage.buffer_pool import BufferPool
from zero_infinity.storage.pages import PAGE_BYTES

PAGE = PAGE_BYTES


def held_after(pool: BufferPool) -> int:
    pool.collect()
    return pool.held_bytes


@pytest.fixture
def pool() -> Iterator[BufferPool]:
    pool = BufferPool(16 * PAGE)
    yield pool
    pool.close()


def test_releasing_twice_is_an_error_and_so_is_use_after_it(pool: BufferPool) -> None:
    buffer = pool.take(1)
    buffer.label = "wte"
    buffer.release()
    for use in (buffer.release, buffer.tensor, lambda: buffer.view):
        with pytest.raises(UsageError, match="'wte' was released before"):
            use()
    assert pool.held_bytes == 0


def test_a_buffer_is_used_again_only_when_its_last_view_has_died(pool: BufferPool) -> None:
    buffer = pool.take(16 * PAGE)
    first, second = buffer.tensor(), buffer.tensor()
    assert first.data_ptr() == second.data_ptr() == buffer.address
    assert first.untyped_storage() is not second.untyped_storage()
    assert buffer.leases == 2
    view = first.view(torch.float32)[3:7]
    buffer.release()
    del first, second
    assert buffer.leases == 1
    assert held_after(pool) == 16 * PAGE
    assert pool.try_take(PAGE) is None
    del view
    assert buffer.leases == 0
    assert pool.try_take(16 * PAGE) is not None  # it collects by itself


def test_leases_may_die_before_the_release(pool: BufferPool) -> None:
    buffer = pool.take(PAGE)
    for _ in range(3):
        buffer.tensor()
    assert buffer.leases == 0
    assert held_after(pool) == PAGE
    buffer.release()
    assert pool.held_bytes == 0


def test_autograd_alone_holds_a_lease(pool: BufferPool) -> None:
    buffer = pool.take(4 * 64)
    values = buffer.tensor().view(torch.float32).view(8, 8)
    values.copy_(torch.arange(64.0).view(8, 8))
    x = torch.ones(4, 8, requires_grad=True)
    y = (x * values[2:6]).sum()  # mul saves the view
    buffer.release()
    del values
    assert buffer.leases == 1  # only C++ knows of it now
    assert held_after(pool) == PAGE
    y.backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.arange(16.0, 48.0).view(4, 8))
    del y
    assert held_after(pool) == 0


def test_a_parameter_over_a_view_holds_a_lease_until_its_data_is_swapped(pool: BufferPool) -> None:
    buffer = pool.take(4 * 64)
    linear = torch.nn.Linear(8, 8, bias=False)
    linear.weight.data = buffer.tensor().view(torch.float32).view(8, 8)
    with torch.no_grad():
        linear.weight.fill_(2.0)
    x = torch.ones(1, 8, requires_grad=True)
    y = linear(x)
    buffer.release()
    linear.weight.data = torch.full((), float("nan")).expand(8, 8)
    assert held_after(pool) == PAGE  # addmm saved a view
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[16.0] * 8]
    del y
    assert held_after(pool) == 0


def test_a_deep_copy_is_no_lease(pool: BufferPool) -> None:
    buffer = pool.take(64)
    original = buffer.tensor()
    copied = copy.deepcopy(original)
    assert (buffer.leases, copied.data_ptr() != original.data_ptr()) == (1, True)


def test_leases_in_a_cycle_die_with_the_garbage_collector(pool: BufferPool) -> None:
    buffer = pool.take(64)
    cycle: list[object] = [buffer.tensor()]
    cycle.append(cycle)
    buffer.release()
    del cycle
    gc.collect()
    assert held_after(pool) == 0


def test_a_blocked_take_sees_a_lease_die_in_another_thread(pool: BufferPool) -> None:
    buffer = pool.take(16 * PAGE)
    leases = [buffer.tensor()]
    buffer.release()
    timer = threading.Timer(0.05, leases.clear)
    timer.start()
    assert pool.take(PAGE).num_bytes == PAGE
    timer.join()


def test_leases_that_die_inside_the_lock_do_no_harm(pool: BufferPool) -> None:
    buffer = pool.take(PAGE)
    lease = buffer.tensor()
    buffer.release()
    with pool._lock:
        del lease
    assert held_after(pool) == 0
