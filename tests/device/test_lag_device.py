"""The test device itself: it computes what the CPU computes, later, and shows what it is made to show."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from support.device import DEVICE, EXTENSION, WHY_NOT

if EXTENSION is None:
    pytest.skip(str(WHY_NOT), allow_module_level=True)
MEBIBYTE = 1 << 20


@pytest.fixture(autouse=True)
def _counts() -> None:
    torch.accelerator.synchronize(DEVICE)
    EXTENSION.reset_counts(DEVICE.index)


def counts() -> dict[str, int]:
    found: dict[str, int] = EXTENSION.counts(DEVICE.index)
    return found


@contextmanager
def held_back(stream: torch.Stream) -> Iterator[None]:
    """What is launched on the stream inside runs when the context ends."""
    gate = EXTENSION.close_gate(stream.device.index, stream.stream_id)
    try:
        yield
    finally:
        gate.open()


def computing() -> torch.Stream:
    return torch.accelerator.current_stream(DEVICE)


def test_kernels_compute_what_the_cpu_computes() -> None:
    a, b = torch.randn(17, 33), torch.randn(33, 9)
    assert torch.equal((a.to(DEVICE) @ b.to(DEVICE)).cpu(), a @ b)


def test_a_kernel_returns_before_it_has_run() -> None:
    x = torch.ones(8, device=DEVICE)
    with held_back(computing()):
        for _ in range(5):
            x = x + 1
        event = computing().record_event()
        assert not event.query()
    assert x.cpu().tolist() == [6.0] * 8
    assert event.query()


def test_the_host_cannot_touch_device_memory() -> None:
    x = torch.ones(8, device=DEVICE)
    child = os.fork()
    if child == 0:
        faulthandler.disable()  # the signal is expected
        ctypes.string_at(x.data_ptr(), 4)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGSEGV


def test_a_stream_that_does_not_wait_reads_too_early() -> None:
    other = torch.Stream(DEVICE)
    x = torch.zeros(8, device=DEVICE)
    torch.accelerator.synchronize(DEVICE)
    with held_back(computing()):
        x.add_(1)
        with other:
            early = x.clone()
        other.synchronize()
    torch.accelerator.synchronize(DEVICE)
    assert early.cpu().tolist() == [0.0] * 8


def test_a_stream_that_waits_for_an_event_does_not() -> None:
    other = torch.Stream(DEVICE)
    x = torch.zeros(8, device=DEVICE)
    with held_back(computing()):
        x.add_(1)
        event = computing().record_event()
        with other:
            other.wait_event(event)
            late = x.clone()
    torch.accelerator.synchronize(DEVICE)
    assert late.cpu().tolist() == [1.0] * 8


@pytest.mark.parametrize("recorded", [True, False])
def test_freed_memory_is_poisoned_for_a_stream_that_nobody_recorded(recorded: bool) -> None:
    other = torch.Stream(DEVICE)
    x = torch.full((8,), 3.0, device=DEVICE)
    y = torch.zeros(8, device=DEVICE)
    torch.accelerator.synchronize(DEVICE)
    with held_back(other):
        with other:
            y.copy_(x)
        if recorded:
            x.record_stream(other)
        del x
        gc.collect()
        computing().synchronize()
    torch.accelerator.synchronize(DEVICE)
    assert y.isnan().all().item() is not recorded


def test_freed_memory_is_reused_at_once() -> None:
    x = torch.empty(MEBIBYTE, device=DEVICE)
    address = x.data_ptr()
    del x
    assert torch.empty(MEBIBYTE, device=DEVICE).data_ptr() == address


def test_an_asynchronous_copy_needs_pinned_memory() -> None:
    target = torch.empty(1024, device=DEVICE)
    target.copy_(torch.ones(1024), non_blocking=True)
    assert counts()["unpinned"] == 1
    target.copy_(torch.ones(1024).pin_memory(), non_blocking=True)
    assert counts()["unpinned"] == 1
    assert counts()["uploaded"] == 8192


def test_a_download_that_is_not_waited_for_shows_poison() -> None:
    x = torch.ones(1024, device=DEVICE)
    here = torch.zeros(1024, pin_memory=True)
    with held_back(computing()):
        here.copy_(x, non_blocking=True)
        assert here.isnan().all()
    torch.accelerator.synchronize(DEVICE)
    assert here.eq(1).all()
    assert counts()["downloaded"] == 4096


def test_memory_is_limited() -> None:
    torch.accelerator.memory.empty_cache()
    used = torch.accelerator.memory_allocated(DEVICE)
    EXTENSION.set_limit(DEVICE.index, used + 2 * MEBIBYTE)
    try:
        with pytest.raises(torch.OutOfMemoryError, match="lag out of memory"):
            torch.empty(3 * MEBIBYTE, dtype=torch.uint8, device=DEVICE)
        torch.empty(MEBIBYTE, dtype=torch.uint8, device=DEVICE)
    finally:
        EXTENSION.set_limit(DEVICE.index, 4 << 30)


def test_tensors_of_two_devices_do_not_mix() -> None:
    with pytest.raises(RuntimeError, match="lag:0 and lag:1"):
        torch.ones(3, device="lag:0") + torch.ones(3, device="lag:1")


def test_random_numbers_depend_on_the_seed_and_not_on_time() -> None:
    torch.manual_seed(3)
    first = torch.rand(100, device=DEVICE)
    torch.manual_seed(3)
    assert torch.equal(first, torch.rand(100, device=DEVICE))
    assert not torch.equal(first, torch.rand(100, device=DEVICE))


def test_an_error_of_a_kernel_is_raised_by_the_next_wait() -> None:
    table, words = torch.ones(4, 2, device=DEVICE), torch.tensor([9]).to(DEVICE)
    torch.nn.functional.embedding(words, table)
    with pytest.raises(RuntimeError, match="a kernel of the test device failed"):
        torch.accelerator.synchronize(DEVICE)


def test_backward_runs_on_a_thread_of_the_device() -> None:
    import threading

    x = torch.ones(3, device=DEVICE, requires_grad=True)
    threads: list[int] = []
    x.register_hook(lambda _: threads.append(threading.get_ident()))
    (x * 2).sum().backward()
    assert [thread != threading.get_ident() for thread in threads] == [True]
