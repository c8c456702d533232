"""The test device itself: it computes what the CPU computes, later, and shows what it is made to show."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import signal
import time

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


@pytest.fixture
def slow() -> object:
    """Each kernel and copy takes 20 ms: what does not wait is seen."""
    EXTENSION.set_delays(probability=1.0, max_seconds=0.0, kernel_seconds=0.02, bytes_per_second=50e6)
    yield
    torch.accelerator.synchronize(DEVICE)
    EXTENSION.set_delays(probability=0.1, max_seconds=2e-4)


def test_kernels_compute_what_the_cpu_computes() -> None:
    a, b = torch.randn(17, 33), torch.randn(33, 9)
    assert torch.equal((a.to(DEVICE) @ b.to(DEVICE)).cpu(), a @ b)


def test_a_kernel_returns_before_it_has_run(slow: object) -> None:
    x = torch.ones(8, device=DEVICE)
    torch.accelerator.synchronize(DEVICE)
    start = time.perf_counter()
    for _ in range(5):
        x = x + 1
    launched = time.perf_counter() - start
    assert x.cpu().tolist() == [6.0] * 8
    assert time.perf_counter() - start >= 0.1 > launched


def test_the_host_cannot_touch_device_memory() -> None:
    x = torch.ones(8, device=DEVICE)
    child = os.fork()
    if child == 0:
        faulthandler.disable()  # the signal is expected
        ctypes.string_at(x.data_ptr(), 4)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGSEGV


def test_a_stream_that_does_not_wait_reads_too_early(slow: object) -> None:
    other = torch.Stream(DEVICE)
    x = torch.zeros(8, device=DEVICE)
    torch.accelerator.synchronize(DEVICE)
    x.add_(1)
    with other:
        early = x.clone()
    torch.accelerator.synchronize(DEVICE)
    assert early.cpu().tolist() == [0.0] * 8


def test_a_stream_that_waits_for_an_event_does_not(slow: object) -> None:
    other = torch.Stream(DEVICE)
    x = torch.zeros(8, device=DEVICE)
    x.add_(1)
    event = torch.accelerator.current_stream(DEVICE).record_event()
    with other:
        other.wait_event(event)
        late = x.clone()
    torch.accelerator.synchronize(DEVICE)
    assert late.cpu().tolist() == [1.0] * 8


@pytest.mark.parametrize("recorded", [True, False])
def test_freed_memory_is_poisoned_for_a_stream_that_nobody_recorded(slow: object, recorded: bool) -> None:
    other = torch.Stream(DEVICE)
    x = torch.full((8,), 3.0, device=DEVICE)
    torch.accelerator.synchronize(DEVICE)
    with other:
        y = torch.zeros(8, device=DEVICE)
        for _ in range(3):
            y.add_(1)  # keeps the stream busy
        y.copy_(x)
    if recorded:
        x.record_stream(other)
    del x
    gc.collect()
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


def test_a_download_that_is_not_waited_for_shows_poison(slow: object) -> None:
    x = torch.ones(1024, device=DEVICE)
    here = torch.zeros(1024, pin_memory=True)
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
